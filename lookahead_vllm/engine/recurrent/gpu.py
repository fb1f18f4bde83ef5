"""vLLM's kernels of recurrent layers on a GPU, replaced as in `kernels.py`.

Only in steps with branching trees: vLLM's kernels compute chains there, and they are in its graphs.
Not run on a GPU yet.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
from vllm.model_executor.layers.mamba import short_conv
from vllm.model_executor.layers.mamba.gdn import qwen_gdn_linear_attn
from vllm.v1.attention.backends.gdn_attn import GDNAttentionMetadata

from lookahead_vllm.engine import patches
from lookahead_vllm.engine.recurrent import kernels as recurrent_kernels
from lookahead_vllm.engine.recurrent.kernels import convolution, delta_trees, trees_of_slots
from lookahead_vllm.engine.recurrent.states import PARENTS
from lookahead_vllm.verify import recurrence
from lookahead_vllm.verify.recurrence import GatedDelta, StateRows


@functools.cache
def register() -> None:
    """Patch vLLM, in a process that serves a model with recurrent layers."""
    recurrent_kernels.register()
    patches.patch(short_conv, "causal_conv1d_update", convolution(trees_of_slots))
    patches.patch(qwen_gdn_linear_attn, "causal_conv1d_update", convolution(_trees))
    patches.patch(qwen_gdn_linear_attn, "fused_sigmoid_gating_delta_rule_update", _gated_delta)
    net = qwen_gdn_linear_attn.QwenGatedDeltaNetAttention
    patches.patch(net, "_can_use_fused_gdn_mtp_decode", _without_trees)


def _trees(kwargs: dict[str, Any]) -> StateRows | None:
    """The drafted rows of the step; None if vLLM's kernels should compute them.

    All groups of layers have the same rows, and each has state slots of its own, which are in the
    call: all of a request's, or the first for a convolution, which uses only that one.
    """
    if kwargs.get("num_accepted_tokens") is None:  # which vLLM passes only with drafted rows
        return None
    if (metadata := recurrent_kernels.metadata_with_parents(GDNAttentionMetadata)) is None:
        return None
    if (columns := kwargs.get("ssm_state_indices")) is None:
        most = metadata.spec_state_indices_tensor.shape[1]
        columns = kwargs["conv_state_indices"][:, None].expand(-1, most)
    return delta_trees(metadata, columns)


def _without_trees(original: Callable[..., bool]) -> Callable[..., bool]:
    """Wrap the condition of a fused kernel, which reads no parents."""

    @functools.wraps(original)
    def can_use(self: Any, attn_metadata: GDNAttentionMetadata) -> bool:
        return not hasattr(attn_metadata, PARENTS) and original(self, attn_metadata)

    return can_use


def _gated_delta(
    original: Callable[..., tuple[torch.Tensor, torch.Tensor]],
) -> Callable[..., tuple[torch.Tensor, torch.Tensor]]:
    """Wrap the gated delta rule of decode rows."""

    @functools.wraps(original)
    def update(**kwargs: Any) -> tuple[torch.Tensor, torch.Tensor]:
        if (trees := _trees(kwargs)) is None:
            return original(**kwargs)
        state = kwargs["initial_state"]
        q, k, v = (kwargs[name].squeeze(0) for name in ("q", "k", "v"))
        out = torch.empty_like(v)
        inputs = GatedDelta(q, k, v, *(kwargs[name] for name in ("a", "b", "A_log", "dt_bias")))
        recurrence.gated_delta(state, inputs, trees, out)
        return out.unsqueeze(0), state

    return update
