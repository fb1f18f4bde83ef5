"""Isolation by content: a draft holds no n-gram that only another namespace has seen."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any, TypeAlias

from lookahead_vllm.draft.sources import GRAMMAR, NAMES, WINDOW
from lookahead_vllm.draft.tree import UNKNOWN, DraftTree
from lookahead_vllm.engine.worker.drafter import LookaheadDrafter
from lookahead_vllm.engine.worker.v1.runner import LookaheadRunner
from tests.fuzz.draw import Request

BEGIN = -2
"""Stands before a text."""

Pairs: TypeAlias = set[tuple[int, int]]


@dataclass
class Leak:
    """A node of a draft tree whose token the request could not know to follow there."""

    index: int
    """Of the request."""
    source: str
    before: tuple[int, int]
    """The two tokens before the node."""
    token: int


class Watch:
    """The drafts of an engine, and the texts that each of its requests may know.

    Everything is heard from vLLM's runner and from the round, nothing from the proposer. A request
    may know its own text, its references, and the answers of its namespace, later ones too.

    Parameters
    ----------
    requests
        What is asked, any number of times.
    references
        Token ids that each of them is given.
    lookahead
        The speculative config. Where it does not say what is shared, nothing is.
    """

    def __init__(
        self,
        requests: Sequence[Request],
        references: Sequence[Sequence[list[int]]],
        lookahead: Mapping[str, Any],
    ) -> None:
        self._requests = requests
        accepts = lookahead.get("accept_references", True)
        self._references = references if accepts else [[] for _ in references]
        self._share = lookahead.get("share", "none")
        self._accepts_namespaces = lookahead.get("accept_namespaces", True)
        self._said: dict[str, list[int]] = {}
        self._chosen: defaultdict[object, Pairs] = defaultdict(set)
        """What the model said at the nodes of a namespace, accepted or not."""
        self._roots: dict[str, int] = {}
        """The last token before the step under way."""
        self._drafts: list[tuple[str, int, bool, DraftTree]] = []
        """The request, how much it had said, whether the proposer made it all, the tree."""
        self.checked: Counter[str] = Counter()
        """Nodes by source."""

    def say(self, request_id: str, tokens: Sequence[int]) -> None:
        """The request's next tokens."""
        self._roots[request_id] = self._text(request_id)[-1]
        self._said.setdefault(request_id, []).extend(tokens)

    def choose(self, request_id: str, tree: DraftTree, at_root: Any, at_nodes: Any) -> None:
        """What the model said at a tree's root and nodes."""
        known = self._chosen[self._namespace(request_id)]
        known.update((self._roots[request_id], token) for token in at_root.tolist())
        for last, tokens in zip(tree.tokens.tolist(), at_nodes.tolist(), strict=True):
            known.update((last, token) for token in tokens)

    def draft(self, request_id: str, own: bool, tree: DraftTree) -> None:
        """A tree goes to be verified."""
        self._drafts.append((request_id, len(self._said.get(request_id, ())), own, tree))

    def leaks(self) -> list[Leak]:
        """One for each tree that has any."""
        shared: defaultdict[object, tuple[Pairs, Pairs]] = defaultdict(lambda: (set(), set()))
        for request_id, said in self._said.items():
            _learn(shared[self._namespace(request_id)], self._stretches(request_id)[-1], said)

        @cache
        def known(request_id: str) -> tuple[Pairs, Pairs]:
            seen = [set(pairs) for pairs in shared[self._namespace(request_id)]]
            *others, last = self._stretches(request_id)
            for stretch in [*others, last + self._said.get(request_id, [])]:
                _learn(seen, [], stretch)
            for reference in self._references[request_index(request_id)]:
                _learn(seen, last, reference)
            return seen[0] | self._chosen[self._namespace(request_id)], seen[1]

        found = []
        for request_id, length, own, tree in self._drafts:
            root = self._text(request_id, length)[-2:]
            places: list[tuple[int, int]] = []
            near, sparse = known(request_id)
            for token, parent, source, prob in zip(
                tree.tokens.tolist(),
                tree.parents.tolist(),
                tree.sources.tolist(),
                tree.probs.tolist(),
                strict=True,
            ):
                before = (root[0], root[1]) if parent < 0 else places[parent]
                places.append((before[1], token))
                # The comb holds any tokens, and so does a chain that was proposed as a tree.
                if source in (GRAMMAR, WINDOW) or (not own and prob == 1):
                    continue
                self.checked[NAMES[source]] += 1
                if (before[1], token) not in near and (before[0], token) not in sparse:
                    found.append(Leak(request_index(request_id), NAMES[source], before, token))
                    break
        return found

    def _namespace(self, request_id: str) -> object:
        if self._share == "all":
            return "all"
        request = self._requests[request_index(request_id)]
        given = request.namespace if self._accepts_namespaces else None
        names = request.adapter, request.salt, given
        return request_id if self._share == "none" else names

    def _stretches(self, request_id: str) -> list[list[int]]:
        """The prompt, cut at what has no token id."""
        stretches: list[list[int]] = [[]]
        for token in self._requests[request_index(request_id)].known_prompt:
            if token == UNKNOWN:
                stretches.append([])
            else:
                stretches[-1].append(token)
        return stretches

    def _text(self, request_id: str, length: int | None = None) -> list[int]:
        said = self._said.get(request_id, [])[:length]
        return [BEGIN, BEGIN, *self._stretches(request_id)[-1], *said]


