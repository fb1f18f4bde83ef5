"""Lossless speculative decoding for vLLM that needs no draft model and no training."""

import importlib
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import lookahead_vllm.machine  # noqa: F401  reads the cores before vLLM binds threads to them
from lookahead_vllm.draft.proposers.registry import CLASS_PATHS

try:
    __version__ = version("lookahead-vllm")
except PackageNotFoundError:  # a source tree on sys.path that is not installed
    __version__ = "0.0.0"

__all__ = ["HybridProposer", "JacobiWindowProposer", "NGramTrieProposer", "__version__"]


def __getattr__(name: str) -> Any:
    # Imported on first use: vLLM loads this package in every process, and proposers import numba.
    for path in CLASS_PATHS.values():
        module, _, proposer = path.rpartition(".")
        if name == proposer:
            return getattr(importlib.import_module(module), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
