"""The end of an engine, in all its processes: the cache file is saved first (shutdown.py)."""

from __future__ import annotations

from lookahead_vllm.engine.seams.seam import Seam

_HANDLERS = "signal handlers stay until teardown is done"
_WAITS = "vLLM waits for the teardown of an engine process"
_RAY = "Ray's executors let their workers shut down"
_CORE = "vllm.v1.engine.core"
_EXECUTOR = "vllm.v1.executor.multiproc_executor"

SEAMS = (
    # The API server's process.
    Seam(
        "vllm.v1.engine.utils",
        "CoreEngineProcManager.shutdown",
        ("timeout",),
        "wrapped",
        "gives an engine process 20 s to end; unless --shutdown-timeout is set, vLLM kills it as "
        "soon as it has asked it to end",
        _WAITS,
    ),
    Seam(
        "vllm.v1.engine.utils",
        "CoreEngineProcManager",
        ("_request_shutdown_timeout",),
        "read",
        "whether requests may be drained",
        _WAITS,
    ),
    Seam(
        "vllm.v1.engine.async_llm",
        "AsyncLLM.shutdown",
        ("timeout",),
        "wrapped",
        "ends the task that waits for outputs before the engine has ended, not afterwards, when "
        "it would log an error at every end of a server that saves",
        "vLLM ends the task first",
    ),
    Seam(
        "vllm.v1.engine.async_llm",
        "AsyncLLM",
        ("output_handler",),
        "read",
        "that task",
        "vLLM ends the task first",
    ),
    # The engine core's process.
    Seam(
        _CORE,
        "EngineCoreProc._handle_shutdown",
        ("self",),
        "wrapped",
        "saves when the loop ends, and when requests begin to be drained: teardown first removes "
        "the signal handlers, so the front-end's SIGTERM kills a process whose group had one",
        _HANDLERS,
    ),
    Seam(
        _CORE,
        "EngineCoreProc",
        ("shutdown_state",),
        "read",
        "whether this process was just asked to end",
        _HANDLERS,
    ),
    Seam(_CORE, "EngineShutdownState", ("REQUESTED",), "read", "as shutdown_state", _HANDLERS),
    Seam(
        _CORE,
        "EngineCoreProc",
        ("input_queue",),
        "read",
        "wakes an idle engine when a signal arrives, see `shutdown._wake_on_signals`",
        _HANDLERS,
    ),
    Seam(
        "vllm.v1.engine",
        "EngineCoreRequestType",
        ("WAKEUP",),
        "read",
        "as input_queue",
        _HANDLERS,
    ),
    Seam(_CORE, "EngineCore", ("model_executor",), "read", "the workers' executor", _HANDLERS),
    Seam(
        _CORE,
        "EngineCore.shutdown",
        ("self",),
        "wrapped",
        "calls the workers of a Ray executor to save; the executor kills them without a signal",
        _RAY,
    ),
    Seam(
        _EXECUTOR,
        "MultiprocExecutor.shutdown",
        (),
        "called",
        "ends the workers, which save, before the teardown does; waits for them for "
        "$VLLM_WORKER_SHUTDOWN_TIMEOUT_SECONDS, which becomes 15 where it is not set",
        _HANDLERS,
    ),
    Seam(
        _EXECUTOR,
        "MultiprocExecutor",
        ("workers",),
        "read",
        "waits for the workers where another thread ends them",
        _HANDLERS,
    ),
    Seam(_EXECUTOR, "WorkerProcHandle", ("proc",), "read", "the worker's process", _HANDLERS),
    Seam(
        "vllm.v1.executor.abstract",
        "Executor.collective_rpc",
        ("method", "timeout"),
        "called",
        "the worker that drafts begins to save while requests are drained; on Ray, it saves",
        _HANDLERS,
    ),
    Seam(
        "vllm.v1.executor.abstract",
        "Executor",
        ("uses_ray", "vllm_config"),
        "read",
        "whether the workers are Ray's, and the engine is one with lookahead",
        _RAY,
    ),
)
