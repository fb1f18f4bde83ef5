"""Whether a release of vLLM has everything that lookahead uses of it.

An engine starts with a supported release, whose sources have been compared (`check`). The sources
of another one, installed or not, are compared by `problems`: what lookahead replaces or overrides
is in the table `seams/`; all else that it uses is read from its own code.
"""

from __future__ import annotations

import ast
import functools
import importlib.util
import re
from collections.abc import Iterator
from pathlib import Path

from lookahead_vllm.engine.seams import SEAMS, Seam

SUPPORTED = ("0.32", "0.33")

ENGINE = Path(__file__).parent


class SeamError(RuntimeError):
    """This release of vLLM is not supported."""


def check() -> None:
    """Raise SeamError, one sentence, if the installed vLLM is not of a supported release."""
    release = _release(_package())
    if release not in SUPPORTED:
        raise SeamError(
            f"this lookahead-vllm works with vLLM {' and '.join(SUPPORTED)}, and the installed "
            f"vLLM is {release or 'of no release'}; install vllm=={SUPPORTED[-1]}.* or a "
            "lookahead-vllm release made for yours"
        )


def problems(root: Path | None = None) -> Iterator[str]:
    """What lookahead uses and a vLLM does not have, for instance "vllm.config has no VllmConfig".

    Parameters
    ----------
    root
        Folder that holds the `vllm` package. By default the installed one, of which the table and
        all imports are compared. In another one, every name that `engine/` uses and the installed
        vLLM mentions has to be mentioned, too. The sources are parsed, not imported.
    """
    installed = _package()
    package = installed if root is None else root / "vllm"
    release = _release(package)
    for seam in SEAMS:
        if seam.releases and release not in seam.releases:
            continue
        if problem := _problem(package, seam):
            yield problem
    for module, name in sorted(_imported()):
        path = _file(package, module)
        if path is None:
            yield f"there is no module {module}"
        elif name and not _offers(package, path, name):
            yield f"{module} has no {name}"
    if root is not None:
        gone = _mentioned(installed) - _mentioned(package)
        for name, place in sorted(_used().items()):
            if name in gone:
                yield f"nothing is called {name} any more, which {place} uses"


def _package() -> Path:
    spec = importlib.util.find_spec("vllm")
    if spec is None or not spec.submodule_search_locations:
        raise SeamError(f"vLLM is not installed; install vllm=={SUPPORTED[-1]}.*")
    return Path(next(iter(spec.submodule_search_locations)))


def _release(package: Path) -> str | None:
    """The release, for instance "0.33"; None for a checkout that was not built."""
    path = package / "_version.py"
    if not path.is_file():
        return None
    found = re.search(r"__version__ = .*?'(\d+\.\d+)\.", path.read_text(encoding="utf-8"))
    return found and found[1]


# ---- the table -----------------------------------------------------------------------------------


def _problem(package: Path, seam: Seam) -> str | None:
    """What `seam` needs and this vLLM does not have; None if nothing is missing."""
    path = _file(package, seam.module)
    if path is None:
        return f"there is no module {seam.module}"
    scope: ast.AST = _parse(path)
    for part in filter(None, seam.name.split(".")):
        found = next((n for n in _definitions(scope) if n.name == part), None)
        if found is None:
            return f"{seam.module} has no {seam.name}"
        scope = found
    if isinstance(scope, ast.Module):
        missing = {name for name in seam.needs if not _offers(package, path, name)}
        kind = "name"
    elif isinstance(scope, ast.ClassDef):
        missing = set(seam.needs) - set(_members(scope))
        kind = "attribute"
    else:
        assert isinstance(scope, ast.FunctionDef | ast.AsyncFunctionDef)
        arguments = scope.args
        missing = set(seam.needs) - {
            a.arg for a in arguments.posonlyargs + arguments.args + arguments.kwonlyargs
        }
        kind = "parameter"
    if missing:
        names = ", ".join(map(repr, sorted(missing)))
        return f"{seam.name or seam.module} has no {kind} {names}"
    return None


def _file(package: Path, module: str) -> Path | None:
    """The source of a module, by its dotted name; None if there is none."""
    path = package.joinpath(*module.split(".")[1:])
    return next(filter(Path.is_file, (path.with_suffix(".py"), path / "__init__.py")), None)


# ---- what is imported, called and read -----------------------------------------------------------


