"""Limits for the drafts of a step: the tokens and KV blocks that plain vLLM would leave unused."""

from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from itertools import chain, islice

import numpy as np
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.core.single_type_kv_cache_manager import FullAttentionManager, SlidingWindowManager
from vllm.v1.request import Request, RequestStatus

RECHECK_AFTER_STEPS = 16
"""For so many steps in a row, nothing is kept for a request that vLLM has refused. Then its tokens
and blocks are kept for one step, because it may need fewer by now: its prefix may be cached."""


class DraftLimiter:
    """Cuts drafts before vLLM schedules a step, so that they never displace other work.

    Tokens of the step and free KV blocks go first to what plain vLLM would schedule: the plain
    tokens of running requests, and waiting prompts that can be admitted. Drafts get the rest, so
    none of them preempts or delays a request.

    Parameters
    ----------
    steps_ahead : int
        How many further steps are scheduled before the outcome of a draft is known. Their plain
        tokens come after the draft and need blocks too.
    chain_length : int
        The slots behind the last token of a step that a trained drafter writes to.
    drafter_tokens : int
        The tokens of a step that vLLM reserves for a trained drafter, for each request.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        steps_ahead: int,
        chain_length: int,
        drafter_tokens: int,
    ) -> None:
        self._scheduler = scheduler
        self._drafter_tokens = drafter_tokens
        self._steps_ahead, self._chain_length = steps_ahead, chain_length
        self._may_hold_unused = False
        """Whether a request may hold blocks with nothing but rejected tokens."""
        self._managers = scheduler.kv_cache_manager.coordinator.single_type_managers
        """One for each KV cache group."""
        self._spare_blocks = [getattr(m, "num_speculative_blocks", 0) for m in self._managers]
        """Blocks of a request that hold no tokens, for each manager: state slots, which vLLM
        allocates with the request's first block. A draft needs no more of them."""
        self._may_free_blocks = scheduler.connector is None and all(
            isinstance(manager, FullAttentionManager | SlidingWindowManager)
            for manager in self._managers
        )
        """Whether surplus blocks may be freed: each block holds only the KV of its own tokens, and
        no connector transfers blocks."""
        self._refused: Request | None = None
        """The first waiting request, which lacked blocks when it could have started last."""
        self._refused_with = 0
        """The blocks that were left for it then."""
        self._refused_steps = 0
        """The steps since then."""

    def cut(self) -> dict[str, list[int]]:
        """Cut `spec_token_ids` of the running requests.

        Returns
        -------
        dict
            For requests that gave back blocks, which held only rejected tokens, by id: the number
            of blocks that they keep in each KV cache group.
        """
        scheduler = self._scheduler
        if self._refused is not None and next(self._admissible(), None) is not self._refused:
            self._refused = None  # it has started
        drafted = [request for request in scheduler.running if request.spec_token_ids]
        if any(self._spare_blocks):
            drafted = [request for request in drafted if _can_roll_back(request)]
        if not (drafted or self._may_hold_unused):
            return {}
        # A request whose draft is in flight in another pipeline stage has no tokens, or less.
        charge = self._charge(scheduler.running)
        free_tokens = scheduler.max_num_scheduled_tokens - charge
        num_slots = sum(len(request.spec_token_ids) for request in drafted)
        waiting = starting = list(self._admissible())
        kept: dict[str, list[int]] = {}
        most_tokens = charge + min(num_slots, max(free_tokens, 0))
        if is_tight := self.may_lack_blocks(most_tokens, waiting):
            kept = self._free_unused_blocks()
            if waiting and self._is_refused(waiting[0], free_tokens):
                starting = []
        if drafted:
            self._may_hold_unused = True
            free_tokens -= self._charge(starting)
            if (excess := num_slots - max(free_tokens, 0)) > 0:
                self._cut_tokens(drafted, excess)
            if is_tight:
                # Drafts in flight give no blocks back before the next step, so what the refused
                # request needs stays free.
                self._cut_to_blocks(drafted, waiting)
        return kept

    def _charge(self, requests: Sequence[Request]) -> int:
        """The tokens of a step that these requests take without drafts."""
        plain = sum(max(_plain_tokens(request), 0) for request in requests)
        return plain + self._drafter_tokens * len(requests)

    def _admissible(self) -> Iterator[Request]:
        """The waiting requests that could start in this step."""
        scheduler = self._scheduler
        slots = scheduler.max_num_active_reqs - len(scheduler.running)
        tokens = scheduler.max_num_scheduled_tokens
        for request in islice(
            chain(scheduler.kv_holding_waiting, scheduler.waiting), max(slots, 0)
        ):
            if request.status == RequestStatus.WAITING_FOR_STREAMING_REQ:  # a session without input
                continue
            yield request
            tokens -= _plain_tokens(request) + self._drafter_tokens
            if tokens <= 0:
                return

    def _is_refused(self, head: Request, free_tokens: int) -> bool:
        """Whether vLLM will refuse the first waiting request, for which too few blocks are left.

        Then no waiting request starts. vLLM has refused it before, with no fewer blocks.
        """
        left = self._free_blocks() - sum(self._missing(r, 0) for r in self._scheduler.running)
        if head is self._refused and left <= self._refused_with:
            self._refused_steps += 1
            if self._refused_steps <= RECHECK_AFTER_STEPS:
                return True
        # vLLM skips requests that wait for something else, and goes on to the next one.
        waits_for_blocks = (
            head.status in (RequestStatus.WAITING, RequestStatus.PREEMPTED)
            and head.lora_request is None
            and free_tokens > 0
            and self._missing(head, 0) > left
        )
        self._refused = head if waits_for_blocks else None  # unless it starts in this step
        self._refused_with, self._refused_steps = left, 0
        return False

    def _cut_tokens(self, drafted: Sequence[Request], excess: int) -> None:
        """Remove the `excess` last tokens of all drafts."""
        sizes = np.array([len(request.spec_token_ids) for request in drafted])
        owners = np.repeat(np.arange(len(drafted)), sizes)
        places = np.arange(len(owners)) - np.repeat(np.cumsum(sizes) - sizes, sizes)
        removed = np.lexsort((owners, -places))[:excess]
        np.minimum.at(sizes, owners[removed], places[removed])
        for request, size in zip(drafted, sizes.tolist(), strict=True):
            request.spec_token_ids = request.spec_token_ids[:size]

    def may_lack_blocks(self, most_tokens: int, waiting: Sequence[Request] = ()) -> bool:
        """Whether the step may need more blocks than are free, if the running requests get up to
        `most_tokens`.

        By an upper bound, which spares steps with enough free blocks the exact count.
        """
        num_requests = len(self._scheduler.running) + len(waiting)
        num_tokens = most_tokens + sum(request.num_tokens for request in waiting)
        num_tokens += (self._steps_ahead + self._chain_length) * num_requests
        max_blocks = sum(
            num_tokens // manager.block_size + num_requests * (2 + spare)
            for manager, spare in zip(self._managers, self._spare_blocks, strict=True)
        )
        return max_blocks > self._free_blocks()

    def _free_blocks(self) -> int:
        manager = self._scheduler.kv_cache_manager
        free: int = manager.block_pool.get_num_free_blocks() - manager.watermark_blocks
        return free

    def _cut_to_blocks(self, drafted: Sequence[Request], starting: Sequence[Request]) -> None:
        """Remove the tokens that would need more blocks than are free."""
        ahead = self._steps_ahead
        free = self._free_blocks()
        free -= sum(self._missing(request, ahead) for request in self._scheduler.running)
        free -= sum(self._missing(request, ahead) for request in starting)
        # The longest drafts get their blocks first.
        for request in sorted(drafted, key=lambda request: -len(request.spec_token_ids)):
            plain = self._missing(request, ahead)
            nodes = self._nodes_within(free, request, plain)
            free -= self._missing(request, nodes + ahead) - plain
            request.spec_token_ids = request.spec_token_ids[:nodes]

    def _nodes_within(self, free: int, request: Request, plain: int) -> int:
        """How many nodes of the request's draft need no more than `free` further blocks.

        `plain` is what the request lacks without a draft.
        """
        ahead, most = self._steps_ahead, len(request.spec_token_ids)
        if free >= 0:
            return _largest(most, lambda n: self._missing(request, n + ahead) <= plain + free)
        # Only in blocks that the request has and plain vLLM would hold: the others have to become
        # free.
        in_flight = request.num_output_placeholders > 0
        held = self._num_blocks(request.num_tokens + in_flight)
        before = request.num_computed_tokens + _plain_tokens(request)
        has = self._missing(request, 0)
        return _largest(
            most,
            lambda n: (
                self._num_blocks(before + n) <= held and self._missing(request, n + ahead) <= has
            ),
        )

    def _num_blocks(self, num_tokens: int) -> int:
        """Blocks that a request of this length needs, in all KV cache groups together."""
        return sum(
            -(-num_tokens // manager.block_size) + spare
            for manager, spare in zip(self._managers, self._spare_blocks, strict=True)
        )

    def _missing(self, request: Request, num_more: int) -> int:
        """Blocks that the request still needs for its plain tokens and `num_more` after them."""
        tokens = request.num_computed_tokens + _plain_tokens(request) + num_more
        tokens += self._chain_length
        return sum(
            max(
                -(-tokens // manager.block_size)
                + spare
                - len(manager.req_to_blocks[request.request_id]),
                0,
            )
            for manager, spare in zip(self._managers, self._spare_blocks, strict=True)
        )

    def _free_unused_blocks(self) -> dict[str, list[int]]:
        """Free the blocks that hold only rejected tokens; returns as `cut`.

        A step in flight writes to none of them: `num_computed_tokens` counts all its tokens.
        """
        kept: dict[str, list[int]] = {}
        self._may_hold_unused = False
        if not self._may_free_blocks:
            return kept
        for request in self._scheduler.running:
            if (plain := _plain_tokens(request)) <= 0:  # in flight in another pipeline stage
                self._may_hold_unused = True
                continue
            if request.num_output_placeholders > 1:  # drafts in flight, which may be rejected
                self._may_hold_unused = True
            counts = self._free_blocks_after(request, request.num_computed_tokens + plain)
            if counts is not None:
                kept[request.request_id] = counts
        # Sessions between two turns; the next one sends the workers all their blocks.
        for request in self._scheduler.kv_holding_waiting:
            if request.num_stale_output_tokens:  # in flight
                self._may_hold_unused = True
            else:
                self._free_blocks_after(request, request.num_computed_tokens)
        return kept

    def _free_blocks_after(self, request: Request, num_tokens: int) -> list[int] | None:
        """Free the request's blocks that are not needed for this many tokens and a chain.

        Returns the number of its blocks in each KV cache group; None if all are needed.
        """
        has_surplus = False
        counts: list[int] = []
        for manager in self._managers:
            blocks = manager.req_to_blocks[request.request_id]
            needed = -(-(num_tokens + self._chain_length) // manager.block_size)
            if surplus := blocks[needed:]:
                has_surplus = True
                del blocks[needed:]
                self._scheduler.kv_cache_manager.block_pool.free_blocks(reversed(surplus))
            counts.append(len(blocks))
        return counts if has_surplus else None


def _largest(most: int, fits: Callable[[int], bool]) -> int:
    """The largest number up to `most` that fits, if all smaller ones do; 0 if none fits."""
    if fits(most):
        return most
    return bisect_left(range(1, most), True, key=lambda n: not fits(n))


def _plain_tokens(request: Request) -> int:
    """The number of tokens that plain vLLM would schedule for the request."""
    tokens: int = request.num_tokens + request.num_output_placeholders - request.num_computed_tokens
    return tokens


def _can_roll_back(request: Request) -> bool:
    """Whether recurrent states survive if this draft is rejected; if not, the draft is dropped.

    If several known tokens precede a draft, vLLM computes them as prompt and keeps only the state
    after the draft. It also loses the accepted count of resumable requests.
    """
    if _plain_tokens(request) == 1 and not request.resumable:
        return True
    request.spec_token_ids = []
    return False
