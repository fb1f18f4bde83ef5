"""The proposer of the n-gram trie."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from itertools import chain
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from lookahead_vllm.draft.budget.allot import (
    allot,
    compile_budget,
    is_probe_due,
    is_worth_waiting,
)
from lookahead_vllm.draft.budget.cost import Load, StepCost, StepPrices
from lookahead_vllm.draft.insertion import InsertionQueue
from lookahead_vllm.draft.jit import Int32s, Int64s
from lookahead_vllm.draft.options import LookaheadOptions
from lookahead_vllm.draft.progress import (
    NOTHING_EMITTED,
    NOTHING_WANTED,
    PROPOSED,
    EmittedTokens,
    Progress,
    WantedDrafts,
    count_tokens,
)
from lookahead_vllm.draft.proposer import NO_LOAD, DraftLimits, Verified
from lookahead_vllm.draft.sources import ANSWERS, OWN, REFERENCE
from lookahead_vllm.draft.tree import DraftForest
from lookahead_vllm.draft.trie import priors
from lookahead_vllm.draft.trie.acceptance_rate import MAX_WEIGHT, NUM_RATES, AcceptanceRate
from lookahead_vllm.draft.trie.growth import grow_all
from lookahead_vllm.draft.trie.live_texts import LiveTexts
from lookahead_vllm.draft.trie.namespaces import Namespaces, digest_of
from lookahead_vllm.draft.trie.recycling import make_lines
from lookahead_vllm.draft.trie.step import begin_and_grow, begin_step, extend
from lookahead_vllm.draft.trie.suffix import (
    NUM_SPARSE,
    ORDERS,
    PROMPT_END,
    Hashes,
    empty_hashes,
    hashes_of,
)
from lookahead_vllm.draft.trie.table import NO_SPACE, Trie, count_by_space

EXPECTED_ANSWER_TOKENS = 2048
"""A private space has slots for twice as many tokens; after that, its oldest edges are replaced."""

SUFFIXES = [*ORDERS, -NUM_SPARSE, PROMPT_END]
"""Identifies the n-grams of a snapshot: the lengths of the suffixes."""


class Fleet(Protocol):
    """Where answers go, and where others' come from."""

    def follow(self, digest: str, space: int) -> None:
        """A request of a namespace has started, whose answers are in this space."""

    def send(
        self, numbers: Int64s, spaces: Int32s, hashes: Hashes, tokens: Int32s, sizes: Int64s
    ) -> None:
        """t requests have emitted `tokens` int32 [n], `sizes` int64 [t] each; the arrays do not
        change any more.

        Parameters
        ----------
        numbers : int64 [t]
            A number for each request, which no later one gets.
        spaces : int32 [t]
            Of their namespaces; NO_SPACE for requests that share nothing.
        hashes : uint64 [t, NUM_HASHES]
            Of their texts before these tokens.
        """

    def positions(self) -> dict[str, str]:
        """The messages that have been learned, for `followed` of a snapshot."""


class _Plan(NamedTuple):
    """A step before its tokens are known."""

    progress: int
    """What it is worth without nodes, see `Load.progress`."""
    may_probe: bool = False
    prices: StepPrices | None = None
    """None if its nodes are sent whatever they cost."""


