"""CUDA graphs on a CPU: what is launched during a capture is recorded, and a replay repeats it.

As in a CUDA graph, a replay reads the tensors that the capture saw, at their addresses, and keeps
its Python values. What runs outside of `launch` is not repeated.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.v1.worker.gpu import cudagraph_utils

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
    function(*args, **kwargs)


@contextmanager
def _capturing(graph: RecordedGraph, *args: Any, **kwargs: Any) -> Iterator[None]:
    _captured.append(graph)
    try:
        yield
    finally:
        _captured.pop()


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
    patch.setattr(torch.cuda, "CUDAGraph", RecordedGraph)
    patch.setattr(torch.cuda, "graph", _capturing)
