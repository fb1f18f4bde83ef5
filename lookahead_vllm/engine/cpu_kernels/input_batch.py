"""The kernels that prepare a step's inputs and commit its output.

They take what vLLM's kernels take. A *slot* is a request's row in the runner's state; `slots` has
those of the step's requests. Requests of a step have the rows `starts[i]` to `starts[i + 1]`, and
the logits `first_logits[i]` to `first_logits[i + 1]`.
"""

from typing import Any

from lookahead_vllm.engine.cpu_kernels.table import Array, Grid, kernel, replaces


@replaces("gpu.input_batch._prepare_prefill_inputs_kernel")
@kernel
def prepare_prefill_inputs(
    grid: Grid,
    input_ids: Array,
    next_tokens: Array,
    next_stride: int,
    num_next: int,
    slots: Array,
    starts: Array,
    tokens: Array,
    tokens_stride: int,
    prefill_lens: Array,
    num_computed: Array,
) -> None:
    for request in range(grid[0]):
        slot, start = slots[request], starts[request]
        length = starts[request + 1] - start
        end = prefill_lens[slot]
        if num_computed[slot] >= end:
            continue
        first = slot * tokens_stride + num_computed[slot]
        for i in range(length):
            input_ids[start + i] = tokens[first + i]
        for i in range(num_next):
            is_known = num_computed[slot] + length + i < end
            next_tokens[i * next_stride + slot] = tokens[first + length + i] if is_known else 0


@replaces("gpu.input_batch._prepare_pos_seq_lens_kernel")
@kernel
def prepare_positions(
    grid: Grid,
    positions: Array,
    seq_lens: Array,
    slots: Array,
    starts: Array,
    num_computed: Array,
    max_requests: int,
) -> None:
    num_requests = grid[0] - 1
    for request in range(num_requests):
        start, first = starts[request], num_computed[slots[request]]
        length = starts[request + 1] - start
        seq_lens[request] = first + length
        for i in range(length):
            positions[start + i] = first + i
    seq_lens[num_requests:max_requests] = 0


@replaces("gpu.input_batch._combine_sampled_and_draft_tokens_kernel")
@kernel
def combine_sampled_and_draft_tokens(
    grid: Grid,
    input_ids: Array,
    slots: Array,
    last_sampled: Array,
    starts: Array,
    seq_lens: Array,
    prefill_lens: Array,
    drafts: Array,
    drafts_stride: int,
    first_logits: Array,
    rows_of_logits: Array,
    NUM_NEW_SAMPLED_TOKENS: int = 1,
) -> None:
    for request in range(grid[0]):
        slot, end = slots[request], starts[request + 1]
        first = first_logits[request]
        num_logits = first_logits[request + 1] - first
        for i in range(num_logits):
            rows_of_logits[first + i] = end - num_logits + i
        if seq_lens[request] <= prefill_lens[slot]:
            continue
        is_past_prompt = seq_lens[request] - num_logits >= prefill_lens[slot]
        if NUM_NEW_SAMPLED_TOKENS > 0 and is_past_prompt:
            input_ids[end - num_logits] = last_sampled[slot]
        num_drafts = num_logits - NUM_NEW_SAMPLED_TOKENS
        for i in range(num_drafts):
            input_ids[end - num_drafts + i] = drafts[slot * drafts_stride + i]


@replaces("gpu.input_batch._expand_idx_mapping_kernel")
@kernel
def expand_slots(
    grid: Grid, slots: Array, expanded_slots: Array, offsets: Array, first_logits: Array
) -> None:
    for request in range(grid[0]):
        first = first_logits[request]
        for i in range(first_logits[request + 1] - first):
            expanded_slots[first + i] = slots[request]
            offsets[first + i] = i


@replaces("gpu.input_batch._get_num_sampled_and_rejected_kernel")
@kernel
def count_sampled_and_rejected(
    grid: Grid,
    num_sampled: Array,
    num_rejected: Array,
    seq_lens: Array,
    first_logits: Array,
    slots: Array,
    prefill_lens: Array,
) -> None:
    for request in range(grid[0]):
        if seq_lens[request] < prefill_lens[slots[request]]:  # a chunk of the prompt
            num_sampled[request] = 0
            num_rejected[request] = 0
        else:
            num_logits = first_logits[request + 1] - first_logits[request]
            num_rejected[request] = num_logits - num_sampled[request]


@replaces("gpu.input_batch._post_update_kernel")
@kernel
def commit(
    grid: Grid,
    slots: Array,
    num_computed: Array,
    last_sampled: Array,
    counts: Array | None,
    counts_stride: int,
    sampled: Array,
    sampled_stride: int,
    num_sampled: Array,
    num_rejected: Array,
    starts: Array | None,
    tokens: Array,
    tokens_stride: int,
    total_lens: Array,
    drafts: Any = None,
    kept_drafts: Any = None,
    num_drafts: int = 0,
) -> None:
    """The last three are of 0.33. Negative slots are skipped."""
    for row in range(grid[0]):
        slot, new = slots[row], num_sampled[row]
        if slot < 0:
            continue
        first = slot * tokens_stride + total_lens[slot]
        for i in range(new):
            token = sampled[row * sampled_stride + i]
            tokens[first + i] = token
            if counts is not None:
                counts[slot * counts_stride + token] += 1
        if new > 0:
            last_sampled[slot] = sampled[row * sampled_stride + new - 1]
            total_lens[slot] += new
        length = 0
        if starts is not None:
            length = starts[row + 1] - starts[row]
        num_computed[slot] += length - num_rejected[row]
        if drafts is not None and kept_drafts is not None:
            for i in range(num_drafts):
                kept_drafts[slot * num_drafts + i] = drafts[row * num_drafts + i]


@replaces("gpu.input_batch._post_update_num_computed_tokens_kernel")
@kernel
def count_computed(grid: Grid, slots: Array, num_computed: Array, starts: Array) -> None:
    for request in range(grid[0]):
        num_computed[slots[request]] += starts[request + 1] - starts[request]


@replaces("gpu.mm.rope._prepare_rope_positions_kernel")
@kernel
def prepare_rope_positions(
    grid: Grid,
    positions: Array,
    positions_stride: int,
    prompt_positions: Array,
    slot_stride: int,
    dim_stride: int,
    deltas: Array,
    slots: Array,
    starts: Array,
    prefill_lens: Array,
    num_computed: Array,
    NUM_DIMS: int = 3,
) -> None:
    for request in range(grid[0]):
        slot, start = slots[request], starts[request]
        first = num_computed[slot]
        for dim in range(NUM_DIMS):
            given = slot * slot_stride + dim * dim_stride + first
            for i in range(starts[request + 1] - start):
                at = dim * positions_stride + start + i
                if first < prefill_lens[slot]:
                    positions[at] = prompt_positions[given + i]
                else:
                    positions[at] = first + i + deltas[slot]


@replaces("gpu.model_states.mamba_hybrid._scatter_num_accepted_kernel")
@kernel
def scatter_num_accepted(grid: Grid, slots: Array, num_sampled: Array, accepted: Array) -> None:
    for request in range(grid[0]):
        if slots[request] >= 0:
            accepted[slots[request]] = max(num_sampled[request], 1)


@replaces("gpu.model_states.mamba_hybrid._fill_num_accepted_kernel")
@kernel
def fill_num_accepted(grid: Grid, slots: Array, accepted: Array, num_sampled: int) -> None:
    for request in range(grid[0]):
        if slots[request] >= 0:
            accepted[slots[request]] = num_sampled
