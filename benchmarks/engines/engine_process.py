"""The process that holds an engine: what `FreshEngine` starts, seen from inside.

`python -m MODULE JOB.json` reads one question a line from its standard input, as JSON, until it
ends. It writes one JSON event a line to its standard output: "ready", "failed" with a reason, an
"answer" to each question, and what else there is to say. Everything that vLLM and its processes
print goes to its standard error.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeAlias

Emit: TypeAlias = Callable[..., None]
"""Sends an event: its name, and by keyword what belongs to it."""


def answer_questions(run: Callable[[dict[str, Any], Iterator[Any], Emit], None]) -> None:
    """Let `run` do the job with the questions as they come, and leave.

    The job's file is this process's only argument.
    """
    events = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def emit(event: str, **content: Any) -> None:
        print(json.dumps({"event": event, **content}), file=events, flush=True)

    try:
        run(json.loads(Path(sys.argv[1]).read_text()), map(json.loads, sys.stdin), emit)
    except Exception as error:
        emit("failed", reason=f"{type(error).__name__}: {error}")
        raise
