"""The figures of rollouts and of fleets are those of their definitions."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from benchmarks.fleet.compare import Answered
from benchmarks.fleet.compare import table as fleet_table
from benchmarks.prompts import Prompt
from benchmarks.rollouts import compare
from benchmarks.rollouts.compare import RolloutBenchmark, parser
from benchmarks.rollouts.engine import Rollout, drifted
from benchmarks.rollouts.figures import Epoch, table
from benchmarks.rollouts.replay import Recorded, replay, trie
from lookahead_vllm.draft.options import LookaheadOptions


def rollout(running: list[int], tokens: list[list[int]], seconds: float) -> Rollout:
    return Rollout(tokens, [len(own) // 2 for own in tokens], running, seconds, 0, 0)


def test_an_epoch_counts_the_steps_to_its_end_and_its_tail() -> None:
    tokens = [[1, 2]] * 19 + [[1, 2, 3, 4]]
    epoch = Epoch.of(rollout([20, 20, 12, 2, 1, 1], tokens, 3.0))
    assert (epoch.steps, epoch.tail, epoch.seconds) == (6, 3, 3.0)
    assert epoch.tokens_per_step == pytest.approx(42 / 21)


def test_each_epoch_is_compared_with_plain_vllms() -> None:
    plain = [Epoch.of(rollout([1] * 8, [[1] * 8], 2.0)), Epoch.of(rollout([1] * 6, [[2] * 6], 1.0))]
    ours = [Epoch.of(rollout([1] * 4, [[1] * 8], 1.0)), Epoch.of(rollout([1] * 3, [[3] * 6], 2.0))]
    rows = [
        [cell.strip() for cell in line.split("|")[1:-1]]
        for line in table({"none": plain, "lookahead": ours}).splitlines()[2:]
    ]
    assert [row[1:4] for row in rows if row[1] == "lookahead"] == [
        ["lookahead", "4", "0.50"],
        ["lookahead", "3", "0.50"],
    ]
    assert [row[-2:] for row in rows if row[1] == "lookahead"] == [["2.00", "0"], ["0.50", "1"]]


def test_weights_drift_a_little_further_in_each_epoch(tmp_path: Path) -> None:
    weights = {"norm": torch.ones(4), "matrix": torch.randn(64, 64)}
    save_file(weights, tmp_path / "model.safetensors")
    first, second, again = (dict(drifted(tmp_path, 0.1, seeds)) for seeds in ([1], [1, 2], [1, 2]))
    assert torch.equal(first["norm"], weights["norm"])
    assert torch.equal(second["matrix"], again["matrix"])
    for before, after in ((weights, first), (first, second)):
        change = (after["matrix"] - before["matrix"]).std() / weights["matrix"].std()
        assert change == pytest.approx(0.1, rel=0.1)


def test_each_epoch_has_other_seeds_unless_they_shall_be_the_same() -> None:
    arguments = ["--model", "m", "--prompts", "p.jsonl", "--samples", "2"]
    prompts = [Prompt([1, 2], "all", 1), Prompt([3], "all", 2)]

    def batches(*more: str) -> list[compare.Batch]:
        options = parser().parse_args([*arguments, *more])
        benchmark = RolloutBenchmark(options, {"none": None}, prompts)
        return [benchmark.batch(epoch) for epoch in range(2)]

    first, second = batches()
    assert [request.prompt for request in first.requests] == [0, 0, 1, 1]
    seeds = [{request.seed for request in batch.requests} for batch in (first, second)]
    assert len(seeds[0]) == 4 and not seeds[0] & seeds[1]
    assert (first.drift_seeds, second.drift_seeds) == ([], [1])
    first, second = batches("--same-seeds")
    assert first.requests == second.requests


def test_what_was_written_can_be_replayed(tmp_path: Path) -> None:
    """The second epoch repeats the first one, so it takes few steps, unless nothing is shared."""
    options = parser().parse_args(["--model", "m", "--prompts", "p.jsonl", "--samples", "2"])
    benchmark = RolloutBenchmark(options, {"none": None}, [Prompt([1, 2], "all", 1)])
    texts = [list(range(100, 140)), list(range(200, 230))]
    for _ in range(2):
        benchmark.epochs["none"].append(Epoch.of(rollout([2] * 30 + [1] * 10, texts, 1.0)))
    file = tmp_path / "out.json"
    file.write_text(json.dumps(compare.content(benchmark, [])))
    recorded = Recorded.load(file)
    assert recorded.epochs == [texts, texts]
    options = LookaheadOptions(proposer="ngram_trie", num_speculative_tokens=8, budget=8)
    for namespace, most in (("", 8), (None, 40)):
        first, second = replay(recorded, trie(options), [namespace] * 2, 8)
        assert (first.steps, first.tokens_per_step) == (40, 1.0)
        assert second.steps <= most and (second.tokens_per_step > 5) == (namespace == "")


def test_the_engines_of_a_fleet_have_a_mean_and_a_range() -> None:
    answered = [
        Answered("alone", 0, 0, False, 100, 50, None),
        Answered("alone", 0, 1, False, 100, 100, None),
        Answered("fleet", 0, 0, True, 300, 100, 0.12),
        Answered("one", 0, 0, False, 200, 50, None),
    ]
    text = fleet_table(answered)
    first = [cell.strip() for cell in text.splitlines()[2].split("|")[1:-1]]
    assert first == ["1", "1.50 (1.00–2.00)", "–", "4.00", "–", "3.00"]
    assert text.endswith("lag of a message: 120 ms")
