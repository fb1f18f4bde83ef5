"""Compare what lookahead uses of vLLM with a release, installed or not.

What lookahead replaces or overrides is in the table `engine/seams.md`; all else that it uses is
read from its own code.
"""

import argparse
import ast
import functools
import re
import tempfile
import zipfile
from collections.abc import Iterator, Sequence
from itertools import chain
from pathlib import Path

from benchmarks.port.seams import SEAMS, TABLE, Seam
from lookahead_vllm.engine import compatibility

ENGINE = TABLE.parent


def problems(root: Path | None = None) -> Iterator[str]:
    """What lookahead uses and a vLLM does not have, for instance "vllm.config has no VllmConfig".

    By default it is the installed one, of which the table and all imports are compared. In one that
    is in the folder `root`, every name that `engine/` uses and the installed vLLM mentions has to
    be mentioned, too. The sources are read, not imported.
    """
    installed = compatibility.package()
    package = installed if root is None else root / "vllm"
    release = compatibility.release_of(package)
    for seam in SEAMS:
        if seam.release in ("", release) and (problem := _problem(package, seam)):
            yield problem
    for module, name in sorted(_imported()):
        path = _file(package, module)
        if path is None:
            yield f"there is no module {module}"
        elif name not in _words(path) and _file(package, f"{module}.{name}") is None:
            yield f"{module} has no {name}"
    if root is not None:
        gone = _all_words(installed) - _all_words(package)
        for name, place in sorted(_used().items()):
            if name in gone:
                yield f"nothing is called {name} any more, which {place} uses"


def _file(package: Path, module: str) -> Path | None:
    """The source of a module, by its dotted name; None if there is none."""
    path = package.joinpath(*module.split(".")[1:])
    return next(filter(Path.is_file, (path.with_suffix(".py"), path / "__init__.py")), None)


def _problem(package: Path, seam: Seam) -> str | None:
    """What `seam` needs and this vLLM does not have; None if nothing is missing."""
    path = _file(package, seam.module)
    if path is None:
        return f"there is no module {seam.module}"
    text = path.read_text(encoding="utf-8")
    scope: ast.AST = _parse(text)
    for part in filter(None, seam.name.split(".")):
        found = next((node for node in _definitions(scope) if node.name == part), None)
        if found is None:
            return f"{seam.module} has no {seam.name}"
        scope = found
    missing = set(seam.needs) - _offered(scope, text)
    if missing:
        names = ", ".join(map(repr, sorted(missing)))
        return f"{seam.name or seam.module} has no {names}"
    return None


Definition = ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


def _definitions(scope: ast.AST) -> Iterator[Definition]:
    for node in getattr(scope, "body", ()):
        if isinstance(node, Definition):
            yield node


def _offered(scope: ast.AST, text: str) -> set[str]:
    """The parameters of a function; the words of a class or a module."""
    if isinstance(scope, ast.FunctionDef | ast.AsyncFunctionDef):
        given = scope.args
        return {one.arg for one in (*given.posonlyargs, *given.args, *given.kwonlyargs)}
    if isinstance(scope, ast.ClassDef):
        text = "\n".join(text.splitlines()[scope.lineno - 1 : scope.end_lineno])
    return set(re.findall(r"\w+", text))


# ---- what is imported, called and read -----------------------------------------------------------


def _imported() -> set[tuple[str, str]]:
    """(module, name) of all imports from vLLM; ("vllm.x", "") of a whole module."""
    found: set[tuple[str, str]] = set()
    for path in ENGINE.rglob("*.py"):
        for node in ast.walk(_parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom):
                found.update((node.module or "", alias.name) for alias in node.names)
            elif isinstance(node, ast.Import):
                found.update((alias.name, "") for alias in node.names)
    return {(module, name) for module, name in found if module.split(".")[0] == "vllm"}


_DEFINITION = re.compile(r"(?:def|class) (\w+)|self\.(\w+)(?:: .+)? = |^    (\w+): ", re.M)


@functools.cache
def _used() -> dict[str, str]:
    """Where `engine/` uses each name of an object that may be vLLM's: an attribute, or a keyword of
    a call, that is not defined in this package."""
    sources = {path: path.read_text(encoding="utf-8") for path in ENGINE.parent.rglob("*.py")}
    ours = {name for text in sources.values() for name in chain(*_DEFINITION.findall(text))}
    found: dict[str, str] = {}
    for path, text in sorted(sources.items()):
        for node in ast.walk(_parse(text)) if path.is_relative_to(ENGINE) else ():
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


@functools.lru_cache(maxsize=64)
def _parse(text: str) -> ast.Module:
    return ast.parse(text)


@functools.lru_cache(maxsize=2)
def _all_words(package: Path) -> set[str]:
    """Every word of the sources; those of the installed release are read once."""
    return set().union(*map(_words, package.rglob("*.py")))


@functools.lru_cache(maxsize=1)
def _words(path: Path) -> set[str]:
    # In bytes, because that takes a third of the time.
    return {word.decode() for word in set(re.findall(rb"\w+", path.read_bytes()))}


# ---- the command ---------------------------------------------------------------------------------


def place_of(text: str) -> Path:
    """Argument type: a wheel of vLLM, or a folder that holds the package `vllm`."""
    path = Path(text)
    if not (zipfile.is_zipfile(path) or (path / "vllm").is_dir()):
        raise argparse.ArgumentTypeError(
            f"{path} is no wheel, and no folder with the package `vllm` in it"
        )
    return path


def compare(place: Path) -> list[str]:
    """One sentence for each thing that lookahead uses of vLLM and this release lacks.

    The sources are read, which cannot tell whether they still do the same: a release is supported
    once the tests pass with it.
    """
    if place.is_dir():
        return list(problems(place))
    with zipfile.ZipFile(place) as wheel, tempfile.TemporaryDirectory() as folder:
        sources = [name for name in wheel.namelist() if name.endswith(".py")]
        wheel.extractall(folder, sources)
        return list(problems(Path(folder)))


def main(argv: Sequence[str]) -> int:
    """Print the differences of a release; 1 if there are any, else 0."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument(
        "release",
        type=place_of,
        metavar="WHEEL",
        help="a wheel of vLLM, or a folder that holds the package `vllm`",
    )
    place = parser.parse_args(argv).release
    missing = compare(place)
    print(f"{place.name}: {len(missing)} differences")
    for problem in missing:
        print(f"  {problem}")
    return 1 if missing else 0
