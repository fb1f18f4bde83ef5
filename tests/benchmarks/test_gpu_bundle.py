"""A bundle for a machine without a network: thinned libraries, archives, the way back."""

from __future__ import annotations

import json
import struct
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.gpu.bundle import pack
from benchmarks.gpu.bundle.thin import thin

UNPACK = Path(pack.__file__).with_name("unpack.py")
PTX, CODE = 1, 2


def entry(kind: int, architecture: int, code: bytes) -> bytes:
    header = struct.pack("<HHIQ", kind, 0, 64, len(code)).ljust(28, b"\0")
    return (header + struct.pack("<I", architecture)).ljust(64, b"\0") + code


def fat_binary(*entries: bytes) -> bytes:
    return struct.pack("<IHHQ", 0xBA55ED50, 1, 16, len(b"".join(entries))) + b"".join(entries)


def test_a_library_keeps_the_code_for_one_kind_of_gpu(tmp_path: Path) -> None:
    wanted, other, larger = (
        entry(CODE, 90, b"nine"), entry(CODE, 80, b"eight"), entry(CODE, 100, b"larger code"),
    )  # fmt: skip
    both = fat_binary(entry(PTX, 80, b"text"), other, wanted)
    none = fat_binary(entry(PTX, 80, b"text"), larger)
    library = tmp_path / "library.so"
    library.write_bytes(b"before" + both + b"between" + none + b"after")
    gone = thin(library, 90)
    thinned = library.read_bytes()
    assert thinned == (
        b"before" + fat_binary(wanted).ljust(len(both), b"\0")
        # A driver refuses an empty one.
        + b"between" + fat_binary(other).ljust(len(none), b"\0") + b"after"
    )  # fmt: skip
    assert gone == len(both) + len(none) - len(fat_binary(wanted)) - len(fat_binary(other))


@pytest.fixture
def bundle(tmp_path: Path) -> Path:
    staged, out = tmp_path / "staged", tmp_path / "out"
    (staged / "site" / "package").mkdir(parents=True)
    (staged / "site" / "package" / "__init__.py").write_text("ANSWER = 42\n")
    for number in range(6):
        (staged / "site" / f"data-{number}").write_bytes(bytes(1000 * number + 1))
    pack.name_plugin(staged / "site")
    out.mkdir()
    parts = pack.shares(staged)
    names = [f"{number}.tar.xz" for number in range(len(parts))]
    digests = [
        pack.compress(part, staged, out / name) for part, name in zip(parts, names, strict=True)
    ]
    folders = sorted({str(p.parent.relative_to(staged)) for part in parts for p in part})
    made = {"archives": dict(zip(names, digests, strict=True)), "folders": folders}
    (out / "bundle.json").write_text(json.dumps(made))
    return out


def unpack(bundle: Path, target: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-I", str(UNPACK), str(bundle), str(target)]
    return subprocess.run(command, capture_output=True, text=True)


def test_a_bundle_is_laid_out_once(bundle: Path, tmp_path: Path) -> None:
    target = tmp_path / "target"
    first = unpack(bundle, target)
    assert first.returncode == 0 and "unpacked in" in first.stdout, first.stderr
    program = f". {target}/env.sh && python -c 'import package; print(package.ANSWER)'"
    assert subprocess.run(["bash", "-c", program], capture_output=True, text=True).stdout == "42\n"
    assert len(list((target / "site").glob("data-*"))) == 6
    again = unpack(bundle, target)
    assert again.returncode == 0 and not again.stdout


def test_a_damaged_bundle_is_refused(bundle: Path, tmp_path: Path) -> None:
    archive = bundle / "0.tar.xz"
    archive.write_bytes(archive.read_bytes()[:-1] + b"?")
    done = unpack(bundle, tmp_path / "target")
    assert done.returncode and "0.tar.xz is damaged: send it again" in done.stderr
    assert not (tmp_path / "target" / ".done").exists()


def test_an_own_folder_is_not_emptied(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "mine").write_text("kept")
    with pytest.raises(SystemExit):
        pack.main(["--out", str(tmp_path)])
    assert "is no bundle" in capsys.readouterr().err
    assert (tmp_path / "mine").exists()
