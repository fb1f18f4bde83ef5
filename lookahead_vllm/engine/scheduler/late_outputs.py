"""Outputs that arrive after their request has ended, whose id may belong to another one by then."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.request import Request


class LateOutputs:
    """Knows whose the outputs of steps in flight are; vLLM looks requests up by their ids.

    Steps end in the order in which they were scheduled. So the next outputs of an id belong to the
    requests of that id that have ended, until all tokens that were in flight have come back.
    """

    def __init__(self) -> None:
        self._tokens: Counter[str] = Counter()
        """By id: scheduled tokens in flight of requests that have ended."""

    def end(self, request: Request) -> None:
        """A request ends, perhaps with steps in flight."""
        if request.num_in_flight_tokens > 0:
            self._tokens[request.request_id] += request.num_in_flight_tokens

    def without_ended(self, step: SchedulerOutput) -> SchedulerOutput:
        """The step whose output has arrived, without requests that ended since it was scheduled."""
        ended = self._tokens.keys() & step.num_scheduled_tokens.keys()
        if not ended:
            return step
        for req_id in ended:
            self._tokens[req_id] -= step.num_scheduled_tokens[req_id]
            if self._tokens[req_id] <= 0:
                del self._tokens[req_id]
        return replace(
            step,
            num_scheduled_tokens={
                i: n for i, n in step.num_scheduled_tokens.items() if i not in ended
            },
            scheduled_spec_decode_tokens={
                i: own for i, own in step.scheduled_spec_decode_tokens.items() if i not in ended
            },
        )
