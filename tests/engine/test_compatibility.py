"""The installed vLLM has all that lookahead uses; another release is refused with one sentence."""

from __future__ import annotations

import argparse
import ast
import builtins
import functools
import hashlib
import logging
import os
import re
import shutil
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.machinery import ModuleSpec
from io import IOBase
from pathlib import Path
from typing import Any, get_args

import numpy as np
import prometheus_client
import pytest
import torch
import vllm

from lookahead_vllm.engine import compatibility
from lookahead_vllm.engine.seams import SEAMS, Seam
from lookahead_vllm.engine.seams.seam import Use

SITE = Path(vllm.__file__).parent.parent


def test_the_installed_vllm_fits() -> None:
    assert not list(compatibility.problems())


def test_what_fits_is_parsed_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    parsed: list[str] = []
    monkeypatch.setattr(compatibility, "cache_dir", lambda: tmp_path)
    monkeypatch.setattr(compatibility, "problems", lambda *_: iter(parsed.append("") or ()))
    for _ in range(2):
        compatibility.check(runners=("v1",))
        assert len(parsed) == 1
    compatibility.check(runners=("v2",))
    assert len(parsed) == 2
    monkeypatch.setattr(compatibility, "COMMON", compatibility.COMMON[1:])
    compatibility.check(runners=("v1",))
    assert len(parsed) == 3
    monkeypatch.setattr(compatibility, "problems", lambda *_: iter(["it is old"]))
    for _ in range(2):
        with pytest.raises(compatibility.SeamError, match="it is old"):
            compatibility.check(runners=())


parsed = functools.cache(ast.parse)
"""By the text of a source: most files of a copy are those of the installed release."""


@pytest.fixture(scope="module", autouse=True)
def _forget_sources() -> Iterator[None]:
    """Syntax trees are millions of objects, which would slow down all later tests."""
    yield
    for function in (parsed, own_trees, own_names, places, compatibility._parse):
        function.cache_clear()


