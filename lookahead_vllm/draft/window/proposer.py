"""Lookahead Decoding: a window refined by Jacobi iteration, its n-grams, and their verification.

Source: Fu et al., ICML 2024, Algorithms 2 to 4. Both branches form one draft tree: first the
candidates of the verification branch, best first, then the comb of the lookahead branch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from lookahead_vllm.draft.budget.allot import allot, compile_budget, is_probe_due
from lookahead_vllm.draft.budget.cost import Load, StepCost
from lookahead_vllm.draft.insertion import InsertionQueue
from lookahead_vllm.draft.jit import Int32s, Int64s, kernel
from lookahead_vllm.draft.options import LookaheadOptions
from lookahead_vllm.draft.proposer import NO_LOAD, DraftLimits, Verified
from lookahead_vllm.draft.sources import OWN, REFERENCE, WINDOW
from lookahead_vllm.draft.tree import DraftForest, ForestArrays, first_nodes
from lookahead_vllm.draft.window.branch import LookaheadBranch
from lookahead_vllm.draft.window.pool import NGram, NGramPool

_RANKS = 16  # ranks with rates of their own; all later ranks share the last one
_PRIOR_RATE, _PRIOR_TRIALS = 0.3, 4.0


@dataclass(slots=True)
class _Text:
    pool: NGramPool
    tail: list[int]
    """The last N tokens of the text, or all of a shorter one."""
    ranks: NDArray[np.uint8] = field(default_factory=lambda: np.empty(0, np.uint8))
    """uint8 [n]: the ranks of the candidates' nodes in the tree that was sent last."""


class _Rates:
    """Acceptance rates of the candidates' nodes, by rank and depth.

    A node's rank is that of the first candidate that it belongs to; the candidate that was added
    last has rank 0.

    Attributes
    ----------
    rates : float32 [_RANKS, N]
        Of nodes whose parents were accepted.
    """

    def __init__(self, ngram_size: int) -> None:
        self._trials = np.full((_RANKS, ngram_size), _PRIOR_TRIALS)
        self._hits = _PRIOR_RATE * self._trials
        self.rates = (self._hits / self._trials).astype(np.float32)

    def learn(self, ranks: Int64s, depths: Int64s, hits: NDArray[np.bool_]) -> None:
        """Record nodes whose parents were accepted, and the `hits` among them; all [n]."""
        np.add.at(self._trials, (ranks, depths), 1.0)
        np.add.at(self._hits, (ranks, depths), hits)
        self.rates = (self._hits / self._trials).astype(np.float32)


class _Candidates(NamedTuple):
    """The candidates of a step: n-grams without their first tokens."""

    tokens: Int32s
    """int32 [c, N - 1]"""
    sources: NDArray[np.uint8]
    """uint8 [c]"""
    counts: Int64s
    """int64 [t]: the candidates of each tree."""


class _Limits(NamedTuple):
    """How large the candidates' trees may be."""

    max_nodes: Int64s
    """int64 [t], as the next one."""
    max_depths: Int64s
    may_branch: NDArray[np.bool_]
    """bool [t]"""


