"""Who guesses: the interface that the engine calls, and the n-gram trie behind it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np

from lookahead_vllm.draft import budget
from lookahead_vllm.draft.acceptance_rate import AcceptanceRate
from lookahead_vllm.draft.budget import CostCurve
from lookahead_vllm.draft.growth import grow
from lookahead_vllm.draft.options import LookaheadOptions
from lookahead_vllm.draft.tree import EMPTY_TREE, DraftTree
from lookahead_vllm.draft.trie import OUTPUT, PRIVATE, Arena, Ints, Trie

MAX_SUFFIX = 8
"""The longest suffix that is matched, in tokens; a trie holds n-grams of one token more."""


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
    """A live request: the trie of its prompt and its answer so far, and how the text ends."""

    trie: Trie
    tail: Ints
    """int32 [at most MAX_SUFFIX]"""


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
        self._arena = Arena(options.max_nodes)
        self._answers = Trie(self._arena, OUTPUT, MAX_SUFFIX + 1)
        self._rate = AcceptanceRate(MAX_SUFFIX, float(options.prompt_weight))
        self._texts: dict[str, _Text] = {}
        self._compile()

    @property
    def num_nodes(self) -> int:
        """Trie nodes held now; never more than `options.max_nodes`."""
        return self._arena.num_nodes

    @property
    def num_evicted(self) -> int:
        """Trie nodes pruned so far."""
        return self._arena.num_evicted

    def start(
        self,
        request_id: str,
        prompt: Sequence[int],
        namespace: str | None = "",
        references: Sequence[Sequence[int]] = (),
    ) -> None:
        """See Proposer. The prompt is indexed whole: an end of sequence in it is a token."""
        self.finish(request_id)
        tokens = np.asarray(prompt, dtype=np.int32)
        trie = Trie(self._arena, PRIVATE, MAX_SUFFIX + 1)
        trie.insert(tokens)
        self._texts[request_id] = _Text(trie, tokens[-MAX_SUFFIX:].copy())

    def extend(self, request_id: str, tokens: Sequence[int]) -> None:
        """See Proposer. What was just said can be drafted at once."""
        text = self._texts[request_id]
        context = len(text.tail)
        stream = np.concatenate((text.tail, np.asarray(tokens, dtype=np.int32)))
        self._rate.learn(text.trie, self._answers, stream, context)
        text.trie.insert(stream, context)
        self._answers.insert(stream, context)
        text.tail = stream[-MAX_SUFFIX:]

    def propose(self, wants: Sequence[DraftRequest], num_plain_tokens: int = 0) -> list[DraftTree]:
        """See Proposer."""
        grown = [self._grow(want) for want in wants]
        sizes = [len(probs) for _, _, probs in grown]
        if self.curve is not None and self.options.budget == "auto":
            sizes = budget.cut([probs for _, _, probs in grown], self.curve, num_plain_tokens)
        return [
            DraftTree(tokens[:n], parents[:n], probs[:n]) if n else EMPTY_TREE
            for (tokens, parents, probs), n in zip(grown, sizes, strict=True)
        ]

    def finish(self, request_id: str) -> None:
        """See Proposer. O(1): nothing that another request counted on is touched."""
        text = self._texts.pop(request_id, None)
        if text is not None:
            text.trie.drop()

    def _grow(self, want: DraftRequest) -> tuple[Ints, Ints, np.ndarray]:
        text = self._texts[want.request_id]
        max_nodes = min(want.max_nodes, self.options.num_speculative_tokens)
        if isinstance(self.options.budget, int):
            max_nodes = min(max_nodes, self.options.budget)
        return grow(
            self._arena.nodes,
            self._arena.edges,
            text.trie.root,
            self._answers.root,
            text.tail,
            MAX_SUFFIX,
            self._rate.prompt_weight,
            self._rate.rates,
            max(0, max_nodes),
            min(want.max_depth, self.options.branch_length),
            want.may_branch,
        )

    def _compile(self) -> None:
        """Run every kernel on nothing, so that no request waits for the compiler."""
        self.start("", [])
        self.extend("", [])
        self.propose([DraftRequest("", 1, 1)])
        self.finish("")
