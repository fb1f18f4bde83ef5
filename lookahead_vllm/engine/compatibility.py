"""Whether a release of vLLM has everything that lookahead uses of it.

vLLM's sources are parsed, not imported: this takes one or two seconds, runs before any worker
starts, and works on an unpacked wheel too (`check(root=...)`). An installed vLLM that has passed is
not parsed again.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import importlib.util
from collections.abc import Collection, Iterator
from contextlib import suppress
from pathlib import Path

from lookahead_vllm.engine.seams import BY_RUNNER, COMMON, Seam
from lookahead_vllm.kernel_folder import cache_dir

SUPPORTED = ("0.32", "0.33")


class SeamError(RuntimeError):
    """This vLLM release lacks something that lookahead uses; the message names it."""


def check(root: Path | None = None, runners: Collection[str] = tuple(BY_RUNNER)) -> None:
    """Compare the seams, and all that `engine/` imports from vLLM, with vLLM's sources.

    Parameters
    ----------
    root
        Folder that holds the `vllm` package; the installed one by default.
    runners
        The model runners, "v1" and "v2", whose own seams are compared too.

    Raises
    ------
    SeamError
        One sentence: the first difference, and what to install.
    """
    verdict = _verdict(runners) if root is None else None
    if verdict is not None and verdict.exists():
        return
    problem = next(problems(root, runners), None)
    _parse.cache_clear()  # millions of objects, which slow down the garbage collections of a server
    if problem is not None:
        raise SeamError(
            f"this lookahead-vllm works with vLLM {' and '.join(SUPPORTED)}, but in the installed "
            f"vLLM {problem}; install vllm=={SUPPORTED[-1]}.* or a lookahead-vllm release made for "
            "yours"
        )
    if verdict is not None:
        with suppress(OSError):
            verdict.touch(0o600)


def _verdict(runners: Collection[str]) -> Path | None:
    """The file that records that these sources were compared and nothing differed."""
    package = _package(None)
    seams = [*COMMON, *(seam for runner in runners for seam in BY_RUNNER[runner])]
    files = {_file(package, seam.module) for seam in seams} - {None}
    files |= {package / "_version.py", *ENGINE.rglob("*.py")}
    try:
        facts = [(str(file), *_size_and_time(file)) for file in sorted(filter(None, files))]
        key = hashlib.sha256(repr((seams, facts)).encode()).hexdigest()
        return cache_dir() / f"vllm-{key[:16]}.checked"
    except OSError:
        return None


def _size_and_time(file: Path) -> tuple[int, int]:
    status = file.stat()
    return status.st_size, status.st_mtime_ns


def problems(
    root: Path | None = None, runners: Collection[str] = tuple(BY_RUNNER)
) -> Iterator[str]:
    """All differences, for instance "vllm.config.vllm has no VllmConfig"; see `check`."""
    package = _package(root)
    version = _version(package)
    for seam in (*COMMON, *(seam for runner in runners for seam in BY_RUNNER[runner])):
        if seam.releases and version not in seam.releases:
            continue
        if problem := _problem(package, seam):
            yield problem
    others = [ENGINE / "worker" / runner for runner in BY_RUNNER if runner not in runners]
    for module, name in sorted(_imported(without=others)):
        path = _file(package, module)
        if path is None:
            yield f"there is no module {module}"
        elif name and not _offers(package, path, name):
            yield f"{module} has no {name}"


def _package(root: Path | None) -> Path:
    if root is not None:
        return root / "vllm"
    spec = importlib.util.find_spec("vllm")
    if spec is None or not spec.submodule_search_locations:
        raise SeamError(f"vLLM is not installed; install vllm=={SUPPORTED[-1]}.*")
    return Path(next(iter(spec.submodule_search_locations)))


def _version(package: Path) -> str | None:
    """The release, for instance "0.33"; None for a checkout that was not built."""
    path = package / "_version.py"
    if path.is_file():
        for node in _parse(path).body:
            value = node.value if isinstance(node, ast.Assign) else None
            if isinstance(value, ast.Constant) and "__version__" in _bound(node):
                return ".".join(str(value.value).split(".")[:2])
    return None


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


ENGINE = Path(__file__).parent


def _imported(folder: Path = ENGINE, without: Collection[Path] = ()) -> set[tuple[str, str]]:
    """(module, name) of all imports from vLLM in files below `folder` and not in the folders
    `without`; ("vllm.x", "") of a module that is imported as a whole."""
    found: set[tuple[str, str]] = set()
    for path in folder.rglob("*.py"):
        if path.parent in without:
            continue
        for node in ast.walk(_parse(path)):
            if isinstance(node, ast.ImportFrom):
                found.update((node.module or "", alias.name) for alias in node.names)
            elif isinstance(node, ast.Import):
                found.update((alias.name, "") for alias in node.names)
    return {(module, name) for module, name in found if module.split(".")[0] == "vllm"}


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
