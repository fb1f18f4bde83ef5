"""A good client: lookahead's answers to it must equal plain vLLM's."""

import asyncio
import random
from typing import Any, TypeAlias

from tests.hostile import clients
from tests.hostile.report import Report
from tests.hostile.watch import Watch

Good: TypeAlias = dict[str, Any]
Answer: TypeAlias = list[Any]
"""Token ids, or the text of each field of a chat's answer."""

NUM_KNOWN = 24
BATCH_SIZES = (1, 2, 4, 8, 16)
"""If an answer differs, plain vLLM is asked again in batches of these sizes."""


def _drawn(rng: random.Random, max_tokens: int) -> Good:
    draw = rng.choice([clients.good_request, clients.good_chat])
    return draw(rng, max_tokens)


class GoodClient:
    """Sends good requests to both servers, and compares their answers."""

    def __init__(self, report: Report, lookahead: Watch, plain: Watch) -> None:
        self._report = report
        self._lookahead = lookahead
        self._plain = plain
        self._known: list[tuple[Good, Answer]] = []
        """Requests with plain vLLM's answers."""
        self._next_known = 0

    async def ask_plain(self, rng: random.Random) -> None:
        """Draw the known requests, and get plain vLLM's answers."""
        for _ in range(NUM_KNOWN):
            request = _drawn(rng, max_tokens=48)
            self._known.append((request, await clients.stream(self._plain.port, request)))

    async def ask_all_known(self) -> None:
        """At once."""
        await asyncio.gather(*(self.ask_known() for _ in self._known))

    async def ask_known(self) -> None:
        """Send lookahead the next known request; it may hold the answer from an earlier turn."""
        request, expected = self._known[self._next_known]
        self._next_known = (self._next_known + 1) % len(self._known)
        if (answer := await self._answer(self._lookahead, request)) is not None:
            await self._compare(request, answer, expected)

    async def ask_new(self, rng: random.Random) -> None:
        """Send both servers a request that neither knows."""
        request = _drawn(rng, max_tokens=128)
        answers = [await self._answer(watch, request) for watch in (self._lookahead, self._plain)]
        if None not in answers:
            await self._compare(request, *answers)

    async def _answer(self, watch: Watch, request: Good) -> Answer | None:
        try:
            answer = await clients.stream(watch.port, request)
        except (TimeoutError, RuntimeError, OSError) as error:
            description = f"a good request failed: {error!r}"
            if watch is self._lookahead:
                self._report.violation(f"{description} (--seed {self._report.seed}): {request}")
            else:
                self._report.plain_too["a good request failed"].append(description)
            return None
        self._report.good_answers += watch is self._lookahead
        return answer

    async def _compare(self, request: Good, answer: Answer, expected: Answer) -> None:
        """Compare lookahead's answer with plain vLLM's."""
        if answer == expected:
            return
        if await self._is_tie(request, answer):
            self._report.ties += 1
            return
        self._report.violation(
            f"a good request was answered with {answer}, by plain vLLM with {expected} "
            f"(--seed {self._report.seed}): {request}"
        )

    async def _is_tie(self, request: Good, answer: Answer) -> bool:
        """Whether plain vLLM also gives this answer, in another batch."""
        others = [known for known, _ in self._known]
        for size in BATCH_SIZES:
            batch = [request, *others[: size - 1]]
            answers = await asyncio.gather(*(clients.stream(self._plain.port, q) for q in batch))
            if answers[0] == answer:
                return True
        return False
