"""`scripts/train_drafter.py` makes a head that vLLM runs as it was trained."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from vllm import SamplingParams

from benchmarks.learning import drafter
from lookahead_vllm.draft.progress import PROPOSED
from tests.support.drafters import record_chains
from tests.support.driving import GREEDY, engine, generate, generate_staggered, random_prompts
from tests.support.models import save_tiny_model

PROMPTS = random_prompts(24, 12)
SETTINGS: dict[str, Any] = dict(block_size=32)


def test_the_head_is_in_vllm_as_good_as_in_training(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model, out, traces = save_tiny_model("llama", tmp_path), tmp_path / "head", tmp_path / "t.jsonl"
    with engine(model, **SETTINGS) as llm:
        answers = [answer for (answer,) in generate(llm, PROMPTS, GREEDY)]
    texts = list(zip(PROMPTS, answers, strict=True))
    lines = [dict(prompt_token_ids=p, output_token_ids=a) for p, a in texts]
    traces.write_text("\n".join(map(json.dumps, lines)))
    arguments = ["--model", str(model), "--traces", str(traces), "--out", str(out)]
    capsys.readouterr()
    with torch.enable_grad():
        assert drafter.main([*arguments, "--epochs", "150", "--chains", "3"]) == 0
    trained = float(capsys.readouterr().out.split()[-1].rstrip("%")) / 100
    held_out = [json.loads(line) for line in (out / "held_out.jsonl").read_text().splitlines()]
    assert [line["prompt_token_ids"] for line in held_out] == PROMPTS[1::2]

    head = {"method": "eagle", "model": str(out), "num_speculative_tokens": 3}
    alone = SamplingParams(max_tokens=40, temperature=0, ignore_eos=True, detokenize=False)
    with engine(model, dict(budget=1, drafter=head), **SETTINGS) as llm:
        chains = record_chains(llm)
        generate_staggered(llm, PROMPTS[::2], alone)
        of_training = dict(chains)
        chains.clear()
        generate_staggered(llm, PROMPTS[1::2], alone)
    check_recorded(chains, held_out)
    agreed = [
        chain[0] == (PROMPTS[2 * i] + answers[2 * i])[length]
        for (i, length), chain in of_training.items()
        if length < len(PROMPTS[2 * i]) + 40
    ]
    assert trained > 0.5
    assert sum(agreed) / len(agreed) > trained - 0.1


def check_recorded(chains: dict[tuple[int, int], list[int]], held_out: list[dict]) -> None:
    """The chains in the held-out lines are those that vLLM drafts, by prompt and length."""
    compared = same = 0
    for (i, length), chain in chains.items():
        line = held_out[i]
        after = length - len(line["prompt_token_ids"]) - 1
        if after < len(line["chains"]):
            recorded = [proposals[0][PROPOSED] for proposals in line["chains"][after]]
            compared += 1
            same += recorded[: len(chain)] == chain
    assert compared > 100 and same > 0.98 * compared
