"""Judges replies, and collects the figures and violations of a run."""

import json
from collections import Counter, defaultdict
from dataclasses import dataclass, field

from tests.hostile.bad_requests import Request
from tests.hostile.clients import Reply

MAX_REFUSAL_BYTES = 2048
MAX_REFUSAL_SECONDS = 5.0
MAX_MEMORY_GROWTH = 0.02
MIN_MEMORY_MINUTES = 10.0
"""In shorter runs, memory growth is no violation."""


@dataclass(frozen=True)
class Fault:
    """A fault of a reply."""

    kind: str
    """Compared with the kinds of plain vLLM's faults."""
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
class Report:
    """The figures of a run."""

    seed: int
    violations: list[str] = field(default_factory=list)
    """Broken promises, with the requests that show them."""
    plain_too: dict[str, list[str]] = field(default_factory=lambda: defaultdict(list))
    """Faults that plain vLLM has as well, by kind."""
    sent: Counter[str] = field(default_factory=Counter)
    """Hostile requests by kind."""
    namespaces: int = 0
    good_answers: int = 0
    ties: int = 0
    slowest_refusal: float = 0.0
    memory_growth: float = 0.0
    """Relative, of the resident memory of the server with lookahead."""
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

    def judge_memory(self) -> None:
        """Growing memory is a violation."""
        growth, minutes = self.memory_growth, self.minutes_watched
        if growth > MAX_MEMORY_GROWTH and minutes >= MIN_MEMORY_MINUTES:
            self.violation(f"memory grew by {growth:.1%} in {minutes:.0f} minutes")

    def summary(self) -> str:
        """The closing line of a run."""
        return (
            f"{len(self.violations)} violations, {sum(self.sent.values())} hostile requests, "
            f"{self.namespaces} namespaces, {self.good_answers} good answers "
            f"({self.ties} ties), slowest refusal {self.slowest_refusal:.2f} s, "
            f"memory {self.memory_growth:+.1%} in {self.minutes_watched:.0f} min"
        )

    def table(self) -> str:
        lines = ["", "hostile requests by kind:"]
        lines += [f"  {count:8,}  {kind}" for kind, count in sorted(self.sent.items())]
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
