"""Prepares requests for the engine: checks options, tokenizes references, sets the namespace.

The patches are made in processes that make an engine with lookahead. Requests of engines without
it pass through unchanged.
"""

import asyncio
import functools
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import aclosing, contextmanager
from copy import copy
from dataclasses import replace
from typing import Any

import numpy as np
from vllm.exceptions import VLLMValidationError

from lookahead_vllm.engine import config, patches
from lookahead_vllm.engine.front_end import tool_results, usage
from lookahead_vllm.options import request as request_options
from lookahead_vllm.options.allowed import OptionError
from lookahead_vllm.options.request import MAX_ANSWERS, RequestOptions
from lookahead_vllm.options.server import LookaheadOptions


@contextmanager
def _refusing() -> Iterator[None]:
    """Refuse the request if one of its options is wrong: a server answers HTTP 400."""
    try:
        yield
    except OptionError as error:
        raise VLLMValidationError(str(error)) from None


@functools.cache
def install() -> None:
    """Patch vLLM's front-end, with its streams and its metrics, once in each process."""
    from vllm.entrypoints.launchers.api_server import entry
    from vllm.entrypoints.openai.chat_completion import serving
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
    from vllm.entrypoints.openai.responses.protocol import ResponsesRequest
    from vllm.sampling_params import SamplingParams
    from vllm.v1.engine.async_llm import AsyncLLM
    from vllm.v1.engine.input_processor import InputProcessor

    from lookahead_vllm.engine.front_end import stat_logger, streams

    stat_logger.install()
    streams.install()
    patches.patch(entry, "build_app", with_checked_places)
    patches.patch(ChatCompletionRequest, "to_sampling_params", with_prediction)
    patches.patch(ResponsesRequest, "to_sampling_params", tool_results.with_tool_results)
    patches.patch(serving, "UsageInfo", usage.with_predicted_tokens)
    patches.patch(AsyncLLM, "generate", with_early_check)
    patches.patch(InputProcessor, "process_inputs", preparing)
    patches.patch(SamplingParams, "_validate_spec_decode", allowing_every_parameter)


def with_checked_places(original: Callable[..., Any]) -> Callable[..., Any]:
    """vLLM's `build_app`, whose endpoints refuse options of lookahead that they would not read."""
    from vllm.entrypoints.serve.utils.api_utils import validate_json_request

    @functools.wraps(validate_json_request)
    async def validate(raw_request: Any) -> None:
        await validate_json_request(raw_request)
        try:
            body = await raw_request.json()
        except ValueError:
            return  # the endpoint refuses it
        with _refusing():
            request_options.check_places(body)

    @functools.wraps(original)
    def build_app(*args: Any, **kwargs: Any) -> Any:
        app = original(*args, **kwargs)
        app.dependency_overrides[validate_json_request] = validate
        return app

    return build_app


def with_prediction(original: Callable[..., Any]) -> Callable[..., Any]:
    """`ChatCompletionRequest.to_sampling_params`, which also reads OpenAI's field `prediction`, and
    the tool results."""
    noting = tool_results.with_tool_results(original)

    @functools.wraps(original)
    def to_sampling_params(self: Any, *args: Any, **kwargs: Any) -> Any:
        params = noting(self, *args, **kwargs)
        prediction = (self.model_extra or {}).get("prediction")
        if prediction is not None:
            extra_args = params.extra_args or {}
            params.extra_args = {**extra_args, request_options.PREDICTION: prediction}
        return params

    return to_sampling_params


