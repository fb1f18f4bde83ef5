"""The simulator's drafters: rivals by their definition, proposers by name and settings."""

from __future__ import annotations

import random
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lookahead_vllm.cli import simulate as command
from lookahead_vllm.draft.budget.cost import CostCurve
from lookahead_vllm.draft.options import OptionError
from lookahead_vllm.draft.proposer import DraftLimits
from lookahead_vllm.draft.registry import PROPOSERS
from lookahead_vllm.simulation import heap
from lookahead_vllm.simulation.drafters import GROUPS, RIVALS, Lookahead, choose_drafters
from lookahead_vllm.simulation.replay import play, simulate
from lookahead_vllm.simulation.rivals import SuffixAutomaton, SuffixAutomatonOptions, look_up
from lookahead_vllm.simulation.traces import Trace, TraceFile


def trace(prompt: list[int], output: list[int], category: str = "s/c") -> Trace:
    return Trace(np.array(prompt, np.int32), np.array(output, np.int32), category)


def file_of(*traces: Trace, name: str = "f.jsonl") -> TraceFile:
    return TraceFile(Path(name), list(traces), too_short=0)


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


@pytest.mark.parametrize("latest", [False, True])
def test_a_suffix_automaton_follows_the_longest_match_its_own_texts_first(latest: bool) -> None:
    rng = random.Random(0)
    drafter = SuffixAutomaton(SuffixAutomatonOptions(pool=3, longest=5, latest=latest))
    ended: list[list[int]] = []
    found = {"own": 0, "pool": 0}

    def longest_match(texts: list[list[int]], end_of: list[int]) -> tuple[int, list[int]]:
        for length in range(min(5, len(end_of)), 0, -1):
            followed = [
                text[end:]
                for text in texts
                for end in range(length, len(text) + (text is not end_of))
                if text[end - length : end] == end_of[-length:]
            ]
            if followed:
                return length, followed[-1 if latest else 0][:6]
        return 0, []

    for i in range(300):
        text = [rng.randrange(4) for _ in range(rng.randrange(1, 20))]
        drafter.start(str(i), np.array(text, np.int32))
        drafter.extend(str(i), [1])
        text.append(1)
        draft = drafter.propose(DraftLimits(str(i), 6, 6), np.array(text, np.int32)).tolist()
        own, pool = longest_match([text], text), longest_match(ended, text)
        source = "own" if own[0] >= pool[0] else "pool"
        found[source] += 1
        assert draft == (own if source == "own" else pool)[1]
        drafter.finish(str(i))
        ended = [*ended, text][-3:]
    assert min(found.values()) > 50


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
    of_tests = {name for name, path in PROPOSERS.items() if path.startswith("tests.")}
    assert set(names) - of_tests == {*PROPOSERS, *RIVALS, *GROUPS} - {"jacobi_window"} - of_tests
    for name in names:
        assert list(choose_drafters(name, has_choices=True)) == GROUPS.get(name, [name])


@pytest.mark.parametrize(
    ("names", "message"),
    [
        ("", "name at least one"),
        ("ngram_tri", "no such proposer; did you mean 'ngram_trie'?"),
        ("jacobi_window", "measure it with scripts/bench.py"),
        ("hybrid", "pass the files to --choices"),
        ("medusa", "no such proposer; there are ngram_trie, "),
        ("ngram_trie,ngram_trie", "given twice"),
        ("ngram_trie:branch_length", "'branch_length' is not KEY=VALUE"),
        ("ngram_trie:branch_lenght=8", "did you mean 'branch_length'?"),
        ("ngram_trie:branch_length=0", "branch_length=0 was given"),
        ("ngram_trie:budget=8", "budget is the simulator's to set"),
        ("ngram_trie:Budget=8", "budget is the simulator's to set"),
        ("ngram_trie:branch-length=8 tokens", "write 8"),
        ("prompt_lookup:prompt_lookup_mim=3", "did you mean 'prompt_lookup_min'?"),
        ("prompt_lookup:prompt_lookup_min=9", "must be 1 to prompt_lookup_max=5"),
        ("prompt_lookup:prompt_lookup_min=true", "must be a whole number"),
    ],
)
def test_a_wrong_name_is_refused(names: str, message: str) -> None:
    with pytest.raises(OptionError) as refused:
        choose_drafters(names)
    assert message in str(refused.value) and "\n" not in str(refused.value)
