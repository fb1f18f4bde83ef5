"""The table is compared with releases that are not installed: wheels and folders."""

from __future__ import annotations

import zipfile
from pathlib import Path

import pytest
import vllm

from lookahead_vllm.cli import check_seams

SITE = Path(vllm.__file__).parent.parent


def wheel_without(gone: str, path: Path) -> Path:
    """A wheel with the sources of the installed vLLM but for one module."""
    with zipfile.ZipFile(path, "w") as wheel:
        for source in (SITE / "vllm").rglob("*.py"):
            name = source.relative_to(SITE).as_posix()
            if name != gone:
                wheel.write(source, name)
    return path


def test_all_that_is_missing_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    whole = wheel_without("nothing", tmp_path / "vllm-1-py3-none-any.whl")
    part = wheel_without("vllm/v1/metrics/loggers.py", tmp_path / "vllm-2-py3-none-any.whl")
    assert check_seams.report([SITE, whole]) == 0
    assert f"{whole.name}: 0 differences" in capsys.readouterr().out
    assert check_seams.report([whole, part]) == 1
    output = capsys.readouterr().out
    assert "\n  there is no module vllm.v1.metrics.loggers\n" in output


def test_a_damaged_wheel_gets_one_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "vllm-1-py3-none-any.whl"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as wheel:
        wheel.writestr("vllm/__init__.py", "x = 1\n" * 500)
    whole = path.read_bytes()
    path.write_bytes(whole[:60] + bytes([whole[60] ^ 0xFF]) + whole[61:])
    assert check_seams.report([path]) == 2
    printed = capsys.readouterr()
    assert printed.err.startswith(f"{path} cannot be read, and may be damaged: ")
    assert printed.err.count("\n") == 1 and not printed.out
