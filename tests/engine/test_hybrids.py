"""Models with recurrent layers give plain vLLM's output, in chains and in trees."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from vllm import LLM
from vllm.platforms import CpuArchEnum, current_platform
from vllm.v1.attention.backends.gdn_attn import GDNAttentionMetadataBuilder
from vllm.v1.attention.backends.linear_attn import BailingLinearAttentionMetadataBuilder
from vllm.v1.attention.backends.short_conv_attn import ShortConvAttentionMetadataBuilder
from vllm.v1.core.single_type_kv_cache_manager import MambaManager

from benchmarks.port.seams import SEAMS
from lookahead_vllm.engine import patches
from lookahead_vllm.engine.recurrent import states as recurrent
from lookahead_vllm.engine.scheduler.scheduler import LookaheadScheduler
from lookahead_vllm.options.allowed import OptionError
from lookahead_vllm.verify.recurrence import StateMover
from tests.support.driving import (
    converse,
    drafter_of,
    engine,
    generate,
    generate_staggered,
    obstacle_of,
    of_length,
    random_prompts,
    record_plain,
)
from tests.support.hybrid_models import CACHING, HYBRIDS, settings_of, use_float32_gated_delta
from tests.support.models import WANDERING, save_config
from tests.support.proposers import record

use_float32_gated_delta()

HIDDEN = {"proposer": "hidden_path", "num_speculative_tokens": 6, "budget": 6}
PROMPTS = random_prompts(12, 60)
SEEDED = of_length(30, temperature=0.8, seed=1, top_k=20, n=2)
Answers = list[list[list[int]]]


@pytest.mark.parametrize("name", HYBRIDS)
def test_every_hybrid_gives_plain_vllms_output(name, tmp_path):
    """Greedy and seeded, in trees and in chains, with as many cached tokens in every turn."""
    model, settings = save_config(name, tmp_path, HYBRIDS), CACHING | settings_of(name)
    with engine(model, **settings) as plain:
        greedy, seeded = converse(plain), converse(plain, SEEDED)
        staggered = generate(plain, PROMPTS)
    distinct = sum(len(set(a[0])) for a in staggered) / len(staggered)
    assert distinct > 10, "outputs that loop prove nothing"
    assert sum(greedy[-1].cached) > sum(map(len, greedy[-2].prompts)) / 2
    record(PROMPTS, staggered)
    for turn in (*greedy, *seeded):
        record(turn.prompts, turn.answers)
    with committed_paths() as paths, engine(model, HIDDEN, **settings) as llm:
        assert obstacle_of(llm) is None
        counters = drafter_of(llm).counters
        assert converse(llm) == greedy
        assert converse(llm, SEEDED) == seeded
        assert generate_staggered(llm, PROMPTS) == staggered
        assert counters.branching_trees > 100
        assert counters.moved_tokens > 50
        crossed = {stop for stop, length in paths if stop < length}
        assert len(crossed) > (0 if name == "qwen3_next" else 2)
        trees, accepted = counters.branching_trees, counters.accepted_nodes
        drafter_of(llm).may_branch = False
        assert llm.reset_prefix_cache()
        assert converse(llm) == greedy
        assert counters.branching_trees == trees
        assert counters.accepted_nodes > accepted + 50


def test_cached_states_survive_preemptions_aborts_and_resets(tmp_path):
    """With shared prefixes."""
    model = save_config("falcon_h1", tmp_path, HYBRIDS)
    settings = CACHING | dict(load_format=WANDERING, kv_cache_memory_bytes=8 << 20)
    prompts = [PROMPTS[i % 3] * 2 + PROMPTS[i] for i in range(12)]
    answers = record_plain(model, prompts, **settings)
    with engine(model, HIDDEN, **settings) as llm:
        for others in ({}, {"reset_every": 7}, {"every": 1}, {"reset_every": 11, "every": 4}):
            aborted = {1, 5} if "every" in others else set()
            found = generate_staggered(llm, prompts, abort=aborted, **others)
            for i, (one, other) in enumerate(zip(found, answers, strict=True)):
                assert one[0] == other[0][: len(one[0])]
                assert len(one[0]) >= (10 if i in aborted else 40)


def test_the_cost_of_a_step_is_measured_beside_cached_states(tmp_path):
    model = save_config("falcon_h1", tmp_path, HYBRIDS)
    settings = CACHING | dict(load_format=WANDERING)
    with engine(model, {"num_speculative_tokens": 6}, drafts=None, **settings) as llm:
        assert drafter_of(llm).proposer.cost is not None
        assert len(generate(llm, PROMPTS)) == len(PROMPTS)


@contextmanager
def committed_paths() -> Iterator[set[tuple[int, int]]]:
    """Yields the arguments `stops` and `lengths` of all commits."""
    paths: set[tuple[int, int]] = set()
    original = StateMover.commit

    def commit(mover: Any, columns: Any, table: Any, lengths: Any, stops: Any) -> None:
        paths.update(zip(stops.tolist(), lengths.tolist(), strict=True))
        original(mover, columns, table, lengths, stops)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(StateMover, "commit", commit)
        yield paths


def test_blocks_have_room_for_the_windows_of_many_nodes(tmp_path):
    """vLLM counts no nodes of short convolutions when it chooses the size of a block.

    A draft has no more than half of a block's tokens.
    """
    model, settings = save_config("lfm2", tmp_path, HYBRIDS), CACHING | settings_of("lfm2")
    greedy = record_plain(model, PROMPTS, **settings)
    nodes = {"num_speculative_tokens": 64, "budget": 64}
    with engine(model, HIDDEN | nodes, **settings) as llm:
        assert generate(llm, PROMPTS) == greedy
        assert drafter_of(llm).counters.accepted_nodes > 100
        scheduler = llm.llm_engine.engine_core.engine_core.scheduler
        assert scheduler._most_slots == scheduler.block_size // 2 < 64


class Hybrid(NamedTuple):
    """An engine of Falcon-H1, and plain vLLM's greedy answers to `PROMPTS`."""

    model: Path
    llm: LLM
    answers: Answers

    def is_exact(self, run: Callable[..., Answers] = generate_staggered) -> bool:
        record(PROMPTS, self.answers)
        return run(self.llm, PROMPTS) == self.answers


