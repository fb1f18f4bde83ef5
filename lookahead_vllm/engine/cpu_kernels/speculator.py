"""The kernels with which vLLM's speculators prepare their inputs."""

from torch import Tensor

from lookahead_vllm.engine.cpu_kernels.table import Array, Grid, kernel, replaces

_AR = "gpu.spec_decode.target_dependent_ar.speculator."


@replaces(_AR + "_prepare_prefill_inputs_kernel")
@kernel
def prepare_prefill_inputs(
    grid: Grid,
    last_token_indices: Array,
    current_step: Array,
    draft_ids: Array,
    draft_positions: Array,
    draft_starts: Array,
    draft_seq_lens: Array,
    ids: Array,
    positions: Array,
    slots: Array,
    last_sampled: Array,
    next_prefill_tokens: Array,
    num_sampled: Array,
    num_rejected: Array,
    starts: Array,
    seq_lens: Array,
    max_requests: int,
) -> None:
    n = grid[0]
    for request in range(n):
        slot, start = slots[request], starts[request]
        length = starts[request + 1] - start - num_rejected[request]
        if num_sampled[request] > 0:
            token = last_sampled[slot]
        else:
            token = next_prefill_tokens[slot]
        for i in range(1, length):
            draft_ids[start + i - 1] = ids[start + i]
        last_token_indices[request] = start + length - 1
        draft_ids[start + length - 1] = token
        for i in range(length):
            draft_positions[start + i] = positions[start + i]
        draft_starts[request] = start
        draft_seq_lens[request] = seq_lens[request]
    current_step[0] = 0
    draft_starts[n : max_requests + 1] = starts[n]
    draft_seq_lens[n:max_requests] = 0
    last_token_indices[n:max_requests] = 0


@replaces(_AR + "_prepare_decode_inputs_kernel")
@kernel
def prepare_decode_inputs(
    grid: Grid,
    tokens: Array,
    tokens_stride: int,
    target_seq_lens: Array,
    num_rejected: Array,
    ids: Array,
    positions: Array,
    sample_positions: Array,
    starts: Array,
    seq_lens: Array,
    max_model_len: int,
    max_requests: int,
    ADVANCE_DRAFT_POSITIONS: bool = True,
) -> None:
    n = grid[0] - 1
    for i in range(max_requests + 1):
        starts[i] = min(i, n)
    seq_lens[n:max_requests] = 0
    for request in range(n):
        ids[request] = tokens[request * tokens_stride]
        sample_positions[request] += 1
        length = target_seq_lens[request] - num_rejected[request]
        if ADVANCE_DRAFT_POSITIONS:
            positions[request] = min(positions[request] + 1, max_model_len - 1)
            length = min(length + 1, max_model_len)
        seq_lens[request] = length


@replaces(_AR + "_update_draft_inputs_kernel", of_tensors=True)
def update_draft_inputs(
    grid: Grid,
    out_tokens: Tensor,
    out_stride: int,
    next_hidden: Tensor,
    next_hidden_stride: int,
    ids: Tensor,
    positions: Tensor,
    sample_positions: Tensor,
    seq_lens: Tensor,
    tokens: Tensor,
    current_step: Tensor,
    hidden: Tensor,
    hidden_stride: int,
    hidden_size: int,
    max_model_len: int,
    num_steps: int,
    ADVANCE_DRAFT_POSITIONS: bool = True,
) -> None:
    n, step = grid[0], int(current_step)
    out_tokens[:n, step] = tokens[:n]
    if step >= num_steps - 1:
        return
    sample_positions[:n] += 1
    ids[:n] = tokens[:n]
    next_hidden[:n, :hidden_size] = hidden[:n, :hidden_size]
    if ADVANCE_DRAFT_POSITIONS:
        positions[:n] = (positions[:n] + 1).clamp(max=max_model_len - 1)
        seq_lens[:n] = (seq_lens[:n] + 1).clamp(max=max_model_len)


@replaces("gpu.spec_decode.standalone_ar.speculator._prepare_prefill_inputs_kernel")
@kernel
def prepare_expanded_inputs(
    grid: Grid,
    ids: Array,
    positions: Array,
    last_sampled: Array,
    slots: Array,
    out_ids: Array,
    out_positions: Array,
    last_token_indices: Array,
    out_starts: Array,
    out_seq_lens: Array,
    starts: Array,
    seq_lens: Array,
    num_rejected: Array,
    max_requests: int,
    max_model_len: int,
) -> None:
    n = grid[0]
    total = 0
    for request in range(n):
        start, end = starts[request], starts[request + 1]
        valid = end - start - num_rejected[request]
        first, out = positions[start], start + request
        for j in range(end - start + 1):
            token = 0
            if j < valid:
                token = ids[start + j]
            elif j == valid:
                token = last_sampled[slots[request]]
            out_ids[out + j] = token
            out_positions[out + j] = min(first + j, max_model_len - 1)
        last_token_indices[request] = out + valid
        out_starts[request] = out
        out_seq_lens[request] = min(seq_lens[request] + 1, max_model_len)
        total = out + end - start + 1
    out_starts[n : max_requests + 1] = total
    out_seq_lens[n:max_requests] = 0
    last_token_indices[n:max_requests] = 0
