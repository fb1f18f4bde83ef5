"""The simulator's drafters: rivals by their definition, proposers by name and settings."""

from __future__ import annotations

import random
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lookahead_vllm.draft.budget.cost import CostCurve
from lookahead_vllm.draft.options import OptionError
from lookahead_vllm.draft.proposer import DraftLimits
from lookahead_vllm.simulation.drafters import Lookahead, choose_drafters
from lookahead_vllm.simulation.replay import play, simulate
from lookahead_vllm.simulation.rivals import look_up
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


def test_suffix_is_vllms_chain_and_suffix_tree_a_tree() -> None:
    pytest.importorskip("arctic_inference")
    makers = choose_drafters("suffix,suffix_tree")
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


def test_without_arctic_inference_one_sentence_names_the_script(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "arctic_inference.suffix_decoding", None)
    with pytest.raises(OptionError, match=r"not installed: run scripts/setup.sh --bench"):
        choose_drafters("suffix")


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


@pytest.mark.parametrize(
    ("names", "message"),
    [
        ("", "name at least one"),
        ("ngram_tri", "no such proposer; did you mean 'ngram_trie'?"),
        ("jacobi_window", "measure it with scripts/bench.py"),
        ("medusa", "no such proposer; there are ngram_trie, "),
        ("ngram_trie,ngram_trie", "given twice"),
        ("ngram_trie:branch_length", "'branch_length' is not KEY=VALUE"),
        ("ngram_trie:branch_lenght=8", "did you mean 'branch_length'?"),
        ("ngram_trie:branch_length=0", "branch_length=0 was given"),
        ("ngram_trie:budget=8", "budget is the simulator's to set"),
        ("ngram_trie:Budget=8", "budget is the simulator's to set"),
        ("ngram_trie:branch-length=8 tokens", "write 64"),
        ("prompt_lookup:prompt_lookup_mim=3", "did you mean 'prompt_lookup_min'?"),
        ("prompt_lookup:prompt_lookup_min=9", "must be 1 to prompt_lookup_max=5"),
        ("prompt_lookup:prompt_lookup_min=true", "must be a whole number"),
    ],
)
def test_a_wrong_name_is_refused(names: str, message: str) -> None:
    with pytest.raises(OptionError) as refused:
        choose_drafters(names)
    assert message in str(refused.value) and "\n" not in str(refused.value)
