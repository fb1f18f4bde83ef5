"""The kernels compile for several GPUs, which need not be present, and fit into their memories."""

from __future__ import annotations

import inspect
import os
import re
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.support.attention_cases import PagedAttentionCase, random_tree
from tests.support.latent_cases import LatentCase

triton = pytest.importorskip("triton")
TOOLS = Path(triton.__file__).parent / "backends/nvidia/bin"
pytestmark = [
    pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="interpreted"),
    pytest.mark.skipif(not (TOOLS / "ptxas").is_file(), reason="this Triton has no ptxas"),
]

SHARED_BYTES = 99 << 10  # of shared memory per block, on every device since Ampere
TRITON_NAMES = {
    torch.float32: "fp32",
    torch.float16: "fp16",
    torch.bfloat16: "bf16",
    torch.float8_e4m3fn: "fp8e4nv",
    torch.int32: "i32",
    torch.int64: "i64",
    torch.int8: "i8",
    torch.int16: "i16",
    torch.uint64: "u64",
    torch.bool: "i1",
}


class Launches:
    """Replaces a kernel and records the arguments of its launches."""

    def __init__(self, kernel: Any) -> None:
        self.kernel = kernel
        self.calls: list[dict[str, Any]] = []

    def __getitem__(self, grid: Any) -> Any:
        return self._launch

    def _launch(self, *args: Any, **kwargs: Any) -> None:
        names = inspect.signature(self.kernel.fn).parameters
        self.calls.append(dict(zip(names, args, strict=False)) | kwargs)

    def compile(self, capability: int) -> Any:
        """Compile the kernel for the arguments of the last launch."""
        from triton.backends.compiler import GPUTarget
        from triton.compiler import ASTSource

        call = dict(self.calls[-1])
        options = {k: call.pop(k) for k in ("num_warps", "num_stages") if k in call}
        names = list(inspect.signature(self.kernel.fn).parameters)
        signature, constants, aligned = {}, {}, {}
        for place, name in enumerate(names):
            value = call[name]
            if name.isupper():
                signature[name], constants[(place,)] = "constexpr", value
            elif isinstance(value, torch.Tensor):
                signature[name] = f"*{TRITON_NAMES[value.dtype]}"
            else:
                signature[name] = "fp32" if isinstance(value, float) else "i32"
            if isinstance(value, torch.Tensor) or (signature[name] == "i32" and value % 16 == 0):
                aligned[(place,)] = [["tt.divisibility", 16]]
        source = ASTSource(self.kernel, signature, constants, aligned)
        return triton.compile(source, GPUTarget("cuda", capability, 32), options)


