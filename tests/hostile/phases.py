"""Phases in which a good client is timed while hostile clients send the same load each time.

1. to the server with lookahead;
2. to the same server, with lookahead's fields under names that it does not know;
3. the same to plain vLLM.

The requests have equal lengths and arrival times in all three, and the clients sleep most of the
time. The cost of the fields for a good client is the ratio of its times in the first two.
"""

from __future__ import annotations

import asyncio
import random
import time
from functools import partial
from typing import TypeAlias

from tests.hostile import bad_requests, clients
from tests.hostile.bad_requests import Limits, Request
from tests.hostile.clients import CUTS
from tests.hostile.good_client import GoodClient
from tests.hostile.plan import Plan
from tests.hostile.report import LOADS, QUIET, Report, Timing, faults_of
from tests.hostile.watch import Watch, cpu_seconds_of_this_process

MAX_HOSTILE_CLIENTS = 64
"""Hostile clients at once; further ones are held back."""
MAX_MEMORY_GROWTH = 0.02
MAX_TIME_GROWTH = 0.10
MIN_MEMORY_MINUTES = 10.0
"""In shorter runs, memory growth is no violation."""

log = partial(print, flush=True)

Action: TypeAlias = Request | tuple[clients.Act, bytes]


class HostileActions:
    """What hostile clients do, made in advance, because the phases measure times."""

    def __init__(self, rng: random.Random, limits: Limits) -> None:
        requests: dict[str, list[Request]] = {
            "bad requests": [r for r in bad_requests.every_value() if len(r.body) < 300_000],
            "largest references": [bad_requests.at_the_limit(rng, limits) for _ in range(12)],
        }
        self._requests: dict[bool, dict[str, list[Request]]] = {
            False: requests,
            True: {
                kind: [r.without_lookahead(refused=r.expected == "refused") for r in of_kind]
                for kind, of_kind in requests.items()
            },
        }
        self._streams = [clients.long_stream(rng) for _ in range(50)]
        self._wide = [clients.long_stream(rng, n=4, logprobs=5, max_tokens=200) for _ in range(5)]

    def draw(self, rng: random.Random, renamed: bool) -> tuple[str, Action]:
        """A kind and an action; those of equal `rng` differ in field names only."""
        (kind,) = rng.choices(
            ["bad requests", "a new namespace", "largest references", "cut", "aborted", "slow"],
            [35, 20, 10, 17, 15, 3],
        )
        if kind == "a new namespace":
            request = bad_requests.in_a_new_namespace(rng)
            return kind, request.without_lookahead() if renamed else request
        if kind in self._requests[renamed]:
            return kind, rng.choice(self._requests[renamed][kind])
        body = rng.choice(self._wide if kind == "slow" else self._streams)
        if renamed:
            body = body.replace(b"lookahead", b"lookabout")
        if kind == "cut":
            name = rng.choice(sorted(CUTS))
            return name, (CUTS[name], body)
        if kind == "slow":
            return "read slowly", (clients.read_slowly, body)
        return "aborted streams", (clients.cut_in_the_stream, body)