class JacobiWindowProposer:
    """Drafts n-grams that the model generates in the window; needs no earlier text.

    Source: Lookahead Decoding (ICML 2024). Requests share nothing.

    Raises
    ------
    KeyError
        `extend` or `propose` for a request that was not started.
    """

    num_choices = 1
    wants_roots = False

    def __init__(self, options: LookaheadOptions) -> None:
        self.options = options = options.for_model(0)
        self.cost: StepCost | None = None
        self.pays = False
        self.branch = LookaheadBranch(options)
        self._rates = _Rates(options.ngram_size)
        self._texts: dict[str, _Text] = {}
        self._roots: dict[str, int] = {}
        """By request: the last token before the latest step, the root of its tree."""
        self._max_nodes = options.max_nodes_per_tree
        self.insertion = InsertionQueue()
        """Prompts and references that are not in their pools yet."""
        self._compile()

    def start(
        self,
        request_id: str,
        prompt: Sequence[int],
        namespace: str | None = "",
        references: Sequence[Sequence[int]] = (),
        proposer: str | None = None,
    ) -> None:
        """See Proposer. Adds references to the pool, and the prompt if `pool_from_prompt`.

        Long texts are inserted in parts, by the next calls of `propose`, so that no step waits.
        """
        self.finish(request_id)
        options = self.options
        tokens = np.array(prompt, np.int32)
        pool = NGramPool(options.ngram_size, int(options.guess_set_size))
        if options.pool_from_prompt:
            self.insertion.add(request_id, pool.inserter(OWN), tokens)
        for reference in references:
            self.insertion.add(request_id, pool.inserter(REFERENCE), np.array(reference, np.int32))
        self.insertion.work()
        self._texts[request_id] = _Text(pool, tokens[-options.ngram_size :].tolist())
        self.branch.start(request_id, tokens)

    def extend(self, tokens: Mapping[str, Sequence[int]]) -> None:
        """See Proposer. Adds the n-grams that end in the new tokens to the pool."""
        for request_id, new in tokens.items():
            text = self._texts[request_id]
            self._roots[request_id] = text.tail[-1] if text.tail else 0
            n = text.pool.ngram_size
            tail = [*text.tail[-(n - 1) :], *new]
            text.pool.add_text(tail, OWN)
            text.tail = tail[-n:]

    def observe(self, verified: Verified) -> None:
        """See Proposer. Does one Jacobi iteration and adds its n-grams to the pools."""
        roots = np.array([self._roots[i] for i in verified.request_ids], np.int32)
        ngrams, owners = self.branch.iterate(verified, roots)
        for (first, *rest), owner in zip(ngrams.tolist(), owners.tolist(), strict=True):
            pool = self._texts[verified.request_ids[owner]].pool
            pool.add(first, tuple(rest), WINDOW)
        self._learn(verified)

    def propose(self, limits: Sequence[DraftLimits], load: Load = NO_LOAD) -> DraftForest:
        """See Proposer."""
        self.insertion.end_step()
        contexts = np.array([limit.context for limit in limits], np.int64)
        cost = self.cost if self.options.budget == "auto" else None
        may_branch = np.array([limit.may_branch for limit in limits], np.bool_)
        windows = self.branch.rows_of([limit.request_id for limit in limits], may_branch)
        windows = self.branch.choose(windows, contexts, cost, load)
        max_nodes = self._max_nodes - self.branch.comb_nodes(windows)
        forest, ranks = self._grow(limits, max_nodes)
        if cost is not None and forest.num_nodes:
            prices = cost.prices(contexts, load, forest.num_nodes)
            progress = load.progress(len(forest))
            forest, kept, _, _ = allot(forest, progress, prices, is_probe_due(cost, load))
            ranks = ranks[kept]
        for limit, (first, end) in zip(limits, pairwise(forest.firsts), strict=True):
            self._texts[limit.request_id].ranks = ranks[first:end]
        nodes = np.array([limit.max_nodes for limit in limits], np.int64)
        depths = np.array([limit.max_depth for limit in limits], np.int64)
        forest = self.branch.join(forest, windows, nodes, depths, self._max_nodes, cost)
        self.pays = forest.num_nodes > 0
        return forest

    def finish(self, request_id: str) -> None:
        """See Proposer."""
        self.insertion.drop(request_id)
        self._texts.pop(request_id, None)
        self._roots.pop(request_id, None)
        self.branch.finish(request_id)

    def _grow(
        self, limits: Sequence[DraftLimits], max_nodes: Int64s
    ) -> tuple[DraftForest, NDArray[np.uint8]]:
        """The verification branch: for each request at most G n-grams with shared prefixes merged.

        Also returns the ranks of the nodes, uint8 [n].
        """
        chains: list[NGram] = []
        sources: list[int] = []
        counts: list[int] = []
        for limit in limits:
            text = self._texts[limit.request_id]
            before = len(chains)
            if text.tail:  # a prompt of embeddings has no tokens before its answer begins
                for rest, source in text.pool.candidates(text.tail[-1]):
                    chains.append(rest)
                    sources.append(source)
            counts.append(len(chains) - before)
        allowed = np.array([limit.max_nodes for limit in limits], np.int64)
        *fields, ranks = _merge(
            (
                np.array(chains, np.int32).reshape(-1, self.options.ngram_size - 1),
                np.array(sources, np.uint8),
                np.array(counts, np.int64),
            ),
            (
                np.minimum(max_nodes, allowed).clip(0),
                np.array([limit.max_depth for limit in limits], np.int64),
                np.array([limit.may_branch for limit in limits], np.bool_),
            ),
            self._rates.rates,
        )
        return DraftForest(*fields), ranks

    def _learn(self, verified: Verified) -> None:
        forest = verified.forest
        tree_ranks = [
            self._texts[request_id].ranks[:size]
            for request_id, size in zip(verified.request_ids, forest.sizes, strict=True)
        ]
        sizes = np.array([len(ranks) for ranks in tree_ranks], np.int64)
        nodes = np.flatnonzero(forest.places < sizes[forest.owners])
        parents = forest.parents[nodes]
        tried = verified.accepted[forest.firsts[forest.owners[nodes]] + parents] | (parents < 0)
        nodes = nodes[tried]
        ranks = np.concatenate(tree_ranks)[tried] if tree_ranks else np.empty(0)
        self._rates.learn(
            ranks.astype(np.int64), forest.depths[nodes].astype(np.int64), verified.accepted[nodes]
        )

    def _compile(self) -> None:
        """Run every kernel once on a tiny request, so that no request waits for the compiler."""
        for _ in range(2):
            self.start("", [0, 1])
            self.extend({"": [0]})
            forest = self.propose([DraftLimits("", self._max_nodes, 8)])
            self.extend({"": [1]})
            self.observe(Verified.nothing([""], forest, self.num_choices))
        self.finish("")
        compile_budget()


