"""All sources in one tree: the n-gram trie, the model's choices, and the lookahead branch."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from lookahead_vllm.draft.budget.cost import Load
from lookahead_vllm.draft.growth.candidates import CHOICES
from lookahead_vllm.draft.growth.learning import REPLACED
from lookahead_vllm.draft.growth.recycling import (
    NUM_CHOICES,
    NUM_LINES,
    ChoiceTrees,
    find_lines,
)
from lookahead_vllm.draft.growth.step import Grown, keep_choices_and_grow
from lookahead_vllm.draft.growth.trees import DEPTH, NODES
from lookahead_vllm.draft.jit import Int64s
from lookahead_vllm.draft.progress import (
    NO_TEXT,
    EmittedTokens,
    ProgressArrays,
    WantedDrafts,
    limit_trees,
)
from lookahead_vllm.draft.proposers.ngram_trie import NGramTrieProposer
from lookahead_vllm.draft.proposers.stepping import DraftLimits, draft_trees, read
from lookahead_vllm.draft.sources import RECYCLED, WINDOW
from lookahead_vllm.draft.tree import DraftForest
from lookahead_vllm.draft.trie.suffix import NUM_HASHES, Hashes
from lookahead_vllm.draft.verified import Verified
from lookahead_vllm.draft.window.branch import LookaheadBranch
from lookahead_vllm.options.server import LookaheadOptions

MIN_WORTH = 0.02
"""The model's choices are not used if they gain less, in tokens a step and request. To find, keep
and look them up takes about 1 % of a step on a CPU."""
PRIOR_WORTH = 0.1
"""The expected gain before any choices were tried, in the same unit."""
MEMORY_STEPS = 50
"""Time constant of the moving average of worth, in steps."""
RETRY_STEPS = 2000
"""Steps without choices after which they are tried again."""


class HybridProposer(NGramTrieProposer):
    """Grows trees in which all sources compete node by node, with a comb where it pays.

    The model's choices at every verified node are kept for their context (Token Recycling). The
    cells of the window are verified nodes, too: the path of a cell and its choice is an n-gram of
    the lookahead branch. The acceptance rate of each kind of evidence is learned from emitted
    tokens, as for the trie.

    With a cost model, choices are used only while they are worth it: a node from them counts as 1
    if it was accepted, minus the probability from which a node pays. Without them, a step does
    exactly what NGramTrieProposer does.

    Attributes
    ----------
    worth : float
        The gain from the choices, in tokens a step and request.
    """

    def __init__(self, options: LookaheadOptions, text_nodes: int = 0) -> None:
        options = options.for_model(0)
        self.branch = LookaheadBranch(options.window)
        self.worth = PRIOR_WORTH
        self.num_choices = NUM_CHOICES
        self._steps_without = 0
        self._root_hashes: Hashes = np.zeros((0, NUM_HASHES), np.uint64)
        """uint64 [capacity, NUM_HASHES]: the hashes of the texts when their trees were proposed."""
        self._num_grown = np.zeros(0, np.int64)
        """int64 [capacity]: the number of nodes of each tree, without those that only its comb
        added."""
        self._awaited: tuple[ChoiceTrees, Verified] | None = None
        """What the model's choices in the step before a `draft` belong to."""
        self._has_found = False
        """Whether the lines for these choices were found."""
        self._has_combs = False
        """Whether combs are among them."""
        self._windows: tuple[Int64s, Int64s, Load] | None = None
        """The arguments of `branch.choose` in a `draft` that may send combs."""
        super().__init__(options, text_nodes, NUM_LINES)

    def start(
        self,
        request_id: str,
        prompt: Sequence[int],
        namespace: str | None = "",
        references: Sequence[Sequence[int]] = (),
        spellings: Sequence[Sequence[int]] = (),
    ) -> None:
        super().start(request_id, prompt, namespace, references, spellings)
        self._root_hashes = self._texts.request_rows.resized(self._root_hashes)
        self._num_grown = self._texts.request_rows.resized(self._num_grown)
        self.branch.start(request_id, np.asarray(prompt, np.int32))

    def _choice_trees(self, verified: Verified) -> ChoiceTrees:
        """The trees at whose nodes the model made its choices, as `find_lines` takes them."""
        forest = verified.forest
        rows = self._texts.request_rows.rows_of(verified.request_ids)
        return ChoiceTrees(
            self._texts.spaces[rows, CHOICES],
            self._root_hashes[rows],
            forest.tokens,
            forest.parents,
            forest.firsts,
            self._num_grown[rows],
        )

    def _judge(self, verified: Verified, num_grown: Int64s) -> None:
        """Learn the gain from the choices of this step, and stop using them if it is too small.

        With a fixed budget, they are always used. `num_grown` int64 [t]: in each tree, nodes from
        this index on are only cells of a window.
        """
        if self._cost is None:
            return
        forest = verified.forest
        from_choices = (forest.sources == RECYCLED) | (forest.sources == WINDOW)
        from_choices &= forest.places < num_grown[forest.owners]
        accepted = int((from_choices & verified.accepted).sum())
        price = 2 * self._min_prob * int(from_choices.sum())
        self.worth += ((accepted - price) / len(forest) - self.worth) / MEMORY_STEPS
        if self.worth < MIN_WORTH:
            self._use_choices(False)

    def _use_choices(self, with_choices: bool) -> None:
        self.num_choices = NUM_CHOICES * with_choices
        self._texts.use_choices(with_choices)
        if with_choices:
            self.worth = PRIOR_WORTH
            self.branch.resume()
        else:
            self._steps_without = 0

    def _try_again(self) -> None:
        """Count a step without choices; after RETRY_STEPS of them, use choices again."""
        self._steps_without += 1
        if self._steps_without >= RETRY_STEPS:
            self._use_choices(True)

    def _note_trees(self, rows: Int64s, sizes: Int64s) -> None:
        """Note that trees of these `sizes` were grown from the texts `rows`; both int64 [t]."""
        self._root_hashes[rows] = self._texts.hashes[rows]
        self._num_grown[rows] = sizes

    def plan(
        self,
        request_ids: Sequence[str],
        wanted: WantedDrafts,
        contexts: Int64s,
        load: Load,
        verified: Verified | None,
    ) -> None:
        """See Proposer. Without choices, those of a step that still asked for some are ignored."""
        super().plan(request_ids, wanted, contexts, load, verified)
        self._awaited = self._windows = None
        self._has_found = False
        self._has_combs = False
        if not self.num_choices:
            if request_ids:
                self._try_again()
        elif verified is not None:
            self._awaited = self._choice_trees(verified), verified
            self._has_combs = self.branch.awaits(verified.request_ids)
        if not self.num_choices:
            return
        windows = self.branch.rows_of(request_ids, wanted.may_branch)
        if not self.branch.skip_step(windows, contexts, load, self._cost):
            self._windows = windows, contexts, load

    def stand_by(self) -> None:
        """See Proposer. Also finds the lines that the model's choices will be written to."""
        self._find_lines()
        super().stand_by()

    def _find_lines(self) -> None:
        if self._awaited is None or self._has_found:
            return
        self._learn_drafted()
        trees, growers = self._awaited[0], self._growers
        growers.make_room_for_choices(len(trees.spaces) + len(trees.tokens))
        growers.new.sizes[REPLACED] = find_lines(self._lines, trees[:], growers.new.replaced)
        self._has_found = True

    def needs_accepted(self) -> bool:
        return self._has_combs

    def draft(
        self,
        progress: ProgressArrays,
        emitted: EmittedTokens,
        spans: Int64s,
        wanted: WantedDrafts,
        max_model_len: int,
    ) -> tuple[DraftForest, Int64s]:
        if self._awaited is not None and self._has_combs:
            self.branch.iterate(self._awaited[1])
        windows, without_comb = None, wanted
        if self._windows is not None:
            windows = self.branch.choose(*self._windows, self._cost)
            room = self._max_nodes - self.branch.windows.comb_nodes(windows)
            without_comb = wanted._replace(max_nodes=np.minimum(wanted.max_nodes, room))
        forest, num_tokens = super().draft(progress, emitted, spans, without_comb, max_model_len)
        self._drafted = progress.texts[wanted.rows], forest
        if windows is None:
            return forest, num_tokens
        trees = limit_trees(progress[:], wanted[:], max_model_len)
        limits = trees[:, NODES].copy(), trees[:, DEPTH].copy()
        forest = self.branch.join(forest, windows, *limits, self._max_nodes, self._cost)
        if self._cost is None:
            self.pays = forest.num_nodes > 0
        return forest, num_tokens

    def _begin_and_grow(self, step: tuple[Any, ...]) -> tuple[Grown, Int64s]:
        if self._awaited is None:
            return super()._begin_and_grow(step)
        self._find_lines()
        trees, verified = self._awaited
        choices = verified.tokens, verified.gaps, verified.roots
        result: tuple[Grown, Int64s] = keep_choices_and_grow(
            trees[:], choices, self._lines, self._growers.new.replaced, *step, *self._growing
        )
        self._is_unsent = True
        return result

    def learn(self) -> None:
        awaited, self._awaited = self._awaited, None
        if awaited is not None:
            trees, verified = awaited
            self._judge(verified, trees.num_grown)
        rows, forest = self._drafted
        live = rows != NO_TEXT
        self._note_trees(rows[live], forest.sizes[live])
        super().learn()

    def finish(self, request_id: str) -> None:
        super().finish(request_id)
        self.branch.finish(request_id)

    def _compile(self) -> None:
        super()._compile()
        self.start("", [0, 1], None)  # no namespace: no other request learns from it
        read(self, {"": [0]})
        forest = draft_trees(self, [DraftLimits("", self._max_nodes, 8)])
        read(self, {"": [1]}, Verified.nothing([""], forest, self.num_choices))
        self.finish("")
