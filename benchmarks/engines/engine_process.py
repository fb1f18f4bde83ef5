"""The main loop of a process that `FreshEngine` starts.

`python -m MODULE JOB.json` reads questions from its standard input, one JSON value a line, until
the input ends. It writes events to its standard output, one JSON object a line: "ready", "failed"
with a reason, an "answer" to each question, and progress. Everything that vLLM and its processes
print goes to standard error.
"""

import json
import os
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from queue import SimpleQueue
from threading import Event, Thread
from typing import Any, TypeAlias

ANSWER_SECONDS = 1.0
"""From an answer, which may be the last one, to waiting for a question."""

Emit: TypeAlias = Callable[..., None]
"""Writes an event: its name, and its content as keyword arguments."""


def answer_questions(run: Callable[[dict[str, Any], Iterator[Any], Emit], None]) -> None:
    """Call `run` with the job, an iterator of questions and a function that writes events.

    The job's file is this process's only argument. An exception becomes the event "failed".
    """
    events = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def emit(event: str, **content: Any) -> None:
        print(json.dumps({"event": event, **content}), file=events, flush=True)

    try:
        run(json.loads(Path(sys.argv[1]).read_text()), _questions(), emit)
    except Exception as error:
        emit("failed", reason=f"{type(error).__name__}: {error}")
        raise


def _questions() -> Iterator[Any]:
    """The questions on standard input. If it ends before the last one is answered, the program that
    asks was killed: then this process group is, too."""
    lines: SimpleQueue[str] = SimpleQueue()
    is_idle = Event()

    def read() -> None:
        for line in sys.stdin:
            lines.put(line)
        if not is_idle.wait(ANSWER_SECONDS):
            os.killpg(0, signal.SIGKILL)
        lines.put("")

    def questions() -> Iterator[Any]:
        while True:
            is_idle.set()
            line = lines.get()
            is_idle.clear()
            if not line:
                return
            yield json.loads(line)

    Thread(target=read, daemon=True).start()  # also while the engine starts
    return questions()
