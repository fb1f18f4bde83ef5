"""The proposer of the n-gram trie."""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from lookahead_vllm.draft.budget.allot import is_worth_waiting
from lookahead_vllm.draft.budget.cost import NO_PRICES, Load, StepCost, StepPrices, compile_cost
from lookahead_vllm.draft.growth import priors
from lookahead_vllm.draft.growth.acceptance_rate import MAX_WEIGHT, NUM_RATES, AcceptanceRate
from lookahead_vllm.draft.growth.growers import Growers, help_grow
from lookahead_vllm.draft.growth.learning import TEXTS, TOKENS, NewTokens
from lookahead_vllm.draft.growth.live_texts import LiveTexts
from lookahead_vllm.draft.growth.recycling import make_lines
from lookahead_vllm.draft.growth.step import Grown, begin_and_grow
from lookahead_vllm.draft.insertion import InsertionQueue
from lookahead_vllm.draft.jit import Int32s, Int64s
from lookahead_vllm.draft.progress import PROPOSED, EmittedTokens, ProgressArrays, WantedDrafts
from lookahead_vllm.draft.proposers.proposer import Proposer
from lookahead_vllm.draft.proposers.stepping import DraftLimits, draft_trees, read
from lookahead_vllm.draft.sources import ANSWERS, OWN, REFERENCE
from lookahead_vllm.draft.tree import DraftForest
from lookahead_vllm.draft.trie.namespaces import Namespaces, digest_of
from lookahead_vllm.draft.trie.sessions import (
    BLOCK_TOKENS,
    EXPECTED_ANSWER_TOKENS,
    Sessions,
    prefix_hashes,
)
from lookahead_vllm.draft.trie.suffix import (
    NUM_SPARSE,
    ORDERS,
    PROMPT_END,
    Hashes,
    hashes_of,
)
from lookahead_vllm.draft.trie.table import (
    LAST_SHARED,
    NO_SPACE,
    TOKEN_MASK,
    USE,
    Trie,
    count_by_space,
)
from lookahead_vllm.draft.verified import Verified
from lookahead_vllm.options.server import LookaheadOptions

NUM_SAMPLES = 256
"""The places in texts at which `held_share` looks for their n-grams, in less than 1 ms."""

SUFFIXES = [*ORDERS, -NUM_SPARSE, PROMPT_END]
"""Identifies the n-grams of a snapshot: the lengths of the suffixes."""

BRANCH_LENGTH = 64
"""The longest branch of a tree, in tokens."""


class Fleet(Protocol):
    """Where answers go, and where others' come from."""

    def follow(self, digest: str, space: int) -> None:
        """A request of a namespace has started, whose answers are in this space."""

    def send(
        self, numbers: Int64s, spaces: Int32s, hashes: Hashes, tokens: Int32s, sizes: Int64s
    ) -> None:
        """t requests have emitted `tokens` int32 [n], `sizes` int64 [t] each; the arrays do not
        change any more.

        Parameters
        ----------
        numbers : int64 [t]
            A number for each request, which no later one gets.
        spaces : int32 [t]
            Of their namespaces; NO_SPACE for requests that share nothing.
        hashes : uint64 [t, NUM_HASHES]
            Of their texts before these tokens.
        """

    def positions(self) -> dict[str, str]:
        """The messages that have been learned, for `followed` of a snapshot."""


class _Plan(NamedTuple):
    """A step before its tokens are known."""

    plain_tokens: int
    """What it is worth without nodes, see `Load.plain_tokens`."""
    prices: StepPrices = NO_PRICES


