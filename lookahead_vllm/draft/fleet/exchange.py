"""The thread that sends a member's answers to a Redis or Valkey server, and reads the others'.

Each namespace has a stream, whose key is made of a fingerprint of the engine and the namespace's
digest, so no name reaches the stream of another. One more stream, the news, says which of them have
got messages, so that a member reads only those. All keys expire, and all streams are trimmed.

No step waits for the server: a slow or missing one costs what is not exchanged, and nothing else.
"""

import logging
import random
import secrets
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from typing import Any

from lookahead_vllm.draft.fleet.member import NOTHING_READ, Member
from lookahead_vllm.draft.fleet.pieces import MessageError, messages_of, unpack
from lookahead_vllm.machine import use_all_cores

logger = logging.getLogger(f"vllm.{__name__}")

INTERVAL_SECONDS = 0.1
"""The time between two exchanges."""

MIN_BACKOFF_SECONDS, MAX_BACKOFF_SECONDS = 0.5, 2.0
"""The time until the next try after a failure, which doubles each time."""

TIMEOUT_SECONDS = 2.0
"""After so long without an answer, the server counts as gone."""

CONNECTION_SECONDS = 3.0
"""A connection lives so long, since an old one stays with a server that became a replica, or that
the address no longer leads to."""

EXPIRE_SECONDS = 7 * 24 * 3600
"""A stream without new messages is deleted after so long."""

READ_SECONDS = 0.1
"""After so long, an exchange reads no further stream, so that publishing and closing go on."""

ENTRIES_AT_A_TIME = 128
"""Of all streams. The client reads them whole, whatever their size, before any is refused."""

LOCKED_BYTES = 1 << 14
"""Before an entry with more bytes, other threads get the interpreter's lock. `sleep(0)` takes some
50 µs; between the others, the wait for the server's next answer is enough."""

MAX_NEWS = 10_000
MAX_NAMES = 4096
"""An entry of the news names at most so many streams; a longer one is refused."""
MIN_TOKENS = 64
"""A message of a tail counts for at least so many tokens."""
NEWS = "news"
BY, TEXTS, STREAMS = b"by", b"texts", b"streams"


@dataclass
class Traffic:
    """What was exchanged since the engine started, in tokens of answers."""

    published: int = 0
    learned: int = 0
    """Tokens of other members that were read, to be inserted."""
    dropped: int = 0
    """Own tokens that could not be sent, and messages that were refused, each as one."""
    lag_seconds: float | None = None
    """The age of the latest message when it was read, by the server's clock; 0 if that was set
    back."""


