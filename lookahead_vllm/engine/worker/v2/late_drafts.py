"""Late drafting: grow a step's drafts when the step before it has ended, not when it is scheduled.

Under asynchronous scheduling, vLLM schedules step N + 1 before the tokens of step N are known. So
the scheduler reserves slots for drafts (`scheduler/late_scheduler.py`). The drafting rank fills
them here once it has the tokens: it learns, grows, and sends what pays.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from lookahead_vllm.draft.budget.cost import Load
from lookahead_vllm.draft.jit import Int32s, Int64s
from lookahead_vllm.draft.proposer import DraftLimits, Verified
from lookahead_vllm.draft.tree import DraftForest
from lookahead_vllm.engine.messages import DraftsToVerify, packed
from lookahead_vllm.engine.worker.draft_step import DraftStep
from lookahead_vllm.engine.worker.drafter import LiveRequest, LookaheadDrafter, prompt_tokens
from lookahead_vllm.engine.worker.v2.grammar_copies import GrammarCopies
from lookahead_vllm.verify.acceptance import paths_of_tokens

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import NewRequestData, SchedulerOutput
    from vllm.v1.worker.gpu.async_utils import AsyncOutput

PROBE_EVERY = 4
"""While no slots are reserved, trees are grown in every fourth step, to see whether they pay."""

SLEEP_SHARE = 0.8
"""The drafting rank sleeps for so much of the shortest of the last steps before it polls."""
POLL_SECONDS = 0.01
"""After this time of polling, it waits as vLLM does."""


class Drafts(NamedTuple):
    """The drafts of one step; rank 0 sends them to the other ranks."""

    req_ids: Sequence[str]
    """Requests with at least one node."""
    forest: DraftForest
    """Their trees, in this order."""
    contexts: Int64s
    """int64 [t]: committed tokens before each root."""
    from_proposer: NDArray[np.bool_]
    """bool [t]: which trees are the proposer's; the others were changed by a grammar."""
    num_tokens: Mapping[str, int]
    """The tokens of prompt and answer, by id of each request of the step that decodes."""

    def __reduce__(self) -> tuple[Any, ...]:
        return packed(self)

    def in_batch(self, req_ids: Sequence[str], num_tokens: Int32s) -> DraftStep:
        """The trees in the order of the batch, whose requests have `num_tokens` int32 [r] rows."""
        rows = self.rows_in(req_ids)
        computed = np.zeros(len(req_ids), np.int32)
        computed[rows] = self.contexts
        drafts = DraftsToVerify(self.req_ids, self.forest, self.from_proposer, {})
        return DraftStep.of_scheduled(drafts, rows, num_tokens, computed)

    def rows_in(self, req_ids: Sequence[str]) -> Int64s:
        """The row of the batch of each tree's request, int64 [t]."""
        row_of = {req_id: row for row, req_id in enumerate(req_ids)}
        return np.array([row_of[req_id] for req_id in self.req_ids], np.int64)


NO_DRAFTS = Drafts((), DraftForest.of([]), np.empty(0, np.int64), np.empty(0, np.bool_), {})


@dataclass
class _Step:
    """A step whose tokens the proposer has not received yet."""

    output: AsyncOutput
    requests: list[_Request | None]
    """Those of the output, in its order; their ids may be used again before their tokens come."""
    drafts: DraftStep
    verified: Verified | None
    launched: float

    @cached_property
    def accepted_paths(self) -> Int32s:
        """The accepted nodes of its trees, as in `paths_of_tokens`."""
        rows = self.drafts.rows
        tokens = np.ascontiguousarray(self.output.sampled_token_ids[rows])
        counts = self.output.num_sampled_tokens_np[rows]
        return paths_of_tokens(self.drafts.forest, tokens, counts)


class _Request:
    """A request, on the drafting rank."""

    def __init__(self, new: NewRequestData) -> None:
        self.prompt: Int32s | None = prompt_tokens(new)
        """None once it was passed to the proposer."""
        self.num_prompt = len(self.prompt)
        """A session's next turn has a longer one."""
        self.params = new.sampling_params
        assert new.prefill_token_ids is not None
        self.num_tokens = len(new.prefill_token_ids)
        """The known tokens of prompt and answer."""
        self.num_repeated = 0
        """Tokens that will be emitted again, because a preemption dropped their step."""
        self.is_decoding = False
        """Whether it has emitted a token since it started, or since its last preemption."""


