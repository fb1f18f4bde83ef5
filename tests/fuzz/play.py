"""Plays one round with both engines, and compares their replies."""

import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from copy import copy
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from vllm import LLM, SamplingParams
from vllm.config.reasoning import ReasoningConfig
from vllm.exceptions import VLLMValidationError
from vllm.inputs import EmbedsPrompt, TokensPrompt
from vllm.lora.request import LoRARequest
from vllm.sampling_params import RequestOutputKind, StructuredOutputsParams
from vllm.v1.core.sched.scheduler import Scheduler

from lookahead_vllm.draft.fleet import exchange
from lookahead_vllm.draft.proposers.registry import CLASS_PATHS
from lookahead_vllm.draft.trie import sessions
from lookahead_vllm.engine.drafter.recorder import Counters
from lookahead_vllm.options import request as request_options
from tests.fuzz.isolation import GENERATION_PROMPT, Leak, LeakDetector
from tests.fuzz.last_bits import Element, perturbed_logits, rounded_otherwise
from tests.fuzz.processes import counters_of, engine_elsewhere
from tests.fuzz.replies import Difference, Reply, agreement, differences
from tests.fuzz.round import TWO_STAGES, Request, Round
from tests.fuzz.spies import (
    Branching,
    branching_requests,
    chains_alone,
    growing_threads,
    recorded_drafts,
    sized_steps,
)
from tests.support import drafters, proposers
from tests.support.counted_twice import counted_twice
from tests.support.drafters import save_drafter
from tests.support.driving import drafter_of, engine, runner_of
from tests.support.hybrid_models import ENGINE_SETTINGS, HYBRIDS
from tests.support.models import STAGED, WANDERING, save_adapter, save_config
from tests.support.processors import NoRepeat
from tests.support.redis_server import RedisServer
from tests.support.tokenizer import save_tokenizer
from tests.support.valid_trees import checked_trees

CONFIGS = drafters.CONFIGS | HYBRIDS
PERTURBATIONS = 24
ROUNDINGS = 150
"""The most replays with other roundings of an fp8 KV cache."""
MAX_STEPS, MIN_SECONDS = 20_000, 60.0
"""After so many steps, and so long, requests are taken to run for ever. Steps in which all requests
wait for their grammars take 0.1 ms each."""
SHORT_SESSIONS = {
    "MIN_TOKENS": 8,
    "BLOCK_TOKENS": 4,
    "MAX_CHANGED_TOKENS": 4,
    "MAX_GENERATION_PROMPT": GENERATION_PROMPT,
}
"""Lets the texts of short requests be kept."""


@dataclass
class Played:
    """The result of a round."""

    replies: list[Any]
    """Lookahead's replies."""
    counters: Counters
    requests: Sequence[Request] = ()
    """The round's, and those that go on after answers."""
    branching: Branching = field(default_factory=lambda: Branching(set(), set()))
    preempted: int = 0
    refused: int = 0
    """Requests that both engines refused, if there is no difference."""
    ties: int = 0
    """Replies that differ, but that plain vLLM also gives in another batch."""
    differences: list[Difference] = field(default_factory=list)
    leaks: list[Leak] = field(default_factory=list)
    checked: Counter[str] = field(default_factory=Counter)
    """Nodes checked for leaks, by source."""


