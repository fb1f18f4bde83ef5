"""xformers' attention over pages is exact for trees, where xformers can compute them."""

import math
from collections.abc import Iterator

import numpy as np
import pytest
import torch

from lookahead_vllm.draft.tree import DraftTree
from lookahead_vllm.verify.layout.fixed_batch import FixedBatch
from tests.support.attention_cases import PagedAttentionCase, random_tree

pytestmark = pytest.mark.interpreted


@pytest.fixture(autouse=True, scope="module")
def _xformers_on_cpus() -> Iterator[None]:
    """xformers asks for a GPU; its kernel needs none under the interpreter."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XFORMERS_ENABLE_TRITON", "1")
        pytest.importorskip("xformers")
        from xformers.ops.fmha import triton_splitk

        patch.setattr(triton_splitk.FwOp, "SUPPORTED_DEVICES", {"cpu"})
        yield


@pytest.mark.parametrize(
    ("layout", "block_size"), [("tokens first", 16), ("heads first", 32), ("halves", 48)]
)
def test_it_equals_float64_and_writes_no_other_row(layout, block_size):
    trees = [
        random_tree(np.random.default_rng(1), 40),
        DraftTree.chain(range(20)),
        DraftTree.chain([]),
    ]
    options = dict(layout=layout, block_size=block_size, causal=(1,), poison=math.inf)
    case = PagedAttentionCase(
        trees, [65, 0, block_size], 4, 2, head_size=16, dtype=torch.float16, **options
    )
    case.check("xformers")


def test_a_long_context_is_split():
    trees = [random_tree(np.random.default_rng(2), 66), DraftTree.chain([1, 2])]
    case = PagedAttentionCase(trees, [600, 3], 2, 1, head_size=16, dtype=torch.float16)
    case.check("xformers")


def test_buffers_of_a_graph():
    """Each step fills them anew; without a tree, nothing is written."""
    fixed = FixedBatch(48, 8, 16, 200, "cpu")
    for sizes in ([15, 7, 2], [4]):
        trees = [DraftTree.from_lists(range(size), [-1] * size) for size in sizes]
        contexts = [30, 0, 1][: len(sizes)]
        case = PagedAttentionCase(trees, contexts, head_size=16, dtype=torch.float16)
        fixed.fill(case.batch)
        case.paged_batch = fixed.batch
        case.check("xformers")
    fixed.fill(None)
    case.output.fill_(7)
    assert (case.run("xformers") == 7).all()
    too_small = FixedBatch(2, 8, 16, 200, "cpu").batch
    assert len(too_small) == 0 and (case.run("xformers", too_small) == 7).all()


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"dtype": torch.float32}, "float32"),
        ({"head_size": 80}, "heads of 80, only of 16, 32, 64, 128, 256"),
        ({"window": 9}, "sliding window"),
        ({"soft_cap": 3.0}, "soft caps"),
        ({"fp8": True}, "no KV cache of torch.float8_e4m3fn"),
    ],
    ids=str,
)
def test_it_says_what_it_cannot_do(options, reason):
    given = {"dtype": torch.float16, "head_size": 16, **options}
    case = PagedAttentionCase([DraftTree.chain([1, 2])], [20], **given)
    with pytest.raises(ValueError, match=reason):
        case.run("xformers")


def test_it_says_that_it_cannot_skip_padding_behind_a_page():
    """As in hybrids, whose pages are as large as a recurrent state."""
    case = PagedAttentionCase(
        [DraftTree.chain([1, 2])], [20], head_size=16, dtype=torch.float16, layout="tokens first"
    )
    blocks, page, heads, width = case.key_cache.shape
    strides = (page * heads * width + width, heads * width, width, 1)
    padded = torch.zeros(blocks * strides[0], dtype=torch.float16)
    case.key_cache = case.value_cache = padded.as_strided(case.key_cache.shape, strides)
    with pytest.raises(ValueError, match="without padding"):
        case.run("xformers")
