"""The texts of requests in the trie: inserted newest first, and kept for the next turn.

A conversation comes back with each turn, a little longer. So the private space of a request stays
when the request ends, and a later one whose prompt begins with the same tokens takes it over, as
vLLM finds cached blocks. What the earlier text had more is taken back, so a space holds n-grams of
the text that its request has itself, and of nothing else.
"""

from collections import OrderedDict, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from lookahead_vllm.draft.insertion import CHUNK_TOKENS, InsertionQueue
from lookahead_vllm.draft.jit import Int32s, Int64s, kernel
from lookahead_vllm.draft.trie.table import MAX_LIVE_SPACES, NO_SPACE, Trie, count_present

MIN_TOKENS = 512
"""Shorter prompts are not kept: they are inserted in 0.2 ms."""

MAX_ANSWER_TOKENS = 8192
"""The text of a longer answer is not kept, nor its prompt's."""

EXPECTED_ANSWER_TOKENS = 2048
"""A private space has slots for twice as many tokens as its prompt and such an answer. A longer
text gets a new space; the oldest edges of a longer answer are replaced."""

BLOCK_TOKENS = 64
"""Prefixes of so many tokens, or a multiple, are compared by hash."""

MAX_CHANGED_TOKENS = 64
"""The next turn may have other tokens in place of so many last ones of a prompt: chat templates end
it as an answer begins."""

MAX_GENERATION_PROMPT = 16
"""The most tokens with which a chat template begins an answer, behind the last tool result."""

MAX_REMOVED_TOKENS = 4096
"""The most tokens that are taken back at a time, in about 2 ms."""

MAX_IDLE = MAX_LIVE_SPACES // 2
"""The most texts that are kept without a live request."""

MAX_COMPARED = 8
"""The most texts with one prefix to which a prompt is compared."""


@dataclass(eq=False)
class Spelling:
    """A part of a prompt in another spelling, int32 [n], inserted but for the first `left` tokens.

    It belongs to the first `end` tokens of the prompt.
    """

    tokens: Int32s
    end: int
    left: int


