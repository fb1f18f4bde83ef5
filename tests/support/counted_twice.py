"""Checks what lookahead's scheduler does instead of vLLM's code, against that code, on copies."""

import functools
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from copy import copy
from dataclasses import asdict, replace
from typing import Any
from unittest import mock

from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.request import ConstantList, Request

from lookahead_vllm.engine.scheduler.continued_requests import ContinuedRequests
from lookahead_vllm.engine.scheduler.decode_steps import DecodeSteps

_LISTS = ("_output_token_ids", "_all_token_ids", "block_hashes", "events", "spec_token_ids")


class _OfVLLM(AsyncScheduler):
    """vLLM's scheduler with some requests of another one; changes nothing but them."""

    def __init__(self, scheduler: Any, requests: dict[str, Request]) -> None:
        vars(self).update(vars(scheduler), requests=requests, defer_block_free=False)
        self.log_stats = True
        self.kv_cache_manager = self
        self.finished_req_ids_dict: dict[int, set[str]] = {}
        self.drafts: Any = None
        self.allocated: dict[str, tuple[int, Any]] = {}
        """By request: the tokens for which it asks, and the blocks that it gets."""
        self.cached: dict[str, int] = {}

    def cache_blocks(self, request: Request, num_tokens: int) -> None:
        most = max(num_tokens, self.cached.get(request.request_id, 0))
        self.cached[request.request_id] = most

    def take_events(self) -> None:
        return None

    def new_step_starts(self) -> None:
        pass

    def allocate_slots(self, request: Request, num_new_tokens: int, **kwargs: Any) -> Any:
        count, blocks = self.allocated.pop(request.request_id)
        assert count == num_new_tokens
        return blocks

    def take_boundary_state_offloads(self) -> dict[str, Any]:
        return {}

    def take_kv_cache_block_copies(self) -> tuple[list[Any], list[Any]]:
        return [], []

    def take_new_block_ids(self) -> list[int]:
        return []

    def make_spec_decoding_stats(self, stats: Any, *args: Any, **kwargs: Any) -> Any:
        empty = (kwargs["num_invalid_spec_tokens"] or {}).get(kwargs["request_id"])
        if kwargs["num_draft_tokens"] == empty:
            return stats
        return super().make_spec_decoding_stats(stats, *args, **kwargs)

    def make_stats(self, drafts: Any = None, *args: Any, **kwargs: Any) -> None:
        self.drafts = drafts


def _copy_of(request: Request) -> Request:
    other = copy(request)
    for name in _LISTS:
        setattr(other, name, list(getattr(request, name)))
    other.output_token_ids = ConstantList(other._output_token_ids)
    other.all_token_ids = ConstantList(other._all_token_ids)
    return other


def _fields(request: Request) -> dict[str, Any]:
    constant = ("output_token_ids", "all_token_ids")  # views of other fields
    return {name: value for name, value in vars(request).items() if name not in constant}


