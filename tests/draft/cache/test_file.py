"""A damaged cache file is refused. A file holds n-grams of answers, and none of a live prompt."""

from __future__ import annotations

import fcntl
import json
import os
import random
import signal
import stat
import struct
import subprocess
import sys
import threading
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lookahead_vllm.draft.cache import file as cache_file
from lookahead_vllm.draft.cache.file import CacheFileError, fingerprint, load, read_header, save
from lookahead_vllm.draft.options import LookaheadOptions
from lookahead_vllm.draft.proposer import DraftLimits
from lookahead_vllm.draft.trie.proposer import NGramTrieProposer
from lookahead_vllm.draft.trie.suffix import empty_hashes
from lookahead_vllm.draft.trie.table import KEY, TOKEN_MASK, USE, Trie, spaces_of

TOKENIZER = fingerprint({"a": 0, "b": 1})
ANSWER = list(range(100, 160))
PROMPT = list(range(7000, 7060))


def new_proposer(max_nodes=4096):
    return NGramTrieProposer(LookaheadOptions(max_nodes=max_nodes, budget=16))


def taught_proposer(max_nodes=4096):
    proposer = new_proposer(max_nodes)
    for i, namespace in enumerate(["", "", "other"]):
        proposer.start(f"{i}", PROMPT, namespace)
        proposer.extend({f"{i}": ANSWER[i:] + ANSWER[: i + 4]})
    return proposer  # its requests are still live


def save_proposer(proposer, path):
    return save(path, *proposer.snapshot(), TOKENIZER)


def drafts(proposer, texts, namespace=""):
    trees = []
    for text in texts:
        proposer.start("r", [1], namespace)
        proposer.extend({"r": text})
        (tree,) = proposer.propose([DraftLimits("r", 16, 16)])
        trees.append((tree.tokens.tolist(), tree.parents.tolist(), tree.probs.tolist()))
        proposer.finish("r")
    return trees


@pytest.fixture(scope="module")
def good(tmp_path_factory):
    path = tmp_path_factory.mktemp("good") / "a.cache"
    save_proposer(taught_proposer(), path)
    return path


def refusal(path, content):
    path.write_bytes(content)
    with pytest.raises(CacheFileError) as error:
        load(path, TOKENIZER)
    assert str(error.value).startswith("it ") and "\n" not in str(error.value)
    return str(error.value)


# ---- loading ------------------------------------------------------------------------------------


def test_a_restored_proposer_drafts_the_same_trees(tmp_path):
    before = taught_proposer(1 << 20)
    size = save_proposer(before, tmp_path / "a")
    for live in "012":  # the texts of live requests take slots, which the restored trie has free
        before.finish(live)
    after = new_proposer(1 << 20)
    after.restore(*load(tmp_path / "a", TOKENIZER))
    assert size == (tmp_path / "a").stat().st_size
    for namespace in ("", "other", "unknown"):
        texts = [ANSWER[i : i + 6] for i in range(0, 40, 5)]
        expected = drafts(before, texts, namespace)
        assert drafts(after, texts, namespace) == expected
        assert any(tokens for tokens, _, _ in expected) == (namespace != "unknown")


def test_the_header_describes_the_file(good):
    header = read_header(good)
    assert header.tokenizer == TOKENIZER and header.namespaces == 2
    assert abs(header.created - time.time()) < 600
    assert {"edges", "counters"} <= {entry.name for entry in header.arrays}


def test_a_prompt_of_a_live_request_is_not_in_the_file(good):
    arrays, facts = load(good, TOKENIZER)
    assert (spaces_of(arrays["edges"]) >= 0).all()
    held = set((arrays["edges"][:, USE] & TOKEN_MASK).tolist())
    assert held & set(ANSWER) and not held & set(PROMPT)
    after = new_proposer()
    after.restore(arrays, facts)
    for tree, _, _ in drafts(after, [PROMPT[i : i + 5] for i in range(50)]):
        assert not set(tree) & set(PROMPT)


def test_the_slots_of_live_requests_are_empty_in_the_file(good):
    after = new_proposer()
    after.restore(*load(good, TOKENIZER))
    assert after.trie.num_filled == np.count_nonzero(after.trie.edges[:, KEY]) > 0
    before = taught_proposer()
    after.restore(*before.snapshot())  # a snapshot in memory includes live requests
    assert after.trie.num_filled == before.trie.num_filled


def test_only_the_owner_may_read_the_file(good):
    assert stat.S_IMODE(good.stat().st_mode) == 0o600