class LateDrafts:
    """Follows the requests of a worker, and grows their trees at the last moment.

    Parameters
    ----------
    drafter
        Holds the proposer.
    grammars
        Advanced by the emitted tokens.
    """

    def __init__(self, drafter: LookaheadDrafter, grammars: GrammarCopies) -> None:
        self._drafter = drafter
        self._grammars = grammars
        self._requests: dict[str, _Request] = {}
        self._steps: deque[_Step] = deque()
        """In order; the last ones may still run."""
        self._uncounted: list[_Step] = []
        """Steps with drafts whose tokens the proposer has received since the last launch."""
        self._steps_without_slots = 0
        self._durations: deque[float] = deque(maxlen=8)
        """Seconds from the launch of the last steps to their tokens."""

    # ---- requests --------------------------------------------------------------------------------

    def start(self, new: NewRequestData) -> None:
        """Follow a new request, or one that returns from a preemption with all its tokens.

        Takes lookahead's options out of its sampling parameters.
        """
        drafter = self._drafter
        known = self._requests.get(new.req_id)
        if known is not None:
            self.learn()
            if known.prompt is None and len(prompt_tokens(new)) > known.num_prompt:
                self.finish(new.req_id)
                known = None
        new.sampling_params = drafter.announce(new.req_id, new.sampling_params)
        if not drafter.is_drafting_rank:
            return
        if known is None:
            self._requests[new.req_id] = _Request(new)
            if drafter.is_enabled(new.req_id):
                self._grammars.start(new)
            return
        if known.prompt is None:  # else it was preempted before its first token
            drafter.forget_options(new.req_id)
        assert new.prefill_token_ids is not None
        known.num_repeated += max(known.num_tokens - len(new.prefill_token_ids), 0)
        known.num_tokens = len(new.prefill_token_ids)
        known.is_decoding = False

    def finish(self, request_id: str) -> None:
        """Forget a request that has ended."""
        self._requests.pop(request_id, None)
        self._grammars.finish(request_id)
        self._drafter.finish(request_id)

    # ---- tokens ----------------------------------------------------------------------------------

    def add_step(self, output: AsyncOutput, drafts: DraftStep, verified: Verified | None) -> None:
        """Note a step that was launched. `verified` is filled in once its tokens are known."""
        requests = [self._requests.get(i) for i in output.model_runner_output.req_ids]
        self._steps.append(_Step(output, requests, drafts, verified, time.perf_counter()))
        self._count_drafts()

    def learn(self, wait: bool = True) -> None:
        """Pass the tokens of all steps to the proposer; without `wait`, of those that have ended.

        Waiting leaves the GIL to others.
        """
        self._learn(wait)
        self._count_drafts()

    def _learn(self, wait: bool) -> None:
        while self._steps:
            step = self._steps[0]
            if wait:
                self._wait(step)
            elif not _has_ended(step.output):
                return
            self._steps.popleft()
            with self._drafter.recorder.timed("draft"):
                self._learn_from(step)

    def _wait(self, step: _Step) -> None:
        """Wait for the tokens of a step.

        vLLM's event puts the thread to sleep until the driver wakes it, 20 to 60 µs late, while the
        device has nothing to do. So sleep until shortly before they should come, and poll then.
        """
        if _has_ended(step.output):
            return
        shortest = min(self._durations, default=0.0)
        time.sleep(max(step.launched + SLEEP_SHARE * shortest - time.perf_counter(), 0.0))
        give_up = time.perf_counter() + POLL_SECONDS
        while not _has_ended(step.output):
            if time.perf_counter() > give_up:
                step.output.copy_event.synchronize()
                break
            time.sleep(0)  # leaves the GIL to others
        self._durations.append(time.perf_counter() - step.launched)

    def _learn_from(self, step: _Step) -> None:
        drafter, output = self._drafter, step.output
        counts: Sequence[int] = output.num_sampled_tokens_np.tolist()
        rows: Sequence[list[int]] = output.sampled_token_ids.tolist()
        emitted: list[tuple[LiveRequest, list[int]]] = []
        ended: set[str] = set()
        for req_id, request, row, count in zip(
            output.model_runner_output.req_ids, step.requests, rows, counts, strict=True
        ):
            if request is None or request is not self._requests.get(req_id):
                ended.add(req_id)  # a live request may have its id
                continue
            if not count:  # it still reads its prompt
                continue
            tokens, request.is_decoding = row[:count], True
            if request.num_repeated:
                skipped = min(request.num_repeated, count)
                request.num_repeated -= skipped
                tokens = tokens[skipped:]
            request.num_tokens += count
            if request.prompt is not None:
                live = drafter.follow(req_id, request.prompt, request.params)  # type: ignore[arg-type]
                request.prompt = None
            else:
                live = drafter.live(req_id)
            # A request that has ended may be in one more step.
            if live is not None and live.remaining and tokens:
                emitted.append((live, tokens))
                self._grammars.advance(req_id, tokens)
        verified = step.verified
        if verified is not None and not ended.isdisjoint(verified.request_ids):
            verified = None  # it has choices of a request that was aborted
        if step.drafts.forest.num_nodes:
            self._uncounted.append(step)
            if verified is not None:
                step.drafts.mark_accepted(verified, step.accepted_paths)
        drafter.commit(emitted, verified)

    def _count_drafts(self) -> None:
        """Count verified trees, after the next launch, because no draft depends on it."""
        recorder = self._drafter.recorder
        for step in self._uncounted:
            paths = step.accepted_paths
            recorder.count_drafts(step.drafts.forest, paths)
            recorder.counters.moved_tokens += step.drafts.kv_moves(paths).shape[1]
        self._uncounted.clear()

    # ---- drafts ----------------------------------------------------------------------------------

    def grow(
        self,
        scheduled: SchedulerOutput,
        chains_only: Collection[str] = (),
        most: int | None = None,
    ) -> Drafts:
        """The drafts for the slots of this step, grown from all tokens of the steps before it.

        Requests in `chains_only` get no branches. With `most`, there are at most so many nodes.
        """
        self._steps_without_slots = 0
        slots = scheduled.scheduled_spec_decode_tokens
        num_slots = {req_id: len(own) for req_id, own in slots.items()}
        self._learn(wait=True)
        with self._drafter.recorder.timed("draft"):
            return self._grow(scheduled.num_scheduled_tokens, num_slots, chains_only, most)

    def could_draft(self, scheduled: Iterable[str]) -> bool:
        """Whether a request of this step could have a draft, judged by the known tokens."""
        return any(self._limits_of(req_id) is not None for req_id in scheduled)

    def would_pay(self, scheduled: Mapping[str, int]) -> bool:
        """Whether drafts would pay in a step like this one, which has no slots for them.

        Learns from the steps that have ended. Only every PROBE_EVERY-th call grows trees; the
        others return False.
        """
        self.learn(wait=False)
        self._steps_without_slots += 1
        if self._steps_without_slots % PROBE_EVERY:
            return False
        most = self._drafter.options.decoding_length
        return bool(self._grow(scheduled, dict.fromkeys(scheduled, most)).req_ids)

    def _grow(
        self,
        scheduled: Mapping[str, int],
        slots: Mapping[str, int],
        chains_only: Collection[str] = (),
        most: int | None = None,
    ) -> Drafts:
        """Trees of at most `slots` nodes for the requests that are `scheduled`."""
        drafter = self._drafter
        limits: list[DraftLimits] = []
        lengths: dict[str, int] = {}
        decodes = context = prefill = 0
        for req_id, num_tokens in scheduled.items():
            request, num_slots = self._requests.get(req_id), slots.get(req_id, 0)
            if request is None:
                continue
            if request.is_decoding:
                lengths[req_id] = request.num_tokens
            limit = None
            if num_slots:
                limit = self._limits_of(req_id, num_slots, req_id not in chains_only)
            if limit is not None:
                limits.append(limit)
            elif num_tokens - num_slots > 1:
                prefill += num_tokens
            else:
                decodes, context = decodes + 1, context + request.num_tokens
        none = NO_DRAFTS._replace(num_tokens=lengths)
        if not limits:
            return none
        forest = drafter.grow(limits, Load(decodes, context, prefill))
        under_grammar = np.array([limit.request_id in self._grammars for limit in limits])
        if under_grammar.any():
            completed = [
                self._grammars.complete(limit, tree) if is_under else tree
                for limit, tree, is_under in zip(limits, forest, under_grammar, strict=True)
            ]
            forest = DraftForest.of(completed).at_most(drafter.max_step_nodes)
        if most is not None:
            forest = forest.at_most(most)
        if not forest.num_nodes:
            return none
        kept = np.flatnonzero(forest.sizes)
        drafted = [limits[tree] for tree in kept.tolist()]
        contexts = np.array([limit.context - 1 for limit in drafted], np.int64)
        req_ids = [limit.request_id for limit in drafted]
        if len(kept) < len(forest):
            forest = forest.take(kept, forest.sizes[kept])
        return Drafts(req_ids, forest, contexts, ~under_grammar[kept], lengths)

    def _limits_of(
        self, req_id: str, max_nodes: int | None = None, may_branch: bool = True
    ) -> DraftLimits | None:
        """As `LookaheadDrafter.limits_of`; None also if this request can have no draft now."""
        request = self._requests.get(req_id)
        # The proposer is ahead of a request that repeats tokens.
        if request is None or request.prompt is not None or request.num_repeated:
            return None
        live, drafter = self._drafter.live(req_id), self._drafter
        if live is None:
            return None
        return drafter.limits_of(live, request.num_tokens, max_nodes, may_branch)

    def num_computed(self, req_ids: Sequence[str]) -> Int32s:
        """KV slots before this step's tokens, int32 [r]; right for requests that decode."""
        return np.array([self._requests[req_id].num_tokens - 1 for req_id in req_ids], np.int32)


def _has_ended(output: AsyncOutput) -> bool:
    """Whether the tokens of a step have reached the host. On a CPU, vLLM's events have no `query`,
    and a step ends before it returns."""
    query = getattr(output.copy_event, "query", None)
    return query is None or bool(query())
