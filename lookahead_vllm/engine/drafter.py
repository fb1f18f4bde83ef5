"""Between vLLM's runner and a proposer: feeds it what was committed, remembers what it drafted."""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn

from llvmlite.binding import ffi
from vllm.logger import init_logger

from lookahead_vllm.draft.proposer import DraftRequest, Proposer
from lookahead_vllm.draft.registry import make_proposer
from lookahead_vllm.draft.tree import EMPTY_TREE, DraftTree, DraftTreeError
from lookahead_vllm.engine import config, request_options, shutdown
from lookahead_vllm.engine.cache import open_cache
from lookahead_vllm.engine.request_options import RequestOptions

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


@dataclass
class Counters:
    """What the engine did with drafts since it started."""

    trees: int = 0
    branching_trees: int = 0
    nodes: int = 0
    accepted_nodes: int = 0
    moved_tokens: int = 0
    refused_trees: int = 0


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
        self.proposer: Proposer = make_proposer(self.options)
        self._cache = open_cache(vllm_config, self.options, self.proposer)
        if self._cache is not None:
            shutdown.before_teardown(self.shutdown)
        self._max_model_len = vllm_config.model_config.max_model_len
        self._vocab_size = vllm_config.model_config.get_vocab_size()
        self._options: dict[str, RequestOptions] = {}
        self._trees: dict[str, DraftTree] = {}
        self._lengths: dict[str, int] = {}

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
        self._options[request_id], params.extra_args = request_options.received(params.extra_args)
        return params

    def commit(
        self,
        request_id: str,
        prompt: Sequence[int],
        tokens: list[int],
        params: SamplingParams | None,
    ) -> None:
        """Tell the proposer what was emitted, up to the first token that ends the request.

        It never hears of a request that turned lookahead off, nor of one that asks for one token:
        that can have no draft, and may be a beam search's, whose namespace is not known.
        """
        if params is None:  # a pooling request
            return
        if request_id not in self._lengths:
            options = self._options[request_id]
            if not options.enabled or params.max_tokens == 1:
                return
            self.proposer.start(request_id, prompt, options.namespace, options.references)
            self._lengths[request_id] = 0
        tokens = tokens[: self._remaining(request_id, params)]
        stops = {params.eos_token_id, *(params.stop_token_ids or ())}
        end = next((i for i, token in enumerate(tokens) if token in stops), len(tokens))
        tokens = tokens[: end + 1]
        self.proposer.extend(request_id, tokens)
        self._lengths[request_id] += len(tokens)

    def want(
        self, request_id: str, num_tokens: int, params: SamplingParams | None
    ) -> DraftRequest | None:
        """How large a tree this request may get; None where it gets no draft at all.

        Nodes take the slots after the `num_tokens` committed tokens, and one token more than the
        tree is deep can be emitted, so both end at max_model_len.
        """
        if params is None or request_id not in self._lengths:
            return None
        max_nodes = min(self.options.num_speculative_tokens, self._max_model_len - num_tokens - 1)
        max_depth = min(max_nodes, self._remaining(request_id, params) - 1)
        if max_depth < 1:
            return None
        return DraftRequest(request_id, max_nodes, max_depth, self.may_branch)

    def draft(self, wants: Sequence[DraftRequest], num_plain_tokens: int) -> dict[str, list[int]]:
        """One tree for each want, remembered until it is verified; returns the nodes' tokens.

        `num_plain_tokens` counts the tokens of the next step that belong to no want.
        """
        drafts: dict[str, list[int]] = {}
        trees = self.proposer.propose(wants, num_plain_tokens)
        for want, tree in zip(wants, trees, strict=True):
            tree = self._accept_tree(tree, want)
            self._trees[want.request_id] = tree
            drafts[want.request_id] = tree.tokens.tolist()
        return drafts

    def recall(self, request_id: str, scheduled: list[int]) -> DraftTree:
        """The tree whose nodes were scheduled, possibly cut; a chain if they are not its own."""
        tree = self._trees.get(request_id, EMPTY_TREE)
        if tree.tokens[: len(scheduled)].tolist() == scheduled:
            return tree.prefix(len(scheduled))
        return DraftTree.chain(scheduled)

    def finish(self, request_id: str) -> None:
        """The request has ended; a preempted one has not."""
        self._options.pop(request_id, None)
        self._trees.pop(request_id, None)
        if self._lengths.pop(request_id, None) is not None:
            self.proposer.finish(request_id)

    def shutdown(self) -> None:
        """The engine ends: save what was learned, where that was asked for."""
        if self._cache is not None:
            self._cache.close()

    def _remaining(self, request_id: str, params: SamplingParams) -> int:
        if params.max_tokens is None:
            return self._max_model_len
        return params.max_tokens - self._lengths[request_id]

    def _accept_tree(self, tree: DraftTree, want: DraftRequest) -> DraftTree:
        try:
            tree.check(self._vocab_size, want.max_nodes)
        except DraftTreeError as error:
            self.counters.refused_trees += 1
            logger.error_once(
                "Refused a malformed draft tree of proposer '%s': %s. "
                "The request goes on without a draft.",
                self.options.proposer,
                error,
            )
            return EMPTY_TREE
        return tree if self.may_branch or tree.is_chain else tree.best_chain()
