"""A run: hostile clients against a server with lookahead, and against a plain one beside it.

First come bad requests, one at a time, so that each fault belongs to one request; then as many
references and namespaces as the server takes; then the load of `load.py`.
"""

import asyncio
import json
import os
import random
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from lookahead_vllm.engine.plugin import PLAIN_V2
from tests.hostile import bad_requests, clients
from tests.hostile.bad_requests import MAX_TOKENS, Request
from tests.hostile.good_client import GoodClient
from tests.hostile.load import HostileActions, Load, log
from tests.hostile.report import Fault, Report, faults_of
from tests.hostile.watch import Watch
from tests.support.models import save_tiny_model
from tests.support.servers import running
from tests.support.tokenizer import save_tokenizer

FLAGS = (
    *("--dtype", "float32", "--enforce-eager", "--kv-cache-memory-bytes", str(256 << 20)),
    *("--served-model-name", bad_requests.MODEL, "--enable-scale-out"),
    *("--enable-auto-tool-choice", "--tool-call-parser", "hermes"),
    *("--shutdown-timeout", "10"),  # else vLLM kills the worker, which then saves no cache
)
ENVIRONMENT = {"ONEDNN_PRIMITIVE_CACHE_CAPACITY": "64", PLAIN_V2: "1"}
"""Both servers run V2, so that seeded answers are equal. oneDNN caches a kernel for each number of
rows, 1024 by default: some 60 MB, which fill slowly in plain vLLM, and faster with drafts, whose
numbers of rows vary more. A small cache keeps this growth out of the measured memory.
"""
LOOKAHEAD = ("--speculative-model", "[lookahead]")


@dataclass(frozen=True)
class Plan:
    """The parameters of a run; those of `scripts/hostile.py`, but for one."""

    minutes: float
    seed: int
    rate: float
    is_quick: bool = False
    """Few bad requests; times and memory cannot be violations."""

    def bad_requests(self, rng: random.Random) -> list[Request]:
        fixed = [*bad_requests.every_value(), *bad_requests.around_limits()]
        return rng.sample(fixed, 80 if self.is_quick else len(fixed))


def play(plan: Plan, folder: Path) -> Report:
    """Start both servers, run everything against them, and end them."""
    model = save_tokenizer(save_tiny_model("llama", folder))
    report = Report(plan.seed)
    logs = {name: folder / f"{name}.log" for name in ("plain", "lookahead")}
    cache = folder / "pipe"
    cache.unlink(missing_ok=True)
    os.mkfifo(cache)
    flags = {"plain": [], "lookahead": [*LOOKAHEAD, f"--speculative-config.cache_path={cache}"]}
    if plan.is_quick:  # slow machines draft too
        flags["lookahead"] += ["--num-speculative-tokens", "6", "--speculative-config.budget", "6"]
    with ExitStack() as servers:

        def start(name: str) -> Watch:
            starting = running(model, logs[name], *FLAGS, *flags[name], **ENVIRONMENT)
            server = servers.enter_context(starting)
            log(f"the {name} server is up")
            return Watch(server, logs[name])

        with ThreadPoolExecutor() as pool:
            watches = dict(zip(flags, pool.map(start, flags), strict=True))
        warnings = logs["lookahead"].read_text(errors="replace").count("starts cold: the cache")
        if warnings != 1:
            report.violation(f"for a pipe as cache file, the server warned {warnings} times")
        asyncio.run(Run(plan, report, watches["lookahead"], watches["plain"]).everything())
        with ThreadPoolExecutor() as pool:
            faults = dict(zip(watches, pool.map(Watch.end, watches.values()), strict=True))
        for kind, description in faults["lookahead"].items():
            if kind in faults["plain"]:
                report.plain_too[f"at the end, {kind}"].append(faults["plain"][kind])
            else:
                report.violation(description)
    if not cache.is_file():
        report.violation("the cache was not saved at the end")
    return report