def instructions_of(compiled: Any) -> list[tuple[int, str]]:
    """Address and text of each instruction."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        command = [str(TOOLS / "cuobjdump"), "-sass", file.name]
        listing = subprocess.run(command, capture_output=True, check=True, text=True).stdout
    instructions = re.findall(r"^\s+/\*([0-9a-f]{4,})\*/\s+(.*?);", listing, re.MULTILINE)
    return [(int(address, 16), text) for address, text in instructions]


def spills(instructions: Sequence[tuple[int, str]]) -> int:
    """Number of instructions that load from or store to local memory."""
    return sum(bool(re.search(r"\b(LDL|STL)\b", text)) for _, text in instructions)


def loops_with_dots(instructions: list[tuple[int, str]]) -> Iterator[list[tuple[int, str]]]:
    """The bodies of loops that use tensor cores."""
    for end, text in instructions:
        jump = re.search(r"\bBRA\b.*?(0x[0-9a-f]+)", text)
        start = int(jump[1], 16) if jump else end
        body = [step for step in instructions if start <= step[0] <= end]
        if start < end and any("MMA" in text for _, text in body):
            yield body


ALL_OPTIONS = dict(window=20, alibi=True, soft_cap=5.0, sinks=True)


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
def test_tree_attention_fits_and_does_not_spill(
    capability: int,
    nodes: int,
    context: int,
    options: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from lookahead_vllm.verify.gpu import triton_attention

    attend = Launches(triton_attention._attend_tile)
    merge = Launches(triton_attention.merge_splits)
    monkeypatch.setattr(triton_attention, "_attend_tile", attend)
    monkeypatch.setattr(triton_attention, "merge_splits", merge)
    monkeypatch.setattr(triton_attention, "_INTERPRETED_MULTIPROCESSORS", 132)
    tree = random_tree(np.random.default_rng(0), nodes)
    case = PagedAttentionCase(
        [tree], [context], **{"dtype": torch.bfloat16, "head_size": 128, "heads": 8, **options}
    )
    case.run("triton")

    compiled = attend.compile(capability)
    assert compiled.metadata.shared <= SHARED_BYTES
    is_float32 = case.dtype == torch.float32  # without tensor cores
    rows = (nodes + 1) * case.heads // case.kv_heads
    assert ("wgmma" in compiled.asm["ptx"]) == (capability == 90 and rows >= 64 and not is_float32)
    if not is_float32:
        loops = list(loops_with_dots(instructions_of(compiled)))
        assert len(loops) == (2 if case.window > 0 else 3)  # unmasked, masked, draft
        assert not any(map(spills, loops))
        assert "cp.async" in compiled.asm["ptx"]
    assert bool(merge.calls) == (context >= 2 * triton_attention.KEYS_PER_SPLIT)
    if merge.calls:
        assert not spills(instructions_of(merge.compile(capability)))


@pytest.mark.parametrize("capability", [80, 90, 120])
@pytest.mark.parametrize("context", [100, 4000])
def test_latent_attention_fits_and_does_not_spill(
    capability: int, context: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    from lookahead_vllm.verify.gpu import triton_attention, triton_latents

    attend = Launches(triton_latents._attend_latents)
    merge = Launches(triton_latents.merge_splits)
    monkeypatch.setattr(triton_latents, "_attend_latents", attend)
    monkeypatch.setattr(triton_latents, "merge_splits", merge)
    monkeypatch.setattr(triton_attention, "_INTERPRETED_MULTIPROCESSORS", 132)
    tree = random_tree(np.random.default_rng(0), 16)
    LatentCase([tree], [context], 16, 512, 64, 64, torch.bfloat16).run("triton")
    compiled = attend.compile(capability)
    assert compiled.metadata.shared <= SHARED_BYTES
    loops = list(loops_with_dots(instructions_of(compiled)))
    assert len(loops) == 2  # context, draft
    assert not any(map(spills, loops))
    assert bool(merge.calls) == (context > 1000)
    if merge.calls:
        assert not spills(instructions_of(merge.compile(capability)))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float8_e4m3fn])
def test_kv_moves_do_not_spill(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    from lookahead_vllm.verify.gpu import triton_moves

    copy, paths = Launches(triton_moves._copy), Launches(triton_moves._move_paths)
    monkeypatch.setattr(triton_moves, "_copy", copy)
    monkeypatch.setattr(triton_moves, "_move_paths", paths)
    mover = triton_moves.PagedKVMover([torch.zeros(4, 2, 16, 256, dtype=dtype) for _ in range(3)])
    mover.move(torch.tensor([1, 2]), torch.tensor([5, 6]))
    mover.move_paths(torch.tensor([[0, 2]]), torch.tensor([[0, 1]]))
    assert len(copy.calls) == 2 and len(paths.calls) == 1
    for kernel in (copy, paths):
        assert not spills(instructions_of(kernel.compile(90)))


def test_nothing_is_compiled_while_serving(monkeypatch: pytest.MonkeyPatch) -> None:
    """The batches of the warm-up need every specialisation that later batches need."""
    from lookahead_vllm.verify.gpu import triton_attention

    kernels = [Launches(triton_attention._attend_tile), Launches(triton_attention.merge_splits)]
    monkeypatch.setattr(triton_attention, "_attend_tile", kernels[0])
    monkeypatch.setattr(triton_attention, "merge_splits", kernels[1])
    monkeypatch.setattr(triton_attention, "_INTERPRETED_MULTIPROCESSORS", 132)

    def specialisations() -> set[tuple[Any, ...]]:
        """Triton's keys of compiled kernels: constants, types, and divisibility where it counts."""
        keys = set()
        for kernel in kernels:
            params = {param.name: param for param in kernel.kernel.params}
            for call in kernel.calls:
                key: list[Any] = [kernel.kernel.fn.__name__]
                for name, value in call.items():
                    param = params.get(name)
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
    batches = triton_attention.warm_up_batches(6, 2, 128, torch.bfloat16, torch.device("cpu"))
    for batch in batches:
        case.run("triton", batch)
    compiled = specialisations()
    assert len(compiled) == 9  # four sizes of tiles, split or not, and the merge
    for case in cases:
        case.run("triton")
    needed = specialisations()
    assert len(needed) > 4 and needed <= compiled, needed - compiled
