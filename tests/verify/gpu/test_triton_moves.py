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
