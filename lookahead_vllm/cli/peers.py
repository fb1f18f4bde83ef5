"""vLLM's other methods without a draft model, as proposers, to replay them beside ours.

Each inserts a prompt as in its engine: at once.
"""

from __future__ import annotations

from abc import abstractmethod
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
"""Of prompt lookup, as in vLLM's examples; its default, 5 and 5, drafts less."""


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


class PromptLookup(Peer):
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


PEERS: dict[str, type[Peer]] = {
    "suffix": Suffix,
    "suffix_trees": SuffixTrees,
    "prompt_lookup": PromptLookup,
}
