"""The kernels compile for several GPUs, which need not be present, and fit into their memories."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from lookahead_vllm.verify import history
from lookahead_vllm.verify.attention import paged_attention
from lookahead_vllm.verify.devices import ON_CPUS, ON_GPUS
from lookahead_vllm.verify.place import Placer
from lookahead_vllm.verify.walk import walk
from tests.support.attention_cases import PagedAttentionCase, random_tree
from tests.support.latent_cases import LatentCase
from tests.support.recurrence_cases import LAYERS, random_step
from tests.support.triton_launches import (
    Launches,
    instructions_of,
    loops_with_dots,
    record_launches,
    spills,
    tools,
)
from tests.verify.history import test_history
from tests.verify.place import test_place
from tests.verify.walk import test_walk

pytestmark = pytest.mark.skipif(not (tools() / "ptxas").is_file(), reason="no ptxas")

SHARED_BYTES = 99 << 10  # of shared memory per block, on every device since Ampere
SHARED_BYTES_OF_HOPPER = 227 << 10
ALL_OPTIONS = dict(window=20, alibi=True, soft_cap=5.0, sinks=True)
KERNELS = {
    "_attend_tile", "merge_splits", "_attend_latents", "_move_paths", "_walk", "_place",
    "_penalize", "_exclude_bad_words", "_find_markers", "_force_ends",
    "_convolve", "_mamba2", "_gated_delta", "_move_states", "_move_inputs",
}  # fmt: skip


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> dict[str, Launches]:
    """Of all kernels, by name; tensors on a CPU stand for a GPU's."""
    found = record_launches(monkeypatch)
    assert set(found) == KERNELS
    for noun, module in ON_GPUS.items():
        monkeypatch.setitem(ON_CPUS, noun, module)
    monkeypatch.setattr("lookahead_vllm.verify.attention.triton._INTERPRETED_MULTIPROCESSORS", 132)
    return found


@pytest.mark.parametrize(
    ("capability", "nodes", "context", "options"),
    [
        (90, 100, 4000, {}),
        (90, 3, 4000, {}),
        (90, 100, 4000, {"head_size": 256}),
        (90, 100, 4000, {"head_size": 64, "fp8": True}),
        (90, 100, 100, {"dtype": torch.float32}),
        (80, 100, 4000, {}),
        (120, 100, 4000, {"dtype": torch.float16, **ALL_OPTIONS}),
    ],
    ids=str,
)
def test_tree_attention_fits_and_does_not_spill(capability, nodes, context, options, launches):
    tree = random_tree(np.random.default_rng(0), nodes)
    case = PagedAttentionCase(
        [tree], [context], **{"dtype": torch.bfloat16, "head_size": 128, "heads": 8, **options}
    )
    case.run("triton")
    compiled = launches["_attend_tile"].compile(capability)
    assert compiled.metadata.shared <= SHARED_BYTES
    is_float32 = case.dtype == torch.float32  # without tensor cores
    rows = (nodes + 1) * case.heads // case.kv_heads
    assert ("wgmma" in compiled.asm["ptx"]) == (capability == 90 and rows >= 64 and not is_float32)
    if not is_float32:
        loops = list(loops_with_dots(instructions_of(compiled)))
        assert len(loops) == (2 if case.window > 0 else 3)  # unmasked, masked, draft
        assert not any(map(spills, loops))
        assert "cp.async" in compiled.asm["ptx"]
    check_merge(launches["merge_splits"], capability, is_launched=context > 1000)


@pytest.mark.parametrize("head_size", [128, 256])
def test_draft_blocks_beside_contexts_fit_and_do_not_spill(head_size, launches):
    """On Hopper, where FlashAttention 3 attends to the contexts."""
    tree = random_tree(np.random.default_rng(0), 64)
    case = PagedAttentionCase([tree], [4000], heads=8, head_size=head_size, dtype=torch.bfloat16)
    lse = torch.zeros(8, len(case.query))
    case.run(lambda call: paged_attention(call._replace(context_lse=lse), "triton"))
    compiled = launches["_attend_tile"].compile(90)
    assert compiled.metadata.shared <= SHARED_BYTES_OF_HOPPER
    loops = list(loops_with_dots(instructions_of(compiled)))
    assert len(loops) == 1 and not any(map(spills, loops))


@pytest.mark.parametrize("capability", [80, 90, 120])
@pytest.mark.parametrize("context", [100, 4000])
def test_latent_attention_fits_and_does_not_spill(capability, context, launches):
    tree = random_tree(np.random.default_rng(0), 16)
    LatentCase([tree], [context], 16, 512, 64, 64, torch.bfloat16).run("triton")
    compiled = launches["_attend_latents"].compile(capability)
    assert compiled.metadata.shared <= SHARED_BYTES
    loops = list(loops_with_dots(instructions_of(compiled)))
    assert len(loops) == 2  # context, draft
    assert not any(map(spills, loops))
    check_merge(launches["merge_splits"], capability, is_launched=context > 1000)


