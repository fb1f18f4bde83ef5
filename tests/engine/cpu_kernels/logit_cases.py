"""Random inputs for the sampler's kernels, see `cases`."""

from itertools import product
from types import SimpleNamespace

import torch
from vllm.v1.worker.gpu import structured_outputs
from vllm.v1.worker.gpu.metrics import logits as metrics
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

from lookahead_vllm.engine.cpu_kernels import logprobs
from tests.engine.cpu_kernels.cases import (
    CPU,
    DTYPES,
    SLOTS,
    VOCAB,
    case,
    choice,
    integers,
    logits_of,
    step_of,
)

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


@case("gpu.metrics.logits._num_nans_kernel")
def count_nans(rng: torch.Generator) -> list[torch.Tensor]:
    logits = logits_of(rng, 5)
    logits[torch.rand(logits.shape, generator=rng) < 0.1] = torch.nan
    # Triton's interpreter has no libdevice.
    metrics.libdevice = SimpleNamespace(isnan=lambda block: block != block)
    return [metrics.get_num_nans(logits.to(dtype)) for dtype in DTYPES]


@case("gpu.structured_outputs._apply_grammar_bitmask_kernel")
def apply_grammar(rng: torch.Generator) -> list[torch.Tensor]:
    """Launched as in 0.33: four masks for each request, with or without that many rows."""
    step = step_of(rng)
    places = torch.cat([torch.arange(4) + 4 * r for r in (0, 2, 5)]).int()
    masks = integers(rng, -(2**31), 2**31 - 1, 12, (VOCAB + 31) // 32)
    masks[:, ::3] = -1
    results = []
    for dtype in DTYPES:
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
    end = start if rng.initial_seed() % 2 else end
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


MANY = logprobs.ROWS + 3
"""Rows that are computed in two parts."""

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
    """Greedy and random rows, of all dtypes; some rows have equal logits."""
    results = []
    for dtype, scales in product(DTYPES, (False, True)):
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
            apply_temperature=scales,
            is_drafting=False,
        )
        results.append(sampled)
    return results


@case("gpu.sample.logprob._topk_log_softmax_kernel")
def log_softmax_of_ids(rng: torch.Generator) -> list[torch.Tensor]:
    ids = integers(rng, 0, VOCAB, MANY, 7)
    logits = logits_of(rng, MANY)
    found = [logprob.compute_token_logprobs(logits.to(dtype), ids) for dtype in DTYPES]
    return [*found, logits]


@case("gpu.sample.logprob._fill_logprob_token_ids_kernel")
@case("gpu.sample.logprob._ranks_kernel")
def rank(rng: torch.Generator) -> list[torch.Tensor]:
    state = logprob.LogprobTokenIdsState(SLOTS, CPU)
    state.num_token_ids.gpu.copy_(integers(rng, 0, 5, SLOTS))
    state.token_ids.gpu.copy_(integers(rng, 0, VOCAB, *state.token_ids.gpu.shape))
    slots, sampled = integers(rng, 0, SLOTS, MANY), integers(rng, 0, VOCAB, MANY).long()
    scores = [
        logprob.compute_topk_scores(
            logits_of(rng, MANY),
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
