"""`lookahead-vllm simulate`: replay, figures, refused options. No model, no engine."""

import json
import random
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lookahead_vllm.cli import simulate as command
from lookahead_vllm.draft.budget.cost import CostCurve
from lookahead_vllm.draft.proposers.stepping import DraftLimits
from lookahead_vllm.draft.tree import DraftTree
from lookahead_vllm.options.server import LookaheadOptions
from lookahead_vllm.simulation import plot
from lookahead_vllm.simulation import replay as simulating
from lookahead_vllm.simulation.proposers import choose_proposers
from lookahead_vllm.simulation.replay import Pace, Replay, figures, play, simulate
from lookahead_vllm.simulation.traces import Trace, TraceFile
from tests.support.files import jsonl
from tests.support.proposers import TestProposer


def trace(prompt: list[int], output: list[int], category: str = "s/c") -> Trace:
    return Trace(np.array(prompt, np.int32), np.array(output, np.int32), category)


def file_of(*traces: Trace, name: str = "f.jsonl") -> TraceFile:
    return TraceFile(Path(name), list(traces), too_short=0)


class Scripted(TestProposer):
    """A proposer of the given trees, one a step, and logs its calls."""

    def __init__(self, *trees: DraftTree) -> None:
        super().__init__(LookaheadOptions())
        self.trees = list(trees)
        self.log: list[Any] = []

    def start(self, request_id: str, prompt: Sequence[int], *rest: Any) -> None:
        super().start(request_id, prompt)
        self.log.append(("start", request_id))

    def read(self, request_id: str, tokens: list[int]) -> None:
        self.log.append(tokens)

    def grow(self, limit: DraftLimits) -> DraftTree:
        self.log.append((limit.max_nodes, limit.max_depth))
        return self.trees.pop(0) if self.trees else DraftTree.chain([])

    def finish(self, request_id: str) -> None:
        super().finish(request_id)
        self.log.append("finish")


# Playing.


def test_a_step_emits_the_agreeing_path_and_the_bonus_token():
    # The prefill makes 10. Step 1 drafts 11 12 99, of which 11 12 are right, and adds 13.
    # Two tokens are left, so step 2 may send one node: of 14 15 it sends 14, and adds 15.
    drafter = Scripted(DraftTree.chain([11, 12, 99]), DraftTree.chain([14, 15]))
    played = play(drafter, trace([1, 2], [10, 11, 12, 13, 14, 15]), "r", budget=8)
    assert drafter.log == [
        ("start", "r"),
        [10],
        (8, 4),
        [11, 12, 13],
        (8, 1),
        [14, 15],
        "finish",
    ]
    assert played.tokens == 5 and played.nodes == [3, 1]
    found = figures([played])
    assert (found["edl"], found["nodes"], found["steps"]) == (2.5, 2.0, 2)


@pytest.mark.parametrize(
    ("tokens", "parents", "emitted"),
    [
        ([7, 11], [-1, -1], [11, 12]),  # the second sibling is right
        ([11, 7, 12, 13], [-1, 0, 0, 2], [11, 12, 13, 14]),  # below a wrong sibling
        ([7, 11, 12], [-1, -1, 0], [11, 12]),  # 12 hangs from the wrong node
        ([12, 11], [-1, 0], [11]),  # right tokens in the wrong order
        ([12], [-1], [11]),
    ],
)
def test_the_longest_agreeing_path_of_a_tree_is_accepted(tokens, parents, emitted):
    drafter = Scripted(DraftTree.from_lists(tokens, parents))
    played = play(drafter, trace([1], [10, 11, 12, 13, 14, 15, 16, 17]), "r", budget=8)
    assert drafter.log[3] == emitted
    assert played.nodes[0] == len(tokens)


def test_the_speed_up_weighs_every_step_by_its_cost():
    drafter = Scripted(DraftTree.chain([11, 12, 99]), DraftTree.chain([14]))
    played = play(drafter, trace([1, 2], [10, 11, 12, 13, 14, 15]), "r", budget=8)
    curve = CostCurve([1, 2], [1.0, 3.0])  # t(n) = 2 n - 1, so the steps cost 7 and 3
    assert figures([played], curve)["speedup"] == pytest.approx(5 * 1 / (7 + 3))
    assert figures([played])["speedup"] is None


# Modes.


def test_a_repeated_answer_is_drafted():
    rng = random.Random(0)
    file = file_of(*(trace([1], rng.sample(range(40_000), 60)) for _ in range(4)))
    make = choose_proposers("ngram_trie:max_nodes=20000")["ngram_trie:max_nodes=20000"]
    found = simulate(lambda: make(16, None, 0), 16, [file], ["cold", "replay"])
    assert found["cold"]["edl"] < 1.1
    assert found["replay"]["edl"] > 4


