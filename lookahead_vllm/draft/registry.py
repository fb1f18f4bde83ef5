"""Who can be named in the option `proposer`."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lookahead_vllm.draft.proposer import Proposer

PROPOSERS = {"ngram_trie": "lookahead_vllm.draft.proposer.NGramTrieProposer"}
"""Dotted paths of proposer classes, imported only when one is used: their kernels need numba."""


def proposer_class(name: str) -> type[Proposer]:
    """The class behind a name of `PROPOSERS`."""
    module, _, cls = PROPOSERS[name].rpartition(".")
    return getattr(importlib.import_module(module), cls)
