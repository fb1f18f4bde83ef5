"""What lookahead's two schedulers have in common."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray
from vllm.v1.core.sched.scheduler import Scheduler

from lookahead_vllm.draft.tree import EMPTY_TREE, DraftTree
from lookahead_vllm.engine import request_options, step_report
from lookahead_vllm.engine.grammar import GrammarTreeWalk, accept_tokens_one_by_one, joined_masks
from lookahead_vllm.engine.scheduler.late_outputs import LateOutputs
from lookahead_vllm.engine.scheduler.pauses import Pauses

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import GrammarOutput, SchedulerOutput
    from vllm.v1.metrics.stats import SchedulerStats
    from vllm.v1.outputs import ModelRunnerOutput
    from vllm.v1.request import Request


class DraftScheduler(Scheduler):
    """Knows who wants drafts, and passes on pauses, reports and outputs of ended requests."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        accept_tokens_one_by_one()
        self.pauses = Pauses()
        self._late_outputs = LateOutputs()
        self._without_drafts: set[str] = set()
        """Requests that turned lookahead off."""
        self._report: step_report.StepReport | None = None
        """The report of the step whose output is being processed."""

    def add_request(self, request: Request) -> None:
        self._without_drafts &= self.requests.keys()
        params = request.sampling_params
        options, _ = request_options.options_in_worker(params and params.extra_args)
        if not options.enabled:
            self._without_drafts.add(request.request_id)
        super().add_request(request)

    def _send_to_workers(self, output: SchedulerOutput) -> None:
        """A step was scheduled. The workers keep the references of its new requests."""
        self.pauses.send(output)
        for new in output.scheduled_new_reqs:
            request = self.requests[new.req_id]
            request.sampling_params = request_options.without_references(request.sampling_params)

    def _receive(
        self, scheduled: SchedulerOutput, model_runner_output: ModelRunnerOutput
    ) -> SchedulerOutput:
        """A step's output arrived; returns the step without requests that have ended since."""
        self.pauses.receive(scheduled)
        self._report = step_report.attached(model_runner_output)
        return self._late_outputs.without_ended(scheduled)

    def _grammar_output(
        self,
        step: SchedulerOutput,
        masks: Mapping[str, NDArray[np.int32]],
        chains: Mapping[str, list[int]],
        numbers: Sequence[int] = (),
    ) -> GrammarOutput | None:
        """The masks of a step.

        Parameters
        ----------
        masks
            Those of trees, by request id, int32 [1 + nodes, ceil(vocabulary / 32)].
        chains
            The drafts of other requests, by request id.
        numbers
            As `joined_masks` takes them.
        """
        found: dict[str, NDArray[np.int32]] = {}
        for req_id in step.num_scheduled_tokens:
            request = self.requests.get(req_id)
            # vLLM keeps a request that has ended while a connector sends its blocks.
            if request is None or request.is_finished():
                continue
            if not request.use_structured_output or request.is_prefill_chunk:
                continue
            mask = masks.get(req_id)
            if mask is None:
                tokens = chains.get(req_id)
                tree = DraftTree.chain(tokens) if tokens else EMPTY_TREE
                mask = self._fill_masks(request, tree)
            found[req_id] = mask
        if not found:
            return None
        num_nodes = [len(mask) - 1 for mask in found.values()]
        return joined_masks(list(found), list(found.values()), num_nodes, numbers)

    def _fill_masks(self, request: Request, tree: DraftTree) -> NDArray[np.int32]:
        walk = GrammarTreeWalk(self.structured_output_manager, request, tree, len(tree), len(tree))
        return walk.masks()

    def _free_request(self, request: Request, *args: Any, **kwargs: Any) -> Any:
        self._late_outputs.end(request)
        return super()._free_request(request, *args, **kwargs)

    def make_stats(self, *args: Any, **kwargs: Any) -> SchedulerStats | None:
        report, self._report = self._report, None
        return step_report.with_report(super().make_stats(*args, **kwargs), report)
