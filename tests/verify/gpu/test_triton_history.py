"""Penalties, bad words and thinking budgets in Triton; interpreted, and compiled for GPUs.

On chains they equal vLLM's kernels to the bit; on trees, vLLM's kernels over a batch in which every
row is a request of its own.
"""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch

from tests.verify.gpu.test_triton_compiles import TOOLS, Launches, instructions_of, spills
from tests.verify.test_history import (
    LONGEST,
    Step,
    penalized,
    random_step,
    with_forced_ends,
    without_bad_words,
)

IS_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
interpreted = pytest.mark.skipif(not IS_INTERPRETED, reason="runs in another process")
compiles = pytest.mark.skipif(
    IS_INTERPRETED or not (TOOLS / "ptxas").is_file(), reason="interpreted, or no ptxas"
)
BRUTE_FORCE = {
    "penalties": penalized,
    "bad_words": without_bad_words,
    "thinking": with_forced_ends,
}


def apply(step: Step, what: str) -> None:
    """Ours, in Triton."""
    from lookahead_vllm.verify.gpu import triton_history as ours

    logits, rows = step.logits, step.rows
    if what == "penalties":
        ours.apply_penalties(logits, rows, step.penalties)
    elif what == "bad_words":
        ours.apply_bad_words(logits, rows, step.texts, step.words, step.max_words)
    else:
        ours.apply_thinking_budgets(logits, rows, step.slots, step.texts, step.thinking)


@pytest.fixture(scope="module")
def vllm_kernels() -> Any:
    """vLLM's `sample` package, whose kernels the interpreter runs."""
    pytest.importorskip("vllm")
    from tests.support import triton_interpreter

    triton_interpreter.enable()
    from vllm.v1.worker.gpu.sample import bad_words, penalties, thinking_budget

    return penalties, bad_words, thinking_budget


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


@interpreted
@pytest.mark.parametrize("what", BRUTE_FORCE)
@pytest.mark.parametrize("seed", range(8))
def test_trees(what: str, seed: int) -> None:
    step = random_step(seed, most=2 * seed)
    expected = BRUTE_FORCE[what](step)
    apply(step, what)
    assert torch.equal(step.logits, expected)


@interpreted
@pytest.mark.parametrize("seed", range(6))
def test_markers_are_found_step_by_step(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    from lookahead_vllm.verify.gpu import triton_history

    monkeypatch.setattr(triton_history, "_SCAN_BLOCK", 8)  # a text has several blocks
    step = random_step(seed)
    for i in range(6):
        step = step.with_trees(seed + i, chains=i % 2 == 1, most=12)
        expected = with_forced_ends(step)
        apply(step, "thinking")
        assert torch.equal(step.logits, expected)
        step.emit(seed + i)


@interpreted
@pytest.mark.parametrize("seed", range(6))
def test_a_shorter_text_is_scanned_again(seed: int) -> None:
    step = random_step(seed)
    expected = with_forced_ends(step)
    step.thinking.scanned[:] = LONGEST
    step.thinking.last_end[:] = LONGEST - 5
    apply(step, "thinking")
    assert torch.equal(step.logits, expected)


@interpreted
@pytest.mark.parametrize("what", BRUTE_FORCE)
@pytest.mark.parametrize("seed", range(5))
def test_chains_equal_vllm(what: str, seed: int, vllm_kernels: Any) -> None:
    ours, theirs = (random_step(seed, chains=True) for _ in range(2))
    apply(ours, what)
    apply_vllm(theirs, what, vllm_kernels)
    assert torch.equal(ours.logits, theirs.logits)


@interpreted
@pytest.mark.parametrize("what", BRUTE_FORCE)
@pytest.mark.parametrize("seed", range(5))
def test_nodes_equal_requests_of_their_own_in_vllm(what: str, seed: int, vllm_kernels: Any) -> None:
    step = random_step(seed)
    written_out = step.written_out()
    apply(step, what)
    apply_vllm(written_out, what, vllm_kernels)
    assert torch.equal(step.logits, written_out.logits)


@interpreted
@pytest.mark.parametrize("seed", range(4))
def test_the_marker_cache_can_be_vllms_in_the_next_step(seed: int, vllm_kernels: Any) -> None:
    """Steps with and without branching trees share it."""
    step = random_step(seed, chains=True)
    for i in range(6):
        step = step.with_trees(seed + i, chains=True)
        expected = with_forced_ends(step)
        if i % 2:
            apply(step, "thinking")
        else:
            apply_vllm(step, "thinking", vllm_kernels)
        assert torch.equal(step.logits, expected)
        step.emit(seed + i)


@compiles
@pytest.mark.parametrize("capability", [80, 90, 100])
@pytest.mark.parametrize("what", BRUTE_FORCE)
def test_the_kernels_do_not_spill(
    what: str, capability: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    from lookahead_vllm.verify.gpu import triton_history

    names = ("_penalize", "_exclude_bad_words", "_find_markers", "_force_ends")
    kernels = [Launches(getattr(triton_history, name)) for name in names]
    for name, kernel in zip(names, kernels, strict=True):
        monkeypatch.setattr(triton_history, name, kernel)
    apply(random_step(0), what)
    launched = [kernel for kernel in kernels if kernel.calls]
    assert len(launched) == (2 if what == "thinking" else 1)
    for kernel in launched:
        assert not spills(instructions_of(kernel.compile(capability)))