def play(
    llm: LLM,
    requests: Sequence[Request],
    adapters: Sequence[LoRARequest],
    references: Sequence[Sequence[list[int]]] = (),
    interruption: str = "",
    interrupt_every: int = 1,
) -> list[Reply]:
    """Send each request before its arrival step, and run the engine until all have finished.

    After every `interrupt_every` steps comes the interruption, one of INTERRUPTIONS.
    """
    core = llm.llm_engine
    replies = [Reply() for _ in requests]
    sessions: dict[int, Session] = {}
    waiting = sorted(range(len(requests)), key=lambda i: requests[i].arrival)
    step, begun = 0, time.monotonic()
    while waiting or core.has_unfinished_requests():
        while waiting and requests[waiting[0]].arrival <= step:
            i = waiting.pop(0)
            try:
                given = references[i] if references else ()
                if requests[i].turns:
                    sessions[i] = Session(llm, i, requests[i], adapters, given)
                else:
                    core.add_request(
                        str(i),
                        _prompt(llm, requests[i]),
                        _params(requests[i], given),
                        **_options(requests[i], adapters),
                    )
            except (ValueError, VLLMValidationError) as error:
                replies[i].refused = str(error)
        # The process of an engine without requests would never answer.
        for output in core.step() if core.has_unfinished_requests() else ():
            i = int(output.request_id)
            request, reply = requests[i], replies[i]
            if i in sessions:
                reply.add(output, request.streamed, sessions[i].turn)
                sessions[i].read(output.outputs[0])
            else:
                reply.add(output, request.streamed)
            longest = max(len(a.tokens) for a in reply.answers.values())
            abort = request.abort_after is not None and longest >= request.abort_after
            if abort and not output.finished:
                _abort(llm, output.request_id, request.aborts_within_step)
        step += 1
        if interruption and step % interrupt_every == 0:
            INTERRUPTIONS[interruption](llm)
        if step > MAX_STEPS and time.monotonic() - begun > MIN_SECONDS:
            raise RuntimeError(f"requests still run after {step} steps of the engine")
    return replies


def _abort(llm: LLM, request_id: str, within_step: bool) -> None:
    """Abort a request; `within_step`, an engine core in this process hears of it after the launch
    of the next step, as one in a process of its own may."""
    client = llm.llm_engine.engine_core
    core = getattr(client, "engine_core", None)
    abort = client.abort_requests
    if within_step and core is not None:
        abort = core.aborts_queue.put_nowait
    with mock.patch.object(client, "abort_requests", abort):
        llm.llm_engine.abort_request([request_id])


def _pause_or_resume(llm: LLM, clear_cache: bool = False) -> None:
    core = llm.llm_engine.engine_core.engine_core
    if core.is_scheduler_paused():
        core.resume_scheduler()
    else:
        core.pause_scheduler("keep", clear_cache)


INTERRUPTIONS: dict[str, Callable[[LLM], object]] = {
    # All requests are preempted, and start again.
    "resets": lambda llm: llm.llm_engine.reset_prefix_cache(reset_running_requests=True),
    "pauses": _pause_or_resume,
    "pauses that clear caches": partial(_pause_or_resume, clear_cache=True),
}


def _options(request: Request, adapters: Sequence[LoRARequest]) -> dict[str, Any]:
    return {
        "lora_request": None if request.adapter is None else adapters[request.adapter - 1],
        "priority": request.priority,
    }


def _params(request: Request, references: Sequence[list[int]]) -> SamplingParams:
    structured = request.structured and StructuredOutputsParams(**request.structured)
    arguments = dict(request.params)
    if references:
        extra_args = arguments.get("extra_args", {})
        arguments["extra_args"] = {**extra_args, "lookahead_reference": references}
    if request.spellings:
        spellings = tuple(np.array(text, "<i4").tobytes() for text in request.spellings)
        extra_args = arguments.get("extra_args", {})
        arguments["extra_args"] = {**extra_args, request_options.TOOL_RESULTS: spellings}
    return SamplingParams(
        **arguments,
        structured_outputs=structured,
        output_kind=RequestOutputKind.DELTA if request.streamed else RequestOutputKind.CUMULATIVE,
    )


