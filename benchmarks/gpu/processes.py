"""Processes that end in time, and that are replaced when the device fails in them.

After an illegal access, a process has no device any more: whatever it checks next fails, too.
"""

import math
import multiprocessing
import signal
import subprocess
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection, wait
from typing import Any, TypeVar

Row = dict[str, Any]
"""What a task found: `raised` if it failed, `stopped` if the time was up."""
Task = TypeVar("Task")

GRACE_SECONDS = 20.0
"""For a command that is interrupted to report what it knows."""
TIME_IS_UP = "the time was up"


class Limit:
    """The time that is left.

    Parameters
    ----------
    seconds
        From now on; None for no limit.
    """

    def __init__(self, seconds: float | None) -> None:
        self.until = math.inf if seconds is None else time.monotonic() + seconds

    @property
    def left(self) -> float | None:
        """Seconds, or None without a limit."""
        return None if self.until == math.inf else max(0.0, self.until - time.monotonic())

    def run(self, command: Sequence[str]) -> str:
        """Run a command; "well", or what became of it.

        It is interrupted early enough to report what it knows.
        """
        left = self.left
        if left == 0:
            return f"left out: {TIME_IS_UP}"
        with subprocess.Popen(command) as process:
            try:
                code = process.wait(left and left - min(GRACE_SECONDS, left / 2))
            except (subprocess.TimeoutExpired, KeyboardInterrupt) as stopped:
                process.send_signal(signal.SIGINT)
                with suppress(subprocess.TimeoutExpired):
                    process.wait(min(GRACE_SECONDS, self.left or GRACE_SECONDS))
                process.kill()  # engines notice, see `engine_process.py`
                if isinstance(stopped, KeyboardInterrupt):
                    raise
                return TIME_IS_UP
        return "well" if code == 0 else f"failed ({code})"


class _Worker:
    """A process that does one task after another."""

    def __init__(self, run: Callable[[Any], Row]) -> None:
        spawn = multiprocessing.get_context("spawn")
        self.pipe, other_end = spawn.Pipe()
        self.process = spawn.Process(target=_serve, args=(other_end, run), daemon=True)
        self.process.start()
        other_end.close()  # so that `recv` fails when the process has ended
        self.task: Any = None

    def begin(self, task: Any) -> None:
        self.task = task
        with suppress(OSError):  # it has ended, which `row` says
            self.pipe.send(task)

    def row(self) -> Row:
        """What the task found, after `pipe` became ready."""
        try:
            row: Row = self.pipe.recv()
        except (EOFError, OSError):
            self.process.join()
            row = {"raised": f"its process has ended ({self.process.exitcode})"}
        return row

    def kill(self) -> None:
        self.process.kill()
        self.process.join()
        self.pipe.close()


def _serve(pipe: Connection, run: Callable[[Any], Row]) -> None:
    with suppress(EOFError):
        while True:
            pipe.send(run(pipe.recv()))


def in_processes(
    run: Callable[[Task], Row], tasks: Sequence[Task], processes: int, seconds: float | None
) -> Iterator[tuple[Task, Row]]:
    """Tasks and their rows as they end, each task in one of so many processes.

    A process in which a task has failed is replaced. After so many seconds, those under way are
    stopped, and the others do not begin.
    """
    limit, left = Limit(seconds), deque(tasks)
    idle: list[_Worker] = []
    busy: list[_Worker] = []
    try:
        while left or busy:
            while left and len(busy) < processes:
                worker = idle.pop() if idle else _Worker(run)
                worker.begin(left.popleft())
                busy.append(worker)
            ready = wait([worker.pipe for worker in busy], limit.left)
            for worker in [worker for worker in busy if worker.pipe in ready]:
                busy.remove(worker)
                row = worker.row()
                if "raised" in row:
                    worker.kill()
                else:
                    idle.append(worker)
                yield worker.task, row
            if not ready:
                for worker in busy:
                    yield worker.task, {"stopped": TIME_IS_UP}
                return
    finally:
        for worker in [*idle, *busy]:
            worker.kill()
