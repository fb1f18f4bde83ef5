"""The references of all requests that an API server is answering, and their limit."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable

from lookahead_vllm.engine.request_options import RequestError

SECONDS_BETWEEN_COLLECTIONS = 1.0
"""A garbage collection takes milliseconds, so clients must not be able to cause one at will."""


class LiveReferences:
    """Limits the reference tokens of all live requests: inserting them takes time in every step.

    Parameters
    ----------
    max_tokens
        The limit for all live requests together. References also fill the trie.
    """

    def __init__(self, max_tokens: int) -> None:
        self._max_tokens = max_tokens
        self._charged: dict[object, int] = {}
        """Tokens of each live request. A garbage collection may release one at any time; an entry
        is added or removed as a whole. Not by request id, which several requests may share."""
        self._next_collection = 0.0

    @property
    def tokens(self) -> int:
        """The reference tokens of all live requests."""
        return sum(self._charged.values())

    def charge(self, tokens: int) -> Callable[[], None]:
        """Count the references of one request.

        Returns
        -------
        callable
            Call it when the request has ended; further calls do nothing.

        Raises
        ------
        RequestError
            The limit would be exceeded.
        """
        if tokens > self._max_tokens:
            raise RequestError(
                f"lookahead's references of {tokens} tokens were given, those of n answers "
                f"together, but this server allows {self._max_tokens} for all requests at a time; "
                "write fewer"
            )
        if self.tokens + tokens > self._max_tokens:
            self._collect_garbage()
        if self.tokens + tokens > self._max_tokens:
            raise RequestError(
                f"lookahead's references of {tokens} tokens were given, but this server allows "
                f"{self._max_tokens} for all requests at a time, of which too few are free; send "
                "the request again later, or without them"
            )
        request = object()
        self._charged[request] = tokens

        def release() -> None:
            self._charged.pop(request, None)

        return release

    def _collect_garbage(self) -> None:
        """Release abandoned answers that are part of a reference cycle."""
        if (now := time.monotonic()) >= self._next_collection:
            gc.collect()
            self._next_collection = now + SECONDS_BETWEEN_COLLECTIONS
