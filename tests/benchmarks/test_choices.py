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

from benchmarks.learning.choices import main
from lookahead_vllm.simulation.choices import load_choices
from lookahead_vllm.simulation.traces import AnswerChoices, Trace
from tests.support.files import jsonl
from tests.support.models import save_config, save_tiny_model

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


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ([line("a", [3], [4, 5]), line("a", [3], [4, 5])], "every line needs an `id` of its own"),
        ([{"prompt_token_ids": [3], "output_token_ids": [4, 5]}], "needs an `id`"),
        ([line("a", [3] * 500, [4] * 12)], "trace 'a' has 512 tokens; the model has 512 positions"),
        ([line("a", [3], "")], "`output_token_ids` must be a list"),
    ],
)
def test_traces_that_cannot_be_recorded_are_refused(
    lines: list[dict[str, Any]], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = save_config("llama", tmp_path)
    traces = jsonl(tmp_path / "t.jsonl", *lines)
    arguments = ["--model", str(model), "--traces", str(traces)]
    assert main([*arguments, "--out", str(tmp_path)]) == 2
    assert message in capsys.readouterr().err
    assert main([*arguments, "--out", str(tmp_path / "nowhere")]) == 2


def test_a_folder_in_place_of_the_file_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    traces = jsonl(tmp_path / "t.jsonl", line("a", [3], [4, 5]))
    (tmp_path / "t.choices.npz").mkdir()
    model = save_config("llama", tmp_path)
    assert main(["--model", str(model), "--traces", str(traces), "--out", str(tmp_path)]) == 2
    assert "t.choices.npz is a folder" in capsys.readouterr().err


def test_a_name_that_cannot_be_encoded_loses_no_choices(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Recorder:
        dtype = "float32"

        def __call__(self, trace: Trace) -> AnswerChoices:
            shape = (len(trace.output), 8)
            return AnswerChoices(np.zeros(shape, np.int32), np.zeros(shape, np.float16))

        def close(self) -> None:
            pass

    monkeypatch.setattr("benchmarks.learning.choices._recorder", lambda *args: Recorder())
    sys.stderr.reconfigure(errors="backslashreplace")  # type: ignore[attr-defined]  # as Python's
    files = [jsonl(tmp_path / f"{name}.jsonl", line("a", [3], [4, 5])) for name in ("\udce9", "b")]
    assert main(["--model", "m", "--traces", *map(str, files), "--out", str(tmp_path)]) == 0
    assert r"\udce9.choices.npz: 1 traces" in capsys.readouterr().out
    for file in files:
        assert list(load_choices(file.with_suffix(".choices.npz"))) == ["a"]