class Session:
    """A streaming session, driven as vLLM's `AsyncLLM` does it; sends its first turn."""

    def __init__(
        self,
        llm: LLM,
        index: int,
        request: Request,
        adapters: Sequence[LoRARequest],
        references: Sequence[list[int]],
    ) -> None:
        self.turn = 0
        """The number of turns that have ended."""
        self._engine = llm.llm_engine
        self._name = str(index)
        self._id: str | None = None
        self._inputs = [
            (_prompt(llm, replace(turn, prompt=list(turn.prompt))), _params(turn, references))
            for turn in _inputs(request)  # vLLM may extend a prompt
        ]
        self._first_params = self._inputs[0][1]
        self._hurry_after = request.hurry_after
        self._length, self._is_closed = 0, False
        self._options: dict[str, Any] = dict(
            supported_tasks=self._engine.get_supported_tasks(), **_options(request, adapters)
        )
        self._send()
        self._hurry()

    def read(self, output: Any) -> None:
        """Send what comes after this output of a turn."""
        self._length += len(output.token_ids)  # sessions are streamed
        self._hurry()
        if output.finish_reason is not None:
            self.turn, self._length = self.turn + 1, 0
            self._send()

    def _hurry(self) -> None:
        while self._hurry_after is not None and self._length >= self._hurry_after:
            if self._is_closed:
                break
            self._send()

    def _send(self) -> None:
        """The next input, or the end: vLLM ends a session at a request that is not resumable, and
        ignores its prompt."""
        if self._inputs:
            self._add(*self._inputs.pop(0), resumable=True)
        elif not self._is_closed:
            self._is_closed = True
            self._add(TokensPrompt(prompt_token_ids=[0]), self._first_params, resumable=False)

    def _add(self, prompt: TokensPrompt, params: SamplingParams, resumable: bool) -> None:
        request = self._engine.input_processor.process_inputs(
            self._id or self._name, prompt, params, resumable=resumable, **self._options
        )
        if self._id is None:
            self._engine.input_processor.assign_request_id(request)
            self._id = request.request_id
        else:
            request.external_req_id = self._name
        # Both parts of the engine extend the prompt of their request.
        of_core = copy(request)
        of_core.prompt_token_ids = list(request.prompt_token_ids)
        self._engine.output_processor.add_request(request, None)
        self._engine.engine_core.add_request(of_core)


def _prompt(llm: LLM, request: Request) -> Any:
    salt: dict[str, Any] = {} if request.salt is None else {"cache_salt": request.salt}
    if request.embedded is None:
        return TokensPrompt(prompt_token_ids=request.prompt, **salt)
    runner = runner_of(llm)
    with torch.inference_mode():
        ids = torch.tensor(request.prompt).to(runner.device)
        vectors = runner.model.embed_input_ids(ids).cpu()
    if request.noise is not None:
        rng = torch.Generator().manual_seed(request.noise)
        vectors = vectors.std() * torch.randn(vectors.shape, generator=rng)
    if all(request.embedded):
        return EmbedsPrompt(prompt_embeds=vectors, **salt)
    return EmbedsPrompt(
        prompt_embeds=vectors,
        prompt_token_ids=[max(token, 0) for token in request.known_prompt],
        prompt_is_token_ids=[not embedded for embedded in request.embedded],
        **salt,
    )


