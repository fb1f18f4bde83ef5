"""Random inputs for the kernels of vLLM's speculators, see `cases`."""

from types import SimpleNamespace
from typing import Any

import torch
from vllm.v1.worker.gpu.input_batch import InputBuffers
from vllm.v1.worker.gpu.spec_decode.standalone_ar import speculator as standalone
from vllm.v1.worker.gpu.spec_decode.target_dependent_ar import speculator as target_dependent

from tests.engine.cpu_kernels.cases import CPU, DTYPES, SLOTS, VOCAB, case, integers, step_of

REQUESTS = 6  # those of `step_of`
MOST = 9
"""More than the requests: the rest is padding."""
MAX_MODEL_LEN = 26

_AR = "gpu.spec_decode.target_dependent_ar.speculator."


def _batch(rng: torch.Generator) -> tuple[Any, torch.Tensor, torch.Tensor]:
    """A batch; the tokens that its requests emitted, and their rejected rows."""
    step = step_of(rng)
    lengths = step.starts.diff()
    rejected = (torch.rand(REQUESTS, generator=rng) * lengths).int()
    rows = int(step.starts[-1])
    places = torch.arange(rows) - step.starts[:-1].repeat_interleave(lengths)
    batch = SimpleNamespace(
        num_reqs=REQUESTS,
        num_tokens=rows,
        input_ids=integers(rng, 0, VOCAB, rows),
        positions=(step.num_computed[step.slots].repeat_interleave(lengths) + places).long(),
        idx_mapping=step.slots,
        query_start_loc=step.starts,
        query_start_loc_np=step.starts.numpy(),
        seq_lens=step.seq_lens,
    )
    return batch, integers(rng, 0, 3, REQUESTS), rejected


def _written(buffers: InputBuffers) -> list[torch.Tensor]:
    return [buffers.input_ids, buffers.positions, buffers.query_start_loc, buffers.seq_lens]


@case(_AR + "_prepare_prefill_inputs_kernel")
def first_pass(rng: torch.Generator) -> list[torch.Tensor]:
    batch, sampled, rejected = _batch(rng)
    buffers = InputBuffers(MOST, 99, CPU)
    last, step = torch.full((MOST,), 5), torch.tensor([3])
    tokens = integers(rng, 0, VOCAB, SLOTS, 1).long(), integers(rng, 0, VOCAB, SLOTS)
    target_dependent.prepare_prefill_inputs(
        last, step, buffers, batch, sampled, rejected, *tokens, MOST
    )
    return [last, step, *_written(buffers)]


@case(_AR + "_prepare_decode_inputs_kernel")
def second_pass(rng: torch.Generator) -> list[torch.Tensor]:
    batch, _, rejected = _batch(rng)
    buffers = InputBuffers(MOST, 99, CPU)
    buffers.positions[:] = integers(rng, 0, MAX_MODEL_LEN, 99)
    sources = integers(rng, 0, MAX_MODEL_LEN, MOST).long()
    tokens = integers(rng, 0, VOCAB, REQUESTS, 4).long()[:, 0]
    target_dependent.prepare_decode_inputs(
        tokens, batch.seq_lens, rejected, buffers, sources, MAX_MODEL_LEN, MOST
    )
    return [sources, *_written(buffers)]


@case(_AR + "_update_draft_inputs_kernel")
def further_passes(rng: torch.Generator) -> list[torch.Tensor]:
    buffers = InputBuffers(MOST, 99, CPU)
    buffers.positions[:] = integers(rng, 0, MAX_MODEL_LEN, 99)
    buffers.seq_lens[:] = integers(rng, 1, MAX_MODEL_LEN + 1, MOST)
    step = integers(rng, 0, 4).long()
    sources = integers(rng, 0, MAX_MODEL_LEN, MOST).long()
    found = []
    for dtype in DTYPES:
        drafted = torch.zeros(MOST, 4, dtype=torch.int64)
        states = torch.zeros(MOST, 33, dtype=dtype)
        target_dependent.update_draft_inputs(
            integers(rng, 0, VOCAB, REQUESTS).long(),
            step,
            torch.randn(MOST, 40, generator=rng).to(dtype)[:, :33],
            drafted,
            states,
            buffers,
            sources,
            REQUESTS,
            MAX_MODEL_LEN,
            4,
        )
        found += [drafted, states]
    return [*found, sources, *_written(buffers)]


@case("gpu.spec_decode.standalone_ar.speculator._prepare_prefill_inputs_kernel")
def first_pass_of_a_draft_model(rng: torch.Generator) -> list[torch.Tensor]:
    batch, _, rejected = _batch(rng)
    buffers = InputBuffers(MOST, 99, CPU)
    ids, positions = torch.zeros(99, dtype=torch.int32), torch.zeros(99, dtype=torch.int64)
    last = torch.full((MOST,), 5)
    tokens = integers(rng, 0, VOCAB, SLOTS, 1).long()
    total = standalone.prepare_prefill_inputs(
        buffers, batch, tokens, rejected, ids, positions, last, MOST, MAX_MODEL_LEN
    )
    return [ids[:total], positions[:total], last, buffers.query_start_loc, buffers.seq_lens]