@dataclass(eq=False)
class Session:
    """A text in a private space, which live requests may share.

    Attributes
    ----------
    space : int
    tokens : int32 [n]
        The prompt, and once no request is live, the answer that was inserted behind it.
    num_prompt : int
        The length of the prompt.
    room : int
        The most tokens of a prompt for which the space is large enough.
    key : tuple or None
        The namespace's digest and the hash of most of the prompt; None if the text is not kept.
    users : int
        The live requests.
    pending : list of tuple of int
        The parts of the prompt that are not inserted yet, as (start, end), the oldest first.
    spellings : list of Spelling
        The oldest first.
    has_memory : bool
        Whether all memory of the space is allocated.
    """

    trie: Trie
    space: int
    tokens: Int32s
    num_prompt: int
    room: int
    key: tuple[str, int] | None
    users: int = 1
    pending: list[tuple[int, int]] = field(default_factory=list)
    spellings: list[Spelling] = field(default_factory=list)
    has_memory: bool = False

    def insert_chunk(self) -> bool:
        """Insert the newest CHUNK_TOKENS tokens that are pending; whether more are left.

        First, each turn allocates a page for them.
        """
        self.has_memory = self.has_memory or not self.trie.allocate(self.space)
        if not self.has_memory:
            return True
        waiting = [one for one in self.spellings if one.left]
        if self.pending:
            start, end = self.pending.pop()
            middle = max(start, end - CHUNK_TOKENS)
            if start < middle:
                self.pending.append((start, middle))
            self.trie.insert_before(self.space, self.tokens, middle, end)
        elif waiting:
            one = waiting[-1]
            end, one.left = one.left, max(0, one.left - CHUNK_TOKENS)
            self.trie.insert_before(self.space, one.tokens, one.left, end)
            return len(waiting) > 1 or one.left > 0
        return bool(self.pending or waiting)

    def spell(self, texts: Sequence[Int32s]) -> None:
        """Insert parts of the prompt in another spelling, but none twice, and while there is room:
        a prompt that was cut may come again and again, with other results."""
        known = {one.tokens.tobytes() for one in self.spellings}
        left = self.room - sum(len(one.tokens) for one in self.spellings)
        for tokens in texts:
            if (text := tokens.tobytes()) not in known and len(tokens) <= left:
                known.add(text)
                left -= len(tokens)
                self.spellings.append(Spelling(tokens, self.num_prompt, len(tokens)))

    def lost_spellings(self, prompt: Int32s, num_common: int) -> list[Spelling]:
        """Those whose text a prompt lacks that has only the first `num_common` tokens.

        It may lack the end that the template gives all prompts, which it then has as its own.
        """
        lost = set()
        for end in {one.end for one in self.spellings if one.end > num_common}:
            behind = self.tokens[num_common:end]
            own_end = prompt[max(num_common, len(prompt) - len(behind)) :]
            if len(behind) > MAX_GENERATION_PROMPT or not np.array_equal(behind, own_end):
                lost.add(end)
        return [one for one in self.spellings if one.end in lost]

    def continue_with(self, prompt: Int32s, num_common: int) -> bool:
        """Take back what is behind the first `num_common` tokens, and let the prompt follow; False
        if that would be more than MAX_REMOVED_TOKENS."""
        lost = self.lost_spellings(prompt, num_common)
        num_lost = sum(len(one.tokens) - one.left for one in lost)
        if len(self.tokens) - num_common + num_lost > MAX_REMOVED_TOKENS:
            return False
        for one in reversed(lost):
            self.spellings.remove(one)
            self.trie.remove(self.space, one.tokens, one.left, len(one.tokens))
        for one in self.spellings:
            if one.end > num_common:
                one.end = len(prompt)
        end = len(self.tokens)
        for start, stop in [*self.pending[::-1], (0, 0)]:
            self.trie.remove(self.space, self.tokens, max(stop, num_common), end)
            end = min(start, end)
            if start <= num_common:
                break
        self.pending = [
            (start, min(stop, num_common)) for start, stop in self.pending if start < num_common
        ]
        if num_common < len(prompt):
            self.pending.append((num_common, len(prompt)))
        self.tokens, self.num_prompt = prompt, len(prompt)
        return True

    def forget_answer(self, answer: Int32s) -> None:
        """Take back an answer to the prompt, while other requests are live."""
        text = np.concatenate((self.tokens, answer))
        self.trie.remove(self.space, text, len(self.tokens), len(text))


