"""What a trained drafter's chains are worth, and steps whose drafts are these chains alone.

The device knows a chain as soon as the drafter has made it; the host learns of it later. While the
trie adds too little to the chains, the host launches the next step with them without waiting, as
vLLM does with that drafter, and fills in their tokens once they have arrived.
"""

from collections.abc import Sequence

import numpy as np

from lookahead_vllm.draft.budget.chain import ChainWorth, TrieWorth
from lookahead_vllm.draft.jit import Int32s, Int64s
from lookahead_vllm.draft.progress import WantedDrafts
from lookahead_vllm.draft.proposers.proposer import Proposer
from lookahead_vllm.draft.sources import DRAFTER
from lookahead_vllm.draft.tree import DraftForest
from lookahead_vllm.engine.step.drafts import Drafts
from lookahead_vllm.engine.step.step import Step


class ChainDrafts:
    """Decides about the passes of a trained drafter, and whether a step waits for the trie.

    Parameters
    ----------
    length
        K, the tokens of a whole chain.
    """

    def __init__(self, length: int) -> None:
        self._length = length
        self._chain_worth: ChainWorth | None = None
        """None until the price of the further passes is known."""
        self._trie_worth = TrieWorth()
        self._are_sent = False
        """Whether the last trees were as large as the chains."""

    def note(self, sizes: Int64s, wanted: WantedDrafts) -> None:
        """A step has waited for trees of these `sizes`, int64 [t]."""
        self._are_sent = bool((sizes >= self._sizes(wanted)).all())

    def observe(self, step: Step, paths: Int32s) -> None:
        """Learn from a step that has ended; `paths` as in `accepted_paths`."""
        if self._chain_worth is not None:
            counts = step.output.num_sampled_tokens_np
            self._chain_worth.observe(step.whole_trees.forest, paths, int(counts.sum()))
            if step.proposed is not None:
                self._trie_worth.observe(step.proposed, step.output.sampled_token_ids, counts)

    def are_whole(self, proposer: Proposer) -> bool:
        """Whether the drafter makes its whole chains after the step that is drafted."""
        if proposer.cost is None or proposer.step_seconds is None:  # nodes are sent in any case
            return True
        if self._chain_worth is None:
            self._chain_worth = ChainWorth(proposer.cost.chain)
        return self._chain_worth.next_step(proposer.step_seconds[0])

    def alone(
        self,
        req_ids: Sequence[str],
        wanted: WantedDrafts,
        last: Step,
        proposer: Proposer,
        most: int,
    ) -> Drafts | None:
        """The chains after the `last` step as drafts of the next one; their tokens are UNKNOWN.

        None if the step has to wait: because the trie adds enough, or is asked whether it would.
        """
        sizes, seconds = self._sizes(wanted), proposer.step_seconds
        if (
            seconds is None
            or last.chains is None
            or last.chains.length < self._length
            or not self._are_sent
            or not sizes.all()
            or sizes.sum() > most
            or not np.isin(wanted.rows, last.requests).all()
            or self._trie_worth.waits(*seconds)
        ):
            return None
        forest = DraftForest.of_chains(sizes, DRAFTER)
        not_known = np.zeros(len(sizes), np.int64)
        whole = self.are_whole(proposer)
        return Drafts(req_ids, forest, not_known, pays=True, whole_chain=whole, waited=False)

    def _sizes(self, wanted: WantedDrafts) -> Int64s:
        return np.minimum(wanted.max_nodes, self._length)
