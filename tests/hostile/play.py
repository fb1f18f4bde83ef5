"""A run: hostile clients against a server with lookahead, and against a plain one beside it.

First bad requests come one by one, so that what was wrong is known by its request. Then as many
namespaces as fit. Then phases in turn, in which a good client is timed while hostile ones
send what they would send anyway:

1. to the server with lookahead;
2. to the same server, but with lookahead's fields under names that mean nothing to it;
3. the same to plain vLLM.

Requests, their bytes and their times are the same in all three, and the clients sleep most of the
time. What the fields cost a good client is the ratio of the first two.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import time
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

from tests.hostile import bad_requests, clients
from tests.hostile.bad_requests import Limits, Request
from tests.hostile.clients import CUTS, Answer
from tests.hostile.report import LOADS, QUIET, Fault, Report, Timing, faults_of
from tests.hostile.watch import Watch, cpu_seconds_of_this_process
from tests.support.models import save_tiny_model
from tests.support.servers import running
from tests.support.tokenizer import save_tokenizer

FLAGS = (
    *("--dtype", "float32", "--enforce-eager", "--kv-cache-memory-bytes", str(256 << 20)),
    *("--served-model-name", bad_requests.MODEL, "--enable-scale-out"),
)
ENVIRONMENT = {"ONEDNN_PRIMITIVE_CACHE_CAPACITY": "64"}
"""oneDNN keeps a compiled product for each number of rows, 1024 by default: some 60 MB that grow
slowly in plain vLLM, and faster where drafts make more numbers of rows. Memory is watched without.
"""
LOOKAHEAD = {"method": "lookahead", "cache_interval": 20}

AT_ONCE = 64
"""Hostile clients that are under way together; more are held back."""
BATCHES = (1, 2, 4, 8, 16)
"""In how much company plain vLLM is asked again where an answer differs."""

MEMORY_MAY_GROW = 0.02
TIME_MAY_GROW = 0.10
LEAST_WATCHED = 10.0  # minutes, for a verdict on memory

say = partial(print, flush=True)


@dataclass(frozen=True)
class Plan:
    """How long and how much.

    Attributes
    ----------
    minutes : float
        Of the whole run, without the start of the servers.
    seed : int
        Of all that is drawn.
    rate : float
        Hostile clients a second in the phases.
    drawn : int
        Bad requests that are drawn besides those of the table.
    timed : bool
        Whether times decide.
    """

    minutes: float
    seed: int
    rate: float = 20.0
    drawn: int = 1000
    timed: bool = True
    phase: float = 20.0

    @classmethod
    def quick(cls, seed: int) -> Plan:
        """Two minutes in which no time decides."""
        return cls(minutes=2, seed=seed, drawn=150, timed=False, phase=8)


def play(plan: Plan, folder: Path) -> Report:
    """Start both servers, do everything to them, and end them."""
    model = save_tokenizer(save_tiny_model("llama", folder))
    report = Report()
    logs = {name: folder / f"{name}.log" for name in ("plain", "lookahead")}
    cache = folder / "pipe"
    cache.unlink(missing_ok=True)
    os.mkfifo(cache)
    speculative = json.dumps({**LOOKAHEAD, "cache_path": str(cache)})
    flags = {"plain": (), "lookahead": ("--speculative-config", speculative)}
    with ExitStack() as servers:
        watches = {}
        for name, more in flags.items():
            server = servers.enter_context(running(model, logs[name], *FLAGS, *more, **ENVIRONMENT))
            watches[name] = Watch(server, logs[name])
            say(f"the {name} server is up")
        refused = logs["lookahead"].read_text(errors="replace").count("starts cold: the cache")
        if refused != 1:
            report.violation(f"a pipe in the place of the cache was warned of {refused} times")
        asyncio.run(Run(plan, report, watches["lookahead"], watches["plain"]).everything())
        theirs = watches["plain"].end()
        for kind, what in watches["lookahead"].end().items():
            if kind in theirs:
                report.plain_too[f"at the end, {kind}"].append(theirs[kind])
            else:
                report.violation(what)
    if not cache.is_file():
        report.violation("what was learned was not saved at the end")
    return report


Good: TypeAlias = dict[str, Any]
Action: TypeAlias = Request | tuple[clients.Act, bytes]


class Run:
    """Everything that is sent while both servers are up."""

    def __init__(self, plan: Plan, report: Report, ours: Watch, plain: Watch) -> None:
        self._plan = plan
        self._report = report
        self._ours = ours
        self._plain = plain
        self._limits = Limits.of_this_release()
        self._rng = random.Random(plan.seed)
        self._known: list[tuple[Good, Answer]] = []
        self._pending: list[tuple[Good, Answer]] = []
        self._turn = 0
        self._repeat = f"--seed {plan.seed}"

    async def everything(self) -> None:
        start = time.monotonic()
        end = start + 60 * self._plan.minutes
        for _ in range(24):
            request = clients.good_request(self._rng, max_tokens=48)
            self._known.append((request, await clients.stream(self._plain.port, request)))
        for _ in self._known:
            await self._ask_a_good_one()
        await self._one_by_one(end)
        await self._too_much_at_once()
        await self._many_namespaces(seconds=(end - time.monotonic()) / 10)
        await self._phases(end)
        await self._after_all()

    # ---- good clients ----------------------------------------------------------------------------

    async def _ask_a_good_one(self) -> None:
        """Ask one that plain vLLM has answered, and lookahead may have heard before."""
        which = self._turn % len(self._known)
        self._turn += 1
        request, said = self._known[which]
        if (answer := await self._answer(self._ours, request)) is not None:
            await self._compare(request, answer, said)

    async def _answer(self, watch: Watch, request: Good) -> Answer | None:
        try:
            answer = await clients.stream(watch.port, request)
        except (RuntimeError, OSError, asyncio.TimeoutError) as error:
            what = f"a good request failed: {error!r}"
            if watch is self._ours:
                self._report.violation(f"{what} ({self._repeat}): {request}")
            else:
                self._report.plain_too["a good request failed"].append(what)
            return None
        self._report.good_answers += watch is self._ours
        return answer

    async def _compare(self, request: Good, answer: Answer, said: Answer) -> None:
        """Lookahead's answer with plain vLLM's."""
        if answer.tokens == said.tokens:
            return
        if await self._is_tie(request, answer):
            self._report.ties += 1
            return
        self._report.violation(
            f"a good request was answered with {answer.tokens}, by plain vLLM with {said.tokens} "
            f"({self._repeat}): {request}"
        )

    async def _is_tie(self, request: Good, answer: Answer) -> bool:
        """Whether plain vLLM answers like this, too, in other company."""
        others = [known for known, _ in self._known]
        for batch in BATCHES:
            asked = [request, *others[: batch - 1]]
            answers = await asyncio.gather(*(clients.stream(self._plain.port, q) for q in asked))
            if answers[0].tokens == answer.tokens:
                return True
        return False

    async def _compare_pending(self) -> None:
        """What plain vLLM was not asked in its phase."""
        while self._pending:
            request, answer = self._pending.pop(0)
            if (said := await self._answer(self._plain, request)) is not None:
                await self._compare(request, answer, said)

    # ---- bad requests ----------------------------------------------------------------------------

    async def _one_by_one(self, end: float) -> None:
        table = [
            *bad_requests.every_value(),
            *bad_requests.around_limits(self._limits),
            *bad_requests.of_vllm(),
        ]
        drawn = [bad_requests.drawn(self._rng) for _ in range(self._plan.drawn)]
        stop = time.monotonic() + (end - time.monotonic()) / 3
        for number, request in enumerate([*table, *drawn]):
            if number >= len(table) and time.monotonic() > stop:
                break
            await self._judge(request)
            if number % 25 == 0:
                await self._ask_a_good_one()
        say(f"bad requests one by one: {self._report.summary()}")

    async def _judge(self, request: Request) -> None:
        reply = await clients.ask(self._ours.port, request.path, request.body)
        self._report.sent["bad requests, one by one"] += 1
        self._report.statuses[reply.status] += 1
        if 400 <= reply.status < 500:
            self._report.slowest_refusal = max(self._report.slowest_refusal, reply.seconds)
        faults = [f for f in faults_of(request, reply) if self._plan.timed or f.kind != "slow"]
        if not faults:
            return
        same = request.without_lookahead()
        theirs = faults_of(same, await clients.ask(self._plain.port, same.path, same.body))
        kinds = {fault.kind for fault in theirs}
        if not request.of_vllm:
            kinds.discard("accepted")  # plain vLLM ignores what it does not know
        for fault in faults:
            self._note(request, fault, fault.kind in kinds)

    def _note(self, request: Request, fault: Fault, plain_too: bool) -> None:
        if plain_too:
            self._report.plain_too[fault.kind].append(f"{request.path}, {request.name}")
        else:
            self._report.violation(f"{request.path}, {request.name}: {fault.what} ({self._repeat})")

    async def _too_much_at_once(self) -> None:
        """More references than all requests together may bring: newcomers are refused."""
        if self._limits.live is None:
            return
        room = self._limits.live // self._limits.tokens
        statuses = await self._largest_references(2 * room)
        self._report.sent["largest references at once"] += len(statuses)
        if not set(statuses) <= {200, 400}:
            self._report.violation(f"{2 * room} largest references at once: {statuses}")
        if 400 not in statuses:
            self._report.violation(
                f"{2 * room} references of {self._limits.tokens} tokens were all accepted at once, "
                f"and {self._limits.live} are allowed"
            )
        await self._everything_was_released("after many large references")

    async def _largest_references(self, count: int) -> list[int]:
        """The statuses of so many requests with the largest reference, under way together."""
        ids = json.dumps([7] * self._limits.tokens)
        body = bad_requests.completion(
            f'{{"lookahead_reference": {ids}}}', max_tokens=256, ignore_eos=True
        )
        replies = await asyncio.gather(
            *(clients.ask(self._ours.port, "/v1/completions", body) for _ in range(count))
        )
        return [reply.status for reply in replies]

    async def _everything_was_released(self, when: str) -> None:
        """Nothing is under way: all that is allowed for live references must be free again."""
        for watch in (self._ours, self._plain):
            at_rest = await asyncio.to_thread(watch.has_come_to_rest)
            if not at_rest and watch is self._ours:
                self._report.violation(f"requests of clients that left still run {when}")
            elif not at_rest:
                self._report.plain_too["requests of clients that left still run"].append(when)
        if self._limits.live is None:
            return
        statuses: list[int] = []
        for _ in range(20):  # an answer may still be on its way out
            statuses = await self._largest_references(self._limits.live // self._limits.tokens)
            if set(statuses) == {200}:
                return
            await asyncio.sleep(1)
        self._report.violation(
            f"{when} the limit of live references does not become free again: {statuses}"
        )

    async def _many_namespaces(self, seconds: float, at_once: int = 8) -> None:
        stop = time.monotonic() + seconds
        rng = random.Random(self._plan.seed)

        async def one_client() -> None:
            while time.monotonic() < stop:
                request = bad_requests.in_a_new_namespace(rng)
                reply = await clients.ask(self._ours.port, request.path, request.body)
                self._report.namespaces += 1
                self._report.sent["namespaces in a row"] += 1
                for fault in faults_of(request, reply):
                    if self._plan.timed or fault.kind != "slow":
                        self._note(request, fault, plain_too=False)

        await asyncio.gather(*(one_client() for _ in range(at_once)))
        await self._ask_a_good_one()
        say(f"{self._report.namespaces} namespaces in {seconds:.0f} s")

    # ---- phases ----------------------------------------------------------------------------------

    async def _phases(self, end: float) -> None:
        prepared = Prepared(self._rng, self._limits)
        # Once through all of it, so that what is allocated once is.
        for load in LOADS:
            await self._phase(load, Timing(), prepared, "warm-up")
        for watch in (self._ours, self._plain):
            watch.samples.clear()
        start = said = time.monotonic()
        cycle = 0
        while time.monotonic() < end or not cycle:
            await self._phase(QUIET, self._report.timings[QUIET], None, cycle)
            ours, renamed, plain = LOADS
            for load in (ours, renamed, plain) if cycle % 2 else (renamed, ours, plain):
                await self._phase(load, self._report.timings[load], prepared, cycle)
            await self._compare_pending()
            cycle += 1
            if time.monotonic() > said + 60:
                said = time.monotonic()
                left = max(0.0, end - said) / 60
                say(f"{self._report.summary()}; {left:.0f} min left")
        minutes = (time.monotonic() - start) / 60
        for name, watch in (("lookahead", self._ours), ("plain", self._plain)):
            self._report.memory[name] = watch.memory()
        self._report.minutes_watched = minutes
        self._judge_figures(minutes)

    async def _phase(
        self, load: str, timing: Timing, prepared: Prepared | None, cycle: int | str
    ) -> None:
        """A good client, one request after another, and hostile ones at their times.

        Plain vLLM is asked what lookahead was asked before; otherwise all requests are new.
        """
        watch = self._plain if load == LOADS[2] else self._ours
        hostile_rng = random.Random(f"{self._plan.seed}-{cycle}")
        rng = random.Random(f"{self._plan.seed}-{cycle}-{load}")
        start = time.monotonic()
        cpu, server_cpu = cpu_seconds_of_this_process(), watch.cpu_seconds()
        hostile = None
        if prepared is not None:
            hostile = asyncio.create_task(self._hostile(load, watch, timing, prepared, hostile_rng))
        sampled = 0.0
        while time.monotonic() < start + self._plan.phase:
            if watch is self._plain and self._pending:
                request, ours = self._pending.pop(0)
            else:
                request, ours = clients.good_request(rng, max_tokens=128), None
            answer = await self._answer(watch, request)
            if answer is not None:
                timing.seconds_per_token.append(answer.seconds_per_token)
                if ours is not None:
                    await self._compare(request, ours, answer)
                elif watch is self._ours:
                    self._pending.append((request, answer))
            if time.monotonic() > sampled + 1:
                sampled = time.monotonic()
                self._ours.sample()
                self._plain.sample()
        timing.generator_cpu += cpu_seconds_of_this_process() - cpu
        timing.server_cpu += watch.cpu_seconds() - server_cpu
        timing.wall += time.monotonic() - start
        if hostile is not None:
            hostile.cancel()
            await asyncio.gather(hostile, return_exceptions=True)

    async def _hostile(
        self, load: str, watch: Watch, timing: Timing, prepared: Prepared, rng: random.Random
    ) -> None:
        under_way: set[asyncio.Task[None]] = set()
        due = time.monotonic()
        try:
            while True:
                due += rng.expovariate(self._plan.rate)
                await asyncio.sleep(max(0.0, due - time.monotonic()))
                kind, action = prepared.draw(rng, renamed=load != LOADS[0])
                if len(under_way) >= AT_ONCE:
                    timing.held_back += 1
                    continue
                timing.hostile_requests += 1
                self._report.sent[kind] += 1
                if kind == "a new namespace" and load == LOADS[0]:
                    self._report.namespaces += 1
                task = asyncio.create_task(self._one_hostile(load, watch, action, rng))
                under_way.add(task)
                task.add_done_callback(under_way.discard)
        finally:
            for task in under_way:
                task.cancel()
            await asyncio.gather(*under_way, return_exceptions=True)

    async def _one_hostile(
        self, load: str, watch: Watch, action: Action, rng: random.Random
    ) -> None:
        if not isinstance(action, Request):
            what, body = action
            await clients.act(watch.port, what, body, rng)
            return
        reply = await clients.ask(watch.port, action.path, action.body)
        if load == LOADS[0]:
            self._report.statuses[reply.status] += 1
        for fault in faults_of(action, reply):
            if fault.kind not in ("no answer", "5xx", "error in a stream"):
                continue  # what is in the answers is judged one by one
            plain_too = load == LOADS[2]
            if not plain_too:
                again = action.without_lookahead()
                theirs = await clients.ask(self._plain.port, again.path, again.body)
                plain_too = fault.kind in {f.kind for f in faults_of(again, theirs)}
            self._note(action, fault, plain_too)

    def _judge_figures(self, minutes: float) -> None:
        report = self._report
        if not self._plan.timed:
            return
        _, grown = report.memory["lookahead"]["all processes"]
        if grown > MEMORY_MAY_GROW and minutes >= LEAST_WATCHED:
            report.violation(f"memory grew by {grown:.1%} in {minutes:.0f} minutes")
        ours, renamed = (report.timings[load] for load in LOADS[:2])
        for share, name in ((0.5, "p50"), (0.99, "p99")):
            ratio = ours.quantile(share) / renamed.quantile(share)
            if ratio > 1 + TIME_MAY_GROW:
                report.violation(
                    f"{name} of a good client's time per token grows by {ratio - 1:.0%} where "
                    "hostile clients use lookahead's fields"
                )

    async def _after_all(self) -> None:
        await self._everything_was_released("after all clients left")
        for _ in self._known:
            await self._ask_a_good_one()
        errors = self._ours.errors_of_the_engine()
        if errors:
            plain = self._plain.errors_of_the_engine()
            self._report.violation(
                f"the engine's log has {len(errors)} lines of errors, plain vLLM's {len(plain)}; "
                f"the first is {errors[0]}"
            )


class Prepared:
    """What hostile clients send in the phases, made beforehand: the phases are for waiting."""

    def __init__(self, rng: random.Random, limits: Limits) -> None:
        requests: dict[str, list[Request]] = {
            "bad requests": [r for r in bad_requests.every_value() if len(r.body) < 300_000],
            "largest references": [bad_requests.at_the_limit(rng, limits) for _ in range(12)],
        }
        self._requests: dict[bool, dict[str, list[Request]]] = {
            False: requests,
            True: {
                kind: [r.without_lookahead(refused=r.expected == "refused") for r in some]
                for kind, some in requests.items()
            },
        }
        self._streams = [clients.long_stream(rng) for _ in range(50)]
        self._wide = [clients.long_stream(rng, n=4, logprobs=5, max_tokens=200) for _ in range(5)]

    def draw(self, rng: random.Random, renamed: bool) -> tuple[str, Action]:
        """The same actions for the same `rng`, whether renamed or not."""
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
