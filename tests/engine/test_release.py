"""What is used of vLLM is in the installed one; where it is not, one sentence says so."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
import vllm

from lookahead_vllm.engine import release
from lookahead_vllm.engine.seams import SEAMS

SITE = Path(vllm.__file__).parent.parent


def test_the_installed_vllm_fits() -> None:
    release.check()


@pytest.fixture
def other_release(tmp_path: Path) -> Path:
    """The same sources, free to be changed."""
    no_source = shutil.ignore_patterns("*.so", "*.pyc", "*.json", "*.jinja", "*.html")
    shutil.copytree(SITE / "vllm", tmp_path / "vllm", ignore=no_source, copy_function=os.symlink)
    release.check(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("module", "old", "new", "says"),
    [
        (
            "vllm/v1/worker/gpu_model_runner.py",
            "def _sample(",
            "def _sample_tokens(",
            "vllm.v1.worker.gpu_model_runner has no GPUModelRunner._sample",
        ),
        (
            "vllm/v1/worker/gpu_model_runner.py",
            "        spec_decode_metadata: SpecDecodeMetadata | None,\n    ) -> SamplerOutput:",
            "        metadata: SpecDecodeMetadata | None,\n    ) -> SamplerOutput:",
            "GPUModelRunner._sample has no parameter 'spec_decode_metadata'",
        ),
        (
            "vllm/v1/worker/gpu_model_runner.py",
            "self.discard_request_mask = ",
            "self.discarded = ",
            "GPUModelRunner has no attribute 'discard_request_mask'",
        ),
        (
            "vllm/v1/kv_cache_interface.py",
            "def is_quantized_kv_cache(",
            "def is_quantized(",
            "vllm.v1.kv_cache_interface has no is_quantized_kv_cache",
        ),
    ],
)
def test_another_release_is_refused(
    other_release: Path, module: str, old: str, new: str, says: str
) -> None:
    path = other_release / module
    source = path.read_text()
    assert old in source
    path.unlink()  # a link to the installed one
    path.write_text(source.replace(old, new))
    release._parse.cache_clear()
    with pytest.raises(release.SeamError) as error:
        release.check(other_release)
    assert says in str(error.value)
    assert f"install vllm=={release.SUPPORTED[-1]}.*" in str(error.value)
    assert "\n" not in str(error.value)


def test_a_removed_module_is_refused(other_release: Path) -> None:
    (other_release / "vllm/v1/worker/cpu_worker.py").unlink()
    with pytest.raises(release.SeamError, match=r"no module vllm\.v1\.worker\.cpu_worker"):
        release.check(other_release)


def test_every_seam_says_why() -> None:
    for seam in SEAMS:
        assert seam.why and seam.until, seam.name
