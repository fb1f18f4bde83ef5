"""The process of one engine, for one method.

Each question is a turn: the numbers of the `prompts` to answer, and how many at a time
(`batch_size`). With `trace`, some of its steps are written to a file of that name.
"""

from __future__ import annotations

import random
import statistics
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from benchmarks.engines.engine_process import Emit, answer_questions
from benchmarks.trace import trace_turn

WARM_UP_TOKENS = 16
"""The answer of each request of the warm-up."""

MAX_WARM_UP_PROMPT_TOKENS = 256


@dataclass(frozen=True)
class Job:
    """The input of a run.

    `engine_args` are those of `vllm.LLM`, with `max_num_seqs` the largest batch size; `prompts` are
    token ids. Decoding is greedy; if `sampled`, tokens are drawn without a seed, always
    `max_tokens`. With `answers`, each prompt gets its answer, cut to `max_tokens`. With
    `references`, requests bring texts to copy from, token ids; an empty one is none.
    """

    engine_args: dict[str, Any]
    prompts: list[list[int]]
    max_tokens: int
    sampled: bool = False
    answers: list[list[int]] | None = None
    references: list[list[int]] | None = None


@dataclass
class Generation:
    """The answer to one request, with its counts.

    `steps` counts the request's decode steps: the engine's steps that emitted tokens for it, except
    for the one that ended its prefill. The first token is the prefill's.
    """

    token_ids: list[int] = field(default_factory=list)
    steps: int = -1
    drafts: int = 0
    draft_tokens: int = 0
    accepted: int = 0
    seconds: float = 0.0
    """Time since the previous request ended; at batch size 1, the time of this request."""

    def observe(self, token_ids: Sequence[int]) -> None:
        """Take the answer so far, after a step of the engine."""
        if len(token_ids) > len(self.token_ids):
            self.steps += 1
            self.token_ids = list(token_ids)

    def observe_drafts(self, metrics: Any) -> None:
        """Take vLLM's `RequestSpecDecodeMetrics`; None if nothing was drafted."""
        if metrics is not None:
            self.drafts = sum(metrics.histogram)
            self.accepted = sum(j * count for j, count in enumerate(metrics.histogram))
            self.draft_tokens = metrics.num_draft_tokens


@dataclass
class Turn:
    """The answers to one turn's prompts.

    `seconds` is the wall time, prefills included; for `full_seconds` of it the batch was full.
    """

    generations: list[Generation]
    seconds: float
    full_seconds: float
    dtype: str

    @classmethod
    def read(cls, answer: dict[str, Any]) -> Turn:
        """The turn in a process's answer."""
        generations = [Generation(**generation) for generation in answer["generations"]]
        return cls(**{**answer, "generations": generations})


