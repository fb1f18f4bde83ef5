"""Hands the tokens of a step on one at a time where a parser reads a stream.

vLLM's tool and reasoning parsers read a stream delta by delta, and many of them expect one token in
a delta, as plain vLLM sends it. They lose or double text if a delta has several.
"""

import functools
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import aclosing
from contextvars import ContextVar
from copy import copy
from operator import is_
from typing import Any

from lookahead_vllm.engine import patches

_is_parsed: ContextVar[bool] = ContextVar("lookahead_is_parsed", default=False)
"""Whether the HTTP request of this context reads its answer delta by delta."""

MAX_WHOLE = 64
"""Outputs beyond so many that wait for a slow reader are packed."""

_OF_THE_FIRST = (
    *("new_prompt_logprobs_tensors", "prompt_token_id_logprobs", "prefill_stats", "events"),
    "routed_experts",
)
_OF_THE_LAST = ("finish_reason", "stop_reason", "kv_transfer_params", "ec_transfer_params")
"""Fields of an `EngineCoreOutput` that stay with its first and with its last token."""

_OF_EACH = ("outputs", "index", "text", "token_ids")
"""Fields of a `RequestOutput` and its completion that each has for itself."""


def install() -> None:
    """Patch the streams of vLLM's endpoints, and the way of their tokens."""
    from vllm.entrypoints.openai.chat_completion.serving import OpenAIServingChat
    from vllm.entrypoints.openai.responses.serving import OpenAIServingResponses
    from vllm.entrypoints.scale_out.token_in_token_out.serving import ServingTokens
    from vllm.v1.engine import async_llm
    from vllm.v1.engine.output_processor import OutputProcessor

    # Since 0.33, chat's stream is a generator that other endpoints read, too.
    raw = "chat_completion_stream_generator_raw"
    chat = raw if hasattr(OpenAIServingChat, raw) else raw.removesuffix("_raw")
    patches.patch(OpenAIServingChat, chat, read_by_a_parser)
    patches.patch(OpenAIServingResponses, "responses_stream_generator", read_by_a_parser)
    patches.patch(ServingTokens, "serve_tokens_stream_generator", read_by_a_parser)
    patches.patch(async_llm, "RequestOutputCollector", collecting_tokens)
    patches.patch(OutputProcessor, "process_outputs", token_by_token)


def read_by_a_parser(original: Callable[..., Any]) -> Callable[..., Any]:
    """The stream of an endpoint, which asks the engine for one token at a time if it is parsed.

    The engine gets the request when the stream is read for the first time, so in this context.
    """

    @functools.wraps(original)
    async def stream(self: Any, *args: Any, **kwargs: Any) -> AsyncIterator[Any]:
        _is_parsed.set(_parses(self))
        async with aclosing(original(self, *args, **kwargs)) as chunks:
            async for chunk in chunks:
                yield chunk

    return stream


def _parses(endpoint: Any) -> bool:
    """Whether an endpoint parses its streams; streams of tokens are parsed by another server."""
    for name in ("parser_cls", "parser"):
        if hasattr(endpoint, name):
            return getattr(endpoint, name) is not None
    return True


def collecting_tokens(original: type) -> type:
    """vLLM's `RequestOutputCollector`, which merges outputs that wait for a slow reader.

    For a stream that is parsed, this one keeps them apart.
    """

    class TokenCollector(original):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self.is_parsed = self.aggregate and _is_parsed.get()
            self.waiting: deque[tuple[Any, ...]] = deque()
            """Outputs after `self.output`, each as the arguments of `unpacked`."""

        def put(self, output: Any) -> None:
            if isinstance(output, Exception):
                self.waiting.clear()
            elif self.is_parsed and self.output is not None:
                is_behind = len(self.waiting) >= MAX_WHOLE
                self.waiting.append(packed(output, self.waiting[-1][0]) if is_behind else (output,))
                return
            super().put(output)

        async def get(self) -> Any:
            output = await super().get()
            self._advance()
            return output

        def get_nowait(self) -> Any:
            output = super().get_nowait()
            self._advance()
            return output

        def _advance(self) -> None:
            if self.waiting:
                super().put(unpacked(*self.waiting.popleft()))

    return TokenCollector


def packed(output: Any, like: Any) -> tuple[Any, ...]:
    """A `RequestOutput` in a third of its memory, if it has one completion and differs from `like`
    in its index, text and token ids alone: `like` and these; otherwise itself alone."""
    rest, other = _rest(output), _rest(like)
    if len(output.outputs) != 1 or len(rest) != len(other) or not all(map(is_, rest, other)):
        return (output,)
    (completion,) = output.outputs
    return like, completion.index, completion.text, *completion.token_ids


def _rest(output: Any) -> list[Any]:
    fields = [field for part in (output, *output.outputs) for field in vars(part).items()]
    return [value for name, value in fields if name not in _OF_EACH]


def unpacked(output: Any, *own: Any) -> Any:
    """The `RequestOutput` that was packed."""
    if not own:
        return output
    output, completion = copy(output), copy(output.outputs[0])
    completion.index, completion.text, *completion.token_ids = own
    output.outputs = [completion]
    return output


def token_by_token(original: Callable[..., Any]) -> Callable[..., Any]:
    """`OutputProcessor.process_outputs`, which gets an output for each token of a parsed stream.

    The statistics are those of the step: its tokens have one latency.
    """

    @functools.wraps(original)
    def process_outputs(
        self: Any,
        outputs: list[Any],
        engine_core_timestamp: float | None = None,
        iteration_stats: Any = None,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        bursts = {
            output.request_id
            for output in outputs
            if len(output.new_token_ids) > 1 and _is_parsed_stream(self, output.request_id)
        }
        if bursts:
            parts = (split(o) if o.request_id in bursts else (o,) for o in outputs)
            outputs = [part for output in parts for part in output]
        processed = original(self, outputs, engine_core_timestamp, iteration_stats, *args, **kwargs)
        if bursts and iteration_stats is not None:
            # All tokens of a step have its timestamp, so those after the first have a latency of 0.
            latencies = iteration_stats.inter_token_latencies_iter
            latencies[:] = filter(None, latencies)
        return processed

    return process_outputs


def _is_parsed_stream(processor: Any, request_id: str) -> bool:
    state = processor.request_states.get(request_id)
    return state is not None and getattr(state.queue, "is_parsed", False)


def split(output: Any) -> Iterator[Any]:
    """The `EngineCoreOutput` of several tokens as one for each token."""
    last = len(output.new_token_ids) - 1
    for index, token in enumerate(output.new_token_ids):
        part = copy(output)
        part.new_token_ids = [token]
        for name in ("new_logprobs", "new_sampling_mask"):
            if (rows := getattr(output, name)) is not None:
                setattr(part, name, rows.slice_request(index, 1))
        for name in (*(_OF_THE_FIRST if index else ()), *(_OF_THE_LAST if index < last else ())):
            setattr(part, name, None)
        yield part
