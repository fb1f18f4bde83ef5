"""A trained drafter of vLLM's and the trie in one tree."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from vllm import SamplingParams

from lookahead_vllm.draft.budget import chain as chain_budget
from lookahead_vllm.draft.budget.chain import TrieWorth
from lookahead_vllm.draft.budget.cost import CostCurve, StepCost
from lookahead_vllm.draft.progress import PROPOSED
from lookahead_vllm.draft.tree import UNKNOWN
from lookahead_vllm.engine.attention.cpu import CPUTreeAttention
from lookahead_vllm.engine.cost import measure as step_cost
from lookahead_vllm.engine.runner.trained_drafter import TrainedDrafter
from lookahead_vllm.engine.step.late_shape import LateShape
from tests.support import graph_engine
from tests.support.drafters import (
    CONFIGS,
    TARGETS,
    record_chains,
    record_unknown_chains,
    save_drafter,
)
from tests.support.driving import (
    converse,
    drafter_of,
    engine,
    generate_staggered,
    of_length,
    random_prompts,
    runner_of,
)
from tests.support.hybrid_models import CACHING, settings_of, use_float32_gated_delta
from tests.support.models import WANDERING, save_config
from tests.support.proposers import record

use_float32_gated_delta()

PROMPTS = random_prompts(16, 24)
PARAMS = 4 * [
    of_length(40),
    of_length(40, temperature=0.8, seed=3),
    of_length(40),
    of_length(40, temperature=0.8, seed=5, top_p=0.9, repetition_penalty=1.1, presence_penalty=0.4),
]

SETTINGS: dict[str, Any] = dict(load_format=WANDERING, block_size=32)


@pytest.mark.parametrize("method", TARGETS)
def test_outputs_are_plain_vllms(method, tmp_path):
    target = save_config(TARGETS[method][0], tmp_path, CONFIGS)
    drafter = save_drafter(method, tmp_path)
    with engine(target, **SETTINGS) as llm:
        expected = generate_staggered(llm, PROMPTS, PARAMS)
    options = dict(budget=16, proposer="hybrid", drafter=drafter)
    with engine(target, options, **SETTINGS) as llm:
        runner_of(llm)._dummy_run(4)  # on a GPU, vLLM measures memory so
        assert generate_staggered(llm, PROMPTS, PARAMS) == expected
        assert drafter_of(llm).counters.moved_tokens > 20


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_chains_have_several_tokens_in_16_bits(dtype, tmp_path):
    target = save_config(TARGETS["eagle"][0], tmp_path, CONFIGS)
    options = dict(budget=16, proposer="hybrid", drafter=save_drafter("eagle", tmp_path, 3))
    with engine(target, options, **SETTINGS, dtype=dtype) as llm:
        answers = generate_staggered(llm, PROMPTS, PARAMS)
        assert all(len(answer) == 40 for [answer] in answers)


@pytest.mark.parametrize(
    ("method", "name", "others"),
    [
        ("draft_model", "falcon_h1", CACHING),
        ("draft_model", "qwen3_next", {}),
        ("mtp", "qwen3_next_mtp", CACHING),
    ],
)
def test_hybrids_with_a_drafter(method, name, others, tmp_path):
    """With prefix caching, where vLLM lets the last cached block go before an MTP layer."""
    target, drafter = save_config(name, tmp_path, CONFIGS), save_drafter(method, tmp_path)
    settings = others | settings_of(name) | {"max_model_len": 512}
    with engine(target, **settings) as llm:
        expected, turns = generate_staggered(llm, PROMPTS, PARAMS), converse(llm)
    options = dict(budget=6, num_speculative_tokens=6, proposer="hidden_path", drafter=drafter)
    with engine(target, options, **settings) as llm:
        record(PROMPTS, expected)
        for turn in turns:
            record(turn.prompts, turn.answers)
        assert generate_staggered(llm, PROMPTS, PARAMS) == expected
        assert [turn.answers for turn in converse(llm)] == [turn.answers for turn in turns]
        assert drafter_of(llm).counters.moved_tokens > 100


ALONE = {"lookahead_enabled": False}
"""Of a request that gets no drafts; the drafter drafts all the same."""

SITUATIONS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "at ease": ({}, {}),
    "few blocks": (dict(num_gpu_blocks_override=12), dict(every=1)),
    "preempted": ({}, dict(reset_every=7)),
    "prompts in chunks, cached": (
        dict(max_num_batched_tokens=24, max_num_seqs=3, enable_prefix_caching=True),
        {},
    ),
}
"""By name: arguments of the engine, and of `generate_staggered`."""


@pytest.mark.parametrize(
    ("method", "situation"),
    [
        *(("draft_model", situation) for situation in SITUATIONS),
        ("eagle", "preempted"),
        ("mtp", "prompts in chunks, cached"),
    ],
)
def test_chains_follow_from_the_text_alone(method, situation, tmp_path, monkeypatch):
    monkeypatch.setattr(TrainedDrafter, "_is_chain_wanted", lambda *_: True)
    target = save_config(TARGETS[method][0], tmp_path, CONFIGS)
    drafter = save_drafter(method, tmp_path)
    settings, driving = SITUATIONS[situation]
    options = dict(budget=8, proposer="hidden_path", drafter=drafter)
    with engine(target, options, **SETTINGS, **settings) as llm:
        chains = record_chains(llm)
        alone = [_with_extra_args(params, ALONE) for params in PARAMS]
        answers = generate_staggered(llm, PROMPTS, alone, **driving)
        expected = dict(chains)
        chains.clear()
        record(PROMPTS, answers)
        assert generate_staggered(llm, PROMPTS, PARAMS, **driving) == answers
        assert drafter_of(llm).counters.moved_tokens > 100
    compared = expected.keys() & chains.keys()
    assert len(compared) > 100
    assert not [place for place in compared if chains[place] != expected[place]]


def test_without_slots_the_drafter_makes_one_pass(tmp_path):
    target = save_config("llama", tmp_path, CONFIGS)
    options = dict(budget=8, drafter=save_drafter("draft_model", tmp_path, 4))
    alone = [_with_extra_args(params, ALONE) for params in PARAMS]
    with engine(target, options, drafts=False, **SETTINGS) as llm:
        chains = record_chains(llm)
        generate_staggered(llm, PROMPTS, alone, every=1)
        sent = runner_of(llm).trained.chains.by_request
    first = {(index, len(prompt) + 1) for index, prompt in enumerate(PROMPTS)}
    assert {len(chains[place]) for place in first} == {4}
    assert [len(chain) for chain in chains.values()].count(1) > 300
    assert (sent[:, 1:, :, PROPOSED] == UNKNOWN).all() and (sent[:, 0] != UNKNOWN).all()


@pytest.fixture
def cost(monkeypatch: pytest.MonkeyPatch) -> StepCost:
    """The cost of all steps, whatever they take."""
    cost = StepCost(CostCurve([1, 256], [0.01, 0.0101]))
    monkeypatch.setattr(step_cost, "step_cost", lambda runner: cost)
    monkeypatch.setattr(StepCost, "observe", lambda self, work, time: time)
    return cost


@pytest.mark.parametrize(("seconds", "length"), [(1e-6, 4), (1.0, 1)])
def test_further_passes_are_made_while_they_are_worth_their_time(
    seconds, length, cost, tmp_path, monkeypatch
):
    cost.chain = seconds
    monkeypatch.setattr(chain_budget, "TRIAL_STEPS", 10)
    target = save_config("llama", tmp_path, CONFIGS)
    with engine(target, **SETTINGS) as llm:
        expected = generate_staggered(llm, PROMPTS, PARAMS)
    options = dict(budget="auto", drafter=save_drafter("draft_model", tmp_path, 4))
    with engine(target, options, **SETTINGS) as llm:
        chains = record_chains(llm)
        assert generate_staggered(llm, PROMPTS, PARAMS) == expected
    lengths = [len(chain) for chain in chains.values()]
    assert lengths.count(length) > 0.7 * len(lengths)


@pytest.mark.parametrize("in_graphs", [False, True])
def test_chains_are_verified_before_the_host_knows_them(in_graphs, cost, tmp_path, monkeypatch):
    target = save_config("llama", tmp_path, CONFIGS)
    with engine(target, **SETTINGS) as llm:
        expected = generate_staggered(llm, PROMPTS, PARAMS, every=10)
    if in_graphs:
        graph_engine.enable(monkeypatch)
    else:  # tree attention on a CPU wants to know where chains are
        monkeypatch.setattr(CPUTreeAttention, "replaces_chains", False)
    share_out, untouched = LateShape.share_out, list[bool]()

    def guarded(self: LateShape, *args: Any) -> Any:
        """Notes what the host memory holds when it is waited for the device's read."""
        rows = self._memory.np.copy()

        def synchronize() -> None:
            untouched.append(np.array_equal(self._memory.np, rows))

        self._was_read = SimpleNamespace(record=lambda: None, synchronize=synchronize)
        return share_out(self, *args)

    monkeypatch.setattr(LateShape, "share_out", guarded)
    accepted = {}
    options = dict(budget="auto", drafter=save_drafter("draft_model", tmp_path, 4))
    for waits in (True, False):
        monkeypatch.setattr(TrieWorth, "waits", lambda *_, waits=waits: waits)
        with engine(target, options, **SETTINGS) as llm:
            unknown = record_unknown_chains(llm)
            assert generate_staggered(llm, PROMPTS, PARAMS, every=10) == expected
            counters = drafter_of(llm).counters
        assert bool(unknown) is not waits
        accepted[waits] = counters.accepted_nodes / counters.trees
    assert sum(map(len, unknown)) > 60
    assert untouched == [True] * len(unknown)
    # The host has filled in what the device has verified, except for requests that have ended.
    tokens = np.concatenate([forest.tokens for forest in unknown])
    assert (tokens != UNKNOWN).mean() > 0.9
    assert accepted[False] > 0.7 * accepted[True]


def _with_extra_args(params: SamplingParams, extra_args: dict[str, Any]) -> SamplingParams:
    own = params.clone()
    own.extra_args = extra_args
    return own
