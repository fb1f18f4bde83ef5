"""Random inputs for each kernel of the table; those of the sampler are in `logit_cases`.

A case calls vLLM's function that launches the kernel and returns the tensors that the kernel
writes. The same generator state gives the same inputs.
"""

from collections.abc import Callable
from inspect import signature
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from vllm.v1.worker import mamba_utils, utils
from vllm.v1.worker.cpu import shm  # noqa: F401  first: it replaces what the others import
from vllm.v1.worker.gpu import block_table, buffer_utils, input_batch
from vllm.v1.worker.gpu.mm import rope
from vllm.v1.worker.gpu.model_states import mamba_hybrid, prompt_embeds

Case = Callable[[torch.Generator], list[torch.Tensor]]
CASES: dict[str, Case] = {}
"""By kernel, as in `table.KERNELS`."""

HAS_WINDOWS = "sliding_window_reach" in signature(block_table.BlockTables).parameters
TAKES_DRAFTS = "draft_tokens" in signature(input_batch.post_update).parameters
"""What 0.33 has and 0.32 has not."""

SLOTS, LENGTH, VOCAB = 8, 64, 2500  # more than two blocks of the sampling kernel
CPU = torch.device("cpu")
DTYPES = torch.float32, torch.bfloat16, torch.float16
"""Of logits and hidden states."""


def case(kernel: str) -> Callable[[Case], Case]:
    def register(function: Case) -> Case:
        CASES[kernel] = function
        return function

    return register


def integers(rng: torch.Generator, low: int, high: int, *shape: int) -> torch.Tensor:
    """int32 of [low, high)"""
    return torch.randint(low, high, shape, generator=rng, dtype=torch.int32)


def choice(rng: torch.Generator, values: list[float], size: int) -> torch.Tensor:
    """float32 [size]"""
    return torch.tensor(values)[torch.randint(len(values), (size,), generator=rng)]


def offsets_of(lengths: torch.Tensor) -> torch.Tensor:
    """int32 [n + 1]: where each of `n` ranges begins, and the end of the last."""
    return torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)]).int()


def logits_of(rng: torch.Generator, rows: int) -> torch.Tensor:
    """float32 [rows, VOCAB], rows of a wider tensor, as after a padded projection."""
    logits = torch.randn(rows, VOCAB + 12, generator=rng) * 6
    logits[:, 5::97] = -torch.inf
    return logits[:, :VOCAB]


class Step(NamedTuple):
    """Requests of a step: chunks of prompts, resumed texts, and answers with draft tokens."""

    slots: torch.Tensor
    starts: torch.Tensor
    first_logits: torch.Tensor
    tokens: torch.Tensor
    prompt_lens: torch.Tensor
    prefill_lens: torch.Tensor
    total_lens: torch.Tensor
    num_computed: torch.Tensor
    seq_lens: torch.Tensor
    input_ids: torch.Tensor
    expanded_slots: torch.Tensor
    offsets: torch.Tensor
    """The last three have a row for each row of logits."""


