"""Changes to plain vLLM that are no larger than the last bits of a float32 sum."""

from collections import Counter
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import Tensor
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackendImpl
from vllm.v1.worker.gpu.sample.sampler import Sampler

from lookahead_vllm.verify.moves.cpu import keys_and_values

LAST_BITS = 4e-6
"""How much another order of additions may change a logit, a key or a value in float32, relative to
the largest one of its token.

The attention scores of these models are large: lookahead's kernel and PyTorch both differ from
float64 by up to 1.2e-5 of an output's mean."""


@contextmanager
def perturbed_logits(seed: int) -> Iterator[None]:
    """Add noise to all logits before sampling, `LAST_BITS` of the largest one."""
    rng = torch.Generator().manual_seed(seed)

    def with_noise(sample: Any) -> Any:
        def perturbed(self: Any, logits: Tensor, *args: Any, **kwargs: Any) -> Any:
            largest = logits.nan_to_num(0, 0, 0).abs().amax(dim=-1, keepdim=True)
            noise = (2 * torch.rand(logits.shape, generator=rng) - 1).to(logits.device)
            return sample(self, logits + noise * LAST_BITS * largest, *args, **kwargs)

        return perturbed

    with mock.patch.object(Sampler, "__call__", with_noise(Sampler.__call__)):
        yield


class Element(NamedTuple):
    """A number in a KV cache."""

    layer: str
    write: int
    """How often the layer has written to its cache before."""
    is_value: int
    """1 in V, 0 in K."""
    token: int
    """Of those that are written together."""
    head: int
    dimension: int


@contextmanager
def rounded_otherwise(elements: Collection[Element] = ()) -> Iterator[list[Element]]:
    """Round these elements of an fp8 KV cache on a CPU to their other neighbour.

    It is done only where `LAST_BITS` decide about the neighbour. Will hold all elements of which
    this is true, in the order of writes.
    """
    near: list[Element] = []
    writes: Counter[str] = Counter()
    update = CPUAttentionBackendImpl.do_kv_cache_update

    def rounded(
        impl: Any, layer: Any, key: Tensor, value: Tensor, kv_cache: Tensor, slots: Tensor
    ) -> None:
        write = partial(update, impl, layer)
        parts = torch.stack([key, value])  # [2, tokens, heads, dimensions]
        bits = (LAST_BITS * parts.abs().amax(dim=(2, 3), keepdim=True)).expand_as(parts)
        own, below, above = (_stored(write, parts + step, kv_cache) for step in (0, -bits, bits))
        for place in (below != above).nonzero().tolist():
            element = Element(layer.layer_name, writes[layer.layer_name], *place)
            near.append(element)
            if element in elements:
                at = tuple(place)
                parts[at] += bits[at] if own[at] == below[at] else -bits[at]
        writes[layer.layer_name] += 1
        write(*parts, kv_cache, slots)

    with mock.patch.object(CPUAttentionBackendImpl, "do_kv_cache_update", rounded):
        yield near


def _stored(write: Callable[..., None], parts: Tensor, kv_cache: Tensor) -> Tensor:
    """The bytes, like `parts`, that vLLM stores for keys and values in a cache like this one."""
    num_tokens, size = len(parts[0]), parts.shape[-1]
    _, heads, block_size, width = kv_cache.shape
    scratch = kv_cache.new_zeros(-(-num_tokens // block_size), heads, block_size, width)
    write(*parts, scratch, torch.arange(num_tokens))
    halves = keys_and_values(scratch.flatten(2), size, block_size, packed=False)
    return torch.stack(
        [
            half.flatten(4).flatten(2, 3).transpose(1, 2).flatten(0, 1)[:num_tokens]
            for half in halves
        ]
    )
