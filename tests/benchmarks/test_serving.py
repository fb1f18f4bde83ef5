"""Servers under load, with a fake `vllm` that listens and returns fixed measurements."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.serving import compare as script
from benchmarks.serving.arrivals import Latencies, Load, LoadFailed, bench_serve
from benchmarks.serving.latencies import Measured, conclusion, table, verdict
from benchmarks.serving.server import is_free


@pytest.fixture
def vllm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Install the fake; returns the file to which it writes its calls."""
    path = tmp_path / "vllm"
    fake = (Path(__file__).parents[1] / "support" / "fake_vllm.py").read_text()
    path.write_text(f"#!{sys.executable}\n{fake}")
    path.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    return tmp_path / "calls"


def clients(calls: Path) -> list[dict[str, str]]:
    return [json.loads(line) for line in calls.read_text().splitlines() if line[0] == "{"]


def latencies(tpot: float, tokens_per_s: float = 50.0) -> Latencies:
    return {
        "tpot_mean": tpot, "tpot_p99": 2 * tpot, "ttft_mean": 50.0, "ttft_p99": 90.0,
        "tokens_per_s": tokens_per_s, "requests_per_s": 1.0,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("seed", "message"), [(13, "status 1.*\n.*unlucky"), (12, "1 of 2 requests were not answered")]
)
def test_a_load_that_is_not_answered_is_an_error(
    tmp_path: Path, vllm: Path, seed: int, message: str
) -> None:
    with pytest.raises(LoadFailed, match=message):
        load = Load(2, concurrency=8, seed=seed)
        bench_serve("http://x", "m", tmp_path / "requests", load, 16, "s", tmp_path / "log")
    assert clients(vllm)[0]["--max-concurrency"] == "8"


# Tables.


@pytest.mark.parametrize(
    ("ratios", "metric", "expected"),
    [
        ([1.10, 1.12, 1.08], "tpot_mean", "worse"),
        ([1.10, 1.12, 1.08], "tokens_per_s", "better"),
        ([0.90, 0.88, 0.92], "ttft_p99", "better"),
        ([0.90, 0.88, 0.92], "tokens_per_s", "worse"),
        ([1.10, 0.99, 1.12], "tpot_mean", "within spread"),
        ([1.50], "tpot_mean", None),
    ],
)
def test_a_method_is_worse_if_its_ratio_differs_from_1_by_more_than_the_spread(
    ratios: list[float], metric: Any, expected: str | None
) -> None:
    assert verdict(ratios, metric) == expected


def test_the_table_compares_round_by_round() -> None:
    # The machine was busy in the second round, which does not change the ratio.
    measured: Measured = {
        0.5: {
            "none": [latencies(10), latencies(20)],
            "lookahead": [latencies(8), latencies(16.4, tokens_per_s=40)],
        }
    }
    lines = table(measured).splitlines()
    cells = [cell.strip() for cell in lines[2].strip("|").split("|")]
    assert cells == [
        "0.50", "TPOT, mean, ms", "15.0 (10.0–20.0)", "12.2 (8.0–16.4)", "0.81 (0.80–0.82)",
        "better",
    ]  # fmt: skip
    measured[0.5]["lookahead"][:] = [latencies(11), latencies(22.2)]  # type: ignore[index]
    assert "in 2 figures: TPOT, mean at 0.50/s; TPOT, p99 at 0.50/s" in conclusion(measured)[0]


# Whole runs.


def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr(script, "as_texts", lambda prompts, model: ["text"] * len(prompts))
    prompts = tmp_path / "p.jsonl"
    lines = [{"prompt_token_ids": [1] * length} for length in (3, 2000, 3, 3, 3, 3)]
    prompts.write_text("\n".join(map(json.dumps, lines)))
    status = script.main(["--model", "m", "--prompts", str(prompts), *arguments])
    assert isinstance(status, int)
    return status


def test_rounds_alternate_their_order_with_the_same_requests_and_new_salts(
    tmp_path: Path, vllm: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out.json"
    arguments = ["--rounds", "2", "--seconds", "2", "--loads", "0.5,9", "--json", str(out)]
    assert run(tmp_path, monkeypatch, *arguments) == 0
    calls = vllm.read_text().splitlines()
    names = {line.split()[1]: line.split()[2] for line in calls if line.startswith("serve")}
    loops, sent = clients(vllm)[:2], clients(vllm)[2:]
    assert {given["--num-prompts"] for given in loops} == {"5"}  # the long one is left out
    order = [names[given["--base-url"].rpartition(":")[2]] for given in sent]
    assert order == ["none", "lookahead"] * 2 + ["lookahead", "none"] * 2
    # Half of, and 9 times the closed loop's two requests a second; there are five prompts.
    assert [(g["--request-rate"], g["--num-prompts"]) for g in sent] == [
        *[("1.0", "2")] * 2, *[("18.0", "5")] * 2,
    ] * 2  # fmt: skip
    assert sent[0]["--seed"] == sent[4]["--seed"] != sent[2]["--seed"]
    salts = [given["--extra-body"] for given in sent]
    assert len(set(salts)) == 4 and salts[0] == salts[1]
    assert {given["--temperature"] for given in sent} == {"0"}
    written = json.loads(out.read_text())
    assert [rate["requests_per_s"] for rate in written["rates"]] == [1, 18]
    assert len(written["rates"][0]["rounds"]["lookahead"]) == 2
    assert all(is_free(int(port)) for port in names)