def test_empty_arrays_and_arrays_larger_than_a_chunk_come_back(tmp_path, monkeypatch):
    monkeypatch.setattr(cache_file, "CHUNK_BYTES", 1000)
    arrays = {
        "large": np.random.default_rng(0).random((300, 7), np.float32),
        "empty": np.empty((0, 3), np.int64),
    }
    save(tmp_path / "a", arrays, {"namespaces": {}}, TOKENIZER)
    loaded, _ = load(tmp_path / "a", TOKENIZER)
    for name, array in arrays.items():
        assert loaded[name].dtype == array.dtype and (loaded[name] == array).all()
        assert loaded[name].shape == array.shape


def test_fingerprints_depend_on_the_vocabulary_and_not_on_its_order():
    one = fingerprint({"a": 0, "bc": 1})
    assert one == fingerprint({"bc": 1, "a": 0})
    assert len({one, fingerprint({"a": 1, "bc": 0}), fingerprint({"ab": 0, "c": 1})}) == 3
    assert fingerprint({b"\xff": 0, "\ud800": 1})  # bytes, and a lone surrogate


# ---- refusals -----------------------------------------------------------------------------------


@settings(deadline=None, max_examples=200)
@given(st.floats(0, 1, exclude_max=True), st.integers(1, 255))
def test_a_changed_byte_is_detected(good, place, flip):
    content = bytearray(good.read_bytes())
    content[int(place * len(content))] ^= flip
    refusal(good.with_name("flipped"), content)


def test_a_changed_byte_of_the_header_is_detected(good):
    content = good.read_bytes()
    for i in range(500):
        refusal(good.with_name("flipped"), content[:i] + bytes([content[i] ^ 1]) + content[i + 1 :])


@settings(deadline=None, max_examples=100)
@given(st.one_of(st.integers(0, 600), st.floats(0, 1, exclude_max=True)))
def test_a_truncated_file_is_refused(good, place):
    content = good.read_bytes()
    refusal(
        good.with_name("truncated"),
        content[: place if isinstance(place, int) else int(place * len(content))],
    )


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda c: c + b"x", "bytes where its header needs"),
        (lambda c: b"", "is empty"),
        (lambda c: b"\x89PNG" + c[4:], "is not a cache of lookahead"),
        (lambda c: b"some text\n" * 100, "is not a cache of lookahead"),
        (lambda c: c[:8] + struct.pack("<I", 99) + c[12:], "of format 99, and this release"),
        (lambda c: c[:12] + struct.pack("<I", 2**32 - 1) + c[16:], "longer than the file"),
        (lambda c: c[:-1] + bytes([c[-1] ^ 1]), "its weights are not what was written"),
    ],
)
def test_the_refusal_says_why(good, change, says):
    assert says in refusal(good.with_name("bad"), change(good.read_bytes()))


def test_another_tokenizers_file_is_refused(good):
    with pytest.raises(CacheFileError, match="with another tokenizer") as error:
        load(good, fingerprint({"a": 1, "b": 0}))
    assert TOKENIZER in str(error.value)
    load(good)  # without a fingerprint, any tokenizer is accepted


def with_header(**changes):
    """The bytes of a file that is valid except for these changes of its header."""
    header = {
        "release": "1",
        "created": 0,
        "tokenizer": TOKENIZER,
        "namespaces": 0,
        "arrays": [{"name": "edges", "dtype": "<i8", "shape": [2, 2], "bytes": 32}],
        "facts": {"namespaces": {}},
        **changes,
    }
    text = json.dumps(header).encode()
    start = struct.pack("<8sII", cache_file.MAGIC, cache_file.VERSION, len(text)) + text
    digest = cache_file.hashlib.blake2b(start, digest_size=16)
    first = digest.digest()
    digest.update(bytes(32))
    return start + first + bytes(32) + digest.digest()


def shaped(shape, dtype="<i8", name="edges"):
    return {"name": name, "dtype": dtype, "shape": shape}


