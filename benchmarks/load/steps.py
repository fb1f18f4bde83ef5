"""A load that changes in mid-run: the process that holds the engine, and writes down every step.

It is asked for phases, a list of [batch size, seconds, core]: it keeps the batch at that size for
that time, and that core busy with something else where it is not null. What happens is read from
outside: from what the engine's core sends after each step.
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
"""Of each phase the batch size, the seconds, and the core that another process keeps busy."""


@dataclass(frozen=True)
class LoadJob:
    """What a run needs to know.

    `engine_args` are those of `vllm.LLM`; `prompts` are token ids, which are sent in this order and
    then again; answers are greedy.
    """

    engine_args: dict[str, Any]
    prompts: list[list[int]]
    max_tokens: int


@dataclass
class Step:
    """What the engine did in a step.

    Attributes
    ----------
    time : float
        When it ended, in seconds from the start of the first phase.
    phase : int
        The phase in which it ended.
    running : int
        Requests that got tokens in it.
    tokens : int
        That it emitted.
    seconds : float, optional
        From the end of the step before; None where it read a prompt, or the engine may have waited.
    nodes : int, optional
        Draft tokens that it verified: the budget of all requests together. None without lookahead.
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

    It begins in the engine's session: Linux shares a core between sessions first, and was seen to
    leave another session's process next to nothing beside vLLM's worker.
    """

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None

    def set(self, core: int | None) -> None:
        """Let it compute there, or nowhere."""
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
while os.getppid() == parent:  # it never outlives it
    sum(range(1_000_000))
"""


class StepWatch:
    """Sees what the engine's core sends after each step, on its way to vLLM's front end."""

    def __init__(self, engine: Any) -> None:
        self.steps: list[Step] = []
        self.phase = 0
        self.start = 0.0
        self._last = 0.0
        self._get_output = engine.engine_core.get_output
        engine.engine_core.get_output = self._look

    def _look(self) -> Any:
        outputs = self._get_output()
        stats = outputs.scheduler_stats
        if stats is None:  # no step, but a message
            return outputs
        emitting = [output for output in outputs.outputs if output.new_token_ids]
        ended = sum(output.finish_reason is not None for output in emitting)
        # One that has no token yet, or its first one, read its prompt.
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
    watch: StepWatch,
    phases: PhaseTimes,
    requests: Iterator[tuple[str, Any, Any]],
    begin: Callable[[int, int | None], None],
    clock: Callable[[], float] = time.monotonic,
) -> list[Step]:
    """Keep as many requests running as each phase asks for; those left over at the end are aborted.

    A phase with a smaller batch than the one before lets the larger one's requests come to their
    end.

    Parameters
    ----------
    requests : iterator
        Identifier, prompt and parameters of each, for ever.
    begin : callable
        Called with the number and the core of each phase when it begins.
    """
    watch.steps.clear()
    watch.start = end = clock()
    running: set[str] = set()
    for watch.phase, (batch_size, seconds, core) in enumerate(phases):
        begin(watch.phase, core)
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
    return watch.steps


def run(job: LoadJob, questions: Iterable[PhaseTimes], emit: Emit) -> None:
    """Start an engine, warm it up, and play the phases that are asked for."""
    from vllm import LLM, SamplingParams

    engine = LLM(**job.engine_args, disable_log_stats=False).llm_engine
    emit("warm-up")
    warm_up(engine, job.prompts, job.engine_args["max_num_seqs"])
    watch = StepWatch(engine)
    params = SamplingParams(temperature=0, max_tokens=job.max_tokens)

    def requests() -> Iterator[tuple[str, Any, Any]]:
        for number in count():
            lap, index = divmod(number, len(job.prompts))
            # No help from the same prompt's answer of a lap before.
            prompt = {"prompt_token_ids": job.prompts[index], "cache_salt": f"lap {lap}"}
            yield str(number), prompt, params

    busy = BusyCore()

    def begin(phase: int, core: int | None) -> None:
        busy.set(core)
        emit("phase", phase=phase)

    emit("ready")
    for phases in questions:
        try:
            steps = play(engine, watch, phases, requests(), begin)
        finally:
            busy.set(None)
        emit("answer", answer=[asdict(step) for step in steps])


if __name__ == "__main__":
    answer_questions(lambda job, questions, emit: run(LoadJob(**job), questions, emit))