def comparing(count: Callable[..., Any]) -> Callable[..., Any]:
    """`ContinuedRequests.count`; AssertionError if vLLM's code finds another result."""

    @functools.wraps(count)
    def both(
        self: ContinuedRequests, step: SchedulerOutput, output: Any, num_nodes: Mapping[str, int]
    ) -> Any:
        scheduler: Any = self._scheduler
        copies = {
            req_id: _copy_of(scheduler.requests[req_id])
            for req_id in step.num_scheduled_tokens
            if req_id in scheduler.requests
        }
        rest, counted = count(self, step, output, num_nodes)
        ours = step.num_scheduled_tokens.keys() - rest.num_scheduled_tokens.keys()
        alone = replace(
            step,
            num_scheduled_tokens={i: n for i, n in step.num_scheduled_tokens.items() if i in ours},
            num_invalid_spec_tokens={
                req_id: len(slots) - num_nodes.get(req_id, 0)
                for req_id, slots in step.scheduled_spec_decode_tokens.items()
            },
        )
        sampled = [list(tokens) for tokens in output.sampled_token_ids or ()]
        vllm = _OfVLLM(scheduler, {req_id: copies[req_id] for req_id in ours})
        with mock.patch.object(output, "sampled_token_ids", sampled):
            expected = AsyncScheduler.update_from_output(vllm, alone, output)
        assert {c: e.outputs for c, e in expected.items() if e.outputs} == dict(counted)
        for req_id in ours:
            request = scheduler.requests[req_id]
            assert _fields(request) == _fields(copies[req_id])
            singles = scheduler.kv_cache_manager.coordinator.single_type_managers
            cached = [single.num_cached_block.get(req_id) for single in singles]
            if req_id in vllm.cached:  # vLLM would cache no more
                scheduler.kv_cache_manager.cache_blocks(request, vllm.cached[req_id])
            assert cached == [single.num_cached_block.get(req_id) for single in singles]
        drafts = copy(self)
        drafts._sizes, drafts._accepted = [*self._sizes], [*self._accepted]
        ours_stats = drafts.take_drafts(None)
        assert (ours_stats and asdict(ours_stats)) == (vllm.drafts and asdict(vllm.drafts))
        CHECKED.append(len(ours))
        return rest, counted

    return both


def comparing_steps(schedule: Callable[..., Any]) -> Callable[..., Any]:
    """`DecodeSteps._schedule`; AssertionError if vLLM's code schedules another step."""

    @functools.wraps(schedule)
    def both(self: DecodeSteps) -> SchedulerOutput:
        scheduler: Any = self._scheduler
        copies = {request.request_id: _copy_of(request) for request in scheduler.running}
        vllm: Any = _OfVLLM(scheduler, copies)
        vllm.running = list(copies.values())
        allocate = self._allocate

        def allocate_and_note(request: Request, count: int) -> Any:
            blocks = allocate(request, count)
            vllm.allocated[request.request_id] = count, blocks
            return blocks

        with mock.patch.object(self, "_allocate", allocate_and_note):
            output: SchedulerOutput = schedule(self)
        expected = AsyncScheduler.schedule(vllm)
        assert not vllm.allocated
        for name, value in vars(expected).items():
            if name not in ("new_block_ids_to_zero", "kv_cache_block_copies"):
                assert getattr(output, name) == value, name
        for request in scheduler.running:
            assert _fields(request) == _fields(copies[request.request_id])
        for name in ("current_step", "sched_step_seq", "prefill_capacity_bound"):
            assert getattr(scheduler, name) == getattr(vllm, name), name
        SCHEDULED.append(len(output.num_scheduled_tokens))
        return output

    return both


def comparing_blocks(allocate: Callable[..., Any]) -> Callable[..., Any]:
    """`DecodeSteps._allocate`; AssertionError if vLLM's code changes or allocates more."""

    @functools.wraps(allocate)
    def both(self: DecodeSteps, request: Request, count: int) -> Any:
        blocks = allocate(self, request, count)
        manager = self._scheduler.kv_cache_manager
        if blocks is manager.empty_kv_cache_blocks:
            singles, ahead = self._groups, self._scheduler.num_lookahead_tokens
            req_id = request.request_id
            cached = [single.num_cached_block.get(req_id) for single in singles]
            again = manager.allocate_slots(request, count, num_lookahead_tokens=ahead)
            assert again is not None and not any(again.blocks)
            assert cached == [single.num_cached_block.get(req_id) for single in singles]
        return blocks

    return both


CHECKED: list[int] = []
"""The number of requests of each step that was counted twice."""
SCHEDULED: list[int] = []
"""The same of each step that was scheduled twice."""


@contextmanager
def counted_twice() -> Iterator[None]:
    """Every step of this process's engines is scheduled and counted by vLLM's code, too, and
    compared."""
    with (
        mock.patch.object(ContinuedRequests, "count", comparing(ContinuedRequests.count)),
        mock.patch.object(DecodeSteps, "_schedule", comparing_steps(DecodeSteps._schedule)),
        mock.patch.object(DecodeSteps, "_allocate", comparing_blocks(DecodeSteps._allocate)),
    ):
        yield
