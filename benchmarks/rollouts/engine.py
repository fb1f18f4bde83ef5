"""The process of one engine, which samples answers, and changes its weights when it is told to.

Each question is a batch: its requests, and the drift of the weights before it.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.engines.engine_process import Emit, answer_questions
from benchmarks.engines.generate import warm_up


@dataclass(frozen=True)
class Job:
    """The input of a run.

    `engine_args` are those of `vllm.LLM`; `prompts` are token ids. With a `temperature`, each
    request draws with a seed of its own.
    """

    engine_args: dict[str, Any]
    prompts: list[list[int]]
    max_tokens: int
    temperature: float


@dataclass(frozen=True)
class Request:
    """One sample: the index of its prompt, and its seed."""

    prompt: int
    seed: int


@dataclass(frozen=True)
class Batch:
    """A question. All requests are sent at once.

    Before, every weight matrix is changed by normal noise of `drift` times its standard deviation,
    for each of the `drift_seeds`: those of the last question and one more are a small update.
    """

    requests: list[Request]
    drift: float = 0.0
    drift_seeds: Sequence[int] = ()

    @classmethod
    def read(cls, question: dict[str, Any]) -> Batch:
        """The batch in a question."""
        return cls(**{**question, "requests": [Request(**one) for one in question["requests"]]})


@dataclass
class Rollout:
    """An answer.

    `token_ids` of each request; `steps` in which each emitted tokens, its prefill included; the
    number of requests that were `running` in each step of the engine; wall time in seconds.
    """

    token_ids: list[list[int]]
    steps: list[int]
    running: list[int]
    seconds: float
    drafted: int
    accepted: int
    lag_seconds: float | None = None
    """Of the fleet's latest message, if the engine shares with one."""


def drifted(folder: Path, drift: float, seeds: Sequence[int]) -> Iterator[tuple[str, Any]]:
    """The weights in the folder's safetensors, with noise on all matrices."""
    import torch
    from safetensors import safe_open

    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(str(path), "pt") as file:
            for name in file.keys():  # noqa: SIM118, it is no mapping
                weight = file.get_tensor(name)
                scale = drift * weight.float().std()
                for seed in seeds if weight.dim() > 1 else ():
                    generator = torch.Generator().manual_seed(seed)
                    noise = torch.randn(weight.shape, generator=generator)
                    weight = weight + (scale * noise).to(weight.dtype)
                yield name, weight


def sample(engine: Any, prompts: Sequence[list[int]], params: Sequence[Any]) -> Rollout:
    """Answer all prompts, each with its own sampling parameters."""
    start = time.perf_counter()
    for i, (prompt, own) in enumerate(zip(prompts, params, strict=True)):
        engine.add_request(str(i), {"prompt_token_ids": prompt}, own)
    tokens: list[list[int]] = [[] for _ in prompts]
    steps = [0] * len(prompts)
    running = []
    live = len(prompts)
    drafted = accepted = 0
    while engine.has_unfinished_requests():
        running.append(live)
        for output in engine.step():
            i, completion = int(output.request_id), output.outputs[0]
            steps[i] += len(completion.token_ids) > len(tokens[i])
            tokens[i] = list(completion.token_ids)
            live -= output.finished
            metrics = getattr(completion, "spec_decode_metrics", None)
            if output.finished and metrics is not None:
                drafted += metrics.num_draft_tokens
                accepted += sum(j * count for j, count in enumerate(metrics.histogram))
    seconds = time.perf_counter() - start
    return Rollout(tokens, steps, running, seconds, drafted, accepted)


def run(job: Job, batches: Iterable[dict[str, Any]], emit: Emit) -> None:
    """Start an engine in this process, warm it up, and answer the batches."""
    from vllm import LLM, SamplingParams

    args = dict(job.engine_args)
    if args.get("speculative_config"):
        args.setdefault("per_request_spec_decode_metrics", "summary")
    llm = LLM(**args)
    emit("warm-up")
    warm_up(llm.llm_engine, job.prompts, min(8, args["max_num_seqs"]))
    drafter = getattr(_runner_of(llm), "drafter", None)
    exchange = getattr(drafter, "_exchange", None)
    emit("ready")

    def params_of(request: Request) -> Any:
        seed = request.seed if job.temperature else None
        return SamplingParams(temperature=job.temperature, max_tokens=job.max_tokens, seed=seed)

    for question in batches:
        batch = Batch.read(question)
        if batch.drift_seeds:
            weights = drifted(Path(args["model"]), batch.drift, batch.drift_seeds)
            llm.collective_rpc("reload_weights", kwargs={"weights_iterator": weights})
        rollout = sample(
            llm.llm_engine,
            [job.prompts[request.prompt] for request in batch.requests],
            [params_of(request) for request in batch.requests],
        )
        if exchange is not None:
            rollout.lag_seconds = exchange.traffic.lag_seconds
        emit("answer", answer=asdict(rollout))


def _runner_of(llm: Any) -> Any:
    return llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker.model_runner


if __name__ == "__main__":
    answer_questions(lambda job, batches, emit: run(Job(**job), batches, emit))
