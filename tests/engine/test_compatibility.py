"""The installed vLLM has all that lookahead uses; another release is refused with one sentence."""

from __future__ import annotations

import ast
import functools
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import get_args

import pytest
import vllm

from lookahead_vllm.engine import compatibility
from lookahead_vllm.engine.seams import SEAMS
from lookahead_vllm.engine.seams.seam import Use

SITE = Path(vllm.__file__).parent.parent


def test_the_installed_vllm_fits() -> None:
    assert not list(compatibility.problems())


@pytest.mark.parametrize(
    ("version", "says"),
    [
        ("0.32.4", None),
        ("0.33.1.dev5+g1a2b", None),
        ("0.34.0", "the installed vLLM is 0.34; install vllm==0.33.*"),
        ("0.3.2", "the installed vLLM is 0.3;"),
        (None, "the installed vLLM is of no release;"),
    ],
)
def test_an_engine_starts_with_a_supported_release(
    version: str | None, says: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compatibility, "_package", lambda: tmp_path)
    if version:
        (tmp_path / "_version.py").write_text(f"__version__ = version = '{version}'\n")
    if says is None:
        compatibility.check()
        return
    with pytest.raises(compatibility.SeamError) as error:
        compatibility.check()
    assert says in str(error.value) and "\n" not in str(error.value)


parsed = functools.cache(ast.parse)
"""By the text of a source: most files of a copy are those of the installed release."""


@pytest.fixture(scope="module", autouse=True)
def _forget_sources() -> Iterator[None]:
    """Syntax trees are millions of objects, which would slow down all later tests."""
    yield
    for function in (parsed, places, compatibility._parse):
        function.cache_clear()


@pytest.fixture
def other_release(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the installed sources, which a test may change."""
    parse = functools.lru_cache(maxsize=0)(lambda path: parsed(path.read_bytes()))
    monkeypatch.setattr(compatibility, "_parse", parse)
    no_source = shutil.ignore_patterns("*.so", "*.pyc", "*.json", "*.jinja", "*.html")
    shutil.copytree(SITE / "vllm", tmp_path / "vllm", ignore=no_source, copy_function=os.symlink)
    return tmp_path


@pytest.mark.parametrize(
    ("module", "old", "new", "problem"),
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
            "vllm/v1/kv_cache_interface.py",
            "def is_quantized_kv_cache(",
            "def is_quantized(",
            "vllm.v1.kv_cache_interface has no is_quantized_kv_cache",
        ),
    ],
)
def test_what_is_replaced_or_imported_is_compared(
    other_release: Path, module: str, old: str, new: str, problem: str
) -> None:
    assert not list(compatibility.problems(other_release))
    path = other_release / module
    source = path.read_text()
    assert old in source
    path.unlink()  # a link to the installed one
    path.write_text(source.replace(old, new))
    assert any(problem in found for found in compatibility.problems(other_release))


def test_a_removed_module_is_reported(other_release: Path) -> None:
    (other_release / "vllm/v1/worker/cpu_worker.py").unlink()
    assert "there is no module vllm.v1.worker.cpu_worker" in compatibility.problems(other_release)


def test_a_name_that_is_only_read_is_compared(other_release: Path) -> None:
    name = "num_computed_tokens_np"
    for path in other_release.rglob("*.py"):
        if name in (source := path.read_text()):
            path.unlink()
            path.write_text(re.sub(rf"\b{name}\b", f"{name}_now", source))
    [problem] = compatibility.problems(other_release)
    assert problem.startswith(f"nothing is called {name} any more, which engine/worker/")


def test_a_seam_of_one_release_is_not_required_of_others(other_release: Path) -> None:
    chat = other_release / "vllm/entrypoints/openai/chat_completion/serving.py"
    source = chat.read_text()
    chat.unlink()
    chat.write_text(re.sub(r"chat_completion_stream_generator(_raw)?\b", "stream", source))
    (other_release / "vllm/_version.py").unlink()
    name = "OpenAIServingChat.chat_completion_stream_generator"
    for version, ending in (("0.32.4", ""), ("0.33.0", "_raw")):
        (other_release / "vllm/_version.py").write_text(f"__version__ = v = '{version}'\n")
        found = [problem for problem in compatibility.problems(other_release) if name in problem]
        assert [problem.rpartition(" ")[2] for problem in found] == [name + ending]
        (other_release / "vllm/_version.py").unlink()


# ---- the table -----------------------------------------------------------------------------------


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


def test_every_renamed_place_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    package = SITE / "vllm"
    release, unnoticed, tried = compatibility._release(package), [], 0
    monkeypatch.setattr(compatibility, "_parse", functools.cache(compatibility._parse.__wrapped__))
    for seam in SEAMS:
        if seam.releases and release not in seam.releases:
            continue
        path = compatibility._file(package, seam.module)
        assert path is not None
        for name in {*filter(None, seam.name.split(".")), *seam.needs} - {"__init__"}:
            tried += 1
            with renamed(path, name):
                if not compatibility._problem(package, seam):
                    unnoticed.append(f"{seam.module} {name}")
    assert tried > 200
    assert not unnoticed


def test_every_seam_has_a_reason_and_an_end() -> None:
    for seam in SEAMS:
        assert seam.use in get_args(Use), seam.name
        assert seam.why and seam.until, seam.name


def test_no_place_is_patched_by_two_seams() -> None:
    places = [place for seam in SEAMS if seam.is_patch for place in seam.places]
    assert len(places) == len(set(places)) > 15
