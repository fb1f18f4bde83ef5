"""Draft trees under a grammar: remove forbidden nodes, add dictated ones, mask every node."""

import functools
import math
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import vllm
from numpy.typing import NDArray
from vllm.v1.core.sched.output import GrammarOutput
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager
from vllm.v1.structured_output.backend_guidance import GuidanceGrammar
from vllm.v1.structured_output.backend_types import StructuredOutputGrammar

from lookahead_vllm.draft.sources import GRAMMAR
from lookahead_vllm.draft.tree import DraftTree
from lookahead_vllm.engine import patches

MAX_TOKEN_LENGTH = 16
"""Characters of a dictated text that are encoded for each token that may be drafted."""

EQUALLY_MANY_MASKS = vllm.__version_tuple__ >= (0, 33)
"""From vLLM 0.33 on, all requests of a step must have the same number of masks."""


def numbers_of_masks(most: int) -> list[int]:
    """How many masks a request may have where all have equally many: powers of two below `most`,
    and `most`. The workers have a kernel for each number."""
    return [*(1 << i for i in range((most - 1).bit_length())), most]


def joined_masks(
    req_ids: Sequence[str],
    masks: Sequence[NDArray[np.int32]],
    num_nodes: Sequence[int],
    numbers: Sequence[int] = (),
) -> GrammarOutput:
    """vLLM's message of the masks of a step.

    Parameters
    ----------
    masks
        For each of `req_ids`, int32 [1 + nodes, ceil(vocabulary / 32)]; further rows are not read.
    num_nodes
        The number of scheduled nodes of each request.
    numbers
        How many masks a request may have where all have equally many, rising; any by default.
    """
    if EQUALLY_MANY_MASKS:
        most = max(map(len, masks))  # vLLM reads only the rows of scheduled tokens
        num_rows = next((n for n in numbers if n >= most), most)
        masks = [np.pad(mask, ((0, num_rows - len(mask)), (0, 0))) for mask in masks]
    return GrammarOutput(list(req_ids), np.concatenate(masks), list(num_nodes))


def split_masks(output: GrammarOutput, num_nodes: Sequence[int]) -> list[NDArray[np.int32]]:
    """The masks of each request in `joined_masks`."""
    masks = output.grammar_bitmask
    if EQUALLY_MANY_MASKS:
        return np.split(masks, len(num_nodes))
    return np.split(masks, np.cumsum(np.array(num_nodes) + 1)[:-1])


