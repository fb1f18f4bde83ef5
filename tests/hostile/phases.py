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
from tests.hostile.bad_requests import Request
from tests.hostile.clients import CUTS
from tests.hostile.good_client import GoodClient
from tests.hostile.report import LOADS, Report, faults_of
from tests.hostile.watch import Watch

MAX_HOSTILE_CLIENTS = 64
"""Hostile clients at once; further ones are held back."""

log = partial(print, flush=True)

Action: TypeAlias = Request | tuple[clients.Act, bytes]


class HostileActions:
    """What hostile clients do, made in advance, because the phases measure times."""

    def __init__(self, rng: random.Random) -> None:
        requests: dict[str, list[Request]] = {
            "bad requests": [r for r in bad_requests.every_value() if len(r.body) < 300_000],
            "largest references": [bad_requests.at_the_limit(rng) for _ in range(12)],
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
    """Times a good client under each load in turn, and watches the memory of both servers.

    Parameters
    ----------
    rate : float
        Hostile clients per second.
    phase_seconds : float
        Duration of a phase.
    """

    def __init__(
        self,
        report: Report,
        good_client: GoodClient,
        lookahead: Watch,
        plain: Watch,
        rate: float,
        phase_seconds: float,
    ) -> None:
        self._report = report
        self._good_client = good_client
        self._lookahead = lookahead
        self._plain = plain
        self._rate = rate
        self._phase_seconds = phase_seconds

    async def warm_up(self, actions: HostileActions) -> None:
        """Let both servers allocate what is allocated once."""
        for load in LOADS:
            await self._phase(load, [], actions, "warm-up")
        for watch in (self._lookahead, self._plain):
            watch.sizes.clear()

    async def run(self, actions: HostileActions, end: float) -> None:
        """Run phases until `end`, of the monotonic clock, at least one of each load."""
        start = last_line = time.monotonic()
        cycle = 0
        while time.monotonic() < end or not cycle:
            lookahead, renamed, plain = LOADS
            order = (lookahead, renamed, plain) if cycle % 2 else (renamed, lookahead, plain)
            for load in order:
                await self._phase(load, self._report.seconds_per_token[load], actions, cycle)
            await self._good_client.compare_pending()
            cycle += 1
            if time.monotonic() > last_line + 60:
                last_line = time.monotonic()
                left = max(0.0, end - last_line) / 60
                log(f"{self._report.summary()}; {left:.0f} min left")
        self._report.minutes_watched = (time.monotonic() - start) / 60
        for name, watch in (("lookahead", self._lookahead), ("plain", self._plain)):
            self._report.memory_growth[name] = watch.growth()

    async def _phase(
        self, load: str, times: list[float], actions: HostileActions, cycle: int | str
    ) -> None:
        """Send good requests one after another, and hostile ones at random times."""
        watch = self._plain if load == LOADS[2] else self._lookahead
        rng = random.Random(f"{self._report.seed}-{cycle}-{load}")
        hostile_rng = random.Random(f"{self._report.seed}-{cycle}")
        hostile = asyncio.create_task(self._hostile(load, watch, actions, hostile_rng))
        start, last_sample = time.monotonic(), 0.0
        while time.monotonic() < start + self._phase_seconds:
            seconds_per_token = await self._good_client.ask_timed(watch, rng)
            if seconds_per_token is not None:
                times.append(seconds_per_token)
            if time.monotonic() > last_sample + 1:
                last_sample = time.monotonic()
                self._lookahead.sample()
                self._plain.sample()
        hostile.cancel()
        await asyncio.gather(hostile, return_exceptions=True)

    async def _hostile(
        self, load: str, watch: Watch, actions: HostileActions, rng: random.Random
    ) -> None:
        """Start hostile clients as a Poisson process, until cancelled."""
        running: set[asyncio.Task[None]] = set()
        due = time.monotonic()
        try:
            while True:
                due += rng.expovariate(self._rate)
                await asyncio.sleep(max(0.0, due - time.monotonic()))
                kind, action = actions.draw(rng, renamed=load != LOADS[0])
                if len(running) >= MAX_HOSTILE_CLIENTS:
                    continue
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
        for fault in faults_of(action, reply):
            if fault.kind not in ("no answer", "5xx", "error in a stream"):
                continue  # the contents of replies are judged outside the phases
            plain_too = load == LOADS[2]
            if not plain_too:
                renamed = action.without_lookahead()
                reply_of_plain = await clients.ask(self._plain.port, renamed.path, renamed.body)
                plain_too = fault.kind in {f.kind for f in faults_of(renamed, reply_of_plain)}
            self._report.fault(action, fault, plain_too)
