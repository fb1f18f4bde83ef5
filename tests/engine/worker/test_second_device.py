"""The runner's part of a step gives the same result on a device that is not the CPU."""

from __future__ import annotations

from contextlib import nullcontext
from types import MethodType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from vllm import SamplingParams
from vllm.v1.sample.logits_processor import LogitsProcessors
from vllm.v1.sample.metadata import SamplingMetadata
from vllm.v1.sample.sampler import Sampler

from lookahead_vllm.draft.tree import DraftForest
from lookahead_vllm.engine.worker.draft_step import DraftStep
from lookahead_vllm.engine.worker.step_recorder import StepRecorder
from lookahead_vllm.engine.worker.v1.runner import LookaheadRunner
from lookahead_vllm.engine.worker.v1.sampler import NodeProcessors
from lookahead_vllm.verify.choices import top_choices
from lookahead_vllm.verify.gpu.paged_attention import paged_attention
from lookahead_vllm.verify.gpu.paged_batch import PagedBatch
from tests.support.attention_cases import PagedAttentionCase, random_tree
from tests.support.second_device import DEVICE, OtherDeviceTensor, other_device

VOCABULARY, REQUESTS = 40, 4
ROWS = np.array([0, 1, 3])
TREES = DraftForest.of([random_tree(np.random.default_rng(i), 5 + 3 * i) for i in range(len(ROWS))])
NUM_NODES = np.zeros(REQUESTS, np.int64)
NUM_NODES[ROWS] = TREES.sizes
STARTS = (np.cumsum(NUM_NODES + 1) - NUM_NODES - 1)[ROWS]
STEP = DraftStep(
    TREES, ROWS, STARTS, np.array([10, 20, 30]), np.ones(len(ROWS), np.bool_), np.zeros(3, np.int64)
)


def test_devices_cannot_be_mixed() -> None:
    with other_device() as device:
        numbers = torch.arange(6.0).to(device)
        numbers.view(2, 3)[1] = torch.tensor(7.0)
        assert numbers.device == device and numbers.cpu().tolist() == [0, 1, 2, 7, 7, 7]
        assert numbers[torch.tensor([1, 3])].tolist() == [1, 7]
        for mix in (
            lambda: numbers + torch.ones(6),
            lambda: numbers.index_put_((torch.tensor([1, 2]),), torch.ones(2)),
            lambda: torch.ones(6)[numbers.long()],
            lambda: torch.cat((numbers, torch.ones(1))),
        ):
            with pytest.raises(RuntimeError, match="on the same device"):
                mix()


def metadata_of(kind: str, device: Any) -> SamplingMetadata:
    def column(value: float) -> torch.Tensor:
        return torch.full((REQUESTS,), value).to(device)

    busy = kind == "everything"
    return SamplingMetadata(
        temperature=None if kind == "greedy" else column(0.01),
        all_greedy=kind == "greedy",
        all_random=kind != "greedy",
        top_p=column(0.9) if kind == "random" else None,
        top_k=column(5).int() if kind == "random" else None,
        generators={},
        max_num_logprobs=3 if busy else None,
        no_penalties=not busy,
        prompt_token_ids=torch.full((REQUESTS, 2), 5).to(device) if busy else None,
        frequency_penalties=column(0.5),
        presence_penalties=column(0.5),
        repetition_penalties=column(1.5),
        output_token_ids=[[7, 8]] * REQUESTS,
        allowed_token_ids_mask=(
            (torch.arange(VOCABULARY) % 7 == 0).expand(REQUESTS, -1).to(device) if busy else None
        ),
        bad_words_token_ids={1: [[3], [4, 5]]} if busy else {},
        logitsprocs=LogitsProcessors(),
        logprob_token_ids={3: [1, 2]} if busy else None,
    )


