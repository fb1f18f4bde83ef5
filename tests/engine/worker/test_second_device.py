"""The runner's part of a step gives the same result on a device that is not the CPU."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from vllm.v1.sample.logits_processor import LogitsProcessors
from vllm.v1.sample.metadata import SamplingMetadata

from lookahead_vllm.draft.tree import DraftForest
from lookahead_vllm.engine.worker.draft_step import DraftStep
from lookahead_vllm.verify.choices import top_choices
from lookahead_vllm.verify.gpu.paged_attention import paged_attention
from lookahead_vllm.verify.gpu.paged_batch import PagedBatch
from tests.support.attention_cases import PagedAttentionCase, random_tree
from tests.support.second_device import other_device

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
