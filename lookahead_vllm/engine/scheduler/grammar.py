"""A draft tree under a grammar: what may stand at each node, and what must."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache, lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from vllm.v1.structured_output.backend_guidance import GuidanceGrammar

from lookahead_vllm.draft.sources import GRAMMAR
from lookahead_vllm.draft.tree import DraftTree

if TYPE_CHECKING:
    from vllm.v1.request import Request
    from vllm.v1.structured_output import StructuredOutputManager
    from vllm.v1.structured_output.backend_types import StructuredOutputGrammar


class GrammarDraft(NamedTuple):
    """A draft tree that its grammar allows, with a mask for each node.

    Attributes
    ----------
    tree
        What the grammar forbids is gone, what it dictates may be added.
    bitmask : int32 [n + 1, ceil(vocabulary / 32)]
        The tokens allowed after the root, then after each node.
    """

    tree: DraftTree
    bitmask: NDArray[np.int32]


class GrammarWalk:
    """Visits a draft tree depth first, the request's grammar going forward and back with it.

    It asks of a grammar what vLLM's chains ask (`accept_tokens`, `rollback`, `fill_bitmask`), so
    every backend gets trees. While a reasoning parser keeps the grammar waiting, each path is asked
    about by itself.

    Parameters
    ----------
    max_nodes, max_depth
        Bounds for what the grammar's own guesses may add.
    """

    def __init__(
        self,
        manager: StructuredOutputManager,
        request: Request,
        tree: DraftTree,
        max_nodes: int,
        max_depth: int,
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
        self._free_nodes = max(max_nodes - len(tree), 0)
        self._max_depth = max_depth
        self._mask: torch.Tensor = manager.backend.allocate_token_bitmask(
            1 + len(tree) + self._free_nodes
        )
        self._bits: NDArray[np.int32] = self._mask.numpy()
        self._always = manager._get_constraint_bounds(request, ()).constraint_start == 0
        self._no_ends: Sequence[int] = ()
        """Tokens with which the reasoning cannot end, as the grammar cannot begin with them."""
        if not self._always and hasattr(manager, "_masked_reasoning_ends"):  # vLLM 0.33
            self._no_ends = manager._masked_reasoning_ends(request)

    def run(self) -> GrammarDraft:
        proposed = len(self._tokens)
        self._visit(-1, [], self._bounds([])[1], True)
        kept = [*sorted(self._kept), *range(proposed, len(self._tokens))]
        place = {-1: -1} | {node: i for i, node in enumerate(kept)}
        return GrammarDraft(
            DraftTree.from_lists(
                [self._tokens[node] for node in kept],
                [place[self._parents[node]] for node in kept],
                [self._probs[node] for node in kept],
                [self._sources[node] for node in kept],
            ),
            self._bits[[0, *(node + 1 for node in kept)]],
        )

    def _visit(self, node: int, path: list[int], constrained: bool, best: bool) -> None:
        """The grammar stands behind `path`, which leads to `node`."""
        if constrained:
            self._fill(node)
        else:
            words = self._bits[node + 1].view(np.uint32)
            for token in self._no_ends:
                words[token // 32] &= ~np.uint32(1 << token % 32)
        has_child = False
        for child in self._children[node + 1]:
            if self._step(node, child, path, constrained, best and not has_child):
                self._kept.add(child)
                has_child = True
        if best and constrained and not has_child and not self._grammar.is_terminated():
            self._jump_ahead(node, len(path))

    def _step(self, node: int, child: int, path: list[int], constrained: bool, best: bool) -> bool:
        """Visit `child` if the grammar allows it behind `node`."""
        token = self._tokens[child]
        path = [*path, token]
        fed, masks_next = self._bounds(path)
        if fed and not (self._allows(node, token, constrained) and self._feed(token)):
            return False
        self._visit(child, path, masks_next, best)
        if fed:
            self._grammar.rollback(1)
        return True

    def _jump_ahead(self, node: int, depth: int) -> None:
        """Grow a chain of what the grammar dictates behind a leaf."""
        fed = 0
        for token in self._forced(node)[: self._max_depth - depth]:
            if not (self._free_nodes and self._allows(node, token, True) and self._feed(token)):
                break
            fed += 1
            self._parents.append(node)
            self._tokens.append(token)
            self._probs.append(self._probs[node] if node >= 0 else 1.0)
            self._sources.append(GRAMMAR)
            self._free_nodes -= 1
            node = len(self._tokens) - 1
            self._fill(node)
        if fed:
            self._grammar.rollback(fed)

    def _fill(self, node: int) -> None:
        """Mask what may follow `node`; behind the grammar's end that is everything."""
        if not self._grammar.is_terminated():
            self._grammar.fill_bitmask(self._mask, node + 1)

    def _feed(self, token: int) -> bool:
        """Move the grammar on; it has an end, behind which nothing is drafted."""
        if self._grammar.is_terminated():
            return False
        return self._grammar.accept_tokens(self._request.request_id, [token])

    def _forced(self, node: int) -> Sequence[int]:
        """Tokens of the one text with which the grammar lets `node` be continued.

        The text may be cut into other tokens than the model would choose, which verification finds.
        """
        xgrammar = getattr(self._grammar, "matcher", None)
        if xgrammar is not None and (text := xgrammar.find_jump_forward_string()):
            return _encoded(self._manager.tokenizer, text)
        llguidance = getattr(self._grammar, "ll_matcher", None)
        if llguidance is not None and (tokens := llguidance.compute_ff_tokens()):
            return tokens
        words = np.flatnonzero(self._bits[node + 1])
        if len(words) == 1:
            word = int(self._bits[node + 1, words[0]]) & 0xFFFFFFFF
            if word.bit_count() == 1:
                return [int(words[0]) * 32 + word.bit_length() - 1]
        return []

    def _allows(self, node: int, token: int, constrained: bool) -> bool:
        if constrained:
            word, bit = divmod(token, 32)
            return word < self._bits.shape[1] and bool(self._bits[node + 1, word] >> bit & 1)
        return bool(self._grammar.validate_tokens([token]))

    def _bounds(self, path: list[int]) -> tuple[bool, bool]:
        """Whether the grammar takes the last token of `path`, and whether it masks the next."""
        if self._always:
            return True, True
        bounds = self._manager._get_constraint_bounds(self._request, path)
        return bounds.grammar_start < len(path), bounds.constraint_start <= len(path)


@cache
def accept_tokens_one_by_one() -> None:
    """Let llguidance's grammars take several tokens as they take one after the other.

    vLLM's wrapper passes over a token that comes behind the grammar's end, as may be with
    `ignore_eos` or a thinking budget, but not where both come in one list.
    """
    original = GuidanceGrammar.accept_tokens

    def accept_tokens(self: Any, request_id: str, tokens: list[int]) -> bool:
        return all(original(self, request_id, [token]) for token in tokens)

    GuidanceGrammar.accept_tokens = accept_tokens


@lru_cache(maxsize=4096)
def _encoded(tokenizer: Any, text: str) -> tuple[int, ...]:
    return tuple(tokenizer.encode(text, add_special_tokens=False))