def _imported(folder: Path = ENGINE) -> set[tuple[str, str]]:
    """(module, name) of all imports from vLLM; ("vllm.x", "") of a whole module."""
    found: set[tuple[str, str]] = set()
    for path in folder.rglob("*.py"):
        for node in ast.walk(_parse(path)):
            if isinstance(node, ast.ImportFrom):
                found.update((node.module or "", alias.name) for alias in node.names)
            elif isinstance(node, ast.Import):
                found.update((alias.name, "") for alias in node.names)
    return {(module, name) for module, name in found if module.split(".")[0] == "vllm"}


def _used() -> dict[str, str]:
    """Where `engine/` uses each name of an object that may be vLLM's: an attribute, or a keyword of
    a call, that is not defined in this package."""
    trees = {path: _parse(path) for path in ENGINE.parent.rglob("*.py")}
    ours = {name for tree in trees.values() for name in _defined(tree)}
    found: dict[str, str] = {}
    for path, tree in trees.items():
        if not path.is_relative_to(ENGINE):
            continue
        for node in ast.walk(tree):
            for name in set(_names(node)) - ours:
                line = getattr(node, "lineno", 0)
                found.setdefault(name, f"{path.relative_to(ENGINE.parent)}:{line}")
    return found


def _names(node: ast.AST) -> Iterator[str]:
    """What a node of a syntax tree uses."""
    if isinstance(node, ast.Attribute):
        yield node.attr
    elif isinstance(node, ast.Call):
        yield from (keyword.arg for keyword in node.keywords if keyword.arg)
        if getattr(node.func, "id", "") in ("getattr", "hasattr", "setattr"):
            yield from (str(arg.value) for arg in node.args[1:2] if isinstance(arg, ast.Constant))


def _defined(tree: ast.Module) -> Iterator[str]:
    """Functions, classes and their members."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef):
            yield from (node.name, *_members(node))
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node.name


def _mentioned(package: Path) -> set[str]:
    """Every word of the sources."""
    words: set[str] = set()
    for path in package.rglob("*.py"):
        words.update(re.findall(r"\w+", path.read_text(encoding="utf-8")))
    return words


def _offers(package: Path, path: Path, name: str) -> bool:
    """Whether `name` can be imported from the module in the file `path`."""
    if path.name == "__init__.py":
        folder = path.parent / name
        if folder.with_suffix(".py").is_file() or (folder / "__init__.py").is_file():
            return True
    for node in _top_level(_parse(path)):
        bound = _bound(node)
        if isinstance(node, ast.ImportFrom) and bound == {"*"}:
            parts = path.relative_to(package.parent).parts[: -node.level or None]
            module = ".".join((*parts, node.module or "")) if node.level else str(node.module)
            other = _file(package, module)
            bound = {name} if other is not None and _offers(package, other, name) else set()
        if name in bound:
            return True
    return False


def _bound(node: ast.AST) -> set[str]:
    """The names that a statement binds in its scope."""
    if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
        return {node.name}
    if isinstance(node, ast.ImportFrom | ast.Import):
        return {alias.asname or alias.name for alias in node.names}
    return {target.id for target in _targets(node) if isinstance(target, ast.Name)}


def _targets(node: ast.AST) -> Iterator[ast.expr]:
    """The targets of an assignment, a loop or a `with`."""
    if isinstance(node, ast.Assign):
        targets = list(node.targets)
    elif isinstance(node, ast.AnnAssign | ast.AugAssign | ast.For):
        targets = [node.target]
    elif isinstance(node, ast.With):
        targets = [item.optional_vars for item in node.items if item.optional_vars]
    else:
        return
    for target in targets:
        yield from target.elts if isinstance(target, ast.Tuple | ast.List) else [target]


def _top_level(module: ast.AST) -> Iterator[ast.AST]:
    """The statements that run when a module is imported, also inside `if`, `try` and `with`."""
    for node in ast.iter_child_nodes(module):
        yield node
        if isinstance(node, ast.If | ast.Try | ast.ExceptHandler | ast.With):
            yield from _top_level(node)


@functools.lru_cache(maxsize=128)
def _parse(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def _definitions(
    scope: ast.AST,
) -> Iterator[ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef]:
    for node in getattr(scope, "body", ()):
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield node


def _members(cls: ast.ClassDef) -> Iterator[str]:
    """Names of methods, of class attributes, and of attributes that methods assign to `self`."""
    for node in _top_level(cls):
        yield from _bound(node)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            for inner in ast.walk(node):
                for target in _targets(inner):
                    if isinstance(target, ast.Attribute) and _is_self(target.value):
                        yield target.attr


def _is_self(node: ast.expr) -> bool:
    return isinstance(node, ast.Name) and node.id == "self"
