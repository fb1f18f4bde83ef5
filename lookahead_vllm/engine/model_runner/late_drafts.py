"""Late drafting: grow a step's drafts when the step before it has ended, not when it is scheduled.

Under asynchronous scheduling, vLLM schedules step N + 1 before the tokens of step N are known. So
the scheduler reserves slots for drafts (`scheduler/scheduler.py`). The drafting rank fills
them here once it has the tokens: it learns, grows, and sends what pays.
"""

from __future__ import annotations

import sys
import time
from collections import deque
from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import compress
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from lookahead_vllm.draft.budget.cost import Load
from lookahead_vllm.draft.jit import Int32s, Int64s
from lookahead_vllm.draft.progress import (
    GONE,
    NO_TEXT,
    NOTHING_EMITTED,
    Progress,
    WantedDrafts,
    count_tokens,
    limit_trees,
)
from lookahead_vllm.draft.proposer import DraftLimits, Verified
from lookahead_vllm.draft.tree import DraftForest
from lookahead_vllm.draft.trie.growth import NODES
from lookahead_vllm.draft.trie.proposer import NGramTrieProposer
from lookahead_vllm.engine.model_runner.chain_drafts import ChainDrafts
from lookahead_vllm.engine.model_runner.drafts import Drafts
from lookahead_vllm.engine.model_runner.grammar_copies import GrammarCopies
from lookahead_vllm.engine.model_runner.launched_step import LaunchedStep, Waiter
from lookahead_vllm.engine.worker.draft_step import DraftStep
from lookahead_vllm.engine.worker.drafter import LookaheadDrafter, prompt_tokens

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import NewRequestData, SchedulerOutput
    from vllm.v1.worker.gpu.async_utils import AsyncOutput

    from lookahead_vllm.engine.model_runner.trained_drafter import Chains

PROBE_EVERY = 4
"""While no slots are reserved, trees are grown in every fourth step, to see whether they pay."""


class _Request:
    """A request, on the drafting rank."""

    def __init__(self, new: NewRequestData, row: int) -> None:
        self.row = row
        """Of its progress."""
        self.prompt: Int32s | None = prompt_tokens(new)
        """None once it was passed to the proposer."""
        self.num_prompt = len(self.prompt)
        """A session's next turn has a longer one."""
        self.params = new.sampling_params


class _Plan(NamedTuple):
    """A step before its tokens are known."""

    req_ids: Sequence[str]
    """The requests that decode."""
    wanted: WantedDrafts
    load: Load
    """Of the others."""


