"""The engine core's process: the scheduler, its KV blocks, grammars, the stats of a step."""

from __future__ import annotations

from lookahead_vllm.engine.seams.seam import Seam

_SCHEDULER = "vllm.v1.core.sched.scheduler"
_LATE = "vLLM asks for drafts at the start of the step that verifies them"
_GRAMMARS = "vLLM applies structured output to draft trees"
_CUTS = "vLLM cuts drafts before it preempts or delays a request"

SEAMS = (
    # Drafts (scheduler/scheduler.py).
    Seam(
        _SCHEDULER,
        "Scheduler.schedule",
        (),
        "overridden",
        "cuts drafts so that they take nothing from any request (draft_limits.py); sends the trees "
        "of the step to the workers with their tokens",
        _CUTS,
    ),
    Seam(
        _SCHEDULER,
        "Scheduler.update_from_output",
        ("scheduler_output",),
        "overridden",
        "drops the masks of the step; takes the next drafts, whose trees a grammar prunes, extends "
        "by what it dictates, and masks",
        _GRAMMARS,
    ),
    Seam(
        _SCHEDULER,
        "Scheduler.finish_requests",
        (),
        "overridden",
        "drops the masks of a finished request",
        _GRAMMARS,
    ),
    Seam(
        _SCHEDULER,
        "Scheduler.get_grammar_bitmask",
        ("scheduler_output",),
        "overridden",
        "sends the masks of the nodes to the runner",
        _GRAMMARS,
    ),
    # Outputs of requests that have ended (scheduler/late_outputs.py).
    Seam(
        _SCHEDULER,
        "Scheduler._free_request",
        ("request",),
        "overridden",
        "notes the tokens in flight of a request that ends: their outputs do not belong to the "
        "next request with its id",
        "vLLM knows whose output arrives",
    ),
    # Slots for drafts that workers grow late (scheduler/late_scheduler.py).
    Seam(
        _SCHEDULER,
        "Scheduler.add_request",
        ("request",),
        "overridden",
        "notes the requests that turned lookahead off: they get no slots",
        _LATE,
    ),
    Seam(
        _SCHEDULER,
        "Scheduler.update_draft_token_ids_in_output",
        ("draft_token_ids", "scheduler_output"),
        "overridden",
        "fills the masks of the drafts in flight, which are trees",
        _GRAMMARS,
    ),
    Seam(
        _SCHEDULER,
        "Scheduler.make_spec_decoding_stats",
        (
            *("spec_decoding_stats", "num_draft_tokens", "num_accepted_tokens"),
            *("num_invalid_spec_tokens", "request_id"),
        ),
        "overridden",
        "slots that were all left empty are no draft in vLLM's metrics",
        _LATE,
    ),
    Seam(
        "vllm.v1.metrics.stats",
        "RequestSpecDecodeMetrics.observe",
        ("num_draft_tokens", "num_accepted", "detailed"),
        "overridden",
        "nor in a request's own metrics",
        _LATE,
    ),
    Seam(
        "vllm.v1.engine.core",
        "EngineCore.post_step",
        ("model_executed",),
        "wrapped",
        "a pause begins when a step has ended (pauses.py); does not ask the worker for drafts: "
        "ours come with the output of their step",
        "drafts come with the output of their step, and vLLM tells workers of pauses",
    ),
    Seam(
        _SCHEDULER,
        "Scheduler._handle_stopped_request",
        ("request",),
        "overridden",
        "tokens after the stop of a session's turn do not count as computed",
        "vLLM takes back what it counted for accepted tokens that it drops",
    ),
    Seam(
        _SCHEDULER,
        "Scheduler._update_request_with_output",
        ("request",),
        "overridden",
        "blocks that the last accepted tokens fill are found by the next turn",
        "0.32 is no longer supported",
    ),
    # Grammars (grammar.py).
    Seam(
        "vllm.v1.structured_output.backend_guidance",
        "GuidanceGrammar.accept_tokens",
        ("request_id", "tokens"),
        "wrapped",
        "takes several tokens as it takes one after the other, also after its end",
        "vLLM's wrapper of llguidance does",
    ),
    # Lookahead parallelism (scheduler/replica_executor.py).
    Seam(
        "vllm.v1.executor.multiproc_executor",
        "MultiprocExecutor._init_executor",
        (),
        "overridden",
        "while it starts the workers, tensor_parallel_size counts the ranks of all replicas",
        "replicas of a model may share one engine",
    ),
    # The report of a step (step_report.py).
    Seam(
        _SCHEDULER,
        "Scheduler.make_stats",
        (),
        "overridden",
        "adds the report of the step to vLLM's stats",
        "vLLM's stats have room for a plugin's",
    ),
    Seam(
        "vllm.v1.metrics.stats",
        "SchedulerStats",
        ("spec_decoding_stats",),
        "overridden",
        "a subclass with one more field",
        "vLLM's stats have room for a plugin's",
    ),
)
