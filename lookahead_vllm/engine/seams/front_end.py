"""The API server's process: the configuration, requests before the engine sees them, metrics."""

from __future__ import annotations

from lookahead_vllm.engine.seams.seam import Seam

_PROCESSED = "plugins may process requests; NewRequestData has cache_salt"
_STATS = "vLLM's stats have room for a plugin's"
_PARSERS = "all parsers read several tokens in a delta as they read one after another"
_CHAT = "openai.chat_completion.serving"
_DROPPED = "vLLM counts the tokens of a step after it has looked for stop strings"
_ENGINES = (("async_llm", "AsyncLLM"), ("llm_engine", "LLMEngine"))

SEAMS = (
    # The only two functions that are wrapped in processes without lookahead.
    Seam(
        "vllm.engine.arg_utils",
        "EngineArgs.add_cli_args",
        ("parser",),
        "wrapped",
        "adds --speculative-model and --num-speculative-tokens, aliases of --spec-*",
        "vLLM lets plugins register flags",
    ),
    Seam(
        "vllm.engine.arg_utils",
        "EngineArgs.create_engine_config",
        ("self",),
        "wrapped",
        "turns method 'lookahead' into one that vLLM has, and chooses our worker and scheduler",
        "SpeculativeConfig.method is open to plugins",
    ),
    # Requests: checked, tokenized, given their namespace (front_end/requests.py).
    Seam(
        "vllm.v1.engine.input_processor",
        "InputProcessor.process_inputs",
        (),
        "wrapped",
        "checks a request's lookahead options and sends them on with its namespace",
        _PROCESSED,
    ),
    *(
        Seam(
            f"vllm.v1.engine.{module}",
            f"{name}.add_request",
            ("request_id", "prompt"),
            "wrapped",
            "does the same for an EngineCoreRequest that the caller made",
            "add_request takes no EngineCoreRequest",
        )
        for module, name in _ENGINES
    ),
    Seam(
        "vllm.v1.engine.async_llm",
        "AsyncLLM.generate",
        ("prompt", "sampling_params"),
        "wrapped",
        "refuses a bad request before a stream starts, so that HTTP answers 400; tokenizes "
        "references off the event loop, and counts those of all live requests",
        "vLLM validates a request before it streams",
    ),
    Seam(
        "vllm.entrypoints.openai.chat_completion.protocol",
        "ChatCompletionRequest.to_sampling_params",
        (),
        "wrapped",
        "OpenAI's field `prediction` becomes the request's reference",
        "vLLM reads `prediction`",
    ),
    Seam(
        "vllm.sampling_params",
        "SamplingParams._validate_spec_decode",
        ("speculative_config",),
        "wrapped",
        "min_p and logit_bias work on trees, and are not refused",
        "vLLM serves them with speculation",
    ),
    # Streams that a parser reads get one token at a time (front_end/streams.py).
    *(
        Seam(
            f"vllm.entrypoints.{module}",
            place,
            (),
            "wrapped",
            "asks for one token at a time where the endpoint has a parser",
            _PARSERS,
            releases,
        )
        for module, place, releases in (
            (_CHAT, "OpenAIServingChat.chat_completion_stream_generator", ("0.32",)),
            (_CHAT, "OpenAIServingChat.chat_completion_stream_generator_raw", ("0.33",)),
            (
                "openai.responses.serving",
                "OpenAIServingResponses.responses_stream_generator",
                (),
            ),
            (
                "scale_out.token_in_token_out.serving",
                "ServingTokens.serve_tokens_stream_generator",
                (),
            ),
        )
    ),
    Seam(
        "vllm.v1.engine.async_llm",
        "",
        ("RequestOutputCollector",),
        "wrapped",
        "a subclass that does not merge the tokens of such a stream",
        _PARSERS,
    ),
    Seam(
        "vllm.v1.engine.output_processor",
        "RequestOutputCollector",
        ("aggregate", "output", "put", "get", "get_nowait"),
        "overridden",
        "the subclass: outputs wait in line instead of being merged",
        _PARSERS,
    ),
    Seam(
        "vllm.v1.engine.output_processor",
        "OutputProcessor.process_outputs",
        (),
        "wrapped",
        "a step's tokens of such a stream become an output each",
        _PARSERS,
    ),
    # Metrics: a step's report arrives with its stats, at a logger beside vLLM's own
    # (front_end/stat_logger.py).
    Seam(
        "vllm.v1.engine.core_client",
        "",
        ("EngineCoreOutputs",),
        "wrapped",
        "becomes our subclass, with which outputs are decoded",
        _STATS,
    ),
    Seam(
        "vllm.v1.engine.__init__",
        "EngineCoreOutputs",
        ("scheduler_stats",),
        "overridden",
        "the subclass: lets our report through to the front-end",
        _STATS,
    ),
    Seam(
        "vllm.v1.metrics.loggers",
        "StatLoggerManager.__init__",
        ("vllm_config", "custom_stat_loggers"),
        "wrapped",
        "adds our logger where vLLM makes its own",
        "a stat_logger_plugin does not turn the stats of every server on",
    ),
    # Tokens after a stop string (front_end/stat_logger.py).
    Seam(
        "vllm.v1.engine.output_processor",
        "OutputProcessor._update_stats_from_finished",
        ("req_state", "finish_reason", "iteration_stats"),
        "wrapped",
        "tokens that were dropped after a stop string do not count as generated",
        _DROPPED,
    ),
)
