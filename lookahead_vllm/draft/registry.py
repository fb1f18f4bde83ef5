"""Who can be named in the option `proposer`."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lookahead_vllm.draft.options import LookaheadOptions
    from lookahead_vllm.draft.proposer import Proposer

PROPOSERS = {
    "ngram_trie": "lookahead_vllm.draft.trie.proposer.NGramTrieProposer",
    "jacobi_window": "lookahead_vllm.draft.window.proposer.JacobiWindowProposer",
    "hybrid": "lookahead_vllm.draft.hybrid.HybridProposer",
}
"""Dotted paths of proposer classes, imported only when one is used: their kernels need numba."""

HAVE_WINDOW = {"jacobi_window", "hybrid"}
"""Those of them that have a lookahead branch, and so need a model's choices."""

KEEP_CACHE = {"ngram_trie", "hybrid"}
"""Those of them that have `snapshot` and `restore`, see `cache_keeper.Cacheable`."""


def make_proposer(options: LookaheadOptions) -> Proposer:
    """A proposer of the class that `options.proposer` names."""
    module, _, name = PROPOSERS[options.proposer].rpartition(".")
    cls: Callable[[LookaheadOptions], Any] = getattr(importlib.import_module(module), name)
    return cls(options)
