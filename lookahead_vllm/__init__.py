"""Lossless speculative decoding for vLLM that needs no draft model and no training."""

from importlib.metadata import PackageNotFoundError, version
from typing import Any

try:
    __version__ = version("lookahead-vllm")
except PackageNotFoundError:  # a source tree on sys.path, not installed
    __version__ = "0.0.0"

__all__ = ["NGramTrieProposer", "__version__"]


def __getattr__(name: str) -> Any:
    # vLLM loads this package in every process; numba only comes with the proposer.
    if name == "NGramTrieProposer":
        from lookahead_vllm.draft.proposer import NGramTrieProposer

        return NGramTrieProposer
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
