"""Room for drafts in a step: what no request needs otherwise."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain, islice, takewhile
from typing import TYPE_CHECKING, NamedTuple

from vllm.v1.core.single_type_kv_cache_manager import FullAttentionManager, SlidingWindowManager

if TYPE_CHECKING:
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.request import Request


class _Draft(NamedTuple):
    request: Request
    probs: Sequence[float]
    """Of its nodes, in order."""


class DraftRoom:
    """Cuts drafts before vLLM's scheduler sees them, so that it never has to choose.

    Tokens of the step and free KV blocks go first to what plain vLLM would schedule: the running
    requests' own tokens, and prompts that wait and can be admitted. Drafts get what is left, so no
    request is preempted or delayed for the sake of one.
    """

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._managers = scheduler.kv_cache_manager.coordinator.single_type_managers
        """One for each KV cache group."""
        self._may_give_back = scheduler.connector is None and all(
            isinstance(manager, FullAttentionManager | SlidingWindowManager)
            for manager in self._managers
        )
        """Blocks are of the text alone, and nobody is sending them anywhere."""

    def make(
        self, probs: dict[str, Sequence[float]], least_beside_prompt: float
    ) -> dict[str, list[int]]:
        """Cut `spec_token_ids` of the running requests.

        Parameters
        ----------
        probs
            Of the nodes of each draft.
        least_beside_prompt
            What a node's probability has to be where a prompt is read in the same step.

        Returns
        -------
        dict
            Requests that gave blocks back, which held rejected tokens alone: how many blocks each
            still has in each KV cache group.
        """
        scheduler = self._scheduler
        drafts = [
            _Draft(request, probs.get(request.request_id, ()))
            for request in scheduler.running
            if request.spec_token_ids
        ]
        if not drafts:
            return {}
        waiting = list(self._admissible())
        if waiting:
            for request, own in drafts:
                worth = sum(1 for _ in takewhile(lambda p: p >= least_beside_prompt, own))
                del request.spec_token_ids[worth:]
        room = scheduler.max_num_scheduled_tokens
        room -= sum(map(_own_tokens, scheduler.running)) + sum(map(_own_tokens, waiting))
        self._cut_to_tokens(drafts, room)
        return self._cut_to_blocks(drafts, waiting)

    def _admissible(self) -> Iterator[Request]:
        """The waiting requests that could start in this step."""
        scheduler = self._scheduler
        slots = scheduler.max_num_active_reqs - len(scheduler.running)
        tokens = scheduler.max_num_scheduled_tokens
        for request in islice(
            chain(scheduler.kv_holding_waiting, scheduler.waiting), max(slots, 0)
        ):
            yield request
            tokens -= _own_tokens(request)
            if tokens <= 0:
                return

    def _cut_to_tokens(self, drafts: list[_Draft], room: int) -> None:
        """Keep the likeliest `room` nodes of all."""
        over = sum(len(draft.request.spec_token_ids) for draft in drafts) - max(room, 0)
        if over <= 0:
            return
        ends = [
            (_prob(draft, place), place, i)
            for i, draft in enumerate(drafts)
            for place in range(len(draft.request.spec_token_ids))
        ]
        # A node is never kept without those before it, even where their probabilities rise.
        for _, place, i in sorted(ends, key=lambda end: (end[0], -end[1]))[:over]:
            del drafts[i].request.spec_token_ids[place:]

    def _cut_to_blocks(
        self, drafts: list[_Draft], waiting: Sequence[Request]
    ) -> dict[str, list[int]]:
        scheduler, pool = self._scheduler, self._scheduler.kv_cache_manager.block_pool
        free = pool.get_num_free_blocks() - scheduler.kv_cache_manager.watermark_blocks
        sizes = [manager.block_size for manager in self._managers]
        # At most, so that a step with memory to spare looks no further.
        bound = sum(
            -(-tokens // size) + 1
            for tokens in chain(
                (_own_tokens(r) + len(r.spec_token_ids) for r in scheduler.running),
                (request.num_tokens for request in waiting),
            )
            for size in sizes
        )
        if bound <= free:
            return {}
        kept = self._give_back()
        free = pool.get_num_free_blocks() - scheduler.kv_cache_manager.watermark_blocks
        free -= sum(self._missing(request, 0) for request in scheduler.running)
        free -= sum(-(-request.num_tokens // size) for request in waiting for size in sizes)
        # Who gains most from a block of its own comes first.
        for draft in sorted(drafts, key=lambda draft: -sum(draft.probs)):
            nodes = draft.request.spec_token_ids
            own = self._missing(draft.request, 0)
            while nodes and (more := self._missing(draft.request, len(nodes)) - own) > max(free, 0):
                nodes.pop()
            free -= more if nodes else 0
        return kept

    def _missing(self, request: Request, num_nodes: int) -> int:
        """Blocks that the request needs for its own tokens and so many nodes, and does not have."""
        tokens = request.num_computed_tokens + _own_tokens(request) + num_nodes
        return sum(
            max(
                -(-tokens // manager.block_size) - len(manager.req_to_blocks[request.request_id]), 0
            )
            for manager in self._managers
        )

    def _give_back(self) -> dict[str, list[int]]:
        """Free the blocks of running requests that hold nothing but rejected tokens."""
        kept: dict[str, list[int]] = {}
        if not self._may_give_back:
            return kept
        for request in self._scheduler.running:
            tokens = request.num_computed_tokens + _own_tokens(request)
            counts: list[int] = []
            for manager in self._managers:
                blocks = manager.req_to_blocks[request.request_id]
                needed = -(-tokens // manager.block_size)
                surplus = blocks[needed:]
                if surplus:
                    del blocks[needed:]
                    self._scheduler.kv_cache_manager.block_pool.free_blocks(reversed(surplus))
                    kept[request.request_id] = counts
                counts.append(len(blocks))
        return kept


def _own_tokens(request: Request) -> int:
    """Tokens that plain vLLM would have it compute."""
    tokens: int = request.num_tokens + request.num_output_placeholders - request.num_computed_tokens
    return tokens


def _prob(draft: _Draft, place: int) -> float:
    return draft.probs[place] if place < len(draft.probs) else 0.0
