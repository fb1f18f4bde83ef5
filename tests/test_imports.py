"""Each folder of the package imports only what ALLOWED lists, as its sources show."""

import ast
import re
import sys
from collections import Counter
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "lookahead_vllm"

KERNELS = {"numpy", "torch", "triton", "draft", "verify"}
ALLOWED: dict[str, set[str]] = {
    "": {"numpy", "options", "draft/*", "verify/*"},
    "options": {"numpy"},
    "draft": {"numpy", "numba", "llvmlite"},
    "draft/budget": {"numpy", "draft"},
    "draft/trie": {"numpy", "draft"},
    "draft/growth": {"numpy", "draft", "draft/budget", "draft/trie"},
    "draft/window": {"numpy", "options", "draft", "draft/budget"},
    "draft/proposers": {
        *("numpy", "options", "draft", "draft/budget"),
        *("draft/growth", "draft/trie", "draft/window"),
    },
    "draft/cache": {"numpy", "draft", "draft/growth", "draft/trie", "draft/proposers"},
    "draft/fleet": {"numpy", "draft", "draft/growth", "draft/trie", "draft/proposers"},
    "verify": {"numpy", "torch", "draft"},
    "verify/layout": {"numpy", "torch", "draft", "verify", "verify/place"},
    "verify/attention": {"xformers", *KERNELS, "verify/layout"},
    "verify/history": KERNELS,
    "verify/latent": {*KERNELS, "verify/attention", "verify/layout"},
    "verify/moves": KERNELS,
    "verify/place": KERNELS,
    "verify/recurrence": KERNELS,
    "verify/walk": KERNELS,
    "engine": {
        "numpy",
        "vllm",
        "redis",
        "options",
        "draft",
        "draft/proposers",
        "verify",
        "engine/*",
    },
    "engine/front_end": {"numpy", "vllm", "prometheus_client", "options", "draft", "engine"},
    "engine/grammar": {"numpy", "torch", "vllm", "draft", "engine"},
    "engine/scheduler": {"numpy", "vllm", "options", "draft", "engine", "engine/grammar"},
    "engine/step": {"numpy", "torch", "vllm", "draft", "draft/budget", "verify/*", "engine"},
    "engine/recurrent": {
        *("numpy", "torch", "vllm", "options", "draft", "verify/*", "engine", "engine/step"),
    },
    "engine/attention": {
        *("torch", "tqdm", "vllm", "options", "verify/*"),
        *("engine", "engine/step", "engine/recurrent"),
    },
    "engine/drafter": {
        *("numpy", "vllm", "llvmlite", "redis", "options", "draft/*", "verify"),
        *("engine", "engine/attention", "engine/grammar", "engine/step"),
    },
    "engine/cost": {
        *("numpy", "torch", "tqdm", "vllm", "draft", "draft/budget", "engine", "engine/drafter"),
    },
    "engine/runner": {
        *("numpy", "torch", "vllm", "draft", "draft/budget", "draft/growth", "verify/*", "engine"),
        *("engine/attention", "engine/cost", "engine/drafter", "engine/grammar"),
        *("engine/recurrent", "engine/step"),
    },
    "engine/replicas": {
        *("numpy", "torch", "vllm", "draft", "verify/*"),
        *("engine", "engine/grammar", "engine/runner", "engine/step"),
    },
    "engine/cpu_kernels": {"numpy", "numba", "torch", "vllm", "draft", "verify", "verify/history"},
    "engine/workers": {"numpy", "torch", "vllm", "verify/*", "engine/*"},
    "simulation": {"numpy", "tqdm", "matplotlib", "vllm", "options", "draft/*", "verify"},
    "cli": {
        *("numpy", "tqdm", "torch", "vllm", "huggingface_hub", "pydantic"),
        *("options", "draft/*", "verify/*", "engine/*", "simulation"),
    },
}
"""What the modules of a folder may import: other packages, and folders of this one.

`X` stands for the modules directly in X, `X/*` also for those in its folders. Every folder may
import the standard library, itself and the modules directly in lookahead_vllm.
"""
FOLDERS = {str(path.parent.relative_to(PACKAGE)) for path in PACKAGE.rglob("*/__init__.py")}
MODULES = sorted(PACKAGE.rglob("*.py"))


def imports(source: str, in_strings: bool = True) -> Iterator[str]:
    """Dotted names of everything that a module imports anywhere, or names in a string, for vLLM."""
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Import(names=names):
                yield from (alias.name for alias in names)
            case ast.ImportFrom(module=module, names=names, level=0):
                yield from (f"{module}.{alias.name}" for alias in names)
            case ast.ImportFrom(module=module, level=level):
                # Never allowed: a relative import does not show its folder.
                yield "." * level + (module or "")
            case ast.Constant(value=str(text)) if in_strings and re.fullmatch(
                r"(lookahead_)?vllm(\.\w+)+", text
            ):
                yield text


def folder_of(name: str) -> str:
    """The folder of a module of this package, or of what it holds."""
    parts = name.split(".")[1:]
    while parts and "/".join(parts) not in FOLDERS:
        parts.pop()
    return "/".join(parts)


def is_allowed(name: str, folder: str) -> bool:
    """Whether the modules of a folder may import this."""
    first, allowed = name.split(".")[0], ALLOWED[folder]
    if first != PACKAGE.name:
        return first in allowed or first in sys.stdlib_module_names
    target = folder_of(name)
    above = {f"{target.rsplit('/', depth)[0]}/*" for depth in range(3)}
    return target in allowed | {"", folder} or bool(above & allowed)


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_a_module_imports_only_what_its_folder_may(path):
    folder = str(path.parent.relative_to(PACKAGE)).removeprefix(".")
    assert folder in ALLOWED, f"list in ALLOWED what {folder}/ may import"
    names = set(imports(path.read_text()))
    assert not {name for name in names if not is_allowed(name, folder)}


def test_every_folder_is_listed_and_none_may_import_upwards():
    assert set(ALLOWED) == FOLDERS | {""}
    for folder, allowed in ALLOWED.items():
        layer = folder.split("/")[0]
        above = {"draft": ("verify", "engine", "torch", "vllm"), "verify": ("engine", "vllm")}
        assert not any(name.split("/")[0] in above.get(layer, ()) for name in allowed), folder


def test_no_module_imports_itself_by_way_of_others():
    """Not even for types."""
    names = {path: module_name(path) for path in MODULES}
    modules = set(names.values())
    graph: dict[str, set[str]] = {}
    for path, name in names.items():
        imported = set(imports(path.read_text(), in_strings=False))
        graph[name] = (imported | set(map(parent, imported))) & modules - {name, PACKAGE.name}
    tuple(TopologicalSorter(graph).static_order())  # raises CycleError


def module_name(path: Path) -> str:
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def parent(name: str) -> str:
    return name.rpartition(".")[0]


def test_no_folder_has_more_than_twelve_modules():
    counts = Counter(path.parent for path in MODULES if path.name != "__init__.py")
    assert max(counts.values()) <= 12, counts
