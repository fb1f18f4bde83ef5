"""Who guesses: the interface that the engine calls, and the n-gram trie behind it."""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from lookahead_vllm.draft import budget
from lookahead_vllm.draft.acceptance_rate import (
    AcceptanceRate,
    Rates,
    Weights,
    learn_token,
    room_for_judging,
    weight_set,
)
from lookahead_vllm.draft.budget import CostCurve
from lookahead_vllm.draft.continuation import (
    ANSWERS,
    NAMES,
    NUM_SOURCES,
    OWN,
    REFERENCE,
    SLOT,
    find_continuations,
    room_for_continuations,
)
from lookahead_vllm.draft.growth import HIERARCHICAL, PARALLEL, SINGLE, grow
from lookahead_vllm.draft.kernel import kernel
from lookahead_vllm.draft.options import LookaheadOptions
from lookahead_vllm.draft.suffix import (
    NUM_SPARSE,
    NUM_SUFFIXES,
    ORDERS,
    Hashes,
    advance,
    empty_row,
    row_of,
)
from lookahead_vllm.draft.tree import EMPTY_TREE, DraftTree
from lookahead_vllm.draft.trie import BYTES_PER_NODE, NOWHERE, Ints, Trie, Words, count

INDEX_AT_ONCE = 4096
"""Tokens of prompts that one step inserts, some 3 ms; more where 8 times as many wait."""

MAX_NAMESPACES = 1 << 16
"""The one that was not used for longest is forgotten, and its answers with it."""

EXPECTED_ANSWER = 2048  # tokens; there is room for twice as many, then the oldest go

SUFFIXES = [*ORDERS, -NUM_SPARSE]
"""What the n-grams of a snapshot are."""

_BRANCHING = {"single": SINGLE, "parallel": PARALLEL, "hierarchical": HIERARCHICAL}


def digest_of(namespace: str) -> str:
    """What a namespace is known by here: its name may hold a cache_salt, a secret."""
    return hashlib.blake2b(namespace.encode(), digest_size=16).hexdigest()


class DraftRequest(NamedTuple):
    """How large a tree one request may get."""

    request_id: str
    max_nodes: int
    max_depth: int
    may_branch: bool = True
    """False: a chain, because this request's tree could not be verified."""


class Proposer(Protocol):
    """What the engine calls. A request may be absent from any number of calls: that is no end."""

    curve: CostCurve | None
    """The cost of a step; None while it is not known, and then no tree is cut."""

    def start(
        self,
        request_id: str,
        prompt: Sequence[int],
        namespace: str | None = "",
        references: Sequence[Sequence[int]] = (),
    ) -> None:
        """A request begins; one that is already known begins anew.

        Requests of one `namespace` learn from each other's answers, and from no others; None
        shares with nobody. `references` are texts that this request's answer may copy from.
        """

    def extend(self, request_id: str, tokens: Sequence[int]) -> None:
        """The request's next output tokens, in order, as they are committed."""

    def propose(self, wants: Sequence[DraftRequest], num_plain_tokens: int = 0) -> list[DraftTree]:
        """One tree, possibly empty, for each of `wants`: the requests of one step.

        `num_plain_tokens` is how many tokens the step has beside those of `wants`.
        """

    def finish(self, request_id: str) -> None:
        """The request has ended; an unknown one is ignored."""


@dataclass(slots=True)
class _Text:
    """A live request: how its text ends, and the spaces of the trie that it reads and writes."""

    row: Hashes
    spaces: Ints
    """int32 [NUM_SOURCES]"""


@dataclass(slots=True)
class _Job:
    """Tokens that are still to be inserted, after the text of `row`, into a space."""

    space: int
    row: Hashes
    tokens: Ints


