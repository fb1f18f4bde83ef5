"""The process of an engine under a changing load: it records every step.

Each question is a list of phases [batch size, seconds, core]: the process keeps the batch at that
size for that time, and, if core is not null, that core busy with another process. Steps are
recorded from the messages that the engine's core sends after each step.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import count
from typing import Any, TypeAlias

from benchmarks.engines.engine_process import Emit, answer_questions
from benchmarks.engines.generate import warm_up

PhaseTimes: TypeAlias = Sequence[tuple[int, float, int | None]]
"""For each phase the batch size, the seconds, and the core that another process keeps busy."""


@dataclass(frozen=True)
class LoadJob:
    """The input of a run.

    `engine_args` are those of `vllm.LLM`. `prompts` are token ids, sent in this order, again and
    again. Decoding is greedy.
    """

    engine_args: dict[str, Any]
    prompts: list[list[int]]
    max_tokens: int


@dataclass
class Step:
    """One step of the engine.

    Attributes
    ----------
    time : float
        Its end, in seconds from the start of the first phase.
    phase : int
        The phase in which it ended.
    running : int
        Requests that got tokens.
    tokens : int
        Emitted tokens.
    seconds : float, optional
        The time since the end of the previous step; None if the step read a prompt or the engine
        may have waited.
    nodes : int, optional
        Verified draft tokens of all requests together; None without lookahead.
    predicted : float, optional
        The seconds that lookahead's cost model predicted.
    """

    time: float
    phase: int
    running: int
    tokens: int
    seconds: float | None
    nodes: int | None
    predicted: float | None


class BusyCore:
    """A process that computes on one core.

    It belongs to the engine's session: Linux divides a core among sessions first, and left a
    process of another session almost no time beside vLLM's worker.
    """

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None

    def set(self, core: int | None) -> None:
        """Compute on this core from now on; None stops."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None
        if core is not None:
            self._process = subprocess.Popen([sys.executable, "-c", _COMPUTE, str(core)])


_COMPUTE = """
import os, sys
os.sched_setaffinity(0, {int(sys.argv[1])})
parent = os.getppid()
while os.getppid() == parent:  # it ends with its parent
    sum(range(1_000_000))
"""


class StepLog:
    """Records the messages that the engine's core sends to vLLM's front end after each step."""

    def __init__(self, engine: Any) -> None:
        self.steps: list[Step] = []
        self.phase = 0
        self.start = 0.0
        self._last = 0.0
        self._get_output = engine.engine_core.get_output
        engine.engine_core.get_output = self._get_and_record

    def _get_and_record(self) -> Any:
        outputs = self._get_output()
        stats = outputs.scheduler_stats
        if stats is None:  # a message without a step
            return outputs
        emitting = [output for output in outputs.outputs if output.new_token_ids]
        ended = sum(output.finish_reason is not None for output in emitting)
        # A request without tokens, or with its first one, read its prompt in this step.
        reading = len(emitting) < stats.num_running_reqs + ended or any(
            output.prefill_stats is not None for output in emitting
        )
        report = getattr(stats, "lookahead", None)
        self.steps.append(
            Step(
                time=outputs.timestamp - self.start,
                phase=self.phase,
                running=len(emitting),
                tokens=sum(len(output.new_token_ids) for output in emitting),
                seconds=None if reading else outputs.timestamp - self._last,
                nodes=None if report is None else sum(report.verified),
                predicted=report.costs[-1][0] if report and report.costs else None,
            )
        )
        self._last = outputs.timestamp
        return outputs


def play(
    engine: Any,
    log: StepLog,
    phases: PhaseTimes,
    requests: Iterator[tuple[str, Any, Any]],
    begin: Callable[[int, int | None], None],
    clock: Callable[[], float] = time.monotonic,
) -> list[Step]:
    """Keep each phase's number of requests running; requests that run at the end are aborted.

    If a phase has a smaller batch than the previous one, the surplus requests run to their end.

    Parameters
    ----------
    requests : iterator
        Identifier, prompt and parameters of each request, without end.
    begin : callable
        Called with the number and the core of each phase when it begins.
    """
    log.steps.clear()
    log.start = end = clock()
    running: set[str] = set()
    for log.phase, (batch_size, seconds, core) in enumerate(phases):
        begin(log.phase, core)
        end += seconds
        while clock() < end:
            while len(running) < batch_size:
                name, prompt, params = next(requests)
                engine.add_request(name, prompt, params)
                running.add(name)
            for output in engine.step():
                if output.finished:
                    running.discard(output.request_id)
    engine.abort_request(list(running))
    return log.steps


def run(job: LoadJob, questions: Iterable[PhaseTimes], emit: Emit) -> None:
    """Start an engine, warm it up, and play the phases of each question."""
    from vllm import LLM, SamplingParams

    engine = LLM(**job.engine_args, disable_log_stats=False).llm_engine
    emit("warm-up")
    warm_up(engine, job.prompts, job.engine_args["max_num_seqs"])
    log = StepLog(engine)
    params = SamplingParams(temperature=0, max_tokens=job.max_tokens)

    def requests() -> Iterator[tuple[str, Any, Any]]:
        for number in count():
            lap, index = divmod(number, len(job.prompts))
            # So that the prompt's earlier answers do not help.
            prompt = {"prompt_token_ids": job.prompts[index], "cache_salt": f"lap {lap}"}
            yield str(number), prompt, params

    busy = BusyCore()

    def begin(phase: int, core: int | None) -> None:
        busy.set(core)
        emit("phase", phase=phase)

    emit("ready")
    for phases in questions:
        try:
            steps = play(engine, log, phases, requests(), begin)
        finally:
            busy.set(None)
        emit("answer", answer=[asdict(step) for step in steps])


if __name__ == "__main__":
    answer_questions(lambda job, questions, emit: run(LoadJob(**job), questions, emit))
