"""All sources in one tree: the n-gram trie, the model's choices, and the lookahead branch."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from lookahead_vllm.draft.budget.cost import Load, StepCost
from lookahead_vllm.draft.options import LookaheadOptions
from lookahead_vllm.draft.proposer import (
    NO_LOAD,
    NO_OVERRIDES,
    DraftLimits,
    RequestOverrides,
    Verified,
)
from lookahead_vllm.draft.tree import DraftForest
from lookahead_vllm.draft.trie.candidates import CHOICES
from lookahead_vllm.draft.trie.proposer import NGramTrieProposer
from lookahead_vllm.draft.trie.recycling import NUM_CHOICES, NUM_LINES, recycle
from lookahead_vllm.draft.trie.suffix import ROW, Hashes
from lookahead_vllm.draft.window.branch import LookaheadBranch, shape_for


class HybridProposer(NGramTrieProposer):
    """A tree in which all sources compete node by node, and the comb where it earns its cost.

    The model's choices at every verified node are kept for their context (Token Recycling), those
    at the cells of the window among them: the path of a cell and its choice is an n-gram of the
    lookahead branch. How likely each kind of evidence is, is learned from what was emitted, as it
    is of the trie's.
    """

    num_choices = NUM_CHOICES
    wants_roots = True
    num_lines = NUM_LINES

    def __init__(self, options: LookaheadOptions, cost: StepCost | None = None) -> None:
        options = options.for_model(0)
        self.branch = LookaheadBranch(options)
        self._root_rows: Hashes = np.zeros((0, ROW), np.uint64)
        """uint64 [capacity, ROW]: of the texts, as they were when their trees were proposed."""
        self._grown = np.zeros(0, np.int64)
        """int64 [capacity]: how many of their nodes were not there for the comb alone."""
        super().__init__(options, cost)

    @property
    def num_bytes(self) -> int:
        """What the tables take; it does not grow."""
        return super().num_bytes + self._lines.nbytes

    def start(
        self,
        request_id: str,
        prompt: Sequence[int],
        namespace: str | None = "",
        references: Sequence[Sequence[int]] = (),
        overrides: RequestOverrides = NO_OVERRIDES,
    ) -> None:
        """See Proposer, and NGramTrieProposer."""
        super().start(request_id, prompt, namespace, references, overrides)
        self._root_rows = self._texts.request_rows.widened(self._root_rows)
        self._grown = self._texts.request_rows.widened(self._grown)
        tokens = np.array(prompt, np.int32)
        self.branch.start(request_id, tokens, shape_for(self.options, overrides))

    def observe(self, verified: Verified) -> None:
        """See Proposer. The choices are kept, and the windows move on."""
        forest = verified.forest
        texts = self._texts.numbers(verified.request_ids)
        recycle(
            self._lines,
            self._texts.spaces[texts, CHOICES],
            self._root_rows[texts],
            forest.tokens,
            forest.parents,
            forest.firsts,
            self._grown[texts],
            verified.at_roots,
            verified.at_nodes,
            verified.gaps,
        )
        self.branch.iterate(verified, np.zeros(len(texts), np.int32))

    def propose(self, limits: Sequence[DraftLimits], load: Load = NO_LOAD) -> DraftForest:
        """See Proposer."""
        contexts = np.array([limit.context for limit in limits], np.int64)
        cost = self.cost if self.options.budget == "auto" else None
        numbers = self.branch.choose(limits, contexts, cost, load)
        max_nodes = self._max_nodes - self.branch.comb_nodes(numbers)
        forest = self._cut(self._grow(limits, max_nodes), contexts, load)
        texts = self._texts.numbers(limit.request_id for limit in limits)
        self._root_rows[texts] = self._texts.rows[texts]
        self._grown[texts] = forest.sizes
        return self.branch.join(forest, numbers, limits, self._max_nodes, cost)

    def finish(self, request_id: str) -> None:
        """See Proposer."""
        super().finish(request_id)
        self.branch.finish(request_id)

    def _compile(self) -> None:
        super()._compile()
        self.start("", [0, 1], None)  # nobody learns from it
        self.extend({"": [0]})
        forest = self.propose([DraftLimits("", self._max_nodes, 8)])
        self.extend({"": [1]})
        self.observe(Verified.nothing([""], forest, self.num_choices))
        self.finish("")
