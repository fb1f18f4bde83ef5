"""What happens to a request before the engine sees it: checked, tokenized, given its namespace.

Six of vLLM's functions are wrapped, in processes where somebody asked for lookahead; requests
of an engine that does not serve it pass through untouched. What comes back beside the answers,
the metrics, is the affair of `stat_logger.py`.
"""

from __future__ import annotations

import functools
import gc
import time
import weakref
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import aclosing
from copy import copy
from dataclasses import replace
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np

from lookahead_vllm.draft.options import LookaheadOptions
from lookahead_vllm.engine import config, request_options
from lookahead_vllm.engine.request_options import RequestError, RequestOptions

SECONDS_BETWEEN_COLLECTIONS = 1.0
"""A collection of garbage takes milliseconds, so that no client can ask for one at will."""


@functools.cache
def install() -> None:
    """Wrap the functions and let the metrics in, once in each process."""
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
    from vllm.sampling_params import SamplingParams
    from vllm.v1.engine.async_llm import AsyncLLM
    from vllm.v1.engine.input_processor import InputProcessor
    from vllm.v1.engine.llm_engine import LLMEngine

    from lookahead_vllm.engine.front_end import stat_logger

    stat_logger.install()
    ChatCompletionRequest.to_sampling_params = with_prediction(
        ChatCompletionRequest.to_sampling_params
    )
    AsyncLLM.generate = checked_at_once(AsyncLLM.generate)
    AsyncLLM.add_request = prepared_if_ready(AsyncLLM.add_request)
    LLMEngine.add_request = prepared_if_ready(LLMEngine.add_request)
    InputProcessor.process_inputs = prepared(InputProcessor.process_inputs)
    SamplingParams._validate_spec_decode = serving_every_parameter(
        SamplingParams._validate_spec_decode
    )


def with_prediction(original: Callable[..., Any]) -> Callable[..., Any]:
    """`ChatCompletionRequest.to_sampling_params` that reads OpenAI's field `prediction`."""

    @functools.wraps(original)
    def to_sampling_params(self: Any, *args: Any, **kwargs: Any) -> Any:
        params = original(self, *args, **kwargs)
        prediction = (self.model_extra or {}).get("prediction")
        if prediction is not None:
            params.extra_args = request_options.with_prediction(params.extra_args, prediction)
        return params

    return to_sampling_params


def checked_at_once(original: Callable[..., Any]) -> Callable[..., Any]:
    """`AsyncLLM.generate` that refuses a bad request when it is called.

    vLLM's own runs only once the answer is iterated, when the status of a stream has been sent.
    """
    from vllm.v1.engine import EngineCoreRequest

    @functools.wraps(original)
    def generate(self: Any, prompt: Any, sampling_params: Any, *args: Any, **kwargs: Any) -> Any:
        ready = isinstance(prompt, EngineCoreRequest)  # add_request looks at its parameters
        if ready or not config.is_lookahead(self.vllm_config):
            return original(self, prompt, sampling_params, *args, **kwargs)
        server = config.options_of(self.vllm_config)
        options = _options(self, server, sampling_params.extra_args)
        if not options.references:
            return original(self, prompt, sampling_params, *args, **kwargs)
        if self not in _live_references:
            _live_references[self] = LiveReferences(server)
        tokens = options.reference_tokens * sampling_params.n
        release = _live_references[self].charge(tokens)
        outputs = tokenized_first(self, options, release, prompt, sampling_params, *args, **kwargs)
        # An answer that nobody iterates ends here.
        weakref.finalize(outputs, release).atexit = False
        return outputs

    async def tokenized_first(
        self: Any,
        options: RequestOptions,
        release: Callable[[], None],
        prompt: Any,
        sampling_params: Any,
        *args: Any,
        **kwargs: Any,
    ) -> AsyncIterator[Any]:
        """Keep long texts from blocking the event loop."""
        try:
            if _texts(options):
                tokenized = await self.renderer.tokenize_prompts_async(*_to_tokenize(options))
                options = _filled_in(options, tokenized)
            params = copy(sampling_params)
            params.extra_args = request_options.checked(params.extra_args, options)
            async with aclosing(original(self, prompt, params, *args, **kwargs)) as outputs:
                async for output in outputs:
                    yield output
        finally:
            release()

    return generate


