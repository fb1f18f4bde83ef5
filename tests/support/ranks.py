"""Ranks that share a model in tests: what each of them verifies, while their clocks differ."""

import hashlib
import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from vllm import LLM, SamplingParams

from lookahead_vllm.draft.budget.cost import CostCurve, StepCost
from lookahead_vllm.draft.proposers.proposer import NoProposer
from tests.support.driving import generate, generate_staggered, of_length, random_prompts
from tests.support.kernels import Signatures, compiled
from tests.support.servers import cores_of

PROMPTS = random_prompts(6, 40, seed=31)
GREEDY = of_length(90)
SEEDED = [
    SamplingParams(temperature=0.7, top_p=0.9, seed=i, max_tokens=60, detokenize=False)
    for i in range(len(PROMPTS))
]


SHORTER = [prompt[1:] for prompt in PROMPTS]
"""Similar texts, whose answers are no exact repeats: their trees branch."""


@contextmanager
def a_process_each(num_ranks: int, cache: Path) -> Iterator[None]:
    """The ranks of engines have a process and a core each, and an empty cache folder."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_WORKER_MULTIPROC_METHOD", "spawn")
        patch.setenv("VLLM_CPU_OMP_THREADS_BIND", cores_of(num_ranks))
        patch.setenv("VLLM_CACHE_ROOT", str(cache))
        yield


class Answers(NamedTuple):
    """Token ids by prompt and answer."""

    greedy: list[list[list[int]]]
    shorter: list[list[list[int]]]
    seeded: list[list[list[int]]]


def plain_answers(llm: LLM) -> Answers:
    """What plain vLLM answers to `PROMPTS` and to `SHORTER`."""
    return Answers(
        generate(llm, PROMPTS, GREEDY),
        generate(llm, SHORTER, GREEDY),
        generate(llm, PROMPTS, SEEDED),
    )


def check_lookahead(llm: LLM, plain: Answers) -> None:
    """Two ranks with lookahead answer as plain vLLM, and both verify the trees of one of them.

    The ranks' clocks differ, and with `budget` "auto" the trees depend on the clock. A fixed
    budget saves the time in which a step's cost is measured.
    """
    llm.collective_rpc(record_trees)
    llm.collective_rpc(set_clock)
    llm.collective_rpc(insert_whole_texts)
    compiled_at_start = llm.collective_rpc(compiled_kernels)
    assert generate_staggered(llm, PROMPTS, GREEDY) == plain.greedy
    assert generate(llm, SHORTER, GREEDY) == plain.shorter
    assert generate(llm, PROMPTS, SEEDED) == plain.seeded
    drafting, other = sorted(llm.collective_rpc(verified), key=lambda rank: not rank.drafts)
    compiled_now = llm.collective_rpc(compiled_kernels)
    for now, before in zip(compiled_now, compiled_at_start, strict=True):
        new = {name for name, found in now.items() if found != before.get(name)}
        assert not new, f"requests compiled {new}"
    assert (drafting.drafts, other.drafts) == (True, False)
    assert drafting.trees == other.trees
    # In a pipeline, only the drafting rank learns what was accepted.
    assert drafting.counters == other.counters or not other.counters["trees"]
    assert sum(branching for _, branching in drafting.trees) > 20
    assert drafting.counters["moved_tokens"] > 20


def record_trees(worker: Any) -> None:
    """In a worker: record a digest of the trees of each step, and whether any branches."""
    runner = worker.model_runner
    original, runner.recorded_trees = runner._lay_out, []

    def recorded(step: Any) -> None:
        original(step)
        forest = step.trees.forest
        if forest.num_nodes:
            arrays = (forest.tokens, forest.parents, forest.firsts, step.trees.rows)
            digest = hashlib.sha256(b"|".join(array.tobytes() for array in arrays)).hexdigest()
            runner.recorded_trees.append((digest, bool(forest.branching.any())))

    runner._lay_out = recorded


def insert_whole_texts(worker: Any) -> None:
    """In a worker: remove the time limit on insertion, as `conftest.py` does in its process."""
    insertion = getattr(worker.model_runner.drafter.proposer, "insertion", None)
    if insertion is not None:
        insertion.seconds = math.inf


def set_clock(worker: Any) -> None:
    """In a worker: replace the clock. A node costs nothing where it drafts, and 10 ms elsewhere."""
    runner = worker.model_runner
    proposer, original, now = runner.drafter.proposer, runner._measure, 0.0
    if proposer.cost is not None:  # which was measured at start
        proposer.cost = StepCost(CostCurve([1, 1024], [0.010, 0.011]))

    def measure(step: Any) -> None:
        nonlocal now
        nodes = step.work_before.nodes if step.work_before else 0
        now += 0.010 * (1 + (not runner.drafter.is_drafting_rank) * nodes)
        original(step)

    runner._clock = lambda: now
    runner._measure = measure


def compiled_kernels(worker: Any) -> Signatures:
    """In a worker: the signatures that numba has compiled, but for kernels of vLLM's, which these
    eager engines do not warm up."""
    return {name: found for name, found in compiled().items() if ".cpu_kernels." not in name}


class Verified(NamedTuple):
    """What a rank has verified."""

    trees: list[tuple[str, bool]]
    """A digest of the trees of each step with drafts, and whether any branches."""
    counters: dict[str, int]
    drafts: bool
    """Whether this rank drafts."""


def verified(worker: Any) -> Verified:
    """In a worker: what this rank has verified since `record_trees`."""
    runner = worker.model_runner
    drafts = not isinstance(runner.drafter.proposer, NoProposer)
    return Verified(runner.recorded_trees, vars(runner.drafter.counters), drafts)
