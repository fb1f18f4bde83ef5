"""vLLM's V2 sampler treats the nodes of branching trees by the paths to them."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from vllm import SamplingParams
from vllm.v1.worker.cpu.buffer_utils import UvaBuffer
from vllm.v1.worker.gpu.sample.logits_processor.interface import LogitsContext, LogitsProcessor
from vllm.v1.worker.gpu.sample.sampler import Sampler
from vllm.v1.worker.gpu.states import RequestState

from lookahead_vllm.engine.step.node_history import NodeHistory
from tests.verify.history.test_history import (
    LONGEST,
    MARKERS,
    NUM_SLOTS,
    VOCAB,
    Step,
    penalized,
    random_step,
    with_forced_ends,
    without_bad_words,
)

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _buffers_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """As vLLM has them on a CPU."""
    monkeypatch.setattr("vllm.v1.worker.gpu.buffer_utils.UvaBuffer", UvaBuffer)


class Shift(LogitsProcessor):
    """A custom processor for requests with `shift` in their extra_args."""

    def add_request(self, req_idx: int, sampling_params: SamplingParams) -> bool:
        return bool((sampling_params.extra_args or {}).get("shift"))

    def apply(self, logits: torch.Tensor, ctx: LogitsContext) -> torch.Tensor:
        return logits + 1


def vllm_sampler(custom: tuple[LogitsProcessor, ...] = ()) -> Sampler:
    start, end, forced = MARKERS[1]
    reasoning = SimpleNamespace(
        reasoning_start_token_ids=start,
        natural_reasoning_end_token_ids=end,
        reasoning_end_token_ids=forced,
    )
    states = RequestState(
        max_num_reqs=NUM_SLOTS,
        max_model_len=LONGEST,
        max_num_batched_tokens=LONGEST,
        num_speculative_steps=8,
        vocab_size=VOCAB,
        device=CPU,
    )
    config = SimpleNamespace(reasoning_config=reasoning)
    return Sampler(config, NUM_SLOTS, VOCAB, CPU, states, custom_logits_processors=custom)


def fill(sampler: Sampler, step: Step) -> None:
    """Give vLLM's state the content of `step`, without vLLM's kernels."""
    _, penalties, words = (p for p in sampler.logits_processors if not isinstance(p, Shift))
    thinking: Any = sampler.thinking_budget_state
    states = sampler.req_states
    states.all_token_ids.gpu.copy_(step.texts.token_ids)
    states.total_len.gpu.copy_(step.texts.total_lens)
    for tensor, content in (
        (states.prompt_len, step.texts.prompt_lens),
        (penalties.repetition_penalty, step.penalties.repetition),
        (penalties.frequency_penalty, step.penalties.frequency),
        (penalties.presence_penalty, step.penalties.presence),
        (words.num_bad_words, step.words.counts),
        (thinking.thinking_token_budget, step.thinking.budgets),
    ):
        tensor.np[:] = content.numpy()
        tensor.copy_to_uva()
    repetition, frequency, presence = (part.numpy() for part in step.penalties[:3])
    penalties.use_penalty[:] = (repetition != 1) | (frequency != 0) | (presence != 0)
    penalties.prompt_bin_mask.copy_(step.penalties.prompt_mask)
    penalties.output_bin_counts.copy_(step.penalties.output_counts)
    words.bad_word_token_ids.gpu[:, : step.words.token_ids.shape[1]] = step.words.token_ids
    words.bad_word_offsets.gpu[:, : step.words.offsets.shape[1]] = step.words.offsets
    thinking.use_thinking_budget[:] = step.thinking.budgets.numpy() >= 0


def context(step: Step) -> LogitsContext:
    return LogitsContext(
        expanded_idx_mapping=step.rows.slots,
        idx_mapping=step.slots,
        idx_mapping_np=step.slots.numpy(),
        expanded_local_pos=step.local_pos,
        input_ids=step.rows.ids,
        pos=torch.zeros(len(step.logits), dtype=torch.int64),
        seq_lens_upper_bound_np=np.zeros(len(step.slots), np.int32),
    )


@pytest.mark.parametrize("seed", [1, 5, 9, 13])  # with the sampler's markers
def test_all_processors_follow_the_parents(seed):
    """Bias, penalties, bad words, then thinking budgets, in vLLM's order."""
    sampler, step = vllm_sampler(), random_step(seed)
    assert [part.tolist() for part in step.thinking[4:]] == list(MARKERS[1])
    fill(sampler, step)
    nodes = NodeHistory(sampler)
    before = step.logits.clone()
    expected = before
    for brute_force in (penalized, without_bad_words, with_forced_ends):
        step.logits = expected
        expected = brute_force(step)
    sampler.needs_logits_processing[:] = True
    sampler.sampling_states.temperature.np[:] = 1
    nodes.parents = step.rows.parents
    ctx = context(step)
    result = sampler.apply_sampling_params(
        before, ctx.expanded_idx_mapping, ctx.idx_mapping, ctx.idx_mapping_np, ctx.pos,
        ctx.input_ids, ctx.expanded_local_pos, ctx.seq_lens_upper_bound_np, skip_top_k_top_p=True,
    )  # fmt: skip
    assert torch.equal(result, expected)
    assert not torch.equal(result, before)


def test_requests_without_such_parameters_launch_nothing(monkeypatch):
    sampler, step = vllm_sampler(), random_step(1)
    nodes = NodeHistory(sampler)
    nodes.parents = step.rows.parents
    for name in ("apply_penalties", "apply_bad_words", "apply_thinking_budgets"):
        monkeypatch.setattr(f"lookahead_vllm.verify.history.{name}", None)
    logits = step.logits.clone()
    for processor in sampler.logits_processors[1:]:
        logits = processor.apply(logits, context(step))
    sampler.thinking_budget_state.apply(logits, context(step))
    assert torch.equal(logits, step.logits)


def test_requests_of_custom_processors_need_chains():
    sampler = vllm_sampler(custom=(Shift(None, None), Shift(None, None)))  # type: ignore[arg-type]
    nodes = NodeHistory(sampler)
    for slot, extra_args in enumerate((None, {"shift": 1}, {"shift": 1}, {"shift": 1})):
        sampler.add_request(slot, SamplingParams(extra_args=extra_args))
    sampler.add_request(2, SamplingParams())  # the slot has another request now
    assert nodes.needs_chain(np.array([0, 1, 2, 3])).tolist() == [False, True, False, True]
    assert nodes.needs_chain(np.array([3, 0])).tolist() == [True, False]
    step = random_step(1)
    nodes.parents = step.rows.parents
    custom = sampler.logits_processors[3:]
    assert len(custom) == 2
    for processor in custom:
        processor.apply_staged_writes()
        assert torch.equal(processor.apply(step.logits, context(step)), step.logits + 1)
