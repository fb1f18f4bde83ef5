"""Random inputs for each kernel that has a stand-in.

A case calls vLLM's function that launches the kernel and returns the tensors that the kernel
writes. The same generator state gives the same inputs.
"""

from __future__ import annotations

from collections.abc import Callable
from inspect import signature
from types import SimpleNamespace
from typing import NamedTuple

import torch
from vllm.v1.worker import utils
from vllm.v1.worker.cpu import shm  # noqa: F401  first: it replaces what the others import
from vllm.v1.worker.gpu import block_table, buffer_utils, input_batch, structured_outputs
from vllm.v1.worker.gpu.mm import rope
from vllm.v1.worker.gpu.model_states import mamba_hybrid, prompt_embeds
from vllm.v1.worker.gpu.sample import (
    bad_words,
    gumbel,
    logit_bias,
    logprob,
    min_p,
    penalties,
    prompt_logprob,
    thinking_budget,
)

Case = Callable[[torch.Generator], list[torch.Tensor]]
CASES: dict[str, Case] = {}
"""By kernel, as in `STAND_INS`."""

HAS_WINDOWS = "sliding_window_reach" in signature(block_table.BlockTables).parameters
TAKES_DRAFTS = "draft_tokens" in signature(input_batch.post_update).parameters
"""What 0.33 has and 0.32 has not."""

SLOTS, LENGTH, VOCAB = 8, 64, 2500  # more than two blocks of the sampling kernel
CPU = torch.device("cpu")


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


# ---- logits --------------------------------------------------------------------------------------


