"""Whoever may write to the server can neither fill a member's memory nor keep its thread busy."""

import threading
import time
from collections.abc import Callable, Iterator
from itertools import count
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from lookahead_vllm.draft.fleet import exchange as exchange_module
from lookahead_vllm.draft.fleet.exchange import ENTRIES_AT_A_TIME, MAX_NAMES, NEWS, Exchange
from lookahead_vllm.draft.fleet.member import NOTHING_READ, Member
from lookahead_vllm.draft.fleet.pieces import Pieces, messages_of
from lookahead_vllm.draft.insertion import CHUNK_TOKENS, InsertionQueue
from lookahead_vllm.draft.proposers.ngram_trie import NGramTrieProposer
from lookahead_vllm.draft.proposers.stepping import read
from lookahead_vllm.draft.trie.namespaces import digest_of
from lookahead_vllm.draft.trie.suffix import NUM_HASHES
from lookahead_vllm.options.server import LookaheadOptions
from tests.support.waiting import wait

OPTIONS = LookaheadOptions(proposer="ngram_trie", budget=16, max_nodes=65536)
TAIL_TOKENS = 8192
JUNK = {b"by": b"a stranger", b"texts": b"", b"junk": bytes(1 << 20)}
VOCAB = 32_000

Entries = list[tuple[bytes, dict[bytes, bytes]]]


class Server:
    """A client of a server whose streams never end: each entry after any has the same fields."""

    def __init__(self, fields: dict[str, dict[bytes, bytes]]) -> None:
        self.fields = fields
        """Of the entries of each stream, by the end of its key; other streams are empty."""
        self.num_published = 0
        self.answers: list[list[int]] = []
        """The number of entries of each stream in each answer that was read."""
        self._ids = count(1)
        self.connection_pool = SimpleNamespace(disconnect=lambda: None)

    def ping(self) -> None: ...

    def close(self) -> None: ...

    def pipeline(self, transaction: bool) -> Any:
        commands: list[Callable[[], Any]] = []
        sizes: list[int] = []

        def entries(key: str, position: str | None, size: int) -> Entries:
            fields = self.fields.get(key.rpartition(":")[2])
            if fields is None:
                return []
            sizes.append(size)
            ids = [b"%d-0" % next(self._ids) for _ in range(size)]
            if position not in (None, NOTHING_READ):
                ids[0] = position.encode()
            return [(entry_id, fields) for entry_id in ids]

        def published() -> bytes:
            self.num_published += 1
            return b"1-0"

        def execute(raise_on_error: bool = True) -> list[Any]:
            results = [command() for command in commands]
            self.answers.append(sizes)
            return results

        return SimpleNamespace(
            xadd=lambda *args, **kwargs: commands.append(published),
            expire=lambda *args: commands.append(lambda: True),
            time=lambda: commands.append(lambda: (0, 0)),
            xrange=lambda key, start, count: commands.append(lambda: entries(key, start, count)),
            xrevrange=lambda key, end="+", count=1: commands.append(
                lambda: entries(key, None, count)
            ),
            execute=execute,
        )


@pytest.fixture
def join(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., tuple[Exchange, Any]]]:
    monkeypatch.setattr(exchange_module, "INTERVAL_SECONDS", 0.01)
    joined: list[Exchange] = []

    def join(server: Server) -> tuple[Exchange, NGramTrieProposer]:
        proposer = NGramTrieProposer(OPTIONS)
        member = Member(proposer)
        joined.append(Exchange(member, lambda: server, "test", 4000, VOCAB, TAIL_TOKENS))
        return joined[-1], proposer

    yield join
    for exchange in joined:
        exchange.close()


def answer(proposer: NGramTrieProposer) -> None:
    proposer.start("r", [1, 2, 3], "")
    read(proposer, {"r": [4, 5, 6]})
    proposer.finish("r")


@pytest.mark.parametrize("stream", [NEWS, digest_of("")])
def test_few_entries_are_read_at_a_time_and_all_their_bytes_count(stream, join):
    server = Server({stream: JUNK, NEWS: {**JUNK, b"streams": digest_of("").encode()}})
    join(server)
    assert wait(lambda: len(server.answers) > 20)
    assert max(map(sum, server.answers)) <= ENTRIES_AT_A_TIME


def test_a_tail_counts_all_bytes(join):
    server = Server({digest_of(""): JUNK})
    exchange, _ = join(server)
    assert wait(lambda: exchange.traffic.dropped >= ENTRIES_AT_A_TIME)
    time.sleep(0.1)
    # One answer holds more than a tail may.
    assert sum(map(sum, server.answers)) == exchange.traffic.dropped == ENTRIES_AT_A_TIME


@pytest.mark.parametrize(
    "texts",
    [
        b"",
        *messages_of(
            Pieces(np.zeros((1, NUM_HASHES), np.uint64), np.array([1]), np.array([VOCAB]))
        ),
    ],
)
def test_an_endless_stream_of_garbage_lets_members_publish_and_close(texts, join):
    garbage = {b"by": b"a stranger", b"texts": texts}
    server = Server({digest_of(""): garbage, NEWS: {b"streams": digest_of("").encode()}})
    exchange, proposer = join(server)
    for num_published in range(3):
        answer(proposer)
        assert wait(lambda before=2 * num_published: server.num_published > before)
    assert wait(lambda: exchange.traffic.published == 9)
    exchange.close()
    assert wait(lambda: not exchange._thread.is_alive())


def test_news_of_too_many_streams_are_refused(join):
    names = digest_of("").encode() * (MAX_NAMES + 1)
    server = Server({NEWS: {b"streams": names}, digest_of(""): JUNK})
    exchange, _ = join(server)
    assert wait(lambda: exchange.traffic.dropped > 2 * ENTRIES_AT_A_TIME)
    assert all(len(sizes) == 1 for sizes in server.answers if sizes)


def test_a_member_of_many_namespaces_splits_its_news(join, monkeypatch):
    monkeypatch.setattr(exchange_module, "MAX_NAMES", 2)
    server = Server({})
    _, proposer = join(server)
    names = [f"team-{number}" for number in range(5)]
    for name in names:
        proposer.start(name, [1, 2, 3], name)
    read(proposer, {name: [4] for name in names})
    assert wait(lambda: server.num_published == 5 + 3)


def test_what_has_arrived_is_counted_as_it_comes_and_goes():
    """A text of one token takes memory, too."""
    queue, nothing = InsertionQueue(), lambda tokens: None
    lengths = [1, CHUNK_TOKENS, 3 * CHUNK_TOKENS + 1]
    for length in lengths:
        queue.arrive(nothing, np.zeros(length, np.int32))
    counts = [queue.num_arrived]
    while queue.insert_arrived():
        counts.append(queue.num_arrived)
    assert counts == [CHUNK_TOKENS * n + 1 for n in (5, 4, 3, 2, 1)] + [CHUNK_TOKENS, 0]

    thread = threading.Thread(
        target=lambda: [queue.arrive(nothing, np.zeros(1, np.int32)) for _ in range(2000)]
    )
    thread.start()
    while thread.is_alive() or queue._arrived or queue._waiting:
        queue.end_step()
    assert queue.num_arrived == 0