def sample(kind: str, logits: torch.Tensor, device: Any) -> tuple[list[Any], np.ndarray]:
    params = SamplingParams(frequency_penalty=0.5 if kind == "everything" else 0.0)
    requests = {
        str(i): SimpleNamespace(
            sampling_params=params, prompt_token_ids=[5, 5], output_token_ids=[7, 8]
        )
        for i in range(REQUESTS)
    }
    processors = SimpleNamespace(
        rows_are_alike=lambda *args: NodeProcessors.rows_are_alike(processors, *args),
        place=lambda nodes: LogitsProcessors(),
        _concerns=lambda params: False,
    )
    runner: Any = SimpleNamespace(
        requests=requests,
        input_batch=SimpleNamespace(
            req_ids=list(requests), sampling_metadata=metadata_of(kind, device)
        ),
        _node_processors=processors,
        _seeded_sampler=None,
        _sample_some=lambda *args: LookaheadRunner._sample_some(runner, *args),
        _draw=lambda *args: LookaheadRunner._draw(runner, *args),
        model_config=SimpleNamespace(max_model_len=100),
        sampler=Sampler(),
    )
    draw = runner.sampler.topk_topp_sampler
    draw.forward = draw.forward_native  # the CPU has one of its own
    torch.manual_seed(0)
    output, paths = LookaheadRunner._sample_trees(runner, logits.to(device), NUM_NODES, STEP)
    parts = [output.sampled_token_ids, *(output.logprobs_tensors or ())]
    assert all(part.device == torch.device(device) for part in parts if part is not None)
    return [part.tolist() for part in parts if part is not None], paths


@pytest.mark.parametrize("kind", ["greedy", "random", "everything"])
def test_trees_are_sampled_on_the_device(kind: str) -> None:
    logits = torch.randn(len(ROWS) + 1 + TREES.num_nodes, VOCABULARY)
    # Let some nodes be right.
    for root, tree in zip(STARTS, TREES, strict=True):
        logits[root, tree.tokens[0]] = 99
    here, paths = sample(kind, logits.clone(), "cpu")
    with other_device() as device:
        there, same_paths = sample(kind, logits.clone(), device)
    assert there == here and (same_paths == paths).all()
    if kind != "everything":
        assert (paths[:, 0] == 0).all()


def test_positions_and_moves_are_made_on_the_device() -> None:
    positions = torch.arange(100)
    mrope = torch.randint(100, (3, 100))
    moved: list[torch.Tensor] = []
    slots = torch.randperm(100)
    paths = np.array([[0, 2], [1, -1], [-1, -1]], np.int32)
    for device, scope in (("cpu", nullcontext()), (DEVICE, other_device())):
        with scope:
            table = SimpleNamespace(slot_mapping=SimpleNamespace(gpu=slots.to(device)))
            runner: Any = SimpleNamespace(
                device=torch.device(device),
                positions=positions.clone().to(device),
                uses_mrope=True,
                mrope_positions=SimpleNamespace(gpu=mrope.clone().to(device)),
                drafter=SimpleNamespace(recorder=StepRecorder()),
                _movers=[SimpleNamespace(move=lambda *ends: moved.extend(ends))],
                input_batch=SimpleNamespace(block_table=SimpleNamespace(block_tables=[table])),
            )
            runner._shift_mrope = MethodType(LookaheadRunner._shift_mrope, runner)
            LookaheadRunner._place(runner, STEP)
            LookaheadRunner._move_accepted(runner, STEP, paths)
            moved.extend((runner.positions, runner.mrope_positions.gpu))
    here, there = moved[:4], moved[4:]
    assert all(isinstance(tensor, OtherDeviceTensor) for tensor in there)
    assert [t.tolist() for t in there] == [t.tolist() for t in here]
    assert here[2][: STARTS[0] + 2].tolist() == [0, 11]
    assert (here[3] - mrope == here[2] - positions).all()


def test_choices_and_tree_attention_run_on_the_device() -> None:
    logits, rows = torch.randn(6, VOCABULARY), np.array([4, 0, 1])
    case = PagedAttentionCase(
        [random_tree(np.random.default_rng(1), 12)], [30], layout="heads first"
    )
    with other_device() as device:
        there = top_choices(logits.to(device), rows, 3)
        tensors = [case.query, case.key_cache, case.value_cache, case.output, case.block_table]
        arguments = [tensor.to(device) for tensor in tensors]
        paged_attention(
            *arguments, PagedBatch.build(case.batch, device), scale=case.scale, impl="torch"
        )
    here = top_choices(logits, rows, 3, impl="torch")
    assert (there.tokens == here.tokens).all() and (there.gaps == here.gaps).all()
    output, expected = arguments[3].cpu_tensor.double(), case.reference()
    is_tree = expected.isfinite().flatten(1).all(1)
    torch.testing.assert_close(output[is_tree], expected[is_tree], rtol=1e-5, atol=1e-5)
