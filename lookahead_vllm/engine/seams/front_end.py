"""The API server's process: requests before the engine sees them, and the metrics."""

from __future__ import annotations

from lookahead_vllm.engine.seams.seam import PUBLIC, Seam

_PROCESSED = "plugins may process requests; NewRequestData has cache_salt"
_STATS = "vLLM's stats have room for a plugin's"
_PARSERS = "all parsers read several tokens in a delta as they read one after another"
_CHAT = "openai.chat_completion.serving"
_DROPPED = "vLLM counts the tokens of a step after it has looked for stop strings"
_ENGINES = (("async_llm", "AsyncLLM"), ("llm_engine", "LLMEngine"))

SEAMS = (
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
    Seam(
        "vllm.v1.engine.__init__",
        "EngineCoreRequest",
        ("sampling_params", "lora_request", "cache_salt"),
        "set",
        "the parts of a namespace; sampling_params becomes a copy with other extra_args",
        _PROCESSED,
    ),
    Seam(
        "vllm.sampling_params",
        "SamplingParams",
        (
            *("extra_args", "max_tokens", "min_tokens", "stop_token_ids", "eos_token_id"),
            *("min_p", "logit_bias", "structured_outputs", "n"),
            *("frequency_penalty", "presence_penalty", "repetition_penalty"),
        ),
        "set",
        "a request's options; extra_args is changed in a copy",
        PUBLIC,
    ),
    Seam("vllm.lora.request", "LoRARequest", ("lora_name",), "read", "part of a namespace", PUBLIC),
    Seam(
        "vllm.v1.engine.input_processor",
        "InputProcessor",
        ("vllm_config", "model_config", "renderer"),
        "read",
        "what a request is checked against",
        _PROCESSED,
    ),
    *(
        Seam(
            f"vllm.v1.engine.{module}",
            name,
            ("vllm_config", "model_config", "renderer", "input_processor"),
            "read",
            "what a request is checked against",
            _PROCESSED,
        )
        for module, name in _ENGINES
    ),
    Seam(
        "vllm.renderers.base",
        "BaseRenderer",
        ("tokenizer", "tokenize_prompts", "tokenize_prompts_async"),
        "called",
        "tokenizes references as vLLM tokenizes prompts",
        _PROCESSED,
    ),
    Seam(
        "vllm.renderers.params",
        "TokenizeParams",
        ("max_total_tokens", "add_special_tokens"),
        "called",
        "how references are tokenized",
        _PROCESSED,
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
    Seam(
        "vllm.v1.engine.output_processor",
        "OutputProcessor",
        ("request_states",),
        "read",
        "finds the collector of a request",
        _PARSERS,
    ),
    Seam(
        "vllm.v1.engine.output_processor",
        "RequestState",
        ("queue",),
        "read",
        "finds the collector of a request",
        _PARSERS,
    ),
    Seam(
        "vllm.v1.engine.__init__",
        "EngineCoreOutput",
        (
            *("request_id", "new_token_ids", "new_logprobs", "new_sampling_mask"),
            *("new_prompt_logprobs_tensors", "prompt_token_id_logprobs", "prefill_stats"),
            *("events", "routed_experts", "finish_reason", "stop_reason"),
            *("kv_transfer_params", "ec_transfer_params", "spec_decode_metrics"),
        ),
        "set",
        "is copied for each of its tokens",
        _PARSERS,
    ),
    *(
        Seam(
            "vllm.v1.outputs",
            f"{name}.slice_request",
            ("req_idx", "num_positions"),
            "called",
            "the rows of one token",
            _PARSERS,
        )
        for name in ("LogprobsLists", "SamplingMaskLists")
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
        "vllm.v1.engine.core_client",
        "MPClient",
        ("decoder",),
        "read",
        "is built from the global name EngineCoreOutputs, which is our subclass",
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
    Seam(
        "vllm.v1.engine.output_processor",
        "RequestState",
        ("stats", "detokenizer"),
        "read",
        "see above",
        _DROPPED,
    ),
    Seam(
        "vllm.v1.engine.detokenizer",
        "IncrementalDetokenizer",
        ("num_output_tokens",),
        "called",
        "see above",
        _DROPPED,
    ),
    Seam(
        "vllm.v1.metrics.stats",
        "RequestStateStats",
        ("num_generation_tokens",),
        "set",
        "see above",
        _DROPPED,
    ),
    Seam(
        "vllm.v1.metrics.stats",
        "IterationStats",
        ("num_generation_tokens",),
        "set",
        "see above",
        _DROPPED,
    ),
)