class NGramTrieProposer:
    """Trees from what this request and earlier answers said after the same words.

    Source: Lookahead (KDD 2024), Algorithm 1. Answers are inserted as they come and stay, until
    they are pruned; a request's own text is eliminated when the request ends.

    Raises
    ------
    KeyError
        `extend` or `propose` for a request that was not started.
    """

    def __init__(self, options: LookaheadOptions, curve: CostCurve | None = None) -> None:
        self.options = options
        self.curve = curve
        max_nodes = options.max_nodes
        if options.max_bytes is not None:
            max_nodes = min(max_nodes, options.max_bytes // BYTES_PER_NODE)
        self.trie = Trie(max_nodes)
        self.rate = AcceptanceRate()
        self._branching = _BRANCHING[options.draft]
        self._max_nodes = options.num_speculative_tokens
        if isinstance(options.budget, int):
            self._max_nodes = options.budget
        self._namespaces: dict[str, int] = {}
        self._texts: dict[str, _Text] = {}
        self._backlog: deque[_Job] = deque()
        self._left = INDEX_AT_ONCE
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
    ) -> None:
        """See Proposer. The prompt is indexed whole: an end of sequence in it is a token.

        What is long is indexed in parts, by the next calls of `propose`, so that no step waits.
        """
        self.finish(request_id)
        tokens = np.array(prompt, np.int32)  # copies: the caller's memory may not stay as it is
        texts = [np.array(reference, np.int32) for reference in references]
        length = sum(map(len, texts))
        spaces = np.zeros(NUM_SOURCES, np.int32)
        spaces[OWN] = self.trie.new_private(len(tokens) + length + EXPECTED_ANSWER)
        if namespace is not None:
            spaces[ANSWERS] = self._space_of(namespace)
        if texts:
            spaces[REFERENCE] = self.trie.new_private(length)
        self._texts[request_id] = text = _Text(row_of(tokens), spaces)
        # A reference may be the answer itself, so it is one that begins where the answer does.
        for reference in texts:
            for source in (REFERENCE, OWN):
                self._backlog.append(_Job(int(spaces[source]), text.row.copy(), reference))
        if self.options.sources != "output":
            self._backlog.append(_Job(int(spaces[OWN]), empty_row(), tokens))
        self._work_off()

    def extend(self, request_id: str, tokens: Sequence[int]) -> None:
        """See Proposer. What was just said can be drafted at once."""
        text = self._texts[request_id]
        trie, rate = self.trie, self.rate
        _extend(
            trie.edges,
            trie.live,
            trie.counters,
            text.spaces,
            text.row,
            np.array(tokens, np.int32),
            rate.rates,
            rate.trials,
            rate.weights,
            self.options.sources != "prompt",
        )

    def propose(self, wants: Sequence[DraftRequest], num_plain_tokens: int = 0) -> list[DraftTree]:
        """See Proposer."""
        if self._backlog:
            self._work_off()
            waiting = sum(len(job.tokens) for job in self._backlog)
            self._left = max(INDEX_AT_ONCE, waiting // 8)
        else:
            self._left = INDEX_AT_ONCE
        grown = [self._grow(want) for want in wants]
        if self.curve is not None and self.options.budget == "auto":
            sizes = budget.cut([tree.probs for tree in grown], self.curve, num_plain_tokens)
            return [tree.prefix(n) for tree, n in zip(grown, sizes, strict=True)]
        return grown

    def finish(self, request_id: str) -> None:
        """See Proposer. O(1): nothing that another request counted on is touched."""
        text = self._texts.pop(request_id, None)
        if text is not None:
            self.trie.eliminate(int(text.spaces[OWN]))
            self.trie.eliminate(int(text.spaces[REFERENCE]))

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
        return arrays, {"namespaces": dict(self._namespaces), "suffixes": SUFFIXES}

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
        self._namespaces = {str(name): int(space) for name, space in facts["namespaces"].items()}

    def _space_of(self, namespace: str) -> int:
        digest = digest_of(namespace)
        space = self._namespaces.pop(digest, None) or self.trie.new_shared()
        self._namespaces[digest] = space  # as the latest
        if len(self._namespaces) > MAX_NAMESPACES:
            del self._namespaces[next(iter(self._namespaces))]
        return space

    def _work_off(self) -> None:
        """Insert what is waiting, as far as this step may."""
        while self._backlog and self._left > 0:
            job = self._backlog[0]
            if self.trie.is_live(job.space):
                now, job.tokens = job.tokens[: self._left], job.tokens[self._left :]
                self.trie.insert(job.space, job.row, now)
                self._left -= len(now)
                if len(job.tokens):
                    continue
            self._backlog.popleft()

    def _grow(self, want: DraftRequest) -> DraftTree:
        text = self._texts[want.request_id]
        tokens, parents, depths, probs = grow(
            self.trie.edges,
            self.trie.live,
            text.spaces,
            text.row,
            self.rate.rates,
            self.rate.weights,
            max(0, min(want.max_nodes, self._max_nodes)),
            min(want.max_depth, self.options.branch_length),
            self._branching if want.may_branch else SINGLE,
        )
        return DraftTree(tokens, parents, probs, depths) if len(tokens) else EMPTY_TREE

    def _compile(self) -> None:
        """Run every kernel on nothing, so that no request waits for the compiler."""
        self.start("", [0])
        self.extend("", [])
        trees = self.propose([DraftRequest("", 1, 1)])
        budget.cut([tree.probs for tree in [*trees, DraftTree.chain([0])]], CostCurve([1], [1.0]))
        self.finish("")


@kernel
def _extend(
    edges: Words,
    live: Ints,
    counters: Words,
    spaces: Ints,
    row: Hashes,
    tokens: Ints,
    rates: Rates,
    trials: Rates,
    weights: Weights,
    is_source: bool,
) -> None:
    following = np.empty_like(row)
    found, longest, places = room_for_continuations()
    which, inputs = room_for_judging()
    for token in tokens:
        size = find_continuations(edges, live, spaces, row, found, longest, places)
        chosen = weight_set(longest, spaces)
        learn_token(found, size, token, rates, trials, weights, chosen, which, inputs)
        for source in (OWN, ANSWERS):
            if is_source and spaces[source] != NOWHERE:
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
