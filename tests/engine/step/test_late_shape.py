"""Steps that vLLM prepares before their drafts are known give plain vLLM's tokens."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from vllm import LLM, SamplingParams
from vllm.sampling_params import StructuredOutputsParams

from lookahead_vllm.draft.budget.cost import CostCurve, StepCost
from lookahead_vllm.draft.proposers.hybrid import HybridProposer
from lookahead_vllm.engine.runner import draft_graphs
from lookahead_vllm.engine.runner.runner import LookaheadRunner
from lookahead_vllm.engine.step.late_shape import LateMetadata
from lookahead_vllm.engine.step.step import State
from tests.support import graph_engine
from tests.support.driving import (
    drafter_of,
    engine,
    generate,
    generate_staggered,
    launched_steps,
    of_length,
    random_prompts,
    record_plain,
    runner_of,
)
from tests.support.proposers import record
from tests.support.standing_by import STANDS_BY

PROMPTS = random_prompts(9, 50, seed=5)
KINDS: list[dict[str, Any]] = [
    dict(temperature=0),
    dict(temperature=0.8, seed=3, top_p=0.9),
    dict(temperature=0.9, seed=4, repetition_penalty=1.3, frequency_penalty=0.4, logprobs=2),
]
PARAMS = [of_length(30, **KINDS[i % 3]) for i in range(len(PROMPTS))]
DRAWN = [of_length(30, temperature=(0, 0.8, 1)[i % 3], seed=i) for i in range(len(PROMPTS))]
"""They need nothing but the model's logits, a temperature and a seed."""
ABORTED = (3, 7)
MERGED = "graphs that merge contexts"


