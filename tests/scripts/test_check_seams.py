"""The table is compared with releases that are not installed: wheels, and folders."""

from __future__ import annotations

import zipfile
from pathlib import Path

import pytest
import vllm

from lookahead_vllm.engine import seams
from tests.scripts.loading import load_script

check_seams = load_script("check_seams")
SITE = Path(vllm.__file__).parent.parent


def wheel_of(modules: set[str], path: Path) -> Path:
    with zipfile.ZipFile(path, "w") as wheel:
        for module in modules:
            name = "/".join(module.split(".")) + ".py"
            wheel.write(SITE / name, name)
    return path


def test_all_that_is_missing_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    modules = {seam.module for seam in seams.SEAMS}
    whole = wheel_of(modules, tmp_path / "vllm-1-py3-none-any.whl")
    gone = "vllm.v1.cudagraph_dispatcher"
    part = wheel_of(modules - {gone}, tmp_path / "vllm-2-py3-none-any.whl")
    assert check_seams.main([str(SITE), str(whole)]) == 0
    assert f"{whole.name}: {len(seams.SEAMS)} places, 0 differ" in capsys.readouterr().out
    assert check_seams.main([str(whole), str(part)]) == 1
    assert capsys.readouterr().out.endswith(f"1 differ\n  there is no module {gone}\n")


def test_what_is_no_release_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        check_seams.main([str(tmp_path)])
    assert ended.value.code == 2
    assert "is no wheel, and no folder with the package `vllm` in it" in capsys.readouterr().err
