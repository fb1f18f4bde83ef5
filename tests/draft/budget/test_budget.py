"""A step sends the nodes that emit the most tokens per unit of time."""

import numpy as np
import pytest

from lookahead_vllm.draft.budget.allot import is_worth_waiting
from lookahead_vllm.draft.budget.cost import MEMORY_SECONDS, CostCurve, Load, StepCost, StepWork
from lookahead_vllm.draft.proposers.proposer import NO_LOAD
from lookahead_vllm.draft.tree import DraftForest, DraftTree
from tests.support.allotment import allot, allot_chains, chains

FLAT = CostCurve([8, 16], [1, 2])
CPU = CostCurve([1, 2, 4, 8, 16, 32, 64], [25, 25, 25, 32, 49, 74, 129])


@pytest.fixture(autouse=True)
def _times_are_in_milliseconds(monkeypatch):
    monkeypatch.setattr("lookahead_vllm.draft.budget.cost.MEMORY_SECONDS", 1000 * MEMORY_SECONDS)


def sizes(rows, curve, load=NO_LOAD):
    return allot_chains(rows, StepCost(curve), load).forest.sizes.tolist()


def test_the_curve_passes_through_its_points_and_continues_with_the_last_slope():
    curve = CostCurve([2, 4, 8], [10, 20, 60])
    assert curve(np.array([1, 2, 3, 8, 10])).tolist() == [10, 10, 15, 60, 80]


def test_noise_never_makes_more_tokens_cheaper():
    assert CostCurve([1, 2, 4], [10, 9, 12])(np.array([1, 2, 3])).tolist() == [10, 10, 11]


def test_the_critical_decoding_length_is_the_last_that_costs_little_more_than_one_token():
    assert CPU.critical_decoding_length == 7
    assert CostCurve([1], [7]).critical_decoding_length == 1


def test_a_prompt_makes_nodes_dearer_but_its_own_time_is_not_charged_to_drafts():
    rows = [[0.9, 0.6, 0.3]]
    assert sizes(rows, FLAT) == [3]
    # Each node costs 1/8 now, and the step without the prompt costs 1: nodes pay from 1/8 up.
    assert sizes([[0.9, 0.6, 0.12]], FLAT, Load(prefill=1000)) == [2]


def test_a_request_that_waits_for_its_first_token_weighs_as_much_as_many_that_decode():
    rows = [[0.9, 0.5], [0.9, 0.1], [0.9], [0.9]]
    steep = CostCurve([1, 501], [1, 16])
    assert sizes(rows, steep, Load(prefill=100)) == [2, 1, 1, 1]
    assert sizes(rows, steep, Load(prefill=100, prompts=1)) == [1, 1, 1, 1]
    assert sizes(rows, steep, Load(prefill=200, prompts=2)) == [0, 0, 0, 0]


def test_nodes_of_a_step_that_waits_for_its_drafts_do_not_pay_for_the_waiting():
    """It waits in any case; what pays for it is decided for further steps."""
    cost = StepCost(CostCurve([1, 64], [1.0, 1.01]), drafts=0.5)
    assert allot_chains([[0.1]], cost).forest.sizes.tolist() == [0]
    waiting = allot_chains([[0.1]], cost, Load(waits=True))
    assert waiting.forest.sizes.tolist() == [1]
    assert waiting.rate == pytest.approx(1.1 / 1.5, rel=0.01)


def test_the_time_of_waiting_is_learned_from_steps_without_a_node():
    cost = StepCost(CostCurve([1, 64], [1.0, 1.01]))
    plain = StepWork(1, 0, 0.0, 0.0, 0.0)
    for i in range(200):
        waits = i % 8 < 6
        cost.observe(plain._replace(waits=waits), 1.3 if waits else 1.0)
    prices = cost.prices(np.zeros(1, np.int64), Load(waits=True), 1)
    assert prices.waiting == pytest.approx(0.3, abs=0.03)
    assert cost.steps_since_plain == 0


def test_the_work_of_a_step_counts_attention_to_chains_and_trees_apart():
    chain, tree = DraftTree.from_lists([1, 2], [-1, 0]), DraftTree.from_lists([1, 2, 3], [-1, 0, 0])
    own, everyones = np.array([100, 50]), np.array([100, 20, 50])
    step = StepWork.of_decodes(DraftForest.of([chain, tree]), own, everyones)
    assert step == StepWork(3, 5, 170, 3 * 100 + 20, 4 * 50)
    plain = StepWork.of_decodes(DraftForest.of([]), own[:0], everyones)
    assert plain == StepWork(3, 0, 170, 170, 0)


def test_steps_wait_for_drafts_while_these_make_them_faster():
    cost = StepCost(CostCurve([1, 64], [1.0, 1.01]))
    cost.steps_since_plain = 10
    assert is_worth_waiting(cost, 1.01) and not is_worth_waiting(cost, 0.99)
    cost.steps_since_plain = 64  # now steps without drafts are needed, unless much would be lost
    assert not is_worth_waiting(cost, 1.2) and is_worth_waiting(cost, 1.4)


