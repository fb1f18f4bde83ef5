"""Sampling at all nodes of a step in one call, then the walk along what was sampled.

The second runner's noise is a function of seed, position and token. A node's position is its root's
plus its depth, so vLLM's own sampler draws at a node what plain vLLM would draw at that position.
All that follows runs on the device without a synchronisation.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from vllm.config.model import PROCESSED_LOGPROBS_MODES
from vllm.v1.worker.gpu.input_batch import InputBatch, get_num_sampled_and_rejected
from vllm.v1.worker.gpu.metrics.logits import get_num_nans
from vllm.v1.worker.gpu.sample.logprob import compute_topk_scores
from vllm.v1.worker.gpu.sample.output import SamplerOutput
from vllm.v1.worker.gpu.sample.sampler import Sampler

from lookahead_vllm.engine.worker.v2.node_history import NodeHistory
from lookahead_vllm.verify.node_layout import NodeLayout
from lookahead_vllm.verify.walk import Walk, walk

Observe = Callable[[torch.Tensor, InputBatch], None]
"""Called with a step's logits and batch before anything writes to the logits."""


class RootSampler(Sampler):
    """vLLM's sampler, which lets the logits of a step without drafts be observed."""

    observe: Observe | None = None

    def __call__(self, logits: torch.Tensor, input_batch: InputBatch) -> SamplerOutput:
        if self.observe is not None:
            self.observe(logits, input_batch)
        return super().__call__(logits, input_batch)


class TreeRows(NamedTuple):
    """What a step with drafts needs after its forward pass."""

    layout: NodeLayout
    move: Callable[[Walk], None] | None
    """Moves the KV of accepted nodes; None if all trees are chains."""


class NodeSampler:
    """Takes the place of vLLM's rejection sampler.

    Parameters
    ----------
    sampler
        Samples at every row.
    """

    enable_adaptive_verification = False  # read by vLLM's warm-up

    def __init__(self, sampler: RootSampler, *args: Any, **kwargs: Any) -> None:
        self.sampler = sampler
        self.history: NodeHistory
        """Set by the runner."""
        self.rows: TreeRows | None = None
        """Of the step under way; set by the runner."""

    def __call__(
        self,
        logits: torch.Tensor,
        input_batch: InputBatch,
        draft_logits: torch.Tensor | None = None,
        invalid_drafts: torch.Tensor | None = None,
    ) -> SamplerOutput:
        sampler, rows = self.sampler, self.rows
        assert rows is not None
        if sampler.observe is not None:
            sampler.observe(logits, input_batch)
        layout, batch = rows.layout, input_batch
        num_nans = None
        if sampler.compute_nans:
            num_nans = get_num_nans(logits)[batch.cu_num_logits[:-1].long()]
        indices = batch.logits_indices
        ids = batch.input_ids[indices]
        logprobs = sampler.get_logprobs_dims(batch.idx_mapping_np)
        self.history.parents = layout.parents if rows.move is not None else None
        try:
            sampled, processed = sampler.sample(
                logits,
                batch.expanded_idx_mapping,
                batch.idx_mapping,
                batch.idx_mapping_np,
                batch.positions[indices],
                ids,
                batch.expanded_local_pos,
                batch.seq_lens_cpu_upper_bound.numpy(),
                return_logprobs=logprobs is not None,
            )
        finally:
            self.history.parents = None
        path = walk(ids, sampled, layout.parents, batch.cu_num_logits, indices, layout.width)
        if rows.move is not None:
            rows.move(path)
        num_sampled, num_rejected = get_num_sampled_and_rejected(
            path.num_sampled,
            batch.seq_lens,
            batch.cu_num_logits,
            batch.idx_mapping,
            sampler.req_states.prefill_len.gpu,
        )
        tensors = None
        if logprobs is not None:
            if sampler.logprobs_mode in PROCESSED_LOGPROBS_MODES:
                logits = processed
            num_logprobs, max_token_ids = logprobs
            tensors = compute_topk_scores(
                logits[path.order],
                num_logprobs,
                sampled[path.order],
                batch.cu_num_logits_np.tolist(),
                logprob_token_ids_state=sampler.logprob_token_ids_state,
                expanded_idx_mapping=batch.expanded_idx_mapping,
                max_per_req_token_ids=max_token_ids,
                logits_mode=sampler.logprobs_mode in ("raw_logits", "processed_logits"),
            )
        return SamplerOutput(
            sampled_token_ids=path.tokens,
            logprobs_tensors=tensors,
            num_nans=num_nans,
            num_sampled=num_sampled,
            num_rejected=num_rejected,
        )