def step_of(rng: torch.Generator, vocab: int = VOCAB) -> Step:
    slots = torch.randperm(SLOTS, generator=rng)[:6].int()
    prompt_lens = integers(rng, 4, 20, SLOTS)
    prefill_lens = prompt_lens + integers(rng, 0, 2, SLOTS) * integers(rng, 1, 6, SLOTS)
    is_prefill = integers(rng, 0, 2, SLOTS).bool()
    total_lens = torch.where(is_prefill, prefill_lens, prefill_lens + integers(rng, 1, 9, SLOTS))
    num_computed = torch.where(is_prefill, prefill_lens // 2, total_lens - 1)
    num_drafts = torch.where(is_prefill, 0, integers(rng, 0, 4, SLOTS))[slots]
    chunks = torch.minimum(integers(rng, 1, 12, SLOTS), prefill_lens - num_computed)
    lengths = torch.where(is_prefill[slots], chunks[slots], 1 + num_drafts)
    first_logits = offsets_of(1 + num_drafts)
    rows = int(first_logits[-1])
    return Step(
        slots,
        offsets_of(lengths),
        first_logits,
        integers(rng, 0, vocab, SLOTS, LENGTH),
        prompt_lens,
        prefill_lens,
        total_lens,
        num_computed,
        num_computed[slots] + lengths,
        integers(rng, 0, vocab, rows),
        slots.repeat_interleave(1 + num_drafts),
        (torch.arange(rows) - first_logits[:-1].repeat_interleave(1 + num_drafts)).int(),
    )


# ---- inputs and output of a step -----------------------------------------------------------------


@case("gpu.input_batch._prepare_prefill_inputs_kernel")
def prepare_prefill_inputs(rng: torch.Generator) -> list[torch.Tensor]:
    step = step_of(rng)
    input_ids, following = integers(rng, 0, 9, 99), integers(rng, 0, 9, 3, SLOTS)
    texts = step.slots, step.starts, step.tokens, step.prefill_lens, step.num_computed
    input_batch.prepare_prefill_inputs(input_ids, following, *texts)
    return [input_ids, following]


@case("gpu.input_batch._prepare_pos_seq_lens_kernel")
def prepare_positions(rng: torch.Generator) -> list[torch.Tensor]:
    step = step_of(rng)
    positions, seq_lens = integers(rng, 0, 9, 99).long(), integers(rng, 0, 9, SLOTS)
    input_batch.prepare_pos_seq_lens(
        step.slots, step.starts, step.num_computed, positions, seq_lens
    )
    return [positions, seq_lens]


@case("gpu.input_batch._combine_sampled_and_draft_tokens_kernel")
def combine_sampled_and_draft_tokens(rng: torch.Generator) -> list[torch.Tensor]:
    step = step_of(rng)
    input_ids = integers(rng, 0, 9, 99)
    rows = input_batch.combine_sampled_and_draft_tokens(
        input_ids,
        step.slots,
        integers(rng, 0, VOCAB, SLOTS, 1).long(),
        step.starts,
        step.prefill_lens[step.slots] + integers(rng, -1, 4, 6),
        step.prefill_lens,
        integers(rng, 0, VOCAB, SLOTS, 4).long(),
        step.first_logits,
        int(step.first_logits[-1]),
    )
    return [input_ids, rows]


@case("gpu.input_batch._expand_idx_mapping_kernel")
def expand_slots(rng: torch.Generator) -> list[torch.Tensor]:
    step = step_of(rng)
    rows = step.offsets.shape[0]
    return list(input_batch.expand_idx_mapping(step.slots, rows, step.first_logits, 5))


@case("gpu.input_batch._get_num_sampled_and_rejected_kernel")
def count_sampled_and_rejected(rng: torch.Generator) -> list[torch.Tensor]:
    step = step_of(rng)
    texts = step.seq_lens, step.first_logits, step.slots, step.prefill_lens
    return list(input_batch.get_num_sampled_and_rejected(torch.ones_like(step.slots), *texts))


@case("gpu.input_batch._post_update_kernel")
def commit(rng: torch.Generator) -> list[torch.Tensor]:
    step = step_of(rng)
    step.slots[2] = -1
    last_sampled = integers(rng, 0, VOCAB, SLOTS, 1).long()
    counts = integers(rng, 0, 3, SLOTS, VOCAB)
    sampled, num_sampled = integers(rng, 0, VOCAB, 6, 5).long(), integers(rng, 0, 6, 6)
    drafts = integers(rng, 0, VOCAB, SLOTS, 4).long()
    new = {"draft_tokens": drafts[:6] + 1, "draft_tokens_out": drafts} if TAKES_DRAFTS else {}
    for given, starts in ((counts, step.starts), (None, None)):
        input_batch.post_update(
            step.slots,
            step.num_computed,
            last_sampled,
            given,
            sampled,
            num_sampled,
            integers(rng, 0, 3, 6),
            starts,
            step.tokens,
            step.total_lens,
            **new,
        )
    return [step.num_computed, last_sampled, counts, step.tokens, step.total_lens, drafts]


@case("gpu.input_batch._post_update_num_computed_tokens_kernel")
def count_computed(rng: torch.Generator) -> list[torch.Tensor]:
    step = step_of(rng)
    input_batch.post_update_num_computed_tokens(step.slots, step.num_computed, step.starts)
    return [step.num_computed]


@case("gpu.mm.rope._prepare_rope_positions_kernel")
def prepare_rope_positions(rng: torch.Generator) -> list[torch.Tensor]:
    step = step_of(rng)
    state = rope.RopeState(3, SLOTS, 99, LENGTH, CPU)
    state.prefill_positions.gpu.copy_(integers(rng, 0, 50, 3 * SLOTS, LENGTH))
    state.prefill_delta.gpu.copy_(integers(rng, -3, 9, SLOTS))
    state.prepare_positions(step.slots, step.starts, step.prefill_lens, step.num_computed)
    return [state.positions]


# ---- block tables --------------------------------------------------------------------------------


@case("gpu.buffer_utils._apply_write_kernel")
def apply_writes(rng: torch.Generator) -> list[torch.Tensor]:
    whole = buffer_utils.StagedWriteTensor((SLOTS, 3000), torch.float32, CPU)
    groups = [buffer_utils.StagedWriteTensor((SLOTS, 30 + g), torch.int32, CPU) for g in range(3)]
    whole.stage_write(5, 7, torch.randn(2500, generator=rng).tolist())
    whole.stage_write_elem(2, 4)
    for _ in range(7):
        row, start, size = integers(rng, 1, 8, 3).tolist()
        whole.stage_write(row, start, torch.randn(size, generator=rng).tolist())
        group = groups[row % 2 * 2]
        group.stage_write(row, start, integers(rng, 0, 99, size).tolist())
    whole.apply_write()
    writer = buffer_utils.FusedStagedWriter(CPU, 99)
    addresses = torch.tensor([g.gpu.data_ptr() for g in groups], dtype=torch.uint64)
    writer.apply(groups, addresses, torch.tensor([g.gpu.stride(0) for g in groups]))
    return [whole.gpu, *(group.gpu for group in groups)]


def tables_of(rng: torch.Generator) -> block_table.BlockTables:
    """Two groups of blocks, of 4 and 8 tokens; the third has none. 0.33 has sliding windows."""
    windows = {"sliding_window_reach": [9, 0, 3]} if HAS_WINDOWS else {}
    tables = block_table.BlockTables(
        [4, 8, 4], SLOTS, 99, [16, 9, 5], CPU, slot_mapping_enabled=[True, True, False], **windows
    )
    for table in tables.block_tables:
        table.gpu.copy_(integers(rng, 0, 500, *table.gpu.shape))
    for target in tables.input_block_tables:
        target.copy_(integers(rng, 500, 900, *target.shape))
    tables.num_blocks.gpu.copy_(integers(rng, 0, 6, 3, SLOTS))
    return tables


@case("gpu.block_table._gather_block_tables_kernel")
def gather_block_tables(rng: torch.Generator) -> list[torch.Tensor]:
    tables, step = tables_of(rng), step_of(rng)
    windows = {"num_computed_tokens": step.num_computed} if HAS_WINDOWS else {}
    tables.gather_block_tables(step.slots, 7, **windows)
    return tables.input_block_tables


@case("gpu.block_table._compute_slot_mappings_kernel")
def compute_slot_mappings(rng: torch.Generator) -> list[torch.Tensor]:
    tables, step = tables_of(rng), step_of(rng)
    positions = integers(rng, 0, LENGTH, 99).long()
    step.slots[3] = -1
    tables.compute_slot_mappings(step.slots, step.starts, positions, 96)
    return [tables.slot_mappings]


@case("utils._zero_kv_blocks_kernel")
def zero_blocks(rng: torch.Generator) -> list[torch.Tensor]:
    caches = [torch.randn(SLOTS, 2, size, generator=rng) for size in (40, 1100)]
    pages = [cache[:, 0] for cache in caches]
    words = torch.tensor([[page.stride(0), page.shape[1]] for page in pages])
    utils._zero_kv_blocks_kernel[3, 2, 2](
        torch.tensor([page.data_ptr() for page in pages], dtype=torch.uint64),
        words[:, 0].contiguous(),
        words[:, 1].contiguous(),
        integers(rng, 0, SLOTS, 3).long(),
        BLOCK_SIZE=1024,
    )
    return caches


# ---- recurrent layers ----------------------------------------------------------------------------


@case("gpu.model_states.mamba_hybrid._scatter_num_accepted_kernel")
def scatter_num_accepted(rng: torch.Generator) -> list[torch.Tensor]:
    accepted = integers(rng, 1, 9, SLOTS)
    slots = torch.randperm(SLOTS, generator=rng)[:6].int()
    slots[2] = -1
    mamba_hybrid._scatter_num_accepted_kernel[(6,)](slots, integers(rng, 0, 9, 6), accepted)
    return [accepted]


@case("gpu.model_states.mamba_hybrid._fill_num_accepted_kernel")
def fill_num_accepted(rng: torch.Generator) -> list[torch.Tensor]:
    accepted = integers(rng, 1, 9, SLOTS)
    slots = torch.randperm(SLOTS, generator=rng)[:6].int()
    slots[2] = -1
    mamba_hybrid._fill_num_accepted_kernel[(6,)](slots, accepted, 3)
    return [accepted]


@case("gpu.model_states.mamba_hybrid.preprocess_mamba_align_fused_kernel")
def choose_columns(rng: torch.Generator) -> list[torch.Tensor]:
    slots = torch.randperm(SLOTS, generator=rng)[:6].int()
    columns, accepted = integers(rng, -1, 4, SLOTS), integers(rng, 0, 9, SLOTS)
    sources, offsets = integers(rng, 0, 9, 2, SLOTS).unbind()
    mamba_hybrid.preprocess_mamba_align_fused_kernel[(1,)](
        slots, columns, integers(rng, 0, 50, SLOTS), offsets_of(integers(rng, 1, 9, 6)), accepted,
        sources, offsets, 6, BLOCK_SIZE=256, MAMBA_BLOCK_SIZE=16,
    )  # fmt: skip
    return [columns, accepted, sources, offsets]


def _states(rng: torch.Generator, channels_first: bool) -> tuple[list[torch.Tensor], list[Any]]:
    """Windows of 5 inputs and states of two groups of layers; what the copying kernels get."""
    window = (24, 5) if channels_first else (5, 24)
    caches = [torch.randn(99, 2, *shape, generator=rng)[:, 1] for shape in (window, (3, 70)) * 2]
    blocks = torch.randperm(98, generator=rng)[:96].int() + 1
    tables = list(blocks.view(2, SLOTS, 6).unbind())
    inputs = [cache.shape[2 if channels_first else 1] for cache in caches]
    is_window = torch.tensor([1, 0, 1, 0])
    sizes = [cache[0].numel() for cache in caches]
    metadata = [
        torch.tensor([table.data_ptr() for table in tables]),
        tables[0].stride(0),
        torch.tensor([cache.data_ptr() for cache in caches]),
        torch.tensor([cache.stride(0) * 4 for cache in caches]),
        torch.full((4,), 4, dtype=torch.int32),
        torch.where(is_window > 0, 1 if channels_first else 24, torch.tensor(sizes)),
        (torch.tensor(inputs) * is_window).int(),
        torch.tensor([0, 0, 1, 1], dtype=torch.int32),
        (24 * channels_first * is_window).int(),
        5 * 4 * channels_first * is_window,
    ]
    return [*caches, *tables], metadata


@case("mamba_utils.precopy_mamba_align_fused_kernel")
def move_to_columns(rng: torch.Generator) -> list[torch.Tensor]:
    slots, written = torch.randperm(SLOTS, generator=rng)[:6].int(), []
    slots[2] = -1
    for channels_first in (False, True):
        kept, metadata = _states(rng, channels_first)
        columns, sources, offsets = integers(rng, 0, 4, 3, SLOTS).unbind()
        sources[slots[0]], offsets = -1, offsets.clamp(max=2)
        mamba_utils.precopy_mamba_align_fused_kernel[(6, 4, 1)](
            columns, sources, offsets, *metadata, slots, 6, COPY_BLOCK_SIZE=64,
            CONV_STATE_DIM_FIRST=channels_first, HAS_IDX_MAPPING=True,
        )  # fmt: skip
        written += kept
    return written


@case("mamba_utils.postprocess_mamba_fused_kernel")
def keep_at_block_ends(rng: torch.Generator) -> list[torch.Tensor]:
    slots, written = torch.randperm(SLOTS, generator=rng)[:6].int(), []
    slots[2] = -1
    for channels_first in (False, True):
        kept, metadata = _states(rng, channels_first)
        accepted, computed = integers(rng, 1, 4, SLOTS), integers(rng, 15, 36, SLOTS)
        columns = (computed - accepted + integers(rng, 0, 4, SLOTS)) // 16
        out = accepted.clone()
        mamba_utils.postprocess_mamba_fused_kernel[(6, 4, 1)](
            accepted, columns, None, computed, None, *metadata, out, slots, 6, block_size=16,
            COPY_BLOCK_SIZE=64, CONV_STATE_DIM_FIRST=channels_first, HAS_IDX_MAPPING=True,
            PRECOMPUTED_NEW_COMPUTED=True,
        )  # fmt: skip
        written += [*kept, out]
    return written


@case("gpu.model_states.prompt_embeds._apply_prompt_embeds_kernel")
def apply_prompt_embeds(rng: torch.Generator) -> list[torch.Tensor]:
    step, width = step_of(rng), 48
    state = prompt_embeds.PromptEmbedsState(SLOTS, width, torch.float32, CPU)
    sources = [torch.randn(LENGTH, width, generator=rng) for _ in range(SLOTS)]
    masks = [integers(rng, 0, 2, LENGTH).to(torch.uint8) for _ in range(SLOTS)]
    state.gpu_tensors = {str(i): (sources[i], masks[i]) for i in range(SLOTS)}
    state.embeds_ptrs.gpu.copy_(torch.tensor([s.data_ptr() for s in sources], dtype=torch.uint64))
    addresses = [mask.data_ptr() if i % 3 else 0 for i, mask in enumerate(masks)]
    state.mask_ptrs.gpu.copy_(torch.tensor(addresses, dtype=torch.uint64))
    state.embeds_lens.gpu.copy_(integers(rng, 0, 2, SLOTS) * step.prompt_lens)
    target = torch.randn(99, width, generator=rng)
    batch = SimpleNamespace(
        num_reqs=6,
        num_scheduled_tokens=step.starts.diff().numpy(),
        idx_mapping=step.slots,
        query_start_loc=step.starts,
    )
    state.apply(batch, step.num_computed, target)
    return [target]
