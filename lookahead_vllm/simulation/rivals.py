"""Other drafters without a draft model: prompt lookup and arctic-inference."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import Any

import numpy as np

from lookahead_vllm.draft.options import OptionError
from lookahead_vllm.draft.proposer import DraftLimits
from lookahead_vllm.draft.tree import DraftTree
from lookahead_vllm.simulation.traces import Int32s


@dataclass(frozen=True)
class PromptLookupOptions:
    """The n-gram lengths of prompt lookup; the defaults are those that scripts/bench.py sets."""

    prompt_lookup_max: int = 5
    prompt_lookup_min: int = 2

    def __post_init__(self) -> None:
        if not 1 <= self.prompt_lookup_min <= self.prompt_lookup_max:
            raise OptionError(
                f"prompt_lookup_min={self.prompt_lookup_min} was given, but it must be 1 to "
                f"prompt_lookup_max={self.prompt_lookup_max}"
            )


def look_up(context: Int32s, longest: int, shortest: int, max_tokens: int) -> Int32s:
    """The tokens after the first earlier occurrence of the longest n-gram that ends the text.

    Equivalent to vLLM's `ngram_proposer._find_longest_matched_ngram_and_propose_tokens`.

    Parameters
    ----------
    context : int32 [n]
        The text so far.
    longest, shortest : int
        The bounds of the n-gram's length, in tokens.
    max_tokens : int
        The maximum number of tokens returned; there are fewer if the text ends.

    Returns
    -------
    int32 [at most max_tokens]
        Empty if no n-gram occurs earlier.
    """
    last = len(context) - 1
    ends = np.flatnonzero(context[:last] == context[last]) if last > 0 else context[:0]
    found = -1
    for length in range(1, longest + 1):
        if len(ends) == 0:
            break
        if length >= shortest:
            found = int(ends[0]) + 1
        ends = ends[ends >= length]
        ends = ends[context[ends - length] == context[last - length]]
    return context[found : found + max_tokens] if found >= 0 else context[:0]


class PromptLookup:
    """vLLM's `ngram`: drafts a chain from the request's own text, and keeps no cache."""

    def __init__(self, options: PromptLookupOptions) -> None:
        self.options = options

    def start(self, request_id: str, prompt: Int32s) -> None:
        """Nothing to do: the engine keeps the text."""

    def extend(self, request_id: str, tokens: list[int]) -> None:
        """Nothing to do: the engine keeps the text."""

    def propose(self, limit: DraftLimits, context: Int32s) -> Int32s:
        """The chain's tokens, int32 [at most limit.max_depth]."""
        options = self.options
        return look_up(
            context, options.prompt_lookup_max, options.prompt_lookup_min, limit.max_depth
        )

    def tree(self, draft: Int32s) -> DraftTree:
        """Convert the draft to a tree."""
        return DraftTree.chain(draft.tolist())

    def finish(self, request_id: str) -> None:
        """Nothing to do."""


@dataclass(frozen=True)
class SuffixOptions:
    """The arguments of arctic-inference; the defaults are those of vLLM's `suffix`."""

    max_tree_depth: int = 24
    max_cached_requests: int = 10_000
    max_spec_factor: float = 1.0
    max_spec_offset: float = 0.0
    min_token_prob: float = 0.1
    use_tree_spec: bool = False


def has_arctic_inference() -> bool:
    """Whether the package of `Suffix` is installed."""
    try:
        importlib.import_module("arctic_inference.suffix_decoding")
    except ImportError:
        return False
    return True


class Suffix:
    """arctic-inference's suffix decoding, called as vLLM's `suffix_decoding.py` calls it.

    Raises
    ------
    OptionError
        arctic-inference is not installed.
    """

    def __init__(self, options: SuffixOptions) -> None:
        try:
            from arctic_inference.suffix_decoding import SuffixDecodingCache
        except ImportError:
            raise OptionError(
                "suffix needs arctic-inference, which is not installed: run scripts/setup.sh "
                "--bench, or leave suffix out of --proposers"
            ) from None
        self.options = options
        self._cache: Any = SuffixDecodingCache(options.max_tree_depth, options.max_cached_requests)

    def start(self, request_id: str, prompt: Int32s) -> None:
        """Build the prompt's suffix tree."""
        self._cache.start_request(request_id, prompt)

    def extend(self, request_id: str, tokens: list[int]) -> None:
        """Add the tokens to the suffix trees of the request and of all answers."""
        self._cache.add_active_response(request_id, tokens)

    def propose(self, limit: DraftLimits, context: Int32s) -> Any:
        """Draft a chain or a tree; returns a `SuffixDecodingDraft`."""
        options = self.options
        return self._cache.speculate(
            limit.request_id,
            context[-options.max_tree_depth :],
            max_spec_tokens=limit.max_nodes,
            max_spec_factor=options.max_spec_factor,
            max_spec_offset=options.max_spec_offset,
            min_token_prob=options.min_token_prob,
            use_tree_spec=options.use_tree_spec,
        )

    def tree(self, draft: Any) -> DraftTree:
        """Convert the draft to a tree."""
        return DraftTree.from_lists(draft.token_ids, draft.parents, draft.probs)

    def finish(self, request_id: str) -> None:
        """Drop the prompt's suffix tree; the answer stays in the other one."""
        self._cache.stop_request(request_id)
