"""Judges replies, and collects the figures and violations of a run."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

from tests.hostile.bad_requests import Request
from tests.hostile.clients import Reply

MAX_REFUSAL_BYTES = 2048
MAX_REFUSAL_SECONDS = 5.0

LOADS = ("lookahead", "lookahead, fields renamed", "plain, fields renamed")
"""Server and hostile requests of the three loads under which a good client is timed."""
QUIET = "lookahead, nobody else"


@dataclass(frozen=True)
class Fault:
    """A fault of a reply.

    Attributes
    ----------
    kind : str
        Compared with the kinds of plain vLLM's faults.
    description : str
        One sentence.
    """

    kind: str
    description: str


def faults_of(request: Request, reply: Reply) -> list[Fault]:
    """The faults of the reply to a request."""
    status, body = reply.status, reply.body
    start = body[:160].decode("utf-8", "replace")
    faults = []
    if status == 0:
        return [Fault("no answer", "the connection was closed without an answer")]
    if status >= 500:
        faults.append(Fault("5xx", f"status {status}: {start}"))
    elif not 200 <= status < 500:
        faults.append(Fault("status", f"status {status}"))
    if status == 200 and b'"error": {' in body and b"data: " in body:
        faults.append(Fault("error in a stream", f"a stream of status 200 failed: {start}"))
    refused = 400 <= status < 500
    if request.expected == "refused" and status == 200:
        faults.append(Fault("accepted", f"it was answered: {start}"))
    if request.expected == "answered" and refused:
        faults.append(Fault("refused", f"it was refused: {start}"))
    if refused:
        faults += _faults_of_refusal(body, start)
    if reply.seconds > MAX_REFUSAL_SECONDS:
        faults.append(Fault("slow", f"it took {reply.seconds:.1f} s"))
    return faults


def _faults_of_refusal(body: bytes, start: str) -> list[Fault]:
    faults = []
    if len(body) >= MAX_REFUSAL_BYTES:
        faults.append(Fault("long", f"the refusal has {len(body)} bytes: {start}"))
    try:
        content = json.loads(body)
        # FastAPI itself refuses a body that is not JSON, with the field "detail".
        message = content.get("detail") or content["error"]["message"]
    except (ValueError, KeyError, TypeError, AttributeError):
        return [*faults, Fault("form", f"the refusal has no message: {start}")]
    if not message.strip():
        faults.append(Fault("form", f"the refusal's message is empty: {start}"))
    if 'File "' in message or message.count("\n") > 0:
        faults.append(Fault("lines", f"the refusal is not one sentence: {start}"))
    return faults


@dataclass
class Timing:
    """Times of a good client under one load, and what the load was."""

    seconds_per_token: list[float] = field(default_factory=list)
    hostile_requests: int = 0
    held_back: int = 0
    generator_cpu: float = 0.0
    server_cpu: float = 0.0
    wall: float = 0.0

    def quantile(self, share: float) -> float:
        return quantile(self.seconds_per_token, share)

    def half_ratio(self, share: float) -> float:
        """Quantiles of the two halves of the run under this load, the larger by the smaller."""
        values = self.seconds_per_token
        halves = [quantile(values[: len(values) // 2], share)]
        halves += [quantile(values[len(values) // 2 :], share)]
        return max(halves) / min(halves)


def quantile(values: Sequence[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else float("nan")


def _no_timings() -> dict[str, Timing]:
    return {load: Timing() for load in (*LOADS, QUIET)}


@dataclass
class Report:
    """The figures of a run.

    Attributes
    ----------
    seed : int
        Seed of the run, which violations quote.
    violations : list of str
        Broken promises, with the requests that show them.
    plain_too : dict of str to list of str
        Faults that plain vLLM has as well, by kind.
    sent : Counter of str
        Hostile requests by kind.
    """

    seed: int

    violations: list[str] = field(default_factory=list)
    plain_too: dict[str, list[str]] = field(default_factory=lambda: defaultdict(list))
    sent: Counter[str] = field(default_factory=Counter)
    statuses: Counter[int] = field(default_factory=Counter)
    namespaces: int = 0
    good_answers: int = 0
    ties: int = 0
    slowest_refusal: float = 0.0
    timings: dict[str, Timing] = field(default_factory=_no_timings)
    memory: dict[str, dict[str, tuple[int, float]]] = field(default_factory=dict)
    """By server and process: resident bytes at the end, and their relative growth."""
    minutes_watched: float = 0.0

    def violation(self, description: str) -> None:
        if description not in self.violations:
            print(f"VIOLATION: {description}", flush=True)
        self.violations.append(description)

    def fault(self, request: Request, fault: Fault, plain_too: bool) -> None:
        """A violation, unless plain vLLM has the same fault."""
        name = f"{request.path}, {request.name}"
        if plain_too:
            self.plain_too[fault.kind].append(name)
        else:
            self.violation(f"{name}: {fault.description} (--seed {self.seed})")

    def summary(self) -> str:
        """The closing line of a run."""
        line = (
            f"{len(self.violations)} violations, {sum(self.sent.values())} hostile requests, "
            f"{self.namespaces} namespaces, {self.good_answers} good answers "
            f"({self.ties} ties), slowest refusal {self.slowest_refusal:.2f} s"
        )
        for name, processes in self.memory.items():
            _, grown = processes["all processes"]
            line += f", memory of {name} {grown:+.1%} in {self.minutes_watched:.0f} min"
        ours, renamed, plain = (self.timings[load] for load in LOADS)
        if ours.seconds_per_token and renamed.seconds_per_token and plain.seconds_per_token:
            for share, name in ((0.5, "p50"), (0.99, "p99")):
                line += (
                    f", {name} of the time per token {ours.quantile(share) * 1e3:.2f} ms"
                    f" ({ours.quantile(share) / renamed.quantile(share):.2f} x without the fields,"
                    f" {ours.quantile(share) / plain.quantile(share):.2f} x plain)"
                )
        return line

    def table(self) -> str:
        lines = ["", "hostile requests by kind:"]
        lines += [f"  {count:8,}  {kind}" for kind, count in sorted(self.sent.items())]
        lines += ["answers to bad requests by status:"]
        lines += [f"  {count:8,}  {status}" for status, count in sorted(self.statuses.items())]
        if any(timing.seconds_per_token for timing in self.timings.values()):
            lines += [
                "one good client's time per token, in ms:",
                f"  {'load':28} {'answers':>8} {'p50':>7} {'p90':>7} {'p99':>7}"
                f" {'hostile/s':>10} {'held back':>10} {'generator CPU':>14} {'server CPU':>11}"
                f" {'p50 x':>6} {'p99 x':>6}",
            ]
            for load, timing in self.timings.items():
                if timing.seconds_per_token:
                    lines.append(_row(load, timing))
            lines.append("the last two columns: p50 and p99, one half of the run against the other")
        for name, processes in self.memory.items():
            lines.append(f"memory of {name} over {self.minutes_watched:.1f} min:")
            lines += [
                f"  {size / 2**20:8,.0f} MB {grown:+7.2%}  {process}"
                for process, (size, grown) in processes.items()
            ]
        if self.plain_too:
            lines.append("plain vLLM too (noted, not counted):")
            lines += [
                f"  {len(cases):8,}  {kind}; for instance {cases[0]}"
                for kind, cases in self.plain_too.items()
            ]
        if self.violations:
            lines.append("violations:")
            lines += [f"  {description}" for description in dict.fromkeys(self.violations)]
        return "\n".join(lines)


def _row(load: str, timing: Timing) -> str:
    p50, p90, p99 = (timing.quantile(share) * 1e3 for share in (0.5, 0.9, 0.99))
    wall = timing.wall or 1.0
    return (
        f"  {load:28} {len(timing.seconds_per_token):8,} {p50:7.2f} {p90:7.2f} {p99:7.2f}"
        f" {timing.hostile_requests / wall:10.1f} {timing.held_back:10,}"
        f" {timing.generator_cpu / wall:14.0%} {timing.server_cpu / wall:11.0%}"
        f" {timing.half_ratio(0.5):6.2f} {timing.half_ratio(0.99):6.2f}"
    )