# Sessions.


def conversation(name: str, turns: int) -> Iterator[Trace]:
    text = [ord(name), 1000]
    for turn in range(turns):
        answer = list(range(10 * turn, 10 * turn + 4))
        yield replace(trace(text, answer, name), turn=turn)
        text += answer


def test_sessions_run_side_by_side_and_turns_one_after_another():
    traces = [*conversation("a", 3), *conversation("b", 1), *conversation("c", 1)]
    drafter = Scripted()
    pace = Pace(concurrent=2)
    sessions = enumerate(file_of(*traces).sessions)
    played = list(Replay(drafter, 4, pace).play((str(i), turns) for i, turns in sessions))
    started = [entry for entry in drafter.log if entry == "finish" or entry[0] == "start"]
    assert started[:2] == [("start", "0"), ("start", "1")]
    assert started[2:6] == ["finish", "finish", ("start", "0-1"), ("start", "2")]
    assert started.index(("start", "0-2")) > started.index(("start", "0-1")) + 1
    assert sorted((one.category, one.turn) for one in played) == [
        ("a", 0), ("a", 1), ("a", 2), ("b", 0), ("c", 0),
    ]  # fmt: skip
    assert all(one.tokens == 3 and len(one.nodes) == 3 for one in played)


def test_a_step_reads_so_many_tokens_of_prompts(monkeypatch):
    """Those that an earlier turn has left in the prefix cache are not read again."""
    monkeypatch.setattr(simulating, "PROMPT_TOKENS", 4)
    long, other = trace([*range(9)], [20, 21]), trace([7], [10, 11, 12, 13, 14, 15])
    next_turn = replace(trace([*range(9), 20, 21, 5], [30, 31]), turn=1)
    drafter = Scripted()
    list(Replay(drafter, 4, Pace(2)).play([("other", [other]), ("long", [long, next_turn])]))
    read = [tokens for tokens in drafter.log if isinstance(tokens, list)]
    assert read == [[10], [11], [12], [20], [13], [21], [14], [30], [15], [31]]


def recorded_sessions(count: int) -> list[Trace]:
    """Each answer copies from the prompts of its session, the last one from the first prompt."""
    rng = np.random.default_rng(0)
    traces = []
    for _ in range(count):
        text = rng.integers(0, 40_000, 6000).astype(np.int32)
        for turn in range(3):
            start = 100 * turn + 4000 * (turn < 2)
            output = text[start : start + 60].copy()
            traces.append(Trace(text, output, "s", turn=turn))
            news = rng.integers(0, 40_000, 300).astype(np.int32)
            text = np.concatenate((text, output, news))
    return traces


def test_prompts_are_inserted_in_the_time_of_steps_and_once_a_session():
    file = file_of(*recorded_sessions(6))
    make = choose_proposers("ngram_trie")["ngram_trie"]

    def turns(step_seconds: float | None, budget: int = 8) -> dict[str, float]:
        pace = Pace(3, step_seconds)
        proposer = partial(make, budget, None, 30_000)
        entry = simulate(proposer, budget, [file], ["cold"], pace=pace)["cold"]
        return {name: figures["edl"] for name, figures in entry["by_turn"].items()}

    at_once, slow, fast = turns(None), turns(0.0002), turns(0.1)
    assert slow["first turns"] < 0.8 * at_once["first turns"]
    assert fast["first turns"] > 0.95 * at_once["first turns"]
    assert fast["later turns"] > 0.95 * at_once["later turns"]
    assert slow["first turns"] < slow["later turns"] < at_once["later turns"]


# The command line.

DOCUMENTED = {
    *("edl", "nodes", "propose_us_p50", "propose_us_p99", "update_us_p50"),
    *("by_category", "by_file", "by_turn"),
}
FURTHER = {"tokens", "steps", "speedup"}


def tiny(path: Path) -> Path:
    answer = [10, 11, 12, 13, 14, 15, 16, 17, 18, 19]
    return jsonl(
        path,
        {"prompt_token_ids": [1, 2], "output_token_ids": answer, "suite": "s", "category": "a"},
        {"prompt_token_ids": [3, 4], "output_token_ids": answer, "suite": "s", "category": "b"},
        {"prompt_token_ids": [3, 4], "output_token_ids": [7], "loops": True},
    )


