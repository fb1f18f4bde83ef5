"""A step in few compiled calls drafts, and then learns, what single calls do."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from lookahead_vllm.draft.budget.cost import CostCurve, Load, StepCost
from lookahead_vllm.draft.fleet.replica import Replica
from lookahead_vllm.draft.jit import Int32s
from lookahead_vllm.draft.progress import (
    GAP,
    PROPOSED,
    EmittedTokens,
    Progress,
    WantedDrafts,
    no_chains,
)
from lookahead_vllm.draft.proposer import Verified
from lookahead_vllm.draft.sources import DRAFTER
from lookahead_vllm.draft.stepping import DraftLimits, draft_trees, read
from lookahead_vllm.draft.tree import DraftForest
from lookahead_vllm.draft.trie.acceptance_rate import HITS
from lookahead_vllm.draft.trie.hybrid import HybridProposer
from lookahead_vllm.draft.trie.proposer import NGramTrieProposer
from lookahead_vllm.draft.trie.suffix import advance
from lookahead_vllm.options.server import CHAIN_LENGTH, LookaheadOptions

REQUESTS = 20
MAX_MODEL_LEN = 4000
DRAFTER_OF_3 = {CHAIN_LENGTH: 3}
IDS = [str(i) for i in range(REQUESTS)]


class Pair:
    """Two proposers that get the same steps.

    `late` gets them as from the model runner. Of `other`, the texts are moved on in Python when the
    tokens arrive; then it drafts, and then it learns from the tokens.
    """

    def __init__(self, kind: type[NGramTrieProposer], options: dict[str, Any]) -> None:
        self.rng = np.random.default_rng(1)
        settings = {"max_nodes": 1 << 16, "num_speculative_tokens": 24} | options
        self.other, self.late = (kind(LookaheadOptions(**settings)) for _ in range(2))
        self.progress = Progress()
        self.lengths = self.prompt_lengths = self.rng.integers(20, 60, REQUESTS)
        self.rows = np.array(
            [self.progress.add(i, n) for i, n in zip(IDS, self.lengths.tolist(), strict=True)]
        )
        self.replicas = [Replica(one) for one in (self.other, self.late)]
        for one in (self.other, self.late):
            one.insertion.seconds = np.inf
            if options["budget"] == "auto":
                one.cost = StepCost(CostCurve([1, 64, 512], [6.0, 6.4, 12.0]), 1e-6, 1e-6, 2e-6)
        for request_id, row, length in zip(IDS, self.rows, self.lengths, strict=True):
            prompt = self.text(length)
            for one in (self.other, self.late):
                one.start(request_id, prompt)
            self.progress.follow(row, self.late.text_of(request_id), 1000, [])

    def text(self, length: int) -> list[int]:
        """A part of a loop."""
        start = int(self.rng.integers(0, 40))
        return [(start + i * (1 + i % 3)) % 40 for i in range(length)]

    def step(self, sent: DraftForest | None) -> list[DraftForest]:
        """Learn from the step that verified the trees `sent`; returns the next ones of both."""
        bursts = {request_id: self.text(int(self.rng.integers(0, 4))) for request_id in IDS}
        verified = None
        if sent is not None and self.late.num_choices:
            verified = self.verify(sent)
        nodes, may_branch = self.rng.integers(0, 25, REQUESTS), self.rng.random(REQUESTS) < 0.8
        contexts, load = self.lengths, Load()
        self.lengths = contexts + [len(burst) for burst in bursts.values()]

        tokens = np.zeros((REQUESTS, 4), np.int64)
        for i, burst in enumerate(bursts.values()):
            tokens[i, : len(burst)] = burst
        counts = np.array([len(burst) for burst in bursts.values()], np.int32)
        wanted = WantedDrafts(self.rows, nodes, may_branch)
        self.late.plan(IDS, wanted, contexts, load, verified)
        chains = self.chains()
        emitted = EmittedTokens(self.rows, tokens, counts, chains)
        spans, arrays = emitted.new_spans(), self.progress.arrays
        late, num_tokens = self.late.draft(arrays, emitted, spans, wanted, MAX_MODEL_LEN)
        self.late.learn()
        is_decoding = arrays.is_decoding[self.rows]
        assert num_tokens.tolist() == np.where(is_decoding, self.lengths, 0).tolist()

        before, new = self.move_on({i: burst for i, burst in bursts.items() if burst})
        if verified is not None:  # rates are learned before the choices are known
            hashes, *others = before
            self.other._extend((hashes.copy(), *others), new, inserts=False)
            read(self.other, {}, verified)
        self.other._texts.chains[self.other._texts.rows_of(IDS)] = chains
        limits = [
            DraftLimits(i, most, most, branch, context)
            for i, most, branch, context in zip(
                IDS, nodes.tolist(), may_branch.tolist(), contexts.tolist(), strict=True
            )
        ]
        other = draft_trees(self.other, limits, load)
        self.other._extend(before, new, learns=verified is None)
        return [late, other]

    def chains(self) -> Int32s:
        """What a trained drafter proposes; nothing without one."""
        chains = no_chains(self.late.options.chain_length, REQUESTS)
        for row in range(REQUESTS if chains.size else 0):
            chains[row, :, 0, PROPOSED] = self.text(chains.shape[1])
            chains[row, :, 1:, PROPOSED] = self.rng.integers(0, 40, chains[row, :, 1:, 0].shape)
        chains[..., GAP] = self.rng.integers(0, 4, chains.shape[:-1])
        return chains

    def move_on(self, bursts: dict[str, list[int]]) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        """Move the texts of `other` on; returns what it has to learn."""
        texts = self.other._texts
        rows = texts.rows_of(bursts)
        before = tuple(array[rows] for array in texts.arrays)
        for row, burst in zip(rows, bursts.values(), strict=True):
            for token in burst:
                after = np.empty_like(texts.hashes[row])
                advance(texts.hashes[row], token, after)
                texts.hashes[row] = after
        sizes = np.array([len(burst) for burst in bursts.values()])
        tokens = np.array([token for burst in bursts.values() for token in burst], np.int32)
        return before, (np.arange(len(rows)), tokens, sizes, rows)

    def verify(self, forest: DraftForest) -> Verified:
        """Random choices; the first node of every second tree was accepted."""
        t, n, k = len(forest), forest.num_nodes, self.late.num_choices
        trees = np.flatnonzero(forest.sizes)[::2]
        accepted = np.zeros(n, np.bool_)
        accepted[forest.firsts[trees]] = True
        at_roots = self.rng.integers(0, 40, (t, k)).astype(np.int32)
        at_nodes = self.rng.integers(0, 40, (n, k)).astype(np.int32)
        gaps = self.rng.random((t + n, k)).astype(np.float32) * 4
        return Verified(IDS, forest, at_roots, at_nodes, gaps, accepted)

    def state(self, one: NGramTrieProposer) -> list[bytes]:
        """All that a proposer has learned."""
        texts = one._texts
        tables = one.trie.edges, one._lines, texts.hashes, texts.spaces, *one.rate.arrays
        return [table.tobytes() for table in tables]


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (NGramTrieProposer, dict(budget=24)),
        (NGramTrieProposer, dict(budget="auto")),
        (HybridProposer, dict(budget=24, window_size=0, proposer="hybrid")),
        (HybridProposer, dict(budget=24, window_size=2, proposer="hybrid")),
        (HybridProposer, dict(budget="auto", proposer="hybrid", window_size=2)),
        (NGramTrieProposer, dict(budget=24, drafter=DRAFTER_OF_3)),
        (
            HybridProposer,
            dict(budget=24, window_size=0, proposer="hybrid", drafter=DRAFTER_OF_3),
        ),
    ],
    ids=[
        "trie",
        "trie, auto",
        "hybrid",
        "hybrid with a comb in every step",
        "hybrid, auto",
        "trie and drafter",
        "hybrid and drafter",
    ],
)
def test_drafts_and_what_is_learned_are_the_same(
    kind: type[NGramTrieProposer], options: dict[str, Any]
) -> None:
    pair = Pair(kind, options)
    num_nodes = num_branching = 0
    sources: set[int] = set()
    before = None
    for _ in range(30):
        late, other = pair.step(before)
        assert [own.tolist() for own in late.arrays] == [own.tolist() for own in other.arrays]
        assert pair.state(pair.late) == pair.state(pair.other)
        num_nodes += late.num_nodes
        num_branching += int(late.branching.sum())
        sources.update(late.sources.tolist())
        before = late
    (other_pieces,), (late_pieces,) = (one.take().values() for one in pair.replicas)
    for own, others in zip(late_pieces, other_pieces, strict=True):
        assert own.tolist() == others.tolist()
    assert late_pieces.sizes.tolist() == (pair.lengths - pair.prompt_lengths).tolist()
    assert num_nodes > 1000 and num_branching > 50
    assert (DRAFTER in sources) == (pair.late.options.drafter is not None)


def test_what_a_request_has_said_is_learned_before_it_ends() -> None:
    pair = Pair(NGramTrieProposer, {"budget": 24})
    tokens = np.arange(100, 104)[None].repeat(REQUESTS, axis=0)
    wanted = WantedDrafts(pair.rows, np.zeros(REQUESTS, np.int64), np.ones(REQUESTS, np.bool_))
    pair.late.plan(IDS, wanted, pair.lengths, Load(), None)
    emitted = EmittedTokens(pair.rows, tokens, np.full(REQUESTS, 4, np.int32))
    spans = emitted.new_spans()
    pair.late.draft(pair.progress.arrays, emitted, spans, wanted, MAX_MODEL_LEN)
    pair.late.finish("0")
    pair.late.start("again", [100, 101])
    tree = draft_trees(pair.late, [DraftLimits("again", 2, 2)])[0]
    assert tree.tokens.tolist() == [102, 103]


def test_choices_do_not_predict_the_tokens_that_were_chosen_from_them() -> None:
    """No context comes twice, so the model's choices are of no use, and no rate says otherwise."""
    pair = Pair(HybridProposer, dict(budget=4, window_size=0, proposer="hybrid"))
    late, tokens = pair.late, np.arange(1000, 1000 + 60 * REQUESTS).reshape(60, REQUESTS, 1)
    before = late.rate.trials.copy()
    sent: DraftForest | None = None
    wanted = WantedDrafts(pair.rows, np.full(REQUESTS, 4), np.ones(REQUESTS, np.bool_))
    for step in tokens:
        verified = None
        if sent is not None:
            verified = pair.verify(sent)
            verified.at_roots[:, 0] = step[:, 0]  # which is why they were emitted
        late.plan(IDS, wanted, pair.lengths, Load(), verified)
        emitted = EmittedTokens(pair.rows, step, np.ones(REQUESTS, np.int32))
        spans = emitted.new_spans()
        sent, _ = late.draft(pair.progress.arrays, emitted, spans, wanted, MAX_MODEL_LEN)
        late.learn()
    hits = late.rate.trials[:, HITS] - before[:, HITS]
    assert not (hits > 0.5).any()
