"""vLLM's kernels of recurrent layers, replaced in steps whose metadata has the rows' parents.

vLLM's own kernels compute only chains. The places where the layers call them are patched: all rows
that vLLM treats as decodes go to `verify/recurrence/`, and vLLM computes prompts. This module has
the patches for both devices; `cpu.py` and `gpu.py` have the others.
"""

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from vllm.forward_context import get_forward_context
from vllm.model_executor.layers.mamba import mamba_mixer2
from vllm.platforms.interface import Platform
from vllm.v1.attention.backends.mamba_attn import (
    BaseMambaAttentionMetadata,
    BaseMambaAttentionMetadataBuilder,
)

from lookahead_vllm.engine import patches
from lookahead_vllm.engine.recurrent.states import PARENTS, with_nodes_in_pages
from lookahead_vllm.verify import recurrence
from lookahead_vllm.verify.recurrence import Mamba2, StateRows

Metadata = TypeVar("Metadata")


def register() -> None:
    """Patch what both devices use, in a process that serves a model with recurrent layers."""
    patches.patch(Platform, "_align_hybrid_block_size", with_nodes_in_pages)
    patches.patch(mamba_mixer2, "causal_conv1d_update", convolution(trees_of_slots))
    patches.patch(mamba_mixer2, "selective_state_update", _mamba2)
    builder = BaseMambaAttentionMetadataBuilder
    patches.patch(builder, "build_for_cudagraph_capture", _with_single_tokens)


def _with_single_tokens(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap the metadata with which a graph is captured: also for steps without drafts.

    Under speculation, vLLM captures only steps in which every request has the longest draft.
    """

    @functools.wraps(original)
    def build(self: Any, common_attn_metadata: Any) -> Any:
        if common_attn_metadata.max_query_len > 1:
            return original(self, common_attn_metadata)
        accepted = torch.diff(common_attn_metadata.query_start_loc)
        return self.build(0, common_attn_metadata, num_accepted_tokens=accepted)

    return build


def _trees(state_indices: torch.Tensor) -> StateRows | None:
    """The drafted rows of the step for Mamba 2 and short convolutions, by the layer's state slots.

    `state_indices` is int32 [requests, columns], or flat. None if vLLM's kernels should compute
    the rows.
    """
    if (metadata := metadata_with_parents(BaseMambaAttentionMetadata)) is None:
        return None
    starts = metadata.query_start_loc_d
    assert starts is not None and metadata.num_accepted_tokens is not None
    columns = state_indices.view(len(starts) - 1, -1)
    return StateRows(starts, getattr(metadata, PARENTS), columns, metadata.num_accepted_tokens)


def metadata_with_parents(kind: type[Metadata]) -> Metadata | None:
    """The step's metadata of recurrent layers of this kind; None if vLLM's kernels compute it."""
    by_layer = get_forward_context().attn_metadata
    for metadata in by_layer.values() if isinstance(by_layer, dict) else ():
        # All recurrent layers have the same rows.
        if isinstance(metadata, kind) and hasattr(metadata, PARENTS):
            return metadata
    return None


def convolution(find: Callable[[dict[str, Any]], StateRows | None]) -> Callable[..., Any]:
    """A wrapper of vLLM's update of a convolution's window.

    `find` returns the drafted rows of a call with these keyword arguments; None if vLLM's kernels
    should compute them.
    """

    def wrap(original: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        @functools.wraps(original)
        def update(
            x: torch.Tensor,
            conv_state: torch.Tensor,
            weight: torch.Tensor,
            bias: torch.Tensor | None = None,
            activation: Any = None,
            conv_state_indices: torch.Tensor | None = None,
            **kwargs: Any,
        ) -> torch.Tensor:
            kwargs["conv_state_indices"] = conv_state_indices
            if (trees := find(kwargs)) is None:
                return original(x, conv_state, weight, bias, activation, **kwargs)
            return recurrence.convolution(x, conv_state, weight, bias, activation, trees)

        return update

    return wrap


def trees_of_slots(kwargs: dict[str, Any]) -> StateRows | None:
    """The drafted rows of a convolution that is called with all state slots."""
    slots = kwargs["conv_state_indices"]
    return None if slots is None else _trees(slots)


def _mamba2(original: Callable[..., None]) -> Callable[..., None]:
    """Wrap the update of Mamba 2's state."""

    @functools.wraps(original)
    def update(
        state: torch.Tensor,
        x: torch.Tensor,
        dt: torch.Tensor,
        A: torch.Tensor,
        B: torch.Tensor,
        C: torch.Tensor,
        D: torch.Tensor,
        dt_bias: torch.Tensor,
        **kwargs: Any,
    ) -> None:
        trees = _trees(kwargs["state_batch_indices"])
        if trees is None:
            original(state, x, dt, A, B, C, D, dt_bias, **kwargs)
            return
        assert kwargs["dt_softplus"] and kwargs.get("z") is None  # as vLLM's mixer calls it
        inputs = Mamba2(x, dt, A, B, C, D, dt_bias)
        recurrence.mamba2(state, inputs, trees, kwargs["out"])

    return update


def delta_trees(metadata: Any, columns: torch.Tensor) -> StateRows:
    """The drafted rows of the step for gated delta nets, by a layer's metadata with parents, and
    the state slots of that layer."""
    return StateRows(
        metadata.spec_query_start_loc,
        getattr(metadata, PARENTS)[metadata.spec_token_indx.long()],
        columns,
        metadata.num_accepted_tokens,
    )
