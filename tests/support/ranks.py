"""Tensor-parallel ranks in tests: what each of them verifies, while their clocks differ."""

from __future__ import annotations

import hashlib
from types import SimpleNamespace
from typing import Any, NamedTuple

from vllm import LLM, SamplingParams

from lookahead_vllm.draft.budget.cost import CostCurve, StepCost
from lookahead_vllm.draft.proposer import NoProposer
from tests.support.driving import generate, generate_staggered, random_prompts
from tests.support.kernels import Signatures, compiled

PROMPTS = random_prompts(6, 40, seed=31)
GREEDY = SamplingParams(temperature=0, max_tokens=90, ignore_eos=True, detokenize=False)
SEEDED = [
    SamplingParams(temperature=0.7, top_p=0.9, seed=i, max_tokens=60, detokenize=False)
    for i in range(len(PROMPTS))
]


class Answers(NamedTuple):
    """Token ids by prompt and answer."""

    greedy: list[list[list[int]]]
    seeded: list[list[list[int]]]


def plain_answers(llm: LLM) -> Answers:
    """What plain vLLM answers to `PROMPTS`."""
    return Answers(generate(llm, PROMPTS, GREEDY), generate(llm, PROMPTS, SEEDED))


def check_lookahead(llm: LLM, plain: Answers) -> None:
    """Two ranks with lookahead answer as plain vLLM, and both verify the trees of rank 0.

    The ranks' clocks differ, and with `budget` "auto" the trees depend on the clock.
    """
    llm.collective_rpc(record_trees)
    llm.collective_rpc(set_clock)
    compiled_at_start = llm.collective_rpc(compiled_kernels)
    assert generate_staggered(llm, PROMPTS, GREEDY) == plain.greedy
    assert generate(llm, PROMPTS, GREEDY) == plain.greedy
    assert generate(llm, PROMPTS, SEEDED) == plain.seeded
    rank_0, rank_1 = llm.collective_rpc(verified)
    assert llm.collective_rpc(compiled_kernels) == compiled_at_start
    (trees, counters, drafts), (trees_1, counters_1, drafts_1) = rank_0, rank_1
    assert (drafts, drafts_1) == (True, False)
    assert trees == trees_1
    # On V2, only the drafting rank learns what was accepted.
    assert counters == counters_1 or not counters_1["trees"]
    assert sum(branching for _, branching in trees) > 20
    assert counters["moved_tokens"] > 20


def record_trees(worker: Any) -> None:
    """In a worker: record a digest of the trees of each step, and whether any branches."""
    runner = worker.model_runner
    name = "_place" if hasattr(runner, "_late") else "_recall"
    original, runner.recorded_trees = getattr(runner, name), []

    def recorded(*args: Any) -> Any:
        result = original(*args)
        scheduled = result[0] if isinstance(result, tuple) else result
        forest = scheduled.forest
        if forest.num_nodes:
            arrays = (forest.tokens, forest.parents, forest.firsts, scheduled.rows)
            digest = hashlib.sha256(b"|".join(array.tobytes() for array in arrays)).hexdigest()
            runner.recorded_trees.append((digest, bool(forest.branching.any())))
        return result

    setattr(runner, name, recorded)


def set_clock(worker: Any) -> None:
    """In a worker: replace the clock. A node costs nothing on rank 0 and 10 ms on rank 1."""
    runner = worker.model_runner
    name = "_measure" if hasattr(runner, "_late") else "_observe_step"
    proposer, original, now = runner.drafter.proposer, getattr(runner, name), 0.0
    assert isinstance(proposer, NoProposer) or proposer.cost is not None, "measured at start"
    if proposer.cost is not None:
        proposer.cost = StepCost(CostCurve([1, 1024], [0.010, 0.011]))

    def observe_step(*args: Any) -> None:
        nonlocal now
        nodes = runner._work.nodes if runner._work else 0
        now += 0.010 * (1 + worker.rank * nodes)
        original(*args)

    original.__globals__["time"] = SimpleNamespace(perf_counter=lambda: now)
    setattr(runner, name, observe_step)


def compiled_kernels(worker: Any) -> Signatures:
    """In a worker: the signatures that numba has compiled."""
    return compiled()


def verified(worker: Any) -> tuple[list[tuple[str, bool]], dict[str, int], bool]:
    """In a worker: the recorded trees, the counters, and whether this rank drafts."""
    runner = worker.model_runner
    drafts = not isinstance(runner.drafter.proposer, NoProposer)
    return runner.recorded_trees, vars(runner.drafter.counters), drafts