class Rounds:
    """Plays rounds in this process; models and adapters are saved under `folder`."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._adapters = [save_adapter(folder / f"adapter-{i}", i) for i in (1, 2)]

    def compare(self, round_: Round) -> Played:
        """Play the round with both engines; stop at the first difference that is not a tie."""
        with self._engine(round_) as llm:
            plain = play(llm, round_.requests, self._adapters)
            turns = [turn for each in map(_turns, round_.requests, plain) for turn in each]
            longer = play(llm, [turn for turn, _ in turns], self._adapters)
            if "prefix caching" in round_.features:
                more = _follow_ups(round_, plain)
                plain += play(llm, more, self._adapters)
                round_ = replace(round_, requests=[*round_.requests, *more])
        played = self._play_lookahead(round_, plain, turns, longer)
        played.requests = round_.requests
        for difference in differences(round_.requests, plain, played.replies):
            if self._is_tie(round_, difference.index, played.replies[difference.index]):
                played.ties += 1
            else:
                played.differences.append(difference)
                break
        return played

    def _play_lookahead(
        self,
        round_: Round,
        plain: Sequence[Reply],
        turns: Sequence[tuple[Request, list[int]]],
        longer: Sequence[Reply],
    ) -> Played:
        """Play the requests; twice with a trie, which holds the answers the second time."""
        requests = round_.requests
        proposers.RECORDED.clear()
        # First the longer answers: drafts go on after the end of a turn.
        for (turn, answer), reply in zip(turns, longer, strict=True):
            texts = [a.tokens for a in reply.answers.values() if a.tokens[: len(answer)] == answer]
            proposers.record([turn.prompt], [[*texts, answer]])
        proposers.record(
            [request.known_prompt for request in requests if not request.turns],
            [
                [answer.tokens for answer in reply.answers.values()]
                for request, reply in zip(requests, plain, strict=True)
                if not request.turns
            ],
        )
        references = [_references(request, plain) for request in requests]
        proposer = round_.lookahead["proposer"]
        passes = 2 if proposer in ("ngram_trie", "hybrid") else 1
        detector = LeakDetector(requests, references, round_.lookahead)
        played = Played([], Counters())
        with (
            nullcontext() if round_.processes else recorded_drafts(detector),
            counted_preemptions() as preempted,
            branching_requests() as played.branching,
            counted_twice(),
            checked_trees(),
            mock.patch.multiple(sessions, **SHORT_SESSIONS),
            self._shared(round_) as lookahead,
        ):
            for engine_passes in [1] * passes if round_.fleet else [passes]:
                with self._engine(round_, lookahead, **round_.stress) as llm:
                    for _ in range(engine_passes):
                        replies = play(
                            llm,
                            requests,
                            self._adapters,
                            references,
                            round_.interruption,
                            round_.interrupt_every,
                        )
                    counters = counters_of(llm) if round_.processes else drafter_of(llm).counters
                    played.replies, played.counters = replies, counters
        played.preempted = len(preempted)
        played.refused = sum(reply.refused is not None for reply in replies)
        # Proposers of the tests hold the plain answers; the detector knows no turns.
        if (
            not round_.processes
            and not CLASS_PATHS[proposer].startswith("tests.")
            and "sessions" not in round_.features
        ):
            played.leaks, played.checked = detector.leaks(), detector.checked
        return played

    @contextmanager
    def _shared(self, round_: Round) -> Iterator[dict[str, Any]]:
        """The speculative config of the round's engines; in a fleet they share a server."""
        if not round_.fleet:
            yield round_.lookahead
            return
        folder = Path(tempfile.mkdtemp(dir=self._folder))  # a socket's path must be short
        server = RedisServer(folder)
        try:
            with mock.patch.object(exchange, "INTERVAL_SECONDS", 0.01):
                yield {**round_.lookahead, "share_with": server.url}
        finally:
            server.kill()

    def _is_tie(self, round_: Round, index: int, reply: Reply) -> bool:
        """Whether plain vLLM also gives this reply, in another batch, with perturbed logits, or
        with other roundings of its fp8 KV cache.

        The last bits of float32 sums depend on the shape of the batch. Two tokens that are equally
        likely up to those bits may therefore change places in plain vLLM, too, and an element of an
        fp8 KV cache may be rounded to another value.
        """
        request = replace(round_.requests[index], arrival=0)
        others = [replace(r, arrival=0) for i, r in enumerate(round_.requests) if i != index]
        with self._engine(round_) as llm:
            for num_others in (0, 1, 2, 3, 5, 7, 11, len(others)):
                plain = play(llm, [request, *others[:num_others]], self._adapters)[0]
                if not differences([request], [plain], [reply]):
                    return True
            for seed in range(PERTURBATIONS):
                with perturbed_logits(seed):
                    plain = play(llm, [request], self._adapters)[0]
                if not differences([request], [plain], [reply]):
                    return True
            return "fp8 cache" in round_.features and self._is_rounding(llm, request, reply)

    def _is_rounding(self, llm: LLM, request: Request, reply: Reply) -> bool:
        """Whether plain vLLM gives this reply if it rounds some elements of its fp8 KV cache to the
        other neighbour, all of them elements whose last bits decide about the neighbour.

        They are found one by one: one that makes the replies agree longer stays rounded.
        """

        def replay(elements: set[Element]) -> tuple[Reply, list[Element]]:
            llm.reset_prefix_cache()  # so that all K and V are written again
            with rounded_otherwise(elements) as near:
                return play(llm, [request], self._adapters)[0], near

        rounded: set[Element] = set()
        plain, untried = replay(rounded)
        agreed = agreement(plain, reply)
        for _ in range(ROUNDINGS):
            if not untried:
                break
            trial = {*rounded, untried.pop(0)}
            plain, near = replay(trial)
            if not differences([request], [plain], [reply]):
                return True
            if agreement(plain, reply) > agreed:
                agreed, rounded = agreement(plain, reply), trial
                untried = [element for element in near if element not in rounded]
        return False

    @contextmanager
    def _engine(
        self, round_: Round, lookahead: dict[str, Any] | None = None, **stress: Any
    ) -> Iterator[LLM]:
        settings = dict(round_.settings, skip_tokenizer_init=False)
        settings.update(ENGINE_SETTINGS.get(round_.model, {}))
        if "custom_logits_processor" in round_.features:
            settings["logits_processors"] = [NoRepeat]
        if "reasoning_config" in settings:
            settings["reasoning_config"] = ReasoningConfig(**settings["reasoning_config"])
        settings["load_format"] = STAGED if round_.processes == TWO_STAGES else WANDERING
        # With embeddings, vLLM adds a token to the tokenizer that it caches by path.
        folder = self._folder / ("embeddings" if "enable_prompt_embeds" in settings else "ids")
        folder.mkdir(exist_ok=True)
        model = save_tokenizer(save_config(round_.model, folder, CONFIGS))
        if lookahead and round_.drafter:
            lookahead = {**lookahead, "drafter": save_drafter(round_.drafter, folder)}
        start: Any = partial(engine, drafts=None)  # a round may have none; `Report` counts them
        if lookahead and round_.processes:
            start = engine_elsewhere
            if round_.processes == "engine and worker":
                stress["distributed_executor_backend"] = "mp"
            if round_.processes == TWO_STAGES:
                stress["pipeline_parallel_size"] = 2
        features = set() if lookahead is None else round_.features
        with (
            chains_alone() if "chains alone" in features else nullcontext(),
            sized_steps() if "sized steps" in features else nullcontext(),
            growing_threads() if "growing threads" in features else nullcontext(),
            start(model, lookahead, **{**settings, **stress}) as llm,
        ):
            yield llm


