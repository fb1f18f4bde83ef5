"""Another member's pieces are inserted exactly as its own answers are."""

import numpy as np
import pytest

from lookahead_vllm.draft.fleet.member import Member
from lookahead_vllm.draft.fleet.pieces import (
    MAX_MESSAGE_BYTES,
    MessageError,
    Pieces,
    _insert,
    inserter,
    messages_of,
    unpack,
)
from lookahead_vllm.draft.insertion import CHUNK_TOKENS
from lookahead_vllm.draft.proposers.ngram_trie import NGramTrieProposer
from lookahead_vllm.draft.proposers.stepping import read
from lookahead_vllm.draft.trie.namespaces import digest_of
from lookahead_vllm.draft.trie.suffix import NUM_HASHES, empty_hashes
from lookahead_vllm.draft.trie.table import TIME_SHIFT, USE, Trie, spaces_of
from lookahead_vllm.options.server import LookaheadOptions

VOCAB = 500
PIECES = Pieces(np.ones((2, NUM_HASHES), np.uint64), np.array([2, 1]), np.arange(3, dtype="i4"))


def make_proposer() -> NGramTrieProposer:
    return NGramTrieProposer(LookaheadOptions(proposer="ngram_trie", max_nodes=1 << 22))


def ngrams_of(proposer: NGramTrieProposer) -> list[tuple[int, int]]:
    """The n-grams of all namespaces and how often they occurred, without the time."""
    edges = proposer.trie.edges[spaces_of(proposer.trie.edges) > 0]
    edges[:, USE] &= (1 << TIME_SHIFT) - 1
    return sorted(map(tuple, edges.tolist()))


def test_texts_of_others_are_inserted_in_parts_until_a_step_begins():
    proposer = make_proposer()
    member, queue = Member(proposer), proposer.insertion
    tokens = np.arange(10 * CHUNK_TOKENS, dtype=np.int32)
    member.put(digest_of(""), Pieces(empty_hashes()[None], np.array([len(tokens)]), tokens))
    queue.seconds_since_step = iter([1.0, 1.0, 0.0]).__next__  # type: ignore[method-assign]
    member.insert_if_idle()
    assert queue.num_arrived == 8 * CHUNK_TOKENS


@pytest.mark.parametrize("steps_between", [1, 4, 1000])
def test_the_n_grams_of_both_members_are_equal(steps_between):
    """Requests of two namespaces run side by side, end, and others get their rows."""
    rng = np.random.default_rng(3)
    here, there = make_proposer(), make_proposer()
    sent, received = Member(here), Member(there)

    def text(length: int) -> list[int]:
        """Few tokens follow the same one, so no n-gram displaces another."""
        steps = rng.integers(1, 3, length)
        return (np.cumsum(steps) % VOCAB).tolist()

    def exchange() -> None:
        for digest, pieces in sent.take().items():
            for message in messages_of(pieces):
                received.put(digest, unpack(message, VOCAB))
        while there.insertion.insert_arrived():
            pass

    there.start("follows", [1], "team")
    left: dict[str, list[int]] = {}
    for step in range(100):
        while len(left) < 5:
            name = f"{step}-{len(left)}"
            here.start(name, text(40), "team" if len(left) % 2 else "")
            left[name] = text(int(rng.integers(1, 40)))
        sizes = rng.integers(0, 4, len(left)).tolist()
        read(here, {name: left[name][:size] for name, size in zip(left, sizes, strict=True)})
        left = {name: left[name][size:] for name, size in zip(left, sizes, strict=True)}
        for name in [name for name, rest in left.items() if not rest]:
            here.finish(name)
            del left[name]
        if step % steps_between == 0:
            exchange()
    exchange()
    assert len(ngrams_of(here)) > 1000
    assert ngrams_of(here) == ngrams_of(there)


def test_long_pieces_become_several_messages_and_too_long_ones_none():
    sizes = np.array([1000] * 300 + [MAX_MESSAGE_BYTES // 4 + 1])
    pieces = Pieces(
        np.arange(len(sizes) * NUM_HASHES, dtype=np.uint64).reshape(-1, NUM_HASHES),
        sizes,
        np.arange(sizes.sum(), dtype=np.int32) % VOCAB,
    )
    messages = [unpack(message, VOCAB) for message in messages_of(pieces)]
    assert len(messages) > 1
    tokens = np.concatenate([message.tokens for message in messages])
    assert np.array_equal(tokens, pieces.tokens[: 300 * 1000])
    hashes = np.concatenate([message.hashes for message in messages])
    assert np.array_equal(hashes, pieces.hashes[:300])


@pytest.mark.parametrize("cut", [0, 3, 4, 11, -1])
def test_a_message_that_is_cut_or_extended_is_refused(cut):
    (message,) = messages_of(PIECES)
    assert unpack(message, 3).tokens.tolist() == [0, 1, 2]
    for wrong in (message[:cut], message + b"\0\0\0\0"):
        with pytest.raises(MessageError):
            unpack(wrong, 3)
    with pytest.raises(MessageError, match="the token 2"):
        unpack(message, 2)


def test_no_step_compiles_the_kernel_that_inserts_pieces():
    Member(make_proposer())
    before = len(_insert.signatures)
    inserted = unpack(messages_of(PIECES)[0], VOCAB)
    inserter(Trie(1024), 1, inserted)(inserted.tokens[:2])
    assert before == len(_insert.signatures) > 0
