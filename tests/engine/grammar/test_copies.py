"""Copies of grammars cost a request at most its drafts, and a step a share of its time."""

import logging
import os
import threading
from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from vllm import SamplingParams
from vllm.sampling_params import StructuredOutputsParams

from lookahead_vllm import machine
from lookahead_vllm.draft.tree import EMPTY_TREE, DraftTree
from lookahead_vllm.engine.grammar import copies as grammar_copies
from lookahead_vllm.engine.grammar.copies import LEAST_SECONDS, STEP_SECONDS, GrammarCopies


def chain(length: int) -> DraftTree:
    return DraftTree.from_lists([1] * length, range(-1, length - 1))


CHAIN = chain(64)


def start(copies: GrammarCopies, req_ids: Iterable[str]) -> None:
    """Requests under a grammar begin."""
    params = SamplingParams(structured_outputs=StructuredOutputsParams(regex="a+"))
    new = dict(prompt_token_ids=[1], prompt_embeds=None, sampling_params=params)
    for req_id in req_ids:
        copies.start(SimpleNamespace(req_id=req_id, **new))  # type: ignore[arg-type]


# ---- compiled and advanced -----------------------------------------------------------------------


def copies_by(monkeypatch: pytest.MonkeyPatch, manager: type, *req_ids: str) -> GrammarCopies:
    """With these requests or "r", whose grammars a `manager` in place of vLLM's compiles."""
    monkeypatch.setattr(grammar_copies, "StructuredOutputManager", manager)
    copies = GrammarCopies(None)  # type: ignore[arg-type]
    start(copies, req_ids or ["r"])
    return copies


def test_without_a_compiled_grammar_there_is_no_draft_and_no_wait(monkeypatch):
    may_start = threading.Event()

    class Manager:
        def __init__(self, config: Any) -> None:
            assert may_start.wait(60)
            self.initialised: list[str] = []

        def grammar_init(self, request: Any) -> None:
            self.initialised.append(request.request_id)
            request.structured_output_request.grammar = object()

        def clear_backend(self) -> None:
            self.initialised.clear()

    copies = copies_by(monkeypatch, Manager, "r", "ended")
    copies.finish("ended")
    draft = "r", DraftTree.from_lists([5], [-1]), 4, 4
    assert not len(copies.complete(*draft))
    copies.advance("r", [5])
    may_start.set()
    copies._compiling.submit(lambda: None).result()
    assert not len(copies.complete(*draft))  # the grammar has not read the first token
    assert copies._manager.initialised == ["r"]  # type: ignore[union-attr]
    copies.shutdown()


@pytest.mark.parametrize("fails_to", ["accept", "raise", "walk"])
def test_a_copy_of_a_grammar_that_fails_costs_only_drafts(monkeypatch, fails_to, caplog):
    class Grammar: ...

    class Manager:
        def __init__(self, config: Any) -> None:
            self.backend = SimpleNamespace()  # which no walk can begin with

        def grammar_init(self, request: Any) -> None:
            request.structured_output_request.grammar = Grammar()

        def accept_tokens(self, request: Any, tokens: list[int]) -> bool:
            logging.getLogger(__name__).error("as vLLM does for a token that is refused")
            if fails_to == "raise":
                raise RuntimeError("no state")
            return fails_to != "accept"

        def clear_backend(self) -> None: ...

    copies = copies_by(monkeypatch, Manager)
    copies._compiling.submit(lambda: None).result()
    for _ in range(2):
        copies.advance("r", [5])
        assert not len(copies.complete("r", DraftTree.from_lists([5], [-1]), 4, 4))
    assert not caplog.records and not logging.getLogger(__name__).disabled
    copies.shutdown()


def test_grammars_are_compiled_on_all_cores(monkeypatch):
    """vLLM binds the thread that starts the compiler to one of them."""
    cores: list[set[int]] = []

    class Manager:
        def __init__(self, config: Any) -> None:
            cores.append(os.sched_getaffinity(0))

        def grammar_init(self, request: Any) -> None: ...

        def clear_backend(self) -> None: ...

    os.sched_setaffinity(0, {min(machine.CPUS_AT_START)})
    try:
        copies = copies_by(monkeypatch, Manager)
    finally:
        machine.use_all_cores()
    copies._compiling.submit(lambda: None).result()
    copies.shutdown()
    assert cores == [machine.CPUS_AT_START]


# ---- the time of their walks ---------------------------------------------------------------------


class Grammar:
    """Allows all tokens. Calls take time of a clock that stands still otherwise."""

    def __init__(self, copies: "Copies", mask: float, text: float | None) -> None:
        self._copies, self._mask_seconds, self._text_seconds = copies, mask, text
        self.num_masks = self.num_texts = 0
        self.matcher = self if text is not None else None

    def fill_bitmask(self, mask: torch.Tensor, row: int) -> None:
        self.num_masks += 1
        self._copies.now += self._mask_seconds

    def find_jump_forward_string(self) -> str:
        assert self._text_seconds is not None
        self.num_texts += 1
        self._copies.now += self._text_seconds
        return "a" * 100_000

    def accept_tokens(self, request_id: str, tokens: list[int]) -> bool:
        return True

    def rollback(self, num_tokens: int) -> None: ...

    def is_terminated(self) -> bool:
        return False


