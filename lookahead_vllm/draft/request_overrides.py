"""Options of a single request that differ from the server's.

The API server imports this module, so it must not load numba.
"""

from __future__ import annotations

from typing import NamedTuple


class RequestOverrides(NamedTuple):
    """The options that one request overrides; None keeps the server's value.

    `proposer` is "ngram_trie", "jacobi_window" or "hybrid"; it requires the server's "hybrid".
    """

    proposer: str | None = None
    window_size: int | None = None
    ngram_size: int | None = None
    guess_set_size: int | None = None
    pool_from_prompt: bool | None = None


NO_OVERRIDES = RequestOverrides()
