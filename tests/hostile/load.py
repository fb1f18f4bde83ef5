"""Hostile clients at random times, while a good client asks and memory is watched."""

import asyncio
import random
import time
from functools import partial
from typing import TypeAlias

from tests.hostile import bad_requests, clients
from tests.hostile.bad_requests import Request
from tests.hostile.clients import CUTS
from tests.hostile.good_client import GoodClient
from tests.hostile.report import Report, faults_of
from tests.hostile.watch import Watch

MAX_HOSTILE_CLIENTS = 64
"""Hostile clients at once; further ones are held back."""
LEAST_ACTIONS = 200
"""A run has at least so many, however short it is."""

log = partial(print, flush=True)

Action: TypeAlias = Request | tuple[clients.Act, bytes]


class HostileActions:
    """What hostile clients do, made in advance."""

    def __init__(self, rng: random.Random) -> None:
        self._requests: dict[str, list[Request]] = {
            "bad requests": [r for r in bad_requests.every_value() if len(r.body) < 300_000],
            "largest references": [bad_requests.at_the_limit(rng) for _ in range(12)],
        }
        self._streams = [clients.long_stream(rng) for _ in range(50)]
        self._streams += [clients.long_chat(rng) for _ in range(50)]
        self._wide = [clients.long_stream(rng, n=4, logprobs=5, max_tokens=200) for _ in range(5)]
        self._wide += [clients.long_chat(rng) for _ in range(5)]

    def draw(self, rng: random.Random) -> tuple[str, Action]:
        """A kind and an action."""
        (kind,) = rng.choices(
            ["bad requests", "a new namespace", "largest references", "cut", "aborted", "slow"],
            [35, 20, 10, 17, 15, 3],
        )
        if kind == "a new namespace":
            return kind, bad_requests.in_a_new_namespace(rng)
        if kind in self._requests:
            return kind, rng.choice(self._requests[kind])
        message = rng.choice(self._wide if kind == "slow" else self._streams)
        if kind == "cut":
            name = rng.choice(sorted(CUTS))
            return name, (CUTS[name], message)
        if kind == "slow":
            return "read slowly", (clients.read_slowly, message)
        return "aborted streams", (clients.cut_in_the_stream, message)


class Load:
    """Hostile clients of the server with lookahead, `rate` of them a second."""

    def __init__(
        self, report: Report, good_client: GoodClient, lookahead: Watch, plain: Watch, rate: float
    ) -> None:
        self._report = report
        self._good_client = good_client
        self._lookahead = lookahead
        self._plain = plain
        self._rate = rate
        self._num_actions = 0

    async def run(self, actions: HostileActions, end: float) -> None:
        """Until `end`, of the monotonic clock, send good requests one after another."""
        rng = random.Random(f"{self._report.seed}-good")
        hostile_rng = random.Random(f"{self._report.seed}-hostile")
        hostile = asyncio.create_task(self._hostile(actions, hostile_rng))
        start = last_line = time.monotonic()
        while time.monotonic() < end or self._num_actions < LEAST_ACTIONS:
            await self._good_client.ask_new(rng)
            self._lookahead.sample()
            if time.monotonic() > last_line + 60:
                last_line = time.monotonic()
                log(f"{self._report.summary()}; {max(0.0, end - last_line) / 60:.0f} min left")
        hostile.cancel()
        await asyncio.gather(hostile, return_exceptions=True)
        self._report.minutes_watched = (time.monotonic() - start) / 60
        self._report.memory_growth = self._lookahead.growth()

    async def _hostile(self, actions: HostileActions, rng: random.Random) -> None:
        """Start hostile clients as a Poisson process, until cancelled."""
        running: set[asyncio.Task[None]] = set()
        due = time.monotonic()
        try:
            while True:
                due += rng.expovariate(self._rate)
                await asyncio.sleep(max(0.0, due - time.monotonic()))
                kind, action = actions.draw(rng)
                if len(running) >= MAX_HOSTILE_CLIENTS:
                    continue
                self._num_actions += 1
                self._report.sent[kind] += 1
                self._report.namespaces += kind == "a new namespace"
                task = asyncio.create_task(self._one_hostile(action, rng))
                running.add(task)
                task.add_done_callback(running.discard)
        finally:
            for task in running:
                task.cancel()
            await asyncio.gather(*running, return_exceptions=True)

    async def _one_hostile(self, action: Action, rng: random.Random) -> None:
        if not isinstance(action, Request):
            act, message = action
            await clients.perform(self._lookahead.port, act, message, rng)
            return
        reply = await clients.ask(self._lookahead.port, action.path, action.body)
        for fault in faults_of(action, reply):
            if fault.kind not in ("no answer", "5xx", "error in a stream"):
                continue  # the contents of replies are judged one by one
            renamed = action.without_lookahead()
            reply_of_plain = await clients.ask(self._plain.port, renamed.path, renamed.body)
            plain_too = fault.kind in {f.kind for f in faults_of(renamed, reply_of_plain)}
            self._report.fault(action, fault, plain_too)
