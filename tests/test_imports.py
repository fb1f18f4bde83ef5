"""Each folder of the package imports only what ALLOWED lists, as its sources show."""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "lookahead_vllm"

OPTIONS, DRAFT, VERIFY, ENGINE = (
    f"lookahead_vllm.{folder}" for folder in ("options", "draft", "verify", "engine")
)
KERNELS = ("numpy", "torch", "triton", f"{DRAFT}.*", f"{VERIFY}.*")
ALLOWED: dict[str, set[str]] = {
    "": {"numpy", OPTIONS, DRAFT, VERIFY},
    "options": {"numpy", OPTIONS},
    "draft": {"numpy", "numba", OPTIONS, DRAFT},
    "draft/budget": {"numpy", f"{DRAFT}.*", f"{DRAFT}.budget"},
    "draft/trie": {
        *("numpy", OPTIONS),
        *(f"{DRAFT}.{name}" for name in ("*", "budget", "trie", "window")),
    },
    "draft/window": {"numpy", OPTIONS, f"{DRAFT}.*", f"{DRAFT}.budget", f"{DRAFT}.window"},
    "draft/cache": {"numpy", f"{DRAFT}.*", f"{DRAFT}.trie", f"{DRAFT}.cache"},
    "draft/fleet": {"numpy", f"{DRAFT}.*", f"{DRAFT}.trie", f"{DRAFT}.fleet"},
    "verify": {"numpy", "torch", f"{DRAFT}.*", f"{VERIFY}.*"},
    "verify/layout": {"numpy", "torch", f"{DRAFT}.*", f"{VERIFY}.*", f"{VERIFY}.layout"},
    "verify/attention": {*KERNELS, "xformers", f"{VERIFY}.layout", f"{VERIFY}.attention"},
    "verify/choices": {*KERNELS, f"{VERIFY}.choices"},
    "verify/history": {*KERNELS, f"{VERIFY}.history"},
    "verify/latent": {
        *KERNELS,
        *(f"{VERIFY}.{name}" for name in ("attention", "latent", "layout")),
    },
    "verify/moves": {*KERNELS, f"{VERIFY}.attention", f"{VERIFY}.moves"},
    "verify/place": {*KERNELS, f"{VERIFY}.place"},
    "verify/recurrence": {*KERNELS, f"{VERIFY}.recurrence"},
    "verify/walk": {*KERNELS, f"{VERIFY}.walk"},
    "engine": {"numpy", "vllm", "redis", OPTIONS, f"{DRAFT}.*", ENGINE},
    "engine/front_end": {
        *("numpy", "vllm", "prometheus_client"),
        *(OPTIONS, f"{DRAFT}.*", f"{ENGINE}.*", f"{ENGINE}.front_end"),
    },
    "engine/scheduler": {
        *("numpy", "torch", "vllm"),
        *(OPTIONS, f"{DRAFT}.*", f"{ENGINE}.*", f"{ENGINE}.scheduler"),
    },
    "engine/worker": {
        *("numpy", "torch", "vllm", "llvmlite", "redis", "tqdm"),
        *(OPTIONS, DRAFT, VERIFY, f"{ENGINE}.*", f"{ENGINE}.worker.*"),
    },
    "engine/cpu_kernels": {
        *("numpy", "numba", "torch", "vllm"),
        *(f"{DRAFT}.*", f"{VERIFY}.*", f"{VERIFY}.history", f"{ENGINE}.cpu_kernels"),
    },
    "engine/model_runner": {
        *("numpy", "torch", "vllm", "tqdm"),
        *(OPTIONS, DRAFT, VERIFY, f"{ENGINE}.*"),
        *(f"{ENGINE}.{name}" for name in ("cpu_kernels", "model_runner", "worker")),
    },
    "simulation": {
        *("numpy", "tqdm", "matplotlib"),
        *(OPTIONS, DRAFT, f"{VERIFY}.*", "lookahead_vllm.simulation"),
    },
    "cli": {"numpy", "tqdm", "torch", "vllm", "huggingface_hub", "pydantic", PACKAGE.name},
}
"""Permitted imports by folder. `X.*` permits the modules directly in X, not its subfolders.

Every folder may import the standard library and the modules directly in lookahead_vllm.
"""
FOLDERS = {str(path.parent.relative_to(PACKAGE)) for path in PACKAGE.rglob("*/__init__.py")}
TOP_FOLDERS = {folder for folder in FOLDERS if "/" not in folder}
MODULES = sorted(PACKAGE.rglob("*.py"))


def imports(source: str) -> Iterator[str]:
    """Dotted names of everything that a module imports anywhere, or names in a string."""
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Import(names=names):
                yield from (alias.name for alias in names)
            case ast.ImportFrom(module=module, names=names, level=0):
                yield from (f"{module}.{alias.name}" for alias in names)
            case ast.ImportFrom(module=module, level=level):
                # Never allowed: a relative import does not show its folder.
                yield "." * level + (module or "")
            case ast.Constant(value=str(text)) if re.fullmatch(r"(lookahead_)?vllm(\.\w+)+", text):
                yield text


def is_allowed(name: str, allowed: set[str]) -> bool:
    first, *rest = name.split(".")
    if first == PACKAGE.name and not (rest and rest[0] in TOP_FOLDERS):
        return True
    return first in sys.stdlib_module_names or any(
        is_directly_in(name, entry[:-2])
        if entry.endswith(".*")
        else f"{name}.".startswith(f"{entry}.")
        for entry in allowed
    )


def is_directly_in(name: str, folder: str) -> bool:
    """Whether `name` belongs to a module directly in the folder."""
    if not f"{name}.".startswith(f"{folder}."):
        return False
    module = name.removeprefix(folder).strip(".").split(".")[0]
    return not (PACKAGE.parent / folder.replace(".", "/") / module / "__init__.py").exists()


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_a_module_imports_only_what_its_folder_may(path: Path) -> None:
    folder = str(path.parent.relative_to(PACKAGE)).removeprefix(".")
    assert folder in ALLOWED, f"list in ALLOWED what {folder}/ may import"
    names = set(imports(path.read_text()))
    assert not {name for name in names if not is_allowed(name, ALLOWED[folder])}


def test_every_folder_is_listed_and_none_may_import_upwards() -> None:
    assert set(ALLOWED) == FOLDERS | {""}
    assert not {"torch", "vllm"} & (ALLOWED["options"] | ALLOWED["draft"])
    assert "vllm" not in ALLOWED["verify"]
    for folder, allowed in ALLOWED.items():
        above = {"options": (DRAFT, VERIFY, ENGINE), "draft": (VERIFY, ENGINE), "verify": (ENGINE,)}
        upwards = above.get(folder.split("/")[0], ())
        assert not any(name.startswith(upwards) for name in allowed if upwards), folder
