"""Late drafting: grow a step's drafts when the step before it has ended, not when it is scheduled.

Under asynchronous scheduling, vLLM schedules step N + 1 before the tokens of step N are known. So
the scheduler reserves slots for drafts (`scheduler/scheduler.py`). The drafting rank fills
them here once it has the tokens: it learns, grows, and sends what pays.
"""

import time
from collections import deque
from collections.abc import Collection, Mapping, Sequence
from itertools import compress

import numpy as np
from vllm.v1.core.sched.output import NewRequestData

from lookahead_vllm.draft.budget.cost import Load
from lookahead_vllm.draft.growth.trees import NODES
from lookahead_vllm.draft.jit import Int64s
from lookahead_vllm.draft.progress import (
    NO_TEXT,
    NOTHING_EMITTED,
    EmittedTokens,
    WantedDrafts,
    limit_trees,
)
from lookahead_vllm.draft.proposers.proposer import NoProposer
from lookahead_vllm.draft.tree import DraftForest
from lookahead_vllm.engine.drafter.chain_drafts import ChainDrafts
from lookahead_vllm.engine.drafter.drafter import LookaheadDrafter
from lookahead_vllm.engine.drafter.live_requests import LiveRequests
from lookahead_vllm.engine.drafter.waiter import Waiter
from lookahead_vllm.engine.grammar.copies import GrammarCopies
from lookahead_vllm.engine.step.drafts import NOTHING_PLANNED, Drafts, Plan
from lookahead_vllm.engine.step.step import Step

PROBE_EVERY = 4
"""While no slots are reserved, trees are grown in every fourth step, to see whether they pay."""


