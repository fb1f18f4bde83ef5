"""Which state the recurrent layers read, on vLLM's first model runner.

vLLM keeps each request's accepted tokens by row of the batch, and tells decodes from prompts by the
length of the prompt. Both are wrong for some steps; here they are set right.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np

from lookahead_vllm.draft.jit import Int64s

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput

_NO_ROWS: Int64s = np.empty(0, np.int64)


class RecurrentRows:
    """The rows of a batch whose model has recurrent layers."""

    def __init__(self) -> None:
        self._left_out: dict[str, int] = {}
        """Accepted tokens of the last step of requests that are in no row now."""
        self._chunks = _NO_ROWS
        """Rows of the step that compute several known tokens behind the prompt."""

    def remember(self, batch: Any, scheduler_output: SchedulerOutput) -> None:
        """Keep the counts of requests that this step leaves out.

        vLLM removes their rows, and gives them new ones with the count 1. Their states stay.
        """
        scheduled = scheduler_output.num_scheduled_tokens
        for req_id, row in batch.req_id_to_index.items():
            if req_id not in scheduled:
                self._left_out[req_id] = int(batch.num_accepted_tokens_cpu[row])
        for req_id in (
            *scheduler_output.finished_req_ids,
            *(scheduler_output.preempted_req_ids or ()),
            *scheduler_output.scheduled_cached_reqs.resumed_req_ids,
            *(new.req_id for new in scheduler_output.scheduled_new_reqs),
        ):
            self._left_out.pop(req_id, None)

    def restore(self, batch: Any, scheduler_output: SchedulerOutput) -> None:
        """Give the counts back to the rows of requests that are in the batch again."""
        for req_id in self._left_out.keys() & scheduler_output.num_scheduled_tokens.keys():
            row = batch.req_id_to_index[req_id]
            batch.num_accepted_tokens_cpu[row] = self._left_out.pop(req_id)

    @contextmanager
    def chunks_as_prompts(
        self, batch: Any, scheduler_output: SchedulerOutput | None = None
    ) -> Iterator[None]:
        """Let the known tokens of a request that was preempted count as its prompt.

        vLLM takes a chunk of such tokens behind the prompt for a decode with drafts if it is short
        enough. Plain vLLM computes it as a prompt.

        Parameters
        ----------
        scheduler_output
            The step; by default that of the last call.
        """
        if scheduler_output is not None:
            self._chunks = _chunks_behind_prompts(batch, scheduler_output)
        rows = self._chunks
        lengths = batch.num_prompt_tokens[rows]
        batch.num_prompt_tokens[rows] = batch.num_tokens_no_spec[rows]
        try:
            yield
        finally:
            batch.num_prompt_tokens[rows] = lengths

    def end_step(self) -> None:
        """Forget the rows of the step."""
        self._chunks = _NO_ROWS


def _chunks_behind_prompts(batch: Any, scheduler_output: SchedulerOutput) -> Int64s:
    drafts = scheduler_output.scheduled_spec_decode_tokens
    own_tokens = np.array(
        [
            scheduler_output.num_scheduled_tokens[req_id] - len(drafts.get(req_id, ()))
            for req_id in batch.req_ids
        ]
    )
    behind = slice(len(own_tokens))
    is_behind = batch.num_computed_tokens_cpu[behind] >= batch.num_prompt_tokens[behind]
    return np.flatnonzero(is_behind & (own_tokens > 1))
