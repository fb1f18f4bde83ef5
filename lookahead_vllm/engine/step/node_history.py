"""Penalties, bad words and thinking budgets at the nodes of branching trees.

vLLM's runner treats the rows before a row as its history, which is right only for chains.
The processors here replace vLLM's in its sampler and share vLLM's state: vLLM adds requests and
applies staged writes. In a step with branching trees, they change the logits with kernels that
follow each row's parents (`verify/history/`). vLLM's processors compute all other steps.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from vllm.sampling_params import SamplingParams
from vllm.v1.worker.gpu.sample.bad_words import BadWordsState
from vllm.v1.worker.gpu.sample.logit_bias import LogitBiasState
from vllm.v1.worker.gpu.sample.logits_processor.interface import LogitsContext, LogitsProcessor
from vllm.v1.worker.gpu.sample.penalties import PenaltiesState
from vllm.v1.worker.gpu.sample.sampler import Sampler
from vllm.v1.worker.gpu.sample.thinking_budget import ThinkingBudgetState

from lookahead_vllm.draft.jit import Int64s
from lookahead_vllm.verify import history
from lookahead_vllm.verify.history import Histories


class NodeHistory:
    """Makes the processors of a sampler follow the parents of a step's logits rows.

    Parameters
    ----------
    sampler
        vLLM's; its processors are replaced.
    """

    def __init__(self, sampler: Sampler) -> None:
        self.parents: torch.Tensor | None = None
        """See `following`."""
        self._custom: list[_Custom] = []
        self._num_slots = len(sampler.needs_logits_processing)
        sampler.logits_processors = [self._replace(p) for p in sampler.logits_processors]
        self._thinking = _NodeThinking(sampler.thinking_budget_state, self)
        sampler.thinking_budget_state = self._thinking
        self._replaced = [p for p in sampler.logits_processors if isinstance(p, _Replaced)]

    @contextmanager
    def following(self, parents: torch.Tensor | None) -> Iterator[None]:
        """In the block, the sampler is called with rows that have these parents.

        Parameters
        ----------
        parents : int32 [n] on the device, or None
            The row of each row's parent; a root's is its own. None: every request has a chain or no
            draft.
        """
        self.parents = parents
        try:
            yield
        finally:
            self.parents = None

    def _replace(self, processor: LogitsProcessor) -> LogitsProcessor:
        if isinstance(processor, PenaltiesState):
            return _NodePenalties(processor, self)
        if isinstance(processor, BadWordsState):
            return _NodeBadWords(processor, self)
        if isinstance(processor, LogitBiasState):  # depends only on the position
            return processor
        self._custom.append(_Custom(processor, self._num_slots))
        return self._custom[-1]

    def warm_up(self, vocab: int, device: torch.device) -> None:
        """Compile the kernels, so that no request waits for it. Call it before the first one."""
        logits = torch.zeros(1, vocab, device=device)
        slots = torch.zeros(1, dtype=torch.int64, device=device)
        rows = Histories(slots, slots.int(), slots.int())
        for processor in self._replaced:
            if isinstance(processor, _NodePenalties):
                processor.change(logits, rows)
            elif isinstance(processor, _NodeBadWords):
                processor.change(logits, rows, 1)  # at most one word
        if self._thinking.is_enabled:
            self._thinking.change(logits, rows, slots)

    @property
    def has_custom(self) -> bool:
        """Whether there are custom logits processors."""
        return bool(self._custom)

    def needs_chain(self, slots: Int64s) -> NDArray[np.bool_]:
        """bool [r]: whether a custom logits processor concerns the requests in slots int64 [r].

        Such a processor reads a row's history from the rows before it, so these requests must not
        have branching trees.
        """
        needed = np.zeros(len(slots), np.bool_)
        for processor in self._custom:
            needed |= processor.concerns[slots]
        return needed

    def rows(self, ctx: LogitsContext) -> Histories:
        """The rows of a step with branching trees."""
        assert self.parents is not None
        return Histories(ctx.expanded_idx_mapping, ctx.input_ids, self.parents)


class _Replaced(LogitsProcessor):
    """Replaces one of vLLM's processors, which keeps the state."""

    def __init__(self, state: Any, nodes: NodeHistory) -> None:
        self._state = state
        self._nodes = nodes

    def add_request(self, req_idx: int, sampling_params: SamplingParams) -> bool:
        return self._state.add_request(req_idx, sampling_params)

    def apply_staged_writes(self) -> None:
        self._state.apply_staged_writes()


