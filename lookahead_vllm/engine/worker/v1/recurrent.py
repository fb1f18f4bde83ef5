"""Which state the recurrent layers read, on vLLM's first model runner.

vLLM stores each request's accepted-token count by batch row, and treats everything after the prompt
as decode. Both are wrong for some steps; this module corrects them.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from lookahead_vllm.draft.jit import Int32s, Int64s
from lookahead_vllm.verify.recurrence import StateMover

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput

    from lookahead_vllm.engine.worker.draft_step import DraftStep

_NO_ROWS: Int64s = np.empty(0, np.int64)


class RecurrentRows:
    """Corrects what vLLM records for the rows of a batch, for a model with recurrent layers."""

    def __init__(self) -> None:
        self._left_out: dict[str, int] = {}
        """By request that the batch has no row for now: accepted tokens of its last step."""
        self._resumed = _NO_ROWS
        """Rows of the step that compute several known tokens after the prompt."""

    def remember(self, batch: Any, scheduler_output: SchedulerOutput) -> None:
        """Keep the accepted-token counts of requests that this step leaves out.

        vLLM removes their rows, and later gives them new ones with the count 1. Their states stay.
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
        """Restore the counts of requests that are in the batch again."""
        for req_id in self._left_out.keys() & scheduler_output.num_scheduled_tokens.keys():
            row = batch.req_id_to_index[req_id]
            batch.num_accepted_tokens_cpu[row] = self._left_out.pop(req_id)

    @contextmanager
    def resumed_as_prompts(
        self, batch: Any, scheduler_output: SchedulerOutput | None = None
    ) -> Iterator[None]:
        """Treat the known tokens of a resumed request as prompt.

        vLLM would take a short chunk of them for a decode with drafts.

        Parameters
        ----------
        scheduler_output
            The step; by default that of the last call.
        """
        if scheduler_output is not None:
            self._resumed = _resumed_rows(batch, scheduler_output)
        rows = self._resumed
        lengths = {batch.req_ids[row]: int(batch.num_prompt_tokens[row]) for row in rows}
        batch.num_prompt_tokens[rows] = batch.num_tokens_no_spec[rows]
        try:
            yield
        finally:
            for req_id, length in lengths.items():  # vLLM may have reordered the rows
                batch.num_prompt_tokens[batch.req_id_to_index[req_id]] = length

    def end_step(self) -> None:
        """Forget the rows of the step."""
        self._resumed = _NO_ROWS


def commit(mover: StateMover, step: DraftStep, paths: Int32s, block_table: torch.Tensor) -> None:
    """Move the accepted states to where vLLM reads them in the next step.

    Parameters
    ----------
    paths
        As in `accepted_paths`.
    block_table : int32 [requests, columns]
        The state slots of the batch's requests.
    """
    device = block_table.device
    places = np.zeros((len(paths), 1 + paths.shape[1]), np.int32)
    places[:, 1:] = 1 + paths
    lengths = 1 + (paths >= 0).sum(axis=1, dtype=np.int32)
    columns = block_table[torch.from_numpy(step.rows).to(device)]
    mover.commit(columns, torch.from_numpy(places).to(device), torch.from_numpy(lengths).to(device))


def _resumed_rows(batch: Any, scheduler_output: SchedulerOutput) -> Int64s:
    """The rows of the step that compute several known tokens after the prompt."""
    drafts = scheduler_output.scheduled_spec_decode_tokens
    own_tokens = np.array(
        [
            scheduler_output.num_scheduled_tokens[req_id] - len(drafts.get(req_id, ()))
            for req_id in batch.req_ids
        ]
    )
    rows = slice(len(own_tokens))
    is_after_prompt = batch.num_computed_tokens_cpu[rows] >= batch.num_prompt_tokens[rows]
    return np.flatnonzero(is_after_prompt & (own_tokens > 1))
