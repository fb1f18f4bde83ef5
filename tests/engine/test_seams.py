"""The table of seams matches the installed vLLM, and says so in one sentence when it does not."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import vllm

from lookahead_vllm.engine import seams

SITE = Path(vllm.__file__).parent.parent


def test_the_installed_vllm_fits() -> None:
    seams.check()


@pytest.fixture
def other_release(tmp_path: Path) -> Path:
    """The modules of the table alone, free to be changed."""
    for module in {s.module for s in seams.SEAMS}:
        relative = Path(*module.split(".")).with_suffix(".py")
        (tmp_path / relative).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(SITE / relative, tmp_path / relative)
    seams.check(tmp_path)
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
    ],
)
def test_another_release_is_refused(
    other_release: Path, module: str, old: str, new: str, says: str
) -> None:
    path = other_release / module
    source = path.read_text()
    assert old in source
    path.write_text(source.replace(old, new))
    seams._parse.cache_clear()
    with pytest.raises(seams.SeamError) as error:
        seams.check(other_release)
    assert says in str(error.value)
    assert "install vllm==0.32.*" in str(error.value)
    assert "\n" not in str(error.value)


def test_a_removed_module_is_refused(other_release: Path) -> None:
    (other_release / "vllm/v1/worker/cpu_worker.py").unlink()
    with pytest.raises(seams.SeamError, match=r"no module vllm\.v1\.worker\.cpu_worker"):
        seams.check(other_release)


def test_every_seam_says_why() -> None:
    for seam in seams.SEAMS:
        assert seam.why and seam.until, seam.name