class Exchange:
    """Runs until `close`.

    Parameters
    ----------
    connect : callable
        Returns a client for the server, `redis.Redis` with `protocol=2`, which connects when it is
        used.
    prefix : str
        Of all keys.
    max_entries : int
        The messages that a stream keeps, about.
    vocab_size : int
        Messages with larger tokens are refused.
    tail_tokens : int
        The most tokens of a stream that are read when it is followed for the first time.
    """

    def __init__(
        self,
        member: Member,
        connect: Callable[[], Any],
        prefix: str,
        max_entries: int,
        vocab_size: int,
        tail_tokens: int,
    ) -> None:
        self.traffic = Traffic()
        self._member, self._client = member, connect()
        self._prefix, self._max_entries = prefix, max_entries
        self._vocab_size, self._tail_tokens = vocab_size, tail_tokens
        self._name = secrets.token_bytes(8)
        self._connect_at = 0.0
        """When the next connection is made, by the monotonic clock."""
        self._news_position: str | None = None
        """None: what was published is not known, so all streams have to be read."""
        self._due: dict[str, None] = {}
        """The streams that have something to read, by digest."""
        self._num_dropped = 0
        """Of the outbox, at the last exchange."""
        self._is_refused = False
        """Whether the server refused what was sent last."""
        self._warned: set[str] = set()
        """Warnings that are logged once."""
        self._backoff = 0.0
        self._complaint = ""
        """What the log says about the server; empty while all is well."""
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="lookahead-fleet", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Send what is left, for two seconds at most; further calls do nothing."""
        self._closing.set()
        self._thread.join(2.0)

    def _run(self) -> None:
        use_all_cores()
        is_last = False
        while not is_last:
            is_last = self._closing.wait(self._backoff * random.uniform(0.5, 1) or INTERVAL_SECONDS)
            try:
                self._member.insert_if_idle()
                self._exchange()
            except Exception as error:  # of the network, the server, or what it sent
                self._connect_at = 0.0
                self._backoff = min(
                    max(2 * self._backoff, MIN_BACKOFF_SECONDS), MAX_BACKOFF_SECONDS
                )
                self._complain(f"{type(error).__name__}: {error}")
            else:
                self._backoff = 0.0
        with suppress(Exception):
            self._client.close()

    def _complain(self, reason: str) -> None:
        """Log once that the server does not work."""
        if not self._complaint:
            logger.warning(
                "Lookahead does not share with other servers for now: %s. Requests go on, and it "
                "is tried again.",
                reason,
            )
        self._complaint = reason

    def _exchange(self) -> None:
        """Send what is new here, then read what is new elsewhere."""
        if time.monotonic() >= self._connect_at:
            self._client.connection_pool.disconnect()
            self._client.ping()  # fails before anything is taken from the outbox
            self._connect_at = time.monotonic() + CONNECTION_SECONDS
        pipe = self._client.pipeline(transaction=False)
        tokens = self._publish(pipe)
        position = self._news_position
        if position is None:
            pipe.xrevrange(self._key(NEWS), count=1)
        else:
            pipe.xrange(self._key(NEWS), position, count=ENTRIES_AT_A_TIME)
        pipe.time()
        news, clock = self._executed(pipe, tokens)
        if position is None:
            self._news_position = news[0][0].decode() if news else NOTHING_READ
            self._due = dict.fromkeys(self._member.followed.copy())
        else:
            self._read(NEWS, position, news, ENTRIES_AT_A_TIME, None)
        self._read_due(clock[0] + clock[1] / 1e6)
        if self._complaint and not self._is_refused:
            logger.info("Lookahead shares with other servers again, after: %s.", self._complaint)
            self._complaint = ""

    def _executed(self, pipe: Any, tokens: int) -> tuple[Any, Any]:
        """The answers to the last two commands, after those of `_publish`, which may fail."""
        try:
            *results, news, clock = pipe.execute(raise_on_error=False)
        except Exception:
            self.traffic.dropped += tokens
            raise
        if results:
            self._count(tokens, added=results[::2], expiring=results[1::2])
        for answer in (news, clock):
            if isinstance(answer, Exception):
                raise answer
        return news, clock

    def _count(self, tokens: int, added: Sequence[Any], expiring: Sequence[Any]) -> None:
        """Count the tokens that were sent, by the results of each XADD and each EXPIRE."""
        refusals = [result for result in added if isinstance(result, Exception)]
        self._is_refused = bool(refusals)
        if refusals:
            self.traffic.dropped += tokens
            self._complain(f"{type(refusals[0]).__name__}: {refusals[0]}")
            return
        self.traffic.published += tokens
        for result in expiring:
            if isinstance(result, Exception):
                self._warn_once("Lookahead shares, but its streams never expire: %s.", result)

    def _key(self, name: str) -> str:
        return f"{self._prefix}:{name}"

    def _publish(self, pipe: Any) -> int:
        """Add commands that send what is new here; returns the number of tokens."""
        tokens, digests = 0, []
        for digest, pieces in self._member.take().items():
            for message in messages_of(pieces):
                self._append(pipe, digest, {BY: self._name, TEXTS: message}, self._max_entries)
            tokens += len(pieces.tokens)
            digests.append(digest)
        for at in range(0, len(digests), MAX_NAMES):
            names = "".join(digests[at : at + MAX_NAMES]).encode()
            self._append(pipe, NEWS, {BY: self._name, STREAMS: names}, MAX_NEWS)
        num_dropped = self._member.outbox.dropped
        self.traffic.dropped += num_dropped - self._num_dropped
        self._num_dropped = num_dropped
        return tokens

    def _append(self, pipe: Any, name: str, fields: dict[bytes, bytes], length: int) -> None:
        pipe.xadd(self._key(name), fields, maxlen=length, approximate=True)
        pipe.expire(self._key(name), EXPIRE_SECONDS)

    def _read_due(self, now: float) -> None:
        """Read the streams that are due, as far as there is room and time."""
        followed, new = self._member.followed, self._member.new
        end = time.monotonic() + READ_SECONDS
        while new and self._member.has_room and time.monotonic() < end:
            self._read_tail(new[0])
            self._due.pop(new.popleft(), None)
        while self._due and self._member.has_room and time.monotonic() < end:
            known = (name for name in self._due if name in followed or name == NEWS)
            names = list(islice(known, ENTRIES_AT_A_TIME // 2))
            if not names:
                self._due.clear()
                return
            count = ENTRIES_AT_A_TIME // len(names)
            positions = [self._position(name) for name in names]
            pipe = self._client.pipeline(transaction=False)
            for name, position in zip(names, positions, strict=True):
                pipe.xrange(self._key(name), position, count=count)
            answers = pipe.execute(raise_on_error=False)
            for name, position, answer in zip(names, positions, answers, strict=True):
                self._read(name, position, answer, count, now)

    def _position(self, name: str) -> str:
        """The id of the last entry that was read of a stream."""
        known = self._news_position if name == NEWS else self._member.followed.get(name)
        return known or NOTHING_READ

    def _read(self, name: str, position: str, answer: Any, count: int, now: float | None) -> None:
        """Read the answer to XRANGE, with at most `count` entries, of a stream."""
        self._due.pop(name, None)
        if isinstance(answer, Exception):
            self._refuse(answer)
            return
        entries = _after(position, answer)
        if entries is None and name == NEWS:
            self._news_position = None
        elif entries is None:
            self._member.new.append(name)
        else:
            if name == NEWS:
                self._read_news(entries)
            else:
                self._take_in(name, entries, now)
            if len(answer) == count:
                self._due[name] = None  # there may be more

    def _read_news(self, entries: Sequence[Any]) -> None:
        """Note which streams have got messages."""
        followed = self._member.followed
        for entry_id, fields in entries:
            # Own messages are read, too: only then is it known that others' before them were.
            self._news_position = entry_id.decode()
            names = fields.get(STREAMS, b"")
            if len(names) > 32 * MAX_NAMES:
                self._refuse(MessageError(f"it has {len(names)} bytes of names"))
                continue
            _let_steps_begin(len(names))
            names = names.decode("ascii", "replace")
            for at in range(0, len(names), 32):
                if names[at : at + 32] in followed:
                    self._due[names[at : at + 32]] = None

    def _read_tail(self, digest: str) -> None:
        """Read the latest messages of a stream, whatever was read of it before."""
        parts: list[Any] = []
        left, end = self._tail_tokens, "+"
        while left > 0 and len(parts) < self._max_entries and digest in self._member.followed:
            pipe = self._client.pipeline(transaction=False)
            pipe.xrevrange(self._key(digest), end, count=ENTRIES_AT_A_TIME)
            (part,) = pipe.execute(raise_on_error=False)
            if isinstance(part, Exception):
                self._refuse(part)
                return
            left -= sum(max(MIN_TOKENS, _num_bytes(fields) // 8) for _, fields in part)
            parts.extend(part)
            if len(part) < ENTRIES_AT_A_TIME:
                break
            end = "(" + part[-1][0].decode()
        if digest in self._member.followed:
            self._member.followed[digest] = NOTHING_READ
        self._take_in(digest, reversed(parts), None)

    def _take_in(self, digest: str, entries: Iterable[Any], now: float | None) -> None:
        """Hand on the messages of others; `now` is the server's time in seconds."""
        for entry_id, fields in entries:
            if digest not in self._member.followed:  # too many namespaces
                return
            self._member.followed[digest] = entry_id.decode()
            if fields.get(BY) == self._name:
                continue
            texts = fields.get(TEXTS, b"")
            _let_steps_begin(len(texts))
            try:
                pieces = unpack(texts, self._vocab_size)
            except MessageError as error:
                self._refuse(error)
                continue
            self._member.put(digest, pieces)
            self.traffic.learned += len(pieces.tokens)
            if now is not None:
                age = now - int(entry_id.split(b"-")[0]) / 1000
                self.traffic.lag_seconds = max(0.0, age)

    def _refuse(self, reason: Exception) -> None:
        """Count what is no message, or no stream; the first one is logged."""
        self.traffic.dropped += 1
        self._warn_once("Lookahead refuses a message of another server: %s.", reason)

    def _warn_once(self, message: str, reason: Exception) -> None:
        if message not in self._warned:
            self._warned.add(message)
            logger.warning(message, reason)


def _let_steps_begin(num_bytes: int) -> None:
    if num_bytes > LOCKED_BYTES:
        time.sleep(0)


def _num_bytes(fields: dict[bytes, bytes]) -> int:
    return sum(len(name) + len(value) for name, value in fields.items())


def _after(position: str, entries: Sequence[Any]) -> Sequence[Any] | None:
    """Those of the entries from `position` on that were not read yet.

    None if the message at `position` is gone: the stream was trimmed, emptied or restored, or is
    that of another server, so that ids say nothing about what was read.
    """
    if position == NOTHING_READ:
        return entries
    is_there = bool(entries) and entries[0][0].decode() == position
    return entries[1:] if is_there else None
