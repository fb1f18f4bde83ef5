"""The requests that a step only gives tokens: their part of `Scheduler.update_from_output`.

vLLM's loop does for each request what any request may need: stop rules token by token, logprobs,
grammars, encoder inputs, what ends with it. Most requests of a step need none of it, so they are
counted here in a short loop, and vLLM's gets the others.
"""

from collections import defaultdict
from collections.abc import Collection, Mapping
from dataclasses import replace
from itertools import accumulate
from math import gcd
from operator import add

from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import EngineCoreOutput
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.spec_decode.metrics import SpecDecodingStats

MOST_ENDED = 64
"""So many ended requests may be remembered, or as many as twice those that are live."""


def has_many_ended(known: Collection[str], live: Collection[str]) -> bool:
    """Whether so many of the `known` requests are not `live` any more that they should be dropped.

    Dropping takes as long as all that are known, so it must be rare.
    """
    return len(known) > 2 * len(live) + MOST_ENDED


class ContinuedRequests:
    """Counts the tokens of requests that go on after a step.

    vLLM's `Request` objects stay the truth: each gets the values that vLLM's own loop gives it.

    Attributes
    ----------
    is_possible : bool
        Whether this engine has such requests.
    """

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        managers = scheduler.kv_cache_manager.coordinator.single_type_managers
        self._block_size = gcd(*(manager.block_size for manager in managers))
        self.is_possible = (
            scheduler.connector is None
            and scheduler.ec_connector is None
            and scheduler.aux_output_connector is None
            and not scheduler.return_sampling_mask
            and not (scheduler.perf_metrics and scheduler.perf_metrics.is_enabled())
        )
        self._stops: dict[str, frozenset[int]] = {}
        """By id of a request that may be counted here, or has ended: the tokens that end it."""
        size = 1 + scheduler.num_spec_tokens
        self._sizes, self._accepted = [0] * size, [0] * size
        """How many drafts since `take_drafts` have so many nodes, and accepted nodes."""

    def start(self, request: Request) -> None:
        """Note a new request."""
        params, live = request.sampling_params, self._scheduler.requests
        if has_many_ended(self._stops, live):
            self._stops = {i: stops for i, stops in self._stops.items() if i in live}
        self._stops.pop(request.request_id, None)
        if (
            self.is_possible
            and params is not None
            and params.num_logprobs is None
            and params.repetition_detection is None
            and not request.use_structured_output
            and not request.has_encoder_inputs
            and not request.resumable
            and request.spec_decode_metrics is None
        ):
            stops = {params.eos_token_id, *(params.stop_token_ids or ())} - {None}
            self._stops[request.request_id] = frozenset(stops)

    def __contains__(self, request_id: str) -> bool:
        """Whether a request needs nothing but tokens, as long as it goes on."""
        return request_id in self._stops

    def count(
        self, step: SchedulerOutput, output: ModelRunnerOutput, num_nodes: Mapping[str, int]
    ) -> tuple[SchedulerOutput, dict[int, list[EngineCoreOutput]]]:
        """Give the requests that go on the tokens of a step.

        Parameters
        ----------
        num_nodes
            The nodes of each request's draft, by id.

        Returns
        -------
        step : SchedulerOutput
            The same step with the other requests only.
        outputs : dict
            What the front end gets, by client.
        """
        outputs: dict[int, list[EngineCoreOutput]] = defaultdict(list)
        if output.prompt_logprobs_dict or output.num_nans_in_logits is not None:
            return step, outputs
        manager = self._scheduler.kv_cache_manager
        requests, max_model_len = self._scheduler.requests, self._scheduler.max_model_len
        caches, block_size = manager.enable_caching, self._block_size
        slots, rows, sampled = (
            step.scheduled_spec_decode_tokens,
            output.req_id_to_index,
            output.sampled_token_ids,
        )
        others: dict[str, int] = {}
        for req_id, num_scheduled in step.num_scheduled_tokens.items():
            stops, request = self._stops.get(req_id), requests.get(req_id)
            if stops is None or request is None:
                others[req_id] = num_scheduled
                continue
            tokens = sampled[rows[req_id]]
            num_new = len(tokens)
            if (
                not num_new
                or not stops.isdisjoint(tokens)
                or request.num_tokens + num_new >= max_model_len
                or request.num_output_tokens + num_new >= request.max_tokens
                or request.status is not RequestStatus.RUNNING
                or request.num_stale_output_tokens
                or request.prefill_stats is not None  # its first token
                or request.events
            ):
                others[req_id] = num_scheduled
                continue
            request.num_in_flight_tokens -= num_scheduled
            if num_slots := len(slots.get(req_id, ())):
                num_rejected = num_slots + 1 - num_new
                request.num_computed_tokens -= num_rejected
                request.num_output_placeholders -= num_rejected
                if drafted := num_nodes.get(req_id, 0):
                    self._sizes[drafted] += 1
                    self._accepted[num_new - 1] += 1
            request.num_output_placeholders -= num_new
            request.append_output_token_ids(tokens)
            if caches:
                num_known = request.num_computed_tokens - request.num_output_placeholders
                if num_known % block_size < num_new:  # a block is full
                    manager.cache_blocks(request, num_known)
            outputs[request.client_index].append(
                EngineCoreOutput(req_id, tokens, trace_headers=request.trace_headers)
            )
        if outputs:
            step = replace(step, num_scheduled_tokens=others)
        return step, outputs

    def take_drafts(self, stats: SpecDecodingStats | None) -> SpecDecodingStats | None:
        """Add the drafts since the last call to a step's stats; None if there are none at all."""
        num_drafts = sum(self._sizes)
        if not num_drafts:
            return stats
        if stats is None:
            stats = SpecDecodingStats.new(self._scheduler.num_spec_tokens)
        stats.num_drafts += num_drafts
        stats.num_draft_tokens += _add(self._sizes, stats.num_draft_tokens_per_pos)
        stats.num_accepted_tokens += _add(self._accepted, stats.num_accepted_tokens_per_pos)
        return stats


def _add(numbers: list[int], per_position: list[int]) -> int:
    """Add drafts, given by their `numbers` of tokens, to the drafts that have a token at each
    position; returns the sum of their tokens. The numbers are 0 afterwards."""
    reached = [*accumulate(reversed(numbers))][-2::-1]
    per_position[:] = map(add, per_position, reached)
    numbers[:] = [0] * len(numbers)
    return sum(reached)