class Manager:
    """In place of vLLM's, and of its tokenizer."""

    def __init__(self, grammars: list[Grammar]) -> None:
        self.backend = SimpleNamespace(allocate_token_bitmask=self._allocate)
        self.tokenizer = self
        self.accepted: list[int] = []
        self._grammars = grammars

    def _allocate(self, rows: int) -> torch.Tensor:
        return torch.full((rows, 4), -1, dtype=torch.int32)

    def grammar_init(self, request: Any) -> None:
        request.structured_output_request.grammar = self._grammars[int(request.request_id)]

    def accept_tokens(self, request: Any, tokens: list[int]) -> bool:
        self.accepted += tokens
        return True

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        return [1] * len(text)

    def _get_constraint_bounds(self, *_: Any) -> Any:
        return SimpleNamespace(constraint_start=0)


class Copies(GrammarCopies):
    """Those of requests "0", "1", ..., of which each has given seconds of a mask and of a text."""

    def __init__(self, *seconds: tuple[float, float | None]) -> None:
        self.now = 0.0
        super().__init__(None, lambda: self.now)  # type: ignore[arg-type]
        self.grammars = [Grammar(self, *own) for own in seconds]
        self.manager: Any = Manager(self.grammars)
        self._manager = self.manager
        start(self, map(str, range(len(seconds))))
        self._compiling.shutdown()

    def step(self, tree: DraftTree = CHAIN) -> list[DraftTree]:
        count = len(self.grammars)
        return [self.complete(str(i), tree, 64, 64, count) for i in range(count)]


def test_a_long_dictated_text_is_not_asked_for_in_each_step():
    copies = Copies((5e-6, 0.05))
    drafts = [len(copies.step(EMPTY_TREE)[0]) for _ in range(10)]
    assert drafts == [64] + [0] * 9
    assert copies.grammars[0].num_texts == 1
    for _ in range(990):
        copies.step(EMPTY_TREE)
    assert 30 < copies.grammars[0].num_texts <= 1000 * STEP_SECONDS / 0.05


def test_a_grammar_whose_mask_is_slow_gets_no_nodes():
    copies = Copies((0.005, None))
    assert [len(copies.step()[0]) for _ in range(10)] == [0] * 10
    assert copies.grammars[0].num_masks <= 4


def test_nodes_whose_masks_are_not_filled_in_time_are_left_out():
    copies = Copies((0.0006, None))
    [tree] = copies.step()
    assert tree.parents.tolist() == [-1, 0]
    assert copies.grammars[0].num_masks == 4  # those before and after them, and one too many
    copies = Copies((0.0006, None))
    [tree] = copies.step(DraftTree.from_lists([1, 2, 3, 4, 5], [-1, -1, 0, 0, 2]))
    assert (tree.tokens.tolist(), tree.parents.tolist()) == ([1, 3], [-1, 0])


def test_dictated_nodes_whose_masks_are_not_filled_in_time_are_left_out():
    copies = Copies((0.0006, 0.05))
    assert copies.step(EMPTY_TREE)[0].parents.tolist() == [-1, 0]


@pytest.mark.parametrize("count", [1, 4, 64])
def test_all_grammars_together_take_no_more_than_a_step_allows(count):
    copies = Copies(*[(0.005, 0.05)] * count)
    for _ in range(500):
        copies.step()
    assert copies.now <= 500 * max(STEP_SECONDS, count * LEAST_SECONDS) + 0.06


def test_a_slow_grammar_takes_few_drafts_from_the_others():
    copies = Copies((0.005, 0.05), *[(5e-6, None)] * 9)
    sizes = np.array([[len(tree) for tree in copies.step(chain(16))] for _ in range(500)])
    assert (sizes[:, 1:] == 16).mean() > 0.85


@pytest.mark.parametrize("count", [1, 16, 128])
def test_ordinary_grammars_keep_all_nodes(count):
    copies = Copies(*[(5e-6, 5e-6)] * count)
    tree = chain(64 if count == 1 else 16)
    for _ in range(10):
        assert all(len(kept) >= len(tree) for kept in copies.step(tree))


def test_tokens_wait_in_one_list_for_a_grammar_that_is_compiled():
    copies = Copies((0.0, None))
    grammar = copies._requests["0"].structured_output_request
    assert grammar is not None
    copied, grammar.grammar = grammar.grammar, None
    copies.advance("0", [1, 2])
    waiting = copies._unread["0"]
    copies.advance("0", [3])
    assert copies._unread["0"] is waiting and waiting == [1, 2, 3]
    grammar.grammar = copied
    copies.advance("0", [4])
    assert copies.manager.accepted == [1, 2, 3, 4]
