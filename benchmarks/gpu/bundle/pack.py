"""Make a folder with vLLM 0.33 for CUDA, for a machine with a GPU and no network."""

import argparse
import hashlib
import json
import lzma
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import tomllib
import zipfile
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

from tqdm import tqdm

from benchmarks.gpu.bundle.thin import thin

EPILOG = """\
The folder has what vLLM imports and a machine with torch for CUDA lacks, in archives that are
unpacked at once: about 50 MiB, because only machine code for one kind of GPU is kept. It does not
have this project: carry the folder inside of a checkout. There, this runs a command with all of it:

  bash .gpu/run python scripts/gpu_check.py

It was made for torch 2.11 (CUDA 13), for one release of Python (--python), which it checks, and for
Hopper (--architecture 90: H100, H200). Other GPUs need another number, as 80 for Ampere;
FlashAttention 3 is for Hopper alone.

--overlay puts files of another vLLM over those of 0.33, to measure what is not released yet. Take
the few that a method needs, in a folder of their own (FOLDER/vllm/...), and give the bundle its own
--out: lookahead was compared with 0.33 alone.

It needs pip, a package index and 4 GB of disk in the temporary folder, and no GPU.
"""
HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[2]
VLLM = "vllm==0.33.0"
MIB = 1 << 20
ARCHIVES = 4
CACHE = Path(tempfile.gettempdir()) / "lookahead-bundle"
"""Keeps what is fetched."""

LEFT_OUT = (
    # Libraries that text models do not use; vLLM imports each of them if it can.
    "vllm/_qutlass_C.abi3.so",
    "vllm/_flashmla_C.abi3.so",
    "vllm/_flashmla_extension_C.abi3.so",
    "vllm/_flashkda_C.abi3.so",
    "vllm/_deepselect_C.abi3.so",
    "vllm/vllm_flash_attn/_vllm_fa2_C.abi3.so",  # Hopper takes FlashAttention 3
    "vllm/third_party/deep_gemm/",
    "vllm/third_party/fmha_sm100/",
    "vllm/third_party/tml_fa4/",
    "vllm/kernels/helion/configs/",
    "vllm/vllm-rs",  # a second front end, which is off by default
    "vllm-0.33.0.dist-info/RECORD",
    "vllm-0.33.0.dist-info/sboms/",
)
THINNED = ("vllm/_C_stable_libtorch.abi3.so", "vllm/_moe_C_stable_libtorch.abi3.so")
BULK = (  # data and libraries inside of packages that nothing here reads
    "mistral_common/data",
    "pycountry/locales",
    "pycountry/tests",
    "tvm_ffi/3rdparty",
    "tvm_ffi/include",
    "tvm_ffi/src",
    "xformers/_C.so",
    "bin",
)
DEFAULT_FLASH = ("vllm/vllm_flash_attn/flash_attn_interface.py", "DEFAULT_FA_VERSION = {}")
"""Without a version, its functions mean 2, which is not carried; vLLM always names the version."""


