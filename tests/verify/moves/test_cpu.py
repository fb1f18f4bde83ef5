"""A move copies K and V of a slot in every layer; all other slots stay unchanged."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lookahead_vllm.verify.moves.cpu import KVMover, LatentMover
from tests.support.packing import pack, unpack


def make_cache(blocks, heads, block_size, head_size, dtype, strided):
    cache = torch.randn(blocks, 2, heads, block_size, 2 * head_size).to(dtype)
    return cache[:, 0] if strided else cache[:, 0].contiguous()


def slots_of(cache: torch.Tensor) -> dict[int, tuple[bytes, bytes]]:
    """K and V of all heads, by slot."""
    _, _, block_size, width = cache.shape
    slots = {}
    for block, content in enumerate(cache.flatten(2)):
        k = content[:, : block_size * width // 2].unflatten(1, (width // 2, block_size))
        v = content[:, block_size * width // 2 :].unflatten(1, (block_size, width // 2))
        for offset in range(block_size):
            pair = (k[:, :, offset].float().numpy(), v[:, offset].float().numpy())
            slots[block * block_size + offset] = (pair[0].tobytes(), pair[1].tobytes())
    return slots


@st.composite
def moves(draw, slots):
    """Moves of two requests over disjoint slots, by ascending source, each to a lower slot."""
    order = draw(st.permutations(range(slots)))
    src, dst = [], []
    for request_slots in (sorted(order[: slots // 2]), sorted(order[slots // 2 :])):
        moved = sorted(draw(st.sets(st.sampled_from(request_slots), max_size=8)))
        free = 0
        for slot in moved:
            if request_slots[free] < slot:
                src.append(slot)
                dst.append(request_slots[free])
                free += 1
    return src, dst


@settings(max_examples=40, deadline=None)
@given(
    moves=moves(slots=5 * 16),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    strided=st.booleans(),
    layers=st.lists(st.sampled_from([(1, 32), (2, 64), (3, 32)]), min_size=1, max_size=3),
    packed=st.booleans(),
)
def test_moves_equal_those_of_a_dict(moves, dtype, strided, layers, packed):
    """Layers may differ in heads and head size; a slot may stay, and be vLLM's mark for none."""
    stays = next(slot for slot in range(5 * 16) if slot not in moves[1])
    src, dst = ([stays, *slots, -1] for slots in moves)
    packed = packed and dtype == torch.bfloat16
    caches = [make_cache(5, heads, 16, size, dtype, strided) for heads, size in layers]
    expected = [slots_of(cache) for cache in caches]
    for contents in expected:
        contents.update({to: contents[at] for at, to in zip(*moves, strict=True)})
    for cache in caches if packed else []:
        pack(cache)
    KVMover(caches, 16, packed).move(torch.tensor(src).long(), torch.tensor(dst).long())
    for cache in caches if packed else []:
        unpack(cache)
    assert [slots_of(cache) for cache in caches] == expected


@pytest.mark.parametrize("packed", [False, True])
def test_slots_are_sent_to_another_cache(packed):
    """Bytes read from one cache and written to another are the K and V of these slots."""
    dtype = torch.bfloat16 if packed else torch.float32
    here, there = (
        [make_cache(3, h, 16, 32 * h, dtype, strided=h == 2) for h in (1, 2)] for _ in range(2)
    )
    expected = [slots_of(cache) for cache in there]
    for contents, cache in zip(expected, here, strict=True):
        sent = slots_of(cache)
        contents.update({3: sent[40], 17: sent[5]})
    for cache in (*here, *there) if packed else ():
        pack(cache)
    values = KVMover(here, 16, packed=packed).read(torch.tensor([40, 5]))
    assert values.shape == (2, 2 * (32 + 2 * 64) * dtype.itemsize) and values.dtype == torch.uint8
    KVMover(there, 16, packed=packed).write(torch.tensor([3, 17]), values)
    for cache in there if packed else ():
        unpack(cache)
    assert [slots_of(cache) for cache in there] == expected


def test_latents_are_sent_to_another_cache():
    here, there = ([torch.randn(3, 16, w).bfloat16() for w in (24, 40)] for _ in range(2))
    expected = [cache.clone() for cache in there]
    for cache, sent in zip(expected, here, strict=True):
        cache[0, 3], cache[1, 1] = sent[2, 8], sent[0, 5]
    LatentMover(there).write(torch.tensor([3, 17]), LatentMover(here).read(torch.tensor([40, 5])))
    for cache, same in zip(there, expected, strict=True):
        assert torch.equal(cache, same)


@settings(max_examples=40, deadline=None)
@given(
    moves=moves(slots=5 * 16),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    layers=st.integers(1, 3),
)
def test_latents_move_as_those_of_a_dict(moves, dtype, layers):
    src, dst = moves
    caches = [torch.randn(5, 2, 16, 24).to(dtype)[:, 0] for _ in range(layers)]
    expected = [cache.flatten(0, 1).clone() for cache in caches]
    for rows in expected:
        before = rows.clone()
        for source, target in zip(src, dst, strict=True):
            rows[target] = before[source]
    LatentMover(caches).move(torch.tensor([3, *src]), torch.tensor([3, *dst]))
    for cache, rows in zip(caches, expected, strict=True):
        assert torch.equal(cache.flatten(0, 1), rows)