def test_a_tree_not_worth_its_attention_is_cut_to_its_best_chain():
    tree = DraftTree.from_lists([1, 2, 3, 4], [-1, -1, 0, 2], [0.6, 0.2, 0.5, 0.4])
    forest, contexts = DraftForest.of([tree]), np.array([1000])
    curve = CostCurve([1, 64], [1.0, 1.1])
    as_tree = allot(forest, contexts, StepCost(curve, causal=1e-6, trees=1e-6), Load())
    assert as_tree.forest.sizes.tolist() == [4]
    as_chain = allot(forest, contexts, StepCost(curve, causal=1e-6, trees=4e-5), Load())
    chain = as_chain.forest[0]
    assert chain.tokens.tolist() == [1, 3, 4] and chain.depths.tolist() == [1, 2, 3]
    assert chain.probs.tolist() == tree.probs[[0, 2, 3]].tolist()


def test_devices_that_share_a_tree_send_more_nodes():
    """Their passes grow with the largest part; attention is shared too."""
    forest, context = chains([0.5, 0.3, 0.2, 0.05]), np.array([1000])
    for parts, expected in ((1, 1), (2, 2), (4, 3)):
        cost = StepCost(CostCurve([1, 64], [1.0, 1 + 63 * 0.3]), causal=2e-4, parts=parts)
        assert allot(forest, context, cost, Load()).forest.sizes.tolist() == [expected]


def test_no_requests_get_no_nodes():
    assert sizes([], CPU) == []


def work(tokens, requests=1, context=100):
    total = float(requests * context)
    nodes = tokens - requests
    return StepWork(requests, nodes, total, float(tokens * context), 0.0, waits=nodes > 0)


def test_the_measurement_at_start_is_predicted_before_any_real_step():
    cost = StepCost(CPU, causal=1e-3)
    assert cost.predict(work(8)) == pytest.approx(32 + 8 * 100 * 1e-3)


def test_real_steps_correct_the_prediction_within_seconds():
    cost = StepCost(CPU, causal=1e-3)
    rng = np.random.default_rng(0)

    def slow(step):  # twice the measured time plus 5
        return 2 * (float(CPU(step.requests + step.nodes)) + 1e-3 * step.causal) + 5

    elapsed = 0.0
    while elapsed < 5000:  # five seconds
        step = work(int(rng.integers(1, 40)), context=int(rng.integers(10, 2000)))
        time = slow(step) * rng.normal(1, 0.05)
        cost.observe(step, time)
        elapsed += time
    for tokens in (1, 4, 16, 64):
        assert cost.predict(work(tokens)) == pytest.approx(slow(work(tokens)), rel=0.1)


def test_the_cost_of_having_drafts_is_separated_from_the_cost_of_each_node():
    cost = StepCost(CPU, causal=1e-3)
    rng = np.random.default_rng(0)
    for _ in range(300):
        step = work(int(rng.choice([1, 1, 3, 9, 17])), context=300)
        time = float(CPU(step.requests + step.nodes)) + 1e-3 * step.causal + 4 * (step.nodes > 0)
        cost.observe(step, time * rng.normal(1, 0.02))
    for tokens in (1, 2, 5, 33):
        step = work(tokens)
        time = float(CPU(tokens)) + 1e-3 * step.causal + 4 * (tokens > 1)
        assert cost.predict(step) == pytest.approx(time, rel=0.04)
    # The first node costs 4 of 25, a second one nothing more.
    contexts = np.array([100])
    for probs, kept in (([0.1], 0), ([0.3], 1), ([0.3, 0.1], 2), ([0.1, 0.1], 2), ([0.06] * 2, 0)):
        assert allot(chains(probs), contexts, cost, Load()).forest.sizes.tolist() == [kept]


@pytest.mark.parametrize("seed", range(3))
def test_a_load_that_comes_and_goes_does_not_bring_back_the_prices_measured_at_start(seed):
    """At start, a node cost 1% of a step; it costs 10%, with another program and without it."""
    cost = StepCost(CostCurve([1, 64], [20.0, 32.6]))
    rng = np.random.default_rng(seed)
    elapsed, slowdown, shares = 0.0, 1.0, []
    while elapsed < 40_000:
        if rng.random() < 0.05:
            slowdown = 1.0 if slowdown > 1 else 1.5
        step = work(int(rng.choice([1, 1, 2, 3, 5])))
        time = (20 + 2 * step.nodes) * slowdown * rng.normal(1, 0.05)
        cost.observe(step, time)
        elapsed += time
        shares.append(cost.predict(work(2)) / cost.predict(work(1)) - 1)
    assert 0.08 < np.mean(shares[-500:]) < 0.14
    assert min(shares[-500:]) > 0.05 and max(shares[-500:]) < 0.18