def check_merge(merge: Launches, capability: int, is_launched: bool) -> None:
    assert bool(merge.calls) == is_launched
    if is_launched:
        assert not spills(instructions_of(merge.compile(capability)))


def _move(dtype: torch.dtype = torch.bfloat16) -> None:
    from lookahead_vllm.verify.moves.triton import PagedKVMover

    caches = [torch.zeros(4, 2, 16, 256, dtype=dtype) for _ in range(3)]
    PagedKVMover(caches).move_paths(torch.tensor([[0, 2]]), torch.tensor([[0, 1]]))


def _place(groups: int = 2) -> None:
    case = test_place.random_case(0, groups=groups)
    lengths = torch.zeros(7, dtype=torch.int32)
    rows = test_place.stale_rows(groups)
    Placer(case.table, rows).place(*test_place.arguments_of(case), lengths)


def _change_logits() -> None:
    step = test_history.random_step(0)
    logits, rows = step.logits, step.rows
    history.apply_penalties(logits, rows, step.penalties)
    history.apply_bad_words(logits, rows, step.texts, step.words, step.max_words)
    history.apply_thinking_budgets(logits, rows, step.slots, step.texts, step.thinking)


def _run_layers() -> None:
    sizes = {"mamba2": (8, 2, 64, 128), "gated_delta": (2, 4, 128, 128)}
    for kind, make in LAYERS.items():
        options = {"sizes": sizes[kind]} if kind in sizes else {}
        layer = make(0, torch.bfloat16, torch.float32, **options)
        step = random_step(0, [5])
        layer.run(layer.cache, layer.draw(step.num_rows), step.trees())
        one = torch.ones(1)
        layer.mover(layer.cache).commit(step.columns, torch.zeros(1, 3), one, one)


@pytest.mark.parametrize("capability", [80, 90, 100])
def test_no_other_kernel_spills(capability, launches):
    calls: tuple[Callable[[], object], ...] = (
        *(_move, _place, _change_logits, _run_layers),
        lambda: walk(*test_walk.random_case(0, 3, 100).tensors()),
    )
    for call in calls:
        call()
    called = {name: launch for name, launch in launches.items() if launch.calls}
    assert set(called) == KERNELS - {"_attend_tile", "merge_splits", "_attend_latents"}
    for name, launch in called.items():
        compiled = launch.compile(capability)
        assert not spills(instructions_of(compiled)), name
        if name in ("_convolve", "_mamba2", "_gated_delta", "_move_inputs"):
            assert "bar.sync" in compiled.asm["ptx"], name  # they wait for their stores


def test_nothing_is_compiled_while_serving(launches):
    """The batches of the warm-up need every specialisation that later batches need."""
    from lookahead_vllm.verify.attention.triton import empty_batches

    kernels = [launches["_attend_tile"], launches["merge_splits"]]

    def specialisations() -> set[tuple[Any, ...]]:
        """Triton's keys of compiled kernels: constants, types, and divisibility where it counts."""
        keys = set()
        for kernel in kernels:
            params = {param.name: param for param in kernel.kernel.params}
            for call in kernel.calls:
                key: list[Any] = [kernel.kernel.fn.__name__]
                for name, value in call.items():
                    param = params.get(name)
                    if name == "grid":
                        continue
                    if param is None or param.is_constexpr:
                        key.append((name, value))
                    elif isinstance(value, torch.Tensor):
                        by_alignment = not param.do_not_specialize_on_alignment
                        is_aligned = by_alignment and value.data_ptr() % 16 == 0
                        key.append((name, value.dtype, is_aligned))
                    elif isinstance(value, int) and not param.do_not_specialize:
                        key.append((name, value == 1 or value % 16 == 0))
                keys.add(tuple(key))
            kernel.calls.clear()
        return keys

    cases = [
        PagedAttentionCase(
            [random_tree(np.random.default_rng(nodes), nodes) for nodes in sizes],
            contexts,
            **{"dtype": torch.bfloat16, "head_size": 128, "heads": 6, "layout": "heads first"},
        )
        for sizes, contexts in (
            ([1], [10]), ([8], [5000]), ([15], [100]),
            ([3, 90], [700, 40]), ([40] * 5, [3000] * 5), ([200], [9000]),
        )
    ]  # fmt: skip
    case = cases[0]
    for batch in empty_batches(6, 2, 128, torch.bfloat16, torch.device("cpu")):
        case.run("triton", batch)
    compiled = specialisations()
    assert len(compiled) == 7  # three sizes of tiles, split or not, and the merge
    for case in cases:
        case.run("triton")
    needed = specialisations()
    assert len(needed) > 4 and needed <= compiled, needed - compiled
