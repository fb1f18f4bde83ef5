"""The kernels of logprobs, those of prompts included."""

from collections.abc import Iterator

import torch

from lookahead_vllm.engine.cpu_kernels.table import Array, Grid, kernel, replaces

ROWS = 32
"""Rows of logits at a time: a long prompt's, in several copies, would take gigabytes."""


def _parts(num_rows: int) -> Iterator[slice]:
    return (slice(first, first + ROWS) for first in range(0, num_rows, ROWS))


@replaces("gpu.sample.logprob._topk_log_softmax_kernel", of_tensors=True)
def log_softmax_of_ids(
    grid: Grid,
    out: torch.Tensor,
    logits: torch.Tensor,
    stride: int,
    ids: torch.Tensor,
    ids_stride: int,
    num_ids: int,
    vocab: int,
) -> None:
    for rows in _parts(len(logits)):
        values = logits[rows].float()
        values = values - values.amax(dim=1, keepdim=True)  # not in place: these may be the logits
        chosen = values.gather(1, ids[rows])
        out[rows] = chosen - values.exp_().sum(dim=1, keepdim=True).log()


@replaces("gpu.sample.logprob._ranks_kernel", of_tensors=True)
def count_at_least_as_likely(
    grid: Grid,
    ranks: torch.Tensor,
    logits: torch.Tensor,
    stride: int,
    ids: torch.Tensor,
    vocab: int,
    BLOCK_SIZE: int,
) -> None:
    """A token of -inf also counts what vLLM pads the vocabulary with."""
    num_padding = -vocab % BLOCK_SIZE
    for rows in _parts(len(logits)):
        own = logits[rows].gather(1, ids[rows, None].long())
        counts = (logits[rows] >= own).sum(dim=1)
        ranks[rows] = counts + num_padding * own[:, 0].isneginf()


@replaces("gpu.sample.logprob._fill_logprob_token_ids_kernel")
@kernel
def choose_ids(
    grid: Grid,
    ids: Array,
    ids_stride: int,
    is_valid: Array,
    valid_stride: int,
    sampled: Array,
    likeliest: Array,
    likeliest_stride: int,
    slots: Array,
    num_given: Array,
    given: Array,
    given_stride: int,
    NUM_TOPK: int,
) -> None:
    """The sampled token, then the request's own tokens or the most likely ones."""
    for row in range(grid[0]):
        slot = slots[row]
        ids[row * ids_stride] = sampled[row]
        is_valid[row * valid_stride] = True
        count = num_given[slot] if num_given[slot] > 0 else NUM_TOPK
        for i in range(count):
            if num_given[slot] > 0:
                ids[row * ids_stride + 1 + i] = given[slot * given_stride + i]
            else:
                ids[row * ids_stride + 1 + i] = likeliest[row * likeliest_stride + i]
            is_valid[row * valid_stride + 1 + i] = True


@replaces("gpu.sample.prompt_logprob._prompt_logprobs_token_ids_kernel")
@kernel
def shift_prompt(
    grid: Grid,
    ids: Array,
    starts: Array,
    slots: Array,
    num_computed: Array,
    tokens: Array,
    tokens_stride: int,
) -> None:
    for request in range(grid[0]):
        first = slots[request] * tokens_stride + num_computed[slots[request]] + 1
        for i in range(starts[request + 1] - starts[request]):
            # The row of the last token has no next one and is not used.
            ids[starts[request] + i] = tokens[min(first + i, tokens.size - 1)]