class LateDrafts:
    """Follows the requests of a worker, and grows their trees at the last moment.

    While the device computes a step, `_prepare` makes all of the next step's drafts that needs no
    tokens. When the tokens have arrived, the device waits for the drafts, so `_draft` counts them
    and grows in few compiled calls; a step with a grammar, or with a proposer that has no such
    calls, takes longer. What is learned from the tokens, and what is counted, waits until the next
    step is launched.

    Parameters
    ----------
    drafter
        Holds the proposer.
    grammars
        Advanced by the emitted tokens.

    Attributes
    ----------
    may_be_silent : bool
        Whether a trained drafter's chains may be verified before the host knows their tokens, and
        where they are.
    """

    may_be_silent = False

    def __init__(self, drafter: LookaheadDrafter, grammars: GrammarCopies) -> None:
        self._drafter = drafter
        self._grammars = grammars
        self._progress = Progress()
        self._requests: dict[str, _Request] = {}
        self._steps: deque[LaunchedStep] = deque()
        """In order; the last ones may still run."""
        self._uncounted: list[LaunchedStep] = []
        """Steps with drafts whose tokens were counted since the last launch."""
        length = drafter.options.chain_length
        self._chains = ChainDrafts(length) if length else None
        """Those of a trained drafter, if there is one."""
        self._drafted: _Plan | None = None
        """The step whose tokens the proposer got by `draft`, and has to learn from."""
        self._steps_without_slots = 0
        self._waiter = Waiter()

    # ---- requests --------------------------------------------------------------------------------

    def start(self, new: NewRequestData) -> None:
        """Follow a new request, or one that returns from a preemption with all its tokens.

        Takes lookahead's options out of its sampling parameters.
        """
        drafter, progress = self._drafter, self._progress
        known = self._requests.get(new.req_id)
        if known is not None:
            self.learn()
            if known.prompt is None and len(prompt_tokens(new)) > known.num_prompt:
                self.finish(new.req_id)
                known = None
        new.sampling_params = drafter.announce(new.req_id, new.sampling_params)
        if not drafter.is_drafting_rank:
            return
        assert new.prefill_token_ids is not None
        num_tokens = len(new.prefill_token_ids)
        if known is None:
            row = progress.add(new.req_id, num_tokens)
            self._requests[new.req_id] = _Request(new, row)
            if drafter.is_enabled(new.req_id):
                self._grammars.start(new)
            return
        if known.prompt is None:  # else it was preempted before its first token
            drafter.forget_options(new.req_id)
        before = int(progress.arrays.num_tokens[known.row])
        progress.arrays.num_repeated[known.row] += max(before - num_tokens, 0)
        progress.resume(known.row, num_tokens)

    def finish(self, request_id: str) -> None:
        """Forget a request that has ended."""
        request = self._requests.pop(request_id, None)
        if request is not None:
            self._progress.pop(request_id)
            for step in self._steps:
                step.drop(request_id, request.row)
        self._grammars.finish(request_id)
        self._drafter.finish(request_id)

    def _follow(self, req_id: str, request: _Request) -> None:
        """Pass the request to the proposer."""
        assert request.prompt is not None
        drafter, prompt, request.prompt = self._drafter, request.prompt, None
        live = drafter.follow(req_id, prompt, request.params)  # type: ignore[arg-type]
        if live is not None:
            compiled = self._compiled
            text = 0 if compiled is None else compiled.text_of(req_id)
            self._progress.follow(request.row, text, live.remaining, live.stop_tokens)

    @property
    def _compiled(self) -> NGramTrieProposer | None:
        """The proposer, if it drafts in compiled calls."""
        proposer = self._drafter.proposer
        return proposer if isinstance(proposer, NGramTrieProposer) else None

    # ---- tokens ----------------------------------------------------------------------------------

    def add_step(
        self,
        output: AsyncOutput,
        drafts: DraftStep,
        verified: Verified | None,
        chains: Chains | None = None,
    ) -> None:
        """Note a step that was launched. `verified` is filled in once its tokens are known."""
        requests = self._requests
        req_ids = output.model_runner_output.req_ids
        rows = [requests[i].row if i in requests else GONE for i in req_ids]
        now = time.perf_counter()
        step = LaunchedStep(output, np.array(rows, np.int64), drafts, verified, now, chains)
        if self._chains is not None and self._drafted is not None:
            self._note_chains(step, self._chains, self._drafted)
        for req_id in req_ids:
            if req_id not in requests:
                step.drop(req_id, GONE)
        self._steps.append(step)
        self._catch_up()

    def _note_chains(self, step: LaunchedStep, chains: ChainDrafts, plan: _Plan) -> None:
        """Note what a trained drafter has proposed before a step that has waited for its drafts."""
        compiled, texts = self._compiled, self._progress.arrays.texts
        if compiled is not None and len(plan.req_ids) == len(step.rows):  # all of them decode
            step.proposed = compiled.proposed_after(texts[step.rows])
            sizes = np.zeros(len(texts), np.int64)
            sizes[step.rows[step.drafts.rows]] = step.drafts.forest.sizes
            chains.note(sizes[plan.wanted.rows], plan.wanted)

    def learn(self, wait: bool = True) -> None:
        """Pass the tokens of all steps to the proposer; without `wait`, of those that have ended.

        Waiting leaves the GIL to others.
        """
        self._learn(wait)
        self._catch_up()

    def _learn(self, wait: bool, kept: int = 0) -> None:
        """As `learn`, of all steps but the last `kept` ones."""
        while len(self._steps) > kept:
            step = self._steps[0]
            if wait:
                self._waiter.wait(step)
            elif not step.has_ended:
                return
            self._follow_new(step)
            with self._drafter.recorder.timed("draft"):
                self._learn_from(step)
                self._end(step)

    def _follow_new(self, step: LaunchedStep) -> None:
        """Pass the requests of a step that are new to the proposer; needs no tokens."""
        for req_id in step.output.model_runner_output.req_ids:
            request = self._requests.get(req_id)
            if request is not None and request.prompt is not None:
                self._follow(req_id, request)

    def _learn_from(self, step: LaunchedStep) -> None:
        """Count the tokens of a step, and pass them on at once."""
        emitted = step.emitted
        spans = count_tokens(self._progress.arrays[:], emitted[:]).tolist()
        tokens: dict[str, list[int]] = {}
        rows = emitted.tokens.tolist()
        for req_id, row, (first, end) in zip(
            step.output.model_runner_output.req_ids, rows, spans, strict=True
        ):
            if end > first:
                tokens[req_id] = row[first:end]
                self._grammars.advance(req_id, tokens[req_id])
        step.mark_accepted()
        self._drafter.learn(tokens, step.verified)
        compiled = self._compiled
        if step.chains is not None and compiled is not None:
            live = np.flatnonzero(emitted.rows != GONE)
            live = live[self._progress.arrays.texts[emitted.rows[live]] != NO_TEXT]
            compiled.follow_chains(
                self._progress.arrays.texts[emitted.rows[live]], emitted.chains[live]
            )

    def _end(self, step: LaunchedStep) -> None:
        """The tokens of the first step were counted."""
        self._steps.popleft()
        if self._steps:
            self._steps[0].know(step)
        if step.drafts.forest.num_nodes or self._chains is not None:
            self._uncounted.append(step)

    def _catch_up(self) -> None:
        """After a launch, do what no draft depends on: learn, and count verified trees."""
        recorder = self._drafter.recorder
        if self._drafted is not None:
            self._drafted = None
            compiled = self._compiled
            assert compiled is not None
            with recorder.timed("draft"), self._drafter.surviving("learn"):
                for step in self._uncounted:
                    step.mark_accepted()
                compiled.learn()
        for step in self._uncounted:
            paths = step.accepted_paths
            recorder.count_drafts(step.drafts.forest, paths)
            recorder.counters.moved_tokens += step.drafts.kv_moves(paths).shape[1]
            if self._chains is not None:
                self._chains.observe(step, paths)
        self._uncounted.clear()

    # ---- drafts ----------------------------------------------------------------------------------

    def grow(
        self,
        scheduled: SchedulerOutput,
        chains_only: Collection[str] = (),
        most: int | None = None,
        order: Sequence[str] | None = None,
    ) -> Drafts:
        """The drafts for the slots of this step, grown from all tokens of the steps before it.

        Requests in `chains_only` get no branches. With `most`, there are at most so many nodes.
        The drafts have the `order` of these requests, if all of the step decode.
        """
        self._steps_without_slots = 0
        slots = scheduled.scheduled_spec_decode_tokens
        num_slots = {req_id: len(own) for req_id, own in slots.items()}
        plan = self._plan(scheduled.num_scheduled_tokens, num_slots, chains_only, order)
        most = min(self._drafter.max_step_nodes, sys.maxsize if most is None else most)
        if order is not None and (chains := self._chains_alone(plan, most)) is not None:
            return chains
        later = self._num_later(plan.wanted.rows)
        compiled = self._prepare(plan, later)
        if compiled is None:
            self._learn(True, later)
            with self._drafter.recorder.timed("draft"):
                return self._grow(plan, most)
        step = self._steps[0] if len(self._steps) > later else None
        if step is not None:
            self._waiter.wait(step)
        begin = time.perf_counter()
        drafts = self._draft(compiled, plan, step, most)
        self._drafter.recorder.add_time("draft", begin)
        return drafts

    @property
    def drafted_for(self) -> Collection[str]:
        """The requests that could have a tree in this step, until `add_step`."""
        if self._drafted is None:
            return self._drafter.drafted_for
        arrays, rows = self._progress.arrays, self._drafted.wanted.rows
        # The text of a request that has ended stays behind its rows.
        is_drafted = (arrays.remaining[rows] > 0) & (arrays.num_repeated[rows] == 0)
        return set(compress(self._drafted.req_ids, is_drafted.tolist()))

    def could_draft(self, scheduled: Iterable[str]) -> bool:
        """Whether a request of this step could have a draft, judged by the known tokens."""
        most = self._drafter.options.decoding_length
        plan = self._plan(dict.fromkeys(scheduled, 1), dict.fromkeys(scheduled, most))
        return bool(self._limits(plan.wanted)[:, NODES].any())

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
        plan = self._plan(scheduled, dict.fromkeys(scheduled, most))
        return self._grow(plan, self._drafter.max_step_nodes).pays

    def _plan(
        self,
        scheduled: Mapping[str, int],
        slots: Mapping[str, int],
        chains_only: Collection[str] = (),
        order: Sequence[str] | None = None,
    ) -> _Plan:
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
            lengths = self._progress.arrays.num_tokens[rows]
            nodes[:] = list(map(drafter.most_nodes_of, decoding, lengths.tolist(), nodes.tolist()))
        may_branch = np.full(len(decoding), drafter.may_branch)
        if chains_only:
            may_branch &= [req_id not in chains_only for req_id in decoding]
        wanted = WantedDrafts(rows, np.minimum(nodes, drafter.max_step_nodes), may_branch)
        return _Plan(decoding, wanted, Load(prefill=prefill, prompts=prompts, waits=True))

    def _num_later(self, rows: Int64s) -> int:
        """How many of the last steps have none of these requests: other stages of a pipeline
        compute them, and their tokens are not awaited."""
        for later, step in enumerate(reversed(self._steps)):
            if np.isin(step.rows, rows).any():
                return later
        return len(self._steps)

    def _prepare(self, plan: _Plan, later: int) -> NGramTrieProposer | None:
        """Do what needs no tokens; returns the proposer if it drafts in compiled calls.

        The last `later` steps are not awaited.
        """
        for step in self._steps:
            self._follow_new(step)
        compiled = self._compiled
        if compiled is None or self._grammars:
            return None
        self._learn(True, later + 1)
        self._catch_up()
        verified = self._steps[0].verified if len(self._steps) > later else None
        contexts = self._progress.arrays.num_tokens[plan.wanted.rows]
        with self._drafter.surviving("draft"):
            compiled.plan(plan.req_ids, plan.wanted, contexts, plan.load, verified)
            return compiled
        return None

    def _draft(
        self, compiled: NGramTrieProposer, plan: _Plan, step: LaunchedStep | None, most: int
    ) -> Drafts:
        """The drafts of a step for which the proposer is prepared, once the tokens have arrived."""
        drafter, progress = self._drafter, self._progress
        emitted = NOTHING_EMITTED if step is None else step.emitted
        spans = count_tokens(progress.arrays[:], emitted[:])
        drafts = None
        with drafter.surviving("draft"):
            if step is not None and compiled.needs_accepted():
                step.mark_accepted()
            forest, num_tokens = compiled.draft(
                progress, emitted, spans, plan.wanted, drafter.max_model_len
            )
            if not forest.is_within(drafter.vocab_size):
                forest = drafter.checked(forest, plan.wanted.max_nodes)
            forest = forest.at_most(most)
            whole = self._chains is None or self._chains.are_whole(compiled)
            drafts = Drafts(plan.req_ids, forest, num_tokens, pays=compiled.pays, whole_chain=whole)
        if step is not None:
            self._end(step)
        self._drafted = plan
        return drafts or self._drafts_of(plan, None, most)

    def _chains_alone(self, plan: _Plan, most: int) -> Drafts | None:
        """See `ChainDrafts.alone`; learns from all steps but the last one."""
        compiled, rows = self._compiled, plan.wanted.rows
        if not self.may_be_silent or not self._steps or self._grammars:
            return None
        if self._chains is None or compiled is None:
            return None
        arrays = self._progress.arrays
        if (arrays.texts[rows] == NO_TEXT).any() or arrays.num_repeated[rows].any():
            return None
        last = self._steps[-1]
        drafts = self._chains.alone(plan.req_ids, plan.wanted, last, compiled, most)
        if drafts is not None:
            self._learn(True, 1)
            self._catch_up()
            compiled.insertion.end_step()
        return drafts

    def _grow(self, plan: _Plan, most: int) -> Drafts:
        """The drafts of a step, once the tokens of the steps before it have been passed on."""
        drafter = self._drafter
        trees = self._limits(plan.wanted)
        num_tokens = self._progress.arrays.num_tokens[plan.wanted.rows]
        is_drafted = trees[:, NODES] > 0
        others = num_tokens[~is_drafted]
        load = plan.load._replace(decodes=len(others), context=int(others.sum()))
        limits = [
            DraftLimits(plan.req_ids[i], nodes, depth, bool(may_branch), int(num_tokens[i]))
            for i, (_, nodes, depth, may_branch) in enumerate(trees.tolist())
            if nodes
        ]
        if not limits:
            return self._drafts_of(plan, None, most)
        forest = drafter.grow(limits, load)
        pays = drafter.proposer.pays and forest.num_nodes > 0
        under_grammar = np.array([limit.request_id in self._grammars for limit in limits])
        if under_grammar.any():
            completed = [
                self._grammars.complete(limit, tree) if is_under else tree
                for limit, tree, is_under in zip(limits, forest, under_grammar, strict=True)
            ]
            forest = DraftForest.of(completed).at_most(drafter.max_step_nodes)
            pays = forest.num_nodes > 0
        drafts = self._drafts_of(plan, forest.spread(is_drafted), most)
        from_proposer = np.ones(len(is_drafted), np.bool_)
        from_proposer[is_drafted] = ~under_grammar
        return drafts._replace(from_proposer=from_proposer, pays=pays)

    def _limits(self, wanted: WantedDrafts) -> Int64s:
        """The limits of the trees of a step, as `limit_trees` returns them."""
        trees: Int64s = limit_trees(
            self._progress.arrays[:], wanted[:], self._drafter.max_model_len
        )
        return trees

    def _drafts_of(self, plan: _Plan, forest: DraftForest | None, most: int) -> Drafts:
        """These trees, of at most `most` nodes in all; None for trees without nodes."""
        arrays, rows = self._progress.arrays, plan.wanted.rows
        if forest is None:
            forest = DraftForest.of([]).with_empty(len(rows))
        num_tokens = np.where(arrays.is_decoding[rows], arrays.num_tokens[rows], 0)
        return Drafts(plan.req_ids, forest.at_most(most), num_tokens)

    def num_computed(self, req_ids: Sequence[str]) -> Int32s:
        """KV slots before this step's tokens, int32 [r]; right for requests that decode."""
        rows = [self._requests[req_id].row for req_id in req_ids]
        return (self._progress.arrays.num_tokens[rows] - 1).astype(np.int32)
