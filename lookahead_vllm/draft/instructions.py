"""Instructions of the processor for which numba has no function.

Atomic operations on the elements of int64 arrays, for compiled threads that share arrays, are also
fences: what a thread wrote before one, another thread sees after it has read the element.
"""

import platform
from functools import partial
from typing import Any

from llvmlite import ir
from numba.core import cgutils, types
from numba.extending import intrinsic
from numba.np.arrayobj import make_array

from lookahead_vllm.draft.jit import kernel

NUM_LANES = 16
"""Elements of a vector of int32 or float32: 64 bytes."""

_ORDER = "seq_cst"
_PAUSES: dict[str, tuple[str, list[int]]] = {
    "x86_64": ("llvm.x86.sse2.pause", []),
    "aarch64": ("llvm.aarch64.isb", [15]),
}
"""By machine: an instruction that takes a while, and its operands."""
_NUM_PAUSES = 200  # each takes 10 to 140 cycles, by processor


@intrinsic
def load_atomic(typing: Any, array: Any, index: Any) -> Any:
    """`array[index]`, int64."""

    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.load_atomic(_pointer(context, builder, signature, args), _ORDER, 8)

    return types.int64(array, index), code


@intrinsic
def store_atomic(typing: Any, array: Any, index: Any, value: Any) -> Any:
    """`array[index] = value`."""

    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        builder.store_atomic(args[2], _pointer(context, builder, signature, args), _ORDER, 8)
        return context.get_dummy_value()

    return types.void(array, index, types.int64), code


@intrinsic
def add_atomic(typing: Any, array: Any, index: Any, value: Any) -> Any:
    """`array[index] += value`; returns the sum, int64."""

    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        pointer = _pointer(context, builder, signature, args)
        return builder.add(builder.atomic_rmw("add", pointer, args[2], _ORDER), args[2])

    return types.int64(array, index, types.int64), code


@intrinsic
def replace_atomic(typing: Any, array: Any, index: Any, expected: Any, value: Any) -> Any:
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
        if platform.machine() in _PAUSES:
            name, operands = _PAUSES[platform.machine()]
            values = [ir.Constant(ir.IntType(32), operand) for operand in operands]
            kind = ir.FunctionType(ir.VoidType(), [value.type for value in values])
            builder.call(builder.module.declare_intrinsic(name, fnty=kind), values)
        return context.get_dummy_value()

    return types.void(), code


@partial(kernel, nogil=True)
def pause_unlocked() -> None:
    """Pause for some microseconds, in which other threads may take the interpreter's lock.

    `time.sleep(0)` takes 50 to 85 µs, the slack of Linux's timers, before Python 3.14.
    """
    for _ in range(_NUM_PAUSES):
        pause()


@intrinsic
def prefetch(typing: Any, array: Any, index: Any) -> Any:
    """Fetch the cache line of `array[index]`, without waiting for it."""

    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        pointer = _pointer(context, builder, signature, args)
        pointer = builder.bitcast(pointer, ir.IntType(8).as_pointer())
        kind = ir.FunctionType(ir.VoidType(), [pointer.type] + [ir.IntType(32)] * 3)
        function = builder.module.declare_intrinsic("llvm.prefetch", [pointer.type], kind)
        read, keep, data = (ir.Constant(ir.IntType(32), value) for value in (0, 3, 1))
        builder.call(function, [pointer, read, keep, data])
        return context.get_dummy_value()

    return types.void(array, index), code


@intrinsic
def lowest_bit(typing: Any, bits: Any) -> Any:
    """The number of the lowest bit of an int64 that is set; undefined for 0."""

    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.cttz(args[0], ir.Constant(ir.IntType(1), 1))

    return types.int64(types.int64), code


@intrinsic
def equal_lanes(typing: Any, array: Any, value: Any) -> Any:
    """Which of the first NUM_LANES elements of an int32 array are `value`, as bits of an int64."""

    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        lanes = ir.VectorType(ir.IntType(32), NUM_LANES)
        data = make_array(signature.args[0])(context, builder, args[0]).data
        vector = builder.load(builder.bitcast(data, lanes.as_pointer()), align=4)
        first = ir.Constant(ir.IntType(32), 0)
        one = builder.insert_element(ir.Constant(lanes, ir.Undefined), args[1], first)
        mask = ir.Constant(lanes, [0] * NUM_LANES)
        splat = builder.shuffle_vector(one, one, mask)
        equal = builder.icmp_signed("==", vector, splat)
        return builder.zext(builder.bitcast(equal, ir.IntType(NUM_LANES)), ir.IntType(64))

    return types.int64(array, types.int32), code


def _pointer(context: Any, builder: Any, signature: Any, args: Any) -> Any:
    kind = signature.args[0]
    array = make_array(kind)(context, builder, args[0])
    return cgutils.get_item_pointer(context, builder, kind, array, [args[1]])