@pytest.fixture(scope="module")
def hybrid(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hybrid]:
    model = save_config("falcon_h1", tmp_path_factory.mktemp("hybrid"), HYBRIDS)
    answers = record_plain(model, PROMPTS, load_format=WANDERING)
    with engine(model, HIDDEN, load_format=WANDERING) as llm:
        yield Hybrid(model, llm, answers)


def test_the_patches_of_recurrent_layers_are_those_of_the_table(hybrid):
    here = [s for s in SEAMS if s.area == "Recurrent layers" and not s.until.endswith("on a GPU")]
    wrapped = {p for seam in here if seam.use == "wrapped" for p in seam.places}
    assert wrapped <= set(patches.applied())


# ---- patterns of steps ---------------------------------------------------------------------------


def test_requests_that_steps_leave_out_keep_their_output(hybrid, monkeypatch):
    """Every third step leaves out each decoding request."""
    left_out: list[str] = []
    steps = 0
    original = LookaheadScheduler.schedule

    def schedule(self: Any, *args: Any, **kwargs: Any) -> Any:
        nonlocal steps
        steps += 1
        hidden = [
            request
            for i, request in enumerate(self.running)
            if (steps + i) % 3 == 0 and not request.is_prefill_chunk
        ]
        self.running = [request for request in self.running if request not in hidden]
        output = original(self, *args, **kwargs)
        self.running = hidden + self.running
        left_out.extend(request.request_id for request in hidden)
        return output

    monkeypatch.setattr(LookaheadScheduler, "schedule", schedule)
    assert hybrid.is_exact()
    assert len(left_out) > 50


def test_a_draft_behind_several_own_tokens_is_dropped(hybrid):
    scheduler = hybrid.llm.llm_engine.engine_core.engine_core.scheduler
    for own, resumable, kept in ((1, False, [5, 6]), (2, False, []), (1, True, [])):
        request = SimpleNamespace(
            num_tokens=10,
            num_output_placeholders=0,
            num_computed_tokens=10 - own,
            spec_token_ids=[5, 6],
            resumable=resumable,
            request_id="one",
        )
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(scheduler, "running", [request])
            patch.setattr(scheduler._draft_limiter, "_cut_to_blocks", lambda *_: {})
            scheduler._draft_limiter.cut()
        assert request.spec_token_ids == kept


