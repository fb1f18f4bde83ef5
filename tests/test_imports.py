"""Which folder of the package may import what, read from its sources."""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "lookahead_vllm"

ALLOWED: dict[str, set[str]] = {
    "draft": {"numpy", "numba", "lookahead_vllm.draft"},
    "verify": {
        *("numpy", "torch", "triton", "xformers"),
        *("lookahead_vllm.draft", "lookahead_vllm.verify"),
    },
    "engine": {
        *("numpy", "torch", "vllm", "llvmlite", "prometheus_client", "tqdm"),
        *("lookahead_vllm.draft", "lookahead_vllm.verify", "lookahead_vllm.engine"),
    },
    "bench": {
        *("numpy", "torch", "vllm", "matplotlib", "transformers", "arctic_inference"),
        *("lookahead_vllm.draft", "lookahead_vllm.verify", "lookahead_vllm.engine"),
        "lookahead_vllm.bench",
    },
    "": {"lookahead_vllm.draft"},
}
"""By folder, subfolders included; "" are the modules beside the folders.

Everybody may import the standard library and the modules beside the folders.
"""
FOLDERS = {path.parent.name for path in PACKAGE.glob("*/__init__.py")}
MODULES = sorted(PACKAGE.rglob("*.py"))


def imports(source: str) -> Iterator[str]:
    """Dotted names of all that is imported anywhere in a module, and of our objects in strings."""
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Import(names=names):
                yield from (alias.name for alias in names)
            case ast.ImportFrom(module=module, names=names, level=0):
                yield from (f"{module}.{alias.name}" for alias in names)
            case ast.ImportFrom(module=module, level=level):
                yield "." * level + (module or "")  # allowed to nobody: its direction is not seen
            case ast.Constant(value=str(text)) if re.fullmatch(r"(lookahead_)?vllm(\.\w+)+", text):
                yield text


def is_allowed(name: str, allowed: set[str]) -> bool:
    first, *rest = name.split(".")
    if first == PACKAGE.name and not (rest and rest[0] in FOLDERS):
        return True
    return first in sys.stdlib_module_names or any(
        f"{name}.".startswith(f"{one}.") for one in allowed
    )


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_go_one_way(path: Path) -> None:
    folder = path.relative_to(PACKAGE).parts[0] if path.parent != PACKAGE else ""
    assert folder in ALLOWED, f"say in ALLOWED what {folder}/ may import"
    names = set(imports(path.read_text()))
    assert not {name for name in names if not is_allowed(name, ALLOWED[folder])}


def test_all_modules_are_looked_at() -> None:
    assert set(ALLOWED) == FOLDERS | {""}
    assert {path.relative_to(PACKAGE).parts[0] for path in MODULES} >= FOLDERS
    own = {f"lookahead_vllm.{folder}" for folder in FOLDERS}
    assert ALLOWED["draft"] & own == {"lookahead_vllm.draft"}
    assert not {"torch", "vllm"} & ALLOWED["draft"] and "vllm" not in ALLOWED["verify"]


@pytest.mark.parametrize(
    "line",
    [
        "import torch",
        "import json, torch.nn as nn",
        "from vllm.config import VllmConfig",
        "from lookahead_vllm import verify",
        "from lookahead_vllm.verify.acceptance import accepted_paths",
        "import lookahead_vllm.engine.config",
        "from ..engine import config",
        "module = importlib.import_module('lookahead_vllm.engine.config')",
        "PATHS = {'x': 'vllm.v1.core.sched.scheduler.Scheduler'}",
    ],
)
@pytest.mark.parametrize(
    "around", ["{}", "def f():\n    {}", "if TYPE_CHECKING:\n    {}", "try:\n    {}\nfinally: ..."]
)
def test_a_wrong_import_is_seen(line: str, around: str) -> None:
    (wrong,) = (n for n in imports(around.format(line)) if not is_allowed(n, ALLOWED["draft"]))
    assert wrong
