"""The simulator's proposers, by name and settings."""

from functools import partial
from typing import Any

import pytest

from lookahead_vllm.draft.budget.cost import CostCurve
from lookahead_vllm.options.allowed import OptionError
from lookahead_vllm.simulation.proposers import choose_proposers
from lookahead_vllm.simulation.replay import simulate
from lookahead_vllm.simulation.traces import load_traces
from tests.support.files import jsonl


def test_a_proposer_has_the_settings_of_its_name_and_the_simulators_budget():
    name = "ngram_trie:share=all:max_nodes=2048"
    proposer: Any = choose_proposers(name)[name](24, None, 0)
    options = proposer.options
    assert (options.share, options.max_nodes) == ("all", 2048)
    assert (options.budget, options.num_speculative_tokens) == (24, 24)
    curve = CostCurve([1, 2], [1.0, 3.0])
    costed: Any = choose_proposers(name)[name](24, curve, 0)
    assert costed.options.budget == "auto" and costed.cost.curve is curve


def test_recorded_chains_are_in_the_trees_of_a_proposer_with_a_drafter(tmp_path):
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


@pytest.mark.parametrize(
    ("names", "message"),
    [
        ("", "name at least one"),
        ("jacobi_window", "measure it with scripts/bench.py"),
        ("medusa", "no such proposer; there are ngram_trie"),
        ("ngram_trie,ngram_trie", "given twice"),
        ("ngram_trie:max_nodes", "'max_nodes' is not KEY=VALUE"),
        ("ngram_trie:max_node=8", "did you mean 'max_nodes'?"),
        ("ngram_trie:max_nodes=0", "max_nodes=0 was given"),
        ("ngram_trie:budget=8", "budget is the simulator's to set"),
        ("ngram_trie:max_nodes=2048 tokens", "write 4000000"),
    ],
)
def test_a_wrong_name_is_refused(names, message):
    with pytest.raises(OptionError) as refused:
        choose_proposers(names)
    assert message in str(refused.value) and "\n" not in str(refused.value)