def test_layers_without_kernels_stop_start_up(monkeypatch):
    monkeypatch.setattr(recurrent, "is_recurrent", lambda _: True)
    layers = {"one": type("OlmoHybridGatedDeltaNetAttention", (), {})()}
    group = SimpleNamespace(layer_names=["one"])
    with pytest.raises(OptionError, match=r"OlmoHybridGatedDeltaNet.*leave lookahead out"):
        recurrent.start([group], layers, torch.device("cpu"), 6)
    own = type("MambaMixer2", (), {"kv_cache": [torch.zeros(2, 4, dtype=torch.float16)]})()
    with pytest.raises(OptionError, match="need float32 or bfloat16"):
        recurrent.start([group], {"one": own}, torch.device("cpu"), 6)


def test_short_convolutions_stop_start_up_on_arm(monkeypatch):
    """vLLM passes a copy of their windows to its kernel there, one for each state slot."""
    monkeypatch.setattr(recurrent, "is_recurrent", lambda _: True)
    kinds = {name: type(name, (), {"kv_cache": [torch.zeros(2, 4)]}) for name in recurrent.LAYERS}
    layers = {name: kind() for name, kind in kinds.items()}
    for architecture in (CpuArchEnum.X86, CpuArchEnum.ARM):
        architecture_of = partial(CpuArchEnum, architecture)
        monkeypatch.setattr(type(current_platform), "get_cpu_architecture", architecture_of)
        for name in layers:
            is_refused = name == "ShortConv" and architecture == CpuArchEnum.ARM
            group = SimpleNamespace(layer_names=[name])
            with pytest.raises(OptionError, match=name) if is_refused else nullcontext():
                recurrent.start([group], layers, torch.device("cpu"), 6)


@pytest.mark.parametrize(
    ("builder", "counts"),
    [
        (GDNAttentionMetadataBuilder, True),
        (ShortConvAttentionMetadataBuilder, True),
        # vLLM's first runner passes it the number of accepted tokens, Model Runner V2 does not.
        (BailingLinearAttentionMetadataBuilder, False),
    ],
)
def test_on_a_gpu_vllms_runner_counts_accepted_tokens_for_some_layers(builder, counts, monkeypatch):
    monkeypatch.setattr(recurrent, "is_recurrent", lambda _: True)
    layers = {"one": SimpleNamespace(kv_cache=[torch.zeros(2, 4)])}
    made = builder.__new__(builder)
    group = SimpleNamespace(layer_names=["one"], get_metadata_builder=lambda: made)
    with nullcontext() if counts else pytest.raises(OptionError, match="number of accepted"):
        recurrent.start([group], layers, torch.device("cuda"), 6)


def test_the_state_slots_of_a_request_come_with_its_first_block(hybrid):
    """So a draft needs none, and cannot preempt a request for one."""
    slots: list[set[int]] = []
    original = LookaheadScheduler.schedule

    def schedule(self: Any, *args: Any, **kwargs: Any) -> Any:
        output = original(self, *args, **kwargs)
        slots.append(
            {
                len(manager.req_to_blocks[request.request_id])
                for manager in self.kv_cache_manager.coordinator.single_type_managers
                if isinstance(manager, MambaManager)
                for request in self.running
            }
        )
        return output

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LookaheadScheduler, "schedule", schedule)
        assert hybrid.is_exact()
    assert set().union(*slots) == {1 + HIDDEN["num_speculative_tokens"]}


# ---- another engine: the shared one is dead from here on ----------------------------------------


def test_prompts_in_chunks_and_preempted_requests_keep_their_output(hybrid, monkeypatch):
    """Also where the text of a preempted request takes several steps, with short chunks."""
    preempted: list[str] = []
    original = LookaheadScheduler.schedule

    def schedule(self: Any, *args: Any, **kwargs: Any) -> Any:
        nonlocal steps
        steps += 1
        if steps % 5 == 0 and len(self.running) > 1:
            request = max(self.running, key=lambda request: request.num_output_tokens)
            self.running.remove(request)
            preempted.append(request.request_id)
            self._preempt_request(request, time.monotonic())
        return original(self, *args, **kwargs)

    settings = dict(max_num_batched_tokens=16, max_num_seqs=8, load_format=WANDERING)
    with engine(hybrid.model, HIDDEN, **settings) as llm:
        other, steps = hybrid._replace(llm=llm), 0
        assert other.is_exact()
        monkeypatch.setattr(LookaheadScheduler, "schedule", schedule)
        assert other.is_exact(generate)
        assert len(preempted) > 10
        assert drafter_of(llm).counters.branching_trees > 50
