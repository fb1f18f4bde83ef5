"""KV moves on a GPU, in every layer; run by the interpreter."""

import pytest
import torch

pytestmark = pytest.mark.interpreted


def path_moves(seed: int) -> tuple[torch.Tensor, torch.Tensor, list[tuple[int, int]]]:
    """Moves of three requests over 80 slots, of a fixed shape, and those that move anything."""
    generator = torch.Generator().manual_seed(seed)
    slots = torch.randperm(80, generator=generator)
    src, dst = torch.empty(3, 6, dtype=torch.int64), torch.empty(3, 6, dtype=torch.int64)
    moves = []
    for request in range(3):
        own = slots[request * 20 :][:20]  # in the order of the step's tokens
        src[request], dst[request] = own[0], own[0]
        path = (torch.randperm(19, generator=generator)[: 2 * request + 1] + 1).sort().values
        for depth, at in enumerate(path.tolist(), 1):
            if at != depth:
                src[request, depth], dst[request, depth] = own[at], own[depth]
                moves.append((int(own[at]), int(own[depth])))
    return src, dst, moves


def caches_of(dtype: torch.dtype, heads_first: bool = True) -> list[torch.Tensor]:
    """Layers of one block table, which may differ in their KV heads and their width."""
    caches = []
    for heads, width in ((3, 128), (1, 144), (3, 128)):
        shape = (5, heads, 16, width) if heads_first else (5, 16, heads, width)
        cache = torch.randn(shape).to(dtype)
        caches.append(cache if heads_first else cache.transpose(1, 2))
    return caches


@pytest.mark.parametrize(
    ("dtype", "heads_first", "is_flat"),
    [
        (torch.float32, True, False),
        (torch.bfloat16, False, False),
        (torch.float8_e4m3fn, True, True),
        (torch.bfloat16, False, True),
    ],
)
def test_only_the_given_slots_are_written_in_every_layer(dtype, heads_first, is_flat):
    """Of a fixed number of entries, most map to themselves."""
    from lookahead_vllm.verify.moves.triton import PagedKVMover

    src, dst, moves = path_moves(seed=int(heads_first))
    caches = caches_of(dtype, heads_first)
    expected = [cache.float() for cache in caches]
    for after in expected:
        before = after.clone()
        for a, b in moves:
            after[b // 16, :, b % 16] = before[a // 16, :, a % 16]
    mover = PagedKVMover(caches)
    if is_flat:
        mover.move(src.flatten(), dst.flatten())
    else:
        mover.move_paths(src, dst)
    assert moves
    for cache, after in zip(caches, expected, strict=True):
        assert torch.equal(cache.float(), after)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float8_e4m3fn], ids=str)
def test_slots_are_sent_to_another_cache(dtype):
    from lookahead_vllm.verify.moves.triton import PagedKVMover

    here, there = caches_of(dtype), caches_of(dtype)
    expected = [cache.clone() for cache in there]
    for cache, sent in zip(expected, here, strict=True):
        cache[0, :, 3], cache[1, :, 1] = sent[2, :, 8], sent[0, :, 5]
    values = PagedKVMover(here).read(torch.tensor([40, 5]))
    assert values.shape == (2, (2 * 3 * 128 + 144) * dtype.itemsize)
    PagedKVMover(there).write(torch.tensor([3, 17]), values)
    for cache, same in zip(there, expected, strict=True):
        assert torch.equal(cache.float(), same.float())


def test_entries_without_a_slot_are_skipped():
    """vLLM marks tokens without KV by a slot of -1."""
    from lookahead_vllm.verify.moves.triton import PagedKVMover

    cache = torch.randn(3, 2, 16, 8)
    before, none = cache.clone(), torch.full((2, 3), -1)
    mover = PagedKVMover([cache])
    mover.move_paths(none, none)
    mover.move_paths(none[:0], none[:0])
    assert torch.equal(cache, before)