@pytest.fixture
def other_release(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the installed sources, which a test may change."""
    parse = functools.lru_cache(maxsize=0)(lambda path: parsed(path.read_bytes()))
    monkeypatch.setattr(compatibility, "_parse", parse)
    no_source = shutil.ignore_patterns("*.so", "*.pyc", "*.json", "*.jinja", "*.html")
    shutil.copytree(SITE / "vllm", tmp_path / "vllm", ignore=no_source, copy_function=os.symlink)
    compatibility.check(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("module", "old", "new", "message"),
    [
        (
            "vllm/v1/worker/gpu_model_runner.py",
            "def _sample(",
            "def _sample_tokens(",
            "vllm.v1.worker.gpu_model_runner has no GPUModelRunner._sample",
        ),
        (
            "vllm/v1/worker/gpu_model_runner.py",
            "        spec_decode_metadata: SpecDecodeMetadata | None,\n    ) -> SamplerOutput:",
            "        metadata: SpecDecodeMetadata | None,\n    ) -> SamplerOutput:",
            "GPUModelRunner._sample has no parameter 'spec_decode_metadata'",
        ),
        (
            "vllm/v1/worker/gpu_model_runner.py",
            "self.discard_request_mask = ",
            "self.discarded = ",
            "GPUModelRunner has no attribute 'discard_request_mask'",
        ),
        (
            "vllm/v1/kv_cache_interface.py",
            "def is_quantized_kv_cache(",
            "def is_quantized(",
            "vllm.v1.kv_cache_interface has no is_quantized_kv_cache",
        ),
    ],
)
def test_another_release_is_refused(
    other_release: Path, module: str, old: str, new: str, message: str
) -> None:
    path = other_release / module
    source = path.read_text()
    assert old in source
    path.unlink()  # a link to the installed one
    path.write_text(source.replace(old, new))
    with pytest.raises(compatibility.SeamError) as error:
        compatibility.check(other_release)
    assert message in str(error.value)
    assert f"install vllm=={compatibility.SUPPORTED[-1]}.*" in str(error.value)
    assert "\n" not in str(error.value)


def test_a_removed_module_is_refused(other_release: Path) -> None:
    (other_release / "vllm/v1/worker/cpu_worker.py").unlink()
    with pytest.raises(compatibility.SeamError, match=r"no module vllm\.v1\.worker\.cpu_worker"):
        compatibility.check(other_release)


def test_renamed_attributes_are_reported(other_release: Path) -> None:
    for name, module in (
        ("_attn_group_iterator", "gpu_model_runner"),
        ("num_tokens_no_spec", "gpu_input_batch"),
        ("req_id_to_index", "gpu_input_batch"),
        ("token_ids_cpu", "gpu_input_batch"),
    ):
        path = other_release / f"vllm/v1/worker/{module}.py"
        source = path.read_text()
        path.unlink()
        path.write_text(re.sub(rf"\b{name}\b", f"{name}_now", source))
        assert any(name in problem for problem in compatibility.problems(other_release)), name


def test_a_seam_of_one_release_is_not_required_of_others(other_release: Path) -> None:
    manager = other_release / "vllm/v1/structured_output/__init__.py"
    source = manager.read_text()
    manager.unlink()
    manager.write_text(source.replace("_masked_reasoning_ends", "_masked_ends"))
    (other_release / "vllm/_version.py").unlink()
    for version, problems in (
        ("0.32.4", []),
        ("0.33.0", ["StructuredOutputManager has no attribute '_masked_reasoning_ends'"]),
        (None, []),
    ):
        if version:
            (other_release / "vllm/_version.py").write_text(f"__version__ = v = '{version}'\n")
        else:
            (other_release / "vllm/_version.py").unlink()
        found = list(compatibility.problems(other_release))
        assert [problem for problem in found if "Structured" in problem] == problems
        assert not found or problems


# ---- the table is complete -----------------------------------------------------------------------

NOT_OURS: tuple[Any, ...] = (
    *(object, type, slice, staticmethod, str, bytes, int, float, tuple, dict, list, set, frozenset),
    *(np.ndarray, torch.Tensor, torch.Generator, hashlib.sha256(), functools.cache(len)),
    *(Path, os.stat_result, logging.Logger, ModuleSpec("", None), argparse.ArgumentParser(), len),
    *(IOBase, weakref.finalize, UnicodeDecodeError),
    *(prometheus_client.Counter, prometheus_client.Gauge, prometheus_client.Histogram, Seam),
)
"""Types and objects of other packages than vLLM, whose attributes are not checked."""

ELSEWHERE = {
    "model_extra": "pydantic's",
    "model_type": "of a model's config, transformers'",
    "index_topk": "of a model's config, transformers'",
    "ngram_vocab_size_ratio": "of a model's config, transformers'",
    "W_UK_T": "of MLAAttention, set by name in process_weights_after_loading",
    "find_jump_forward_string": "xgrammar's",
    "compute_ff_tokens": "llguidance's",
    "spec_method": "read from any release",
}

ENGINE = Path(compatibility.__file__).parent
NEEDS = {name for seam in SEAMS for name in (*seam.needs, *seam.name.split("."))}


@functools.cache
def own_trees() -> dict[Path, ast.Module]:
    """The parsed modules of this package."""
    return {path: ast.parse(path.read_text()) for path in ENGINE.parent.rglob("*.py")}


@functools.cache
def own_names() -> set[str]:
    """The functions, classes and members that this package defines."""
    names: set[str] = set()
    for tree in own_trees().values():
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                names.update((node.name, *compatibility._members(node)))
            elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                names.add(node.name)
    return names


def imported_names(tree: ast.Module) -> set[str]:
    """Names that a module imports from other packages than vLLM."""
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            module = (getattr(node, "module", None) or node.names[0].name).split(".")[0]
            if module != "vllm":
                names.update((a.asname or a.name).split(".")[0] for a in node.names)
    return names


def first(node: ast.expr) -> str:
    """The name at the start of a chain of attributes."""
    while isinstance(node, ast.Attribute):
        node = node.value
    return node.id if isinstance(node, ast.Name) else ""


def uses(tree: ast.Module) -> Iterator[tuple[str, ast.AST]]:
    """Names of attributes, and of keywords of calls, of objects that may be vLLM's."""
    others = imported_names(tree)
    ours = own_names() | set(dir(builtins))
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and first(node) not in others:
            yield node.attr, node
        if not isinstance(node, ast.Call):
            continue
        called = first(node.func)
        if called in ("getattr", "hasattr", "setattr"):
            if isinstance(node.args[1], ast.Constant):
                yield node.args[1].value, node
        elif called not in others and not (isinstance(node.func, ast.Name) and called in ours):
            yield from ((k.arg, node) for k in node.keywords if k.arg)


KEYWORDS = {
    *("axis", "dim", "dtype", "initial", "min", "generator", "exist_ok", "missing_ok", "parents"),
    *("title", "description", "buckets", "part", "source", "non_blocking", "wait", "popleft"),
    *("synchronize", "wait_stream", "cancel_futures", "submit"),
}
"""Of NumPy, torch, collections, concurrent, pathlib, argparse, and of functions in variables."""


def test_all_that_is_used_of_vllm_is_in_the_table() -> None:
    known = NEEDS | own_names() | ELSEWHERE.keys() | KEYWORDS
    known.update(*map(dir, NOT_OURS))
    unknown = [
        f"{path.relative_to(ENGINE)}:{node.lineno} {name}"
        for path, tree in own_trees().items()
        if path.is_relative_to(ENGINE) and path.name != "compatibility.py"
        for name, node in uses(tree)
        if name not in known
    ]
    assert not unknown, "write them into engine/seams/: " + ", ".join(unknown)


def test_imports_in_subfolders_are_found(tmp_path: Path) -> None:
    (tmp_path / "worker" / "v1").mkdir(parents=True)
    (tmp_path / "worker" / "v1" / "runner.py").write_text("from vllm.v1.outputs import X\n")
    assert compatibility._imported(tmp_path) == {("vllm.v1.outputs", "X")}


Places = dict[str, list[tuple[ast.AST, str]]]


@functools.cache
def places(tree: ast.Module) -> Places:
    """By name: the nodes of a module, and their fields, that contain it."""
    found: Places = {}
    for node in ast.walk(tree):
        for field in ("id", "attr", "arg", "name", "asname"):
            if isinstance(name := getattr(node, field, None), str):
                found.setdefault(name, []).append((node, field))
    return found


@contextmanager
def renamed(path: Path, name: str) -> Iterator[None]:
    """Rename `name` in the parsed module of the file `path`."""
    occurrences = places(compatibility._parse(path))[name]
    for node, field in occurrences:
        setattr(node, field, f"{name}_now")
    try:
        yield
    finally:
        for node, field in occurrences:
            setattr(node, field, name)


def test_every_renamed_name_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    package, imported = SITE / "vllm", sorted(compatibility._imported())
    monkeypatch.setattr(compatibility, "_parse", functools.cache(compatibility._parse.__wrapped__))
    version, unnoticed, tried = compatibility._version(package), [], 0
    monkeypatch.setattr(compatibility, "_version", lambda package: version)

    def reported(path: Path, name: str) -> None:
        nonlocal tried
        tried += 1
        with renamed(path, name):
            if not list(compatibility.problems(SITE)):
                unnoticed.append(f"{path.relative_to(SITE)} {name}")

    monkeypatch.setattr(compatibility, "_imported", lambda **_: set())
    monkeypatch.setattr(compatibility, "BY_RUNNER", {"v1": (), "v2": ()})
    for seam in SEAMS:
        if seam.releases and version not in seam.releases:
            continue
        path = compatibility._file(package, seam.module)
        assert path is not None
        monkeypatch.setattr(compatibility, "COMMON", (seam,))
        for name in {*filter(None, seam.name.split(".")), *seam.needs}:
            if name != "__init__":
                reported(path, name)
    monkeypatch.setattr(compatibility, "COMMON", ())
    for module, name in imported:
        path = compatibility._file(package, module)
        if name and path is not None and name in places(compatibility._parse(path)):
            monkeypatch.setattr(compatibility, "_imported", lambda one={(module, name)}, **_: one)
            reported(path, name)
    assert tried > 400
    assert not unnoticed


def test_every_seam_has_a_reason_and_an_end() -> None:
    for seam in SEAMS:
        assert seam.use in get_args(Use), seam.name
        assert seam.why and seam.until, seam.name


def test_no_place_is_patched_by_two_seams() -> None:
    places = [place for seam in SEAMS if seam.is_patch for place in seam.places]
    assert len(places) == len(set(places)) > 15
