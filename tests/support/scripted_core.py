"""vLLM's API server in this process, over an engine core that emits prepared tokens."""

import asyncio
import re
from argparse import Namespace
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from copy import deepcopy
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import httpx
import numpy as np
import pytest
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.entrypoints.launchers.api_server.app_state import init_app_state
from vllm.entrypoints.launchers.app import build_app
from vllm.entrypoints.launchers.cli_args import make_arg_parser
from vllm.utils.argparse_utils import FlexibleArgumentParser
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, FinishReason
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.core_client import EngineCoreClient
from vllm.v1.executor import Executor
from vllm.v1.metrics.stats import PrefillStats, RequestSpecDecodeMetrics
from vllm.v1.outputs import LogprobsLists

from lookahead_vllm.options import request as request_options

TASKS = ("generate",)
NODES = 16
"""In each draft of a request with a prediction."""
RANDOM = re.compile(
    r'"(?:id|item_id|call_id|response_id)":\s*"[^"]*"|"(?:created|created_at|completed_at)":\s*\d+'
)
"""What is drawn at random, or is the time, in the events of a stream."""


class Script(NamedTuple):
    """What the engine core emits for every request: the tokens of each step."""

    bursts: Sequence[Sequence[int]]
    end: int | None = None
    """The id of the end-of-sequence token, if the answer ends with it."""


class ScriptedCore:
    """The part of vLLM's `EngineCoreClient` that `AsyncLLM` needs to generate."""

    engine_ranks_managed = (0,)
    resources = SimpleNamespace(engine_dead=False)

    def __init__(self) -> None:
        self.script = Script(())
        self.engine: Any = None
        self.received: list[Any] = []
        """Every request."""
        self._steps: asyncio.Queue[EngineCoreOutputs] = asyncio.Queue()

    async def add_request_async(self, request: Any) -> None:
        self.received.append(request)
        for time, output in enumerate(_outputs(request, self.script), 1):
            await self._steps.put(EngineCoreOutputs(outputs=[output], timestamp=float(time)))

    async def get_output_async(self) -> EngineCoreOutputs:
        # A step takes longer than the server needs to send the tokens of the step before it, if
        # it reads them at all.
        for _ in range(1000):
            if not any(map(_waits, self.engine.output_processor.request_states.values())):
                break
            await asyncio.sleep(0)
        return await self._steps.get()

    async def abort_requests_async(self, request_ids: list[str]) -> None:
        """The outputs that are left are ignored."""

    async def get_supported_tasks_async(self) -> tuple[str, ...]:
        return TASKS

    def shutdown(self, timeout: float | None = None) -> None:
        """Nothing runs."""


def _waits(state: Any) -> bool:
    return state.queue.output is not None or bool(getattr(state.queue, "waiting", ()))


def _outputs(request: Any, script: Script) -> Iterator[EngineCoreOutput]:
    params = request.sampling_params
    left = params.max_tokens
    prefill = PrefillStats()
    prefill.num_prompt_tokens = prefill.num_computed_tokens = len(request.prompt_token_ids)
    options, _ = request_options.options_in_worker(params.extra_args)
    drafts = RequestSpecDecodeMetrics.new(NODES) if options.is_predicted else None
    for burst in script.bursts:
        tokens = list(burst[:left])
        left -= len(tokens)
        reason = None
        if left == 0:
            reason = FinishReason.LENGTH
        elif tokens and tokens[-1] == script.end:
            reason = FinishReason.STOP
        if drafts is not None and prefill is None:
            drafts.observe(NODES, len(tokens) - 1)
        yield EngineCoreOutput(
            request.request_id,
            tokens,
            new_logprobs=_logprobs(tokens, params.logprobs),
            finish_reason=reason,
            prefill_stats=prefill,
            spec_decode_metrics=deepcopy(drafts) if reason is not None or params.stop else None,
        )
        prefill = None
        if reason is not None:
            return


def _logprobs(tokens: Sequence[int], count: int | None) -> LogprobsLists | None:
    """Those of each token, and of `count` others."""
    if count is None:
        return None
    ids = np.add.outer(np.array(tokens), np.arange(count + 1))
    return LogprobsLists(ids, -ids / 100, np.ones(len(tokens), np.int64))


class Server:
    """vLLM's app over one engine; `configure` chooses its parsers."""

    def __init__(self, model: Path, engine: AsyncLLM, core: ScriptedCore) -> None:
        self.core = core
        self._model = str(model)
        self._engine = engine
        self._app = build_app(self._args(), TASKS, engine.model_config)
        self._loop = asyncio.new_event_loop()

    def configure(self, tool: str | None = None, reasoning: str | None = None) -> None:
        """As `--tool-call-parser` and `--reasoning-parser` do."""
        args = self._args(tool_call_parser=tool, enable_auto_tool_choice=tool is not None)
        args.structured_outputs_config.reasoning_parser = reasoning or ""
        self._loop.run_until_complete(init_app_state(self._engine, self._app.state, args, TASKS))

    def close(self) -> None:
        """End the engine's task in its own loop."""
        task = self._engine.output_handler
        self._engine.shutdown()
        self._loop.run_until_complete(asyncio.wait([task]))
        self._loop.run_until_complete(self._loop.shutdown_asyncgens())
        self._loop.close()

    def stream(self, path: str, script: Script, body: dict[str, Any]) -> list[str]:
        """The events of a streamed answer, without what is drawn at random."""
        return self.answer(path, script, {**body, "stream": True})

    def answer(self, path: str, script: Script, body: dict[str, Any]) -> list[str]:
        """The lines of an answer that is not streamed, without what is drawn at random."""
        self.core.script = script
        return self._loop.run_until_complete(self._lines(path, body))

    async def _lines(self, path: str, body: dict[str, Any]) -> list[str]:
        transport = httpx.ASGITransport(self._app)
        async with httpx.AsyncClient(transport=transport, base_url="http://server") as client:
            answer = await client.post(path, json={"model": self._model, **body}, timeout=60)
        assert answer.status_code == 200, answer.text
        return [RANDOM.sub("", line) for line in answer.text.splitlines() if line]

    def _args(self, **settings: Any) -> Namespace:
        parser = make_arg_parser(FlexibleArgumentParser())
        args = parser.parse_args(["--model", self._model])
        for name, value in settings.items():
            setattr(args, name, value)
        return args


@contextmanager
def scripted_server(model: Path) -> Iterator[Server]:
    """A server with lookahead, whose model is not loaded."""
    core = ScriptedCore()
    args = AsyncEngineArgs(str(model), speculative_config={"method": "lookahead"})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(EngineCoreClient, "make_async_mp_client", lambda **_: core)
        config = args.create_engine_config()
        engine = AsyncLLM(config, Executor.get_class(config), log_stats=True)
    core.engine = engine
    server = Server(model, engine, core)
    try:
        yield server
    finally:
        server.close()