class GrammarTreeWalk:
    """Visits a draft tree depth first, while the request's grammar advances and rolls back.

    It uses only methods of the grammar that vLLM uses for chains (`accept_tokens`, `rollback`,
    `fill_bitmask`), so every backend serves trees. While a reasoning parser delays the grammar, the
    manager decides for each path where the grammar begins. Dictated tokens are added up to
    `max_nodes` and `max_depth`. Only nodes whose masks are filled within `seconds` of the `clock`
    are kept; the call that asks for a dictated text is not counted.
    """

    def __init__(
        self,
        manager: StructuredOutputManager,
        request: Request,
        tree: DraftTree,
        max_nodes: int,
        max_depth: int,
        seconds: float = math.inf,
        clock: Callable[[], float] = time.thread_time,
    ) -> None:
        assert manager.backend is not None and request.structured_output_request is not None
        self._manager = manager
        self._request = request
        self._grammar: StructuredOutputGrammar = request.structured_output_request.grammar
        self._tokens: list[int] = tree.tokens.tolist()
        self._parents: list[int] = tree.parents.tolist()
        self._probs: list[float] = tree.probs.tolist()
        self._sources: list[int] = tree.sources.tolist()
        self._children: list[list[int]] = [[] for _ in range(len(tree) + 1)]
        for node, parent in enumerate(self._parents):
            self._children[parent + 1].append(node)
        self._kept: set[int] = set()
        self._max_nodes = max_nodes
        self._max_depth = max_depth
        self._clock = clock
        self._deadline = clock() + seconds
        self._is_late = False
        self._mask: Any = manager.backend.allocate_token_bitmask(1 + len(tree))
        self._bits: NDArray[np.int32] = self._mask.numpy()
        self._is_delayed = manager._get_constraint_bounds(request, ()).constraint_start != 0
        """Whether the request may still be reasoning."""
        self._forbidden_ends: Sequence[int] = ()
        """Tokens that may not end the reasoning, because the grammar cannot begin with them."""
        if self._is_delayed and hasattr(manager, "_masked_reasoning_ends"):  # vLLM 0.33
            self._forbidden_ends = manager._masked_reasoning_ends(request)

    def masks(self) -> NDArray[np.int32]:
        """The masks of the unchanged tree, int32 [n + 1, ceil(vocabulary / 32)].

        A node that the grammar forbids, or below one, gets a mask that allows everything: the mask
        before it excludes its token, so it is never accepted.
        """
        self._max_nodes = 0
        self._visit(-1, [], self._state_after([])[1], True)
        return self._bits

    def run(self) -> DraftTree:
        """The tree without what the grammar forbids, and with the tokens that it dictates."""
        num_proposed = len(self._tokens)
        self._visit(-1, [], self._state_after([])[1], True)
        kept = [*sorted(self._kept), *range(num_proposed, len(self._tokens))]
        index = {-1: -1} | {node: i for i, node in enumerate(kept)}
        return DraftTree.from_lists(
            [self._tokens[node] for node in kept],
            [index[self._parents[node]] for node in kept],
            [self._probs[node] for node in kept],
            [self._sources[node] for node in kept],
        )

    def _visit(self, node: int, path: list[int], is_masked: bool, is_best: bool) -> bool:
        """Fill the mask of `node`, visit its children, and extend the best leaf.

        Returns whether the mask was filled in time. The grammar has accepted the tokens of `path`,
        which lead to `node`. `is_masked` says whether it masks the next token, `is_best` whether
        `path` has only first allowed children.
        """
        if is_masked:
            self._fill_mask(node)
        else:
            words = self._bits[node + 1].view(np.uint32)
            for token in self._forbidden_ends:
                words[token // 32] &= ~np.uint32(1 << token % 32)
        is_in_time = not self._is_late
        has_child = False
        for child in self._children[node + 1]:
            if self._visit_child(node, child, path, is_masked, is_best and not has_child):
                self._kept.add(child)
                has_child = True
        if is_best and is_masked and not has_child and not self._grammar.is_terminated():
            self._jump_ahead(node, path)
        return is_in_time

    def _visit_child(
        self, node: int, child: int, path: list[int], is_masked: bool, is_best: bool
    ) -> bool:
        """Visit `child` if the grammar allows it after `node`; returns whether it is kept."""
        if self._is_late:
            return False
        token = self._tokens[child]
        path = [*path, token]
        has_begun, is_child_masked = self._state_after(path)
        if has_begun and not (self._allows(node, token, is_masked) and self._advance(token)):
            return False
        try:
            return self._visit(child, path, is_child_masked, is_best)
        finally:
            if has_begun:
                self._grammar.rollback(1)

    def _jump_ahead(self, node: int, path: list[int]) -> None:
        """Append the tokens that the grammar dictates after a leaf, as a chain."""
        # If it begins below the root, all proposed nodes are forbidden.
        num_kept = 0 if node < 0 else len(self._tokens)
        most = min(self._max_nodes - num_kept, self._max_depth - len(path))
        if most <= 0 or self._is_late:
            return
        start = self._clock()
        tokens = self._dictated_tokens(node, most)[:most]
        self._deadline += self._clock() - start
        if not tokens:
            return
        before = self._mask
        self._mask = self._manager.backend.allocate_token_bitmask(len(before) + len(tokens))
        self._mask[: len(before)] = before
        self._bits = self._mask.numpy()
        num_added = 0
        try:
            for token in tokens:
                if not (self._allows(node, token, True) and self._advance(token)):
                    break
                num_added += 1
                self._fill_mask(len(self._tokens))
                if self._is_late:
                    break
                self._parents.append(node)
                self._tokens.append(token)
                self._probs.append(self._probs[node] if node >= 0 else 1.0)
                self._sources.append(GRAMMAR)
                node = len(self._tokens) - 1
        finally:
            if num_added:
                self._grammar.rollback(num_added)

    def _fill_mask(self, node: int) -> None:
        """Mask the tokens after `node`; after the grammar's end all are allowed."""
        if not self._grammar.is_terminated():
            self._grammar.fill_bitmask(self._mask, node + 1)
        self._is_late = self._clock() > self._deadline

    def _advance(self, token: int) -> bool:
        """Advance the grammar by `token`; False if it has ended, or forbids the token."""
        if self._grammar.is_terminated():
            return False
        return self._grammar.accept_tokens(self._request.request_id, [token])

    def _dictated_tokens(self, node: int, most: int) -> Sequence[int]:
        """The first tokens, at least `most`, of the only text that the grammar allows after `node`.

        The model may choose other tokens for the same text; verification then rejects these.
        """
        xgrammar = getattr(self._grammar, "matcher", None)
        if xgrammar is not None and (text := _whole_characters(xgrammar)):
            return _encoded(self._manager.tokenizer, text[: MAX_TOKEN_LENGTH * most])
        llguidance = getattr(self._grammar, "ll_matcher", None)
        if llguidance is not None and (tokens := llguidance.compute_ff_tokens()):
            return tokens
        words = np.flatnonzero(self._bits[node + 1])
        if len(words) == 1:
            word = int(self._bits[node + 1, words[0]]) & 0xFFFFFFFF
            if word.bit_count() == 1:
                return [int(words[0]) * 32 + word.bit_length() - 1]
        return []

    def _allows(self, node: int, token: int, is_masked: bool) -> bool:
        """Whether the grammar allows `token` after `node`."""
        if is_masked:
            word, bit = divmod(token, 32)
            return word < self._bits.shape[1] and bool(self._bits[node + 1, word] >> bit & 1)
        return bool(self._grammar.validate_tokens([token]))

    def _state_after(self, path: list[int]) -> tuple[bool, bool]:
        """Whether the grammar reads the last token of `path`, and whether it masks the next one."""
        if not self._is_delayed:
            return True, True
        bounds = self._manager._get_constraint_bounds(self._request, path)
        return bounds.grammar_start < len(path), bounds.constraint_start <= len(path)


def _whole_characters(xgrammar: Any) -> str:
    """xgrammar's dictated text, up to the first character of which it has only some bytes.

    The text begins with such a one if the grammar is inside a character, and ends with one if the
    next characters that the grammar allows have a first byte in common.
    """
    try:
        return xgrammar.find_jump_forward_string()
    except UnicodeDecodeError as error:
        return error.object[: error.start].decode()


@functools.cache
def accept_tokens_one_by_one() -> None:
    """Make llguidance's grammars accept a list of tokens as they accept single ones.

    vLLM's wrapper ignores a token after the grammar's end, as with `ignore_eos` or a thinking
    budget, but not if a list contains the end and the token.
    """
    patches.patch(GuidanceGrammar, "accept_tokens", _one_by_one)


def _one_by_one(original: Callable[..., bool]) -> Callable[..., bool]:
    @functools.wraps(original)
    def accept_tokens(self: Any, request_id: str, tokens: list[int]) -> bool:
        return all(original(self, request_id, [token]) for token in tokens)

    return accept_tokens


@functools.lru_cache(maxsize=1024)
def _encoded(tokenizer: Any, text: str) -> tuple[int, ...]:
    return tuple(tokenizer.encode(text, add_special_tokens=False))
