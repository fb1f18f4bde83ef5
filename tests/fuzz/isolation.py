"""Checks the isolation of namespaces: no draft holds an n-gram known only to another namespace."""

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, TypeAlias

from lookahead_vllm.draft.sources import DRAFTER, GRAMMAR, NAMES, WINDOW
from lookahead_vllm.draft.tree import UNKNOWN, DraftTree
from tests.fuzz.round import Request

GENERATION_PROMPT = 2
"""Of a conversation whose tool results a request may learn from, its prompt may lack so many last
tokens."""
BEGIN = -2
"""Pads the beginning of a text."""

Pairs: TypeAlias = set[tuple[int, int]]


@dataclass
class Leak:
    """A node of a draft tree whose n-gram occurs in nothing that the request may learn from."""

    index: int
    """The request's index in its round."""
    source: str
    before: tuple[int, int]
    """The two tokens before the node."""
    token: int


class LeakDetector:
    """Records the drafts of an engine, and the texts that each request may learn from.

    It reads vLLM's runner and the round, no proposer. A request may learn from its own text,
    its references, its tool results, and all answers of its namespace, including later ones. Of a
    kept conversation it may learn what is in its own prompt, which is its own text, answers, which
    are its namespace's, and the tool results of prompts with which its own begins; with `share`
    "none", which a speculative config without it counts as, its own alone.

    The requests of the round may be sent several times; `references` has those of each, as token
    ids.
    """

    def __init__(
        self,
        requests: Sequence[Request],
        references: Sequence[Sequence[list[int]]],
        lookahead: Mapping[str, Any],
    ) -> None:
        self._requests = requests
        accepted = lookahead.get("client_options", "all")
        self._may_be_off = accepted != "none"
        self._references = [[] for _ in references] if accepted == "none" else references
        self._share = lookahead.get("share", "none")
        self._accepts_namespaces = accepted == "all"
        self._outputs: dict[str, list[int]] = {}
        self._dropped: list[tuple[str, list[int]]] = []
        """Outputs as they were before their ends were dropped; with their requests."""
        self._choices: defaultdict[object, Pairs] = defaultdict(set)
        """By namespace: each verified node's token with a token that the model chose there."""
        self._roots: dict[str, int] = {}
        """By request: the last token before the current step."""
        self._drafts: list[tuple[str, int, bool, DraftTree]] = []
        """Request id, its output length, whether the tree is unchanged, the tree."""
        self.checked: Counter[str] = Counter()
        """Number of checked nodes by source."""

    def add_output(self, request_id: str, tokens: Sequence[int]) -> None:
        """Append to the request's output."""
        self._roots[request_id] = self._text(request_id)[-1]
        self._outputs.setdefault(request_id, []).extend(tokens)

    def drop_output(self, request_id: str, length: int) -> None:
        """Drop what follows the first `length` tokens of the output.

        Other requests may have learned from it. It will be added again, unless the request ends
        before.
        """
        output = self._outputs.get(request_id, [])
        if len(output) > length:
            self._dropped.append((request_id, output[:]))
            del output[length:]

    def add_choices(self, request_id: str, tree: DraftTree, at_root: Any, at_nodes: Any) -> None:
        """Record the tokens that the model chose at a tree's root and nodes."""
        choices = self._choices[self._namespace(request_id)]
        choices.update((self._roots[request_id], token) for token in at_root.tolist())
        for last, tokens in zip(tree.tokens.tolist(), at_nodes.tolist(), strict=True):
            choices.update((last, token) for token in tokens)

    def add_draft(self, request_id: str, from_proposer: bool, tree: DraftTree) -> None:
        """Record a tree that is verified; `from_proposer` if it is the proposer's, unchanged."""
        length = len(self._outputs.get(request_id, ()))
        self._drafts.append((request_id, length, from_proposer, tree))

    def leaks(self) -> list[Leak]:
        """The first leak of each tree."""
        shared: defaultdict[object, tuple[Pairs, Pairs]] = defaultdict(lambda: (set(), set()))
        for request_id, output in [*self._outputs.items(), *self._dropped]:
            if self._is_off(request_id):
                continue
            _learn(shared[self._namespace(request_id)], self._stretches(request_id)[-1], output)

        @cache
        def known(request_id: str) -> tuple[Pairs, Pairs]:
            if self._is_off(request_id):
                return set(), set()
            pairs, skips = (set(known) for known in shared[self._namespace(request_id)])
            *others, last = self._stretches(request_id)
            for stretch in [*others, last + self._outputs.get(request_id, [])]:
                _learn((pairs, skips), [], stretch)
            for spelling in self._spellings(request_id):
                _learn((pairs, skips), [], spelling)
            for reference in self._references[request_index(request_id)]:
                _learn((pairs, skips), last, reference)
            return pairs | self._choices[self._namespace(request_id)], skips

        leaks = []
        for request_id, length, from_proposer, tree in self._drafts:
            root = self._text(request_id, length)[-2:]
            contexts: list[tuple[int, int]] = []
            pairs, skips = known(request_id)
            for token, parent, source, prob in zip(
                tree.tokens.tolist(),
                tree.parents.tolist(),
                tree.sources.tolist(),
                tree.probs.tolist(),
                strict=True,
            ):
                before = (root[0], root[1]) if parent < 0 else contexts[parent]
                contexts.append((before[1], token))
                # A window's nodes are arbitrary, and so is a tree's token list verified as a chain.
                if source in (GRAMMAR, WINDOW, DRAFTER) or (not from_proposer and prob == 1):
                    continue
                self.checked[NAMES[source]] += 1
                if (before[1], token) not in pairs and (before[0], token) not in skips:
                    leaks.append(Leak(request_index(request_id), NAMES[source], before, token))
                    break
        return leaks

    def _spellings(self, request_id: str) -> Iterator[list[int]]:
        """The tool results of the request, and of those of its namespace that its prompt goes on
        from."""
        own = self._requests[request_index(request_id)]
        namespace = self._namespace(request_id)
        for other_id in {*self._outputs, request_id}:
            other = self._requests[request_index(other_id)]
            begins = other.known_prompt[: max(0, len(other.known_prompt) - GENERATION_PROMPT)]
            goes_on = begins == own.known_prompt[: len(begins)]
            if other is own or (goes_on and self._namespace(other_id) == namespace):
                yield from other.spellings

    def _is_off(self, request_id: str) -> bool:
        """Whether the request turned lookahead off: it gets no draft, and nobody learns from it."""
        return self._may_be_off and "off" in self._requests[request_index(request_id)].features

    def _namespace(self, request_id: str) -> object:
        if self._share == "all":
            return "all"
        request = self._requests[request_index(request_id)]
        namespace = request.namespace if self._accepts_namespaces else None
        if self._share == "none":
            return request_id
        return request.adapter, request.salt, namespace

    def _stretches(self, request_id: str) -> list[list[int]]:
        """The prompt's token ids, split at its embeddings."""
        stretches: list[list[int]] = [[]]
        for token in self._requests[request_index(request_id)].known_prompt:
            if token == UNKNOWN:
                stretches.append([])
            else:
                stretches[-1].append(token)
        return stretches

    def _text(self, request_id: str, length: int | None = None) -> list[int]:
        output = self._outputs.get(request_id, [])[:length]
        return [BEGIN, BEGIN, *self._stretches(request_id)[-1], *output]


def _learn(known: tuple[Pairs, Pairs], before: list[int], text: list[int]) -> None:
    """Add each token of `text`: to `known[0]` with the token before it, to `known[1]` with the
    second token before it."""
    padded = [BEGIN, BEGIN, *before][-2:] + text
    known[0].update(zip(padded[1:], text, strict=False))
    known[1].update(zip(padded, text, strict=False))


def request_index(request_id: str) -> int:
    """The index in the id `3-8f2c`, or in `1_3-8f2c`, that of the second of n answers."""
    return int(request_id.split("-")[0].rpartition("_")[2])
