"""vLLM's KV cache layout for AMX."""

import torch


def pack(cache: torch.Tensor) -> None:
    """Convert a cache [blocks, heads, block_size, 2 * head_size] to the packed layout, in place."""
    blocks, heads, block_size, width = cache.shape
    size = width // 2
    plain = cache.flatten(2)
    k = plain[..., : block_size * size].reshape(blocks, heads, size // 2, 2, block_size // 16, 16)
    v = plain[..., block_size * size :].reshape(blocks, heads, block_size // 2, 2, size // 16, 16)
    halves = k.permute(0, 1, 4, 2, 5, 3).flatten(2), v.permute(0, 1, 4, 2, 5, 3).flatten(2)
    cache.copy_(torch.cat(halves, dim=-1).view_as(cache))


def unpack(cache: torch.Tensor) -> None:
    """Convert a cache back from the packed layout, in place."""
    blocks, heads, block_size, width = cache.shape
    size = width // 2
    packed = cache.flatten(2)
    k = packed[..., : block_size * size].reshape(blocks, heads, block_size // 16, size // 2, 16, 2)
    v = packed[..., block_size * size :].reshape(blocks, heads, size // 16, block_size // 2, 16, 2)
    halves = k.permute(0, 1, 3, 5, 2, 4).flatten(2), v.permute(0, 1, 3, 5, 2, 4).flatten(2)
    cache.copy_(torch.cat(halves, dim=-1).view_as(cache))
