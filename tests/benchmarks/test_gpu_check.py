"""The inputs that gpu_check.py builds are those of the engine; the rest of it needs a GPU."""

from __future__ import annotations

import random
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from benchmarks.gpu import case, timings
from benchmarks.gpu.case import Case, depths_and_masks, tree_parents
from lookahead_vllm.draft.tree import DraftTree
from lookahead_vllm.verify.gpu.paged_batch import CAUSAL
from lookahead_vllm.verify.tree_batch import TreeBatch

SCRIPTS = Path(__file__).parents[2] / "scripts"


@pytest.mark.parametrize("nodes", [0, 1, 30, 31, 32, 128])
def test_masks_and_depths_are_those_of_the_engine(nodes: int) -> None:
    parents = tree_parents(nodes, random.Random(nodes))
    tree = DraftTree.from_lists(range(nodes), parents)
    batch = TreeBatch.build([tree], [0], [0], [0])
    depths, masks = depths_and_masks(parents, batch.masks.shape[1])
    assert depths == batch.depths.tolist() and masks == batch.masks.tolist()


def test_every_case_is_checked_against_attention_by_the_book(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(case, "DEVICE", "cpu")
    options = {"sliding_window": 40, "logits_soft_cap": 5.0, "alibi_slopes": True, "sinks": True}
    mixed = Case([70, 0, 9], [33, 5, 12], causal=(2,), dtype=torch.float32, options=options)
    assert mixed.batch.firsts.tolist() == [0, 34, CAUSAL]
    assert mixed.error("torch") < mixed.max_error == 1e-5
    assert Case([20], [9], fp8=True, heads_first=True).error("torch") < 1e-2


@pytest.mark.parametrize("version", [2, 3])
def test_flash_attention_3_is_scheduled_ahead_as_in_vllm(
    version: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[dict[str, Any]] = []
    called: list[dict[str, Any]] = []
    utils: Any = ModuleType("fa_utils")
    utils.get_flash_attn_version = lambda head_size: version
    kernels: Any = ModuleType("vllm_flash_attn")
    kernels.get_scheduler_metadata = lambda **options: made.append(options) or "ahead"
    kernels.flash_attn_varlen_func = lambda *args, **options: called.append(options)
    monkeypatch.setitem(sys.modules, "vllm.v1.attention.backends.fa_utils", utils)
    monkeypatch.setitem(sys.modules, "vllm.vllm_flash_attn", kernels)
    for module in (case, timings):
        monkeypatch.setattr(module, "DEVICE", "cpu")
    name, run = timings.flash_attention(Case([70, 9], [33, 5]))
    run()
    run()
    assert name == f"vLLM's {version}" and len(called) == 2
    assert [call.get("scheduler_metadata") for call in called] == [{3: "ahead"}.get(version)] * 2
    if version == 3:  # once, not in each call
        (ahead,) = made
        assert ahead["cache_seqlens"].tolist() == [104, 15]
        for option in ("num_splits", "max_seqlen_q", "max_seqlen_k", "causal"):
            assert ahead[option] == called[0][option]
    else:
        assert not made and "num_splits" not in called[0]


def test_it_needs_only_torch_and_triton_and_reports_a_missing_gpu() -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    script = str(SCRIPTS / "gpu_check.py")
    program = f"""
import runpy, sys

class Others:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("vllm", "numba", "llvmlite", "transformers", "matplotlib"):
            raise ImportError(name)

sys.meta_path.insert(0, Others())
sys.argv = [{script!r}]
runpy.run_path({script!r}, run_name="__main__")
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 2, done.stderr
    assert "there is no CUDA device here" in done.stderr
