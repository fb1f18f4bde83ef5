"""Measure how long the simulated device waits: each method, at each batch size, in a process."""

import argparse
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tqdm import tqdm

from benchmarks.command_line import interrupted
from benchmarks.device import engine
from benchmarks.device.engine import Job, Measurement
from benchmarks.device.options import OptionsError, check, parser
from benchmarks.device.rows import METHODS, Row, Run, table
from benchmarks.engines.fresh_engine import FreshEngine, RunFailed, cpu_runtime
from lookahead_vllm.engine.plugin import PLAIN_V2


class Simulation:
    """All runs of one call, whose options were checked, and their results so far."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.rows: list[Row] = []
        self.failed: list[str] = []
        self.folder = Path(tempfile.mkdtemp(prefix="lookahead-device-"))
        """Logs, and the cache of vLLM that the engines share."""

    def runs(self) -> Iterator[Run]:
        """Every method at every batch size: plain vLLM once, lookahead for each of --nodes."""
        for size in self.options.batch_sizes:
            for method in self.options.methods:
                for nodes in self.options.nodes if METHODS[method].lookahead else [0]:
                    yield Run(method, size, nodes)

    def run(self) -> None:
        """Measure them, one after the other. A failure is printed, and the others go on."""
        with tqdm(list(self.runs()), unit="engine") as bar:
            for run in bar:
                bar.set_description(run.name)
                try:
                    measured = self.measure(run)
                except RunFailed as error:
                    self.failed.append(run.name)
                    bar.write(f"{run.name} failed: {error}\n  log: {self.log(run)}", sys.stderr)
                    continue
                self.rows.append(Row(**asdict(run), **asdict(measured)))

    def measure(self, run: Run) -> Measurement:
        """Start an engine and measure its steps; RunFailed if it fails."""
        options, method = self.options, METHODS[run.method]
        job = Job(
            lookahead=method.lookahead,
            proposer=method.proposer,
            batch_size=run.batch_size,
            nodes=run.nodes,
            device_ms=options.device_ms,
            steps=options.steps,
            host_delay_ms=options.host_delay_ms,
            waits=method.waits,
            drafter=method.drafter,
            prefix_caching=options.prefix_caching,
            prompts_every=options.prompts_every,
            graphs=options.graphs,
            growers=options.growers,
            trace=options.trace and str(options.trace.absolute()),
        )
        environment = {
            **cpu_runtime(os.environ),
            "OMP_NUM_THREADS": "1",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            PLAIN_V2: "1",
            "VLLM_NO_USAGE_STATS": "1",
            # The cost of a step on this device must not be kept for real ones.
            "VLLM_CACHE_ROOT": str(self.folder / "cache"),
        }
        log = self.log(run)
        with FreshEngine(
            engine.__name__, asdict(job), environment, log, lambda event: None
        ) as process:
            process.wait_until_ready()
            return Measurement(**process.ask(None))

    def log(self, run: Run) -> Path:
        """What the run's process printed."""
        return self.folder / f"{run.method}-{run.batch_size}-{run.nodes}.log"

    def report(self) -> None:
        """Print the table of the finished runs; write the JSON."""
        if self.rows:
            print(table(self.rows))
        if self.options.json:
            rows = [asdict(row) for row in self.rows]
            self.options.json.write_text(json.dumps(rows, indent=1) + "\n")

    def clean_up(self) -> None:
        """Delete the folder, unless a run failed."""
        if not self.failed:
            shutil.rmtree(self.folder, ignore_errors=True)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the measurement; returns the exit status."""
    command_line = parser()
    options: Any = command_line.parse_args(argv)
    try:
        check(options)
    except OptionsError as error:
        command_line.error(str(error))
    simulation = Simulation(options)
    was_interrupted = interrupted(simulation.run)
    simulation.report()
    simulation.clean_up()
    if was_interrupted:
        return 130
    return 1 if simulation.failed else 0
