"""The proposers that the option `proposer` can name."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lookahead_vllm.draft.options import LookaheadOptions
    from lookahead_vllm.draft.proposer import Proposer

PROPOSERS = {
    "ngram_trie": "lookahead_vllm.draft.trie.proposer.NGramTrieProposer",
    "jacobi_window": "lookahead_vllm.draft.trie.jacobi_window.JacobiWindowProposer",
    "hybrid": "lookahead_vllm.draft.trie.hybrid.HybridProposer",
}
"""Dotted paths of the proposer classes. A class is imported when it is used, as it needs numba."""

HAVE_WINDOW = {"jacobi_window", "hybrid"}
"""Proposers with a lookahead branch, which need the model's choices."""


def make_proposer(options: LookaheadOptions) -> Proposer:
    """Make a proposer of the class named by `options.proposer`."""
    module, _, name = PROPOSERS[options.proposer].rpartition(".")
    cls: Callable[[LookaheadOptions], Any] = getattr(importlib.import_module(module), name)
    return cls(options)
