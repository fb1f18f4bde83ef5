"""Whether a release of vLLM is one whose sources have been compared with what lookahead uses."""

import importlib.util
import re
from pathlib import Path

SUPPORTED = ("0.32", "0.33")


class SeamError(RuntimeError):
    """This release of vLLM is not supported."""


def check() -> None:
    """Raise SeamError, one sentence, if the installed vLLM is not of a supported release."""
    release = release_of(package())
    if release not in SUPPORTED:
        raise SeamError(
            f"this lookahead-vllm works with vLLM {' and '.join(SUPPORTED)}, and the installed "
            f"vLLM is {release or 'of no release'}; install vllm=={SUPPORTED[-1]}.* or a "
            "lookahead-vllm release made for yours"
        )


def package() -> Path:
    """The folder of the installed vLLM; SeamError if there is none."""
    spec = importlib.util.find_spec("vllm")
    if spec is None or not spec.submodule_search_locations:
        raise SeamError(f"vLLM is not installed; install vllm=={SUPPORTED[-1]}.*")
    return Path(next(iter(spec.submodule_search_locations)))


def release_of(package: Path) -> str | None:
    """The release, for instance "0.33"; None for a checkout that was not built."""
    path = package / "_version.py"
    if not path.is_file():
        return None
    found = re.search(r"__version__ = .*?'(\d+\.\d+)\.", path.read_text(encoding="utf-8"))
    return found and found[1]
