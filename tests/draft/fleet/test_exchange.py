"""Members learn each other's answers through a real server, whatever happens to it."""

import contextlib
import logging
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.serving.server import free_port
from lookahead_vllm.draft.fleet import exchange as exchange_module
from lookahead_vllm.draft.fleet.exchange import Exchange
from lookahead_vllm.draft.fleet.member import Member
from lookahead_vllm.draft.fleet.pieces import NUM_HASHES, Pieces, messages_of
from lookahead_vllm.draft.proposers.ngram_trie import NGramTrieProposer
from lookahead_vllm.draft.proposers.stepping import DraftLimits, draft_trees, read
from lookahead_vllm.draft.trie.namespaces import digest_of
from lookahead_vllm.engine.drafter import fleet
from lookahead_vllm.engine.drafter.fleet import connect
from lookahead_vllm.options.server import LookaheadOptions
from tests.support.redis_server import RedisServer, needs_redis
from tests.support.waiting import wait

pytestmark = needs_redis

OPTIONS = LookaheadOptions(proposer="ngram_trie", budget=16, max_nodes=65536)
PROMPT = list(range(100, 140))
ANSWER = np.random.default_rng(7).integers(1000, 30_000, 40).tolist()
OTHER_ANSWER = ANSWER[::-1]
VOCAB = 32_000


@pytest.fixture
def server(tmp_path: Path) -> Iterator[RedisServer]:
    server = RedisServer(tmp_path)
    yield server
    server.thaw()
    server.kill()


@pytest.fixture(autouse=True)
def fast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exchange_module, "INTERVAL_SECONDS", 0.02)
    monkeypatch.setattr(exchange_module, "MIN_BACKOFF_SECONDS", 0.05)
    monkeypatch.setattr(exchange_module, "MAX_BACKOFF_SECONDS", 0.1)
    monkeypatch.setattr(fleet, "TIMEOUT_SECONDS", 10.0)  # the server may have to wait for its core


class Engine:
    """A proposer in a fleet."""

    def __init__(self, url: str, prefix: str = "lookahead:test", max_entries: int = 1000) -> None:
        self.proposer = NGramTrieProposer(OPTIONS)
        self._join = lambda: Exchange(
            Member(self.proposer), lambda: connect(url), prefix, max_entries, VOCAB, 8192
        )
        self.exchange = self._join()

    def start_from(self, snapshot: tuple[dict[str, Any], dict[str, Any]]) -> None:
        """Join again, as after a restart with this cache."""
        self.exchange.close()
        self.proposer.restore(*snapshot)
        self.exchange = self._join()

    def answer(self, tokens: list[int] = ANSWER, namespace: str | None = "") -> None:
        """Serve a request, several tokens a step."""
        self.proposer.start("r", PROMPT, namespace)
        for at in range(0, len(tokens), 3):
            read(self.proposer, {"r": tokens[at : at + 3]})
        self.proposer.finish("r")

    def drafts(self, namespace: str | None = "") -> list[int]:
        """What is drafted for a request that has begun with the answer."""
        self.proposer.start("asking", PROMPT, namespace)
        try:
            return draft_trees(self.proposer, [DraftLimits("asking", 16, 8)])[0].tokens.tolist()
        finally:
            self.proposer.finish("asking")

    def learns(self, namespace: str | None = "") -> bool:
        return wait(lambda: ANSWER[0] in self.drafts(namespace))


@pytest.fixture
def engines(server: RedisServer) -> Iterator[Callable[..., Engine]]:
    with contextlib.ExitStack() as stack:

        def make(*args: Any, **kwargs: Any) -> Engine:
            engine = Engine(server.url, *args, **kwargs)
            stack.callback(lambda: engine.exchange.close())
            return engine

        yield make


def test_an_answer_of_one_is_drafted_by_another(engines):
    first, second = engines(), engines()
    first.answer()
    assert second.learns()
    assert wait(lambda: second.exchange.traffic.learned == len(ANSWER))
    assert wait(lambda: first.exchange.traffic.published == len(ANSWER))
    lag = second.exchange.traffic.lag_seconds
    assert lag is None or 0 <= lag < 5  # None: it was read as the tail of the stream
    time.sleep(0.2)
    assert first.exchange.traffic.learned == second.exchange.traffic.published == 0