class NGramTrieProposer(Proposer):
    """Grows trees from what followed the same tokens in this request's text and earlier answers.

    Source: Lookahead (KDD 2024), Algorithm 1. Answers are inserted token by token and stay until
    they are pruned. A request's own text is kept for the next turn of its conversation, see
    `sessions.py`, or eliminated when the request ends.
    """

    has_trie = True
    """Whether it learns texts and answers."""

    def __init__(self, options: LookaheadOptions, text_nodes: int = 0, num_lines: int = 0) -> None:
        self.options = options
        self.trie = Trie(options.max_nodes, text_nodes)
        self.rate = AcceptanceRate(priors.load(NUM_RATES))
        self._lines = make_lines(num_lines)
        """The table of the model's choices, see `recycling.py`."""
        self._max_nodes = options.max_nodes_per_tree
        self._min_prob = 0.0
        """Nodes less likely than this are not grown: sending them would not pay."""
        self._namespaces = Namespaces(self.trie)
        self._texts = LiveTexts(options.chain_length)
        self._plan: _Plan
        self._growers = Growers(options.chain_length)
        self._is_unsent = False
        """Whether `_send` must still get the tokens of the last `draft`; a thread may have learned
        from them."""
        self.insertion = InsertionQueue()
        """Prompts and references that are not in the trie yet."""
        self._sessions = Sessions(self.trie, self.insertion)
        self.fleet: Fleet | None = None
        """Proposers that get what this one emits; see `draft/fleet/`."""
        self.followed: dict[str, str] = {}
        """Of the restored snapshot: how far it had read the messages of each namespace."""
        self._compile()

    @property
    def num_bytes(self) -> int:
        """The memory of the tables, which is constant."""
        return self.trie.num_bytes + self.rate.num_bytes + self._lines.nbytes

    def start(
        self,
        request_id: str,
        prompt: Sequence[int],
        namespace: str | None = "",
        references: Sequence[Sequence[int]] = (),
        spellings: Sequence[Sequence[int]] = (),
    ) -> None:
        """See Proposer. The whole prompt is indexed; an end of sequence in it is a token.

        Long texts are inserted in parts, by the next calls of `learn` and `work_for`, so that no
        step waits. What an earlier turn of the conversation has inserted is taken over.
        """
        self.finish(request_id)
        tokens = np.array(prompt, np.int32)  # copies: the caller may reuse its memory
        texts = [np.array(reference, np.int32) for reference in references]
        length = sum(map(len, texts))
        row = self._texts.add(request_id)
        self._texts.hashes[row] = hashes = hashes_of(tokens)
        spaces = self._texts.spaces[row]
        own = shared = NO_SPACE
        digest = None
        if namespace is not None:
            digest = digest_of(namespace)
            shared = self.shared_space(digest)
            if self.fleet is not None and shared != NO_SPACE:
                self.fleet.follow(digest, shared)
        if self.has_trie:
            # References are in the text's space, too, and are for this request alone.
            keeps = shared != NO_SPACE and not texts
            spelled = [np.array(text, np.int32) for text in spellings]
            session = self._sessions.open(digest if keeps else None, tokens, length, spelled)
            if session is not None:
                self._texts.sessions[row], own = session, session.space
        elif shared == NO_SPACE:
            own = self.trie.new_private(EXPECTED_ANSWER_TOKENS)
        if len(self._lines):
            self._texts.keep_choices_in(row, shared or own)
        if not self.has_trie:
            return
        spaces[OWN], spaces[ANSWERS] = own, shared
        if texts:
            spaces[REFERENCE] = self.trie.new_private(length)
        # A reference may be the answer itself, so it is inserted as a continuation of the prompt.
        for reference in texts:
            for source in (REFERENCE, OWN):
                self._insert_later(row, int(spaces[source]), hashes.copy(), reference)
        self.insertion.work()

    @property
    def _cost(self) -> StepCost | None:
        """The cost of a step; None if nodes are sent whatever they cost."""
        return self.cost if self.options.budget == "auto" else None

    # ---- a step ----------------------------------------------------------------------------------

    def text_of(self, request_id: str) -> int:
        return self._texts.request_rows.row_of(request_id)

    def plan(
        self,
        request_ids: Sequence[str],
        wanted: WantedDrafts,
        contexts: Int64s,
        load: Load,
        verified: Verified | None,
    ) -> None:
        most = int(np.minimum(wanted.max_nodes, self._max_nodes).sum())
        self._growers.make_room(len(wanted.rows), most)
        cost = self._cost
        self._plan = _Plan(load.plain_tokens(len(contexts)))
        if cost is not None and most:
            prices = cost.prices(contexts, load, most)
            self._plan = _Plan(self._plan.plain_tokens, prices)
            self.step_seconds = prices.base, prices.waiting

    def draft(
        self,
        progress: ProgressArrays,
        emitted: EmittedTokens,
        spans: Int64s,
        wanted: WantedDrafts,
        max_model_len: int,
    ) -> tuple[DraftForest, Int64s]:
        """See Proposer. The drafts do not know the n-grams that end in the new tokens."""
        self._learn_drafted()
        self._growers.make_room_for_tokens(len(emitted.rows), emitted.tokens.size)
        step = progress[:], emitted[:], spans, wanted[:], max_model_len
        (fields, rate, min_prob), num_tokens = self._begin_and_grow(step)
        forest = DraftForest(*fields)
        self.pays = forest.num_nodes > 0
        self._judge_step(rate, min_prob)
        return forest, num_tokens

    def _begin_and_grow(self, step: tuple[Any, ...]) -> tuple[Grown, Int64s]:
        """Move the texts on, and grow the next trees, cut to the nodes that are worth their cost by
        the plan; `step` has the first arguments of `begin_step`."""
        result: tuple[Grown, Int64s] = begin_and_grow(*step, *self._growing)
        self._is_unsent = True
        return result

    @property
    def _growing(self) -> tuple[Any, ...]:
        """The last arguments of `begin_and_grow`."""
        plain_tokens, prices = self._plan
        return *self._tables, *self._growers.shared, plain_tokens, prices[:]

    def _judge_step(self, rate: float, min_prob: float) -> None:
        """Judge the trees of this step by the results of `allot`."""
        plain_tokens, prices = self._plan
        if self.cost is None or prices is NO_PRICES:
            return
        if rate == 0.0:  # no node reached the probability, so the next trees have less likely nodes
            self._min_prob /= 2
            return
        # Nodes far below the probability that pays are not grown in the next step.
        self._min_prob = min_prob / 2
        speedup = rate * (prices.base - prices.waiting) / plain_tokens
        self.pays = self.pays and is_worth_waiting(self.cost, speedup)

    def work_for(self, seconds: float) -> None:
        """See Proposer. Inserts texts."""
        self._learn_drafted()
        self.insertion.work_for(seconds)

    def use_threads(self, count: int) -> None:
        """See Proposer."""
        self._growers.start(count)

    def stand_by(self) -> None:
        """See Proposer. Calls threads if there may be enough to grow."""
        # Another thread may insert texts of a fleet, if this one lets it have the lock.
        self._growers.call(*self._tables, learns=self.fleet is None)

    @property
    def _tables(self) -> tuple[Any, ...]:
        """What growth reads, see `growers.help_grow`."""
        limits = self._max_nodes, BRANCH_LENGTH, self._min_prob  # the fields of TreeLimits
        return self.trie.arrays, self._lines, self._texts.arrays, self.rate.arrays, limits

    def learn(self) -> None:
        """See Proposer. Also inserts texts for a share of the step."""
        self._growers.dismiss()
        self._learn_drafted(waits=self.insertion.has_work())
        self.insertion.end_step()

    def _learn_drafted(self, waits: bool = True) -> None:
        """Learn from the tokens of the last `draft`, unless a thread does; then, wait for it."""
        if self._is_unsent:
            self._is_unsent = False
            self._send(self._growers.new)
            self._growers.learn(self.trie.arrays, self._lines, self.rate.arrays)
        if waits:
            self._growers.wait()

    def _send(self, new: NewTokens) -> None:
        """Pass the new tokens on to all that do not learn from them."""
        texts, rows = slice(new.sizes[TEXTS]), new.rows[: new.sizes[TEXTS]]
        tokens, counts = new.tokens[: new.sizes[TOKENS]], new.counts[texts]
        self._texts.add_to_answers(rows, tokens, counts)
        if self.fleet is not None:
            numbers, spaces = self._texts.numbers[rows], new.spaces[texts, ANSWERS].copy()
            hashes = new.hashes[texts].copy()
            self.fleet.send(numbers, spaces, hashes, tokens.copy(), counts.copy())

    def held_share(self) -> float | None:
        """How much of the texts that were read the trie holds, by a sample of their n-grams."""
        self._learn_drafted()
        num_all, num_held = self._sessions.sample(NUM_SAMPLES)
        return num_held / num_all if num_all else None

    def proposed_after(self, texts: Int64s) -> Int32s:
        chains: Int32s = self._texts.chains[texts, :, 0, PROPOSED]
        return chains

    # ---- the end of a request, and of an engine --------------------------------------------------

    def finish(self, request_id: str) -> None:
        """See Proposer. Leaves the n-grams of other requests unchanged."""
        self._learn_drafted()
        row = self._texts.request_rows.pop(request_id)
        if row is not None:
            self.insertion.drop(row)
            session = self._texts.sessions.pop(row, None)
            if session is not None:
                self._sessions.close(session, self._texts.answer_of(row))
                self._texts.spaces[row, OWN] = NO_SPACE
            for space in self._texts.spaces_of(row):
                self.trie.eliminate(space)

    def shared_space(self, digest: str) -> int:
        """The space of a namespace's answers, by the digest of its name; NO_SPACE if it has none
        and there are no more."""
        return self._namespaces.space_of(digest, self._texts.shared_spaces)

    def snapshot(self) -> tuple[dict[str, NDArray[Any]], dict[str, Any]]:
        """The learned arrays by name, not copied, and further facts that can be stored as JSON.

        Another proposer with the same `max_nodes` can `restore` them. Threads may write to the
        arrays, see `copy`.
        """
        arrays: dict[str, NDArray[Any]] = {
            "edges": self.trie.answers,
            "counters": self.trie.counters,
            "rates": self.rate.rates,
            "trials": self.rate.trials,
            "weights": self.rate.weights,
        }
        facts = {"namespaces": self._namespaces.to_dict(), "suffixes": SUFFIXES}
        facts["followed"] = self.followed if self.fleet is None else self.fleet.positions()
        return arrays, {**facts, "share": self.options.share}

    def copy(self, source: NDArray[np.uint8], target: NDArray[np.uint8]) -> None:
        """Copy bytes of a snapshot's array, while no thread writes to it."""
        self._growers.copy(source, target)

    def restore(
        self,
        arrays: Mapping[str, NDArray[Any]],
        facts: Mapping[str, Any],
        vocab_size: int = TOKEN_MASK,
    ) -> None:
        """Replace what was learned with a snapshot, whose live requests are not live here.

        Raises
        ------
        ValueError
            The snapshot's arrays have other shapes or dtypes, it holds tokens from `vocab_size` on,
            two namespaces have one space, or with share "all" it holds answers of all namespaces,
            which this proposer keeps apart; nothing has changed.
        """
        current, current_facts = self.snapshot()
        if facts.get("suffixes") != current_facts["suffixes"]:
            raise ValueError("it holds n-grams of other lengths than this release of lookahead")
        if facts.get("share") == "all" != self.options.share:
            raise ValueError(
                f"it was saved with share='all', without namespaces, and this server has "
                f"share={self.options.share!r}"
            )
        for name, array in current.items():
            given = arrays.get(name)
            if given is None or given.shape != array.shape or given.dtype != array.dtype:
                raise ValueError(
                    f"its {name} are {None if given is None else (given.dtype, given.shape)}, "
                    f"where {(array.dtype, array.shape)} is needed"
                )
        if (token := int((arrays["edges"][:, USE] & TOKEN_MASK).max(initial=0))) >= vocab_size:
            raise ValueError(
                f"it knows the token {token}, and the model only those below {vocab_size}"
            )
        spaces, last = facts["namespaces"].values(), arrays["counters"][LAST_SHARED]
        if len({*spaces}) < len(spaces) or not all(0 < space <= last for space in spaces):
            raise ValueError("its namespaces would share n-grams")
        for name, array in current.items():
            array[:] = arrays[name]
        self.rate.weights.clip(-MAX_WEIGHT, MAX_WEIGHT, out=self.rate.weights)  # of older releases
        self.trie.recount()
        self._namespaces.restore(facts["namespaces"])
        self.followed = {**facts.get("followed", {})}

    def _insert_later(self, row: int, space: int, hashes: Hashes, tokens: Int32s) -> None:
        """Insert `tokens` after the text of `hashes`, as soon as a step has time for it."""
        if space != NO_SPACE:
            with_whole = space != self._texts.spaces[row, OWN]
            insert = partial(self.trie.insert, space, hashes, with_whole=with_whole)
            self.insertion.add(row, insert, tokens)

    def _compile(self) -> None:
        """Run every kernel once on a tiny request, so that no request waits for the compiler."""
        self.start("", [0])
        self._sessions.sample(1)
        nothing = np.empty(0, np.int32)
        prefix_hashes(nothing, BLOCK_TOKENS)
        self.trie.remove(NO_SPACE, nothing, 0, 0)
        self.trie.insert(NO_SPACE, hashes_of(nothing), nothing)
        read(self, {"": []})
        draft_trees(self, [DraftLimits("", 1, 1)])
        help_grow(*self._tables, *self._growers.shared, True, -1)
        self.copy(nothing.view(np.uint8), nothing.view(np.uint8))
        compile_cost()
        self.finish("")
        count_by_space(self.trie.edges[:0], np.ones(1, np.int64))
