"""The classes of the proposers that the option `proposer` can name."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from lookahead_vllm.machine import memory_bytes

if TYPE_CHECKING:
    from lookahead_vllm.draft.proposers.proposer import Proposer
    from lookahead_vllm.options.server import LookaheadOptions

CLASS_PATHS = {
    "ngram_trie": "lookahead_vllm.draft.proposers.ngram_trie.NGramTrieProposer",
    "jacobi_window": "lookahead_vllm.draft.proposers.jacobi_window.JacobiWindowProposer",
    "hybrid": "lookahead_vllm.draft.proposers.hybrid.HybridProposer",
}
"""Dotted paths of the proposer classes. A class is imported when it is used, as it needs numba."""

NODES_PER_TOKEN, BYTES_PER_NODE = 20, 16
"""Of texts: a token has up to 8 n-grams, and a table that is half full loses few of them."""
MEMORY_SHARE = 32
"""The texts take at most this part of the machine's memory."""


def make_proposer(options: LookaheadOptions, num_tokens: int = 0) -> Proposer:
    """Make a proposer of the class named by `options.proposer`.

    It has a table for the n-grams of texts of `num_tokens` in all, within a share of the machine's
    memory. If 0, texts share the table of answers.
    """
    module, _, name = CLASS_PATHS[options.proposer].rpartition(".")
    cls: Callable[[LookaheadOptions, int], Any] = getattr(importlib.import_module(module), name)
    most = memory_bytes() // MEMORY_SHARE // BYTES_PER_NODE
    return cls(options, min(num_tokens * NODES_PER_TOKEN, most, 2**30 - 1))
