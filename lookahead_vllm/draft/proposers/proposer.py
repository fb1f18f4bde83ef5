"""The protocol of a proposer, through which the engine gets draft trees, and its argument types."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import numpy as np

from lookahead_vllm.draft.budget.cost import Load, StepCost
from lookahead_vllm.draft.jit import Int32s, Int64s
from lookahead_vllm.draft.progress import (
    NO_TEXT,
    EmittedTokens,
    ProgressArrays,
    WantedDrafts,
    count_tokens,
    limit_trees,
)
from lookahead_vllm.draft.tree import EMPTY_TREE, DraftForest, DraftTree
from lookahead_vllm.draft.verified import Verified

NO_LOAD = Load()


class Proposer(ABC):
    """Grows draft trees. A request is live from `start` to `finish`, even if steps leave it out.

    A step takes three calls:

    1. `plan`, before the tokens of the step before have arrived;
    2. `draft`, once they have: it reads them and returns the trees. The device waits for it;
    3. `learn`, after the step was launched: what the trees did not need.

    Tokens after which no trees are wanted are read by the same calls, with nothing wanted. If the
    trees of a `draft` are not sent, because they only tell whether drafts would pay, it reads no
    tokens, and there is no `learn`. `stepping.py` makes these calls without an engine.
    """

    cost: StepCost | None = None
    """The cost model of a step, set by the engine. While it is None, trees are not cut to the nodes
    that pay."""
    pays: bool = False
    """Whether the last trees were worth that their step waited for them."""
    step_seconds: tuple[float, float] | None = None
    """The time of the last planned step without nodes, and the part in which the device waits for
    drafts; None if nobody knows it."""
    num_choices: int = 0
    """How many of the model's likeliest tokens at each root and node `plan` needs; 0 if it needs
    none. It may change from step to step."""

    @abstractmethod
    def start(
        self,
        request_id: str,
        prompt: Sequence[int],
        namespace: str | None = "",
        references: Sequence[Sequence[int]] = (),
        spellings: Sequence[Sequence[int]] = (),
    ) -> None:
        """Start a request; one that is live already starts over.

        Parameters
        ----------
        request_id : str
        prompt : Sequence[int]
            Token ids, possibly none; UNKNOWN (`tree.py`) in place of embeddings.
        namespace : str or None
            The request learns from the answers of its namespace only; None shares with none.
        references : Sequence[Sequence[int]]
            Texts from which the answer is likely to copy.
        spellings : Sequence[Sequence[int]]
            Parts of the prompt that are new in this turn, as a tool call would spell them.
        """

    @abstractmethod
    def text_of(self, request_id: str) -> int:
        """The row of a live request's text, for `ProgressArrays.texts`; KeyError for an unknown
        one."""

    def plan(  # noqa: B027
        self,
        request_ids: Sequence[str],
        wanted: WantedDrafts,
        contexts: Int64s,
        load: Load,
        verified: Verified | None,
    ) -> None:
        """Prepare `draft` for the next step, before its tokens are known.

        Parameters
        ----------
        request_ids
            t live requests.
        wanted
            The most nodes of each.
        contexts : int64 [t]
            Their committed tokens so far, to which every node attends.
        load
            The step's other work.
        verified
            Choices of the model that will arrive together with the tokens.
        """

    def use_threads(self, count: int) -> None:  # noqa: B027
        """Have so many threads of its own, for which the machine has cores to spare."""

    def stand_by(self) -> None:  # noqa: B027
        """The tokens before the planned step will arrive within a millisecond or two, so do what
        needs none of them. `draft` may come without this call."""

    def needs_accepted(self) -> bool:
        """Whether the next `draft` needs to know the accepted nodes of what is `verified`."""
        return False

    @abstractmethod
    def draft(
        self,
        progress: ProgressArrays,
        emitted: EmittedTokens,
        spans: Int64s,
        wanted: WantedDrafts,
        max_model_len: int,
    ) -> tuple[DraftForest, Int64s]:
        """The trees of a step whose `plan` was made, within the limits of `limit_trees`.

        Counts the `emitted` tokens (`count_tokens` fills in `spans`), moves the texts on by them,
        and gives them the chains that a trained drafter proposes after these tokens.

        Returns
        -------
        DraftForest, int64 [t]
            A tree for each wanted request, possibly empty, and the known tokens of each; 0 if it
            does not decode.
        """

    def learn(self) -> None:  # noqa: B027
        """Learn from the tokens of the last `draft`.

        By now, the accepted nodes are marked in what the plan had `verified`.
        """

    def work_for(self, seconds: float) -> None:  # noqa: B027
        """Work for at most so long, while the device computes and the next tokens are awaited."""

    def proposed_after(self, texts: Int64s) -> Int32s:
        """A trained drafter's chain after each of the `texts`: int32 [t, K]; K is 0 without one."""
        return np.empty((len(texts), 0), np.int32)

    @abstractmethod
    def finish(self, request_id: str) -> None:
        """End the request; an unknown one is ignored."""


def known_tokens(progress: ProgressArrays, wanted: WantedDrafts) -> Int64s:
    """The known tokens of each wanted request, int64 [t]; 0 if it does not decode."""
    num_tokens: Int64s = np.where(progress.is_decoding, progress.num_tokens, 0)[wanted.rows]
    return num_tokens


class NoProposer(Proposer):
    """Drafts nothing: before `LookaheadDrafter.begin`, on ranks that do not draft, and where the
    proposer has failed."""

    def start(self, request_id: str, prompt: Sequence[int], *rest: Any) -> None:
        """Do nothing."""

    def text_of(self, request_id: str) -> int:
        """No request has a text."""
        return NO_TEXT

    def draft(
        self,
        progress: ProgressArrays,
        emitted: EmittedTokens,
        spans: Int64s,
        wanted: WantedDrafts,
        max_model_len: int,
    ) -> tuple[DraftForest, Int64s]:
        """An empty tree for each request."""
        count_tokens(progress[:], emitted[:], spans)
        trees = DraftForest.of([]).with_empty(len(wanted.rows))
        return trees, known_tokens(progress, wanted)

    def finish(self, request_id: str) -> None:
        """Do nothing."""


class TextByText(Proposer):
    """Reads and drafts one text after another, in Python: for replays and tests."""

    @abstractmethod
    def add(self, text: int, tokens: list[int]) -> None:
        """A text, by its row, goes on with these tokens."""

    @abstractmethod
    def tree(self, text: int, max_nodes: int, max_depth: int, may_branch: bool) -> DraftTree:
        """A tree that follows a text, within these limits; `max_nodes` is at least 1."""

    def draft(
        self,
        progress: ProgressArrays,
        emitted: EmittedTokens,
        spans: Int64s,
        wanted: WantedDrafts,
        max_model_len: int,
    ) -> tuple[DraftForest, Int64s]:
        count_tokens(progress[:], emitted[:], spans)
        rows, tokens = emitted.rows.tolist(), emitted.tokens.tolist()
        for row, own, (first, end) in zip(rows, tokens, spans.tolist(), strict=True):
            if end > first:
                self.add(int(progress.texts[row]), own[first:end])
        limits = limit_trees(progress[:], wanted[:], max_model_len).tolist()
        trees = [self.tree(*one) if one[1] else EMPTY_TREE for one in limits]
        forest = DraftForest.of(trees)
        self.pays = forest.num_nodes > 0
        return forest, known_tokens(progress, wanted)