class Phases:
    """Times a good client under each load in turn, and watches the memory of both servers."""

    def __init__(
        self, plan: Plan, report: Report, good_client: GoodClient, lookahead: Watch, plain: Watch
    ) -> None:
        self._plan = plan
        self._report = report
        self._good_client = good_client
        self._lookahead = lookahead
        self._plain = plain

    async def run(self, actions: HostileActions, end: float) -> None:
        """Run phases until `end`, of the monotonic clock, at least one of each load."""
        # The warm-up allocates what is allocated once.
        for load in LOADS:
            await self._phase(load, Timing(), actions, "warm-up")
        for watch in (self._lookahead, self._plain):
            watch.samples.clear()
        start = last_line = time.monotonic()
        cycle = 0
        while time.monotonic() < end or not cycle:
            await self._phase(QUIET, self._report.timings[QUIET], None, cycle)
            lookahead, renamed, plain = LOADS
            order = (lookahead, renamed, plain) if cycle % 2 else (renamed, lookahead, plain)
            for load in order:
                await self._phase(load, self._report.timings[load], actions, cycle)
            await self._good_client.compare_pending()
            cycle += 1
            if time.monotonic() > last_line + 60:
                last_line = time.monotonic()
                left = max(0.0, end - last_line) / 60
                log(f"{self._report.summary()}; {left:.0f} min left")
        self._report.minutes_watched = (time.monotonic() - start) / 60
        for name, watch in (("lookahead", self._lookahead), ("plain", self._plain)):
            self._report.memory[name] = watch.memory()
        if self._plan.timed:
            self._judge_figures()

    async def _phase(
        self, load: str, timing: Timing, actions: HostileActions | None, cycle: int | str
    ) -> None:
        """Send good requests one after another, and hostile ones at random times."""
        watch = self._plain if load == LOADS[2] else self._lookahead
        hostile_rng = random.Random(f"{self._plan.seed}-{cycle}")
        rng = random.Random(f"{self._plan.seed}-{cycle}-{load}")
        start = time.monotonic()
        cpu, server_cpu = cpu_seconds_of_this_process(), watch.cpu_seconds()
        hostile = None
        if actions is not None:
            hostile = asyncio.create_task(self._hostile(load, watch, timing, actions, hostile_rng))
        last_sample = 0.0
        while time.monotonic() < start + self._plan.phase_seconds:
            seconds_per_token = await self._good_client.ask_timed(watch, rng)
            if seconds_per_token is not None:
                timing.seconds_per_token.append(seconds_per_token)
            if time.monotonic() > last_sample + 1:
                last_sample = time.monotonic()
                self._lookahead.sample()
                self._plain.sample()
        timing.generator_cpu += cpu_seconds_of_this_process() - cpu
        timing.server_cpu += watch.cpu_seconds() - server_cpu
        timing.wall += time.monotonic() - start
        if hostile is not None:
            hostile.cancel()
            await asyncio.gather(hostile, return_exceptions=True)

    async def _hostile(
        self, load: str, watch: Watch, timing: Timing, actions: HostileActions, rng: random.Random
    ) -> None:
        """Start hostile clients as a Poisson process of the plan's rate, until cancelled."""
        running: set[asyncio.Task[None]] = set()
        due = time.monotonic()
        try:
            while True:
                due += rng.expovariate(self._plan.rate)
                await asyncio.sleep(max(0.0, due - time.monotonic()))
                kind, action = actions.draw(rng, renamed=load != LOADS[0])
                if len(running) >= MAX_HOSTILE_CLIENTS:
                    timing.held_back += 1
                    continue
                timing.hostile_requests += 1
                self._report.sent[kind] += 1
                if kind == "a new namespace" and load == LOADS[0]:
                    self._report.namespaces += 1
                task = asyncio.create_task(self._one_hostile(load, watch, action, rng))
                running.add(task)
                task.add_done_callback(running.discard)
        finally:
            for task in running:
                task.cancel()
            await asyncio.gather(*running, return_exceptions=True)

    async def _one_hostile(
        self, load: str, watch: Watch, action: Action, rng: random.Random
    ) -> None:
        if not isinstance(action, Request):
            act, body = action
            await clients.perform(watch.port, act, body, rng)
            return
        reply = await clients.ask(watch.port, action.path, action.body)
        if load == LOADS[0]:
            self._report.statuses[reply.status] += 1
        for fault in faults_of(action, reply):
            if fault.kind not in ("no answer", "5xx", "error in a stream"):
                continue  # the contents of replies are judged outside the phases
            plain_too = load == LOADS[2]
            if not plain_too:
                renamed = action.without_lookahead()
                reply_of_plain = await clients.ask(self._plain.port, renamed.path, renamed.body)
                plain_too = fault.kind in {f.kind for f in faults_of(renamed, reply_of_plain)}
            self._report.fault(action, fault, plain_too)

    def _judge_figures(self) -> None:
        report = self._report
        _, growth = report.memory["lookahead"]["all processes"]
        minutes = report.minutes_watched
        if growth > MAX_MEMORY_GROWTH and minutes >= MIN_MEMORY_MINUTES:
            report.violation(f"memory grew by {growth:.1%} in {minutes:.0f} minutes")
        lookahead, renamed = (report.timings[load] for load in LOADS[:2])
        for share, name in ((0.5, "p50"), (0.99, "p99")):
            ratio = lookahead.quantile(share) / renamed.quantile(share)
            if ratio > 1 + MAX_TIME_GROWTH:
                report.violation(
                    f"{name} of a good client's time per token grows by {ratio - 1:.0%} when "
                    "hostile clients use lookahead's fields"
                )
