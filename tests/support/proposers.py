"""Test proposers that draft from recorded answers: right, wrong or hidden."""

import random
from collections.abc import Sequence
from typing import ClassVar

from lookahead_vllm.draft.proposers.proposer import TextByText
from lookahead_vllm.draft.proposers.registry import CLASS_PATHS
from lookahead_vllm.draft.proposers.stepping import DraftLimits
from lookahead_vllm.draft.tree import EMPTY_TREE, DraftTree
from lookahead_vllm.options.allowed import Allowed
from lookahead_vllm.options.server import ALLOWED, LookaheadOptions

VOCAB = 128
RECORDED: dict[tuple[int, ...], list[list[int]]] = {}
"""Plain vLLM's answers by prompt; several if a prompt was sampled more than once."""


def record(prompts: Sequence[Sequence[int]], answers: Sequence[Sequence[list[int]]]) -> None:
    """Record plain vLLM's answers to each prompt, for the proposers."""
    for prompt, answer in zip(prompts, answers, strict=True):
        RECORDED.setdefault(tuple(prompt), []).extend(answer)


def first_branch(tree: DraftTree) -> DraftTree:
    """The branch of first children."""
    nodes, tip = [], -1
    for node, parent in enumerate(tree.parents.tolist()):
        if parent == tip:
            nodes.append(node)
            tip = node
    return DraftTree.chain(tree.tokens[nodes].tolist())


class TestProposer(TextByText):
    """Stores the text of each request; subclasses implement `grow`."""

    __test__ = False

    def __init__(self, options: LookaheadOptions, text_nodes: int = 0) -> None:
        self.prompts: dict[str, tuple[int, ...]] = {}
        self.outputs: dict[str, list[int]] = {}
        self.texts: list[str] = []
        """The id of each request that has started, by text."""

    def start(
        self,
        request_id: str,
        prompt: Sequence[int],
        namespace: str | None = "",
        references: Sequence[Sequence[int]] = (),
        spellings: Sequence[Sequence[int]] = (),
    ) -> None:
        self.prompts[request_id] = tuple(int(t) for t in prompt)
        self.outputs[request_id] = []
        self.texts.append(request_id)

    def text_of(self, request_id: str) -> int:
        return len(self.texts) - 1 - self.texts[::-1].index(request_id)

    def finish(self, request_id: str) -> None:
        del self.prompts[request_id], self.outputs[request_id]

    def read(self, request_id: str, tokens: list[int]) -> None:
        """The request has emitted these tokens."""
        self.outputs[request_id] += tokens

    def add(self, text: int, tokens: list[int]) -> None:
        self.read(self.texts[text], tokens)

    def tree(self, text: int, max_nodes: int, max_depth: int, may_branch: bool) -> DraftTree:
        tree = self.grow(DraftLimits(self.texts[text], max_nodes, max_depth))
        return tree if may_branch else first_branch(tree)

    def grow(self, limit: DraftLimits) -> DraftTree:
        raise NotImplementedError

    def future(self, request_id: str) -> list[int]:
        """The rest of the recorded answer that begins with the output so far, or nothing."""
        so_far = self.outputs[request_id]
        for answer in RECORDED.get(self.prompts[request_id], []):
            if answer[: len(so_far)] == so_far:
                return answer[len(so_far) :]
        return []

    def rng(self, request_id: str) -> random.Random:
        return random.Random(hash((self.prompts[request_id], len(self.outputs[request_id]))))


class HiddenPath(TestProposer):
    """A tree of maximum size with the right path hidden among wrong branches."""

    def grow(self, limit: DraftLimits) -> DraftTree:
        rng = self.rng(limit.request_id)
        right = self.future(limit.request_id)[: rng.randint(0, limit.max_depth)]
        tokens: list[int] = []
        parents: list[int] = []
        depths: list[int] = []
        edges: set[tuple[int, int]] = set()
        tip, placed = -1, 0
        while len(tokens) < limit.max_nodes:
            if placed < len(right) and rng.random() < 0.5:
                parent, token = tip, right[placed]
            else:
                parent = rng.randint(-1, len(tokens) - 1)
                token = rng.randrange(VOCAB)
                if (parent, token) == (tip, right[placed] if placed < len(right) else -1):
                    continue
            depth = 1 if parent < 0 else depths[parent] + 1
            if depth > limit.max_depth or (parent, token) in edges:
                continue
            edges.add((parent, token))
            if parent == tip and placed < len(right) and token == right[placed]:
                tip, placed = len(tokens), placed + 1
            tokens.append(token)
            parents.append(parent)
            depths.append(depth)
        return DraftTree.from_lists(tokens, parents)


class Recorder(TestProposer):
    """Drafts nothing, and records the arguments of each `start`."""

    STARTED: ClassVar[list[tuple[list[int], str | None, list[list[int]]]]] = []
    """The prompt, namespace and references of each request."""
    SPELLINGS: ClassVar[list[list[int]]] = []
    """Of all requests."""

    def start(
        self,
        request_id: str,
        prompt: Sequence[int],
        namespace: str | None = "",
        references: Sequence[Sequence[int]] = (),
        spellings: Sequence[Sequence[int]] = (),
    ) -> None:
        super().start(request_id, prompt, namespace, references)
        self.SPELLINGS.extend([int(token) for token in spelled] for spelled in spellings)
        self.STARTED.append(
            (list(self.prompts[request_id]), namespace, [list(r) for r in references])
        )

    def grow(self, limit: DraftLimits) -> DraftTree:
        return EMPTY_TREE


class Planned(TestProposer):
    """The tree in TREES for the output so far."""

    TREES: ClassVar[dict[tuple[int, ...], DraftTree]] = {}

    def grow(self, limit: DraftLimits) -> DraftTree:
        tree = self.TREES.get(tuple(self.outputs[limit.request_id]), EMPTY_TREE)
        return tree if tree.depths.max(initial=0) <= limit.max_depth else EMPTY_TREE


class AlwaysRight(TestProposer):
    """A chain of the recorded next tokens."""

    def grow(self, limit: DraftLimits) -> DraftTree:
        return DraftTree.chain(self.future(limit.request_id)[: limit.max_depth])


class AlwaysWrong(TestProposer):
    """Children of the root, none of which is the recorded next token."""

    def grow(self, limit: DraftLimits) -> DraftTree:
        right = self.future(limit.request_id)[:1]
        wrong = [t for t in range(VOCAB) if [t] != right]
        n = min(limit.max_nodes, len(wrong))
        return DraftTree.from_lists(wrong[:n], [-1] * n)


TEST_PROPOSERS = dict(
    hidden_path=f"{__name__}.HiddenPath",
    always_right=f"{__name__}.AlwaysRight",
    always_wrong=f"{__name__}.AlwaysWrong",
    planned=f"{__name__}.Planned",
    recorder=f"{__name__}.Recorder",
)
CLASS_PATHS.update(TEST_PROPOSERS)
ALLOWED["proposer"] = Allowed((*ALLOWED["proposer"].words, *TEST_PROPOSERS))
