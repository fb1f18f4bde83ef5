"""The process that runs an engine until it is ended."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import vllm.entrypoints.cli.main
import vllm.entrypoints.cli.serve
from vllm import LLM, SamplingParams

import lookahead_vllm.engine.worker.v1.cpu_worker  # noqa: F401
from tests.ends.ending import CONTAINED, Ending
from tests.support.servers import cores_of

PROMPT = [5, 6, 7, 8]
MAX_TOKENS = 200

_alive: list[Any] = []
"""Keeps the engine until the process ends, like a global variable of a script."""


def settings_of(ending: Ending, model: Path, cache: Path) -> dict[str, object]:
    """The arguments of `vllm.LLM`; the cache file is saved only at the end."""
    return {
        "model": str(model),
        "dtype": "float32",
        "enforce_eager": True,
        "kv_cache_memory_bytes": 64 << 20,
        "max_model_len": 256,
        "attention_backend": "CPU_MLA",
        "tensor_parallel_size": ending.ranks,
        "speculative_config": {
            "method": "lookahead",
            "budget": 16,
            "cache_path": str(cache),
            "cache_interval": 0,
        },
    }


def run(ending: Ending, model: Path, cache: Path, log: Path, port: int) -> None:
    """Run an engine in this process, which was forked for it, until it is ended."""
    # A shell starts its background jobs with SIGINT ignored.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if os.getpid() > 2:  # in a container, the process before `unshare` has done this
        os.setsid()
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0" if ending.kind == "inline" else "1"
    os.environ["VLLM_CPU_OMP_THREADS_BIND"] = cores_of(ending.ranks)
    settings = settings_of(ending, model, cache)
    if ending.kind == "serve":
        _serve(ending, settings, [str(model), str(cache), str(log)], port)
        return
    _alive.append(llm := LLM(**settings))
    params = SamplingParams(temperature=0, ignore_eos=True, max_tokens=MAX_TOKENS)
    llm.generate([{"prompt_token_ids": PROMPT}], params, use_tqdm=False)
    log.with_name("ready").touch()
    while ending.target != "exit":
        time.sleep(1)


def _serve(ending: Ending, settings: dict[str, object], paths: list[str], port: int) -> None:
    if ending.target in CONTAINED and os.getpid() > 2:
        # A process that unshares its PID namespace cannot start threads: run this script again.
        command = ["unshare", "--pid", "--fork", "--mount-proc", sys.executable, *sys.argv]
        os.execvp("unshare", [*command, "--run", json.dumps([ending, *paths, port])])
    if ending.target == "shell" and (child := os.fork()):
        # Like a shell that did not `exec`: wait, without a handler for SIGTERM.
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os._exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) & 0xFF)
    model = str(settings.pop("model"))
    sys.argv = ["vllm", "serve", model, "--host", "127.0.0.1", "--port", str(port)]
    for name, value in settings.items():
        text = json.dumps(value) if isinstance(value, dict) else str(value)
        sys.argv += [f"--{name.replace('_', '-')}", *([] if value is True else [text])]
    vllm.entrypoints.cli.main.main()
