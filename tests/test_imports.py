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

DRAFT, VERIFY, ENGINE = (f"lookahead_vllm.{room}" for room in ("draft", "verify", "engine"))
ALLOWED: dict[str, set[str]] = {
    "": {DRAFT},
    "draft": {"numpy", "numba", DRAFT},
    "draft/budget": {"numpy", f"{DRAFT}.*", f"{DRAFT}.budget"},
    "draft/trie": {"numpy", f"{DRAFT}.*", f"{DRAFT}.budget", f"{DRAFT}.trie"},
    "draft/window": {"numpy", f"{DRAFT}.*", f"{DRAFT}.budget", f"{DRAFT}.window"},
    "draft/cache": {"numpy", f"{DRAFT}.*", f"{DRAFT}.trie", f"{DRAFT}.cache"},
    "verify": {"numpy", "torch", f"{DRAFT}.*", f"{VERIFY}.*", f"{VERIFY}.cpu.native"},
    "verify/cpu": {"numpy", "torch", f"{DRAFT}.*", f"{VERIFY}.*", f"{VERIFY}.cpu"},
    "verify/gpu": {
        *("numpy", "torch", "triton", "xformers"),
        *(f"{DRAFT}.*", f"{VERIFY}.*", f"{VERIFY}.gpu"),
    },
    "engine": {"numpy", "vllm", f"{DRAFT}.*", ENGINE},
    "engine/front_end": {
        *("numpy", "vllm", "prometheus_client"),
        *(f"{DRAFT}.*", f"{ENGINE}.*", f"{ENGINE}.front_end"),
    },
    "engine/scheduler": {
        *("numpy", "torch", "vllm"),
        *(f"{DRAFT}.*", f"{ENGINE}.*", f"{ENGINE}.scheduler"),
    },
    "engine/worker": {
        *("numpy", "torch", "vllm", "llvmlite", "tqdm"),
        *(DRAFT, f"{VERIFY}.*", f"{ENGINE}.*", f"{ENGINE}.worker.*"),
    },
    "engine/worker/v1": {
        *("numpy", "torch", "vllm", "tqdm"),
        *(DRAFT, VERIFY, f"{ENGINE}.*", f"{ENGINE}.worker"),
    },
    "engine/seams": {f"{ENGINE}.seams", "vllm"},
    "simulation": {
        *("numpy", "matplotlib", "arctic_inference"),
        *(DRAFT, f"{VERIFY}.*", "lookahead_vllm.simulation"),
    },
    "cli": {"numpy", "tqdm", "torch", "vllm", "transformers", PACKAGE.name},
}
"""By room. `X.*` are the modules that lie in X itself, and not those of its rooms.

Everybody may import the standard library and the modules beside the rooms.
"""
ROOMS = {str(path.parent.relative_to(PACKAGE)) for path in PACKAGE.rglob("*/__init__.py")}
FOLDERS = {room for room in ROOMS if "/" not in room}
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
        is_directly_in(name, one[:-2]) if one.endswith(".*") else f"{name}.".startswith(f"{one}.")
        for one in allowed
    )


def is_directly_in(name: str, room: str) -> bool:
    """Whether `name` is of a module that lies in the room itself."""
    if not f"{name}.".startswith(f"{room}."):
        return False
    module = name.removeprefix(room).strip(".").split(".")[0]
    return not (PACKAGE.parent / room.replace(".", "/") / module / "__init__.py").exists()


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_go_one_way(path: Path) -> None:
    room = str(path.parent.relative_to(PACKAGE)).removeprefix(".")
    assert room in ALLOWED, f"say in ALLOWED what {room}/ may import"
    names = set(imports(path.read_text()))
    assert not {name for name in names if not is_allowed(name, ALLOWED[room])}


def test_all_modules_are_looked_at() -> None:
    assert set(ALLOWED) == ROOMS | {""}
    assert not {"torch", "vllm"} & ALLOWED["draft"] and "vllm" not in ALLOWED["verify"]
    for room, allowed in ALLOWED.items():
        upwards = {"draft": (VERIFY, ENGINE), "verify": (ENGINE,)}.get(room.split("/")[0], ())
        assert not any(name.startswith(upwards) for name in allowed if upwards), room


@pytest.mark.parametrize(
    ("room", "name"),
    [
        ("draft/trie", "lookahead_vllm.draft.window.grid"),
        ("draft/window", "lookahead_vllm.draft.trie.suffix"),
        ("draft/budget", "lookahead_vllm.draft.trie"),
        ("verify/cpu", "lookahead_vllm.verify.gpu.paged_batch.PagedBatch"),
        ("verify/gpu", "lookahead_vllm.verify.cpu.tree_attention"),
        ("engine/scheduler", "lookahead_vllm.engine.worker.drafter"),
        ("engine/front_end", "lookahead_vllm.engine.scheduler.scheduler"),
        ("engine/worker", "lookahead_vllm.engine.worker.v1.runner"),
        ("engine/worker/v1", "lookahead_vllm.engine.scheduler.grammar"),
    ],
)
def test_a_room_does_not_reach_into_another(room: str, name: str) -> None:
    assert not is_allowed(name, ALLOWED[room])


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
