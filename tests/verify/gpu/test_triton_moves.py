"""KV moves on a GPU read all slots, then write them, in every layer; run by the interpreter."""

import os

import pytest
import torch

pytestmark = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") != "1", reason="runs in another process"
)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn], ids=str)
@pytest.mark.parametrize("heads_first", [False, True])
@pytest.mark.parametrize("width", [128, 144])
def test_only_the_given_slots_are_written_in_every_layer(dtype, heads_first, width):
    from lookahead_vllm.verify.gpu.triton_moves import PagedKVMover

    torch.manual_seed(width)
    blocks, heads, size = 5, 3, 16
    caches = []
    for _ in range(2):
        shape = (blocks, heads, size, width) if heads_first else (blocks, size, heads, width)
        cache = torch.randn(shape).to(dtype)
        caches.append(cache if heads_first else cache.transpose(1, 2))
    # Slots may be both read and written; a read gives the old content.
    src, dst = torch.tensor([7, 9, 33, 34, 40]), torch.tensor([6, 7, 15, 33, 79])
    expected = [cache.clone() for cache in caches]
    for before, after in zip(caches, expected, strict=True):
        for a, b in zip(src.tolist(), dst.tolist(), strict=True):
            after[b // size, :, b % size] = before[a // size, :, a % size]
    PagedKVMover(caches).move(src, dst)
    for cache, after in zip(caches, expected, strict=True):
        assert torch.equal(cache.float(), after.float())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float8_e4m3fn], ids=str)
def test_slots_are_sent_to_another_cache(dtype):
    from lookahead_vllm.verify.gpu.triton_moves import PagedKVMover

    here, there = (
        [torch.randn(5, 16, 3, 128).to(dtype).transpose(1, 2) for _ in range(2)] for _ in range(2)
    )
    expected = [cache.clone() for cache in there]
    for cache, sent in zip(expected, here, strict=True):
        cache[0, :, 3], cache[1, :, 1] = sent[2, :, 8], sent[0, :, 5]
    values = PagedKVMover(here).read(torch.tensor([40, 5]))
    assert values.shape == (2, 2 * 3 * 128 * dtype.itemsize)
    PagedKVMover(there).write(torch.tensor([3, 17]), values)
    for cache, same in zip(there, expected, strict=True):
        assert torch.equal(cache.float(), same.float())


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


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("is_flat", [False, True])
def test_a_fixed_number_of_entries_may_map_to_themselves(seed, is_flat):
    from lookahead_vllm.verify.gpu.triton_moves import PagedKVMover

    caches = [torch.randn(5, 3, 16, 24).bfloat16() for _ in range(2)]
    before = [cache.clone() for cache in caches]
    src, dst, moves = path_moves(seed)
    expected = [cache.clone() for cache in caches]
    for old, new in zip(before, expected, strict=True):
        for a, b in moves:
            new[b // 16, :, b % 16] = old[a // 16, :, a % 16]
    mover = PagedKVMover(caches)
    if is_flat:
        mover.move(src.flatten(), dst.flatten())
    else:
        mover.move_paths(src, dst)
    assert moves
    for cache, new in zip(caches, expected, strict=True):
        assert torch.equal(cache, new)


@pytest.mark.parametrize("width", [65, 300])
def test_no_move_after_the_last_one_is_visited(width, monkeypatch):
    """Trees have many more nodes than a step accepts."""
    from triton.runtime.interpreter import interpreter_builder

    from lookahead_vllm.verify.gpu.triton_moves import PagedKVMover

    loads = []
    load = interpreter_builder.create_masked_load
    monkeypatch.setattr(
        interpreter_builder, "create_masked_load", lambda *args: loads.append(1) or load(*args)
    )
    cache = torch.randn(30, 1, 16, 24)
    expected = cache.clone()
    expected[0, :, 2] = cache[1, :, 4]
    path = torch.zeros(1, width, dtype=torch.int64)
    src, dst = path.clone(), path.clone()
    src[0, 2], dst[0, 2] = 20, 2
    PagedKVMover([cache]).move_paths(src, dst)
    assert torch.equal(cache, expected)
    assert len(loads) < 20, len(loads)


def test_entries_without_a_slot_are_skipped():
    """vLLM marks tokens without KV by a slot of -1."""
    from lookahead_vllm.verify.gpu.triton_moves import PagedKVMover

    caches = [torch.randn(3, 2, 16, 8)]
    before = caches[0].clone()
    none = torch.full((2, 3), -1)
    mover = PagedKVMover(caches)
    mover.move_paths(none, none)
    mover.move_paths(none[:0], none[:0])
    assert torch.equal(caches[0], before)


@pytest.mark.parametrize("seed", range(2))
def test_layers_of_one_table_may_differ(seed):
    """As in models whose layers have different numbers of KV heads."""
    from lookahead_vllm.verify.gpu.triton_moves import PagedKVMovers

    shapes = [(5, 3, 16, 24), (5, 1, 16, 24), (5, 3, 16, 24), (5, 2, 16, 64)]
    caches = [torch.randn(shape).bfloat16() for shape in shapes]
    src, dst, moves = path_moves(seed)
    expected = [cache.clone() for cache in caches]
    for old, new in zip(caches, expected, strict=True):
        before = old.clone()
        for a, b in moves:
            new[b // 16, :, b % 16] = before[a // 16, :, a % 16]
    movers = PagedKVMovers(caches)
    values = movers.read(src.flatten())
    movers.move_paths(src, dst)
    for cache, new in zip(caches, expected, strict=True):
        assert torch.equal(cache, new)
    other = PagedKVMovers([torch.zeros(shape).bfloat16() for shape in shapes])
    other.write(dst.flatten(), values)
    assert torch.equal(other.read(dst.flatten()), values)


def test_wrong_arguments_are_refused():
    from lookahead_vllm.verify.gpu.triton_moves import PagedKVMover

    cache = torch.zeros(2, 1, 16, 8)
    with pytest.raises(ValueError, match=r"are alike; got \[2, 1, 16, 4\]"):
        PagedKVMover([cache, torch.zeros(2, 1, 16, 4)])
    with pytest.raises(ValueError, match="1, 2 or 4 bytes an element"):
        PagedKVMover([cache.double()])
    mover = PagedKVMover([cache])
    mover.move(torch.empty(0, dtype=torch.int64), torch.empty(0, dtype=torch.int64))
    with pytest.raises(ValueError, match=r"slots lie in 0\.\.31; got \[\[32\], \[0\]\]"):
        mover.move(torch.tensor([32]), torch.tensor([0]))
    with pytest.raises(ValueError, match="int64 and equally long"):
        mover.move(torch.tensor([1]).int(), torch.tensor([0]).int())
    with pytest.raises(
        ValueError, match=r"int64 \[r, width\] on cpu; got torch.int64 \[1\] on cpu"
    ):
        mover.move_paths(torch.tensor([1]), torch.tensor([0]))
