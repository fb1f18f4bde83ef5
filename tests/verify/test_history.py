"""The history of a node is the request's text followed by the path to the node."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lookahead_vllm.verify import history
from lookahead_vllm.verify.history import BadWords, Histories, Penalties, Texts, ThinkingBudgets
from tests.verify.test_walk import Launches

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
        found = []
        ids, parents = self.rows.ids.tolist(), self.rows.parents.tolist()
        for row, slot in enumerate(self.rows.slots.tolist()):
            path, here = [], row
            while parents[here] != here:
                path.insert(0, ids[here])
                here = parents[here]
            text = self.texts.token_ids[slot, : self.texts.total_lens[slot]].tolist()
            found.append(text + path)
        return found

    def prompt_lens(self) -> list[int]:
        """Of each row."""
        return self.texts.prompt_lens[self.rows.slots.long()].tolist()

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


def random_step(seed: int, chains: bool = False, most: int = 6, num_requests: int = 4) -> Step:
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
    slots = torch.from_numpy(rng.permutation(NUM_SLOTS)[:num_requests])
    empty = (torch.empty(0),) * 2
    bare = Step(empty[0], Histories(*empty, empty[0]), empty[1], slots, texts, penalties, words,
                thinking)  # fmt: skip
    return bare.with_trees(seed + 1, chains, most)


# ---- brute force ---------------------------------------------------------------------------------


def penalized(step: Step) -> torch.Tensor:
    """The logits after all penalties, in float32."""
    expected = step.logits.numpy().copy()
    slots = step.rows.slots.tolist()
    for values, slot, text, prompt in zip(
        expected, slots, step.histories(), step.prompt_lens(), strict=True
    ):
        repetition, frequency, presence = (part[slot].numpy() for part in step.penalties[:3])
        counts = np.zeros(VOCAB, np.float32)
        for token, count in Counter(text[prompt:]).items():
            counts[token] = count
        known = np.isin(np.arange(VOCAB), text)
        scale = np.where(known, repetition, np.float32(1))
        values *= np.where(values > 0, np.float32(1) / scale, scale)
        values -= frequency * counts
        values -= presence * (counts > 0).astype(np.float32)
    return torch.from_numpy(expected)


def without_bad_words(step: Step) -> torch.Tensor:
    expected = step.logits.clone()
    slots = step.rows.slots.tolist()
    for row, (slot, text, prompt) in enumerate(
        zip(slots, step.histories(), step.prompt_lens(), strict=True)
    ):
        output = text[prompt:]
        for i in range(step.words.counts[slot]):
            first, end = step.words.offsets[slot, i : i + 2].tolist()
            *before, last = step.words.token_ids[slot, first:end].tolist()
            if not before or output[-len(before) :] == before:
                expected[row, last] = -torch.inf
    return expected


def with_forced_ends(step: Step) -> torch.Tensor:
    start, end, forced = (part.tolist() for part in step.thinking[4:])
    expected = step.logits.clone()

    def last(marker: list[int], text: list[int]) -> int:
        places = range(len(text) - len(marker), -1, -1)
        return next((i for i in places if text[i : i + len(marker)] == marker), -1)

    for row, (slot, text) in enumerate(
        zip(step.rows.slots.tolist(), step.histories(), strict=True)
    ):
        budget, begun = step.thinking.budgets[slot], last(start, text)
        if budget < 0 or begun <= last(end, text) or len(text) - begun - len(start) < budget:
            continue
        given = max(i for i in range(len(forced)) if text[len(text) - i :] == forced[:i])
        expected[row, forced[given]] = 1e9
    return expected


Apply = Callable[[Step], None]
"""Changes the logits of a step."""


def apply_penalties(step: Step) -> None:
    history.apply_penalties(step.logits, step.rows, step.penalties)


def apply_bad_words(step: Step) -> None:
    history.apply_bad_words(step.logits, step.rows, step.texts, step.words, step.max_words)


def apply_thinking_budgets(step: Step) -> None:
    history.apply_thinking_budgets(step.logits, step.rows, step.slots, step.texts, step.thinking)


ALL = [
    pytest.param(apply_penalties, penalized, id="penalties"),
    pytest.param(apply_bad_words, without_bad_words, id="bad_words"),
    pytest.param(apply_thinking_budgets, with_forced_ends, id="thinking"),
]


# ---- tests ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(("apply", "brute_force"), ALL)
@settings(deadline=None, max_examples=60)  # the first example compiles
@given(seed=st.integers(0, 2**31), chains=st.booleans(), most=st.integers(0, 12))
def test_rows_are_treated_as_requests_of_their_own(
    apply: Apply, brute_force: Callable[[Step], torch.Tensor], seed: int, chains: bool, most: int
) -> None:
    step = random_step(seed, chains, most)
    expected, written_out = brute_force(step), step.written_out()
    apply(step)
    assert torch.equal(step.logits, expected)
    apply(written_out)
    assert torch.equal(written_out.logits, expected)


@pytest.mark.parametrize(("apply", "brute_force"), ALL)
def test_the_cases_change_logits(apply: Apply, brute_force: Callable[[Step], torch.Tensor]) -> None:
    """At nodes, and differently from what the rows before them would give."""
    at_nodes = as_a_chain = 0
    for seed in range(50):
        step = random_step(seed)
        expected = brute_force(step)
        changed = (expected != step.logits).any(1)
        at_nodes += int(changed[step.local_pos > 0].sum())
        firsts = torch.arange(len(changed)) - step.local_pos
        before = torch.maximum(torch.arange(len(changed)) - 1, firsts)
        chained = Histories(step.rows.slots, step.rows.ids, before.int())
        step.rows = chained
        apply(step)
        as_a_chain += int((expected != step.logits).any(1).sum())
    assert at_nodes > 50
    assert as_a_chain > 10


@settings(deadline=None, max_examples=60)
@given(seed=st.integers(0, 2**31))
def test_markers_are_found_step_by_step(seed: int) -> None:
    step = random_step(seed)
    for i in range(8):
        step = step.with_trees(seed + i, chains=i % 2 == 1, most=12)
        expected = with_forced_ends(step)
        apply_thinking_budgets(step)
        assert torch.equal(step.logits, expected)
        step.emit(seed + i)


@pytest.mark.parametrize("seed", range(8))
def test_a_shorter_text_is_scanned_again(seed: int) -> None:
    """Text that was scanned, and ended thinking, is gone."""
    step = random_step(seed)
    expected = with_forced_ends(step)
    step.thinking.scanned[:] = LONGEST
    step.thinking.last_end[:] = LONGEST - 5
    apply_thinking_budgets(step)
    assert torch.equal(step.logits, expected)


def test_wrong_arguments_are_refused() -> None:
    step = random_step(0)
    rows = step.rows
    with pytest.raises(ValueError, match=r"float32 \[n, vocabulary\].*; got torch.float64"):
        history.apply_penalties(step.logits.double(), rows, step.penalties)
    with pytest.raises(ValueError, match="contiguous in the last dimension"):
        history.apply_penalties(step.logits.T, rows, step.penalties)
    with pytest.raises(ValueError, match="one entry for each of"):
        history.apply_penalties(step.logits[1:], rows, step.penalties)
    with pytest.raises(ValueError, match="parents are int32"):
        wrong = rows._replace(parents=rows.parents.long())
        history.apply_penalties(step.logits, wrong, step.penalties)


def test_nothing_is_read_on_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Meta tensors have no data: whatever read some, or made a shape of it, would raise."""
    pytest.importorskip("triton")
    from lookahead_vllm.verify.gpu import triton_history

    launches = Launches()
    for name in ("_penalize", "_exclude_bad_words", "_find_markers", "_force_ends"):
        monkeypatch.setattr(triton_history, name, launches)
    step = random_step(0)
    max_words = step.max_words
    n = len(step.logits)

    def on_device(parts: Any) -> Any:
        return type(parts)(*(part.to("meta") for part in parts))

    logits, rows, texts = step.logits.to("meta"), on_device(step.rows), on_device(step.texts)
    history.apply_penalties(logits, rows, on_device(step.penalties))
    history.apply_bad_words(logits, rows, texts, on_device(step.words), max_words)
    slots = step.slots.to("meta")
    history.apply_thinking_budgets(logits, rows, slots, texts, on_device(step.thinking))
    assert [launch[0] for launch in launches] == [(n, 1), (n, max_words), (4,), (n,)]
