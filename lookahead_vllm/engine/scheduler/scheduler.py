"""vLLM's scheduler, which reserves slots for drafts that the workers grow late."""

import itertools
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.output import GrammarOutput, SchedulerOutput
from vllm.v1.engine import EngineCoreOutputs
from vllm.v1.metrics.stats import RequestSpecDecodeMetrics, SchedulerStats
from vllm.v1.outputs import DraftTokenIds, ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.spec_decode.metrics import SpecDecodingStats

from lookahead_vllm.draft.tree import EMPTY_TREE, DraftTree
from lookahead_vllm.engine import config, messages, step_report
from lookahead_vllm.engine.grammar.tree_walk import (
    GrammarTreeWalk,
    accept_tokens_one_by_one,
    joined_masks,
    numbers_of_masks,
)
from lookahead_vllm.engine.scheduler.continued_requests import ContinuedRequests, has_many_ended
from lookahead_vllm.engine.scheduler.decode_steps import DecodeSteps
from lookahead_vllm.engine.scheduler.draft_limits import DraftLimiter
from lookahead_vllm.options import request as request_options

PAUSE_AFTER_STEPS = 16
"""After this many steps in a row whose slots were all left empty, none are reserved until the
workers report that drafts pay again."""


STEPS_AHEAD = 2
"""How many further steps of a request are scheduled at most before the outcome of a draft is
known."""


class RequestMetrics(RequestSpecDecodeMetrics):
    """As in vLLM, except that slots that were all left empty do not count as a draft."""

    def observe(self, num_draft_tokens: int, num_accepted: int, detailed: bool = False) -> None:
        if num_draft_tokens:
            super().observe(num_draft_tokens, num_accepted, detailed)


