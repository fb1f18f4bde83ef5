"""The proposer behind the n-gram trie."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from itertools import chain
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lookahead_vllm.draft.budget.allot import allot, compile_budget
from lookahead_vllm.draft.budget.cost import Load, StepCost
from lookahead_vllm.draft.insertion import InsertionQueue
from lookahead_vllm.draft.jit import Int32s, Int64s, kernel
from lookahead_vllm.draft.options import LookaheadOptions
from lookahead_vllm.draft.proposer import (
    NO_LOAD,
    NO_OVERRIDES,
    DraftLimits,
    RequestOverrides,
    Verified,
)
from lookahead_vllm.draft.request_rows import RequestRows
from lookahead_vllm.draft.sources import ANSWERS, OWN, REFERENCE
from lookahead_vllm.draft.tree import DraftForest
from lookahead_vllm.draft.trie.acceptance_rate import (
    AcceptanceRate,
    Rates,
    Weights,
    judging_scratch,
    learn_token,
    weight_set,
)
from lookahead_vllm.draft.trie.candidates import (
    CHOICES,
    MAX_CANDIDATES,
    NAMES,
    NUM_SPACES,
    SLOT,
    candidate_scratch,
    find_candidates,
    look_up,
)
from lookahead_vllm.draft.trie.growth import HIERARCHICAL, PARALLEL, SINGLE, grow_all
from lookahead_vllm.draft.trie.namespaces import Namespaces
from lookahead_vllm.draft.trie.recycling import find_choices, make_lines
from lookahead_vllm.draft.trie.suffix import (
    NUM_SPARSE,
    NUM_SUFFIXES,
    ORDERS,
    ROW,
    Hashes,
    advance,
    empty_row,
    row_of,
)
from lookahead_vllm.draft.trie.table import BYTES_PER_NODE, NO_SPACE, Trie, count, count_by_space

MAX_TOKENS_LEARNED = 64
"""Tokens of a step from which acceptance rates are learned, some 0.1 ms; every second one, or third
one and so on where there are more."""

EXPECTED_ANSWER = 2048  # tokens; there is room for twice as many, then the oldest go

SUFFIXES = [*ORDERS, -NUM_SPARSE]
"""What the n-grams of a snapshot are."""

_BRANCHING = {"single": SINGLE, "parallel": PARALLEL, "hierarchical": HIERARCHICAL}


class _Texts:
    """The live requests: how each text ends, and the spaces of the trie that it reads and writes.

    Attributes
    ----------
    rows : uint64 [capacity, ROW]
    spaces : int32 [capacity, NUM_SPACES]
    """

    def __init__(self) -> None:
        self.request_rows = RequestRows()
        self.rows: Hashes = np.zeros((self.request_rows.capacity, ROW), np.uint64)
        self.spaces: Int32s = np.zeros((self.request_rows.capacity, NUM_SPACES), np.int32)

    def add(self, request_id: str) -> int:
        """The number of a new text."""
        number = self.request_rows.add(request_id)
        self.rows, self.spaces = (
            self.request_rows.widened(self.rows),
            self.request_rows.widened(self.spaces),
        )
        return number

    def numbers(self, request_ids: Iterable[str]) -> Int64s:
        """int64 [t]"""
        return self.request_rows.numbers(request_ids)

    def shared_spaces(self) -> set[int]:
        """Spaces of answers that a text reads or writes; of some that have ended, too."""
        return set(self.spaces[:, [ANSWERS, CHOICES]].ravel().tolist())


class NGramTrieProposer:
    """Trees from what this request and earlier answers said after the same words.

    Source: Lookahead (KDD 2024), Algorithm 1. Answers are inserted as they come and stay, until
    they are pruned; a request's own text is eliminated when the request ends.

    Raises
    ------
    KeyError
        `extend` or `propose` for a request that was not started.
    """

    num_choices = 0
    wants_roots = False
    num_lines = 0
    """Of the table in `recycling.py`."""

    def __init__(self, options: LookaheadOptions, cost: StepCost | None = None) -> None:
        self.options = options
        self.cost = cost
        self.min_prob_beside_prompt = 0.0
        max_nodes = options.max_nodes
        if options.max_bytes is not None:
            max_nodes = min(max_nodes, options.max_bytes // BYTES_PER_NODE)
        self.trie = Trie(max_nodes)
        self.rate = AcceptanceRate()
        self._lines = make_lines(self.num_lines)
        self._branching = _BRANCHING[options.draft]
        self._max_nodes = options.most_nodes
        self._least = 0.0
        self._namespaces = Namespaces(self.trie)
        self._texts = _Texts()
        self.insertion = InsertionQueue()
        """Prompts and references that are not in the trie yet."""
        self._compile()

    @property
    def num_bytes(self) -> int:
        """What the tables take; it does not grow."""
        return self.trie.num_bytes + self.rate.num_bytes

    def start(
        self,
        request_id: str,
        prompt: Sequence[int],
        namespace: str | None = "",
        references: Sequence[Sequence[int]] = (),
        overrides: RequestOverrides = NO_OVERRIDES,
    ) -> None:
        """See Proposer. The prompt is indexed whole: an end of sequence in it is a token.

        What is long is inserted in parts, by the next calls of `propose`, so that no step waits.
        """
        self.finish(request_id)
        tokens = np.array(prompt, np.int32)  # copies: the caller's memory may not stay as it is
        texts = [np.array(reference, np.int32) for reference in references]
        length = sum(map(len, texts))
        number = self._texts.add(request_id)
        self._texts.rows[number] = row = row_of(tokens)
        spaces = self._texts.spaces[number]
        spaces[:] = NO_SPACE
        with_trie = self.options.sources != "none" and overrides.proposer != "jacobi_window"
        with_choices = self.num_choices > 0 and overrides.proposer != "ngram_trie"
        if not (with_trie or with_choices):
            return
        own = self.trie.new_private(len(tokens) + length + EXPECTED_ANSWER)
        shared = NO_SPACE
        if namespace is not None:
            shared = self._namespaces.space_of(namespace, self._texts.shared_spaces)
        if with_choices:
            spaces[CHOICES] = shared or own
        if not with_trie:
            return
        spaces[OWN], spaces[ANSWERS] = own, shared
        if texts:
            spaces[REFERENCE] = self.trie.new_private(length)
        # A reference may be the answer itself, so it is one that begins where the answer does.
        for reference in texts:
            for source in (REFERENCE, OWN):
                self._insert_later(number, int(spaces[source]), row.copy(), reference)
        if self.options.sources != "output":
            self._insert_later(number, own, empty_row(), tokens)
        self.insertion.work()

    def extend(self, tokens: Mapping[str, Sequence[int]]) -> None:
        """See Proposer. What was just said can be drafted at once."""
        trie, rate = self.trie, self.rate
        _extend(
            trie.edges,
            trie.live,
            trie.counters,
            self._lines,
            self._texts.spaces,
            self._texts.rows,
            self._texts.numbers(tokens),
            np.fromiter(chain.from_iterable(tokens.values()), np.int32),
            np.fromiter(map(len, tokens.values()), np.int64),
            rate.rates,
            rate.trials,
            rate.weights,
            self.options.sources in ("both", "output"),
        )

    def observe(self, verified: Verified) -> None:
        """See Proposer. What was emitted is all that the trie learns from."""

    def propose(self, limits: Sequence[DraftLimits], load: Load = NO_LOAD) -> DraftForest:
        """See Proposer."""
        contexts = np.array([limit.context for limit in limits], np.int64)
        return self._cut(self._grow(limits, self._max_nodes), contexts, load)

    def _grow(self, limits: Sequence[DraftLimits], max_nodes: Int64s | int) -> DraftForest:
        """The likeliest trees of at most so many nodes each."""
        self.insertion.end_step()
        bounds = np.array(
            [(nodes, depth, branch) for _, nodes, depth, branch, _ in limits], np.int64
        ).reshape(-1, 3)
        return DraftForest(
            *grow_all(
                self.trie.edges,
                self.trie.live,
                self._lines,
                self._texts.spaces,
                self._texts.rows,
                self._texts.numbers(limit.request_id for limit in limits),
                self.rate.rates,
                self.rate.weights,
                np.minimum(bounds[:, 0], max_nodes).clip(0),
                bounds[:, 1].clip(0, self.options.branch_length),
                np.where(bounds[:, 2], self._branching, SINGLE),
                self._least,
            )
        )

    def _cut(self, forest: DraftForest, contexts: Int64s, load: Load) -> DraftForest:
        """What of these trees is worth its cost."""
        if self.cost is None or self.options.budget != "auto":
            return forest
        if not forest.num_nodes:
            self._least /= 2  # nothing comes near it, so the next trees are grown further down
            return forest
        allotment = allot(forest, contexts, self.cost, load)
        # What is far from being sent is not worth growing next time.
        self._least = allotment.least / 2
        self.min_prob_beside_prompt = allotment.rate * self.cost.marginal(contexts.mean())
        return forest.cut(allotment.sizes, allotment.chained)

    def finish(self, request_id: str) -> None:
        """See Proposer. O(1): nothing that another request counted on is touched."""
        number = self._texts.request_rows.pop(request_id)
        if number is not None:
            self.insertion.drop(number)
            for space in self._texts.spaces[number].tolist():
                self.trie.eliminate(space)

    def snapshot(self) -> tuple[dict[str, NDArray[Any]], dict[str, Any]]:
        """What was learned: the live arrays by name, and what else there is to know, as JSON.

        Another proposer with the same `max_nodes` can `restore` it.
        """
        arrays: dict[str, NDArray[Any]] = {
            "edges": self.trie.edges,
            "counters": self.trie.counters,
            "rates": self.rate.rates,
            "trials": self.rate.trials,
            "weights": self.rate.weights,
        }
        return arrays, {"namespaces": self._namespaces.to_dict(), "suffixes": SUFFIXES}

    def restore(self, arrays: Mapping[str, NDArray[Any]], facts: Mapping[str, Any]) -> None:
        """Go on from a snapshot. The requests that were live then are not live now.

        Raises
        ------
        ValueError
            The snapshot is of another shape; nothing has changed.
        """
        own, own_facts = self.snapshot()
        if facts.get("suffixes") != own_facts["suffixes"]:
            raise ValueError("it holds n-grams of other lengths than this release of lookahead")
        for name, array in own.items():
            given = arrays.get(name)
            if given is None or given.shape != array.shape or given.dtype != array.dtype:
                raise ValueError(
                    f"its {name} are {None if given is None else (given.dtype, given.shape)}, "
                    f"where {(array.dtype, array.shape)} is needed"
                )
        for name, array in own.items():
            array[:] = arrays[name]
        self.trie.recount()
        self._namespaces.restore(facts["namespaces"])

    def _insert_later(self, number: int, space: int, row: Hashes, tokens: Int32s) -> None:
        """Insert `tokens` behind the text of `row`, as soon as a step has time for it."""
        if space != NO_SPACE:
            self.insertion.add(number, partial(self.trie.insert, space, row), tokens)

    def _compile(self) -> None:
        """Run every kernel on nothing, so that no request waits for the compiler."""
        self.start("", [0])
        self.extend({"": []})
        self.propose([DraftLimits("", 1, 1)])
        compile_budget()
        self.finish("")
        count_by_space(self.trie.edges[:0], [1])


@kernel
def _extend(
    edges: Int64s,
    live: Int32s,
    counters: Int64s,
    lines: Int32s,
    all_spaces: Int32s,
    all_rows: Hashes,
    texts: Int64s,
    tokens: Int32s,
    sizes: Int64s,
    rates: Rates,
    trials: Rates,
    weights: Weights,
    is_source: bool,
) -> None:
    """`tokens` int32 [sum(sizes)] of the texts int64 [t], `sizes` int64 [t] of each."""
    following = np.empty(ROW, np.uint64)
    found, longest, places = candidate_scratch()
    which, inputs = judging_scratch()
    apart = -(-len(tokens) // MAX_TOKENS_LEARNED)
    end = 0
    for i, text in enumerate(texts):
        spaces, row = all_spaces[text], all_rows[text]
        first, end = end, end + sizes[i]
        for at in range(first, end):
            token = tokens[at]
            look_up(edges, live, spaces, row, places, NUM_SUFFIXES)
            if at % apart == 0:
                size = find_candidates(
                    edges, spaces, found, longest, places, MAX_CANDIDATES, NUM_SUFFIXES
                )
                longest[CHOICES], size = find_choices(
                    lines, spaces[CHOICES], row, found, size, MAX_CANDIDATES
                )
                chosen = weight_set(longest, spaces)
                learn_token(found, size, token, rates, trials, weights, chosen, which, inputs)
            for source in (OWN, ANSWERS):
                if is_source and spaces[source] != NO_SPACE:
                    for suffix in range(NUM_SUFFIXES):
                        count(
                            edges,
                            live,
                            counters,
                            places[NAMES, source, suffix],
                            places[SLOT, source, suffix],
                            token,
                        )
            advance(row, token, following)
            row[:] = following