def with_early_check(original: Callable[..., Any]) -> Callable[..., Any]:
    """`AsyncLLM.generate`, which refuses a bad request when it is called.

    vLLM's own is a generator: it starts when the answer is iterated, after the HTTP status of a
    stream has been sent.
    """
    from vllm.v1.engine import EngineCoreRequest

    @functools.wraps(original)
    def generate(self: Any, prompt: Any, sampling_params: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(prompt, EngineCoreRequest) or not config.is_lookahead(self.vllm_config):
            return original(self, prompt, sampling_params, *args, **kwargs)
        server = config.options_of(self.vllm_config)
        options = _options(self, server, sampling_params)
        if options.is_predicted:
            shows = self.vllm_config.observability_config.per_request_spec_decode_metrics != "none"
            outputs = tokenize_first(self, options, prompt, sampling_params, *args, **kwargs)
            return usage.counting(outputs, shows)
        usage.forget()
        if _texts(options):
            return tokenize_first(self, options, prompt, sampling_params, *args, **kwargs)
        params = _with_options(sampling_params, options)
        return original(self, prompt, params, *args, **kwargs)

    async def tokenize_first(
        self: Any,
        options: RequestOptions,
        prompt: Any,
        sampling_params: Any,
        *args: Any,
        **kwargs: Any,
    ) -> AsyncIterator[Any]:
        """Spell and tokenize long texts without blocking the event loop."""
        if options.spellings:
            is_raw = tool_results.writes_raw_arguments(self.renderer.tokenizer)
            texts = await asyncio.to_thread(tool_results.spelled, options.spellings, is_raw)
            options = replace(options, spellings=texts)
        tokenized = await _tokenized(self.renderer, options)
        params = _with_options(sampling_params, _with_token_ids(options, tokenized))
        async with aclosing(original(self, prompt, params, *args, **kwargs)) as outputs:
            async for output in outputs:
                yield output

    return generate


_under_way: dict[tuple[Any, ...], asyncio.Future[Any]] = {}
"""Texts that are being tokenized, by renderer and texts."""


async def _tokenized(renderer: Any, options: RequestOptions) -> Any:
    """The token ids of all texts; those of a request with many prompts are tokenized once."""
    key = (id(renderer), *_texts(options))
    if key not in _under_way:
        tokenizing = renderer.tokenize_prompts_async(*_to_tokenize(options))
        _under_way[key] = asyncio.ensure_future(tokenizing)
        _under_way[key].add_done_callback(lambda _: _under_way.pop(key))
    return await asyncio.shield(_under_way[key])  # it may be another client's


def _with_options(params: Any, options: RequestOptions) -> Any:
    """A copy of sampling parameters that holds the checked options, for `_prepare`."""
    params = copy(params)
    params.extra_args = request_options.with_options(params.extra_args, options)
    return params


def preparing(original: Callable[..., Any]) -> Callable[..., Any]:
    """`InputProcessor.process_inputs`, through which the requests of all entry points go."""

    @functools.wraps(original)
    def process_inputs(self: Any, *args: Any, **kwargs: Any) -> Any:
        request = original(self, *args, **kwargs)
        _prepare(self, request)
        return request

    return process_inputs


def _prepare(processor: Any, request: Any) -> None:
    """Write the request's checked options and its namespace into its sampling parameters."""
    if request.sampling_params is None or not config.is_lookahead(processor.vllm_config):
        return
    params = copy(request.sampling_params)  # the original may be the caller's
    server = config.options_of(processor.vllm_config)
    options = _options(processor, server, params)
    if _texts(options):
        tokenized = processor.renderer.tokenize_prompts(*_to_tokenize(options))
        options = _with_token_ids(options, tokenized)
    adapter = request.lora_request.lora_name if request.lora_request else None
    namespace = request_options.shared_namespace(
        server.share, adapter, request.cache_salt, options.namespace
    )
    options = replace(options, namespace=namespace)
    params.extra_args = request_options.fields_for_worker(params.extra_args, options)
    request.sampling_params = params


def allowing_every_parameter(original: Callable[..., Any]) -> Callable[..., Any]:
    """`SamplingParams._validate_spec_decode`, which allows lookahead `min_p` and `logit_bias`."""

    @functools.wraps(original)
    def validate(self: Any, speculative_config: Any) -> None:
        original(self, None if config.is_marked(speculative_config) else speculative_config)

    return validate


def _options(engine: Any, server: LookaheadOptions, params: Any) -> RequestOptions:
    """The checked options of a request; `engine` is a client or its input processor."""
    vocab_size = engine.model_config.get_vocab_size()
    with _refusing():
        options = request_options.parse_options(params.extra_args, vocab_size, server)
        if params.n > MAX_ANSWERS:
            if options.references:
                raise OptionError(
                    f"references were given with n={params.n}, but each answer gets a copy of "
                    f"them; write n={MAX_ANSWERS} or less, or leave them out"
                )
            options = replace(options, spellings=())
        if _texts(options) and engine.renderer.tokenizer is None:
            raise OptionError(
                "a text was given as lookahead's reference, but this engine has no tokenizer "
                "(skip_tokenizer_init); write its token ids, as in [[1, 2, 3]]"
            )
    return options


def _texts(options: RequestOptions) -> list[str]:
    """What is to be tokenized."""
    return [text for text in (*options.references, *options.spellings) if isinstance(text, str)]


def _to_tokenize(options: RequestOptions) -> tuple[list[dict[str, str]], Any]:
    """The arguments of `BaseRenderer.tokenize_prompts`."""
    from vllm.renderers.params import TokenizeParams

    params = TokenizeParams(max_total_tokens=None, add_special_tokens=False)
    return [{"prompt": text} for text in _texts(options)], params


def _with_token_ids(
    options: RequestOptions, tokenized: Sequence[Mapping[str, Any]]
) -> RequestOptions:
    """`options` with the token ids of each text instead of the text."""
    ids = (np.array(prompt["prompt_token_ids"], "<i4").tobytes() for prompt in tokenized)
    references, spellings = (
        tuple(next(ids) if isinstance(text, str) else text for text in texts)
        for texts in (options.references, options.spellings)
    )
    return replace(options, references=references, spellings=spellings)
