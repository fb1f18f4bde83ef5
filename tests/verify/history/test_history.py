"""The history of a node is the request's text followed by the path to the node."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch

from lookahead_vllm.verify import history
from lookahead_vllm.verify.history import BadWords, Histories, Penalties, Texts, ThinkingBudgets
from tests.support import node_history as reference

VOCAB = 70  # not a multiple of 32
ALPHABET = [3, 31, 32, 69]
"""The tokens of texts and trees: few, so that words and markers are frequent."""
NUM_SLOTS, LONGEST = 7, 90
MARKERS = [
    ([3], [31], [31]),
    ([3, 31], [32], [69, 69, 3]),
    ([3], [3, 31], [3, 31, 3, 32]),
    ([31, 31, 3], [31], [32, 3]),
]
"""Tokens that start thinking, that end it, and that are forced to end it."""


@dataclass
class Step:
    """The logits of a step, and the state of vLLM's processors."""

    logits: torch.Tensor
    rows: Histories
    local_pos: torch.Tensor
    """int32 [n]: the offset of each row among those of its request."""
    slots: torch.Tensor
    """int64 [r]: of the requests, in the order of the batch."""
    texts: Texts
    penalties: Penalties
    words: BadWords
    thinking: ThinkingBudgets

    @property
    def max_words(self) -> int:
        return int(self.words.counts[self.slots].max())

    def histories(self) -> list[list[int]]:
        """The prompt, the output and the path of each row."""
        rows = range(len(self.rows.parents))
        return [reference.history_of(row, self.rows, self.texts) for row in rows]

    def with_trees(self, seed: int, chains: bool = False, most: int = 6) -> Step:
        """The same requests with new logits and trees."""
        rng = np.random.default_rng(seed)
        parents: list[int] = []
        local_pos: list[int] = []
        slots: list[int] = []
        for slot in self.slots.tolist():
            first, size = len(parents), int(rng.integers(0, most + 1))
            parents.append(first)
            for node in range(1, size + 1):
                parents.append(first + (node - 1 if chains else int(rng.integers(0, node))))
            local_pos.extend(range(size + 1))
            slots.extend([slot] * (size + 1))
        logits = torch.from_numpy(rng.normal(size=(len(parents), VOCAB)).astype(np.float32))
        logits[0, 5] = -torch.inf
        rows = Histories(
            torch.tensor(slots),
            torch.from_numpy(rng.choice(ALPHABET, len(parents)).astype(np.int32)),
            torch.tensor(parents, dtype=torch.int32),
        )
        pos = torch.tensor(local_pos, dtype=torch.int32)
        return Step(
            logits, rows, pos, self.slots, self.texts, self.penalties, self.words, self.thinking
        )

    def emit(self, seed: int) -> None:
        """Add up to five tokens to the text of each slot."""
        rng = np.random.default_rng(seed)
        for slot, total in enumerate(self.texts.total_lens.tolist()):
            new = rng.choice(ALPHABET, rng.integers(1, 6))
            self.texts.token_ids[slot, total : total + len(new)] = torch.from_numpy(new).int()
            self.texts.total_lens[slot] += len(new)

    def written_out(self) -> Step:
        """Every row becomes a request of its own, without a tree."""
        n, written = len(self.logits), self.histories()
        longest = max(map(len, written))
        slots = self.rows.slots.long()
        texts = Texts(
            torch.tensor([h + [0] * (longest - len(h)) for h in written], dtype=torch.int32),
            self.texts.prompt_lens[slots],
            torch.tensor([len(h) for h in written], dtype=torch.int32),
        )
        own = torch.arange(n)
        return Step(
            self.logits.clone(),
            Histories(own, self.rows.ids, own.int()),
            torch.zeros(n, dtype=torch.int32),
            own,
            texts,
            counted(texts, *(part[slots] for part in self.penalties[:3])),
            BadWords(*(part[slots] for part in self.words)),
            unscanned(self.thinking.budgets[slots], self.thinking[4:]),
        )