class LateDrafts:
    """Follows the requests of a worker, and grows their trees at the last moment.

    While the device computes a step, `_prepare` makes all of the next step's drafts that needs no
    tokens. When the tokens have arrived, the device waits for the drafts, so `_draft` counts them,
    and the proposer grows in few compiled calls; a grammar then completes its request's tree, which
    takes longer. What is learned from the tokens, and what is counted, waits until the next step is
    launched.

    Parameters
    ----------
    drafter
        Holds the proposer.
    grammars
        Advanced by the emitted tokens.

    Attributes
    ----------
    may_skip_wait : bool
        Whether a trained drafter's chains may be verified before the host knows their tokens, and
        where they are.
    """

    may_skip_wait = False

    def __init__(self, drafter: LookaheadDrafter, grammars: GrammarCopies) -> None:
        self._drafter = drafter
        self._grammars = grammars
        self._requests = LiveRequests(drafter, grammars)
        self._steps: deque[Step] = deque()
        """In order; the last ones may still run."""
        self._uncounted: list[Step] = []
        """Steps with drafts whose tokens were counted since the last launch."""
        length = drafter.options.chain_length
        self._chains = ChainDrafts(length) if length else None
        """Those of a trained drafter, if there is one."""
        self._drafted: Plan | None = None
        """The step for which the proposer has drafted, until it has learned from the tokens."""
        self._steps_without_slots = 0
        self._waiter = Waiter(self._work)

    # ---- requests --------------------------------------------------------------------------------

    def start(self, new: NewRequestData) -> None:
        """Follow a new request, or one that returns from a preemption with all its tokens.

        Takes lookahead's options out of its sampling parameters.
        """
        if new.req_id in self._requests:
            self.count()
            if self._requests.is_next_turn(new):
                self.finish(new.req_id)
        self._requests.start(new)

    def finish(self, request_id: str) -> None:
        """Forget a request that has ended."""
        request = self._requests.finish(request_id)
        if request is not None:
            for step in self._steps:
                step.drop(request_id, request.row)

    # ---- tokens ----------------------------------------------------------------------------------

    def add_step(self, step: Step) -> None:
        """Note a step that was launched. `verified` is filled in once its tokens are known."""
        requests, step.launched = self._requests, time.perf_counter()
        if step.is_prepared_early and step.plan is not None:
            step.requests = step.plan.wanted.rows.copy()  # all decode, in the order of the batch
        else:
            req_ids = step.output.model_runner_output.req_ids
            step.requests = np.array([requests[i].row for i in req_ids], np.int64)
        if self._chains is not None and self._drafted is not None:
            self._note_chains(step, self._chains, self._drafted)
        self._steps.append(step)
        self._catch_up()

    def _note_chains(self, step: Step, chains: ChainDrafts, plan: Plan) -> None:
        """Note what a trained drafter has proposed before a step that has waited for its drafts."""
        texts = self._requests.progress.arrays.texts
        requests, trees = step.requests, step.whole_trees
        if len(plan.req_ids) == len(requests):  # all of them decode
            step.proposed = self._drafter.proposer.proposed_after(texts[requests])
            sizes = np.zeros(len(texts), np.int64)
            sizes[requests[trees.rows]] = trees.forest.sizes
            chains.note(sizes[plan.wanted.rows], plan.wanted)

    def count(self, wait: bool = True, kept: int = 0) -> None:
        """Count the tokens of all steps but the last `kept` ones, and pass them to the proposer;
        without `wait`, of those that have ended.

        Waiting leaves the GIL to others.
        """
        self._catch_up()
        while len(self._steps) > kept:
            step = self._steps[0]
            if wait:
                self._waiter.wait(step)
            elif not step.has_ended:
                return
            with self._drafter.recorder.drafting():
                self._draft(NOTHING_PLANNED, step, self._prepare(NOTHING_PLANNED, step))
            self._catch_up()

    def _work(self, seconds: float) -> None:
        """While the device computes, insert texts for at most so long."""
        with self._drafter.surviving("insert texts"):
            self._drafter.proposer.work_for(seconds)

    def _end(self, step: Step) -> None:
        """The tokens of the first step were counted."""
        self._steps.popleft()
        if self._steps:
            self._steps[0].fill_in_chains(step)
        if step.whole_trees.forest.num_nodes or self._chains is not None:
            self._uncounted.append(step)

    def _catch_up(self) -> None:
        """After a launch, do what no draft depends on: learn, and count verified trees."""
        recorder = self._drafter.recorder
        if self._drafted is not None:
            self._drafted = None
            with recorder.drafting(), self._drafter.surviving("learn"):
                for step in self._uncounted:
                    step.mark_accepted()
                self._drafter.proposer.learn()
        for step in self._uncounted:
            paths = step.accepted_paths
            recorder.count_drafts(step.whole_trees.forest, paths)
            if self._chains is not None:
                self._chains.observe(step, paths)
        self._uncounted.clear()

    # ---- drafts ----------------------------------------------------------------------------------

    def grow(self, step: Step, chains_only: Collection[str] = ()) -> Drafts:
        """The drafts for the slots of a step, grown from all tokens of the steps before it.

        Requests in `chains_only` get no branches. The drafts of a step that vLLM has prepared have
        the order of its batch.
        """
        self._steps_without_slots = 0
        plan = step.plan  # that of the step before, if it had the same batch
        if plan is None or self._drafter.reads_reasoning:
            scheduled, order = step.offered, step.prepared and step.prepared.req_ids
            slots = scheduled.scheduled_spec_decode_tokens
            num_slots = {req_id: len(own) for req_id, own in slots.items()}
            plan = self._plan(scheduled.num_scheduled_tokens, num_slots, chains_only, order)
            step.plan = plan
        most = self._drafter.max_step_nodes
        if step.most_nodes is not None:
            most = min(most, step.most_nodes)
            if (chains := self._chains_alone(plan, most)) is not None:
                return chains
        later = self._num_later(plan.wanted.rows)
        self.count(kept=later + 1)
        before = self._steps[0] if len(self._steps) > later else None
        is_planned = self._prepare(plan, before)
        if before is not None and is_planned:
            self._waiter.wait(before, self._stand_by)
        elif before is not None:
            self._waiter.wait(before)
        with self._drafter.recorder.drafting():
            drafts = self._draft(plan, before, is_planned, most)
            if self._chains is not None:
                whole = self._chains.are_whole(self._drafter.proposer)
                drafts = drafts._replace(whole_chain=whole)
        return drafts

    def _stand_by(self) -> None:
        with self._drafter.surviving("draft"):
            self._drafter.proposer.stand_by()

    @property
    def drafted_for(self) -> Collection[str]:
        """The requests that could have a tree in this step, until `add_step`."""
        if self._drafted is None:
            return ()
        arrays, rows = self._requests.progress.arrays, self._drafted.wanted.rows
        # The text of a request that has ended stays behind its rows.
        is_drafted = (arrays.remaining[rows] > 0) & (arrays.num_repeated[rows] == 0)
        return set(compress(self._drafted.req_ids, is_drafted.tolist()))

    def could_draft(self, step: Step) -> bool:
        """Whether a request of the last step could have a draft, judged by the known tokens."""
        rows, most = step.requests, self._drafter.options.decoding_length
        wanted = WantedDrafts(rows, np.full(len(rows), most), np.ones(len(rows), np.bool_))
        return bool(self._limits(wanted)[:, NODES].any())

    def would_pay(self, scheduled: Mapping[str, int]) -> bool:
        """Whether drafts would pay in a step like this one, which has no slots for them.

        Only every PROBE_EVERY-th call learns from the steps that have ended, and grows trees; the
        others return False.
        """
        self._steps_without_slots += 1
        if self._steps_without_slots % PROBE_EVERY:
            return False
        self.count(wait=False)
        most = self._drafter.options.decoding_length
        decoding = [req_id for req_id, num_tokens in scheduled.items() if num_tokens == 1]
        plan = self._plan(scheduled, dict.fromkeys(decoding, most))
        drafts = self._draft(plan, None, self._prepare(plan, None), self._drafter.max_step_nodes)
        self._drafted = None  # they are not sent
        return drafts.pays

    def _plan(
        self,
        scheduled: Mapping[str, int],
        slots: Mapping[str, int],
        chains_only: Collection[str] = (),
        order: Sequence[str] | None = None,
    ) -> Plan:
        """What is known of the step before the tokens of the one before."""
        drafter, requests = self._drafter, self._requests
        prefill = prompts = 0
        decoding: list[str] = []
        for req_id, num_tokens in scheduled.items():
            if req_id not in requests:
                continue
            if num_tokens - slots.get(req_id, 0) > 1:
                prefill += num_tokens
                prompts += 1
            else:
                decoding.append(req_id)
        if order is not None and len(order) == len(decoding):
            decoding = order  # type: ignore[assignment]
        rows = np.array([requests[req_id].row for req_id in decoding], np.int64)
        nodes = np.array([slots.get(req_id, 0) for req_id in decoding], np.int64)
        if drafter.reads_reasoning:
            nodes[:] = list(map(requests.most_nodes, decoding, nodes.tolist()))
        may_branch = np.full(len(decoding), drafter.may_branch)
        if chains_only:
            may_branch &= [req_id not in chains_only for req_id in decoding]
        wanted = WantedDrafts(rows, np.minimum(nodes, drafter.max_step_nodes), may_branch)
        return Plan(decoding, wanted, Load(prefill=prefill, prompts=prompts, waits=True))

    def _num_later(self, rows: Int64s) -> int:
        """How many of the last steps have none of these requests: other stages of a pipeline
        compute them, and their tokens are not awaited."""
        own = set(rows.tolist())
        for later, step in enumerate(reversed(self._steps)):
            if not own.isdisjoint(step.requests.tolist()):
                return later
        return len(self._steps)

    def _prepare(self, plan: Plan, step: Step | None) -> bool:
        """Do what needs no tokens of the `step` before; False if the proposer has failed."""
        for launched in self._steps:
            self._requests.follow(launched.output.model_runner_output.req_ids)
        verified = None if step is None else step.verified
        contexts = self._requests.progress.arrays.num_tokens[plan.wanted.rows]
        with self._drafter.surviving("draft"):
            proposer = self._drafter.proposer
            proposer.plan(plan.req_ids, plan.wanted, contexts, plan.load, verified)
            return True
        return False

    def _draft(self, plan: Plan, step: Step | None, is_planned: bool, most: int = 0) -> Drafts:
        """Read the tokens of the `step` before, which has ended; returns the planned drafts.

        There are at most `most` nodes, and none if the proposer fails.
        """
        drafter, arrays = self._drafter, self._requests.progress.arrays
        proposer, wanted = drafter.proposer, plan.wanted
        emitted = NOTHING_EMITTED if step is None else step.emitted
        spans, drafts = emitted.new_spans(), None
        if is_planned:
            with drafter.surviving("draft"):
                if step is not None and proposer.needs_accepted():
                    step.mark_accepted()
                forest, num_tokens = proposer.draft(
                    arrays, emitted, spans, wanted, drafter.max_model_len
                )
                drafts = Drafts(plan.req_ids, forest.at_most(most), num_tokens, pays=proposer.pays)
            self._drafted = plan
        if step is not None:
            self._end(step)
        if drafts is None:
            none = NoProposer().draft(arrays, emitted, spans, wanted, drafter.max_model_len)
            drafts = Drafts(plan.req_ids, *none)
        if step is not None and self._grammars:
            self._advance_grammars(step, emitted, spans)
        return self._complete(drafts, wanted, most) if self._grammars else drafts

    def _advance_grammars(self, step: Step, emitted: EmittedTokens, spans: Int64s) -> None:
        """Advance the grammars by the counted tokens of a step."""
        req_ids = step.output.model_runner_output.req_ids
        for req_id, row, (first, end) in zip(
            req_ids, emitted.tokens.tolist(), spans.tolist(), strict=True
        ):
            if end > first:
                self._grammars.advance(req_id, row[first:end])

    def _complete(self, drafts: Drafts, wanted: WantedDrafts, most: int) -> Drafts:
        """The drafts as the grammars allow and dictate them, of at most `most` nodes."""
        limits = self._limits(wanted)
        under = np.array([req_id in self._grammars for req_id in drafts.req_ids], np.bool_)
        under &= limits[:, NODES] > 0
        if not under.any():
            return drafts
        trees, count = list(drafts.forest), int(under.sum())
        for i in np.flatnonzero(under).tolist():
            _, max_nodes, max_depth, _ = limits[i].tolist()
            trees[i] = self._grammars.complete(
                drafts.req_ids[i], trees[i], max_nodes, max_depth, count
            )
        forest = DraftForest.of(trees).at_most(most)
        return drafts._replace(forest=forest, from_proposer=~under, pays=forest.num_nodes > 0)

    def _chains_alone(self, plan: Plan, most: int) -> Drafts | None:
        """See `ChainDrafts.alone`; counts all steps but the last one."""
        proposer, rows = self._drafter.proposer, plan.wanted.rows
        if self._chains is None or not self.may_skip_wait or not self._steps or self._grammars:
            return None
        arrays = self._requests.progress.arrays
        if (arrays.texts[rows] == NO_TEXT).any() or arrays.num_repeated[rows].any():
            return None
        last = self._steps[-1]
        drafts = self._chains.alone(plan.req_ids, plan.wanted, last, proposer, most)
        if drafts is not None:
            self.count(kept=1)
        return drafts

    def _limits(self, wanted: WantedDrafts) -> Int64s:
        """The limits of the trees of a step, as `limit_trees` returns them."""
        trees: Int64s = limit_trees(
            self._requests.progress.arrays[:], wanted[:], self._drafter.max_model_len
        )
        return trees

    def contexts(self, step: Step) -> Int64s:
        """KV slots before the tokens of a step that was added, int64 [r]; right for requests that
        decode."""
        return self._requests.progress.arrays.num_tokens[step.requests] - 1
