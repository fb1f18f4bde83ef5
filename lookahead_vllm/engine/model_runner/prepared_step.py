"""What vLLM has prepared for a step, kept for the next steps of the same batch.

A step that is prepared for all its slots (`late_shape.py`) depends on nothing but its requests and
their numbers of slots: all else is written by the kernel that places the rows. While these stay
the same, vLLM would prepare the same again.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.worker.gpu.input_batch import InputBatch


class PreparedStep:
    """What vLLM prepared last.

    Attributes
    ----------
    is_reused : bool
        Whether this step is served by what was prepared for the one before.
    has_new_blocks : bool
        Whether the KV blocks of a request have changed since the last step.
    found
        What `gather_batch_req_state` returned.
    batch : InputBatch
        What `prepare_inputs` returned.
    """

    found: Any
    batch: InputBatch

    def __init__(self) -> None:
        self.is_reused = self.has_new_blocks = False
        self._counts: list[tuple[str, int]] | None = None
        """The tokens of each request of the step, in its order; None if it cannot be reused."""

    def note(self, scheduled: SchedulerOutput, gave_back: bool) -> None:
        """Requests begin or end with this step, get KV blocks, or `gave_back` some."""
        if (
            scheduled.scheduled_new_reqs
            or scheduled.finished_req_ids
            or scheduled.preempted_req_ids
        ):
            self.forget()
        new_blocks = scheduled.scheduled_cached_reqs.new_block_ids
        self.has_new_blocks = gave_back or new_blocks.count(None) != len(new_blocks)

    def forget(self) -> None:
        """Something else has used vLLM's buffers."""
        self._counts = None

    def begin(self, scheduled: SchedulerOutput | None) -> bool:
        """Whether the step is the last one again; None for one that is not prepared early."""
        counts = None if scheduled is None else list(scheduled.num_scheduled_tokens.items())
        self.is_reused = counts is not None and counts == self._counts
        self._counts = counts
        return self.is_reused