class Run:
    """Everything that is sent while both servers are up."""

    def __init__(self, plan: Plan, report: Report, lookahead: Watch, plain: Watch) -> None:
        self._plan = plan
        self._report = report
        self._lookahead = lookahead
        self._plain = plain
        self._rng = random.Random(plan.seed)
        self._good_client = GoodClient(report, lookahead, plain)
        self._load = Load(report, self._good_client, lookahead, plain, plan.rate)

    async def everything(self) -> None:
        end = time.monotonic() + 60 * self._plan.minutes
        await self._good_client.ask_plain(self._rng)
        await self._good_client.ask_all_known()
        await self._bad_requests(stop=time.monotonic() + 20 * self._plan.minutes)
        await self._largest_references()
        await self._many_namespaces(seconds=max(1.0, (end - time.monotonic()) / 10))
        await self._load.run(HostileActions(self._rng), end)
        if not self._plan.is_quick:
            self._report.judge_memory()
        await self._check_after_all()

    async def _bad_requests(self, stop: float) -> None:
        for number, request in enumerate(self._plan.bad_requests(self._rng)):
            if number % 25 == 0:
                await self._good_client.ask_known()
                if time.monotonic() > stop and not self._plan.is_quick:
                    break
            await self._judge(request)
        log(f"bad requests one by one: {self._report.summary()}")

    async def _judge(self, request: Request) -> None:
        """Send the request; its faults are violations unless plain vLLM has them as well."""
        reply = await clients.ask(self._lookahead.port, request.path, request.body)
        self._report.sent["bad requests, one by one"] += 1
        if 400 <= reply.status < 500:
            self._report.slowest_refusal = max(self._report.slowest_refusal, reply.seconds)
        faults = self._faults_of(request, reply)
        if not faults:
            return
        renamed = request.without_lookahead()
        reply_of_plain = await clients.ask(self._plain.port, renamed.path, renamed.body)
        kinds = {fault.kind for fault in faults_of(renamed, reply_of_plain)}
        kinds.discard("accepted")  # plain vLLM ignores unknown fields
        for fault in faults:
            self._report.fault(request, fault, fault.kind in kinds)

    def _faults_of(self, request: Request, reply: clients.Reply) -> list[Fault]:
        return [
            fault
            for fault in faults_of(request, reply)
            if fault.kind != "slow" or not self._plan.is_quick
        ]

    async def _largest_references(self) -> None:
        """Many requests with the largest reference at once."""
        count = 16
        ids = json.dumps([7] * MAX_TOKENS)
        body = bad_requests.completion(
            f'{{"lookahead_reference": {ids}}}', max_tokens=256, ignore_eos=True
        )
        replies = await asyncio.gather(
            *(clients.ask(self._lookahead.port, "/v1/completions", body) for _ in range(count))
        )
        self._report.sent["largest references at once"] += count
        if any(reply.status != 200 for reply in replies):
            statuses = [reply.status for reply in replies]
            self._report.violation(f"{count} largest references at once: {statuses}")

    async def _check_idle(self) -> None:
        """All requests of clients that left must end."""
        for watch in (self._lookahead, self._plain):
            idle = await asyncio.to_thread(watch.becomes_idle)
            kind = "requests of clients that left still run"
            if not idle and watch is self._lookahead:
                self._report.violation(kind)
            elif not idle:
                self._report.plain_too[kind].append("after all clients left")

    async def _many_namespaces(self, seconds: float) -> None:
        stop = time.monotonic() + seconds
        rng = random.Random(self._plan.seed)

        async def one_client() -> None:
            while time.monotonic() < stop:
                request = bad_requests.in_a_new_namespace(rng)
                reply = await clients.ask(self._lookahead.port, request.path, request.body)
                self._report.namespaces += 1
                self._report.sent["namespaces in a row"] += 1
                for fault in self._faults_of(request, reply):
                    self._report.fault(request, fault, plain_too=False)

        await asyncio.gather(*(one_client() for _ in range(8)))
        await self._good_client.ask_known()
        log(f"{self._report.namespaces} namespaces in {seconds:.0f} s")

    async def _check_after_all(self) -> None:
        await self._check_idle()
        await self._good_client.ask_all_known()
        if not self._lookahead.counted("lookahead_vllm:nodes_accepted_total"):
            self._report.violation("no node was accepted: plain vLLM was compared with itself")
        errors = self._lookahead.errors_of_the_engine()
        if errors:
            plain = self._plain.errors_of_the_engine()
            self._report.violation(
                f"the engine's log has {len(errors)} lines of errors, plain vLLM's {len(plain)}; "
                f"the first is {errors[0]}"
            )