def test_the_json_holds_the_documented_keys(tmp_path, capsys):
    path, out = tiny(tmp_path / "t.jsonl"), tmp_path / "out.json"
    arguments = ["--proposers", "ngram_trie,ngram_trie:max_nodes=2048", "--budget", "8,4"]
    arguments += ["--json", str(out), "--mode", "replay,cold"]
    assert command.main(["--traces", str(path), *arguments]) == 0
    content = json.loads(out.read_text())
    assert content.keys() == {"meta", "results"} and content["meta"]["argv"]
    results = content["results"]
    assert list(results) == ["ngram_trie", "ngram_trie:max_nodes=2048"]
    for of_budget in results.values():
        assert list(of_budget) == ["8", "4"]
        for of_mode in of_budget.values():
            assert list(of_mode) == ["cold", "replay"]
            for entry in of_mode.values():
                assert entry.keys() == DOCUMENTED | FURTHER
                assert entry["by_category"].keys() == {"s/a", "s/b"}
                assert entry["by_file"].keys() == {str(path)}
                assert entry["tokens"] == 18
    assert results["ngram_trie"]["8"]["replay"]["edl"] > 1.5
    printed = capsys.readouterr().out
    assert "2 answers, 20 tokens, 1 shorter than two tokens left out" in printed
    assert "| ngram_trie " in printed
    assert "s/a" in printed


def test_a_full_disk_loses_no_table(tmp_path, capsys):
    with pytest.raises(SystemExit) as error:
        command.main([str(tiny(tmp_path / "t.jsonl")), "--budget", "4", "--json", "/dev/full"])
    printed = capsys.readouterr()
    assert error.value.code == 2 and "| ngram_trie " in printed.out
    assert "was not written: No space left on device" in printed.err


def test_the_first_command_of_a_fresh_clone_works(tmp_path, capsys):
    """And the trie is ahead of vLLM's `ngram`, most where the agent edits what it has read."""
    out = tmp_path / "out.json"
    names = "ngram_trie,ngram"
    agents = Path(__file__).parents[1] / "data" / "agents.jsonl"
    command.main([str(agents), "--proposers", names, "--budget", "16", "--json", str(out)])
    assert "15 answers, 2577 tokens" in capsys.readouterr().out
    trie, lookup = (one["16"]["cold"] for one in json.loads(out.read_text())["results"].values())
    for name, part in trie["by_category"].items():
        assert part["edl"] > lookup["by_category"][name]["edl"] + 0.4
    assert trie["by_category"]["agent/edit"]["edl"] > 4 > trie["edl"]
    with pytest.raises(SystemExit):
        command.main(["--budget", "16"])
    assert "name a file of recorded answers" in capsys.readouterr().err


def test_a_plot_needs_matplotlib(tmp_path, monkeypatch, capsys):
    path = tiny(tmp_path / "t.jsonl")
    monkeypatch.setattr(plot, "find_spec", lambda name: None)
    with pytest.raises(SystemExit):
        command.main([str(path), "--plot", str(tmp_path / "out.png")])
    assert "--plot needs matplotlib: pip install matplotlib" in capsys.readouterr().err
    monkeypatch.undo()
    pytest.importorskip("matplotlib")
    command.main([str(path), "--budget", "8,16", "--plot", str(tmp_path / "out.png")])
    assert (tmp_path / "out.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--traces", "/nowhere.jsonl"], "error: there is no file /nowhere.jsonl"),
        (["--traces", "EMPTY"], "is empty"),
        (["--traces", "BAD"], "bad.jsonl, line 2: it is not JSON"),
        (["--traces", "SHORT"], "nothing is left to replay; of 2 answers, 0 loop"),
        (["--traces", "SHORT", "--no-loops"], "of 2 answers, 1 loop (--no-loops) and 1 have"),
        (["--budget", "16,129"], "'129' is not a number from 1 to 128"),
        (["--mode", "hot"], "'hot' is not one of cold, replay"),
        (["--proposers", "ngram_gpu"], "did you mean 'ngram'?"),
        (["--cost-curve", "1:2,1:3"], "is not TOKENS:MS"),
        (["--step-ms", "0"], "'0' is not a number above 0"),
        (["--json", "/nowhere/out.json"], "there is no folder /nowhere"),
    ],
)
def test_wrong_options_get_one_sentence(arguments, message, tmp_path, capsys):
    short = {"prompt_token_ids": [1, 2], "output_token_ids": [1]}
    paths = {
        "EMPTY": jsonl(tmp_path / "empty.jsonl", ""),
        "BAD": jsonl(tmp_path / "bad.jsonl", short, "{"),
        "SHORT": jsonl(tmp_path / "short.jsonl", short, {**short, "loops": True}),
    }
    good = ["--traces", str(tiny(tmp_path / "t.jsonl")), "--proposers", "ngram_trie"]
    with pytest.raises(SystemExit) as stopped:
        command.main([*good, *(str(paths.get(text, text)) for text in arguments)])
    assert stopped.value.code == 2
    assert message in capsys.readouterr().err
