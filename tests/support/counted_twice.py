"""Checks what lookahead's scheduler does instead of vLLM's code, against that code, on copies."""

from __future__ import annotations

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

from lookahead_vllm.engine.scheduler import continued
from lookahead_vllm.engine.scheduler.continued import ContinuedRequests

_LISTS = ("_output_token_ids", "_all_token_ids", "block_hashes", "events", "spec_token_ids")


class _OfVLLM(AsyncScheduler):
    """vLLM's scheduler with some requests of another one; changes nothing but them."""

    def __init__(self, scheduler: Any, requests: dict[str, Request]) -> None:
        vars(self).update(vars(scheduler), requests=requests, defer_block_free=False)
        self.log_stats = True
        self.kv_cache_manager = self
        self.finished_req_ids_dict: dict[int, set[str]] = {}
        self.drafts: Any = None
        self.cached: dict[str, int] = {}

    def cache_blocks(self, request: Request, num_tokens: int) -> None:
        most = max(num_tokens, self.cached.get(request.request_id, 0))
        self.cached[request.request_id] = most

    def take_events(self) -> None:
        return None

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
            cached = vllm.cached.get(req_id, 0)
            for single in scheduler.kv_cache_manager.coordinator.single_type_managers:
                if single.enable_caching:
                    assert single.num_cached_block.get(req_id, 0) >= cached // single.block_size
        drafts = copy(self)
        drafts._drafts = list(self._drafts)
        ours_stats = drafts.take_drafts(None)
        assert (ours_stats and asdict(ours_stats)) == (vllm.drafts and asdict(vllm.drafts))
        CHECKED.append(len(ours))
        return rest, counted

    return both


CHECKED: list[int] = []
"""The number of requests of each step that was compared."""


@contextmanager
def counted_twice() -> Iterator[None]:
    """Every step of this process's engines is counted by vLLM's code, too, and compared."""
    with mock.patch.object(
        continued.ContinuedRequests, "count", comparing(ContinuedRequests.count)
    ):
        yield
