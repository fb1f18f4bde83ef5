"""Sampling at all nodes of a step in one call, then the walk along what was sampled.

Model Runner V2's noise is a function of seed, position and token. A node's position is its root's
plus its depth, so vLLM's own sampler draws at a node what plain vLLM would draw at that position.
All that follows runs on the device without a synchronisation.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from vllm import SamplingParams
from vllm.config.model import PROCESSED_LOGPROBS_MODES
from vllm.v1.outputs import LogprobsTensors
from vllm.v1.worker.gpu.input_batch import InputBatch, get_num_sampled_and_rejected
from vllm.v1.worker.gpu.metrics.logits import get_num_nans
from vllm.v1.worker.gpu.sample.logprob import compute_topk_scores
from vllm.v1.worker.gpu.sample.output import SamplerOutput
from vllm.v1.worker.gpu.sample.sampler import Sampler

from lookahead_vllm.draft.jit import Int32s
from lookahead_vllm.engine import patches
from lookahead_vllm.engine.step.node_history import NodeHistory
from lookahead_vllm.engine.step.step import Step, ThisStep
from lookahead_vllm.engine.step.tail import Draws
from lookahead_vllm.verify.walk import Walk, walk

MAX_CHUNK_BYTES = 256 << 20
"""The most bytes of the float32 copy of logits that vLLM's sampler makes of the rows it gets."""

Observe = Callable[[torch.Tensor, InputBatch], None]
"""Called with a step's logits and batch before anything writes to the logits."""


