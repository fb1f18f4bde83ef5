"""The simulator's proposers, by name and settings."""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from lookahead_vllm.draft.budget.cost import CostCurve
from lookahead_vllm.draft.options import OptionError
from lookahead_vllm.simulation.proposers import choose_proposers
from lookahead_vllm.simulation.replay import Pace, simulate
from lookahead_vllm.simulation.traces import load_traces
from tests.support.files import jsonl


def test_a_proposer_has_the_settings_of_its_name_and_the_simulators_budget() -> None:
    name = "ngram_trie:branch_length=8:max_nodes=2048"
    proposer: Any = choose_proposers(name)[name](24, None, 0)
    options = proposer.options
    assert (options.branch_length, options.max_nodes) == (8, 2048)
    assert (options.budget, options.num_speculative_tokens) == (24, 24)
    curve = CostCurve([1, 2], [1.0, 3.0])
    costed: Any = choose_proposers(name)[name](24, curve, 0)
    assert costed.options.budget == "auto" and costed.cost.curve is curve


def test_recorded_chains_are_in_the_trees_of_a_proposer_with_a_drafter(tmp_path: Path) -> None:
    """Half of the chains are right; the texts do not repeat, so the trie proposes nothing."""
    output = [*range(10, 90)]
    chains = [
        [[[token + depth if i % 2 else 0, 0]] + [[1, 0]] * 3 for depth in range(1, 4)]
        for i, token in enumerate(output)
    ]
    line = dict(prompt_token_ids=[1, 2], output_token_ids=output, chains=chains)
    file = load_traces(jsonl(tmp_path / "t.jsonl", line))
    names = "ngram_trie,ngram_trie:drafter=1,ngram_trie:drafter=3"
    alone, first, whole = (
        simulate(partial(make, 8, None, 0), 8, [file], ["cold"])["cold"]["edl"]
        for make in choose_proposers(names).values()
    )
    assert alone == 1 < first < whole


def replayed(name: str, tmp_path: Path) -> tuple[float, float]:
    """Tokens and nodes a step, of a text that repeats six tokens."""
    line = dict(prompt_token_ids=[1, 2], output_token_ids=[*range(10, 16)] * 5)
    file = load_traces(jsonl(tmp_path / "t.jsonl", line))
    (make,) = choose_proposers(name).values()
    entry = simulate(partial(make, 4, None, 0), 4, [file], ["cold"], pace=Pace(1, 0.01))["cold"]
    return entry["edl"], entry["nodes"]


def test_prompt_lookup_drafts_what_followed_the_same_tokens(tmp_path: Path) -> None:
    # The prefill has made 10. Seven steps bring 11 to 15, 10 and 11: then two tokens repeat. Four
    # more steps of five tokens, and one of two.
    tokens, nodes = replayed("prompt_lookup", tmp_path)
    assert tokens == pytest.approx(29 / 12) and nodes == pytest.approx((4 * 4 + 1) / 12)


class SuffixTree:
    """Stands in for arctic-inference's cache: the last token, again."""

    def __init__(self, max_tree_depth: int, max_cached_requests: int) -> None:
        assert (max_tree_depth, max_cached_requests) == (24, 10000)
        self.texts: dict[int, list[int]] = {}

    def start_request(self, request: int, prompt: Any) -> None:
        self.texts[request] = prompt.tolist()

    def add_active_response(self, request: int, tokens: list[int]) -> None:
        self.texts[request] += tokens

    def speculate(self, request: int, context: Any, **limits: Any) -> Any:
        assert context.tolist() == self.texts[request][-24:]
        most = limits.pop("max_spec_tokens")
        assert limits == {"max_spec_factor": 1.0, "min_token_prob": 0.1} and most >= 1
        return SimpleNamespace(token_ids=self.texts[request][-6:][:most])

    def stop_request(self, request: int) -> None:
        del self.texts[request]


def test_suffix_is_driven_as_vllm_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module: Any = ModuleType("arctic_inference.suffix_decoding")
    module.SuffixDecodingCache = SuffixTree
    monkeypatch.setitem(sys.modules, "arctic_inference", ModuleType("arctic_inference"))
    monkeypatch.setitem(sys.modules, module.__name__, module)
    tokens, nodes = replayed("suffix", tmp_path)
    assert tokens > 2.5 and nodes > 3


def test_a_peer_that_is_not_installed_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("arctic_inference.suffix_decoding", "vllm.v1.spec_decode"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(OptionError, match="suffix: it needs arctic-inference: pip install"):
        choose_proposers("suffix")
    with pytest.raises(OptionError, match="prompt_lookup: it is vLLM's, which cannot be imported"):
        choose_proposers("prompt_lookup")


@pytest.mark.parametrize(
    ("names", "message"),
    [
        ("sufix", "did you mean 'suffix'?"),
        ("prompt_lookup:max=3", "prompt_lookup has no settings"),
        ("", "name at least one"),
        ("ngram_tri", "no such proposer; did you mean 'ngram_trie'?"),
        ("jacobi_window", "measure it with scripts/bench.py"),
        ("medusa", "no such proposer; there are ngram_trie"),
        ("ngram_trie,ngram_trie", "given twice"),
        ("ngram_trie:branch_length", "'branch_length' is not KEY=VALUE"),
        ("ngram_trie:branch_lenght=8", "did you mean 'branch_length'?"),
        ("ngram_trie:branch_length=0", "branch_length=0 was given"),
        ("ngram_trie:budget=8", "budget is the simulator's to set"),
        ("ngram_trie:branch_length=8 tokens", "write 64"),
    ],
)
def test_a_wrong_name_is_refused(names: str, message: str) -> None:
    with pytest.raises(OptionError) as refused:
        choose_proposers(names)
    assert message in str(refused.value) and "\n" not in str(refused.value)
