"""Launches of Triton's kernels, recorded on a CPU, and compiled for GPUs that are not there."""

import ast
import importlib
import inspect
import pkgutil
import re
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from lookahead_vllm import verify

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
Instructions = list[tuple[int, str]]
"""Address and text of each."""


def tools() -> Path:
    """The folder of NVIDIA's assembler, which some builds of Triton lack."""
    triton = pytest.importorskip("triton")
    return Path(triton.__file__).parent / "backends/nvidia/bin"


class Launches:
    """Replaces a kernel and records the arguments of its launches."""

    def __init__(self, kernel: Any) -> None:
        self.kernel = kernel
        self.calls: list[dict[str, Any]] = []

    def __getitem__(self, grid: Any) -> Any:
        return lambda *args, **kwargs: self._launch(grid, *args, **kwargs)

    def _launch(self, grid: Any, *args: Any, **kwargs: Any) -> None:
        names = inspect.signature(self.kernel.fn).parameters
        self.calls.append({"grid": grid} | dict(zip(names, args, strict=False)) | kwargs)

    def compile(self, capability: int) -> Any:
        """Compile the kernel for the arguments of the last launch."""
        import triton
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


def record_launches(patch: pytest.MonkeyPatch) -> dict[str, Launches]:
    """From now on, launches of the kernels in `verify/` are recorded, by name, not made."""
    launches: dict[str, Launches] = {}
    found = pkgutil.walk_packages(verify.__path__, f"{verify.__name__}.")
    names = [module.name for module in found if module.name.endswith(".triton")]
    for module in [importlib.import_module(name) for name in names]:
        for node in ast.walk(ast.parse(inspect.getsource(module))):
            match node:
                case ast.Call(func=ast.Subscript(value=ast.Name(id=name))):
                    kernel = vars(module)[name]
                    launches.setdefault(name, Launches(kernel))
                    patch.setattr(module, name, launches[name])
    return launches


def instructions_of(compiled: Any) -> Instructions:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        command = [str(tools() / "cuobjdump"), "-sass", file.name]
        listing = subprocess.run(command, capture_output=True, check=True, text=True).stdout
    instructions = re.findall(r"^\s+/\*([0-9a-f]{4,})\*/\s+(.*?);", listing, re.MULTILINE)
    return [(int(address, 16), text) for address, text in instructions]


def spills(instructions: Instructions) -> int:
    """Number of instructions that load from or store to local memory."""
    return sum(bool(re.search(r"\b(LDL|STL)\b", text)) for _, text in instructions)


def loops_with_dots(instructions: Instructions) -> Iterator[Instructions]:
    """The bodies of the innermost loops that use tensor cores."""
    starts = []
    for end, text in instructions:
        jump = re.search(r"\bBRA\b.*?(0x[0-9a-f]+)", text)
        start = int(jump[1], 16) if jump else end
        body = [step for step in instructions if start <= step[0] <= end]
        if start < end and any("MMA" in text for _, text in body):
            if not any(start < inner for inner in starts):
                yield body
            starts.append(start)