def test_a_later_member_starts_from_the_tail(engines):
    first = engines()
    first.answer()
    assert wait(lambda: first.exchange.traffic.published > 0)
    assert engines().learns()


def test_namespaces_models_and_requests_that_share_nothing_stay_apart(engines, server):
    first, second = engines(), engines()
    other_model = engines("lookahead:other")
    first.answer(namespace="team-a")
    first.answer(OTHER_ANSWER, namespace=None)
    assert second.learns("team-a")
    for namespace in ("", "team-b", "team-a:", None):
        assert not second.drafts(namespace)
    assert not wait(lambda: bool(other_model.drafts("team-a")), 0.2)
    texts = b"".join(server.client().xrange(key)[0][1][b"texts"] for key in _streams(server))
    assert np.array(ANSWER[:3], "<u4").tobytes() in texts
    assert np.array(OTHER_ANSWER[:3], "<u4").tobytes() not in texts


def _streams(server: RedisServer) -> list[bytes]:
    return [key for key in server.client().scan_iter() if not key.endswith(b":news")]


def test_streams_are_trimmed_and_expire(engines, server):
    engine = engines(max_entries=1)
    for _ in range(300):  # Redis trims whole nodes of a hundred entries
        published = engine.exchange.traffic.published
        engine.answer()
        assert wait(lambda before=published: engine.exchange.traffic.published > before)
    client = server.client()
    (stream,) = _streams(server)
    assert 0 < client.xlen(stream) <= 150
    assert all(0 < client.ttl(key) <= exchange_module.EXPIRE_SECONDS for key in client.scan_iter())


@pytest.mark.parametrize("garbage", [b"", b"\xff" * 8, b"\0" * 4000, b"x" * (2 << 20)])
def test_garbage_in_a_stream_is_refused(garbage, engines, server, caplog):
    first, second = engines(), engines()
    assert wait(lambda: second.exchange._news_position is not None)
    client, digest = server.client(), digest_of("")
    wrong_token = Pieces(np.zeros((1, NUM_HASHES), np.uint64), np.array([1]), np.array([VOCAB]))
    for texts in (garbage, *messages_of(wrong_token)):
        client.xadd(f"lookahead:test:{digest}", {b"by": b"a stranger", b"texts": texts})
    client.xadd(f"lookahead:test:{digest}", {b"something": b"else"})
    client.xadd("lookahead:test:news", {b"streams": digest.encode() + b"\xff\xff"})
    first.answer()
    assert second.learns()
    assert second.exchange.traffic.dropped >= 3
    assert wait(lambda: first.exchange.traffic.dropped >= 3)
    refused = [r for r in caplog.records if "refuses a message" in r.message]
    assert len(refused) == 2  # one of each member


def test_a_server_that_is_killed_ten_times_costs_two_lines_each(engines, server, caplog):
    caplog.set_level(logging.INFO, logger=exchange_module.logger.name)
    first, second = engines(), engines()
    for _ in range(10):
        server.kill()
        first.answer()
        assert wait(lambda: bool(first.exchange._complaint and second.exchange._complaint))
        server.start()
        assert wait(lambda: not first.exchange._complaint and not second.exchange._complaint)
    assert teaches(first, second)
    lost = [r for r in caplog.records if "does not share" in r.message]
    found = [r for r in caplog.records if "shares with other servers again" in r.message]
    assert len(lost) == len(found) == 20


def test_no_step_waits_for_a_server_that_hangs(engines, server, monkeypatch):
    monkeypatch.setattr(fleet, "TIMEOUT_SECONDS", 60.0)
    first, second = engines(), engines()
    first.answer()
    assert second.learns()
    server.freeze()
    slowest = 0.0
    for _ in range(200):
        start = time.monotonic()
        first.answer()
        slowest = max(slowest, time.monotonic() - start)
    start = time.monotonic()
    first.exchange.close()
    assert max(slowest, time.monotonic() - start) < 30  # the server is given up after 60