def _learn(seen: Sequence[Pairs], before: list[int], text: list[int]) -> None:
    """Each token of `text`, with the one before it and with the one before that."""
    whole = [BEGIN, BEGIN, *before][-2:] + text
    seen[0].update(zip(whole[1:], text, strict=False))
    seen[1].update(zip(whole, text, strict=False))


@contextmanager
def watched(watch: Watch) -> Iterator[None]:
    """Tell `watch` of what engines of this process do with drafts."""
    recall, propose = LookaheadRunner._recall, LookaheadRunner.propose_draft_token_ids
    commit = LookaheadDrafter.commit

    def recalled(self: Any, *args: Any, **kwargs: Any) -> Any:
        scheduled = recall(self, *args, **kwargs)
        for row, own, tree in zip(
            scheduled.rows.tolist(), scheduled.own.tolist(), scheduled.forest, strict=True
        ):
            watch.draft(self.input_batch.req_ids[row], own, tree)
        return scheduled

    def proposed(self: Any, scheduled: Any, sampled: list[list[int]], *args: Any, **kw: Any) -> Any:
        for request_id, tokens in zip(self.input_batch.req_ids, sampled, strict=True):
            watch.say(request_id, tokens)
        return propose(self, scheduled, sampled, *args, **kw)

    def committed(self: Any, emitted: Any, verified: Any = None) -> None:
        if verified is not None:
            firsts = verified.forest.firsts.tolist()
            for i, request_id in enumerate(verified.request_ids):
                at_nodes = verified.at_nodes[firsts[i] : firsts[i + 1]]
                watch.choose(request_id, verified.forest[i], verified.at_roots[i], at_nodes)
        commit(self, emitted, verified)

    names = ("_recall", "propose_draft_token_ids")
    for name, spy in zip(names, (recalled, proposed), strict=True):
        setattr(LookaheadRunner, name, spy)
    LookaheadDrafter.commit = committed  # type: ignore[method-assign]
    try:
        yield
    finally:
        for name, original in zip(names, (recall, propose), strict=True):
            setattr(LookaheadRunner, name, original)
        LookaheadDrafter.commit = commit  # type: ignore[method-assign]


def request_index(request_id: str) -> int:
    """Of an engine's request id: `3-8f2c`, or `1_3-8f2c` for the second of several answers."""
    return int(request_id.split("-")[0].rpartition("_")[2])
