"""The simulator's proposers, by name and settings."""

from __future__ import annotations

from typing import Any

import pytest

from lookahead_vllm.draft.budget.cost import CostCurve
from lookahead_vllm.draft.options import OptionError
from lookahead_vllm.simulation.proposers import choose_proposers


def test_a_proposer_has_the_settings_of_its_name_and_the_simulators_budget() -> None:
    name = "ngram_trie:branch_length=8:max_nodes=2048:draft=single"
    proposer: Any = choose_proposers(name)[name](24, None)
    options = proposer.options
    assert (options.branch_length, options.max_nodes, options.draft) == (8, 2048, "single")
    assert (options.budget, options.num_speculative_tokens) == (24, 24)
    curve = CostCurve([1, 2], [1.0, 3.0])
    costed: Any = choose_proposers(name)[name](24, curve)
    assert costed.options.budget == "auto" and costed.cost.curve is curve


@pytest.mark.parametrize(
    ("names", "message"),
    [
        ("", "name at least one"),
        ("ngram_tri", "no such proposer; did you mean 'ngram_trie'?"),
        ("jacobi_window", "measure it with scripts/bench.py"),
        ("medusa", "no such proposer; there are ngram_trie"),
        ("ngram_trie,ngram_trie", "given twice"),
        ("ngram_trie:branch_length", "'branch_length' is not KEY=VALUE"),
        ("ngram_trie:branch_lenght=8", "did you mean 'branch_length'?"),
        ("ngram_trie:branch_length=0", "branch_length=0 was given"),
        ("ngram_trie:budget=8", "budget is the simulator's to set"),
        ("ngram_trie:Budget=8", "budget is the simulator's to set"),
        ("ngram_trie:branch-length=8 tokens", "write 64"),
    ],
)
def test_a_wrong_name_is_refused(names: str, message: str) -> None:
    with pytest.raises(OptionError) as refused:
        choose_proposers(names)
    assert message in str(refused.value) and "\n" not in str(refused.value)