class _NodePenalties(_Replaced):
    _state: PenaltiesState

    def apply(self, logits: torch.Tensor, ctx: LogitsContext) -> torch.Tensor:
        if self._nodes.parents is None:
            return self._state.apply(logits, ctx)
        if self._state.use_penalty[ctx.idx_mapping_np].any():
            self.change(logits, self._nodes.rows(ctx))
        return logits

    def change(self, logits: torch.Tensor, rows: Histories) -> None:
        state = self._state
        penalties = history.Penalties(
            state.repetition_penalty.gpu,
            state.frequency_penalty.gpu,
            state.presence_penalty.gpu,
            state.prompt_bin_mask,
            state.output_bin_counts,
        )
        history.apply_penalties(logits, rows, penalties)


class _NodeBadWords(_Replaced):
    _state: BadWordsState

    def apply(self, logits: torch.Tensor, ctx: LogitsContext) -> torch.Tensor:
        if self._nodes.parents is None:
            return self._state.apply(logits, ctx)
        max_words = int(self._state.num_bad_words.np[ctx.idx_mapping_np].max())
        if max_words:
            self.change(logits, self._nodes.rows(ctx), max_words)
        return logits

    def change(self, logits: torch.Tensor, rows: Histories, max_words: int) -> None:
        state = self._state
        words = history.BadWords(
            state.bad_word_token_ids.gpu, state.bad_word_offsets.gpu, state.num_bad_words.gpu
        )
        history.apply_bad_words(logits, rows, _texts(state.req_states), words, max_words)


class _NodeThinking(_Replaced):
    _state: ThinkingBudgetState

    @property
    def is_enabled(self) -> bool:
        """Whether the engine has markers of thinking."""
        return self._state.enabled

    def apply(self, logits: torch.Tensor, ctx: LogitsContext) -> None:
        state = self._state
        if self._nodes.parents is None:
            state.apply(logits, ctx)
        elif self.is_enabled and state.use_thinking_budget[ctx.idx_mapping_np].any():
            self.change(logits, self._nodes.rows(ctx), ctx.idx_mapping)

    def change(self, logits: torch.Tensor, rows: Histories, slots: torch.Tensor) -> None:
        state = self._state
        thinking = history.ThinkingBudgets(
            state.thinking_token_budget.gpu,
            state.cached_last_start,
            state.cached_last_end,
            state.cached_scan_pos,
            state.reasoning_start_token_ids,
            state.natural_reasoning_end_token_ids,
            state.reasoning_end_token_ids,
        )
        history.apply_thinking_budgets(logits, rows, slots, _texts(state.req_states), thinking)


class _Custom(LogitsProcessor):
    """A custom processor, and the requests that it concerns.

    Attributes
    ----------
    concerns : bool [slots]
    """

    def __init__(self, processor: LogitsProcessor, num_slots: int) -> None:
        self._processor = processor
        self.concerns: NDArray[np.bool_] = np.zeros(num_slots, np.bool_)

    def add_request(self, req_idx: int, sampling_params: SamplingParams) -> bool:
        self.concerns[req_idx] = concerns = self._processor.add_request(req_idx, sampling_params)
        return concerns

    def apply_staged_writes(self) -> None:
        self._processor.apply_staged_writes()

    def apply(self, logits: torch.Tensor, ctx: LogitsContext) -> torch.Tensor:
        return self._processor.apply(logits, ctx)


def _texts(states: Any) -> history.Texts:
    return history.Texts(states.all_token_ids.gpu, states.prompt_len.gpu, states.total_len.gpu)
