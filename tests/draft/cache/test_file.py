"""A damaged cache file is refused. A file holds n-grams of answers, and none of a live prompt."""

import sys
import threading
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lookahead_vllm.draft.cache import file as cache_file
from lookahead_vllm.draft.cache.file import fingerprint, load, save
from lookahead_vllm.draft.proposers.ngram_trie import NGramTrieProposer
from lookahead_vllm.draft.proposers.stepping import read
from lookahead_vllm.draft.trie.suffix import empty_hashes
from lookahead_vllm.draft.trie.table import KEY, TOKEN_MASK, USE, Trie, spaces_of
from lookahead_vllm.kept_file import RefusedFileError
from lookahead_vllm.options.server import LookaheadOptions
from tests.support.drafting import draft

TOKENIZER = fingerprint({"a": 0, "b": 1})
ANSWER = list(range(100, 160))
PROMPT = list(range(7000, 7060))


def new_proposer(max_nodes=4096):
    return NGramTrieProposer(LookaheadOptions(max_nodes=max_nodes, budget=16))


def taught_proposer(max_nodes=4096):
    proposer = new_proposer(max_nodes)
    for i, namespace in enumerate(["", "", "other"]):
        proposer.start(f"{i}", PROMPT, namespace)
        read(proposer, {f"{i}": ANSWER[i:] + ANSWER[: i + 4]})
    return proposer  # its requests are still live


def save_proposer(proposer, path):
    return save(path, *proposer.snapshot(), TOKENIZER)


def drafts(proposer, texts, namespace=""):
    trees = []
    for text in texts:
        proposer.start("r", [1], namespace)
        read(proposer, {"r": text})
        tree = draft(proposer)
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
    with pytest.raises(RefusedFileError) as error:
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


def test_a_prompt_of_a_live_request_is_not_in_the_file(good):
    arrays, facts = load(good, TOKENIZER)
    assert (spaces_of(arrays["edges"]) >= 0).all()
    held = set((arrays["edges"][:, USE] & TOKEN_MASK).tolist())
    assert held & set(ANSWER) and not held & set(PROMPT)
    after = new_proposer()
    after.restore(arrays, facts)
    for tree, _, _ in drafts(after, [PROMPT[i : i + 5] for i in range(50)]):
        assert not set(tree) & set(PROMPT)


@pytest.mark.parametrize("spaces", [{"a": 1, "b": 1}, {"a": 99}, {"a": -1}])
def test_a_file_whose_namespaces_would_share_is_refused(good, spaces):
    arrays, facts = load(good, TOKENIZER)
    with pytest.raises(ValueError, match="its namespaces would share n-grams"):
        new_proposer().restore(arrays, {**facts, "namespaces": spaces})


def test_fingerprints_depend_on_the_vocabulary_and_not_on_its_order():
    one = fingerprint({"a": 0, "bc": 1})
    assert one == fingerprint({"bc": 1, "a": 0})
    assert len({one, fingerprint({"a": 1, "bc": 0}), fingerprint({"ab": 0, "c": 1})}) == 3
    assert fingerprint({b"\xff": 0, "\ud800": 1})  # bytes, and a lone surrogate


# ---- refusals -----------------------------------------------------------------------------------


@settings(deadline=None, max_examples=200)
@given(st.floats(0, 1, exclude_max=True), st.integers(1, 255))
def test_a_changed_byte_is_detected_or_changes_nothing(good, place, flip):
    """Nothing: a date in the directory of the file, for example."""
    content = bytearray(good.read_bytes())
    content[int(place * len(content))] ^= flip
    path = good.with_name("flipped")
    path.write_bytes(content)
    try:
        arrays, facts = load(path, TOKENIZER)
    except RefusedFileError as error:
        assert str(error).startswith("it is damaged") and "\n" not in str(error)
    else:
        expected, facts_of_good = load(good)
        assert facts == facts_of_good and arrays.keys() == expected.keys()
        for name, array in arrays.items():
            np.testing.assert_array_equal(array, expected[name], strict=True)


@settings(deadline=None, max_examples=100)
@given(st.one_of(st.integers(0, 600), st.floats(0, 1, exclude_max=True)))
def test_a_truncated_file_is_refused(good, place):
    content = good.read_bytes()
    refusal(
        good.with_name("truncated"),
        content[: place if isinstance(place, int) else int(place * len(content))],
    )


@pytest.mark.parametrize("content", [b"", b"some text\n" * 100, b"LAHCACHE" + bytes(100)])
def test_another_file_is_refused(good, content):
    assert "not a cache of this release" in refusal(good.with_name("bad"), content)


def test_a_file_of_another_format_says_so(tmp_path, monkeypatch):
    monkeypatch.setattr(cache_file, "FORMAT", 99)
    save_proposer(new_proposer(), tmp_path / "a")
    monkeypatch.undo()
    assert "of format 99, and this release" in refusal(
        tmp_path / "a", (tmp_path / "a").read_bytes()
    )


@pytest.mark.parametrize(
    "facts",
    [
        {"namespaces": {"a": -1}},
        {"namespaces": {}, "followed": {"a": "*"}},
        {"namespaces": {}, "followed": ["a"]},
        {},
    ],
)
def test_false_facts_are_refused(tmp_path, facts):
    save(tmp_path / "a", {"edges": np.zeros((2, 2), np.int64)}, facts, TOKENIZER)
    refusal(tmp_path / "a", (tmp_path / "a").read_bytes())


def test_no_object_is_unpickled(tmp_path):
    objects = np.array([None])
    with (tmp_path / "a").open("wb") as file:
        np.savez(file, about=objects, edges=objects)
    refusal(tmp_path / "a", (tmp_path / "a").read_bytes())


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
                    read(proposer, {name: text[i : i + 7]})
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
