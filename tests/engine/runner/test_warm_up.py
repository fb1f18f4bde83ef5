"""vLLM's warm-up: its own requests get drafts, and nothing is learned."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from vllm.v1.worker.cpu.buffer_utils import UvaBuffer
from vllm.v1.worker.gpu.warmup import warmup_kernels

from lookahead_vllm.engine.attention import gpu as gpu_attention
from lookahead_vllm.engine.attention import latent as latent_attention
from lookahead_vllm.engine.attention.branching import NOTHING_BRANCHES
from lookahead_vllm.engine.drafter.late_drafts import LateDrafts
from lookahead_vllm.engine.recurrent.states import RequestStates
from lookahead_vllm.engine.runner import dummy_runs
from lookahead_vllm.engine.runner.warm_up import WarmUpDrafts
from lookahead_vllm.engine.step.late_shape import LateShape
from lookahead_vllm.engine.step.node_history import NodeHistory
from lookahead_vllm.engine.workers import gpu as gpu_worker
from lookahead_vllm.options.server import LookaheadOptions
from lookahead_vllm.verify.devices import ON_CPUS, ON_GPUS
from lookahead_vllm.verify.place import Placer, Split
from tests.engine.attention import test_gpu
from tests.engine.step import test_node_history
from tests.support.attention_cases import PagedAttentionCase, random_tree
from tests.support.driving import (
    drafter_of,
    engine,
    generate,
    random_prompts,
    record_plain,
    runner_of,
    worker_of,
)
from tests.support.triton_launches import record_launches
from tests.verify.history import test_history
from tests.verify.place import test_place


def test_it_has_all_that_the_runner_calls():
    assert not {name for name in vars(LateDrafts) if not name.startswith("_")} - set(
        vars(WarmUpDrafts)
    )


@pytest.mark.parametrize(
    ("max_nodes", "on_cpu", "largest_step"),
    [(2000, False, 6 * 8), (20, False, 6 * 3), (2000, True, 30)],
)
def test_vllms_warm_up_runs_a_step_of_the_most_nodes_on_a_gpu(
    max_nodes, on_cpu, largest_step, llama, monkeypatch
):
    grown: list[int] = []
    original = WarmUpDrafts.grow

    def grow(self: WarmUpDrafts, *args: Any) -> Any:
        drafts = original(self, *args)
        grown.append(drafts.forest.num_nodes)
        return drafts

    monkeypatch.setattr(WarmUpDrafts, "grow", grow)
    prompts = random_prompts(4, 20)
    vanilla = record_plain(llama, prompts)
    lookahead = {"num_speculative_tokens": 8, "budget": 8}
    with engine(llama, lookahead, max_num_batched_tokens=64) as llm:
        runner, worker = runner_of(llm), worker_of(llm)
        drafter_of(llm).max_step_nodes = max_nodes
        platform = SimpleNamespace(is_cpu=lambda: on_cpu)
        monkeypatch.setattr(dummy_runs, "current_platform", platform)
        with runner.warming_up():
            warmup_kernels(runner, worker.execute_model, worker.sample_tokens)
        assert max(grown) == largest_step
        assert not drafter_of(llm).counters.trees
        assert generate(llm, prompts) == vanilla


BY_STEPS = {"_convolve", "_mamba2", "_gated_delta", "_move_states", "_move_inputs"}
"""The kernels that the steps of vLLM's warm-up launch: their drafts branch (`WarmUpDrafts`)."""


def test_every_other_kernel_is_launched_at_start_up(monkeypatch):
    pytest.importorskip("triton")
    launches = record_launches(monkeypatch)
    for noun, module in ON_GPUS.items():
        monkeypatch.setitem(ON_CPUS, noun, module)
    for module, name in (
        (gpu_attention, "paged_attention"),
        (latent_attention, "latent_attention"),
    ):
        attend = getattr(module, name)
        monkeypatch.setattr(module, name, lambda call, impl="auto", by=attend: by(call, "triton"))
    monkeypatch.setattr(gpu_worker, "is_recurrent", lambda layer: layer == "recurrent")
    monkeypatch.setattr("vllm.v1.worker.gpu.buffer_utils.UvaBuffer", UvaBuffer)
    monkeypatch.setattr(torch.accelerator, "synchronize", lambda: None)
    runner: Any = object.__new__(gpu_worker.LookaheadGPUModelRunner)
    runner.drafter = SimpleNamespace(may_branch=True)
    speculation = SimpleNamespace(lookahead_options=LookaheadOptions(attention="triton"))
    runner.vllm_config = SimpleNamespace(speculative_config=speculation)
    case = PagedAttentionCase([random_tree(np.random.default_rng(0), 9)], [70])
    attention = test_gpu.layer_of(case)
    attention._k_scale = attention._v_scale = None
    cache = attention.kv_cache
    layers = {"a": "recurrent", "b": attention, "c": test_gpu.latent_layer()}
    runner.compilation_config = SimpleNamespace(static_forward_context=layers)
    runner.attn_groups = [[SimpleNamespace(layer_names=list(layers))]]
    movers = [object.__new__(RequestStates), runner.attention.mover([cache], attention)]
    runner._branching = NOTHING_BRANCHES._replace(movers=movers)
    runner.dtype, runner.device = torch.float32, torch.device("cpu")
    runner.decode_query_len, runner.vocab_size = 9, test_history.VOCAB
    runner.is_last_pp_rank = True
    step, sampler = test_history.random_step(1), test_node_history.vllm_sampler()
    test_node_history.fill(sampler, step)
    runner.rejection_sampler = SimpleNamespace(history=NodeHistory(sampler))
    shape = runner._shape = object.__new__(LateShape)
    table, shape._rows = test_place.random_case(0).table, test_place.stale_rows(1)
    shape._placer = Placer(table, shape._rows)
    shape.split = shape._with_slots = Split(np.zeros(99, np.int32), 7)
    shape._memory = SimpleNamespace(uva=lambda: torch.from_numpy(shape.split.packed))
    runner.compile_kernels()
    assert {name for name, own in launches.items() if not own.calls} == BY_STEPS
