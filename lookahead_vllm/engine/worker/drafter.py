"""Between vLLM's runner and a proposer: feeds it what was committed, remembers what it drafted."""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np
from llvmlite.binding import ffi
from vllm.logger import init_logger

from lookahead_vllm.draft.budget.cost import Load
from lookahead_vllm.draft.proposer import DraftLimits, NoProposer, Proposer, Verified
from lookahead_vllm.draft.registry import make_proposer
from lookahead_vllm.draft.tree import EMPTY_TREE, DraftForest, DraftTree, DraftTreeError
from lookahead_vllm.engine import config, request_options, shutdown
from lookahead_vllm.engine.messages import ProposedDrafts, SentDraft
from lookahead_vllm.engine.request_options import RequestOptions
from lookahead_vllm.engine.worker.cache import open_cache
from lookahead_vllm.verify.acceptance import accepted_paths
from lookahead_vllm.verify.tree_batch import TreeBatch

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.sampling_params import SamplingParams

logger = init_logger(f"vllm.{__name__}")


def _hide_dunders_of_llvmlite() -> None:
    """Let a second engine start in this process, now that numba is loaded.

    On CPU a starting worker looks at every attribute of every module (`_rebind_kernels`) and trips
    over llvmlite's library handle, which answers to any name, `__dict__` included.
    """
    handle = type(ffi.lib)
    original = handle.__getattr__

    def getattr_without_dunders(self: Any, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return original(self, name)

    handle.__getattr__ = getattr_without_dunders


_hide_dunders_of_llvmlite()


def _compile_kernels() -> None:
    """Run what the worker calls beside the proposer on two nodes, so that no request waits for the
    compiler."""
    forest, zeros = DraftForest.of([DraftTree.from_lists([0, 1], [-1, -1])]), np.zeros(1, np.int64)
    forest.take(zeros, forest.sizes)
    forest.faults(2, forest.sizes)
    TreeBatch.build(forest, zeros, zeros, zeros)
    accepted_paths(forest, np.zeros(1, np.int32), np.zeros(2, np.int32))


@dataclass
class Counters:
    """What the engine did with drafts since it started."""

    trees: int = 0
    branching_trees: int = 0
    nodes: int = 0
    accepted_nodes: int = 0
    moved_tokens: int = 0
    refused_trees: int = 0


@dataclass(slots=True)
class LiveRequest:
    """A request that gets drafts."""

    request_id: str
    remaining: int
    """Tokens until max_tokens."""
    stops: frozenset[int | None]
    """Tokens that end it."""


BACKOFF_AFTER = 16
"""Steps in a row in which no node was worth sending; from then on,"""
BACKOFF = 3
"""so many steps are passed over before the next one is looked at."""


class LookaheadDrafter:
    """What vLLM builds from ``{"method": "custom_class"}`` and calls `runner.drafter`."""

    def __init__(self, vllm_config: VllmConfig) -> None:
        if not config.is_lookahead(vllm_config):
            raise ValueError(
                f"{config.DRAFTER_PATH} was given as a custom_class; "
                'write {"method": "lookahead"} in --speculative-config instead'
            )
        self.options = config.options_of(vllm_config)
        self.counters = Counters()
        self.may_branch = False
        """Whether this engine's attention can verify branching trees; the runner finds out."""
        # Of the ranks that share a model, one drafts: its drafts come to all, see `exchange`.
        self.leads = vllm_config.parallel_config.rank == 0
        self.proposer: Proposer = make_proposer(self.options) if self.leads else NoProposer()
        self._cache = open_cache(vllm_config, self.options, self.proposer) if self.leads else None
        if self._cache is not None:
            shutdown.before_teardown(self.shutdown)
        self._max_model_len = vllm_config.model_config.max_model_len
        self._vocab_size = vllm_config.model_config.get_vocab_size()
        self._options: dict[str, RequestOptions] = {}
        self._live: dict[str, LiveRequest | None] = {}
        self._with_grammar: set[str] = set()
        self._sent: dict[str, SentDraft] = {}
        """The drafts that wait to be verified."""
        self._uncommitted: dict[str, list[int]] = {}
        """Tokens of live requests that the proposer has not been told of yet."""
        self.drafted_for: frozenset[str] = frozenset()
        """The requests that the proposer was asked for in the last step."""
        self._steps_without_nodes = 0
        """Steps in a row without a node."""
        self.backoff_left = 0
        """How many of the next steps are passed over."""
        _compile_kernels()

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        """There is no draft model to load."""

    def propose(self, *args: Any, **kwargs: Any) -> NoReturn:
        """vLLM's own call names no request; our runner calls `commit` and `draft` instead."""
        raise RuntimeError(
            "lookahead's drafter runs in a worker that is not lookahead's; write worker_cls='auto'"
        )

    def announce(self, request_id: str, params: SamplingParams | None) -> SamplingParams | None:
        """A request has come; returns its parameters without lookahead's part of `extra_args`."""
        if params is None:
            return None
        params = copy(params)  # the answers of one request share theirs
        options, params.extra_args = request_options.received(params.extra_args)
        # Where nothing is drafted, nobody reads the references.
        self._options[request_id] = options if self.leads else replace(options, references=())
        if params.structured_outputs is not None:
            self._with_grammar.add(request_id)
        return params

    @property
    def has_grammars(self) -> bool:
        """Whether a live request is under a grammar."""
        return bool(self._with_grammar)

    def live(self, request_id: str) -> LiveRequest | None:
        """The request's record; None for one that gets no drafts.

        Raises
        ------
        KeyError
            It is not followed yet.
        """
        return self._live[request_id]

    def follow(
        self, request_id: str, prompt: Sequence[int], params: SamplingParams | None
    ) -> LiveRequest | None:
        """Make the record of a request, at its first token.

        The proposer never hears of a request that turned lookahead off, nor of one that asks for
        one token: that can have no draft, and may be a beam search's, whose namespace is not known.
        """
        live = None
        if params is not None and params.max_tokens != 1:  # None: a pooling request
            options = self._options.pop(request_id)
            if options.enabled:
                self.proposer.start(
                    request_id, prompt, options.namespace, options.references, options.overrides
                )
                remaining = self._max_model_len if params.max_tokens is None else params.max_tokens
                stops = {params.eos_token_id, *(params.stop_token_ids or ())}
                live = LiveRequest(request_id, remaining, frozenset(stops))
        self._live[request_id] = live
        return live

    def back_off(self, request_ids: Sequence[str], emitted: Sequence[list[int]]) -> bool:
        """Whether this step is passed over, because nothing has been worth sending for a while.

        What was emitted is kept for the next step that is not.
        """
        if not self.backoff_left:
            return False
        if self._sent or not self._live.keys() >= set(request_ids):  # somebody is new
            self.backoff_left = 0
            return False
        self.backoff_left -= 1
        self.drafted_for = frozenset()
        for request_id, tokens in zip(request_ids, emitted, strict=True):
            if self._live[request_id] is not None:
                self._uncommitted.setdefault(request_id, []).extend(tokens)
        return True

    def commit(
        self, emitted: Sequence[tuple[LiveRequest, list[int]]], verified: Verified | None = None
    ) -> None:
        """Tell the proposer what was emitted, up to the first token that ends the request.

        And what the model said at the nodes, if it wants to know. What was drafted for these
        requests is verified, or out of date.
        """
        tokens: dict[str, list[int]] = {}
        for live, burst in emitted:
            self._sent.pop(live.request_id, None)
            if live.request_id in self._uncommitted:
                burst = self._uncommitted.pop(live.request_id) + burst
            if len(burst) > live.remaining:
                burst = burst[: live.remaining]
            if not live.stops.isdisjoint(burst):
                end = next(i for i, token in enumerate(burst) if token in live.stops)
                burst = burst[: end + 1]
            live.remaining -= len(burst)
            tokens[live.request_id] = burst
        self.proposer.extend(tokens)
        if verified is not None:
            self.proposer.observe(verified)

    def limits_of(self, live: LiveRequest, num_tokens: int) -> DraftLimits | None:
        """How large a tree this request may get; None where it gets no draft at all.

        Nodes take the slots after the `num_tokens` committed tokens, and one token more than the
        tree is deep can be emitted, so both end at max_model_len.
        """
        max_nodes = min(self.options.num_speculative_tokens, self._max_model_len - num_tokens - 1)
        max_depth = min(max_nodes, live.remaining - 1)
        if max_depth < 1:
            return None
        return DraftLimits(live.request_id, max_nodes, max_depth, self.may_branch, num_tokens)

    def draft(self, limits: Sequence[DraftLimits], load: Load) -> dict[str, list[int]]:
        """The trees for these wants, remembered until they are verified; returns their tokens.

        A want that gets no node is left out. `load` is what the next step has to do beside them.
        """
        forest = DraftForest.of(self.proposer.propose(limits, load))
        self.drafted_for = frozenset(limit.request_id for limit in limits)
        if not forest.num_nodes:
            self._steps_without_nodes += 1
            # A grammar has something to say in every step.
            may_back_off = self.options.budget == "auto" and not self._with_grammar
            if self._steps_without_nodes >= BACKOFF_AFTER and may_back_off:
                self.backoff_left = BACKOFF
            return {}
        self._steps_without_nodes = 0
        forest = self._checked(forest, limits)
        tokens = forest.tokens.tolist()
        drafts: dict[str, list[int]] = {}
        for i, (limit, (first, end)) in enumerate(
            zip(limits, pairwise(forest.firsts.tolist()), strict=True)
        ):
            if first < end:
                drafts[limit.request_id] = own = tokens[first:end]
                self._sent[limit.request_id] = SentDraft(forest, i, own)
        return drafts

    def proposed(self, req_ids: Sequence[str]) -> ProposedDrafts | None:
        """What the scheduler has to know of the drafts of a step; None if there are none."""
        if not self._sent and not self.has_grammars:
            return None
        return ProposedDrafts(
            self._sent, req_ids, self.has_grammars, self.proposer.min_prob_beside_prompt
        )

    def finish(self, request_id: str) -> None:
        """The request has ended; a preempted one has not."""
        self._options.pop(request_id, None)
        self._sent.pop(request_id, None)
        self._with_grammar.discard(request_id)
        live = self._live.pop(request_id, None)
        if live is not None:
            if request_id in self._uncommitted:
                self.commit([(live, [])])
            self.proposer.finish(request_id)

    def begin_to_save(self) -> None:
        """The engine will end: save what was learned so far, beside its last requests."""
        if self._cache is not None:
            self._cache.begin_to_save()

    def shutdown(self) -> None:
        """The engine ends: save what was learned, where that was asked for."""
        if self._cache is not None:
            self._cache.close()

    def _checked(self, forest: DraftForest, limits: Sequence[DraftLimits]) -> DraftForest:
        """The forest without trees that no verifier could make sense of."""
        max_nodes = np.array([limit.max_nodes for limit in limits], np.int64)
        if forest.faults(self._vocab_size, max_nodes).any():
            forest = DraftForest.of(
                [self._accept(tree, limit) for tree, limit in zip(forest, limits, strict=True)]
            )
        if not self.may_branch and forest.branching.any():
            forest = forest.cut(forest.sizes, np.ones(len(forest), np.bool_))
        return forest

    def _accept(self, tree: DraftTree, limit: DraftLimits) -> DraftTree:
        try:
            tree.check(self._vocab_size, limit.max_nodes)
        except DraftTreeError as error:
            self.counters.refused_trees += 1
            logger.error_once(
                "Refused a malformed draft tree of proposer '%s': %s. "
                "The request goes on without a draft.",
                self.options.proposer,
                error,
            )
            return EMPTY_TREE
        return tree