class RootSampler(Sampler):
    """vLLM's sampler, which first passes the logits of a step without drafts to `observe`.

    Attributes
    ----------
    draws : Draws or None
        What captured graphs sample with; None without them. Set by the runner.
    """

    draws: Draws | None = None

    def __init__(self, observe: Observe, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.observe = observe

    def add_request(self, req_idx: int, sampling_params: SamplingParams) -> None:
        states, draws = self.sampling_states, self.draws
        if draws is None:
            super().add_request(req_idx, sampling_params)
            return
        is_scaled = states.add_request(req_idx, sampling_params)
        # What is left says whether anything but the temperature changes its logits.
        with patches.swapped(states, "add_request", lambda *_: False):
            super().add_request(req_idx, sampling_params)
        is_whole = (
            states.top_k.np[req_idx] == states.vocab_size
            and states.top_p.np[req_idx] == 1
            and states.min_p.np[req_idx] == 0
            and not self.needs_logits_processing[req_idx]
            and self.get_logprobs_dims(np.array([req_idx])) is None
        )
        self.needs_logits_processing[req_idx] |= is_scaled
        temperature, seed = states.temperature.np[req_idx], states.seeds.np[req_idx]
        draws.add_request(req_idx, float(temperature), int(seed), bool(is_whole))

    def apply_staged_writes(self) -> None:
        super().apply_staged_writes()
        if self.draws is not None:
            self.draws.apply_staged_writes()

    def __call__(self, logits: torch.Tensor, input_batch: InputBatch) -> SamplerOutput:
        self.observe(logits, input_batch)
        return super().__call__(logits, input_batch)


class Chunk(NamedTuple):
    """Requests of a step that are sampled at once."""

    requests: slice
    rows: slice
    """Their rows of the step's logits."""


class _Emitted(NamedTuple):
    """What the r requests of a chunk emit."""

    tokens: torch.Tensor
    """int64 [r, width]"""
    counts: torch.Tensor
    """int32 [r]: the number of tokens."""
    order: torch.Tensor
    """int64 [n]: `Walk.order` of its rows, counted among all rows of the step."""
    logprobs: LogprobsTensors | None


def max_chunk_rows(vocab_size: int) -> int:
    """How many rows of logits the sampler gets at once."""
    return MAX_CHUNK_BYTES // (4 * vocab_size)


def chunks_of(cu_num_logits: Int32s, most: int) -> list[Chunk]:
    """Divide the requests of a step, in order, into chunks of at most `most` rows if possible.

    A request is not divided.

    Parameters
    ----------
    cu_num_logits : int32 [r + 1]
        The first logits row of each request, then the number of rows.
    """
    starts, chunks, first = cu_num_logits.tolist(), [], 0
    for request in range(1, len(starts) - 1):
        if starts[request + 1] - starts[first] > most:
            chunks.append(Chunk(slice(first, request), slice(starts[first], starts[request])))
            first = request
    return [*chunks, Chunk(slice(first, len(starts) - 1), slice(starts[first], starts[-1]))]


class NodeSampler:
    """Replaces vLLM's rejection sampler.

    Parameters
    ----------
    sampler
        Samples at every row.
    this_step
        Returns the step whose rows it samples.

    Attributes
    ----------
    history : NodeHistory
        Lets the sampler's processors follow the parents of the rows.
    """

    enable_adaptive_verification = False  # read by vLLM's warm-up
    max_rows: int | None = None
    """How many rows are sampled at once; None for as many as memory allows."""

    def __init__(self, sampler: RootSampler, this_step: ThisStep) -> None:
        self.sampler = sampler
        self.history = NodeHistory(sampler)
        self._this_step = this_step

    def __call__(
        self,
        logits: torch.Tensor,
        input_batch: InputBatch,
        draft_logits: torch.Tensor | None = None,
        invalid_drafts: torch.Tensor | None = None,
    ) -> SamplerOutput:
        sampler, batch, step = self.sampler, input_batch, self._this_step()
        sampler.observe(logits, batch)
        num_nans = None
        if sampler.compute_nans:
            num_nans = get_num_nans(logits)[batch.cu_num_logits[:-1].long()]
        logprobs = sampler.get_logprobs_dims(batch.idx_mapping_np)
        parts = [
            self._verify(step, logits, batch, chunk, logprobs)
            for chunk in chunks_of(
                batch.cu_num_logits_np, self.max_rows or max_chunk_rows(logits.shape[1])
            )
        ]
        tokens, counts, order, tensors = parts[0]
        if len(parts) > 1:
            tokens, counts, order = (torch.cat([part[i] for part in parts]) for i in range(3))
            if logprobs is not None:
                tensors = LogprobsTensors.cat(
                    [part.logprobs for part in parts],
                    cu_num_generated_tokens=batch.cu_num_logits_np.tolist(),
                )
        if step.move is not None:
            step.order = order
        num_sampled, num_rejected = get_num_sampled_and_rejected(
            counts,
            batch.seq_lens,
            batch.cu_num_logits,
            batch.idx_mapping,
            sampler.req_states.prefill_len.gpu,
        )
        return SamplerOutput(
            sampled_token_ids=tokens,
            logprobs_tensors=tensors,
            num_nans=num_nans,
            num_sampled=num_sampled,
            num_rejected=num_rejected,
        )

    def _verify(
        self,
        step: Step,
        logits: torch.Tensor,
        batch: InputBatch,
        chunk: Chunk,
        logprobs: tuple[int, int] | None,
    ) -> _Emitted:
        """Sample at the rows of a chunk, walk its trees, and move the KV of accepted nodes.

        `logprobs` is what vLLM's `get_logprobs_dims` returns for the whole batch.
        """
        sampler, layout, (requests, rows) = self.sampler, step.layout, chunk
        assert layout is not None
        logits, parents = logits[rows], layout.parents[rows]
        starts = batch.cu_num_logits[requests.start : requests.stop + 1]
        if rows.start:
            parents, starts = parents - rows.start, starts - rows.start
        indices, slots = batch.logits_indices[rows], batch.expanded_idx_mapping[rows]
        # If all rows have logits, these are views.
        own = rows if len(batch.logits_indices) == batch.num_tokens else indices
        ids = batch.input_ids[own]
        with self.history.following(parents if step.move is not None else None):
            sampled, processed = sampler.sample(
                logits,
                slots,
                batch.idx_mapping[requests],
                batch.idx_mapping_np[requests],
                batch.positions[own],
                ids,
                batch.expanded_local_pos[rows],
                batch.seq_lens_cpu_upper_bound.numpy()[requests],
                return_logprobs=logprobs is not None,
            )
        path = self._walk(sampled, ids, parents, starts, indices, layout.width)
        if step.move is not None:
            step.move(path, requests, starts)
        order = path.order + rows.start if rows.start else path.order
        if logprobs is None:
            return _Emitted(path.tokens, path.num_sampled, order, None)
        num_logprobs, max_token_ids = logprobs
        if sampler.logprobs_mode in PROCESSED_LOGPROBS_MODES:
            logits = processed
        del processed
        tensors = compute_topk_scores(
            logits[path.order],
            num_logprobs,
            sampled[path.order],
            (batch.cu_num_logits_np[requests.start : requests.stop + 1] - rows.start).tolist(),
            logprob_token_ids_state=sampler.logprob_token_ids_state,
            expanded_idx_mapping=slots,
            max_per_req_token_ids=max_token_ids,
            logits_mode=sampler.logprobs_mode in ("raw_logits", "processed_logits"),
        )
        return _Emitted(path.tokens, path.num_sampled, order, tensors)

    def _walk(
        self,
        sampled: torch.Tensor,
        ids: torch.Tensor,
        parents: torch.Tensor,
        starts: torch.Tensor,
        indices: torch.Tensor,
        width: int,
    ) -> Walk:
        """The accepted paths of these rows; the arguments are those of `walk`."""
        return walk(ids, sampled, parents, starts, indices, width)