@kernel
def _merge(
    candidates: _Candidates, limits: _Limits, rates: NDArray[np.float32]
) -> tuple[
    Int32s, Int32s, NDArray[np.float32], Int32s, NDArray[np.uint8], Int64s, NDArray[np.uint8]
]:
    """Merge the candidates to trees; returns the fields of a DraftForest, and the nodes' ranks.

    `rates` float32 [_RANKS, N] are the acceptance rates of nodes by rank and depth.
    """
    candidates, limits = _Candidates(*candidates), _Limits(*limits)
    chains, counts = candidates.tokens, candidates.counts
    capacity = np.int64(0)
    tree_capacity = np.int64(1)
    for count in counts:
        capacity += count * chains.shape[1]
        tree_capacity = max(tree_capacity, count * chains.shape[1])
    tokens, parents = np.empty(capacity, np.int32), np.empty(capacity, np.int32)
    depths, probs = np.empty(capacity, np.int32), np.empty(capacity, np.float32)
    sources, ranks = np.empty(capacity, np.uint8), np.empty(capacity, np.uint8)
    firsts = np.zeros(len(counts) + 1, np.int64)
    nodes = np.empty((4, tree_capacity), np.int32)  # token, parent, depth, rank
    likely = np.empty(tree_capacity, np.float32)
    places = np.empty(tree_capacity, np.int32)  # of the nodes in the sorted tree
    end, chain = 0, 0
    for tree, count in enumerate(counts):
        size = 0
        for rank in range(count):
            parent = -1
            for depth in range(1, min(chains.shape[1], limits.max_depths[tree]) + 1):
                token = chains[chain + rank, depth - 1]
                here = -1
                for node in range(parent + 1, size):
                    if nodes[1, node] == parent and nodes[0, node] == token:
                        here = node
                        break
                if here < 0:
                    if rank > 0 and not limits.may_branch[tree]:
                        break
                    here = size
                    nodes[0, here], nodes[1, here], nodes[2, here] = token, parent, depth
                    nodes[3, here] = rank
                    rate = rates[min(rank, _RANKS - 1), depth]
                    likely[here] = rate if parent < 0 else likely[parent] * rate
                    size += 1
                parent = here
        # Best first. A parent is at least as likely as its children, and the sort is stable, so
        # parents stay before their children.
        order = np.argsort(-likely[:size], kind="mergesort")
        firsts[tree] = end
        for place in range(min(size, limits.max_nodes[tree])):
            node = order[place]
            places[node] = place
            tokens[end], depths[end], probs[end] = nodes[0, node], nodes[2, node], likely[node]
            parents[end] = -1 if nodes[1, node] < 0 else places[nodes[1, node]]
            sources[end] = candidates.sources[chain + nodes[3, node]]
            ranks[end] = min(nodes[3, node], _RANKS - 1)
            end += 1
        chain += count
    firsts[len(counts)] = end
    forest = first_nodes(ForestArrays(tokens, parents, probs, depths, sources, firsts), end)
    return (*forest, ranks[:end].copy())
