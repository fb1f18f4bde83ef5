"""`scripts/record_choices.py`: the choices of a tiny random model."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers as hf

from benchmarks.learning.choices_file import AnswerChoices, load_choices, save_choices
from lookahead_vllm.simulation.traces import TraceError
from tests.support.files import jsonl
from tests.support.models import save_tiny_model

ROOT = Path(__file__).parents[2]


def line(id: str, prompt: list[int], output: list[int]) -> dict[str, Any]:
    return {"id": id, "prompt_token_ids": prompt, "output_token_ids": output}


def test_they_are_the_models_likeliest_tokens_at_each_position(tmp_path: Path) -> None:
    model = save_tiny_model("llama", tmp_path)
    rng = np.random.default_rng(0)
    # The first is longer than a chunk, which ends within its prompt and within its answer.
    texts = {"a": rng.integers(3, 128, 150), "b": rng.integers(3, 128, 20)}
    lines = [line(id, text[:-12].tolist(), text[-12:].tolist()) for id, text in texts.items()]
    traces = jsonl(tmp_path / "t.jsonl", *lines, line("c", [3], [4, 5]))
    command = [sys.executable, "scripts/record_choices.py", "--model", model, "--traces", traces]
    more = ["--out", tmp_path, "--limit", "2", "--dtype", "float32", "--chunk-tokens", "48"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "VLLM_CPU_OMP_THREADS_BIND": "0"}
    environment.pop("VLLM_ENABLE_V1_MULTIPROCESSING", None)
    subprocess.run(
        [*command, *more, "--kv-cache-gib", "0.05"], cwd=ROOT, env=environment, check=True
    )

    path = tmp_path / "t.choices.npz"
    recorded = load_choices(path)
    assert list(recorded) == ["a", "b"]
    reference = hf.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    for id, text in texts.items():
        with torch.no_grad():
            logits = reference(torch.from_numpy(text)[None]).logits[0, -13:-1]
        best = logits.topk(8)
        assert recorded[id].tokens.tolist() == best.indices.tolist()
        gaps = best.values[:, :1] - best.values
        np.testing.assert_allclose(recorded[id].gaps, gaps, rtol=2e-3, atol=1e-3)
    with np.load(path) as file:
        assert (str(file["model"]), str(file["dtype"])) == ("llama", "float32")


def test_other_files_and_torn_ones_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "t.choices.npz"
    one = AnswerChoices(np.zeros((2, 8), np.int32), np.zeros((2, 8), np.float16))
    save_choices(path, ["a", "b"], [one, one], "m", "float32")
    whole = path.read_bytes()
    for content in (b"no zip", *(whole[:size] for size in range(0, len(whole), 50))):
        path.write_bytes(content)
        with pytest.raises(TraceError, match=r"was not written by scripts/record_choices\.py"):
            load_choices(path)