def warm_up_prompts(
    prompts: Sequence[list[int]], batch_size: int, vocabulary: int
) -> list[list[int]]:
    """Random prompts: one more than the batch size, as long as the median of the real ones.

    Each repeats a random pattern four times, so that every drafter drafts and the verification is
    warm too. Nothing that a drafter learns from them helps with the real prompts.
    """
    length = min(
        int(statistics.median(len(prompt) for prompt in prompts)), MAX_WARM_UP_PROMPT_TOKENS
    )
    rng = random.Random(0)
    return [
        [rng.randrange(vocabulary) for _ in range(max(length // 4, 2))] * 4
        for _ in range(batch_size + 1)
    ]


def answer(
    engine: Any,
    prompts: Sequence[list[int]],
    params: Sequence[Any],
    batch_size: int,
    finished: Callable[[int], None] = lambda _: None,
) -> tuple[list[Generation], float, float]:
    """Answer all prompts, each with its own sampling parameters.

    A request starts in the step after another ends, so the batch is full until the queue is empty.
    All requests are queued in the engine at once if it runs no more than the batch size of them.

    Returns
    -------
    tuple
        The answers, the wall time in seconds, and the seconds in which the batch was full.
    """
    generations = {str(index): Generation() for index in range(len(prompts))}
    max_queued = batch_size
    if engine.vllm_config.scheduler_config.max_num_seqs <= batch_size:
        max_queued = len(prompts)
    start = last = time.perf_counter()
    queue = deque(zip(generations, prompts, params, strict=True))
    done = 0
    full_seconds = 0.0
    while queue or engine.has_unfinished_requests():
        while queue and engine.get_num_unfinished_requests() < max_queued:
            request_id, prompt, own_params = queue.popleft()
            engine.add_request(request_id, {"prompt_token_ids": prompt}, own_params)
        for output in engine.step():
            generation = generations[output.request_id]
            completion = output.outputs[0]
            generation.observe(completion.token_ids)
            if output.finished:
                now = time.perf_counter()
                generation.seconds, last = now - last, now
                generation.observe_drafts(completion.spec_decode_metrics)
                if len(prompts) - done == batch_size:
                    full_seconds = now - start
                done += 1
                finished(done)
    return list(generations.values()), time.perf_counter() - start, full_seconds


def warm_up(engine: Any, prompts: Sequence[list[int]], batch_size: int) -> None:
    """Answer the prompts of the warm-up."""
    from vllm import SamplingParams

    params = SamplingParams(temperature=0, max_tokens=WARM_UP_TOKENS, ignore_eos=True)
    random_prompts = warm_up_prompts(prompts, batch_size, engine.model_config.get_vocab_size())
    answer(engine, random_prompts, [params] * len(random_prompts), batch_size)


def check_guided(generations: Sequence[Generation], answers: Sequence[Sequence[int]]) -> None:
    """Raise RuntimeError if an answer is not the beginning of the recorded one."""
    found = [generation.token_ids for generation in generations]
    wrong = sum(ids != [*a[: len(ids)]] for ids, a in zip(found, answers, strict=True))
    if wrong:
        raise RuntimeError(
            f"{wrong} of {len(found)} answers are not the recorded ones: the guide does not reach "
            "all steps, and the speed says nothing"
        )


def run(job: Job, turns: Iterable[dict[str, Any]], emit: Emit) -> None:
    """Start an engine, warm it up, and answer the prompts of each turn."""
    from vllm import LLM, SamplingParams

    args = dict(job.engine_args)
    if args.get("speculative_config"):
        args.setdefault("per_request_spec_decode_metrics", "summary")
    llm = LLM(**args)
    emit("warm-up")
    warm_up(llm.llm_engine, job.prompts, args["max_num_seqs"])
    dtype = str(llm.llm_engine.model_config.dtype).removeprefix("torch.")
    if job.answers is not None:
        from benchmarks.engines import target_guided

        target_guided.follow(llm, job.prompts, job.answers)
    emit("ready")

    def params_of(index: int) -> Any:
        reference = job.references[index] if job.references else []
        more: dict[str, Any] = {"max_tokens": job.max_tokens}
        if reference:
            more["extra_args"] = {"lookahead_reference": reference}
        if job.answers is not None:
            more["max_tokens"] = min(job.max_tokens, len(job.answers[index]))
            return SamplingParams(temperature=0, ignore_eos=True, **more)
        if job.sampled:
            # No seeds: on CPU, vLLM 0.32 crashes on a seeded request with a chunked prompt.
            return SamplingParams(ignore_eos=True, **more)
        return SamplingParams(temperature=0, **more)

    for turn in turns:
        emit("generating")
        chosen = turn["prompts"]
        if "trace" in turn:
            llm.collective_rpc(trace_turn, args=(turn["trace"],))
        generations, seconds, full_seconds = answer(
            llm.llm_engine,
            [job.prompts[index] for index in chosen],
            [params_of(index) for index in chosen],
            turn["batch_size"],
            lambda done: emit("finished", done=done),
        )
        if job.answers is not None:
            check_guided(generations, [job.answers[index] for index in chosen])
        emit("answer", answer=asdict(Turn(generations, seconds, full_seconds, dtype)))


if __name__ == "__main__":
    answer_questions(lambda job, turns, emit: run(Job(**job), turns, emit))