def test_what_waits_for_a_missing_server_is_bounded(server, monkeypatch):
    monkeypatch.setattr("lookahead_vllm.draft.fleet.member.MAX_UNSENT_TOKENS", 1000)
    server.kill()
    engine = Engine(server.url)
    for _ in range(100):
        engine.answer()
    outbox = engine.exchange._member.outbox
    engine.proposer.start("waits", PROMPT)
    waiting = len(outbox._steps)
    for _ in range(100):
        read(engine.proposer, {"waits": []})
    assert len(outbox._steps) == waiting
    assert sum(len(step.tokens) for step in outbox._steps) <= 1000
    assert outbox.dropped >= 2900
    server.start()
    traffic = engine.exchange.traffic
    assert wait(lambda: traffic.published + traffic.dropped == 100 * len(ANSWER))
    assert traffic.published > 0
    engine.exchange.close()


@pytest.mark.parametrize(
    ("setting", "reason"),
    [(("--maxmemory", "1"), "OutOfMemory"), (("--requirepass", "secret"), "Authentication")],
)
def test_a_server_that_refuses_is_named_once(setting, reason, tmp_path, caplog):
    server = RedisServer(tmp_path, *setting)
    engine = Engine(server.url)
    for _ in range(5):
        engine.answer()
        time.sleep(0.1)
    engine.exchange.close()
    server.kill()
    (line,) = [r.getMessage() for r in caplog.records if "does not share" in r.getMessage()]
    assert reason in line
    assert engine.exchange.traffic.published == 0


RIGHTS = ["ping", "xadd", "expire", "xrange", "xrevrange", "time"]


def server_with_rights(
    folder: Path, monkeypatch: pytest.MonkeyPatch, rights: list[str]
) -> RedisServer:
    """A server whose user in the environment has only these rights."""
    monkeypatch.setenv("LOOKAHEAD_VLLM_SHARE_USERNAME", "member")
    monkeypatch.setenv("LOOKAHEAD_VLLM_SHARE_PASSWORD", "secret")
    user = ["member", "on", ">secret", "~lookahead:*", *(f"+{right}" for right in rights)]
    return RedisServer(folder, "--user", *user)


def test_a_user_from_the_environment_needs_only_the_rights_that_are_documented(
    tmp_path, monkeypatch
):
    server = server_with_rights(tmp_path, monkeypatch, RIGHTS)
    first, second = Engine(server.url), Engine(server.url)
    first.answer()
    assert second.learns()
    first.exchange.close()
    second.exchange.close()
    server.kill()


@pytest.mark.parametrize("missing", RIGHTS)
def test_a_right_that_is_missing_is_named_and_what_was_shared_is_counted(
    missing, tmp_path, monkeypatch, caplog
):
    rights = [right for right in RIGHTS if right != missing]
    server = server_with_rights(tmp_path, monkeypatch, rights)
    engine = Engine(server.url)
    engine.answer()
    assert wait(lambda: bool(caplog.records))
    engine.exchange.close()
    is_shared = bool(_streams(server))
    server.kill()
    (line,) = [record.getMessage() for record in caplog.records]
    assert f"'{missing}'" in line
    assert ("shares, but its streams never expire" in line) == (missing == "expire")
    traffic = engine.exchange.traffic
    assert is_shared == (missing not in ("ping", "xadd"))
    assert traffic.published == (len(ANSWER) if is_shared else 0)
    assert traffic.dropped == (len(ANSWER) if missing == "xadd" else 0)


def test_a_restarted_member_goes_on_where_its_cache_was_saved(engines):
    first, second = engines(), engines()
    first.answer()
    assert wait(lambda: second.exchange.traffic.learned == len(ANSWER))
    snapshot = second.proposer.snapshot()
    second.exchange.close()
    first.answer(OTHER_ANSWER)
    restarted = engines()
    restarted.start_from(snapshot)
    assert wait(lambda: restarted.exchange.traffic.learned == len(ANSWER))  # only the second one
    time.sleep(0.1)
    assert restarted.exchange.traffic.learned == len(ANSWER)


def test_a_restarted_member_does_not_learn_its_own_answers_again(engines, server):
    """Nobody else has written to the streams."""
    first, digest = engines(), digest_of("team-a")
    for messages in range(1, 4):
        first.answer(namespace="team-a")
        published = messages * len(ANSWER)
        assert wait(lambda published=published: first.exchange.traffic.published == published)
    last = server.client().xinfo_stream(f"lookahead:test:{digest}")["last-generated-id"].decode()
    assert wait(lambda: first.exchange._member.followed[digest] == last)
    snapshot = first.proposer.snapshot()
    first.exchange.close()
    restarted = engines()
    restarted.start_from(snapshot)
    time.sleep(0.3)
    assert restarted.exchange.traffic.learned == 0


