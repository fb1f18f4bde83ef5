"""Copies of the requests' grammars on the drafting rank, to draft the text that they dictate.

vLLM keeps grammars in the scheduler's process. Under late drafting, that process receives a step's
tokens too late: the next drafts are being grown. So the drafting rank compiles each grammar a
second time and advances the copy by itself. A copy that is missing, late or wrong costs only
drafts: the scheduler's grammar makes the masks.
"""

import logging
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from vllm.config import VllmConfig
from vllm.logger import init_logger
from vllm.v1.core.sched.output import NewRequestData
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager

from lookahead_vllm.draft.tree import EMPTY_TREE, DraftTree
from lookahead_vllm.engine import patches
from lookahead_vllm.engine.grammar.tree_walk import GrammarTreeWalk, accept_tokens_one_by_one
from lookahead_vllm.machine import use_all_cores

logger = init_logger(f"vllm.{__name__}")

STEP_SECONDS = 0.002
"""What all walks of a step may take. The scheduler then fills the masks of what they keep, which
takes about as long."""

LEAST_SECONDS = 0.0001
"""What each walk may take at least: 16 nodes of a JSON schema."""


class GrammarCopies:
    """The grammars of live requests; compiled in threads, so that no step waits.

    Clients choose their grammars, so the time of the walks, by the `clock`, is limited.
    """

    def __init__(
        self, vllm_config: VllmConfig, clock: Callable[[], float] = time.thread_time
    ) -> None:
        self._config = vllm_config
        self._clock = clock
        self._seconds = 0.0
        """What all walks may still take in this step; below zero if one call took longer."""
        self._seconds_of: dict[str, float] = {}
        """The same for the walk of each request."""
        self._manager: StructuredOutputManager | None = None
        # The manager loads a tokenizer, and the first grammar makes a table of the vocabulary.
        self._compiling = ThreadPoolExecutor(1, "lookahead-grammars", use_all_cores)
        self._requests: dict[str, Request] = {}
        self._unread: dict[str, list[int]] = {}
        """Emitted tokens that a grammar has not read, because it is not compiled yet."""

    def __len__(self) -> int:
        """The number of requests that have a grammar."""
        return len(self._requests)

    def __contains__(self, request_id: str) -> bool:
        """Whether the request has a grammar."""
        return request_id in self._requests

    def start(self, new: NewRequestData) -> None:
        """Begin to compile the request's grammar, if it has one."""
        params = new.sampling_params
        if params is None or params.structured_outputs is None:
            return
        request = Request(
            new.req_id, new.prompt_token_ids, params, None, prompt_embeds=new.prompt_embeds
        )
        if not request.use_structured_output:
            return
        self._requests[new.req_id] = request
        self._compiling.submit(self._compile, request)

    def _compile(self, request: Request) -> None:
        if self._requests.get(request.request_id) is not request:  # it has ended
            return
        try:
            if self._manager is None:
                accept_tokens_one_by_one()
                self._manager = StructuredOutputManager(self._config)
            self._manager.grammar_init(request)
        except Exception as error:  # the scheduler refuses the request, now or soon
            self._give_up(request, error)

    def _give_up(self, request: Request, error: Exception) -> None:
        """Draft nothing more for a request whose copy has failed."""
        logger.debug("Lookahead: no copy of the grammar of %s: %s", request.request_id, error)
        assert request.structured_output_request is not None
        request.structured_output_request.grammar = error

    def advance(self, request_id: str, tokens: list[int]) -> None:
        """Advance a grammar by emitted tokens."""
        request = self._requests.get(request_id)
        if request is None:
            return
        structured = request.structured_output_request
        assert structured is not None
        request.append_output_token_ids(tokens)
        self._unread.setdefault(request_id, []).extend(tokens)
        if self._manager is None or structured.grammar is None:
            return
        tokens = self._unread.pop(request_id)
        if not isinstance(structured.grammar, Exception):
            # The scheduler makes no mask for a request that is aborted while a step runs, so its
            # last tokens may be forbidden, which is no error to be logged.
            log = logging.getLogger(type(structured.grammar).__module__)
            try:
                with patches.swapped(log, "disabled", True):
                    accepted = self._manager.accept_tokens(request, tokens)
                if not accepted:
                    raise ValueError(f"the grammar refuses one of {tokens}")
            except Exception as error:
                self._give_up(request, error)

    def complete(
        self,
        request_id: str,
        tree: DraftTree,
        max_nodes: int,
        max_depth: int,
        num_requests: int = 1,
    ) -> DraftTree:
        """The draft without what the grammar forbids, and with what it dictates, within limits.

        The time for walks is shared by the `num_requests` for which a step calls this.
        Empty until the copy has read all tokens of its request: an option that forces tokens in
        spite of the grammar, such as a thinking budget, would have a forbidden node accepted.
        """
        request = self._requests[request_id]
        structured = request.structured_output_request
        assert structured is not None
        grammar = None if request_id in self._unread else structured.grammar
        if self._manager is None or grammar is None or isinstance(grammar, Exception):
            return EMPTY_TREE
        seconds = self._grant(request_id, num_requests)
        if seconds <= 0:
            return EMPTY_TREE
        start = self._clock()
        try:
            return GrammarTreeWalk(
                self._manager, request, tree, max_nodes, max_depth, seconds, self._clock
            ).run()
        except Exception as error:
            self._give_up(request, error)
            return EMPTY_TREE
        finally:
            taken = self._clock() - start
            self._seconds -= taken
            self._seconds_of[request_id] -= taken

    def _grant(self, request_id: str, num_requests: int) -> float:
        """The seconds that the request's next walk may take.

        A call cannot be interrupted, so both the request and all together make up in later steps
        for what one took too long.
        """
        share = max(STEP_SECONDS / num_requests, LEAST_SECONDS)
        own = min(self._seconds_of.get(request_id, 0.0) + share, share)
        self._seconds_of[request_id] = own
        self._seconds = min(self._seconds + share, share * num_requests)
        return min(own, self._seconds)

    def finish(self, request_id: str) -> None:
        """Forget a request that has ended."""
        self._requests.pop(request_id, None)
        self._unread.pop(request_id, None)
        self._seconds_of.pop(request_id, None)

    def shutdown(self) -> None:
        """End the compiler's threads."""
        self._compiling.shutdown(cancel_futures=True)
        if self._manager is not None:
            self._manager.clear_backend()
