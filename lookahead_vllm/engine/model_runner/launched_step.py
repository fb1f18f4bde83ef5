"""A step on Model Runner V2 from its launch until its tokens are counted."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from lookahead_vllm.draft.jit import Int32s, Int64s
from lookahead_vllm.draft.progress import GONE, NO_CHAINS, PROPOSED, EmittedTokens
from lookahead_vllm.draft.proposer import Verified
from lookahead_vllm.draft.tree import UNKNOWN
from lookahead_vllm.engine.worker.draft_step import DraftStep
from lookahead_vllm.verify.acceptance import paths_of_tokens

if TYPE_CHECKING:
    from vllm.v1.worker.gpu.async_utils import AsyncOutput

    from lookahead_vllm.engine.model_runner.trained_drafter import Chains


SLEEP_SHARE = 0.8
"""The drafting rank works or sleeps for so much of the shortest of the last steps before it
polls."""
POLL_SECONDS = 0.01
"""After this time of polling, it waits as vLLM does."""


def _has_passed(event: Any) -> bool:
    """Whether the device has reached this event.

    On a CPU, vLLM's events have no `query`, and a step ends before it returns.
    """
    query = getattr(event, "query", None)
    return query is None or bool(query())


@dataclass
class LaunchedStep:
    """A step whose tokens have not been counted yet."""

    output: AsyncOutput
    rows: Int64s
    """int64 [r]: the progress of the output's requests; GONE once a request has ended, because
    its row and its id may be used again before the tokens come."""
    drafts: DraftStep
    verified: Verified | None
    launched: float
    chains: Chains | None = None
    """What a trained drafter proposes after its tokens."""
    proposed: Int32s | None = None
    """int32 [r, K]: what it proposed before them, if the host knew this before the launch."""

    @property
    def has_ended(self) -> bool:
        """Whether its tokens, and the chains after them, have reached the host."""
        chains = self.chains
        return _has_passed(self.output.copy_event) and (chains is None or _has_passed(chains.event))

    def wait(self) -> None:
        """Wait until it has ended."""
        self.output.copy_event.synchronize()
        if self.chains is not None:
            self.chains.event.synchronize()

    @property
    def emitted(self) -> EmittedTokens:
        """Its tokens, once they have arrived."""
        output = self.output
        tokens = np.ascontiguousarray(output.sampled_token_ids, np.int64)
        return EmittedTokens(
            self.rows,
            tokens,
            np.ascontiguousarray(output.num_sampled_tokens_np, np.int32),
            NO_CHAINS if self.chains is None else self.chains.by_request,
        )

    @cached_property
    def accepted_paths(self) -> Int32s:
        """The accepted nodes of its trees, as in `paths_of_tokens`."""
        rows = self.drafts.rows
        tokens = np.ascontiguousarray(self.output.sampled_token_ids[rows])
        counts = self.output.num_sampled_tokens_np[rows]
        return paths_of_tokens(self.drafts.forest, tokens, counts)

    def know(self, before: LaunchedStep) -> None:
        """Fill in the tokens of a step that was launched with the chains of the one `before`."""
        forest, chains = self.drafts.forest, before.chains
        if chains is None or not forest.num_nodes or forest.tokens[0] != UNKNOWN:
            return
        row_of = {row: i for i, row in enumerate(before.rows.tolist())}
        rows = self.rows[self.drafts.rows]
        places = np.array([row_of.get(row, -1) for row in rows.tolist()])
        tokens = chains.by_request[places[forest.owners], forest.places, 0, PROPOSED]
        forest.tokens[:] = np.where(rows[forest.owners] == GONE, UNKNOWN, tokens)

    def drop(self, req_id: str, row: int) -> None:
        """A request has ended: its tokens do not count, and no choices are learned."""
        self.rows[self.rows == row] = GONE
        if self.verified is not None and req_id in self.verified.request_ids:
            self.verified = None

    def mark_accepted(self) -> None:
        """Fill in what was accepted of what was verified."""
        if self.verified is not None and self.drafts.forest.num_nodes:
            self.drafts.mark_accepted(self.verified, self.accepted_paths)


class Waiter:
    """Waits for the tokens of steps.

    vLLM's event puts the thread to sleep until the driver wakes it, 20 to 60 µs late, while the
    device has nothing to do. So work or sleep until shortly before they should come, and poll then.

    Parameters
    ----------
    work
        Works for at most so many seconds, if there is something to do.
    """

    def __init__(self, work: Callable[[float], None]) -> None:
        self._work = work
        self._durations: deque[float] = deque(maxlen=8)
        """Seconds from the launch of the last steps to their tokens."""

    def wait(self, step: LaunchedStep) -> None:
        """Wait for the tokens of a step."""
        if step.has_ended:
            return
        shortest = min(self._durations, default=0.0)
        end = step.launched + SLEEP_SHARE * shortest
        self._work(end - time.perf_counter())
        time.sleep(max(end - time.perf_counter(), 0.0))
        give_up = time.perf_counter() + POLL_SECONDS
        while not step.has_ended:
            if time.perf_counter() > give_up:
                step.wait()
                break
            time.sleep(0)  # leaves the GIL to others
        self._durations.append(time.perf_counter() - step.launched)
