"""The benchmarks' jobs, in an engine of a tiny model."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers as hf
from vllm import SamplingParams

from benchmarks.engines.generate import Job, run
from benchmarks.engines.target_guided import follow
from benchmarks.learning.choices import main
from benchmarks.learning.choices_file import load_choices
from tests.support.driving import drafter_of, engine, generate, random_prompts
from tests.support.files import jsonl


def test_the_requests_of_a_job_bring_their_references(
    llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Dictated answers, prefix caching; what differs is whether a request brings a reference."""
    prompts = random_prompts(4, 20, seed=7)
    rng = np.random.default_rng(1)
    answers = [rng.integers(5, 100, 40).tolist() for _ in prompts]
    references = [[*answer[:20], 3, *answer[22:]] for answer in answers]
    turns: list[dict[str, Any]] = []

    def emit(event: str, **content: Any) -> None:
        if event == "answer":
            turns.append(content["answer"])

    with engine(llama, {"budget": 8}, enable_prefix_caching=True) as llm:
        monkeypatch.setattr("vllm.LLM", lambda **_: llm)
        for given in (None, references):
            # Every part has other prompts: the trie learns from the answers.
            half = slice(2) if given is None else slice(2, 4)
            job = Job(
                {"max_num_seqs": 2},
                prompts[half],
                max_tokens=64,
                answers=answers[half],
                references=given and given[half],
            )
            run(job, [[0, 1]], emit)
    assert [[g["token_ids"] for g in turn["generations"]] for turn in turns] == [
        answers[:2],
        answers[2:],
    ]
    without, with_reference = ([g["steps"] for g in turn["generations"]] for turn in turns)
    assert min(without) > 35 and max(with_reference) < 20


@pytest.mark.parametrize("proposer", [None, "hybrid", "jacobi_window"])
def test_proposers_hear_recorded_choices_and_the_answer_stays_the_recorded_one(
    proposer: str | None, llama: Path, tmp_path: Path
) -> None:
    """The recorded next token is among the choices at any rank, or not among them at all."""
    rng = np.random.default_rng(4)
    prompts = random_prompts(3, 20, seed=8)
    phrase = rng.integers(5, 100, 5).tolist()
    answers = [[*rng.integers(5, 100, 6).tolist(), *phrase * 6] for _ in prompts]
    tokens = np.stack([rng.permutation(100)[:8] for answer in answers for _ in answer])
    flat = np.concatenate(answers)
    ranks = rng.integers(0, 10, len(flat))
    for row, rank in enumerate(ranks):
        tokens[row][tokens[row] == flat[row]] = 101
        if rank < 8:
            tokens[row, rank] = flat[row]
    gaps = np.sort(rng.random((len(flat), 8)), axis=1).astype(np.float16)
    gaps[:, 0] = 0
    firsts = np.cumsum([0, *map(len, answers)])
    path = tmp_path / "choices.npz"
    np.savez(path, ids=["a", "b", "c"], firsts=firsts, tokens=tokens.astype(np.int32), gaps=gaps)
    params = SamplingParams(temperature=0, max_tokens=36, ignore_eos=True, detokenize=False)
    # With the window's own nodes in every step; otherwise few rows are off the recorded path.
    lookahead = dict(proposer=proposer, budget=24, num_speculative_tokens=24) if proposer else None
    with engine(llama, lookahead) as llm:
        follow(llm, prompts, answers, [str(path)], ["a", "b", "c"])
        assert [output for [output] in generate(llm, prompts, params)] == answers
        if proposer:
            assert drafter_of(llm).counters.accepted_nodes > 20
            assert drafter_of(llm).counters.branching_trees > 5


def test_recorded_choices_are_the_models_likeliest_tokens(
    llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = np.random.default_rng(0)
    # The first is longer than a chunk, which ends within its prompt and within its answer.
    texts = {"a": rng.integers(3, 128, 150), "b": rng.integers(3, 128, 20)}
    lines = [
        {"id": i, "prompt_token_ids": t[:-12].tolist(), "output_token_ids": t[-12:].tolist()}
        for i, t in texts.items()
    ]
    traces = jsonl(tmp_path / "t.jsonl", *lines)
    command = ["--model", str(llama), "--traces", str(traces), "--out", str(tmp_path)]
    command += ["--dtype", "float32", "--chunk-tokens", "48", "--kv-cache-gib", "0.05"]
    with ExitStack() as stack:

        def start(model: str, **args: Any) -> Any:
            return stack.enter_context(engine(Path(model), **args))

        monkeypatch.setattr("vllm.LLM", start)
        assert main(command) == 0

    recorded = load_choices(tmp_path / "t.choices.npz")
    assert list(recorded) == ["a", "b"]
    reference = hf.AutoModelForCausalLM.from_pretrained(llama, dtype=torch.float32)
    for name, text in texts.items():
        with torch.no_grad():
            logits = reference(torch.from_numpy(text)[None]).logits[0, -13:-1]
        best = logits.topk(8)
        assert recorded[name].tokens.tolist() == best.indices.tolist()
        gaps = best.values[:, :1] - best.values
        np.testing.assert_allclose(recorded[name].gaps, gaps, rtol=2e-3, atol=1e-3)
