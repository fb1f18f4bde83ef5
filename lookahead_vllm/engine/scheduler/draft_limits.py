"""Limits for the drafts of a step: tokens and KV blocks that no request needs otherwise."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import chain, islice, takewhile
from typing import TYPE_CHECKING

from vllm.v1.core.single_type_kv_cache_manager import FullAttentionManager, SlidingWindowManager

if TYPE_CHECKING:
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.request import Request


class DraftLimiter:
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

    def cut(
        self, probs_of: Callable[[str], Sequence[float]], min_prob_beside_prompt: float
    ) -> dict[str, list[int]]:
        """Cut `spec_token_ids` of the running requests.

        Parameters
        ----------
        probs_of
            Tells the probabilities of the nodes of a request's draft, in order.
        min_prob_beside_prompt
            What a node's probability has to be where a prompt is read in the same step.

        Returns
        -------
        dict
            Requests that gave blocks back, which held rejected tokens alone: how many blocks each
            still has in each KV cache group.
        """
        scheduler = self._scheduler
        drafted = [request for request in scheduler.running if request.spec_token_ids]
        if not drafted:
            return {}
        waiting = list(self._admissible())
        if waiting:
            for request in drafted:
                own = probs_of(request.request_id)
                worth = sum(1 for _ in takewhile(lambda p: p >= min_prob_beside_prompt, own))
                request.spec_token_ids = request.spec_token_ids[:worth]
        free_tokens = scheduler.max_num_scheduled_tokens
        free_tokens -= sum(map(_own_tokens, scheduler.running)) + sum(map(_own_tokens, waiting))
        over = sum(len(request.spec_token_ids) for request in drafted) - max(free_tokens, 0)
        if over > 0:
            self._cut_tokens(drafted, over, probs_of)
        return self._cut_to_blocks(drafted, waiting, probs_of)

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

    def _cut_tokens(
        self, drafted: Sequence[Request], over: int, probs_of: Callable[[str], Sequence[float]]
    ) -> None:
        """Take the `over` least likely nodes of all away."""
        nodes = [
            (prob, -place, i)
            for i, request in enumerate(drafted)
            for place, prob in enumerate(probs_of(request.request_id))
            if place < len(request.spec_token_ids)
        ]
        for _, place, i in sorted(nodes)[:over]:
            # No node is kept without those before it, even where their probabilities rise.
            drafted[i].spec_token_ids = drafted[i].spec_token_ids[:-place]

    def _cut_to_blocks(
        self,
        drafted: Sequence[Request],
        waiting: Sequence[Request],
        probs_of: Callable[[str], Sequence[float]],
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
        for request in sorted(drafted, key=lambda request: -sum(probs_of(request.request_id))):
            nodes = len(request.spec_token_ids)
            own = self._missing(request, 0)
            while nodes and self._missing(request, nodes) - own > max(free, 0):
                nodes -= 1
            free -= self._missing(request, nodes) - own
            request.spec_token_ids = request.spec_token_ids[:nodes]
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