class Steps:
    """Counts the steps of an engine with slots for drafts."""

    def __init__(self, llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
        self.early = self.waiting = 0
        self.placed: list[tuple[int, int]] = []
        """The rows of each early step, and those that vLLM had prepared."""
        runner, shape = runner_of(llm), runner_of(llm)._shape
        begin, share_out = runner._begin, shape.share_out

        def begins(scheduled: Any) -> Any:
            step = begin(scheduled)
            self.early += step.is_prepared_early
            self.waiting += step.has_slots and not step.is_prepared_early
            return step

        def shares_out(step: Any, trees: Any = None) -> Any:
            split = share_out(step, trees)
            self.placed.append((split.num_rows, step.prepared.num_tokens))
            return split

        monkeypatch.setattr(runner, "_begin", begins)
        monkeypatch.setattr(shape, "share_out", shares_out)


@contextmanager
def lookahead(mode: str, model: Path, options: dict[str, Any], **kwargs: Any) -> Iterator[LLM]:
    with pytest.MonkeyPatch.context() as patch:
        if mode != "eager":
            merges = mode == MERGED
            graph_engine.enable(patch, schedules=merges or "schedule" in mode, merges=merges)
        with engine(model, options, **kwargs) as llm:
            yield llm


def answers_of(llm: LLM) -> list[Any]:
    staggered = generate_staggered(llm, PROMPTS, PARAMS, abort=ABORTED, every=5)
    kept = [staggered[i] for i in range(len(PROMPTS)) if i not in ABORTED]
    begun = [staggered[i][0][:10] for i in ABORTED]
    return [kept, begun, generate(llm, PROMPTS, PARAMS)]


@pytest.fixture(scope="module")
def plain(llama: Path) -> list[Any]:
    with engine(llama) as llm:
        answers = answers_of(llm)
        record(PROMPTS, answers[2])
        return answers


@pytest.mark.parametrize(
    ("mode", "options"),
    [
        ("graphs", dict(proposer="ngram_trie", budget=8)),
        ("eager", dict(proposer="hybrid", budget=6)),
        ("graphs", dict(proposer="hybrid", budget="auto")),
        ("eager", dict(proposer="hidden_path", budget=8)),
        (MERGED, dict(proposer="hidden_path", budget=8)),
        # They fill any graph.
        ("graphs", dict(proposer="hidden_path", budget="auto", num_speculative_tokens=24)),
    ],
)
def test_the_tokens_are_plain_vllms(
    mode, options, llama, plain,
    monkeypatch
):  # fmt: skip
    record(PROMPTS, plain[2])
    may_pause = options["budget"] == "auto" and options["proposer"] == "hybrid"
    with lookahead(mode, llama, options, drafts=None if may_pause else True) as llm:
        steps = Steps(llm, monkeypatch)
        assert answers_of(llm) == plain
        assert answers_of(llm) == plain  # which the trie has learned
        counters = drafter_of(llm).counters
        if may_pause:
            return
        assert steps.early > 3 * steps.waiting
        assert counters.branching_trees > 100
        assert counters.moved_tokens > 5
        assert any(rows < prepared for rows, prepared in steps.placed)
        if mode != "eager":
            replays = [replay for replay in runner_of(llm).replays if replay.has_drafts]
            assert sum(replay.num_trees for replay in replays) > 50
            assert any(replay.num_tokens < replay.num_prepared for replay in replays)
            # Others have all kinds of requests.
            assert runner_of(llm).num_tails < 0.5 * len(replays)
            # A later graph reads all rows up to its size.
            assert runner_of(llm).input_buffers.input_ids.min() >= 0


@pytest.mark.parametrize(
    ("mode", "options"),
    [
        ("graphs", dict(proposer="hybrid", budget=6)),
        (MERGED, dict(proposer="hidden_path", budget=8)),
    ],
)
def test_steps_whose_requests_are_only_drawn_are_one_launch_after_the_model(mode, options, llama):
    def answers_of(llm: LLM) -> list[Any]:
        again = generate_staggered(llm, PROMPTS, DRAWN, every=3, reset_every=9)
        return [generate(llm, PROMPTS, DRAWN), again]

    with engine(llama) as llm:
        plain = answers_of(llm)
    record(PROMPTS, plain[0])
    with lookahead(mode, llama, options) as llm:
        launched = launched_steps(llm)
        assert answers_of(llm) == plain
        assert answers_of(llm) == plain
        in_graphs = [step for step in launched if step.graph]
        assert len(in_graphs) > 20 and all(step.has_tail for step in in_graphs)
        assert runner_of(llm).num_tails == len(in_graphs)
        assert drafter_of(llm).counters.moved_tokens > 5
        observed = [step.verified is not None for step in in_graphs]
        assert any(observed) is (options["proposer"] == "hybrid")


@pytest.mark.parametrize("proposer", ["ngram_trie", "hybrid"])
@pytest.mark.parametrize("mode", ["graphs", "graphs with a schedule"])
def test_steps_without_slots_are_one_launch_after_the_model_too(mode, proposer, llama, monkeypatch):
    """The drafts never pay, so few steps have slots; but some do."""
    monkeypatch.setattr(draft_graphs, "MIN_ROWS_OF_OWN_TAILS", 4)
    every_kind = [*DRAWN[:6], *PARAMS[6:]]

    def answers_of(llm: LLM) -> list[Any]:
        again = generate_staggered(llm, PROMPTS, every_kind, every=3, reset_every=9)
        return [generate(llm, PROMPTS, every_kind), generate(llm, PROMPTS[:3], LONG), again]

    with engine(llama) as llm:
        plain = answers_of(llm)
    cost = StepCost(CostCurve([1, 1024], [1.0, 1.001]), drafts=50.0)
    monkeypatch.setattr(cost, "observe", lambda work, time: time)
    with lookahead(mode, llama, {"proposer": proposer}, drafts=None) as llm:
        drafter_of(llm).proposer.cost = cost
        launched, tail_of = launched_steps(llm), runner_of(llm).cudagraph_manager.tail_of
        for _ in range(3):
            assert answers_of(llm) == plain
        without = [step for step in launched if step.is_prepared_early and not step.has_slots]
        assert sum(step.has_tail for step in without) > 50
        assert sum(step.repeats for step in without) > 50
        assert sum(not step.has_tail for step in without) > 10  # some requests need more
        assert any(step.has_slots for step in launched)
        assert all(not step.is_prepared_early or step.graph for step in launched)
        # A tail may have more rows than the model's graph.
        graphs = [step.graph for step in without]
        assert any(tail_of(graph).num_tokens > graph.num_tokens for graph in graphs)
        assert any(tail_of(graph).max_query_len is None for graph in graphs)  # one of its own


LONG = of_length(90)
"""In three KV blocks of 32."""


@pytest.mark.parametrize("mode", ["eager", "graphs"])
def test_a_step_of_the_same_batch_is_not_prepared_again(mode, llama):
    plain = record_plain(llama, PROMPTS, LONG)
    with lookahead(mode, llama, {"proposer": "hidden_path", "budget": 8}) as llm:
        launched = launched_steps(llm)
        assert generate(llm, PROMPTS, LONG) == plain
        assert sum(step.repeats for step in launched) > 0.6 * len(launched)


@pytest.mark.parametrize(
    ("mode", "options"),
    [
        ("eager", dict(proposer="hidden_path", budget=8)),
        ("eager", dict(proposer="hybrid", budget=6)),
        ("graphs", dict(proposer="hidden_path", budget="auto", num_speculative_tokens=24)),
        ("graphs", dict(proposer="ngram_trie", budget=8)),
    ],
)
def test_steps_with_prompts_are_prepared_for_a_number_of_nodes(
    mode, options, llama, plain, monkeypatch
):
    record(PROMPTS, plain[2])
    monkeypatch.setattr(LookaheadRunner, "sizes_steps", True)
    with lookahead(mode, llama, options, long_prefill_token_threshold=16) as llm:
        launched = launched_steps(llm)
        for every in (2, 1, 3, 5):
            assert generate_staggered(llm, PROMPTS, PARAMS, every=every) == plain[2]
        sized = [step for step in launched if step.state is State.SIZED]
        sizes = [(s.trees.forest.num_nodes, s.whole_trees.forest.num_nodes) for s in sized]
        assert len(sized) > 20 and not any(step.graph for step in sized)
        assert sum(rows > nodes for rows, nodes in sizes) > 5
        assert sum(nodes for _, nodes in sizes) > 100
        if options["proposer"] == "hidden_path":
            assert sum(step.trees.branches for step in sized) > 10


def test_steps_may_be_synchronous(llama, plain, monkeypatch):
    record(PROMPTS, plain[2])
    options = {"proposer": "hidden_path", "budget": 8}
    with lookahead("eager", llama, options, async_scheduling=False) as llm:
        steps = Steps(llm, monkeypatch)
        assert answers_of(llm) == plain
        assert steps.early > 3 * steps.waiting
        assert drafter_of(llm).counters.branching_trees > 50


def _fails_at_every_third_call(original: Any, at_its_end: bool) -> Any:
    calls = 0

    def failing(*args: Any) -> Any:
        nonlocal calls
        calls += 1
        is_due = calls % 3 == 0
        result = original(*args) if at_its_end or not is_due else None
        if is_due:
            raise RuntimeError("as planned")
        return result

    return failing


def test_a_proposer_that_fails_in_the_middle_costs_drafts_alone(llama, plain):
    with lookahead("eager", llama, {"proposer": "hybrid", "budget": 6}) as llm:
        counters, accepted = drafter_of(llm).counters, 0
        grow = "_begin_and_grow"
        for name, at_its_end in (
            ("plan", False),
            ("stand_by", False),
            (grow, False),
            (grow, True),
            ("learn", False),
        ):
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(*STANDS_BY)
                failing = _fails_at_every_third_call(getattr(HybridProposer, name), at_its_end)
                patch.setattr(HybridProposer, name, failing)
                assert answers_of(llm) == plain
            assert counters.failures > 10, name
            assert counters.accepted_nodes > accepted + 10, name
            accepted, counters.failures = counters.accepted_nodes, 0  # they were planned


@pytest.mark.parametrize("mode", ["graphs", MERGED])
def test_steps_that_wait_before_they_are_prepared_run_in_graphs(mode, llama, plain, monkeypatch):
    record(PROMPTS, plain[2])
    with lookahead(mode, llama, {"proposer": "hidden_path", "budget": 8}) as llm:
        steps = Steps(llm, monkeypatch)
        monkeypatch.setattr(runner_of(llm)._shape, "is_possible", False)
        assert answers_of(llm) == plain
        assert not steps.early
        assert sum(replay.num_trees for replay in runner_of(llm).replays) > 50


@pytest.mark.parametrize("mode", ["graphs", "graphs with a schedule"])
def test_a_step_without_a_node_runs_plain_vllms_graph(mode, llama, plain, monkeypatch):
    with lookahead(mode, llama, {"budget": 8}, drafts=False) as llm:
        monkeypatch.setattr(drafter_of(llm), "max_step_nodes", 0)
        steps = Steps(llm, monkeypatch)
        assert answers_of(llm) == plain
        assert steps.early > 10
        empty = [r for r in runner_of(llm).replays if not r.has_drafts and r.num_prepared > 9]
        assert len(empty) > 10


def test_prompts_and_grammars_wait_for_the_drafts(llama, monkeypatch):
    grammar = StructuredOutputsParams(regex="[a-z]{3}[0-9]{20}")
    params = SamplingParams(temperature=0, max_tokens=20, structured_outputs=grammar)
    with lookahead("eager", llama, {"budget": 8}, skip_tokenizer_init=False) as llm:
        steps = Steps(llm, monkeypatch)
        generate(llm, PROMPTS[:3], params)
        assert steps.waiting > 5 and not steps.early


# ---- metadata ------------------------------------------------------------------------------------


def test_metadata_is_made_once_when_a_layer_asks_for_it():
    made: list[int] = []

    def build() -> dict[str, Any]:
        made.append(1)
        return {"first": torch.zeros(1), "second": torch.ones(1)}

    metadata = LateMetadata(build)
    assert not made
    assert metadata["second"].item() == 1 and metadata.get("first").item() == 0
    assert metadata.get("third") is None
    with pytest.raises(KeyError, match="third"):
        metadata["third"]
    assert len(made) == 1
