"""The installed vLLM has all that lookahead uses; of another release, the differences are told."""

import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import vllm

from benchmarks.port import compare
from benchmarks.port.seams import SEAMS, TABLE, Seam
from lookahead_vllm.engine import compatibility

PACKAGE = Path(vllm.__file__).parent
RELEASE = compatibility.release_of(PACKAGE)


@pytest.fixture(scope="module", autouse=True)
def _forget_sources() -> Iterator[None]:
    """Syntax trees are millions of objects, which would slow down all later tests."""
    yield
    compare._parse.cache_clear()
    compare._all_words.cache_clear()


def test_the_installed_vllm_fits():
    assert not list(compare.problems())


# ---- another release -----------------------------------------------------------------------------


def rename(old: str, new: str) -> Callable[[str], str]:
    def change(text: str) -> str:
        assert old in text
        return text.replace(old, new)

    return change


@pytest.mark.parametrize(
    ("module", "change", "problem"),
    [
        (
            "vllm/v1/worker/gpu/model_runner.py",
            rename("def sample_tokens(", "def sample_step("),
            "vllm.v1.worker.gpu.model_runner has no GPUModelRunner.sample_tokens",
        ),
        (
            "vllm/v1/worker/lora_model_runner_mixin.py",
            rename("prompt_lora_mapping: tuple", "lora_mapping: tuple"),
            "LoRAModelRunnerMixin._set_active_loras has no 'prompt_lora_mapping'",
        ),
        (
            "vllm/v1/kv_cache_interface.py",
            rename("is_quantized_kv_cache", "is_quantized"),
            "vllm.v1.kv_cache_interface has no is_quantized_kv_cache",
        ),
        ("vllm/v1/worker/cpu_worker.py", None, "there is no module vllm.v1.worker.cpu_worker"),
    ],
)
def test_what_is_replaced_or_imported_is_compared(module, change, problem, tmp_path):
    """With the few modules of another release that a test needs; the others are missing."""
    path = tmp_path / module
    path.parent.mkdir(parents=True)
    shutil.copyfile(PACKAGE / "_version.py", tmp_path / "vllm" / "_version.py")
    if change is not None:
        path.write_text(change((PACKAGE.parent / module).read_text()))
    assert problem in compare.problems(tmp_path)


# ---- the table -----------------------------------------------------------------------------------


def test_every_item_of_the_table_is_read():
    assert len(SEAMS) == len(re.findall(r"^- `vllm", TABLE.read_text(), re.M)) > 80
    assert all(seam.why and seam.until and seam.area for seam in SEAMS)


def test_a_place_or_need_that_is_missing_is_reported():
    gone = "gone_now"
    for seam in SEAMS:
        if seam.release in ("", RELEASE):
            wrong: list[Seam] = [seam._replace(needs=(*seam.needs, gone))]
            wrong.append(seam._replace(name=f"{seam.name}.{gone}".strip(".")))
            for changed in (*wrong, seam._replace(module=f"{seam.module}_{gone}")):
                assert gone in (compare._problem(PACKAGE, changed) or ""), changed


def test_no_place_is_patched_by_two_seams():
    places = [place for seam in SEAMS if seam.is_patch for place in seam.places]
    assert len(places) == len(set(places)) > 15
