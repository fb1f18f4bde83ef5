"""Lossless speculative decoding for vLLM that needs no draft model and no training."""

from importlib.metadata import PackageNotFoundError, version

import lookahead_vllm.machine  # noqa: F401  reads the cores before vLLM binds threads to them

try:
    __version__ = version("lookahead-vllm")
except PackageNotFoundError:  # a source tree on sys.path that is not installed
    __version__ = "0.0.0"
