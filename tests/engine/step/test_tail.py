"""A captured tail gives, to the bit, what the sampler and the walk give outside of graphs."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from vllm import SamplingParams
from vllm.config import CUDAGraphMode
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.worker.cpu.buffer_utils import UvaBuffer
from vllm.v1.worker.gpu.input_batch import InputBuffers
from vllm.v1.worker.gpu.states import RequestState

from lookahead_vllm.draft.tree import DraftForest, DraftTree
from lookahead_vllm.engine.attention.attended_trees import AttendedTrees
from lookahead_vllm.engine.attention.branching import NOTHING_BRANCHES
from lookahead_vllm.engine.cpu_kernels import table
from lookahead_vllm.engine.runner import draft_graphs
from lookahead_vllm.engine.runner.draft_graphs import DraftGraphManager
from lookahead_vllm.engine.runner.graph_runner import GraphRunner
from lookahead_vllm.engine.runner.runner import LookaheadRunner
from lookahead_vllm.engine.step.drafts import Drafts
from lookahead_vllm.engine.step.late_shape import LateShape
from lookahead_vllm.engine.step.sampler import NodeSampler, RootSampler
from lookahead_vllm.engine.step.step import Step
from lookahead_vllm.engine.step.tail import Draws, Emitted
from lookahead_vllm.verify.place import NO_ENTRY, StepRows
from lookahead_vllm.verify.place import cpu as place
from tests.support import recorded_graphs
from tests.support.attention_cases import random_tree

ENTRIES, ROWS, LONGEST, VOCAB = 80, 256, 9, 1100  # two blocks of the sampling kernel
BLOCK, BLOCKS = 4, 8
CPU = torch.device("cpu")
STALE = 10**6


@pytest.fixture(autouse=True)
def _kernels_of_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vllm.v1.worker.gpu.buffer_utils.UvaBuffer", UvaBuffer)
    table.install()
    recorded_graphs.enable(monkeypatch)
    monkeypatch.setattr(torch.accelerator, "synchronize", lambda: None)
    monkeypatch.setattr(draft_graphs, "MIN_ROWS_OF_OWN_TAILS", 8)


class _Mover:
    """Stands in for the K/V of one slot of all layers."""

    def __init__(self) -> None:
        self.cache = torch.zeros(ENTRIES * BLOCKS * BLOCK, dtype=torch.int64)

    def move_paths(self, origins: torch.Tensor, targets: torch.Tensor) -> None:
        for source, target in zip(origins.T, targets.T, strict=True):
            self.cache[target] = self.cache[source]


class Engine:
    """The part of an engine from the drafts of a step to its tokens."""

    def __init__(self, seed: int, dtype: torch.dtype = torch.float32, num_choices: int = 0) -> None:
        self.rng, self.num_chosen = np.random.default_rng(seed), 0
        self.replayed: set[tuple[int, bool]] = set()
        """The rows of each tail that was replayed, and whether its graph is one for drafts."""
        self.states = RequestState(ENTRIES, BLOCKS * BLOCK, ROWS, LONGEST - 1, VOCAB, CPU)
        config: Any = SimpleNamespace(reasoning_config=None)
        self.sampler = RootSampler(lambda *_: None, config, ENTRIES, VOCAB, CPU, self.states)
        self.sampler.draws = Draws(ENTRIES, CPU)
        self.nodes = NodeSampler(self.sampler, lambda: self.runner.step)
        for entry in range(ENTRIES):
            self.add(entry)
        buffers = InputBuffers(ENTRIES, ROWS, CPU)
        blocks = self.rng.permutation(ENTRIES * BLOCKS).reshape(ENTRIES, BLOCKS).astype(np.int32)
        tables = SimpleNamespace(
            slot_mappings=torch.full((2, ROWS), -1),
            block_tables=[SimpleNamespace(gpu=torch.from_numpy(part)) for part in (blocks, blocks)],
            block_sizes=[BLOCK, BLOCK],
            input_block_tables=(None, None),
        )
        runner = self.runner = object.__new__(GraphRunner)
        runner.model_state = runner.vllm_config = runner.parallel_config = None
        runner.req_states, runner.device = self.states, CPU
        runner.drafter = SimpleNamespace(proposer=SimpleNamespace(num_choices=num_choices))
        runner._late = SimpleNamespace(drafted_for=())
        runner.input_buffers, runner.block_tables = buffers, tables
        runner.sampler, runner.decode_query_len = self.sampler, LONGEST
        self.movers = [_Mover(), _Mover()]
        runner._branching = NOTHING_BRANCHES._replace(movers=self.movers)
        runner._emitted = Emitted.empty(ENTRIES, LONGEST + 1, CPU)
        runner._shape = self.shape = LateShape(runner, None)
        # What the model leaves: logits that a few tokens share, most often of the rows' tokens.
        self.table = torch.from_numpy(self.rng.normal(size=(VOCAB, VOCAB)).astype(np.float32))
        self.likely = self.rng.integers(0, VOCAB, (VOCAB, 3))
        self.table[np.arange(VOCAB)[:, None], self.likely] += 9
        self.table = self.table.to(dtype)
        runner.model = SimpleNamespace(compute_logits=lambda hidden: hidden * 1.5)
        runner.cudagraph_manager = self.manager = self.captured()

    def captured(self) -> DraftGraphManager:
        sizes, mode = [8, 12, 16, 24, 32, 48, 64, ROWS], CUDAGraphMode.FULL_DECODE_ONLY
        config = recorded_graphs.config_of(mode, sizes, ENTRIES)
        manager = DraftGraphManager(AttendedTrees(), config, CPU, mode, decode_query_len=1)
        assert manager.add_draft_graphs(LONGEST) == [8, 16, 32, 64, ROWS]  # others have own tails
        manager.hidden_states = torch.zeros(ROWS, VOCAB, dtype=self.table.dtype)
        self.runner.cudagraph_manager = manager
        with torch.inference_mode():
            for number in {0, self.runner.drafter.proposer.num_choices}:
                manager.tails |= manager._capture_tails(
                    lambda *tail: recorded_graphs.recorded(self.runner._make_tail(*tail)), number
                )
        assert {desc.num_tokens for desc, _ in manager.tails} == set(sizes)
        return manager

    def add(self, entry: int) -> None:
        """A request takes the place of another one."""
        seed = int(self.rng.integers(-(2**62), 2**62)) if self.rng.random() < 0.7 else None
        temperature = float(self.rng.choice([0, 0.3, 0.8, 1, 1.7]))
        self.sampler.add_request(entry, SamplingParams(temperature=temperature, seed=seed))

    def step(self) -> Step:
        """A random step: trees, chains and requests without a draft, in the order of no entry."""
        rng, states = self.rng, self.states
        for entry in rng.permutation(ENTRIES)[:9].tolist():
            self.add(entry)
        self.sampler.apply_staged_writes()
        most = int(rng.choice([8, 64, ROWS, ROWS]))
        states.last_sampled_tokens[:] = torch.from_numpy(rng.integers(0, VOCAB, (ENTRIES, 1)))
        contexts = rng.integers(0, BLOCKS * BLOCK - LONGEST, ENTRIES).astype(np.int32)
        states.num_computed_tokens.gpu[:] = torch.from_numpy(contexts)
        entries = rng.permutation(ENTRIES)[: int(rng.integers(1, min(most, ENTRIES) + 1))]
        left, trees = (0 if rng.random() < 0.2 else most - len(entries)), []
        for entry in entries.tolist():
            size = min(int(rng.integers(0, LONGEST)), left)
            left -= size
            trees.append(self.tree(int(states.last_sampled_tokens[entry, 0]), size))
        step = Step(SchedulerOutput.make_empty())
        req_ids = [str(entry) for entry in entries]
        step.drafts = step.whole = Drafts(req_ids, DraftForest.of(trees), contexts[entries] + 1)
        step.prepared = SimpleNamespace(
            req_ids=req_ids,
            num_reqs=len(entries),
            idx_mapping=torch.from_numpy(entries.astype(np.int32)),
            idx_mapping_np=entries.astype(np.int32),
            num_computed_tokens_np=contexts[entries],
        )
        step.slots = self.runner.block_tables.slot_mappings
        step.has_slots = True
        return step

    def tree(self, root: int, size: int) -> DraftTree:
        shape, tokens = random_tree(self.rng, size), [root]
        for parent in shape.parents.tolist():
            likely = self.likely[tokens[parent + 1]]
            tokens.append(int(likely[0 if self.rng.random() < 0.8 else 2]))
        return DraftTree.from_lists(tokens[1:], shape.parents)

    def poison(self) -> None:
        """Overwrite what the step must write itself."""
        rows = self.shape._rows
        for part in (rows.ids, rows.positions, rows.parents, rows.places, rows.depths):
            part.fill_(STALE)
        rows.slots.fill_(3)
        rows.starts.copy_(torch.arange(len(rows.starts)))
        assert self.manager.hidden_states is not None
        self.manager.hidden_states.fill_(torch.nan)
        for mover in self.movers:
            mover.cache[:] = torch.from_numpy(self.rng.permutation(len(mover.cache)))

    def run(self, step: Step) -> int:
        """Run a step in a graph, and compare what it leaves; returns the emitted tokens."""
        manager, runner, shape = self.manager, self.runner, self.shape
        self.poison()
        split = shape.share_out(step)
        num_rows = split.num_rows
        step.graph = manager.smallest(step.prepared.num_reqs, num_rows)
        tail = manager.tail_of(step.graph)
        assert tail is not None
        self.replayed.add((tail.num_tokens, tail.max_query_len is not None))
        padded = tail.num_tokens
        shape.place(padded)
        assert (shape._rows.entries[num_rows:padded] == NO_ENTRY).all()
        hidden = manager.hidden_states
        assert hidden is not None
        hidden[:num_rows] = self.table[shape._rows.ids[:num_rows].long()]
        before = [mover.cache.clone() for mover in self.movers]
        runner.step = step
        assert runner._fits_tail(step)
        step.has_tail = True
        step.trees = step.whole_trees = shape.trees(step)
        output, *_ = runner.sample(hidden[:padded], step.prepared, None)
        runner._settle(step)
        moved = [mover.cache.clone() for mover in self.movers]
        for mover, cache in zip(self.movers, before, strict=True):
            mover.cache.copy_(cache)
        expected = self.outside_of_graphs(step, hidden[:num_rows])
        width = expected.sampled_token_ids.shape[1]
        assert torch.equal(output.sampled_token_ids[:, :width], expected.sampled_token_ids)
        assert torch.equal(output.num_sampled, expected.num_sampled)
        assert torch.equal(output.num_rejected, expected.num_rejected)
        for mover, cache in zip(self.movers, moved, strict=True):
            assert torch.equal(cache, mover.cache)
        self.check_choices(step, hidden[:num_rows])
        return int(output.num_sampled.sum())

    def check_choices(self, step: Step, hidden: torch.Tensor) -> None:
        found, step.verified = step.verified, None
        self.runner._observe(self.runner.model.compute_logits(hidden), step.batch)
        assert (found is None) == (step.verified is None)
        if found is not None and step.verified is not None:
            assert found.request_ids == step.verified.request_ids
            assert np.array_equal(found.roots, step.verified.roots)
            for one, other in zip(found[2:4], step.verified[2:4], strict=True):
                assert np.array_equal(one[: len(other)], other)  # then padding
            self.num_chosen += found.forest.num_nodes * found.tokens.shape[1]

    def outside_of_graphs(self, step: Step, hidden: torch.Tensor) -> Any:
        logits = self.runner.model.compute_logits(hidden)
        if step.layout is None:
            return self.sampler(logits, step.batch)
        return self.nodes(logits, step.batch)


def run(engine: Engine, num_requests: int) -> tuple[int, int]:
    """Requests of all steps, and their tokens."""
    requests = tokens = 0
    with torch.inference_mode():
        while requests < num_requests:
            step = engine.step()
            tokens += engine.run(step)
            requests += step.batch.num_reqs
    return requests, tokens


@pytest.mark.parametrize(("dtype", "count"), [(torch.float32, 10_000), (torch.bfloat16, 2_000)])
def test_a_tail_is_what_runs_outside_of_graphs(dtype, count):
    engine = Engine(seed=1, dtype=dtype)
    requests, tokens = run(engine, count)
    assert tokens > 1.2 * requests
    assert len({size for size, has_drafts in engine.replayed if has_drafts}) == 5
    assert any(not has_drafts for _, has_drafts in engine.replayed)


def test_a_tail_finds_the_models_choices():
    engine = Engine(seed=6, num_choices=3)
    run(engine, 2_000)
    assert engine.num_chosen > 10_000


def _forget(draws: Draws, entry: int, *args: Any) -> None:
    """A plan that forgets to tell the device of a request."""
    draws.suffices[entry] = True


def test_the_temperature_of_a_request_that_has_ended_is_found(monkeypatch):
    engine = Engine(seed=2)
    engine.step()
    monkeypatch.setattr(Draws, "add_request", _forget)
    with pytest.raises(AssertionError):
        run(engine, 500)


def test_entries_of_padding_that_are_those_of_another_step_are_found(monkeypatch):
    engine, original = Engine(seed=3), place._place

    def place_without_padding(packed: Any, *args: Any) -> None:
        original(packed, *args)
        rows: StepRows = args[3]
        rows.entries[packed[1] :] = 5

    monkeypatch.setattr(place, "_place", place_without_padding)
    with pytest.raises(AssertionError):
        run(engine, 500)


def test_a_table_that_is_too_narrow_is_found(monkeypatch):
    original = Emitted.empty
    monkeypatch.setattr(Emitted, "empty", lambda count, width, *more: original(count, 4, *more))
    with pytest.raises(ValueError, match="more than the width"):
        run(Engine(seed=4), 500)


def test_only_the_next_tail_follows_the_copy_of_the_tokens(monkeypatch):
    """The graph before it does not: all tails write the tokens to the same buffers, which belong to
    no graph."""
    engine = Engine(seed=7)
    manager, runner = engine.manager, engine.runner
    run(engine, 1)
    results = [tail.result for tail in manager.tails.values()]
    for part, buffer in enumerate(runner._emitted):
        assert {result[part].data_ptr() for result in results} == {buffer.data_ptr()}
    order: list[str] = []
    replay = manager.replay_tail
    monkeypatch.setattr(manager, "replay_tail", lambda *args: order.append("tail") or replay(*args))
    runner.main_stream, runner.speculator = SimpleNamespace(wait_event=order.append), None

    def sample_tokens(runner: Any, grammar: Any) -> Any:
        runner.sample(manager.hidden_states, runner.step.prepared, grammar)
        return SimpleNamespace(copy_event="copy", sampled_token_ids=np.zeros((1, LONGEST)))

    monkeypatch.setattr(LookaheadRunner, "sample_tokens", sample_tokens)
    with torch.inference_mode():
        for _ in range(3):
            runner.sample_tokens(None)
            order.append("another graph")
    assert order == ["tail", "another graph", *["copy", "tail", "another graph"] * 2]


def test_a_step_that_failed_has_no_output(monkeypatch):
    monkeypatch.setattr(LookaheadRunner, "sample_tokens", lambda *_: None)
    engine = Engine(seed=5)
    run(engine, 1)
    engine.runner.speculator = None
    assert engine.runner.sample_tokens(None) is None
