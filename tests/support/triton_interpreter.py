"""Triton's interpreter for vLLM's kernels, on a machine without a GPU."""

import os
from types import SimpleNamespace
from typing import Any


def enable() -> None:
    """Interpret kernels in this process. Call it before vLLM is imported."""
    os.environ["TRITON_INTERPRET"] = "1"
    os.environ["TORCH_COMPILE_DISABLE"] = "1"  # it needs Triton's compiler
    from triton.backends import backends

    backends["cpu"] = SimpleNamespace(driver=SimpleNamespace(is_active=lambda: True), compiler=None)
    from triton.runtime import interpreter

    builder = interpreter.interpreter_builder
    builder.options = interpreter.InterpreterOptions(sanitize_overflow=False)  # twice as fast
    store = builder.create_masked_store

    def store_where(ptrs: Any, value: Any, mask: Any, *policies: Any) -> Any:
        mask.data = mask.data.astype(bool)  # vLLM passes integer masks
        return store(ptrs, value, mask, *policies)

    builder.create_masked_store = store_where
    from vllm.v1.sample.ops import topk_topp_sampler

    topk_topp_sampler.HAS_TRITON = False  # the interpreter cannot run a loop of that kernel
