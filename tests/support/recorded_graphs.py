"""CUDA graphs on a CPU: what is launched during a capture is recorded, and a replay repeats it.

As in a CUDA graph, a replay reads and writes the tensors that the capture saw, at their addresses,
and keeps its Python values. What runs outside of `launch` and `recorded` is not repeated.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import (
    TorchDispatchMode,
    _disable_current_modes,
    _get_current_dispatch_mode,
)
from torch.utils._pytree import tree_leaves
from vllm.config import CompilationConfig, CompilationMode, CUDAGraphMode
from vllm.v1.worker.gpu import cudagraph_utils

from lookahead_vllm.engine.cpu_kernels.table import CPUKernel
from lookahead_vllm.verify.walk import cpu as walk

Call = tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]

_captured: list[RecordedGraph] = []
"""The graph that is being captured, if any."""


class RecordedGraph:
    """Stands in for `torch.cuda.CUDAGraph`."""

    def __init__(self) -> None:
        self.calls: list[Call] = []

    def replay(self) -> None:
        for function, args, kwargs in self.calls:
            function(*args, **kwargs)


def launch(function: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
    """Run a kernel, and record it if a graph is being captured."""
    if _captured:
        _captured[-1].calls.append((function, args, kwargs))
    with _disable_current_modes():
        function(*args, **kwargs)


def recorded(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function; in a capture, all operators of torch and kernels of ours in it are recorded."""

    def run(*args: Any, **kwargs: Any) -> Any:
        with _Operators() if _captured else nullcontext():
            return function(*args, **kwargs)

    return run


class _Operators(TorchDispatchMode):
    """Records the operators of torch. A replay writes their results where the first ones are."""

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        assert function not in _WAITING, f"{function} waits for the device: no graph can hold it"
        first = function(*args, **(kwargs or {}))
        _captured[-1].calls.append((_repeat, (first, function, args, kwargs or {}), {}))
        return first


_WAITING = (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.nonzero.default)


def _repeat(first: Any, function: Any, args: Any, kwargs: Any) -> None:
    for old, new in zip(tree_leaves(first), tree_leaves(function(*args, **kwargs)), strict=True):
        if isinstance(old, torch.Tensor) and old.data_ptr() != new.data_ptr():
            old.copy_(new)


def _as_launch(kernel: Callable[..., Any]) -> Callable[..., Any]:
    """A kernel, which is launched where operators are recorded."""

    def run(*args: Any, **kwargs: Any) -> None:
        if isinstance(_get_current_dispatch_mode(), _Operators):
            launch(kernel, *args, **kwargs)
        else:
            kernel(*args, **kwargs)

    return run


@contextmanager
def _capturing(graph: RecordedGraph, *args: Any, **kwargs: Any) -> Iterator[None]:
    _captured.append(graph)
    try:
        yield
    finally:
        _captured.pop()


def config_of(mode: CUDAGraphMode, sizes: list[int], max_num_seqs: int) -> Any:
    """The part of vLLM's config that its managers of CUDA graphs read."""
    compilation = CompilationConfig(
        mode=CompilationMode.VLLM_COMPILE,
        cudagraph_mode=mode,
        cudagraph_capture_sizes=sizes,
        max_cudagraph_capture_size=sizes[-1],
    )
    return SimpleNamespace(
        compilation_config=compilation,
        scheduler_config=SimpleNamespace(max_num_seqs=max_num_seqs),
        parallel_config=SimpleNamespace(tensor_parallel_size=1, data_parallel_size=1),
        speculative_config=None,
        cache_config=SimpleNamespace(use_kda_recoverssm=False),
    )


forward_context = SimpleNamespace(attn_metadata=None)
"""Stands in for vLLM's."""


@contextmanager
def _set_forward_context(attn_metadata: Any, *args: Any, **kwargs: Any) -> Iterator[None]:
    forward_context.attn_metadata = attn_metadata
    yield


def enable(patch: pytest.MonkeyPatch) -> None:
    """Let vLLM's managers of CUDA graphs work without CUDA."""
    group = SimpleNamespace(is_first_rank=True, is_last_rank=True)
    patch.setattr(cudagraph_utils, "get_pp_group", lambda: group)
    platform = SimpleNamespace(get_global_graph_pool=lambda: None)
    patch.setattr(cudagraph_utils, "current_platform", platform)
    offloader = SimpleNamespace(sync_prev_onload=lambda: None, join_after_forward=lambda: None)
    patch.setattr(cudagraph_utils, "get_offloader", lambda: offloader)
    patch.setattr(cudagraph_utils, "graph_capture", lambda **_: nullcontext())
    patch.setattr(cudagraph_utils, "capture_pool", lambda *_: nullcontext())
    patch.setattr(cudagraph_utils, "current_stream", lambda: None)
    patch.setattr(cudagraph_utils, "is_global_first_rank", lambda: False)
    patch.setattr(cudagraph_utils, "set_forward_context", _set_forward_context)
    patch.setattr(cudagraph_utils, "has_compiled_submodule", lambda model: True)
    patch.setattr(CPUKernel, "_launch", _as_launch(CPUKernel._launch))
    patch.setattr(walk, "walk_rows", _as_launch(walk.walk_rows))
    patch.setattr(torch.cuda, "CUDAGraph", RecordedGraph)
    patch.setattr(torch.cuda, "graph", _capturing)
