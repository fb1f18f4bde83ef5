"""Traces of steps by station, for chrome://tracing and https://ui.perfetto.dev.

The stations are those of `docs/design.md`, "A step". They are wrapped while a trace is recorded.
"""

import functools
import json
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from operator import attrgetter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from lookahead_vllm.engine.patches import swapped

STEPS = 20
FIRST_STEP = 40
"""Of a turn of `bench.py`: by then, prompts were read."""

Span = Callable[[str], AbstractContextManager[Any]]
"""Records what its block takes, under a name."""

STATIONS = {
    "schedule": ["scheduler.schedule"],
    "begin": ["runner.gather_batch_req_state"],
    "place": ["runner.prepare_inputs", "runner.prepare_attn"],
    "draft": ["runner._draft"],
    "wait": ["runner._late._waiter.wait"],
    "grow": ["runner._late._draft"],
    "share out": ["runner._shape.share_out"],
    "launch": ["device.launch", "device.replay"],
    "settle": ["runner._settle"],
    "sample": ["runner.sample"],
    "keep": ["runner._late.add_step"],
    "learn": ["runner._late._catch_up"],
    "update": ["scheduler.update_from_output"],
}
"""Functions by station. Plain vLLM lacks some of them."""


@contextmanager
def named_stations(span: Span, **roots: Any) -> Iterator[None]:
    """Record the stations in this block.

    Parameters
    ----------
    span
        Called with the name of a station.
    roots
        The `scheduler` (or its class), the `runner`, and what launches work on the `device`.
    """
    with ExitStack() as stack:
        for station, functions in STATIONS.items():
            for path, _, name in (function.rpartition(".") for function in functions):
                try:
                    owner = attrgetter(path)(SimpleNamespace(**roots))
                    run = _spanned(getattr(owner, name), span, station)
                except AttributeError:
                    continue
                stack.enter_context(swapped(owner, name, run))
        yield


def _spanned(function: Callable[..., Any], span: Span, station: str) -> Callable[..., Any]:
    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        with span(station):
            return function(*args, **kwargs)

    return run


class Trace:
    """Events of lanes, by `time.perf_counter`."""

    def __init__(self) -> None:
        self._events: list[dict[str, Any]] = []

    @contextmanager
    def span(self, name: str) -> Iterator[None]:
        """Record the block in the lane of the host."""
        begin = time.perf_counter()
        try:
            yield
        finally:
            self.add("host", name, begin, time.perf_counter())

    def add(self, lane: str, name: str, begin: float, end: float) -> None:
        """Add an event; instants in seconds."""
        event = {"ph": "X", "pid": 0, "tid": lane, "name": name}
        self._events.append({**event, "ts": 1e6 * begin, "dur": 1e6 * (end - begin)})

    def write(self, path: Path) -> None:
        """Write them as JSON, in the order in which they begin; times in microseconds."""
        events = sorted(self._events, key=lambda event: (event["ts"], -event["dur"]))
        path.write_text(json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}) + "\n")


def trace_turn(worker: Any, path: str) -> None:
    """Runs in a worker: write STEPS of the next steps to a file, by torch's profiler.

    It has the device's lanes and torch's operators, too. The scheduler's stations are in it if the
    engine core runs in the same process, as it does on one GPU. A second file, `.stations.json`,
    has the milliseconds of each station in a step, and those of them in which the thread was on a
    core: else it slept, or waited for the device, the interpreter's lock, or a core.
    """
    import torch

    runner, stack, steps = worker.model_runner, ExitStack(), 0
    execute = runner.execute_model
    seconds: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])

    @contextmanager
    def span(name: str) -> Iterator[None]:
        begin, on_core = time.perf_counter(), time.thread_time()
        with torch.profiler.record_function(name):
            yield
        seconds[name][0] += time.perf_counter() - begin
        seconds[name][1] += time.thread_time() - on_core

    def write_stations() -> None:
        rows = {
            name: {"ms": 1e3 * whole / STEPS, "on_core_ms": 1e3 * on_core / STEPS}
            for name, (whole, on_core) in seconds.items()
        }
        Path(path).with_suffix(".stations.json").write_text(json.dumps(rows, indent=1) + "\n")

    def execute_model(*args: Any, **kwargs: Any) -> Any:
        nonlocal steps
        steps += 1
        if steps == FIRST_STEP:
            profile = torch.profiler.profile()
            stack.callback(profile.export_chrome_trace, path)  # once it has ended
            stack.callback(write_stations)
            stack.enter_context(profile)
            scheduler = worker.vllm_config.scheduler_config.get_scheduler_cls()
            roots = dict(scheduler=scheduler, runner=runner, device=torch.cuda.CUDAGraph)
            stack.enter_context(named_stations(span, **roots))
        if steps == FIRST_STEP + STEPS:
            runner.execute_model = execute
            stack.close()
        return execute(*args, **kwargs)

    runner.execute_model = execute_model
