"""Schedules a step in which no request starts and all others decode.

vLLM's loop in `Scheduler.schedule` does for each running request what any request may need:
prompts in chunks, encoder inputs, connectors, preemption. Here the requests only get their next
token and their slots. What follows the loop is vLLM's own code.
"""

from typing import Any

from vllm.v1.core.kv_cache_manager import KVCacheBlocks
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.single_type_kv_cache_manager import FullAttentionManager
from vllm.v1.request import Request

from lookahead_vllm.engine.scheduler.continued_requests import ContinuedRequests
from lookahead_vllm.engine.scheduler.draft_limits import DraftLimiter


class DecodeSteps:
    """The steps that only decode, of a scheduler.

    vLLM's `Request` objects and its KV cache manager stay the truth: they get the values that
    vLLM's own loop gives them.
    """

    def __init__(
        self, scheduler: AsyncScheduler, limiter: DraftLimiter, continued: ContinuedRequests
    ) -> None:
        self._scheduler, self._limiter, self._continued = scheduler, limiter, continued
        config = scheduler.vllm_config
        assert config.speculative_config is not None
        self._slots_behind = config.speculative_config.max_num_new_slots_for_drafting
        self._most_tokens = scheduler.scheduler_config.max_num_batched_tokens
        threshold = scheduler.scheduler_config.long_prefill_token_threshold
        self._is_possible = (
            continued.is_possible
            and not 0 < threshold <= scheduler.num_spec_tokens  # else vLLM cuts drafts by it
            and scheduler.pp_size == 1
            and not scheduler.observability_config.enable_logging_iteration_details
            # New in 0.33: prompts wait for steps that decode.
            and getattr(scheduler, "local_prefill_interval", 1) == 1
        )
        self._groups = scheduler.kv_cache_manager.coordinator.single_type_managers
        self._keeps_blocks = all(type(group) is FullAttentionManager for group in self._groups)
        """Else a step may also free blocks of a request, those before a window or a state."""

    def schedule(self) -> SchedulerOutput | None:
        """The next step, with the requests' `spec_token_ids`; None if vLLM has to schedule it."""
        scheduler = self._scheduler
        if not self._is_possible or not scheduler.running or not self._only_decodes():
            return None
        return self._schedule()

    def _only_decodes(self) -> bool:
        """Whether all running requests decode, with room for all slots, and no other can start."""
        scheduler, continued = self._scheduler, self._continued
        if scheduler._pause_state != PauseState.UNPAUSED:
            return False
        num_running = len(scheduler.running) + scheduler.num_waiting_for_streaming_input
        is_full = num_running >= scheduler.max_num_active_reqs
        if (scheduler.waiting or scheduler.kv_holding_waiting) and not is_full:
            return False
        num_tokens = 0
        for request in scheduler.running:
            if (
                request.request_id not in continued
                or request.is_prefill_chunk
                or request.num_tokens + request.num_output_placeholders
                != request.num_computed_tokens + 1
            ):
                return False
            num_tokens += 1 + len(request.spec_token_ids)
        behind = self._slots_behind * (len(scheduler.running) + 1)
        return (
            num_tokens <= scheduler.max_num_scheduled_tokens
            and num_tokens + behind <= self._most_tokens
            and not self._limiter.may_lack_blocks(num_tokens)
        )

    def _schedule(self) -> SchedulerOutput:
        scheduler: Any = self._scheduler
        manager = scheduler.kv_cache_manager
        scheduler.current_step += 1
        manager.new_step_starts()
        scheduled: list[Request] = []
        counts: dict[str, int] = {}
        slots: dict[str, list[int]] = {}
        blocks: dict[str, KVCacheBlocks] = {}
        for request in scheduler.running:
            in_flight, computed = request.num_output_placeholders, request.num_computed_tokens
            ends_in_flight = in_flight > 0 and (
                computed + 2 - in_flight >= request.num_prompt_tokens + request.max_tokens
            )
            own = request.spec_token_ids
            count = min(1 + len(own), scheduler.max_model_len - computed - 1)
            if ends_in_flight or count <= 0:
                continue
            req_id = request.request_id
            scheduled.append(request)
            counts[req_id], blocks[req_id] = count, self._allocate(request, count)
            if own:
                if count > 1:
                    slots[req_id] = own[: count - 1]
                request.spec_token_ids = []
        _, num_waiting = scheduler.get_request_counts()
        scheduler.prefill_capacity_bound = num_waiting > len(scheduler.deferred_waiting)
        return self._output(scheduled, counts, slots, blocks)

    def _allocate(self, request: Request, count: int) -> KVCacheBlocks:
        """The new blocks of a request. It needs one every few steps; vLLM counts its blocks anew in
        each step."""
        manager, req_id = self._scheduler.kv_cache_manager, request.request_id
        ahead = self._scheduler.num_lookahead_tokens
        if self._keeps_blocks:
            end = request.num_computed_tokens + count
            num_known = min(end, request.num_tokens)  # drafts are not cached
            end = min(end + ahead, manager.max_model_len)
            for group in self._groups:
                size = group.block_size
                if end > size * len(group.req_to_blocks[req_id]) or (
                    group.enable_caching
                    and num_known // size > group.num_cached_block.get(req_id, 0)
                ):
                    break
            else:
                return manager.empty_kv_cache_blocks
        blocks = manager.allocate_slots(request, count, num_lookahead_tokens=ahead)
        assert blocks is not None, "there are enough blocks"
        return blocks

    def _output(
        self,
        scheduled: list[Request],
        counts: dict[str, int],
        slots: dict[str, list[int]],
        blocks: dict[str, KVCacheBlocks],
    ) -> SchedulerOutput:
        """What vLLM makes of these requests, their tokens, slots and new blocks."""
        scheduler: Any = self._scheduler
        manager = scheduler.kv_cache_manager
        manager.take_boundary_state_offloads()
        copies, retained = manager.take_kv_cache_block_copies()
        if copies:
            scheduler._free_cow_retained_blocks(retained, scheduler.sched_step_seq + 1)
        output = SchedulerOutput(
            scheduled_new_reqs=[],
            scheduled_cached_reqs=scheduler._make_cached_request_data(
                scheduled, [], counts, slots, blocks
            ),
            num_scheduled_tokens=counts,
            total_num_scheduled_tokens=sum(counts.values()),
            scheduled_spec_decode_tokens=slots,
            scheduled_encoder_inputs={},
            finished_req_ids=scheduler.finished_req_ids,
            free_encoder_mm_hashes=scheduler.encoder_cache_manager.get_freed_mm_hashes(),
            preempted_req_ids=scheduler.reset_preempted_req_ids,
            new_block_ids_to_zero=scheduler._get_new_block_ids_to_zero(),
            kv_cache_block_copies=copies or None,
            num_spec_tokens_to_schedule=0 if counts else scheduler.num_spec_tokens,
            ec_manager_metadata=scheduler.encoder_cache_manager.get_manager_metadata(),
        )
        if scheduler.defer_block_free and counts:
            scheduler.sched_step_seq += 1
        scheduler._update_after_schedule(output)
        return output