def test_a_key_that_is_no_stream_stops_only_its_namespace(engines, server):
    server.client().set(f"lookahead:test:{digest_of('evil')}", b"x")
    first, second = engines(), engines()
    second.drafts("evil")
    first.answer()
    assert second.learns()
    second.drafts("evil")
    first.answer(namespace="team-a")
    assert second.learns("team-a")
    assert not second.exchange._complaint


def teaches(first: Engine, second: Engine) -> bool:
    """Whether the second one learns an answer that the first one repeats until then."""

    def is_learned() -> bool:
        first.answer(OTHER_ANSWER)
        return OTHER_ANSWER[0] in second.drafts()

    return wait(is_learned)


@pytest.fixture
def primary_and_replica(tmp_path: Path) -> Iterator[tuple[RedisServer, RedisServer]]:
    port = str(free_port())
    with contextlib.ExitStack() as stack:

        def start(name: str, *settings: str) -> RedisServer:
            (tmp_path / name).mkdir()
            server = RedisServer(tmp_path / name, *settings)
            stack.callback(server.kill)
            return server

        primary, replica = start("a", "--port", port), start("b")
        replica.client().replicaof("127.0.0.1", port)
        yield primary, replica


@pytest.mark.parametrize("fate", ["becomes a replica", "lives on as a primary", "hangs"])
def test_members_follow_an_address_to_another_server(fate, primary_and_replica, tmp_path):
    old, new = primary_and_replica
    address = tmp_path / "address"
    address.symlink_to(old.path)
    first = Engine(f"unix://{address}")
    first.answer()
    assert wait(lambda: bool(_streams(new)))

    new.client().replicaof("NO", "ONE")
    if fate == "becomes a replica":
        old.client().replicaof("127.0.0.1", "1")
    elif fate == "hangs":
        old.freeze()
    address.unlink()
    address.symlink_to(new.path)
    second = Engine(f"unix://{address}")
    assert teaches(first, second)
    first.exchange.close()
    second.exchange.close()


def test_members_share_when_their_server_is_promoted(engines, server):
    server.client().replicaof("127.0.0.1", "1")
    first, second = engines(), engines()
    first.answer()
    assert wait(lambda: first.exchange.traffic.dropped == len(ANSWER))
    server.client().replicaof("NO", "ONE")
    assert teaches(first, second)


def set_clock_ahead(server: RedisServer) -> None:
    """Give the streams the ids of a server whose clock is an hour ahead."""
    client, later = server.client(), int(1000 * (time.time() + 3600))
    for key in client.scan_iter():
        client.execute_command("XSETID", key, f"{later}-0")


@pytest.mark.parametrize("event", ["emptied", "restarted", "restored"])
def test_positions_of_another_clock_are_forgotten(event, engines, server):
    first, second = engines(), engines()
    first.answer()
    assert second.learns()
    snapshot = {key: server.client().dump(key) for key in server.client().scan_iter()}
    set_clock_ahead(server)
    first.answer()
    assert wait(lambda: second.exchange.traffic.lag_seconds == 0)
    assert wait(lambda: first.exchange.traffic.published == 2 * len(ANSWER))

    if event == "restarted":
        server.kill()
        server.start()
    else:
        server.client().flushall()
    if event == "restored":
        for key, content in snapshot.items():
            server.client().restore(key, 0, content)
    assert teaches(first, second)
    assert wait(lambda: not second.exchange._complaint)
    assert second.exchange.traffic.lag_seconds == pytest.approx(0, abs=5)


def test_positions_in_a_cache_file_count_only_if_their_messages_are_there(engines, server):
    first, second = engines(), engines()
    first.answer()
    assert wait(lambda: second.exchange.traffic.learned == len(ANSWER))
    snapshot = second.proposer.snapshot()
    second.exchange.close()

    client, (stream,) = server.client(), _streams(server)
    client.flushall()
    older = Pieces(np.zeros((1, NUM_HASHES), np.uint64), np.ones(1, int), np.ones(1, np.int32))
    client.xadd(stream, {b"texts": messages_of(older)[0]}, id="1-1")
    first.answer()
    restarted = engines()
    restarted.start_from(snapshot)
    assert wait(lambda: restarted.exchange.traffic.learned == 1 + len(ANSWER))