class LookaheadScheduler(AsyncScheduler):
    """vLLM's scheduler, which reserves slots for drafts in a step whose tokens are not known yet.

    A slot is a placeholder token. The workers grow a request's tree when the step before has ended,
    and leave out the slots that they do not use (`drafter/late_drafts.py`). The scheduler
    counts unused slots as rejected.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        accept_tokens_one_by_one()
        self._continued = ContinuedRequests(self)
        self._without_drafts: set[str] = set()
        """Requests that turned lookahead off."""
        self._report: step_report.StepReport | None = None
        """The report of the step whose output is being processed."""
        options = config.options_of(self.vllm_config)
        # Zero, so that vLLM reserves no slots itself and does not pad single-token requests.
        self.dynamic_sd_lookup = [0] * (self.max_num_running_reqs + 1)
        self._may_pause = options.budget == "auto"
        self._empty_steps = 0
        self._most_slots = self.num_spec_tokens
        if self.need_mamba_block_aligned_split:
            # A step may be scheduled two drafts ahead of the tokens that are computed, and vLLM
            # holds the states of two blocks.
            self._most_slots = min(self._most_slots, self.cache_config.block_size // 2)
        # A trained drafter writes its KV behind the last token of each step.
        self.num_lookahead_tokens = options.chain_length
        slots = self.vllm_config.speculative_config.max_num_new_slots_for_drafting
        self._draft_limiter = DraftLimiter(self, STEPS_AHEAD, options.chain_length, slots)
        self._decode_steps = DecodeSteps(self, self._draft_limiter, self._continued)
        self._slots = [[-1] * count for count in range(self.num_spec_tokens + 1)]
        self._masks: dict[str, np.ndarray] = {}
        """By request id: masks of the draft in flight, int32 [1 + nodes, ceil(vocabulary / 32)]."""

    # ---- slots -----------------------------------------------------------------------------------

    def add_request(self, request: Request) -> None:
        if has_many_ended(self._without_drafts, self.requests):
            self._without_drafts &= self.requests.keys()
        params = request.sampling_params
        options, _ = request_options.options_in_worker(params and params.extra_args)
        if options.enabled:
            self._without_drafts.discard(request.request_id)
        else:
            self._without_drafts.add(request.request_id)
        super().add_request(request)
        if request.spec_decode_metrics is not None or options.is_predicted:
            request.spec_decode_metrics = RequestMetrics.new(self.num_spec_tokens)
        if self.requests.get(request.request_id) is request:
            self._continued.start(request)
        # Else it is the next turn of a live session, or its end.

    def schedule(self, *args: Any, **kwargs: Any) -> SchedulerOutput:
        is_paused = (
            self._may_pause
            and self._empty_steps >= PAUSE_AFTER_STEPS
            # A grammar may dictate tokens in every step.
            and not any(request.use_structured_output for request in self.running)
        )
        # More slots than this cannot fit for all requests, so the limiter has less to cut.
        share = max(1, self.max_num_scheduled_tokens // max(1, len(self.running)))
        most = 0 if is_paused else min(share, self._most_slots)
        for request in self.running:
            request.spec_token_ids = self._slots_of(request, most)
        kept_blocks = self._draft_limiter.cut()
        output = None
        if not any((*args, *kwargs.values())):  # else it throttles prompts
            output = self._decode_steps.schedule()
        if output is None:
            output = super().schedule(*args, **kwargs)
        for new in output.scheduled_new_reqs:  # the workers keep their references
            params = self.requests[new.req_id].sampling_params
            self.requests[new.req_id].sampling_params = request_options.without_references(params)
        for req_id in output.preempted_req_ids or ():
            kept_blocks.pop(req_id, None)
        if kept_blocks:
            messages.attach_kept_blocks(output, kept_blocks)
        return output

    def _slots_of(self, request: Request, most: int) -> list[int]:
        """Placeholders for the request's next step, before they are cut to what is free."""
        if not most or request.is_prefill_chunk or request.request_id in self._without_drafts:
            return []
        in_flight = request.num_output_placeholders > 0
        # vLLM fetches the drafts of a request under a grammar only if a step is in flight.
        if request.use_structured_output and not in_flight:
            return []
        if request.num_output_tokens + in_flight + 1 >= request.max_tokens:
            return []
        # After these slots, there is still room for the plain tokens of this step and of the steps
        # that are scheduled before its outcome is known; none is computed at the last position.
        end = request.num_tokens + request.num_output_placeholders + STEPS_AHEAD
        return self._slots[max(min(most, self.max_model_len - 1 - end), 0)]

    # ---- results of the step ---------------------------------------------------------------------

    def update_from_output(
        self, scheduler_output: SchedulerOutput, model_runner_output: ModelRunnerOutput
    ) -> Any:
        report = messages.late_report(model_runner_output)
        sizes: Mapping[str, int] = {}
        if report is not None:
            self._report, sizes = report.numbers, report.sizes
            if report.pays:
                self._empty_steps = 0
            elif scheduler_output.scheduled_spec_decode_tokens:
                self._empty_steps += 1
        step, counted = self._continued.count(scheduler_output, model_runner_output, sizes)
        # vLLM counts these as not proposed.
        step.num_invalid_spec_tokens = {
            req_id: len(step.scheduled_spec_decode_tokens.get(req_id, ())) - sizes.get(req_id, 0)
            for req_id in step.num_scheduled_tokens
        }
        outputs = super().update_from_output(step, model_runner_output)
        for output in itertools.chain.from_iterable(own.outputs for own in outputs.values()):
            request = self.requests.get(output.request_id)
            if request and request.sampling_params and request.sampling_params.stop:
                # The front-end may end it at a stop string, so no output says that it is the last.
                output.spec_decode_metrics = request.spec_decode_metrics
        for client, own in counted.items():
            outputs.setdefault(client, EngineCoreOutputs()).outputs[:0] = own
        return outputs

    def make_stats(
        self, spec_decoding_stats: SpecDecodingStats | None = None, *args: Any, **kwargs: Any
    ) -> SchedulerStats | None:
        report, self._report = self._report, None
        drafts = self._continued.take_drafts(spec_decoding_stats)
        return step_report.with_report(super().make_stats(drafts, *args, **kwargs), report)

    def make_spec_decoding_stats(
        self,
        spec_decoding_stats: SpecDecodingStats | None,
        num_draft_tokens: int,
        num_accepted_tokens: int,
        num_invalid_spec_tokens: dict[str, int] | None,
        request_id: str,
    ) -> SpecDecodingStats | None:
        """As in vLLM, except that slots that were all left empty do not count as a draft."""
        if num_draft_tokens == (num_invalid_spec_tokens or {}).get(request_id):
            return spec_decoding_stats
        return super().make_spec_decoding_stats(
            spec_decoding_stats,
            num_draft_tokens,
            num_accepted_tokens,
            num_invalid_spec_tokens,
            request_id,
        )

    # ---- grammars --------------------------------------------------------------------------------

    def update_draft_token_ids_in_output(
        self, draft_token_ids: DraftTokenIds, scheduler_output: SchedulerOutput
    ) -> None:
        """Fill the masks of the drafts in flight; the tokens before them are known by now."""
        forest = messages.forest_of(draft_token_ids)
        for req_id, tree in zip(draft_token_ids.req_ids, forest, strict=True):
            request = self.requests.get(req_id)
            if request is None or request.is_finished() or not request.use_structured_output:
                continue
            self._masks[req_id] = self._fill_masks(request, tree)

    def get_grammar_bitmask(self, scheduler_output: SchedulerOutput) -> GrammarOutput | None:
        masks, self._masks = self._masks, {}
        if not scheduler_output.has_structured_output_requests:
            return None
        found: dict[str, NDArray[np.int32]] = {}
        for req_id in scheduler_output.num_scheduled_tokens:
            request = self.requests.get(req_id)
            # vLLM keeps a request that has ended while a connector sends its blocks.
            if request is None or request.is_finished():
                continue
            if not request.use_structured_output or request.is_prefill_chunk:
                continue
            mask = masks.get(req_id)
            if mask is None:
                mask = self._fill_masks(request, EMPTY_TREE)
            found[req_id] = mask
        if not found:
            return None
        num_nodes = [len(mask) - 1 for mask in found.values()]
        numbers = numbers_of_masks(1 + self.num_spec_tokens)
        return joined_masks(list(found), list(found.values()), num_nodes, numbers)

    def _fill_masks(self, request: Request, tree: DraftTree) -> NDArray[np.int32]:
        walk = GrammarTreeWalk(self.structured_output_manager, request, tree, len(tree), len(tree))
        return walk.masks()
