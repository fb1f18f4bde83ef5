"""Lays a bundle out, once: unpacks all archives at the same time, sees what the machine lacks, and
writes env.sh.

    python -I unpack.py FOLDER TARGET        FOLDER was made by scripts/gpu_bundle.py
"""

import hashlib
import importlib.metadata
import json
import lzma
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

NOT_NEEDED = {
    *("torch", "torchaudio", "torchvision", "torchcodec", "pynvvideocodec", "flashinfer-python"),
    *("apache-tvm-ffi", "tilelang", "nvidia-cudnn-frontend", "nvtx", "fastsafetensors", "numba"),
    *("instanttensor", "nvidia-cutlass-dsl", "quack-kernels", "tokenspeed-mla", "humming-kernels"),
    *("anthropic", "opentelemetry-exporter-otlp", "opencv-python-headless", "pillow"),
    *("fastapi-cli", "fastapi-cloud-cli", "setuptools", "pyjwt", "pywin32", "certifi"),
}
"""vLLM's metadata names them; nothing here imports them, or the machine's own version will do."""

ENVIRONMENT = """\
export HF_HUB_OFFLINE=1 VLLM_NO_USAGE_STATS=1 DO_NOT_TRACK=1 TOKENIZERS_PARALLELISM=false
export VLLM_WORKER_MULTIPROC_METHOD=spawn PYTHONUNBUFFERED=1
export VLLM_USE_FLASHINFER_SAMPLER=0
"""
"""FlashInfer is not carried; both samplers import it unless told not to."""


def say(text: str) -> None:
    print(f"[bundle] {text}", flush=True)


def check_python(made_for: str) -> None:
    """Exit if this is not the Python, as 3.12, that the bundle's libraries were compiled for."""
    here = f"{sys.version_info.major}.{sys.version_info.minor}"
    if here == made_for:
        return
    found = shutil.which(f"python{made_for}")
    remedy = f"set PYTHON={found}" if found else f"set PYTHON to a Python {made_for}"
    sys.exit(
        f"[bundle] {sys.executable} is Python {here}, and the bundle was made for {made_for}: "
        f"{remedy}, if torch is installed there, or make it with gpu_bundle.py --python {here}"
    )


def unpack(archive: Path, digest: str, target: Path) -> None:
    """Unpack one archive, after checking its digest."""
    if hashlib.sha256(archive.read_bytes()).hexdigest() != digest:
        raise ValueError(f"{archive} is damaged: send it again")
    with lzma.open(archive) as packed, tarfile.open(fileobj=packed, mode="r|") as tar:
        tar.extractall(target, filter="data")


def install(folder: Path, made: dict[str, Any], target: Path) -> None:
    begun = time.monotonic()
    for name in ("site", "spare"):
        shutil.rmtree(target / name, ignore_errors=True)
    for name in made["folders"]:  # the processes must not race for them
        (target / name).mkdir(parents=True, exist_ok=True)
    with ProcessPoolExecutor(len(made["archives"])) as pool:
        jobs = [
            pool.submit(unpack, folder / name, digest, target)
            for name, digest in made["archives"].items()
        ]
        for job in jobs:
            job.result()
    # Byte code by all cores, so that no start of an engine waits for it.
    compile_all = [sys.executable, "-m", "compileall", "-q", "-j", "0", str(target / "site")]
    subprocess.run(compile_all, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    say(f"unpacked in {time.monotonic() - begun:.0f} s")


def write_environment(first: list[Path], target: Path) -> None:
    """env.sh, with these folders before the others."""
    places = (
        Path(sysconfig.get_paths()["purelib"]) / "nvidia" / "cu13" / "lib",
        Path("/usr/local/cuda/lib64"),
    )
    # vLLM's libraries name libnvrtc and libcudart, which torch may not have loaded by then.
    libraries = ":".join([str(path) for path in places if path.is_dir()][:1])
    path = ":".join(map(str, [*first, target / "site"]))
    (target / "env.sh").write_text(
        f"export PYTHONPATH={path}${{PYTHONPATH:+:$PYTHONPATH}}\n"
        f"export PATH={Path(sys.executable).parent}:$PATH\n"
        f"export LD_LIBRARY_PATH={libraries}${{LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}}\n"
        f"{ENVIRONMENT}"
    )


def unmet(site: Path) -> list[tuple[str, str, str]]:
    """What the packages of the bundle want: the requirement, what is there, the package's name."""
    from packaging.requirements import Requirement
    from packaging.utils import canonicalize_name

    found: list[tuple[str, str, str]] = []
    for distribution in importlib.metadata.distributions(path=[str(site)]):
        for text in distribution.requires or ():
            requirement = Requirement(text)
            name = canonicalize_name(requirement.name)
            marker = requirement.marker
            if name in NOT_NEEDED or (marker and not marker.evaluate({"extra": ""})):
                continue
            try:
                have = importlib.metadata.version(name)
            except importlib.metadata.PackageNotFoundError:
                have = "nothing"
            if have == "nothing" or not requirement.specifier.contains(have, prereleases=True):
                found.append((f"{distribution.name} wants {requirement}", have, name))
    return found


def choose_spares(target: Path) -> list[Path]:
    """The spares that take the place of what is too old here; says what is still missing."""
    first: list[Path] = []
    sys.path.insert(0, str(target / "site"))
    while True:
        missing = unmet(target / "site")
        spares = [target / "spare" / re.sub(r"[-.]+", "_", name) for _, _, name in missing]
        fresh = [path for path in dict.fromkeys(spares) if path.is_dir() and path not in first]
        if not fresh:
            break
        first += fresh  # one may need another
        sys.path[:0] = map(str, fresh)
    for what, have, _ in missing:
        say(f"{what}, here is {have}")
    return first


def main() -> None:
    folder, target = map(Path, sys.argv[1:])
    made = json.loads((folder / "bundle.json").read_text())
    check_python(made["python"])
    stamp, mark = target / ".done", json.dumps(made["archives"])
    if stamp.is_file() and stamp.read_text() == mark:
        return
    target.mkdir(parents=True, exist_ok=True)
    install(folder, made, target)
    write_environment(choose_spares(target), target)
    stamp.write_text(mark)


if __name__ == "__main__":
    main()
