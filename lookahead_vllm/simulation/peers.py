"""vLLM's other methods without a draft model, as proposers, to replay them beside ours.

Each inserts a prompt as in its engine: at once.
"""

from abc import abstractmethod
from collections import Counter
from collections.abc import Sequence
from importlib import import_module
from itertools import count
from typing import Any

import numpy as np

from lookahead_vllm.draft.jit import Int32s
from lookahead_vllm.draft.proposers.proposer import TextByText
from lookahead_vllm.draft.proposers.stepping import ENDLESS
from lookahead_vllm.draft.tree import DraftTree
from lookahead_vllm.options.allowed import OptionError

MIN_NGRAM, MAX_NGRAM = 2, 5
"""Of `ngram`, as in vLLM's examples; its default, 5 and 5, drafts less."""


class Peer(TextByText):
    """Drafts for each request, from its text: a chain, unless it overrides `tree`."""

    def __init__(self) -> None:
        self._numbers = count()
        self._rows: dict[str, int] = {}
        self._texts: dict[int, Int32s] = {}
        """By row: an array with room behind the text."""
        self._sizes: dict[int, int] = {}

    @abstractmethod
    def chain(self, row: int, text: Int32s, most: int) -> Sequence[int]:
        """At most so many tokens to follow the text."""

    def begin(self, row: int, prompt: Int32s) -> None:
        """A text begins."""

    def add(self, row: int, tokens: Sequence[int]) -> None:
        """The text goes on with these tokens."""
        size = self._sizes[row]
        if size + len(tokens) > len(self._texts[row]):
            self._texts[row] = np.resize(self._texts[row], 2 * (size + len(tokens)))
        self._texts[row][size : size + len(tokens)] = tokens
        self._sizes[row] = size + len(tokens)

    def end(self, row: int) -> None:
        """The text has ended."""

    def start(self, request_id: str, prompt: Sequence[int], *rest: Any) -> None:
        self.finish(request_id)
        row = self._rows[request_id] = next(self._numbers)
        self._texts[row], self._sizes[row] = np.array(prompt, np.int32), len(prompt)
        self.begin(row, self._texts[row])

    def text_of(self, request_id: str) -> int:
        return self._rows[request_id]

    def tree(self, text: int, max_nodes: int, max_depth: int, may_branch: bool) -> DraftTree:
        own = self._texts[text][: self._sizes[text]]
        return DraftTree.chain(self.chain(text, own, min(max_nodes, max_depth)))

    def finish(self, request_id: str) -> None:
        row = self._rows.pop(request_id, None)
        if row is not None:
            self.end(row)
            del self._texts[row], self._sizes[row]


class Ngram(Peer):
    """vLLM's `ngram`, by vLLM's own function."""

    def __init__(self) -> None:
        super().__init__()
        try:
            from vllm.v1.spec_decode import ngram_proposer
        except ImportError as error:
            raise OptionError(f"it is vLLM's, which cannot be imported ({error})") from None
        self._find = ngram_proposer._find_longest_matched_ngram_and_propose_tokens

    def chain(self, row: int, text: Int32s, most: int) -> Sequence[int]:
        found: list[int] = self._find(text, MIN_NGRAM, MAX_NGRAM, ENDLESS, most).tolist()
        return found


class Suffix(Peer):
    """vLLM's `suffix`, by arctic-inference, with vLLM's defaults."""

    DEPTH, REQUESTS = 24, 10000
    FACTOR, OFFSET, MIN_PROBABILITY = 1.0, 0.0, 0.1

    def __init__(self) -> None:
        super().__init__()
        try:
            arctic: Any = import_module("arctic_inference.suffix_decoding")
        except ImportError:
            raise OptionError(
                "it needs arctic-inference: pip install --no-deps arctic-inference==0.3.0"
            ) from None
        self._cache = arctic.SuffixDecodingCache(
            max_tree_depth=self.DEPTH, max_cached_requests=self.REQUESTS
        )

    def begin(self, row: int, prompt: Int32s) -> None:
        self._cache.start_request(row, prompt)

    def add(self, row: int, tokens: Sequence[int]) -> None:
        super().add(row, tokens)
        self._cache.add_active_response(row, tokens)

    def chain(self, row: int, text: Int32s, most: int) -> Sequence[int]:
        chain: list[int] = list(self._speculate(row, text, most).token_ids)
        return chain

    def _speculate(self, row: int, text: Int32s, most: int, as_tree: bool = False) -> Any:
        return self._cache.speculate(
            row,
            text[-self.DEPTH :],
            max_spec_tokens=most,
            max_spec_factor=self.FACTOR,
            max_spec_offset=self.OFFSET,
            min_token_prob=self.MIN_PROBABILITY,
            use_tree_spec=as_tree,
        )

    def end(self, row: int) -> None:
        self._cache.stop_request(row)


class SuffixTrees(Suffix):
    """Trees of arctic-inference, which vLLM does not use, with the limits that suit them best."""

    FACTOR, OFFSET, MIN_PROBABILITY = 8.0, 4.0, 0.02

    def tree(self, text: int, max_nodes: int, max_depth: int, may_branch: bool) -> DraftTree:
        """See TextByText. Nodes may be deeper than `max_depth`; these are not sent."""
        own = self._texts[text][: self._sizes[text]]
        draft = self._speculate(text, own, max_nodes, as_tree=True)
        return DraftTree.from_lists(draft.token_ids, draft.parents)