@pytest.mark.parametrize(
    "changes",
    [
        {"arrays": [shaped([2**40, 2])]},
        {"arrays": [shaped([2**62, 2**62])]},
        {"arrays": [shaped([0, 2**63])]},
        {"arrays": [shaped([-2, -2])]},
        {"arrays": [shaped([2.0, 2])]},
        {"arrays": [shaped([])]},
        {"arrays": [shaped([1] * 60 + [4])]},
        {"arrays": [shaped([100], "<i8"), shaped([100], "<i8", "b")]},
        {"arrays": [shaped([2], "O")]},
        {"arrays": [shaped([1], "(4000000000,)i8")]},
        {"arrays": [shaped([2, 1]), shaped([2, 1])]},
        {"arrays": {"edges": 1}},
        {"arrays": None},
        {"facts": {}},
        {"facts": {"namespaces": {"a": -1}}},
        {"facts": {"namespaces": ["a"]}},
        {"created": "yesterday"},
    ],
)
def test_a_false_header_is_refused_before_anything_is_allocated(tmp_path, changes, monkeypatch):
    refusal(tmp_path / "a", with_header()[:-1])
    (tmp_path / "a").write_bytes(with_header())
    load(tmp_path / "a", TOKENIZER)  # without changes the file is valid
    monkeypatch.setattr(cache_file.np, "empty", None)
    refusal(tmp_path / "a", with_header(**changes))


def test_a_deeply_nested_header_is_refused(tmp_path):
    deep = b'{"arrays":' + b"[" * 200_000 + b"]" * 200_000 + b"}"
    start = struct.pack("<8sII", cache_file.MAGIC, cache_file.VERSION, len(deep)) + deep
    digest = cache_file.hashlib.blake2b(start, digest_size=16).digest()
    assert "makes no sense" in refusal(tmp_path / "a", start + digest)


