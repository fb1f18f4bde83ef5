"""`lookahead-vllm simulate`: replay, figures, refused options. No model, no engine."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lookahead_vllm.cli import simulate as command
from lookahead_vllm.draft.budget.cost import CostCurve
from lookahead_vllm.draft.options import OptionError
from lookahead_vllm.draft.proposer import DraftLimits
from lookahead_vllm.draft.registry import HAVE_WINDOW, PROPOSERS
from lookahead_vllm.draft.tree import DraftTree
from lookahead_vllm.simulation import heap
from lookahead_vllm.simulation import replay as simulating
from lookahead_vllm.simulation.drafters import GROUPS, RIVALS, Lookahead, choose_drafters
from lookahead_vllm.simulation.replay import figures, passes, play, simulate
from lookahead_vllm.simulation.rivals import look_up
from lookahead_vllm.simulation.tables import by_file, overall_table, parts_table
from lookahead_vllm.simulation.traces import Trace, TraceError, TraceFile, load_traces, resample


def trace(prompt: list[int], output: list[int], category: str = "s/c") -> Trace:
    return Trace(np.array(prompt, np.int32), np.array(output, np.int32), category)


def file_of(*traces: Trace, name: str = "f.jsonl") -> TraceFile:
    return TraceFile(Path(name), list(traces), too_short=0)


class Scripted:
    """A drafter that proposes the given trees, one a step, and logs its calls."""

    def __init__(self, *trees: DraftTree) -> None:
        self.trees = list(trees)
        self.log: list[Any] = []
        self.num_bytes = 0

    def start(self, request_id: str, prompt: Any) -> None:
        self.log.append(("start", request_id))

    def extend(self, request_id: str, tokens: list[int]) -> None:
        self.log.append(tokens)
        self.num_bytes += 4 * len(tokens)

    def propose(self, limit: Any, context: Any) -> DraftTree:
        self.log.append((limit.max_nodes, limit.max_depth, context.tolist()))
        return self.trees.pop(0) if self.trees else DraftTree.chain([])

    def tree(self, draft: DraftTree) -> DraftTree:
        return draft

    def finish(self, request_id: str) -> None:
        self.log.append("finish")


# Playing.


def test_a_step_emits_the_agreeing_path_and_the_bonus_token() -> None:
    # The prefill makes 10. Step 1 drafts 11 12 99, of which 11 12 are right, and adds 13.
    # Two tokens are left, so step 2 may send one node: of 14 15 it sends 14, and adds 15.
    drafter = Scripted(DraftTree.chain([11, 12, 99]), DraftTree.chain([14, 15]))
    played = play(drafter, trace([1, 2], [10, 11, 12, 13, 14, 15]), "r", budget=8)
    assert drafter.log == [
        ("start", "r"),
        [10],
        (8, 4, [1, 2, 10]),
        [11, 12, 13],
        (8, 1, [1, 2, 10, 11, 12, 13]),
        [14, 15],
        "finish",
    ]
    assert played.tokens == 5 and played.nodes == [3, 1]
    found = figures([played])
    assert (found["edl"], found["nodes"], found["steps"]) == (2.5, 2.0, 2)


def test_the_last_token_alone_needs_no_draft_and_no_draft_emits_one_token() -> None:
    drafter = Scripted()
    played = play(drafter, trace([], [5, 6, 7]), "r", budget=4)
    assert played.nodes == [0, 0] and played.tokens == 2
    assert len(played.propose_ns) == 1 and len(played.update_ns) == 3


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
def test_the_longest_agreeing_path_of_a_tree_is_accepted(
    tokens: list[int], parents: list[int], emitted: list[int]
) -> None:
    drafter = Scripted(DraftTree.from_lists(tokens, parents))
    played = play(drafter, trace([1], [10, 11, 12, 13, 14, 15, 16, 17]), "r", budget=8)
    assert drafter.log[3] == emitted
    assert played.nodes[0] == len(tokens)


def test_an_update_is_timed_per_token_and_a_proposal_per_call(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ticks = iter(range(0, 10**9, 6000))  # every timed call takes 6 microseconds
    monkeypatch.setattr(simulating, "perf_counter_ns", lambda: next(ticks))
    drafter = Scripted(DraftTree.chain([11, 12, 99]), DraftTree.chain([14]))
    found = figures([play(drafter, trace([1, 2], [10, 11, 12, 13, 14, 15]), "r", budget=8)])
    assert found["propose_us_p50"] == found["propose_us_p99"] == found["start_us_p50"] == 6
    assert found["update_us_p50"] == 3  # of 6 / 1, 6 / 3 and 6 / 2
    assert found["update_us_p99"] == pytest.approx(6, abs=0.1)


def test_the_speed_up_weighs_every_step_by_its_cost() -> None:
    drafter = Scripted(DraftTree.chain([11, 12, 99]), DraftTree.chain([14]))
    played = play(drafter, trace([1, 2], [10, 11, 12, 13, 14, 15]), "r", budget=8)
    curve = CostCurve([1, 2], [1.0, 3.0])  # t(n) = 2 n - 1, so the steps cost 7 and 3
    assert figures([played], curve)["speedup"] == pytest.approx(5 * 1 / (7 + 3))
    assert figures([played])["speedup"] is None


# Modes.


def test_warm_measures_the_second_half_and_replay_a_second_pass() -> None:
    file = file_of(*(trace([1], [2, 3, 4], name) for name in "abcde"))
    made: list[Scripted] = []

    def make() -> Scripted:
        made.append(Scripted())
        return made[-1]

    advances: list[int] = []
    found = simulate(make, 4, [file], ["cold", "warm", "replay"], advance=advances.append)
    assert {mode: list(entry["by_category"]) for mode, entry in found.items()} == {
        "cold": list("abcde"),
        "warm": list("cde"),
        "replay": list("abcde"),
    }
    _, drafter = made  # the first one warmed up
    started = [entry[1] for entry in drafter.log if entry[0] == "start"]
    assert len(started) == len(set(started)) == 10  # a replayed trace is a new request
    assert found["cold"]["bytes"] == found["warm"]["bytes"] == 60
    assert found["replay"]["bytes"] == 120
    assert sum(advances) == passes(["replay"]) * file.num_tokens


def test_every_file_has_a_cache_of_its_own_and_the_figures_are_pooled() -> None:
    good = file_of(trace([1], [2, 3, 4, 5], "x"), name="good.jsonl")
    bad = file_of(trace([1], [6, 7, 8], "x"), trace([1], [6, 7], "y"), name="bad.jsonl")
    found = simulate(lambda: Scripted(DraftTree.chain([3, 4])), 2, [good, bad], ["cold"])["cold"]
    # good: 3 tokens in a step of 2 nodes; bad: a wrong draft of which one node fits, then nothing.
    assert {name: one["edl"] for name, one in by_file(found).items()} == {
        "good.jsonl": 3.0,
        "bad.jsonl": 1.0,
    }
    assert (found["tokens"], found["steps"], found["edl"]) == (6, 4, 1.5)
    assert found["nodes"] == (2 + 1) / 4
    assert found["by_category"]["x"]["edl"] == 5 / 3 and found["by_category"]["y"]["edl"] == 1
    assert found["bytes"] == 20


def test_a_repeated_answer_is_drafted() -> None:
    rng = random.Random(0)
    file = file_of(*(trace([1], rng.sample(range(40_000), 60)) for _ in range(4)))
    make = choose_drafters("ngram_trie:max_nodes=20000")["ngram_trie:max_nodes=20000"]
    found = simulate(lambda: make(16, None), 16, [file], ["cold", "replay"])
    assert found["cold"]["edl"] < 1.1
    assert found["replay"]["edl"] > 4


def test_the_filling_is_learned_first_and_its_tokens_divide_the_bytes() -> None:
    filling = [trace([1], [7] * 30), trace([1], [8] * 20)]
    file = file_of(trace([1], [2, 3, 4]))
    found = simulate(Scripted, 4, [file], ["cold"], filling=filling)["cold"]
    assert found["bytes_per_cached_token"] == 4 and found["bytes"] == 4 * 53
    assert found["tokens"] == 2
    assert simulate(Scripted, 4, [file], ["cold"])["cold"]["bytes_per_cached_token"] is None


# Rivals.


def brute_force(text: list[int], longest: int, shortest: int, most: int) -> list[int]:
    for length in range(longest, shortest - 1, -1):
        for start in range(len(text) - length):
            if text[start : start + length] == text[-length:]:
                return text[start + length : start + length + most]
    return []


def test_prompt_lookup_is_the_longest_matchs_first_place() -> None:
    rng = random.Random(0)
    found = 0
    for _ in range(3000):
        text = [rng.randrange(rng.choice((2, 4))) for _ in range(rng.randrange(1, 30))]
        shortest = rng.randrange(1, 4)
        longest, most = shortest + rng.randrange(4), rng.randrange(1, 6)
        expected = brute_force(text, longest, shortest, most)
        found += bool(expected)
        assert look_up(np.array(text, np.int32), longest, shortest, most).tolist() == expected
    assert found > 1000


def test_prompt_lookup_copies_from_the_requests_own_text_alone() -> None:
    copied = trace([5, 6, 7, 8, 9, 1, 2, 3], [5, 6, 7, 8, 9, 1, 2, 3])
    other = trace([40, 41, 42], [5, 6, 7, 8, 9, 1])
    make = choose_drafters("prompt_lookup")["prompt_lookup"]
    played = play(make(4, None), copied, "r", 4)
    assert played.nodes == [0, 4, 0] and played.tokens == 7  # 6; 7 8 9 1 2; 3
    assert simulate(lambda: make(4, None), 4, [file_of(other)], ["replay"])["replay"]["edl"] == 1


def test_suffix_is_vllms_chain_and_suffix_tree_a_tree() -> None:
    pytest.importorskip("arctic_inference")
    makers = choose_drafters("suffix")
    assert list(makers) == ["suffix", "suffix_tree"]
    prompt = [1, 2, 3, 4, 9, 1, 2, 5, 6, 9, 1, 2, 7, 8]
    played = {}
    for name, make in makers.items():
        drafter = make(16, None)
        drafter.start("r", np.array(prompt, np.int32))
        drafter.extend("r", [1, 2])
        context = np.array([*prompt, 1, 2], np.int32)
        tree = drafter.tree(drafter.propose(DraftLimits("r", 16, 16), context))
        played[name] = tree
        drafter.finish("r")
    assert (
        played["suffix"].is_chain and 1 <= len(played["suffix"]) <= 2
    )  # 1 2 matches, the factor is 1
    roots = played["suffix_tree"].tokens[played["suffix_tree"].parents == -1]
    assert set(roots.tolist()) == {3, 5, 7}


def test_suffix_reports_its_malloc_bytes_and_stays_usable() -> None:
    pytest.importorskip("arctic_inference")
    drafter = choose_drafters("suffix")["suffix"](16, None)
    rng = random.Random(0)
    empty = drafter.num_bytes
    for i in range(40):
        play(drafter, trace([1, 2], rng.sample(range(40_000), 250)), f"r{i}", 16)
    held = drafter.num_bytes
    assert empty < 100_000 and 100 < held / 10_000 < 2000
    again = rng.sample(range(40_000), 50)
    play(drafter, trace([1, 2], again), "once", 16)
    assert play(drafter, trace([1, 2], again), "twice", 16).tokens == 49
    assert drafter.num_bytes > held


def test_without_arctic_inference_one_sentence_names_the_script(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "arctic_inference.suffix_decoding", None)
    with pytest.raises(OptionError, match=r"not installed: run scripts/setup.sh --bench"):
        choose_drafters("suffix")


@pytest.mark.skipif(heap.bytes_in_use() is None, reason="malloc is not glibc's")
def test_released_bytes_are_measured_in_a_fork() -> None:
    held = [bytearray(5 << 20)]
    released = heap.bytes_released_by(held.clear)
    assert released is not None and 4 << 20 < released < 6 << 20
    assert len(held) == 1
    assert heap.bytes_released_by(lambda: None) in range(-10_000, 10_000)


# Names.


def test_a_proposer_has_the_settings_of_its_name_and_the_simulators_budget() -> None:
    name = "ngram_trie:branch_length=8:max_nodes=2048:draft=single"
    drafter = choose_drafters(name)[name](24, None)
    assert isinstance(drafter, Lookahead)
    options = drafter.proposer.options  # type: ignore[attr-defined]
    assert (options.branch_length, options.max_nodes, options.draft) == (8, 2048, "single")
    assert (options.budget, options.num_speculative_tokens) == (24, 24)
    curve = CostCurve([1, 2], [1.0, 3.0])
    costed: Any = choose_drafters(name)[name](24, curve)
    assert costed.proposer.options.budget == "auto" and costed.proposer.cost.curve is curve


def test_listed_proposers_can_be_chosen(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("arctic_inference")
    with pytest.raises(SystemExit) as stopped:
        command.main(["--list"])
    assert not stopped.value.code
    names = [line.split()[0] for line in capsys.readouterr().out.splitlines()]
    assert set(names) == {*PROPOSERS, *RIVALS, *GROUPS} - HAVE_WINDOW
    for name in names:
        assert list(choose_drafters(name)) == GROUPS.get(name, [name])


@pytest.mark.parametrize(
    ("names", "message"),
    [
        ("", "name at least one"),
        ("ngram_tri", "no such proposer; did you mean 'ngram_trie'?"),
        ("hybrid", "measure it with scripts/bench_window.py"),
        ("medusa", "no such proposer; there are ngram_trie, "),
        ("ngram_trie,ngram_trie", "given twice"),
        ("ngram_trie:branch_length", "'branch_length' is not KEY=VALUE"),
        ("ngram_trie:branch_lenght=8", "did you mean 'branch_length'?"),
        ("ngram_trie:branch_length=0", "branch_length=0 was given"),
        ("ngram_trie:budget=8", "budget is the simulator's to set"),
        ("prompt_lookup:prompt_lookup_mim=3", "did you mean 'prompt_lookup_min'?"),
        ("prompt_lookup:prompt_lookup_min=9", "must be 1 to prompt_lookup_max=5"),
        ("prompt_lookup:prompt_lookup_min=true", "must be a whole number"),
    ],
)
def test_a_wrong_name_is_refused(names: str, message: str) -> None:
    with pytest.raises(OptionError) as refused:
        choose_drafters(names)
    assert message in str(refused.value) and "\n" not in str(refused.value)


# Traces.


def line(output: list[int], **more: Any) -> dict[str, Any]:
    return {"prompt_token_ids": [1, 2], "output_token_ids": output, **more}


def jsonl(path: Path, *lines: Any) -> Path:
    texts = [one if isinstance(one, str) else json.dumps(one) for one in lines]
    path.write_text("\n".join(texts) + "\n")
    return path


def test_traces_are_filtered_then_shuffled_then_limited(tmp_path: Path) -> None:
    lines = [line([i, i], suite="s", category="c", loops=i % 4 == 0) for i in range(20)]
    path = jsonl(tmp_path / "t.jsonl", line([5]), *lines, "")

    def first_tokens(**options: Any) -> list[int]:
        return [int(one.output[0]) for one in load_traces(path, **options).traces]

    assert first_tokens() == list(range(20))
    assert first_tokens(limit=3) == [0, 1, 2]
    assert first_tokens(limit=3, no_loops=True) == [1, 2, 3]
    shuffled = first_tokens(shuffle=0, no_loops=True)
    assert len(shuffled) == 15 and shuffled != sorted(shuffled)
    assert first_tokens(shuffle=0, no_loops=True, limit=4) == shuffled[:4]
    loaded = load_traces(path)
    assert loaded.too_short == 1 and loaded.traces[0].category == "s/c" and loaded.num_tokens == 40


@pytest.mark.parametrize(
    ("second", "message"),
    [
        ("{", r"t.jsonl:2: not JSON"),
        ("[1]", r"t.jsonl:2: an object with"),
        ({"prompt_token_ids": [1]}, r"t.jsonl:2: `output_token_ids` must be a list"),
        (line([1, -1]), r"t.jsonl:2: `output_token_ids` must be a list"),
        ({"prompt_token_ids": "x", "output_token_ids": []}, r"t.jsonl:2: `prompt_token_ids`"),
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, second: Any, message: str) -> None:
    with pytest.raises(TraceError, match=message):
        load_traces(jsonl(tmp_path / "t.jsonl", line([1, 2]), second))


def test_generated_answers_recombine_the_outputs() -> None:
    rng = random.Random(0)
    outputs = [[rng.randrange(8) for _ in range(300)] for _ in range(5)]
    recorded = [trace(list(range(200)), output) for output in outputs]
    advances: list[int] = []
    made = resample(recorded, 2000, seed=1, advance=advances.append)
    assert sum(len(one.output) for one in made) == sum(advances) == 2000
    assert all(200 <= len(one.output) <= 300 for one in made[:-1])
    assert {len(one.prompt) for one in made} == {50}
    seen = {tuple(o[i : i + 3]) for o in outputs for i in range(298)}
    assert {
        tuple(o[i : i + 3]) for m in made if (o := m.output.tolist()) for i in range(98)
    } <= seen
    whole = {tuple(o[i : i + 20]) for o in outputs for i in range(281)}
    assert tuple(made[0].output[50:70].tolist()) not in whole
    again = resample(recorded, 2000, seed=1)
    assert all((a.output == b.output).all() for a, b in zip(made, again, strict=True))
    with_ends = resample([trace([1], [3, 4]), trace([1], [5, 6])], 500)  # dead ends at once
    assert sum(len(one.output) for one in with_ends) == 500


# The command line.

DOCUMENTED = {
    "edl", "nodes", "propose_us_p50", "propose_us_p99", "update_us_p50", "bytes", "by_category",
}  # fmt: skip
FURTHER = {
    "update_us_p99", "start_us_p50", "tokens", "steps", "speedup", "bytes_per_cached_token",
    "by_file",
}  # fmt: skip


def tiny(path: Path) -> Path:
    answer = [10, 11, 12, 13, 14, 15, 16, 17, 18, 19]
    return jsonl(
        path,
        {"prompt_token_ids": [1, 2], "output_token_ids": answer, "suite": "s", "category": "a"},
        {"prompt_token_ids": [3, 4], "output_token_ids": answer, "suite": "s", "category": "b"},
        {"prompt_token_ids": [3, 4], "output_token_ids": [7], "loops": True},
    )


def test_the_json_holds_the_documented_keys(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, out = tiny(tmp_path / "t.jsonl"), tmp_path / "out.json"
    arguments = ["--proposers", "ngram_trie,prompt_lookup", "--budget", "8,4", "--json", str(out)]
    modes = ["--mode", "replay,cold"]
    assert command.main(["--traces", str(path), *arguments, *modes]) == 0
    content = json.loads(out.read_text())
    assert content.keys() == {"meta", "results"} and content["meta"]["complete"]
    results = content["results"]
    assert list(results) == ["ngram_trie", "prompt_lookup"]
    for of_budget in results.values():
        assert list(of_budget) == ["8", "4"]
        for of_mode in of_budget.values():
            assert list(of_mode) == ["cold", "replay"]
            for entry in of_mode.values():
                assert entry.keys() == DOCUMENTED | FURTHER
                assert entry["by_category"].keys() == {"s/a", "s/b"}
                assert entry["by_file"].keys() == {str(path)}
                assert entry["tokens"] == 18
    lookup = results["prompt_lookup"]["8"]["cold"]
    assert (lookup["edl"], lookup["nodes"], lookup["bytes"]) == (1.0, 0.0, 0)
    assert results["ngram_trie"]["8"]["replay"]["edl"] > 1.5
    printed = capsys.readouterr().out
    assert "2 traces, 20 tokens, 1 shorter than two tokens left out" in printed
    assert "| prompt_lookup |      8 |   cold | 1.00 |   0.0 |" in printed
    assert "s/a" in printed


def test_a_filled_run_with_a_cost_curve_shows_both_columns(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("arctic_inference")
    path, out = tiny(tmp_path / "t.jsonl"), tmp_path / "out.json"
    more = ["--proposers", "suffix", "--budget", "8", "--fill", "3000", "--json", str(out)]
    curve = ["--cost-curve", "1:10,9:18"]
    assert command.main(["--traces", str(path), *more, *curve]) == 0
    entry = json.loads(out.read_text())["results"]["suffix"]["8"]["cold"]
    assert entry["bytes_per_cached_token"] > 1 and entry["edl"] > 1
    assert entry["speedup"] == pytest.approx(entry["edl"] * 10 / (10 + entry["nodes"]), rel=1e-6)
    assert "bytes/token | speed-up |" in capsys.readouterr().out


def test_tables_distinguish_files_of_one_name() -> None:
    files = [file_of(trace([1], [2, 3]), name=name) for name in ("a/t.jsonl", "b/t.jsonl")]
    found = {"x": {"8": simulate(Scripted, 8, files, ["cold"])}}
    table = parts_table(found, "EDL", by_file)
    assert "a/t.jsonl" in table and "b/t.jsonl" in table and "1.00 (0.0)" in table
    assert "speed-up" not in overall_table(found)


def test_a_plot_is_written(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    from lookahead_vllm.simulation.plot import plot

    found = simulate(Scripted, 8, [file_of(trace([1], [2, 3]))], ["cold", "warm"])
    plot({"x": {"8": found}, "y": {"8": found}}, tmp_path / "out.png")
    assert (tmp_path / "out.png").stat().st_size > 1000


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--traces", "/nowhere.jsonl"], "there is no file /nowhere.jsonl"),
        (["--traces", "EMPTY"], "is empty"),
        (["--traces", "BAD"], "bad.jsonl:2: not JSON"),
        (["--traces", "SHORT"], "nothing is left to replay; of 2 traces, 0 loop"),
        (["--traces", "SHORT", "--no-loops"], "of 2 traces, 1 loop (--no-loops) and 1 have"),
        (["--budget", "0"], "'0' is not a number from 1 to 128"),
        (["--budget", "16,129"], "'129' is not a number from 1 to 128"),
        (["--mode", "hot"], "'hot' is not one of cold, warm, replay"),
        (["--limit", "0"], "'0' is not a number of at least 1"),
        (["--proposers", "ngram"], "did you mean 'ngram_trie'?"),
        (["--cost-curve", "1:2,1:3"], "is not TOKENS:MS"),
        (["--cost-curve", "fast"], "is not TOKENS:MS"),
        (["--json", "/nowhere/out.json"], "there is no folder /nowhere"),
    ],
)
def test_wrong_options_get_one_sentence(
    arguments: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    paths = {
        "EMPTY": jsonl(tmp_path / "empty.jsonl", ""),
        "BAD": jsonl(tmp_path / "bad.jsonl", line([1, 2]), "{"),
        "SHORT": jsonl(tmp_path / "short.jsonl", line([1]), line([1], loops=True)),
    }
    good = ["--traces", str(tiny(tmp_path / "t.jsonl")), "--proposers", "prompt_lookup"]
    with pytest.raises(SystemExit) as stopped:
        command.main([*good, *(str(paths.get(text, text)) for text in arguments)])
    assert stopped.value.code == 2
    assert message in capsys.readouterr().err


def test_the_simulator_needs_neither_vllm_nor_torch() -> None:
    check = (
        "import sys, lookahead_vllm.simulation.tables, lookahead_vllm.simulation.drafters\n"
        "sys.exit(bool({'vllm', 'torch', 'matplotlib', 'arctic_inference'} & sys.modules.keys()))"
    )
    assert subprocess.run([sys.executable, "-c", check], check=False).returncode == 0