@case("gpu.sample.penalties._penalties_kernel")
def apply_penalties(rng: torch.Generator) -> list[torch.Tensor]:
    step = step_of(rng)
    logits = logits_of(rng, step.offsets.shape[0])
    counts = integers(rng, 0, 3, SLOTS, VOCAB)
    penalties.apply_penalties(
        logits,
        step.expanded_slots,
        step.input_ids,
        step.offsets,
        choice(rng, [1.0, 1.3, 0.7], SLOTS),
        choice(rng, [0.0, 0.4, -0.3], SLOTS),
        choice(rng, [0.0, 0.6], SLOTS),
        integers(rng, -(2**31), 2**31 - 1, SLOTS, (VOCAB + 31) // 32),
        counts,
    )
    return [logits, counts]


@case("gpu.sample.penalties._bincount_kernel")
def count_tokens(rng: torch.Generator) -> list[torch.Tensor]:
    step = step_of(rng, vocab=100)
    bits, counts = integers(rng, 0, 9, SLOTS, 4), integers(rng, 0, 9, SLOTS, 100)
    lens = step.prompt_lens, step.prefill_lens
    penalties.bincount(step.slots, step.tokens, *lens, bits, counts, int(lens[1].max()))
    return [bits, counts]


@case("gpu.sample.logit_bias._bias_kernel")
def apply_biases(rng: torch.Generator) -> list[torch.Tensor]:
    step = step_of(rng)
    results = []
    for checks in (False, True):
        logits = logits_of(rng, step.offsets.shape[0])
        distinct = torch.stack([torch.randperm(VOCAB, generator=rng)[:9] for _ in range(SLOTS)])
        stops = distinct[:, :4].int().contiguous()
        if checks:  # rows in which only stop tokens are possible
            kept = logits.gather(1, stops[step.expanded_slots].long())
            logits[::2] = -torch.inf
            logits.scatter_(1, stops[step.expanded_slots].long(), kept)
        logit_bias.apply_logit_bias(
            logits,
            step.expanded_slots,
            integers(rng, 0, 30, step.offsets.shape[0]).long(),
            integers(rng, 0, 2, SLOTS) * integers(rng, 1, 9, SLOTS) * (not checks),
            distinct.int(),
            integers(rng, 0, 9, SLOTS),
            distinct.flip(1).int().contiguous(),
            torch.randn(SLOTS, 9, generator=rng),
            integers(rng, 0, 40, SLOTS),
            integers(rng, 0, 5, SLOTS),
            integers(rng, 0, 2, SLOTS),
            stops,
            checks,
        )
        results.append(logits)
    return results


@case("gpu.sample.bad_words._bad_words_kernel")
def forbid_bad_words(rng: torch.Generator) -> list[torch.Tensor]:
    step = step_of(rng, vocab=3)
    logits = torch.randn(step.offsets.shape[0], 40, generator=rng)
    lengths = integers(rng, 1, 5, SLOTS, 9)
    starts = torch.zeros(SLOTS, 10, dtype=torch.int32)
    starts[:, 1:] = lengths.cumsum(1)
    bad_words.apply_bad_words(
        logits,
        step.expanded_slots,
        integers(rng, 0, 3, SLOTS, 60),
        starts,
        integers(rng, 0, 10, SLOTS),
        step.tokens,
        step.prompt_lens,
        step.total_lens,
        step.input_ids,
        step.offsets,
        9,
    )
    return [logits]


@case("gpu.structured_outputs._apply_grammar_bitmask_kernel")
def apply_grammar(rng: torch.Generator) -> list[torch.Tensor]:
    """Launched as in 0.33: four masks for each request, with or without that many rows."""
    step = step_of(rng)
    places = torch.cat([torch.arange(4) + 4 * r for r in (0, 2, 5)]).int()
    masks = integers(rng, -(2**31), 2**31 - 1, 12, (VOCAB + 31) // 32)
    masks[:, ::3] = -1
    results = []
    for dtype in (torch.float32, torch.bfloat16):
        logits = logits_of(rng, step.offsets.shape[0]).to(dtype)
        structured_outputs._apply_grammar_bitmask_kernel[12, 1](
            logits,
            logits.stride(0),
            places,
            step.first_logits,
            masks,
            masks.stride(0),
            VOCAB,
            MASK_STRIDE=4,
            BLOCK_SIZE=8192,
        )
        results.append(logits)
    return results


@case("gpu.sample.thinking_budget._update_committed_marker_cache_kernel")
@case("gpu.sample.thinking_budget._thinking_budget_kernel")
def spend_thinking_budgets(rng: torch.Generator) -> list[torch.Tensor]:
    """Two steps, the second with longer texts, or shorter ones after a preemption."""
    step = step_of(rng, vocab=4)
    budgets = integers(rng, -1, 6, SLOTS)
    start, end, forced = (integers(rng, 0, 4, n) for n in integers(rng, 1, 4, 3).tolist())
    end = start if rng.initial_seed() % 3 == 2 else end
    state = [torch.full((SLOTS,), start, dtype=torch.int32) for start in (-1, -1, 0)]
    results = []
    for total_lens in (step.total_lens, step.total_lens + integers(rng, -2, 4, SLOTS)):
        logits = torch.randn(step.offsets.shape[0], 4, generator=rng)
        thinking_budget.apply_thinking_budget(
            logits,
            step.slots,
            step.expanded_slots,
            budgets,
            step.tokens,
            total_lens,
            step.input_ids,
            step.offsets,
            *state,
            start,
            end,
            forced,
        )
        results.append(logits)
    return [*results, *state]


# ---- draws and logprobs --------------------------------------------------------------------------


@case("gpu.sample.gumbel._temperature_kernel")
def apply_temperature(rng: torch.Generator) -> list[torch.Tensor]:
    logits, slots = logits_of(rng, 7), integers(rng, 0, SLOTS, 7)
    gumbel.apply_temperature(logits, slots, choice(rng, [0.0, 1.0, 0.7, 1.9], SLOTS))
    return [logits]


@case("gpu.sample.min_p._min_p_kernel")
def apply_min_p(rng: torch.Generator) -> list[torch.Tensor]:
    logits = logits_of(rng, 7)
    min_p.apply_min_p(logits, integers(rng, 0, SLOTS, 7), choice(rng, [0.0, 0.1, 0.9], SLOTS))
    return [logits]


@case("gpu.sample.gumbel._gumbel_sample_kernel")
def sample_with_noise(rng: torch.Generator) -> list[torch.Tensor]:
    """Greedy and random rows, of float32 and bfloat16; some rows have equal logits."""
    results = []
    for dtype in (torch.float32, torch.bfloat16):
        logits = logits_of(rng, 9).to(dtype)
        logits[3:5] = 0
        slots = integers(rng, 0, SLOTS, 9)
        slots[8] = -1
        sampled = gumbel.gumbel_sample(
            logits,
            slots,
            choice(rng, [0.0, 1.0, 0.7], SLOTS),
            torch.randint(-(2**62), 2**62, (SLOTS,), generator=rng),
            integers(rng, 0, 2**20, 9).long(),
            apply_temperature=False,
            is_drafting=False,
        )
        results.append(sampled)
    return results


@case("gpu.sample.logprob._topk_log_softmax_kernel")
def log_softmax_of_ids(rng: torch.Generator) -> list[torch.Tensor]:
    ids = integers(rng, 0, VOCAB, 5, 7)
    logits = logits_of(rng, 5)
    return [logprob.compute_token_logprobs(x, ids) for x in (logits, logits.bfloat16())]


@case("gpu.sample.logprob._fill_logprob_token_ids_kernel")
@case("gpu.sample.logprob._ranks_kernel")
def rank(rng: torch.Generator) -> list[torch.Tensor]:
    state = logprob.LogprobTokenIdsState(SLOTS, CPU)
    state.num_token_ids.gpu.copy_(integers(rng, 0, 5, SLOTS))
    state.token_ids.gpu.copy_(integers(rng, 0, VOCAB, *state.token_ids.gpu.shape))
    slots, sampled = integers(rng, 0, SLOTS, 6), integers(rng, 0, VOCAB, 6).long()
    scores = [
        logprob.compute_topk_scores(
            logits_of(rng, 6),
            count,
            sampled,
            logprob_token_ids_state=state,
            expanded_idx_mapping=slots,
            max_per_req_token_ids=given,
        )
        for count, given in ((3, 0), (3, 4), (0, 4))
    ]
    return [t for s in scores for t in (s.logprob_token_ids, s.logprobs, s.selected_token_ranks)]


@case("gpu.sample.prompt_logprob._prompt_logprobs_token_ids_kernel")
def shift_prompt(rng: torch.Generator) -> list[torch.Tensor]:
    step = step_of(rng)
    texts = step.starts, step.slots, step.num_computed, step.tokens
    return [prompt_logprob.get_prompt_logprobs_token_ids(int(step.starts[-1]), *texts)]
