"""Recurrent layers at the nodes of trees in Triton equal vLLM's kernels for one token."""

import inspect
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.support.recurrence_cases import Convolution, GatedDelta, Mamba2, random_step
from tests.verify.recurrence.test_recurrence import BF16, F32, check_levels

pytestmark = pytest.mark.interpreted

STEP = random_step(1, [6, 0, 7], paddings=0)


@pytest.fixture(scope="module")
def vllm_kernels() -> Any:
    """vLLM's kernels for one token, which the interpreter runs."""
    pytest.importorskip("vllm")
    from tests.support import triton_interpreter

    triton_interpreter.enable()
    from triton.runtime import driver

    target = SimpleNamespace(backend="cpu")  # which is asked for at import
    driver.set_active(SimpleNamespace(get_current_target=lambda: target))
    from vllm.model_executor.layers.mamba.ops import causal_conv1d, mamba_ssm
    from vllm.third_party.flash_linear_attention.ops import fused_recurrent

    fused_recurrent.exp = lambda x: fused_recurrent.tl.exp(x)  # which the interpreter replaces
    return causal_conv1d, mamba_ssm, fused_recurrent


def check(actual: Tensor, expected: Tensor) -> None:
    assert torch.equal(actual, expected)


@pytest.mark.parametrize("dtype", [F32, BF16])
def test_mamba2_equals_vllm(dtype, vllm_kernels):
    layer = Mamba2(1, dtype, dtype)
    kernel = vllm_kernels[1]._selective_scan_update_kernel

    def one_token(states: Tensor, rows: Any) -> Tensor:
        x, dt, A, B, C, D, dt_bias = layer.arguments(rows)
        out = torch.empty(x.shape, dtype=x.dtype)
        kernel[(-(-layer.dim // 16), len(x), layer.heads)](
            states, None, x, dt, dt_bias, A, B, C, D, None, out, None, None, -1, None, None,
            len(x), layer.heads, layer.dim, layer.dstate, layer.heads // layer.groups,
            *states.stride(), *x.stride(), *dt.stride(), *dt_bias.stride(), *A.stride(),
            *B.stride(), *C.stride(), *D.stride(), 0, 0, 0, *out.stride(), 0, 0, 0, 0,
            True, True, 16, USE_RS_ROUNDING=False, PHILOX_ROUNDS=0,
        )  # fmt: skip
        return out

    check_levels(layer, STEP, one_token, check)


@pytest.mark.parametrize("dtype", [F32, BF16])
def test_gated_delta_equals_vllm(dtype, vllm_kernels):
    layer = GatedDelta(1, dtype, dtype)
    plain = vllm_kernels[2].fused_recurrent_gated_delta_rule_packed_decode

    def one_token(states: Tensor, rows: Any) -> Tensor:
        q, k, v, a, b = rows
        packed = torch.cat([t.flatten(1) for t in (q, k, v)], dim=1)
        pool = torch.cat((torch.zeros_like(states[:1]), states))  # slot 0 is null
        out = torch.empty(v.shape, dtype=v.dtype)[:, None]
        plain(
            packed, a, b, layer.A_log, layer.dt_bias, layer.key_size**-0.5, pool, out,
            torch.arange(1, len(pool), dtype=torch.int32), use_qk_l2norm_in_kernel=True,
        )  # fmt: skip
        states.copy_(pool[1:])
        return out[:, 0]

    check_levels(layer, STEP, one_token, check)


@pytest.mark.parametrize("seed", range(2))
def test_chains_of_a_convolution_equal_vllm(seed, vllm_kernels, monkeypatch):
    """Its kernel for chains leaves the same window."""
    from triton.runtime.interpreter import interpreter_builder as builder

    load = builder.create_masked_load

    def load_where(ptrs: Any, mask: Any, *rest: Any) -> Any:
        mask.data = mask.data.astype(bool)  # vLLM passes integer masks
        return load(ptrs, mask, *rest)

    monkeypatch.setattr(builder, "create_masked_load", load_where)
    layer = Convolution(seed)
    step = random_step(seed, [6, 0, 7], columns=8, chains=True)
    (x,) = layer.draw(step.num_rows)
    trees = step.trees()
    after, expected = layer.cache.clone(), torch.zeros(x.shape)
    requests = len(trees.starts) - 1
    kernel, dim = vllm_kernels[0]._causal_conv1d_update_kernel, x.shape[1]
    steps, entries = step.columns.shape[1], layer.width - 2 + step.columns.shape[1]
    counts = step.accepted.clamp(min=1)
    stride_x, stride_w, stride_state = (t.stride() for t in (x, layer.weight, after))
    arguments = dict(
        x_ptr=x, w_ptr=layer.weight, bias_ptr=layer.bias, conv_state_ptr=after, o_ptr=expected,
        conv_state_indices_ptr=trees.columns, num_accepted_tokens_ptr=counts,
        query_start_loc_ptr=trees.starts, batch=requests, dim=dim, seqlen=steps,
        state_len=entries, num_cache_lines=len(after),
        stride_x_seq=0, stride_x_dim=1, stride_x_token=stride_x[0],
        stride_w_dim=stride_w[0], stride_w_width=stride_w[1],
        stride_conv_state_seq=stride_state[0], stride_conv_state_dim=stride_state[1],
        stride_conv_state_tok=stride_state[2], stride_state_indices=trees.columns.stride(0),
        stride_o_seq=0, stride_o_dim=1, stride_o_token=dim, null_block_id=0,
        HAS_BIAS=layer.bias is not None, KERNEL_WIDTH=layer.width,
        SILU_ACTIVATION=layer.activation is not None, IS_VARLEN=True, IS_SPEC_DECODING=True,
        NP2_STATELEN=16, HAS_NULL_BLOCK=True, BLOCK_N=256, launch_pdl=False,
    )  # fmt: skip
    if "IS_APC_ENABLED" in inspect.signature(kernel.fn).parameters:  # vLLM 0.32
        arguments |= dict(
            block_idx_last_scheduled_token=None, initial_state_idx=None, IS_APC_ENABLED=False
        )
    kernel[(requests, -(-dim // 256))](**arguments)
    cache = layer.cache.clone()
    assert torch.equal(layer.run(cache, (x,), trees), expected)
    assert torch.equal(cache, after)