def _inputs(request: Request) -> list[Request]:
    """Of a session: the prompt and the parameters of each turn."""
    changes = [{}, *(request.changes or [{} for _ in request.turns])]
    return [
        replace(request, prompt=tokens, params={**request.params, **changed}, turns=[])
        for tokens, changed in zip([request.prompt, *request.turns], changes, strict=True)
    ]


def _turns(request: Request, reply: Reply) -> list[tuple[Request, list[int]]]:
    """Of a session: each turn as a request that does not stop there, and its answer."""
    turns: list[tuple[Request, list[int]]] = []
    if not request.turns:
        return turns
    context: list[int] = []
    ends = ("stop_token_ids", "min_tokens", "repetition_detection")
    for turn, answer in zip(_inputs(request), reply.answers.values(), strict=False):
        context = context + turn.prompt
        params = {k: v for k, v in turn.params.items() if k not in ends}
        params.update(max_tokens=turn.params["max_tokens"] + 8, ignore_eos=True)
        alone = replace(turn, prompt=context, params=params, arrival=0, abort_after=None)
        turns.append((alone, answer.tokens))
        context = context + answer.tokens[:-1]  # vLLM drops the last token of each turn
    return turns


def _follow_ups(round_: Round, replies: Sequence[Reply]) -> list[Request]:
    """Requests that go on after the answers to others, which have ended by then."""
    room = round_.settings["max_model_len"] - 8
    last = max(request.arrival for request in round_.requests)
    follow_ups = []
    for i, (request, reply) in enumerate(zip(round_.requests, replies, strict=True)):
        answers = list(reply.answers.values())
        if request.turns or request.embedded or not answers or request.abort_after is not None:
            continue
        prompt = [*request.prompt, *answers[0].tokens, *request.prompt[: 1 + i % 9]]
        if len(prompt) < room:
            arrival = last + 60 + request.arrival
            follow_ups.append(replace(request, prompt=prompt, arrival=arrival))
    return follow_ups


def _references(request: Request, replies: Sequence[Reply]) -> list[list[int]]:
    """The request's references as token ids; some are answers to other requests."""
    texts = [
        [answer.tokens for answer in replies[r].answers.values()] if isinstance(r, int) else [r]
        for r in request.references
    ]
    return [text for some in texts for text in some if text]


@contextmanager
def counted_preemptions() -> Iterator[list[str]]:
    """The ids of the requests that are preempted, one for each preemption."""
    preempted: list[str] = []
    original = Scheduler._preempt_request

    def preempt(self: Any, request: Any, *args: Any, **kwargs: Any) -> Any:
        preempted.append(request.request_id)
        return original(self, request, *args, **kwargs)

    with mock.patch.object(Scheduler, "_preempt_request", preempt):
        yield preempted