class SuffixV2(Peer):
    """vLLM's `suffix` for Model Runner V2 (commit 05084858, after 0.33), with its defaults.

    It copies what followed the longest match of the text's end, at most `DEPTH` tokens long: in
    the text itself (the last place) or in the corpus of finished answers, if the match there is
    longer. A table on the last two tokens and one on the last four name places of the corpus, of
    which those that match far enough vote. Chains are always as long as they may be: after the end
    of a copy, the last token fills them. Adaptive verification, which would cut them, is left out.
    """

    DEPTH = 24
    CORPUS_TOKENS = 1_000_000
    """The oldest answers go. (vLLM's ring also leaves its end empty when one does not fit.)"""
    KEYS = (2, 4)
    SLOTS = 8
    """A key has the last place in the newest answer of each of so many classes: those whose numbers
    have the same remainder."""
    PROMPT_TOKENS = 3
    """The end of the prompt, which is stored before each answer."""

    def __init__(self) -> None:
        super().__init__()
        self._starts: dict[int, int] = {}
        self._answers: dict[int, list[int]] = {}
        """By number, the oldest first."""
        self._num_answers = self._num_tokens = 0
        self._places: dict[tuple[int, ...], tuple[int, int]] = {}
        """By class and key: the number of an answer, and the place after the key in it."""

    def begin(self, row: int, prompt: Int32s) -> None:
        self._starts[row] = max(len(prompt) - self.PROMPT_TOKENS, 0)

    def end(self, row: int) -> None:
        answer: list[int] = self._texts[row][self._starts.pop(row) : self._sizes[row]].tolist()
        number, self._num_answers = self._num_answers, self._num_answers + 1
        self._answers[number] = answer
        self._num_tokens += len(answer)
        for size in self.KEYS:
            for place in range(size, len(answer)):
                key = number % self.SLOTS, *answer[place - size : place]
                self._places[key] = number, place
        while self._num_tokens > self.CORPUS_TOKENS:
            self._num_tokens -= len(self._answers.pop(next(iter(self._answers))))

    def chain(self, row: int, text: Int32s, most: int) -> Sequence[int]:
        length, place = longest_match(text, self.DEPTH)
        chain = text[place : place + most].tolist() if length else []
        in_corpus, voted = self._in_corpus(text[-self.DEPTH :].tolist(), most)
        if in_corpus > length:
            chain = voted
        return chain + [int(text[-1])] * (most - len(chain))

    def _in_corpus(self, end: list[int], most: int) -> tuple[int, list[int]]:
        """The length of the match in the corpus, and what its places vote for.

        The places with at least as long a match as one of them vote together. Of all such votes,
        the one with the highest expected number of right tokens wins, then the longer match.
        """
        lengths: dict[tuple[int, int], int] = {}
        for size in self.KEYS:
            for slot in range(self.SLOTS):
                number, place = self._places.get((slot, *end[-size:]), (-1, 0))
                if number in self._answers:
                    before = self._answers[number][:place]
                    lengths[number, place] = common_end(before, end)
        best: tuple[float, int, list[int]] = 0.0, 0, []
        for length in set(lengths.values()):
            places = sorted((one for one in lengths if lengths[one] >= length), reverse=True)
            following = [self._answers[number][at : at + most] for number, at in places]
            score, chain = vote(following)
            best = max(best, (score, length, chain))
        return best[1:]


def longest_match(text: Int32s, depth: int) -> tuple[int, int]:
    """The longest end of the text that occurs in it earlier, at most `depth` tokens: its length and
    the place after its last occurrence; (0, 0) if the last token is new."""
    places, length = np.flatnonzero(text[:-1] == text[-1]) + 1, 1
    if not len(places):
        return 0, 0
    while length < depth:
        longer = places[places > length]
        longer = longer[text[longer - 1 - length] == text[-1 - length]]
        if not len(longer):
            break
        places, length = longer, length + 1
    return length, int(places[-1])


def common_end(one: Sequence[int], other: Sequence[int]) -> int:
    """How many tokens two texts have in common at their ends."""
    pairs = zip(reversed(one), reversed(other), strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(one), len(other)))


def vote(texts: Sequence[list[int]]) -> tuple[float, list[int]]:
    """The chain that texts vote for, token by token, and the expected number of right tokens.

    A text whose token loses votes no more. Of tokens with equally many votes, that of the first
    text wins.
    """
    chain: list[int] = []
    score, share = 0.0, 1.0
    while tokens := Counter(text[len(chain)] for text in texts if len(text) > len(chain)):
        token, count = tokens.most_common(1)[0]
        share *= count / len(texts)
        score += share
        chain.append(token)
        texts = [text for text in texts if text[: len(chain)] == chain]
    return score, chain


PEERS: dict[str, type[Peer]] = {
    "suffix": Suffix,
    "suffix_v2": SuffixV2,
    "suffix_trees": SuffixTrees,
    "ngram": Ngram,
}