class NGramTrieProposer:
    """Grows trees from what followed the same tokens in this request's text and earlier answers.

    Source: Lookahead (KDD 2024), Algorithm 1. Answers are inserted token by token and stay until
    they are pruned. A request's own text is eliminated when the request ends.

    Raises
    ------
    KeyError
        `extend` or `propose` for a request that was not started.
    """

    num_choices = 0
    wants_roots = False

    def __init__(self, options: LookaheadOptions, num_lines: int = 0) -> None:
        self.options = options
        self.cost: StepCost | None = None
        self.pays = False
        self.trie = Trie(options.max_nodes)
        self.rate = AcceptanceRate(priors.load(NUM_RATES))
        self._lines = make_lines(num_lines)
        """The table of the model's choices, see `recycling.py`."""
        self._max_nodes = options.max_nodes_per_tree
        self._min_prob = 0.0
        """Nodes less likely than this are not grown: sending them would not pay."""
        self._namespaces = Namespaces(self.trie)
        self._texts = LiveTexts(options.chain_length)
        self._plan: _Plan
        self._unlearned: tuple[tuple[Any, ...], tuple[Any, ...], bool] | None = None
        """The texts before the tokens of the last `draft`, and the tokens, as `extend` takes
        them, and whether rates have to be learned from them."""
        self.insertion = InsertionQueue()
        """Prompts and references that are not in the trie yet."""
        self.fleet: Fleet | None = None
        """Proposers that get what this one emits; see `draft/fleet/`."""
        self.followed: dict[str, str] = {}
        """Of the restored snapshot: how far it had read the messages of each namespace."""
        self._compile()

    @property
    def num_bytes(self) -> int:
        """The memory of the tables, which is constant."""
        return self.trie.num_bytes + self.rate.num_bytes + self._lines.nbytes

    def start(
        self,
        request_id: str,
        prompt: Sequence[int],
        namespace: str | None = "",
        references: Sequence[Sequence[int]] = (),
        proposer: str | None = None,
    ) -> None:
        """See Proposer. The whole prompt is indexed; an end of sequence in it is a token.

        Long texts are inserted in parts, by the next calls of `propose`, so that no step waits.
        """
        self.finish(request_id)
        tokens = np.array(prompt, np.int32)  # copies: the caller may reuse its memory
        texts = [np.array(reference, np.int32) for reference in references]
        length = sum(map(len, texts))
        row = self._texts.add(request_id)
        self._texts.hashes[row] = hashes = hashes_of(tokens)
        spaces = self._texts.spaces[row]
        with_trie = proposer != "jacobi_window"
        with_choices = len(self._lines) > 0 and proposer != "ngram_trie"
        own = shared = NO_SPACE
        if namespace is not None:
            digest = digest_of(namespace)
            shared = self.shared_space(digest)
            if self.fleet is not None and shared != NO_SPACE:
                self.fleet.follow(digest, shared)
        if with_trie or shared == NO_SPACE:
            own = self.trie.new_private(len(tokens) + length + EXPECTED_ANSWER_TOKENS)
        if with_choices:
            self._texts.keep_choices_in(row, shared or own)
        if not with_trie:
            return
        spaces[OWN], spaces[ANSWERS] = own, shared
        if texts:
            spaces[REFERENCE] = self.trie.new_private(length)
        # A reference may be the answer itself, so it is inserted as a continuation of the prompt.
        for reference in texts:
            for source in (REFERENCE, OWN):
                self._insert_later(row, int(spaces[source]), hashes.copy(), reference)
        self._insert_later(row, own, empty_hashes(), tokens)
        self.insertion.work()

    def extend(self, tokens: Mapping[str, Sequence[int]]) -> None:
        """See Proposer. The new tokens can be drafted at once."""
        self._learn_drafted()
        rows = self._texts.rows_of(tokens)
        emitted = (
            rows,
            np.fromiter(chain.from_iterable(tokens.values()), np.int32),
            np.fromiter(map(len, tokens.values()), np.int64),
            rows,
        )
        self._extend(self._texts.arrays, emitted)

    def _extend(
        self,
        texts: tuple[Any, ...],
        emitted: tuple[Any, ...],
        learns: bool = True,
        inserts: bool = True,
    ) -> None:
        """Learn rates from the `emitted` tokens, insert them, and move the `texts` on."""
        if self.fleet is not None and inserts:
            hashes, spaces, _ = texts
            rows, tokens, sizes, live = emitted
            numbers = self._texts.numbers[live]
            self.fleet.send(numbers, spaces[rows, ANSWERS], hashes[rows], tokens, sizes)
        extend(self.trie.arrays, self._lines, texts, emitted, self.rate.arrays, learns, inserts)

    def follow_chains(self, texts: Int64s, chains: Int32s) -> None:
        """A trained drafter proposes these `chains` after the `texts`, rows as of `text_of`."""
        self._texts.chains[texts] = chains

    def observe(self, verified: Verified) -> None:
        """See Proposer. Does nothing: the trie learns only from emitted tokens."""

    def propose(self, limits: Sequence[DraftLimits], load: Load = NO_LOAD) -> DraftForest:
        """See Proposer."""
        self.insertion.end_step()
        return self._cut(self._grow(self._trees_of(limits)), limits, load)

    def _trees_of(self, limits: Sequence[DraftLimits]) -> Int64s:
        """The limits of the trees, int64 [t, 4], as `grow_all` takes them."""
        row_of = self._texts.request_rows.row_of
        return np.array(
            [(row_of(name), nodes, depth, branch) for name, nodes, depth, branch, _ in limits],
            np.int64,
        ).reshape(-1, 4)

    def _grow(self, trees: Int64s) -> DraftForest:
        """The likeliest trees within the limits `trees`, int64 [t, 4]."""
        texts = self._texts.arrays
        return DraftForest(
            *grow_all(self.trie.arrays, self._lines, texts, trees, self.rate.arrays, self._bounds)
        )

    @property
    def _bounds(self) -> tuple[int, int, float]:
        """The fields of TreeLimits."""
        return self._max_nodes, self.options.branch_length, self._min_prob

    def _cut(self, forest: DraftForest, limits: Sequence[DraftLimits], load: Load) -> DraftForest:
        """These trees, cut to the nodes that are worth their cost."""
        contexts = np.array([limit.context for limit in limits], np.int64)
        self._price(contexts, load, forest.num_nodes)
        return self._cut_by_plan(forest)

    @property
    def _cost(self) -> StepCost | None:
        """The cost of a step; None if nodes are sent whatever they cost."""
        return self.cost if self.options.budget == "auto" else None

    @property
    def step_seconds(self) -> tuple[float, float] | None:
        """The time of the planned step without nodes, and the part in which the device waits for
        drafts; None if nobody knows it."""
        prices = self._plan.prices
        return None if prices is None else (prices.base, prices.waiting)

    def proposed_after(self, texts: Int64s) -> Int32s:
        """A drafter's chain after each of the `texts`: int32 [t, K]."""
        chains: Int32s = self._texts.chains[texts, :, 0, PROPOSED]
        return chains

    def _price(self, contexts: Int64s, load: Load, num_nodes: int) -> None:
        progress = load.progress(len(contexts))
        self._plan = _Plan(progress)
        cost = self._cost
        if cost is not None and len(contexts):
            prices = cost.prices(contexts, load, num_nodes)
            self._plan = _Plan(progress, is_probe_due(cost, load), prices)

    def _cut_by_plan(self, forest: DraftForest) -> DraftForest:
        progress, may_probe, prices = self._plan
        self.pays = forest.num_nodes > 0
        if self.cost is None or prices is None:
            return forest
        if not forest.num_nodes:
            self._min_prob /= 2  # no node reached it, so the next trees have less likely nodes
            return forest
        forest, _, rate, min_prob = allot(forest, progress, prices, may_probe)
        # Nodes far below the probability that pays are not grown in the next step.
        self._min_prob = min_prob / 2
        speedup = rate * (prices.base - prices.waiting) / progress
        self.pays = forest.num_nodes > 0 and is_worth_waiting(self.cost, speedup)
        return forest

    # ---- a step whose drafts the device waits for ------------------------------------------------

    def text_of(self, request_id: str) -> int:
        """The row of a live request's text; KeyError for an unknown one."""
        return self._texts.request_rows.row_of(request_id)

    def plan(
        self,
        request_ids: Sequence[str],
        wanted: WantedDrafts,
        contexts: Int64s,
        load: Load,
        verified: Verified | None,
    ) -> None:
        """Prepare `draft` for the next step, before its tokens are known.

        Parameters
        ----------
        request_ids
            t live requests.
        wanted
            The most nodes of each.
        contexts : int64 [t]
            Their committed tokens so far.
        load
            The step's other work.
        verified
            Choices of the model that will arrive together with the tokens.
        """
        most = int(np.minimum(wanted.max_nodes, self._max_nodes).sum())
        self._plan = _Plan(0)
        if most:
            self._price(contexts, load, most)

    def needs_accepted(self) -> bool:
        """Whether the next `draft` needs to know the accepted nodes of what is `verified`."""
        return False

    def draft(
        self,
        progress: Progress,
        emitted: EmittedTokens,
        spans: Int64s,
        wanted: WantedDrafts,
        max_model_len: int,
    ) -> tuple[DraftForest, Int64s]:
        """The trees of a step whose `plan` was made, in few compiled calls.

        Moves the texts on by the `emitted` tokens, of which `count_tokens` returned the `spans`.
        What can be learned from them waits for `learn`, so the drafts do not know the n-grams that
        end in them.

        Returns
        -------
        DraftForest, int64 [t]
            A tree for each wanted request, possibly empty, and the known tokens of each; 0 if it
            does not decode.
        """
        self._learn_drafted()
        step = progress.arrays[:], emitted[:], spans, wanted[:], self._texts.arrays, max_model_len
        forest, num_tokens = self._begin_and_grow(step)
        return self._cut_by_plan(forest), num_tokens

    def _begin_and_grow(self, step: tuple[Any, ...]) -> tuple[DraftForest, Int64s]:
        """Move the texts on, and grow the next trees; `step` has the arguments of `begin_step`."""
        nodes, before, new, num_tokens = begin_and_grow(
            *step, self.trie.arrays, self._lines, self.rate.arrays, self._bounds
        )
        self._unlearned = before, new, True
        return DraftForest(*nodes), num_tokens

    def learn(self) -> None:
        """Learn from the tokens of the last `draft`, and insert texts for a share of the step.

        By now, the accepted nodes are marked in what the plan had `verified`.
        """
        self._learn_drafted()
        self.insertion.end_step()

    def _learn_drafted(self) -> None:
        if self._unlearned is not None:
            unlearned, self._unlearned = self._unlearned, None
            self._extend(*unlearned)

    def finish(self, request_id: str) -> None:
        """See Proposer. O(1); leaves the n-grams of other requests unchanged."""
        self._learn_drafted()
        row = self._texts.request_rows.pop(request_id)
        if row is not None:
            self.insertion.drop(row)
            for space in self._texts.spaces_of(row):
                self.trie.eliminate(space)

    def shared_space(self, digest: str) -> int:
        """The space of a namespace's answers, by the digest of its name; NO_SPACE if it has none
        and there are no more."""
        return self._namespaces.space_of(digest, self._texts.shared_spaces)

    def snapshot(self) -> tuple[dict[str, NDArray[Any]], dict[str, Any]]:
        """The learned arrays by name, not copied, and further facts that can be stored as JSON.

        Another proposer with the same `max_nodes` can `restore` them.
        """
        arrays: dict[str, NDArray[Any]] = {
            "edges": self.trie.edges,
            "counters": self.trie.counters,
            "rates": self.rate.rates,
            "trials": self.rate.trials,
            "weights": self.rate.weights,
        }
        facts = {"namespaces": self._namespaces.to_dict(), "suffixes": SUFFIXES}
        facts["followed"] = self.followed if self.fleet is None else self.fleet.positions()
        return arrays, {**facts, "share": self.options.share}

    def restore(self, arrays: Mapping[str, NDArray[Any]], facts: Mapping[str, Any]) -> None:
        """Replace what was learned with a snapshot, whose live requests are not live here.

        Raises
        ------
        ValueError
            The snapshot's arrays have other shapes or dtypes, or with share "all" it holds answers
            of all namespaces, which this proposer keeps apart; nothing has changed.
        """
        current, current_facts = self.snapshot()
        if facts.get("suffixes") != current_facts["suffixes"]:
            raise ValueError("it holds n-grams of other lengths than this release of lookahead")
        if facts.get("share") == "all" != self.options.share:
            raise ValueError(
                f"it was saved with share='all', without namespaces, and this server has "
                f"share={self.options.share!r}"
            )
        for name, array in current.items():
            given = arrays.get(name)
            if given is None or given.shape != array.shape or given.dtype != array.dtype:
                raise ValueError(
                    f"its {name} are {None if given is None else (given.dtype, given.shape)}, "
                    f"where {(array.dtype, array.shape)} is needed"
                )
        for name, array in current.items():
            array[:] = arrays[name]
        self.rate.weights.clip(-MAX_WEIGHT, MAX_WEIGHT, out=self.rate.weights)  # of older releases
        self.trie.recount()
        self._namespaces.restore(facts["namespaces"])
        self.followed = {**facts.get("followed", {})}

    def _insert_later(self, row: int, space: int, hashes: Hashes, tokens: Int32s) -> None:
        """Insert `tokens` after the text of `hashes`, as soon as a step has time for it."""
        if space != NO_SPACE:
            with_whole = space != self._texts.spaces[row, OWN]
            insert = partial(self.trie.insert, space, hashes, with_whole=with_whole)
            self.insertion.add(row, insert, tokens)

    def _compile(self) -> None:
        """Run every kernel once on a tiny request, so that no request waits for the compiler."""
        self.start("", [0])
        self.extend({"": []})
        self.propose([DraftLimits("", 1, 1)])
        self._compile_step()
        compile_budget()
        self.finish("")
        count_by_space(self.trie.edges[:0], np.ones(1, np.int64))

    def _compile_step(self) -> None:
        arrays, texts = Progress().arrays[:], self._texts.arrays
        spans = count_tokens(arrays, NOTHING_EMITTED[:])
        begin_step(arrays, NOTHING_EMITTED[:], spans, NOTHING_WANTED[:], texts, 1)
        self._price(np.empty(0, np.int64), NO_LOAD, 0)
        self.draft(Progress(), NOTHING_EMITTED, spans, NOTHING_WANTED, 1)
        self.learn()