class Sessions:
    """The texts of live requests, and of ended ones, the least recently used of which go first."""

    def __init__(self, trie: Trie, queue: InsertionQueue) -> None:
        self._trie, self._queue = trie, queue
        self._all: dict[int, Session] = {}
        """By space."""
        self._idle: OrderedDict[int, Session] = OrderedDict()
        """Those without a live request, by space, the least recently used first."""
        self._by_key: defaultdict[tuple[str, int], list[Session]] = defaultdict(list)

    def open(
        self,
        digest: str | None,
        prompt: Int32s,
        num_further: int = 0,
        spellings: Sequence[Int32s] = (),
    ) -> Session | None:
        """The session of a new request, whose prompt is queued for insertion; None if there are no
        more spaces.

        With the `digest` of a namespace, a session of the same namespace with the same prefix is
        taken over, and kept for later ones. There is room for `num_further` tokens beside the
        prompt, its `spellings` up to the prompt's length, and the answer.
        """
        num_further += min(len(prompt), sum(map(len, spellings)))
        hashes: list[int] = []
        if digest is not None and len(prompt) >= MIN_TOKENS:
            hashes = prefix_hashes(prompt, BLOCK_TOKENS).tolist()
        num_hashed = max(len(prompt) - MAX_CHANGED_TOKENS, 0) // BLOCK_TOKENS if hashes else 0
        key = (digest, hashes[num_hashed - 1]) if digest is not None and num_hashed else None
        session = self._find(digest, prompt, hashes) if digest is not None else None
        if session is None:
            expected = len(prompt) + num_further + EXPECTED_ANSWER_TOKENS
            space = self._new_space(expected)
            if space == NO_SPACE:
                return None
            session = Session(self._trie, space, prompt, len(prompt), 2 * expected, key)
            session.pending += [(0, len(prompt))] if len(prompt) else []
            self._all[space] = session
        else:
            self._drop_key(session)
            session.key = key
        if key is not None:
            self._by_key[key].append(session)
        session.spell(spellings)
        if session.pending or any(one.left for one in session.spellings):
            self._queue.add_work(session.space, session)
        return session

    def close(self, session: Session, answer: Int32s | None) -> None:
        """One of the session's requests has ended.

        `answer` are the tokens that it has inserted behind the prompt; None if the text cannot be
        kept.
        """
        session.users -= 1
        most = MAX_REMOVED_TOKENS if session.users else MAX_ANSWER_TOKENS
        if answer is None or len(answer) > most:
            self._drop_key(session)
        elif session.users and session.key is not None:
            session.forget_answer(answer)
        elif session.key is not None:
            session.tokens = np.concatenate((session.tokens, answer))
            self._idle[session.space] = session
        if not session.users and session.key is None:
            self._forget(session)

    def sample(self, num_samples: int) -> tuple[int, int]:
        """Of n-grams at places drawn from all texts: how many there are, and how many of them the
        trie holds."""
        sizes = np.array([session.num_prompt for session in self._all.values()], np.int64)
        if not sizes.sum():
            return 0, 0
        rng = np.random.default_rng(0)
        drawn = rng.choice(len(sizes), num_samples, p=sizes / sizes.sum())
        num_all = num_held = 0
        sessions = list(self._all.values())
        for at, count in zip(*np.unique(drawn, return_counts=True), strict=True):
            session = sessions[at]
            places = rng.integers(0, session.num_prompt, count)
            counts = count_present(self._trie.arrays, session.space, session.tokens, places)
            num_all, num_held = num_all + counts[0], num_held + counts[1]
        return num_all, num_held

    def _find(self, digest: str, prompt: Int32s, hashes: list[int]) -> Session | None:
        """The session with the longest prefix of the prompt that can be taken over, which is done;
        one of live requests only if the prompts are equal."""
        for value in reversed(hashes):
            for session in self._by_key.get((digest, value), ())[: -MAX_COMPARED - 1 : -1]:
                num_common = _num_common(session.tokens, prompt)
                if session.users:
                    if num_common == len(prompt) == session.num_prompt:
                        session.users += 1
                        return session
                elif (
                    num_common >= session.num_prompt - MAX_CHANGED_TOKENS
                    and len(prompt) <= session.room
                    and session.continue_with(prompt, num_common)
                ):
                    del self._idle[session.space]
                    session.users = 1
                    return session
        return None

    def _new_space(self, num_tokens: int) -> int:
        """A space beside those of all sessions if there is room after the idle ones have gone."""
        while self._idle:
            if len(self._idle) < MAX_IDLE:
                space = self._trie.new_private(num_tokens, may_overlap=False)
                if space != NO_SPACE:
                    return space
            self._forget(self._idle.popitem(last=False)[1])
        return self._trie.new_private(num_tokens)

    def _forget(self, session: Session) -> None:
        self._drop_key(session)
        del self._all[session.space]
        self._queue.drop(session.space)
        self._trie.eliminate(session.space)

    def _drop_key(self, session: Session) -> None:
        if session.key is not None:
            same = self._by_key[session.key]
            same.remove(session)
            if not same:
                del self._by_key[session.key]
            session.key = None


def _num_common(a: Int32s, b: Int32s) -> int:
    """The number of tokens with which both begin."""
    size = min(len(a), len(b))
    differs = a[:size] != b[:size]
    first = int(differs.argmax()) if size else 0
    return first if size and differs[first] else size


@kernel
def prefix_hashes(tokens: Int32s, block: int) -> Int64s:
    """A hash of each prefix of a multiple of `block` tokens, int64 [n]. Equal prefixes have equal
    hashes; whether they are equal is for the tokens to say."""
    hashes = np.empty(len(tokens) // block, np.int64)
    state = np.uint64(0)
    for i in range(len(hashes) * block):
        state = (state ^ np.uint64(tokens[i] + 2)) * np.uint64(0x9E3779B97F4A7C15)
        state ^= state >> np.uint64(29)
        if i % block == block - 1:
            hashes[i // block] = np.int64(state)
    return hashes
