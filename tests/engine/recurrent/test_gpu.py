"""The calls of vLLM's recurrent layers on a GPU reach lookahead's kernels, here those of a CPU."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.model_executor.layers.mamba.gdn.kimi_gdn_linear_attn import KimiGatedDeltaNetAttention
from vllm.model_executor.layers.mamba.mamba_mixer2 import MambaMixer2
from vllm.v1.attention.backends.gdn_attn import GDNAttentionMetadata

from lookahead_vllm.engine.attention.branching import branching_obstacle
from lookahead_vllm.engine.attention.gpu import GPUTreeAttention
from lookahead_vllm.engine.recurrent import gpu as recurrent_kernels_gpu
from lookahead_vllm.engine.recurrent import kernels as recurrent_kernels
from lookahead_vllm.engine.recurrent.states import PARENTS
from lookahead_vllm.verify import recurrence
from lookahead_vllm.verify.recurrence import StateRows
from tests.engine.attention.test_gpu import config_that_branches

ROWS = [0, 1, 2, 4, 5]
"""Of the step's six tokens; the fourth is a prompt's."""
TREES = StateRows(
    torch.tensor([0, 3, 5], dtype=torch.int32),
    torch.tensor([-1, 0, 0, -1, 0], dtype=torch.int32),
    torch.arange(1, 9, dtype=torch.int32).view(2, 4),
    torch.tensor([2, 1], dtype=torch.int32),
)


@pytest.fixture
def context(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """A step with two drafts, as a gated delta net's metadata describes it.

    It belongs to the first group of layers; those of the second one have `TREES.columns`.
    """
    metadata = object.__new__(GDNAttentionMetadata)
    parents = torch.full((6,), 77, dtype=torch.int32)
    parents[ROWS] = TREES.parents  # type: ignore[assignment]
    for name, value in (
        ("spec_query_start_loc", TREES.starts),
        ("spec_token_indx", torch.tensor(ROWS, dtype=torch.int32)),
        ("spec_state_indices_tensor", TREES.columns.flip(0, 1)),
        ("num_accepted_tokens", TREES.accepted),
        (PARENTS, parents),
    ):
        setattr(metadata, name, value)
    found = SimpleNamespace(attn_metadata={"attention": None, "delta": metadata})
    monkeypatch.setattr(recurrent_kernels, "get_forward_context", lambda: found)
    return found


def vllms(*args: Any, **kwargs: Any) -> Any:
    return "vLLM's"


@pytest.mark.usefixtures("context")
def test_a_gated_delta_net_starts_each_row_from_its_parent():
    torch.manual_seed(0)
    q, k, v = torch.randn(5, 2, 16), torch.randn(5, 2, 16), torch.randn(5, 4, 8)
    gates = dict(a=torch.randn(5, 4), b=torch.randn(5, 4))
    weights = dict(A_log=torch.randn(4), dt_bias=torch.randn(4))
    state = torch.randn(9, 4, 16, 8)
    expected, expected_state = torch.empty_like(v), state.clone()
    inputs = recurrence.GatedDelta(q, k, v, *gates.values(), *weights.values())
    recurrence.gated_delta(expected_state, inputs, TREES, expected)
    update = recurrent_kernels_gpu._gated_delta(vllms)
    call = dict(
        **weights,
        **gates,
        **{name: t.unsqueeze(0) for name, t in (("q", q), ("k", k), ("v", v))},
        initial_state=state,
        inplace_final_state=True,
        cu_seqlens=TREES.starts,
        ssm_state_indices=TREES.columns,
        use_qk_l2norm_in_kernel=True,
    )
    assert update(**call) == "vLLM's"  # rows without drafts
    out, final = update(**call, num_accepted_tokens=TREES.accepted)
    assert torch.equal(out, expected.unsqueeze(0))
    assert final is state and torch.equal(state, expected_state)


def test_its_fused_kernel_computes_no_trees(context):
    can_use = recurrent_kernels_gpu._without_trees(lambda layer, metadata: True)
    metadata = context.attn_metadata["delta"]
    assert not can_use(None, metadata)
    delattr(metadata, PARENTS)
    assert can_use(None, metadata)


def test_its_convolution_reads_the_inputs_of_a_rows_path(context):
    x, window = torch.randn(5, 6), torch.randn(9, 6, 3 + 4)
    weight, bias, expected_window = torch.randn(6, 4), torch.randn(6), window.clone()
    expected = recurrence.convolution(x, expected_window, weight, bias, "silu", TREES)
    update = recurrent_kernels.convolution(recurrent_kernels_gpu._trees)(vllms)
    call = dict(conv_state_indices=TREES.columns[:, 0], query_start_loc=TREES.starts)
    assert update(x, window, weight, bias, "silu", **call) == "vLLM's"  # type: ignore[comparison-overlap]
    call["num_accepted_tokens"] = TREES.accepted
    assert torch.equal(update(x, window, weight, bias, "silu", **call), expected)
    assert torch.equal(window, expected_window)
    delattr(context.attn_metadata["delta"], PARENTS)  # a step without branching trees
    assert update(x, window, weight, bias, "silu", **call) == "vLLM's"  # type: ignore[comparison-overlap]


@pytest.mark.parametrize(
    ("kind", "is_random", "says"),
    [
        (MambaMixer2, False, None),
        (MambaMixer2, True, "rounds recurrent states at random"),
        (KimiGatedDeltaNetAttention, False, "no recurrent state in layers of KimiGatedDeltaNet"),
    ],
)
def test_layers_whose_drafts_are_chains(kind, is_random, says):
    config = config_that_branches(
        mamba_config=SimpleNamespace(enable_stochastic_rounding=is_random),
        compilation_config=SimpleNamespace(static_forward_context={"one": kind.__new__(kind)}),
    )
    groups = [SimpleNamespace(layer_names=["one"])]
    obstacle = branching_obstacle(config, groups, GPUTreeAttention())
    assert obstacle is says is None or str(says) in str(obstacle)
