"""The live requests of a worker: what they ask of lookahead, and how far they have come."""

from collections.abc import Iterable
from copy import copy
from dataclasses import dataclass

import numpy as np
from vllm.sampling_params import SamplingParams
from vllm.v1.core.sched.output import NewRequestData

from lookahead_vllm.draft.jit import Int32s
from lookahead_vllm.draft.progress import Progress
from lookahead_vllm.draft.tree import UNKNOWN
from lookahead_vllm.engine.drafter.drafter import LookaheadDrafter
from lookahead_vllm.engine.grammar.copies import GrammarCopies
from lookahead_vllm.options import request as request_options
from lookahead_vllm.options.request import RequestOptions

MAX_TOKENS_READ = 1 << 19
"""The most tokens that vLLM reads to find the end of one request's reasoning. Under a grammar it
reads the whole text at each node; a million tokens take 1.4 ms."""


def prompt_tokens(request: NewRequestData) -> Int32s:
    """A request's prompt, int32 [m]; UNKNOWN in place of embeddings and images."""
    prompt = np.array(request.prompt_token_ids or (), np.int32)
    if (are_ids := request.prompt_is_token_ids) is not None:
        prompt[~np.array(are_ids, np.bool_)] = UNKNOWN
    for feature in request.mm_features:
        place = feature.mm_position
        span = prompt[place.offset : place.offset + place.length]
        span[... if place.is_embed is None else place.is_embed.numpy()] = UNKNOWN
    return prompt


@dataclass(eq=False, slots=True)
class LiveRequest:
    """A request on the drafting rank, from its first prompt token to its end."""

    row: int
    """In `Progress`."""
    prompt: Int32s | None
    """int32 [m]; None once it was passed to the proposer."""
    num_prompt: int
    """A session's next turn has a longer one."""
    params: SamplingParams | None
    """None for a pooling request."""
    options: RequestOptions | None
    """None once it was passed to the proposer, because references are long."""
    is_known: bool = False
    """Whether the proposer knows it."""

    @property
    def has_grammar(self) -> bool:
        return self.params is not None and self.params.structured_outputs is not None


class LiveRequests:
    """The requests of a worker, which passes them on to its proposer at their first token.

    Only the drafting rank has any.

    Attributes
    ----------
    progress : Progress
        The tokens of each request.
    """

    def __init__(self, drafter: LookaheadDrafter, grammars: GrammarCopies) -> None:
        self.progress = Progress()
        self._drafter, self._grammars = drafter, grammars
        self._requests: dict[str, LiveRequest] = {}
        self._unfollowed: set[str] = set()
        """Those that the proposer does not know yet."""

    def __contains__(self, req_id: str) -> bool:
        return req_id in self._requests

    def __getitem__(self, req_id: str) -> LiveRequest:
        return self._requests[req_id]

    def is_next_turn(self, new: NewRequestData) -> bool:
        """Whether a live request comes with a longer prompt: it is the next turn of a session."""
        known = self._requests[new.req_id]
        return known.prompt is None and new.prompt_len > known.num_prompt

    def start(self, new: NewRequestData) -> None:
        """Add a new request, or one that returns from a preemption with all its tokens.

        Takes lookahead's options out of its sampling parameters. One that returns keeps those that
        it had: its parameters have no references any more.
        """
        options = None
        if (params := new.sampling_params) is not None:
            params = new.sampling_params = copy(params)  # several answers to a request share them
            options, params.extra_args = request_options.options_in_worker(params.extra_args)
        if not self._drafter.is_drafting_rank:
            return
        assert new.prefill_token_ids is not None
        progress, num_tokens = self.progress, len(new.prefill_token_ids)
        if (known := self._requests.get(new.req_id)) is not None:
            before = int(progress.arrays.num_tokens[known.row])
            progress.arrays.num_repeated[known.row] += max(before - num_tokens, 0)
            progress.resume(known.row, num_tokens)
            return
        row, prompt = progress.add(new.req_id, num_tokens), prompt_tokens(new)
        self._requests[new.req_id] = LiveRequest(row, prompt, new.prompt_len, params, options)
        self._unfollowed.add(new.req_id)
        if options is not None and options.enabled:
            self._grammars.start(new)

    def follow(self, req_ids: Iterable[str]) -> None:
        """Pass those of these requests to the proposer that it does not know."""
        for req_id in req_ids if self._unfollowed else ():
            if req_id in self._unfollowed:
                self._unfollowed.remove(req_id)
                self._follow(req_id, self._requests[req_id])

    def _follow(self, req_id: str, request: LiveRequest) -> None:
        """Pass a request to the proposer.

        It gets no requests that turned lookahead off, and none that are for one token: these cannot
        have a draft, and may belong to a beam search, whose namespace is unknown.
        """
        drafter, params = self._drafter, request.params
        prompt, options = request.prompt, request.options
        request.prompt = request.options = None
        if params is None or params.max_tokens == 1 or options is None or not options.enabled:
            return
        assert prompt is not None
        request.is_known = True
        with drafter.surviving("begin with a request"):
            texts = options.references, options.spellings
            drafter.proposer.start(req_id, prompt, options.namespace, *texts)  # type: ignore[arg-type]
            most = drafter.max_model_len if params.max_tokens is None else params.max_tokens
            stops = params.eos_token_id, *(params.stop_token_ids or ())
            self.progress.follow(request.row, drafter.proposer.text_of(req_id), most, stops)

    def most_nodes(self, req_id: str, max_nodes: int) -> int:
        """`max_nodes`, or fewer if vLLM reads the request's text at each node."""
        request = self._requests[req_id]
        if self._drafter.reads_reasoning and request.has_grammar:
            num_tokens = int(self.progress.arrays.num_tokens[request.row])
            return min(max_nodes, MAX_TOKENS_READ // num_tokens)
        return max_nodes

    def finish(self, req_id: str) -> LiveRequest | None:
        """Remove a request that has ended. A preempted request has not."""
        self._unfollowed.discard(req_id)
        self._grammars.finish(req_id)
        request = self._requests.pop(req_id, None)
        if request is not None:
            self.progress.pop(req_id)
            if request.is_known:
                with self._drafter.surviving("end a request"):
                    self._drafter.proposer.finish(req_id)
        return request