def test_a_path_that_is_no_regular_file_is_refused(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(CacheFileError, match="not a regular file"):
        load(tmp_path / "pipe")
    with pytest.raises(IsADirectoryError):
        load(tmp_path)
    with pytest.raises(FileNotFoundError):
        load(tmp_path / "missing")


def test_a_refused_file_overwrites_no_other(tmp_path):
    kept = []
    for content in (b"one", b"two", b"three"):
        (tmp_path / "a").write_bytes(content)
        kept.append(cache_file.set_aside(tmp_path / "a"))
    assert [path.read_bytes() for path in kept] == [b"one", b"two", b"three"]
    assert all(path.name.startswith("a.refused-2") for path in kept)
    with pytest.raises(FileNotFoundError):
        cache_file.set_aside(tmp_path / "a")
    assert sorted(tmp_path.iterdir()) == sorted(kept)


def test_at_most_three_refused_files_are_kept(tmp_path, monkeypatch):
    times = iter([100, 100, 100, 100, 50, 200, 200])
    monkeypatch.setattr(cache_file.time, "gmtime", lambda: time.struct_time((0,) * 9))
    monkeypatch.setattr(cache_file.time, "strftime", lambda *_: f"20200101T000{next(times):03}Z")
    (tmp_path / "a.refused-notes").write_text("mine")
    (tmp_path / "b.refused-20190101T000000Z").write_text("another cache's")
    kept = []
    for content in "1234567":
        (tmp_path / "a").write_text(content)
        kept.append(cache_file.set_aside(tmp_path / "a").read_text())
    assert kept == list("1234567")
    texts = {path.read_text() for path in tmp_path.iterdir()}
    assert texts == {"4", "6", "7", "mine", "another cache's"}


# ---- saving ------------------------------------------------------------------------------------


def edges_of(text, space):
    """Every edge that inserting the text can make, as (name, token)."""
    trie, row, edges = Trie(1024), empty_hashes(), set()
    for token in text:
        trie.insert(space, row, np.array([token], np.int32))
        made = trie.edges[trie.edges[:, KEY] != 0]
        edges |= set(zip(made[:, KEY].tolist(), (made[:, USE] & TOKEN_MASK).tolist(), strict=True))
        trie.edges[:] = 0  # so that no edge replaces another
    return edges


def test_a_save_while_the_proposer_learns_is_consistent(tmp_path, monkeypatch):
    monkeypatch.setattr(cache_file, "CHUNK_BYTES", 8192)  # several chunks in a small table
    text = np.random.default_rng(0).integers(0, 40, 1500).tolist()
    proposer = new_proposer()
    learned, done = threading.Event(), threading.Event()

    def serve():
        while not done.is_set():
            for name in ("first", "second"):
                proposer.start(name, [], name)
                for i in range(0, len(text), 7):
                    proposer.extend({name: text[i : i + 7]})
                proposer.finish(name)
            proposer.start("last", [], f"{time.time()}")  # adds a namespace
            learned.set()

    thread = threading.Thread(target=serve)
    interval = sys.getswitchinterval()
    sys.setswitchinterval(interval / 50)  # the threads switch more often
    thread.start()
    try:
        assert learned.wait(120)
        for i in range(10):
            save(tmp_path / f"{i}", *proposer.snapshot(), TOKENIZER, lambda: time.sleep(0.0005))
    finally:
        done.set()
        thread.join()
        sys.setswitchinterval(interval)
    possible = {}
    for i in range(10):
        arrays, facts = load(tmp_path / f"{i}", TOKENIZER)
        spaces = spaces_of(arrays["edges"])
        last = NGramTrieProposer(proposer.options)
        last.restore(arrays, facts)
        # A namespace that comes later must not get the number of one that is in the file.
        assert last.trie.new_shared() > max(spaces.max(), *facts["namespaces"].values())
        for space in set(spaces[spaces != 0].tolist()):
            if space not in possible:
                possible[space] = edges_of(text, space)
            edges = arrays["edges"][spaces == space]
            tokens = (edges[:, USE] & TOKEN_MASK).tolist()
            assert set(zip(edges[:, KEY].tolist(), tokens, strict=True)) <= possible[space]
    assert len(possible) >= 2


SAVES_UNTIL_KILLED = """
import os, signal, sys
from pathlib import Path
import numpy as np
from lookahead_vllm.draft.cache.file import load, save

path = Path(sys.argv[1])
for line in sys.stdin:  # each line starts a process that is killed
    child = os.fork()
    if child:
        os.waitpid(child, 0)
        print("dead", flush=True)
        continue
    os.write(1, b"%d\\n" % os.getpid())
    number = int(load(path)[0]["number"][0]) if path.exists() else 0
    halt = None
    while True:
        number += 1
        save(path, {"number": np.full(1 << 20, number)}, {"namespaces": {}}, "t", halt or int)
        os.write(1, b"%d\\n" % number)
        if line == "halt\\n":  # in the middle of the next save
            halt = lambda: (os.write(1, b"in it\\n"), signal.pause())
"""


def test_a_kill_during_a_save_leaves_the_old_file_or_the_new_one(tmp_path):
    path, rng = tmp_path / "a.cache", random.Random(0)
    command = [sys.executable, "-c", SAVES_UNTIL_KILLED, str(path)]
    pipes = dict(stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1)
    numbers = []
    with subprocess.Popen(command, **pipes) as process:
        for life in range(15):
            halts = life % 3 == 0
            process.stdin.write("halt\n" if halts else "live\n")
            child = int(process.stdout.readline())
            saved = int(process.stdout.readline())  # the next save is running now
            if halts:
                assert process.stdout.readline() == "in it\n"
            else:
                time.sleep(rng.uniform(0, 0.05))
            os.kill(child, signal.SIGKILL)
            while (line := process.stdout.readline().strip()) != "dead":
                saved = int(line)
            (number,) = set(load(path, "t")[0]["number"].tolist())
            assert number in (saved, saved + 1)
            numbers.append(number)
            leftovers = set(tmp_path.iterdir()) - {path}
            assert len(leftovers) <= 1  # each save removes older ones
            assert leftovers or not halts
        process.stdin.close()
    assert numbers == sorted(set(numbers))
    save(path, {}, {"namespaces": {}}, "t")
    assert list(tmp_path.iterdir()) == [path]


def test_a_running_save_is_no_leftover(tmp_path):
    path = tmp_path / "a.cache"
    running = tmp_path / f".a.cache.{os.getpid()}-01234567.tmp"
    others = [tmp_path / ".b.cache.1-01234567.tmp", tmp_path / ".a.cache.tmp"]
    for file in (running, *others):
        file.touch()
    with running.open("r+b") as writer:
        fcntl.flock(writer, fcntl.LOCK_EX)
        save_proposer(new_proposer(), path)
        assert running.exists()
    save_proposer(new_proposer(), path)
    assert sorted(tmp_path.iterdir()) == sorted([path, *others])


def test_concurrent_saves_leave_a_valid_file(tmp_path):
    path = tmp_path / "a.cache"
    failures = []

    def save_often(number):
        try:
            for _ in range(20):
                save(path, {"n": np.full(100_000, number)}, {"namespaces": {}}, "t")
                assert len(set(load(path, "t")[0]["n"].tolist())) == 1
        except Exception as error:
            failures.append(error)

    threads = [threading.Thread(target=save_often, args=(i,)) for i in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures and list(tmp_path.iterdir()) == [path]


def test_a_failed_save_leaves_only_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "a.cache"
    save_proposer(taught_proposer(), path)
    before = path.read_bytes()

    def full(descriptor):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(cache_file.os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        save_proposer(new_proposer(), path)
    assert path.read_bytes() == before and list(tmp_path.iterdir()) == [path]