class LiveReferences:
    """The references of all requests that an API server is answering.

    They take room in the trie, and time to insert, from everybody else.
    """

    def __init__(self, options: LookaheadOptions) -> None:
        self._most = options.max_live_reference_tokens
        self.tokens = 0
        self._next_collection = 0.0

    def _collect(self) -> None:
        """Release what answers to cut connections hold: they may be part of a cycle."""
        if (now := time.monotonic()) >= self._next_collection:
            gc.collect()
            self._next_collection = now + SECONDS_BETWEEN_COLLECTIONS

    def charge(self, tokens: int) -> Callable[[], None]:
        """Count a request's references; returns what to call, once or more, when it has ended.

        Raises
        ------
        RequestError
            There would be too many.
        """
        if tokens > self._most:
            raise RequestError(
                f"lookahead's references of {tokens} tokens were given, those of n answers "
                f"together, but this server allows {self._most} for all requests at a time; write "
                "fewer"
            )
        if self.tokens + tokens > self._most:
            self._collect()
        if self.tokens + tokens > self._most:
            raise RequestError(
                f"lookahead's references of {tokens} tokens were given, but this server allows "
                f"{self._most} for all requests at a time, of which {self.tokens} are in use; "
                "send the request again later, or without them"
            )
        self.tokens += tokens
        charged = [tokens]

        def release() -> None:
            if charged:
                self.tokens -= charged.pop()

        return release


_live_references: WeakKeyDictionary[Any, LiveReferences] = WeakKeyDictionary()
"""By engine client."""


def prepared(original: Callable[..., Any]) -> Callable[..., Any]:
    """`InputProcessor.process_inputs`, through which requests of every entry point go."""

    @functools.wraps(original)
    def process_inputs(self: Any, *args: Any, **kwargs: Any) -> Any:
        request = original(self, *args, **kwargs)
        _prepare(self, request)
        return request

    return process_inputs


def prepared_if_ready(original: Callable[..., Any]) -> Callable[..., Any]:
    """`add_request` of an engine, which also takes an `EngineCoreRequest` that a caller made."""
    from vllm.v1.engine import EngineCoreRequest

    @functools.wraps(original)
    def add_request(self: Any, request_id: str, prompt: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(prompt, EngineCoreRequest):
            params = prompt.sampling_params
            if params is not None and not request_options.is_marked(params.extra_args):
                _prepare(self.input_processor, prompt)
        return original(self, request_id, prompt, *args, **kwargs)

    return add_request


def _prepare(processor: Any, request: Any) -> None:
    """Write the request's checked options and its namespace into its sampling parameters."""
    if request.sampling_params is None or not config.is_lookahead(processor.vllm_config):
        return
    params = copy(request.sampling_params)  # of a request that a caller made, they are the caller's
    server = config.options_of(processor.vllm_config)
    options = _options(processor, server, params.extra_args)
    if _texts(options):
        tokenized = processor.renderer.tokenize_prompts(*_to_tokenize(options))
        options = _filled_in(options, tokenized)
    adapter = request.lora_request.lora_name if request.lora_request else None
    namespace = request_options.shared_namespace(
        server.share, adapter, request.cache_salt, options.namespace
    )
    options = replace(options, namespace=namespace)
    params.extra_args = request_options.sent(params.extra_args, options)
    request.sampling_params = params


def serving_every_parameter(original: Callable[..., Any]) -> Callable[..., Any]:
    """`SamplingParams._validate_spec_decode` that refuses neither `min_p` nor `logit_bias`."""

    @functools.wraps(original)
    def validate(self: Any, speculative_config: Any) -> None:
        ours = getattr(speculative_config, "model", None) == config.DRAFTER_PATH
        original(self, None if ours else speculative_config)

    return validate


def _options(
    engine: Any, server: LookaheadOptions, extra_args: Mapping[str, Any] | None
) -> RequestOptions:
    vocab_size = engine.model_config.get_vocab_size()
    options = request_options.given(extra_args, vocab_size, server)
    if _texts(options) and engine.renderer.tokenizer is None:
        raise RequestError(
            "a text was given as lookahead's reference, but this engine has no tokenizer "
            "(skip_tokenizer_init); write its token ids, as in [[1, 2, 3]]"
        )
    return options


def _texts(options: RequestOptions) -> list[str]:
    return [reference for reference in options.references if isinstance(reference, str)]


def _to_tokenize(options: RequestOptions) -> tuple[list[dict[str, str]], Any]:
    """The arguments of `BaseRenderer.tokenize_prompts`."""
    from vllm.renderers.params import TokenizeParams

    params = TokenizeParams(max_total_tokens=None, add_special_tokens=False)
    return [{"prompt": text} for text in _texts(options)], params


def _filled_in(options: RequestOptions, tokenized: Sequence[Mapping[str, Any]]) -> RequestOptions:
    """`options` with the token ids in the places of the texts."""
    ids = (np.array(prompt["prompt_token_ids"], "<i4").tobytes() for prompt in tokenized)
    return replace(
        options,
        references=tuple(next(ids) if isinstance(r, str) else r for r in options.references),
    )
