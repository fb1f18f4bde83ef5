"""Pieces of answers, and the format in which members send them to each other.

A message holds, in little-endian order: the number of pieces (u32), their sizes (u32 each), the
hashes of the text before each piece (u64 [NUM_HASHES] each), and the tokens of all pieces (u32
each). With the hashes, a piece is inserted as if its request had run here; they cover the last
tokens before the piece (`draft/trie/suffix.py`), so no more of the prompt is sent.
"""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from lookahead_vllm.draft.jit import Int32s, Int64s, kernel
from lookahead_vllm.draft.trie.suffix import NUM_HASHES, Hashes
from lookahead_vllm.draft.trie.table import Trie, TrieArrays, insert_text

FORMAT = 1
"""The version of the format. Raise it when the format, the hashes or the suffixes change."""

MAX_MESSAGE_BYTES = 1 << 20
"""Longer messages are refused."""


class MessageError(ValueError):
    """A message is malformed."""


class Pieces(NamedTuple):
    """Pieces of several answers."""

    hashes: Hashes
    """uint64 [p, NUM_HASHES]: of the text before each piece."""
    sizes: Int64s
    """int64 [p]: the number of tokens of each piece."""
    tokens: Int32s
    """int32 [n]: the tokens of all pieces, one after another."""


def messages_of(pieces: Pieces) -> list[bytes]:
    """The pieces as messages; a piece that is too long for one is left out."""
    num_bytes = 4 + 8 * NUM_HASHES + 4 * pieces.sizes
    numbers = np.cumsum(num_bytes) // (MAX_MESSAGE_BYTES // 2)
    owners = np.repeat(numbers, pieces.sizes)
    messages = [
        _pack(Pieces(pieces.hashes[own], pieces.sizes[own], pieces.tokens[owners == number]))
        for number in np.unique(numbers)
        for own in [numbers == number]
    ]
    return [message for message in messages if len(message) <= MAX_MESSAGE_BYTES]


def _pack(pieces: Pieces) -> bytes:
    return b"".join(
        (
            np.uint32(len(pieces.sizes)).astype("<u4").tobytes(),
            pieces.sizes.astype("<u4").tobytes(),
            pieces.hashes.astype("<u8").tobytes(),
            pieces.tokens.astype("<u4").tobytes(),
        )
    )


def unpack(message: bytes, vocab_size: int) -> Pieces:
    """The pieces in a message.

    Raises
    ------
    MessageError
        The message is too long, its parts do not fit together, a piece is empty, or a token is not
        in the vocabulary.
    """
    if not 4 <= len(message) <= MAX_MESSAGE_BYTES:
        raise MessageError(f"it has {len(message)} bytes")
    count = int.from_bytes(message[:4], "little")
    hashes_at = 4 + 4 * count
    tokens_at = hashes_at + 8 * NUM_HASHES * count
    if tokens_at > len(message):
        raise MessageError(f"it has {len(message)} bytes, too few for {count} pieces")
    sizes = np.frombuffer(message, "<u4", count, 4).astype(np.int64)
    if not sizes.all() or not count:
        raise MessageError("it has a piece without a token, or no piece")
    if tokens_at + 4 * int(sizes.sum()) != len(message):
        raise MessageError(f"it has {len(message)} bytes, which its sizes contradict")
    tokens = np.frombuffer(message, "<u4", -1, tokens_at)
    if len(tokens) and tokens.max() >= vocab_size:
        raise MessageError(f"it has the token {tokens.max()}, and {vocab_size} is the vocabulary")
    hashes = np.frombuffer(message, "<u8", count * NUM_HASHES, hashes_at).astype(np.uint64)
    return Pieces(hashes.reshape(count, NUM_HASHES), sizes, tokens.astype(np.int32))


def inserter(trie: Trie, space: int, pieces: Pieces) -> Callable[[Int32s], None]:
    """A function that inserts the next tokens of these pieces, int32 [n], into a space."""
    ends, inserted = np.cumsum(pieces.sizes), 0

    def insert(tokens: Int32s) -> None:
        nonlocal inserted
        _insert(trie.arrays, space, pieces.hashes, ends, inserted, tokens)
        inserted += len(tokens)

    return insert


@kernel
def _insert(
    trie: TrieArrays, space: int, hashes: Hashes, ends: Int64s, first: int, tokens: Int32s
) -> None:
    """Insert `tokens` of pieces that end at `ends`; `first` tokens were inserted before."""
    piece = np.searchsorted(ends, first, side="right")
    start = 0
    while start < len(tokens):
        end = min(np.int64(len(tokens)), ends[piece] - first)
        insert_text(trie, space, hashes[piece], tokens[start:end], True)
        start = end
        piece += 1