def parse_args(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, epilog=EPILOG, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--out", type=Path, default=Path(".gpu"), help="emptied first (default: .gpu)")
    add("--architecture", type=int, default=90, help="of the GPU, times ten (default: 90)")
    add("--python", default="3.12", metavar="3.N", help="that of the machine (default: 3.12)")
    about = "arctic-inference, built for that Python, for vLLM's method `suffix`"
    add("--suffix-wheel", type=Path, metavar="FILE.whl", help=about)
    about = "files of another vLLM, which replace those of 0.33 or are added"
    add("--overlay", type=Path, metavar="FOLDER", help=about)
    options = parser.parse_args(argv)
    if options.suffix_wheel and not options.suffix_wheel.is_file():
        parser.error(f"there is no file {options.suffix_wheel}")
    if options.overlay and not (options.overlay / "vllm").is_dir():
        parser.error(f"--overlay: there is no folder {options.overlay}/vllm")
    if options.out.exists() and not (options.out / "bundle.json").is_file():
        parser.error(f"{options.out} exists and is no bundle; name another folder with --out")
    return options


def pins(name: str) -> list[str]:
    lines = map(str.strip, (HERE / name).read_text().splitlines())
    return [line for line in lines if line and not line.startswith("#")]


def pip(*arguments: str) -> None:
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", *arguments]
    subprocess.run(command, check=True)


def for_the_machine(python: str) -> list[str]:
    """pip matches a platform's number exactly, so all of them are named."""
    names = [f"manylinux_2_{n}_x86_64" for n in range(39, 4, -1)]
    names += ["manylinux2014_x86_64", "manylinux2010_x86_64", "manylinux1_x86_64"]
    platforms = [part for name in names for part in ("--platform", name)]
    return ["--only-binary=:all:", "--python-version", python, "--implementation", "cp", *platforms]


def fetch(names: list[str], folder: Path, python: str) -> list[Path]:
    """The wheels of these pins, fetched once."""
    folder.mkdir(parents=True, exist_ok=True)
    done, mark = folder / ".done", "\n".join([python, *names])
    if not (done.is_file() and done.read_text() == mark):
        for wheel in folder.glob("*.whl"):  # of other pins
            wheel.unlink()
        pip("download", "-q", "--no-deps", *for_the_machine(python), "-d", str(folder), *names)
        done.write_text(mark)
    return sorted(folder.glob("*.whl"))


def install(wheels: list[Path], target: Path, python: str) -> None:
    target.mkdir(parents=True, exist_ok=True)
    options = ["-q", "--root-user-action=ignore", "--no-index", "--no-deps", "--no-compile"]
    pip(
        *("install", *options, "--target", str(target), *for_the_machine(python)),
        *map(str, wheels),
    )


def unpack_vllm(wheel: Path, site: Path, architecture: int) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = [name for name in archive.namelist() if not name.startswith(LEFT_OUT)]
        archive.extractall(site, names)
    for name in THINNED:
        thin(site / name, architecture)
    name, setting = DEFAULT_FLASH
    text = (site / name).read_text()
    if text.count(setting.format(2)) != 1:
        raise ValueError(f"{name} does not have '{setting.format(2)}' once")
    (site / name).write_text(text.replace(setting.format(2), setting.format(3)))


def name_plugin(site: Path) -> None:
    """So that vLLM finds lookahead in a checkout, without an installation."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    name, version, group = project["name"], project["version"], "vllm.general_plugins"
    folder = site / f"{name.replace('-', '_')}-{version}.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    entries = [f"{key} = {value}" for key, value in project["entry-points"][group].items()]
    (folder / "entry_points.txt").write_text("\n".join([f"[{group}]", *entries]) + "\n")


def install_suffix(wheel: Path, site: Path) -> None:
    """Only what vLLM's method `suffix` imports; the rest of arctic-inference would patch vLLM."""
    folders = ("arctic_inference/suffix_decoding/", "arctic_inference/common/")
    files = ("arctic_inference/__init__.py", "arctic_inference/envs.py")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(
            site,
            [
                name
                for name in archive.namelist()
                if name.startswith(folders) or name in files or name.endswith((".so", "METADATA"))
            ],
        )


def lay_over(folder: Path, site: Path) -> None:
    """Put the Python files of another vLLM over those of the wheel."""
    names = sorted(path.relative_to(folder) for path in folder.glob("vllm/**/*.py"))
    for name in names:
        print(f"overlay: {name} {'replaces that of 0.33' if (site / name).is_file() else 'is new'}")
        (site / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(folder / name, site / name)


def stage(options: argparse.Namespace, bundle: Path) -> None:
    """Everything as it will lie on the machine."""
    site, cache, python = bundle / "site", CACHE, options.python
    install(fetch(pins("needed.txt"), cache / "needed", python), site, python)
    unpack_vllm(fetch([VLLM], cache / "vllm", python)[0], site, options.architecture)
    if options.overlay:
        lay_over(options.overlay, site)
    name_plugin(site)
    for name in BULK:
        path = site / name
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)
    for wheel in fetch(pins("spare.txt"), cache / "spare", python):
        install([wheel], bundle / "spare" / wheel.name.split("-")[0].lower(), python)
    if options.suffix_wheel:
        install_suffix(options.suffix_wheel, site)


def shares(bundle: Path) -> list[list[Path]]:
    """All files in archives that take about as long to unpack: large libraries have their own.

    Files of a kind lie side by side, which compresses better.
    """
    files = sorted((p for p in bundle.rglob("*") if p.is_file()), key=lambda p: (p.suffix, str(p)))
    large = sorted(files, key=lambda p: -p.stat().st_size)[: ARCHIVES - 1]
    return [*([path] for path in large), [path for path in files if path not in large]]


def compress(paths: list[Path], bundle: Path, target: Path) -> str:
    """Write an archive; returns its digest."""

    def anonymous(entry: tarfile.TarInfo) -> tarfile.TarInfo:
        entry.uid = entry.gid = 0
        entry.uname = entry.gname = "root"
        return entry

    size = sum(path.stat().st_size for path in paths)
    window = min(1 << max(20, (size - 1).bit_length()), 128 * MIB)
    filters = [
        {"id": lzma.FILTER_X86},
        {"id": lzma.FILTER_LZMA2, "preset": 1, "dict_size": window},
    ]
    with lzma.open(target, "wb", filters=filters) as packed:  # noqa: SIM117
        with tarfile.open(fileobj=packed, mode="w|") as tar:
            for path in paths:
                tar.add(path, str(path.relative_to(bundle)), filter=anonymous)
    return hashlib.sha256(target.read_bytes()).hexdigest()


def main(argv: Sequence[str]) -> int:
    options = parse_args(argv)
    out: Path = options.out
    with tempfile.TemporaryDirectory() as scratch:
        bundle = Path(scratch) / "bundle"
        stage(options, bundle)
        shutil.rmtree(out, ignore_errors=True)
        out.mkdir(parents=True)
        parts = shares(bundle)
        names = [f"bundle-{number}.tar.xz" for number in range(1, len(parts) + 1)]
        with ProcessPoolExecutor(os.cpu_count()) as pool:
            targets = [out / name for name in names]
            jobs = pool.map(compress, parts, [bundle] * len(parts), targets)
            digests = list(tqdm(jobs, "compressing", len(parts)))
        folders = sorted({str(path.parent.relative_to(bundle)) for part in parts for path in part})
    archives = dict(zip(names, digests, strict=True))
    made = {"python": options.python, "archives": archives, "folders": folders}
    (out / "bundle.json").write_text(json.dumps(made, indent=1) + "\n")
    for name in ("run", "unpack.py"):
        shutil.copy(HERE / name, out)
    size = sum(path.stat().st_size for path in out.iterdir())
    print(f"{out}: {size / MIB:.1f} MiB. On the machine, in the checkout's root:")
    print(f"  bash {out}/run python scripts/gpu_check.py")
    return 0
