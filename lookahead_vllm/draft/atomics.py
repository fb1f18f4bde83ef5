"""Atomic operations on the elements of int64 arrays, for compiled threads that share arrays.

Every operation is also a fence: what a thread wrote before it, another one sees after it has read
the element.
"""

import platform
from typing import Any

from llvmlite import ir
from numba.core import cgutils, types
from numba.extending import intrinsic
from numba.np.arrayobj import make_array

_ORDER = "seq_cst"
_HAS_PAUSE = platform.machine() == "x86_64"


@intrinsic
def load(typing: Any, array: Any, index: Any) -> Any:
    """`array[index]`, int64."""

    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.load_atomic(_pointer(context, builder, signature, args), _ORDER, 8)

    return types.int64(array, index), code


@intrinsic
def store(typing: Any, array: Any, index: Any, value: Any) -> Any:
    """`array[index] = value`."""

    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        builder.store_atomic(args[2], _pointer(context, builder, signature, args), _ORDER, 8)
        return context.get_dummy_value()

    return types.void(array, index, types.int64), code


@intrinsic
def add(typing: Any, array: Any, index: Any, value: Any) -> Any:
    """`array[index] += value`; returns the sum, int64."""

    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        pointer = _pointer(context, builder, signature, args)
        return builder.add(builder.atomic_rmw("add", pointer, args[2], _ORDER), args[2])

    return types.int64(array, index, types.int64), code


@intrinsic
def replace(typing: Any, array: Any, index: Any, expected: Any, value: Any) -> Any:
    """Set `array[index]` to `value` if it is `expected`; returns whether it was, bool."""

    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        pointer = _pointer(context, builder, signature, args)
        result = builder.cmpxchg(pointer, args[2], args[3], _ORDER, _ORDER)
        return builder.extract_value(result, 1)

    return types.boolean(array, index, types.int64, types.int64), code


@intrinsic
def pause(typing: Any) -> Any:
    """Call this in a loop that waits: it leaves the core to its other hardware thread."""

    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        if _HAS_PAUSE:
            kind = ir.FunctionType(ir.VoidType(), [])
            builder.call(builder.module.declare_intrinsic("llvm.x86.sse2.pause", fnty=kind), [])
        return context.get_dummy_value()

    return types.void(), code


def _pointer(context: Any, builder: Any, signature: Any, args: Any) -> Any:
    kind = signature.args[0]
    array = make_array(kind)(context, builder, args[0])
    return cgutils.get_item_pointer(context, builder, kind, array, [args[1]])