def counted(texts: Texts, *penalties: torch.Tensor) -> Penalties:
    """The penalties with what they count in the texts."""
    num_slots = len(texts.token_ids)
    mask = np.zeros((num_slots, -(-VOCAB // 32)), np.uint32)
    counts = np.zeros((num_slots, VOCAB), np.int32)
    for slot, (prompt, total) in enumerate(zip(texts[1].tolist(), texts[2].tolist(), strict=True)):
        text = texts.token_ids[slot].tolist()
        for token in text[:prompt]:
            mask[slot, token // 32] |= np.uint32(1 << token % 32)
        for token in text[prompt:total]:
            counts[slot, token] += 1
    return Penalties(*penalties, torch.from_numpy(mask.view(np.int32)), torch.from_numpy(counts))


def unscanned(budgets: torch.Tensor, markers: Any) -> ThinkingBudgets:
    """Thinking budgets of requests that have just begun."""
    unknown = torch.full_like(budgets, -1)
    start, end, forced = (torch.as_tensor(marker, dtype=torch.int32) for marker in markers)
    state = (unknown, unknown.clone(), torch.zeros_like(budgets))
    return ThinkingBudgets(budgets, *state, start, end, forced)


def random_step(seed: int, chains: bool = False, most: int = 6) -> Step:
    rng = np.random.default_rng(seed)
    prompt_lens = rng.integers(1, 20, NUM_SLOTS)
    texts = Texts(
        torch.from_numpy(rng.choice(ALPHABET, (NUM_SLOTS, LONGEST)).astype(np.int32)),
        torch.from_numpy(prompt_lens.astype(np.int32)),
        torch.from_numpy((prompt_lens + rng.choice([0, 1, 2, 3, 14], NUM_SLOTS)).astype(np.int32)),
    )

    def pick(*values: float) -> torch.Tensor:
        return torch.from_numpy(rng.choice(np.float32(values), NUM_SLOTS))

    penalties = counted(texts, pick(1, 1, 1.3, 0.7), pick(0, 0.4, -0.3), pick(0, 1.1, -0.6))
    tokens = np.zeros((NUM_SLOTS, 40), np.int32)
    offsets = np.zeros((NUM_SLOTS, 9), np.int32)
    counts = rng.choice([0, 2, 5, 8], NUM_SLOTS)
    for slot in range(NUM_SLOTS):
        lengths = rng.choice([1, 2, 3, 3, 3, 4], counts[slot])
        offsets[slot, 1 : counts[slot] + 1] = np.cumsum(lengths)
        tokens[slot, : lengths.sum()] = rng.choice(ALPHABET, lengths.sum())
    words = BadWords(
        torch.from_numpy(tokens), torch.from_numpy(offsets), torch.from_numpy(counts.astype("i4"))
    )
    budgets = torch.from_numpy(rng.integers(-1, 6, NUM_SLOTS).astype(np.int32))
    thinking = unscanned(budgets, MARKERS[seed % len(MARKERS)])
    slots = torch.from_numpy(rng.permutation(NUM_SLOTS)[:4])
    empty = (torch.empty(0),) * 2
    bare = Step(empty[0], Histories(*empty, empty[0]), empty[1], slots, texts, penalties, words,
                thinking)  # fmt: skip
    return bare.with_trees(seed + 1, chains, most)


# ---- expected logits -----------------------------------------------------------------------------


def penalized(step: Step) -> torch.Tensor:
    expected = step.logits.clone()
    reference.apply_penalties(expected, step.rows, step.penalties)
    return expected


def without_bad_words(step: Step) -> torch.Tensor:
    expected = step.logits.clone()
    reference.apply_bad_words(expected, step.rows, step.texts, step.words, step.max_words)
    return expected


def with_forced_ends(step: Step) -> torch.Tensor:
    expected = step.logits.clone()
    reference.apply_thinking_budgets(expected, step.rows, step.slots, step.texts, step.thinking)
    return expected


EXPECTED = {
    "penalties": penalized,
    "bad_words": without_bad_words,
    "thinking": with_forced_ends,
}


def apply(step: Step, what: str) -> None:
    logits, rows = step.logits, step.rows
    if what == "penalties":
        history.apply_penalties(logits, rows, step.penalties)
    elif what == "bad_words":
        history.apply_bad_words(logits, rows, step.texts, step.words, step.max_words)
    else:
        history.apply_thinking_budgets(logits, rows, step.slots, step.texts, step.thinking)


def apply_vllm(step: Step, what: str, kernels: Any) -> None:
    """vLLM's, for a step of chains."""
    logits, (slots, ids, _), pos = step.logits, step.rows, step.local_pos
    texts, thinking = step.texts, step.thinking
    if what == "penalties":
        kernels[0].apply_penalties(logits, slots, ids, pos, *step.penalties)
    elif what == "bad_words":
        kernels[1].apply_bad_words(logits, slots, *step.words, *texts, ids, pos, step.max_words)
    else:
        kernels[2].apply_thinking_budget(
            logits, step.slots, slots, thinking.budgets, texts.token_ids, texts.total_lens, ids,
            pos, *thinking[1:],
        )  # fmt: skip


# ---- tests ---------------------------------------------------------------------------------------


@pytest.mark.interpreted("too")
@pytest.mark.parametrize("what", EXPECTED)
@pytest.mark.parametrize("seed", range(6))
def test_rows_are_treated_as_requests_of_their_own(what, seed):
    step = random_step(seed, most=2 * seed)
    expected, written_out = EXPECTED[what](step), step.written_out()
    apply(step, what)
    assert torch.equal(step.logits, expected)
    apply(written_out, what)
    assert torch.equal(written_out.logits, expected)


@pytest.mark.interpreted
@pytest.mark.parametrize("seed", [1, 2])
def test_markers_are_found_step_by_step(seed, monkeypatch):
    from lookahead_vllm.verify.history import triton as triton_history

    monkeypatch.setattr(triton_history, "_SCAN_BLOCK", 8)  # a text has several blocks
    step = random_step(seed)
    for i in range(4):
        step = step.with_trees(seed + i, chains=i % 2 == 1, most=8)
        expected = with_forced_ends(step)
        apply(step, "thinking")
        assert torch.equal(step.logits, expected)
        step.emit(seed + i)


@pytest.mark.interpreted
@pytest.mark.parametrize("seed", range(4))
def test_a_shorter_text_is_scanned_again(seed):
    """Text that was scanned, and ended thinking, is gone."""
    step = random_step(seed)
    expected = with_forced_ends(step)
    step.thinking.scanned[:] = LONGEST
    step.thinking.last_end[:] = LONGEST - 5
    apply(step, "thinking")
    assert torch.equal(step.logits, expected)


@pytest.fixture(scope="module")
def vllm_kernels() -> Any:
    """The modules of vLLM whose kernels the interpreter runs."""
    pytest.importorskip("vllm")
    from tests.support import triton_interpreter

    triton_interpreter.enable()
    from vllm.v1.worker.gpu.sample import bad_words, penalties, thinking_budget

    return penalties, bad_words, thinking_budget


@pytest.mark.interpreted
@pytest.mark.parametrize("what", EXPECTED)
@pytest.mark.parametrize("seed", range(3))
def test_it_equals_vllm(what, seed, vllm_kernels):
    """Bit by bit: chains, and the nodes of trees as requests of their own."""
    ours, theirs = (random_step(seed, chains=True) for _ in range(2))
    apply(ours, what)
    apply_vllm(theirs, what, vllm_kernels)
    assert torch.equal(ours.logits, theirs.logits)
    step = random_step(seed)
    written_out = step.written_out()
    apply(step, what)
    apply_vllm(written_out, what, vllm_kernels)
    assert torch.equal(step.logits, written_out.logits)


@pytest.mark.interpreted
@pytest.mark.parametrize("seed", range(2))
def test_the_marker_cache_can_be_vllms_in_the_next_step(seed, vllm_kernels):
    """Steps with and without branching trees share it."""
    step = random_step(seed, chains=True)
    for i in range(4):
        step = step.with_trees(seed + i, chains=True)
        expected = with_forced_ends(step)
        if i % 2:
            apply(step, "thinking")
        else:
            apply_vllm(step, "thinking", vllm_kernels)
        assert torch.equal(step.logits, expected)
        step.emit(seed + i)


def test_nothing_is_read_on_a_device(monkeypatch):
    """Meta tensors have no data: whatever read some, or made a shape of it, would raise."""
    pytest.importorskip("triton")
    from tests.support.triton_launches import record_launches

    launches = record_launches(monkeypatch)
    step = random_step(0)
    max_words, n = step.max_words, len(step.logits)
    for name, value in vars(step).items():
        on_device = (
            value.to("meta")
            if isinstance(value, torch.Tensor)
            else type(value)(*(part.to("meta") for part in value))
        )
        setattr(step, name, on_device)
    monkeypatch.setattr(Step, "max_words", max_words)
    for what in EXPECTED:
        apply(step, what)
    grids = {name: [call["grid"] for call in own.calls] for name, own in launches.items()}
    assert {name: own for name, own in grids.items() if own} == {
        "_penalize": [(n, 1)],
        "_exclude_bad_words": [(n, max_words)],
        "_find_markers": [(4,)],
        "_force_ends": [(n,)],
    }
