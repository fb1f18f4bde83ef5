"""Start and drive vLLM engines in this process."""

import atexit
import functools
import gc
import itertools
import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from vllm import LLM, SamplingParams, TokensPrompt
from vllm.distributed import destroy_distributed_environment, destroy_model_parallel
from vllm.model_executor.models import registry
from vllm.platforms import current_platform
from vllm.platforms.cpu import CpuPlatform

from lookahead_vllm.draft.tree import DraftForest
from lookahead_vllm.engine.attention.branching import branching_obstacle
from lookahead_vllm.engine.drafter.drafter import LookaheadDrafter
from lookahead_vllm.engine.messages import late_report
from tests.support.proposers import record

# Engines start and stop faster this way: vLLM's many garbage collections become one at the end of
# an engine, model classes are inspected in this process, and the CPU platform's kernels replace
# vLLM's once, not again for every engine.
_collect, _freeze, _unfreeze = gc.collect, gc.freeze, gc.unfreeze
_freeze()
# Python does not free frozen objects at exit, and Triton's bindings would report them as leaks.
atexit.register(_unfreeze)
gc.freeze = gc.unfreeze = gc.collect = lambda *args: 0
registry._run_in_subprocess = lambda inspect: inspect()
CpuPlatform.register_triton_kernel_overrides = classmethod(
    functools.cache(vars(CpuPlatform)["register_triton_kernel_overrides"].__func__)
)
_ended = itertools.count(1)


def _collect_garbage() -> None:
    """Free the engine that has ended; search what is older in every 20th call only."""
    if next(_ended) % 20 == 0:
        _unfreeze()
    _collect()
    _freeze()


MANY_STEPS = 10
"""So many steps without a verified node are no exception, as the first and the last ones are."""


def of_length(max_tokens: int, **sampling: Any) -> SamplingParams:
    """For an answer of so many tokens; greedy unless `sampling` says how."""
    given = dict(temperature=0, max_tokens=max_tokens, ignore_eos=True, detokenize=False)
    return SamplingParams(**{**given, **sampling})


GREEDY = of_length(40)


@contextmanager
def engine(
    model: Path,
    lookahead: dict[str, Any] | None = None,
    drafts: bool | None = True,
    **kwargs: Any,
) -> Iterator[LLM]:
    """A float32 engine over a tiny model; plain vLLM if `lookahead` is None.

    At the end it fails if lookahead took MANY_STEPS and verified no node, so that no test compares
    plain vLLM with itself. If `drafts` is False, it fails if a node was verified. None allows both:
    where the speed of the machine decides about drafts.
    """
    config = {}
    if lookahead is not None:
        config["speculative_config"] = {"method": "lookahead", **lookahead}
    settings: dict[str, Any] = dict(
        skip_tokenizer_init=True,
        dtype="float32",
        enforce_eager=True,
        kv_cache_memory_bytes=64 << 20,
        max_model_len=256,
        max_num_seqs=16,
        enable_prefix_caching=False,
    )
    if current_platform.is_cpu():  # for latent attention; the AMX backend has no float32
        settings["attention_backend"] = "CPU_MLA"
    llm = LLM(model=str(model), **{**settings, **config, **kwargs})
    core = getattr(llm.llm_engine.engine_core, "engine_core", None)
    verified = None if lookahead is None or core is None else _count_verified(core.scheduler)
    try:
        yield llm
        is_inside = core is not None and hasattr(core.model_executor, "driver_worker")
        if verified and drafts is not None:
            nodes, steps = sum(verified), len(verified)
            if nodes or steps >= MANY_STEPS:
                assert bool(nodes) == drafts, f"{nodes} nodes were verified in {steps} steps"
        if lookahead is not None and is_inside:
            assert not drafter_of(llm).counters.failures, "the proposer raised, see the log"
    finally:
        llm.llm_engine.engine_core.shutdown()
        del llm
        destroy_model_parallel()
        destroy_distributed_environment()
        _collect_garbage()


def _count_verified(scheduler: Any) -> list[int]:
    """Will hold the verified nodes of the step before each step."""
    verified: list[int] = []
    update = scheduler.update_from_output

    def update_and_count(step: Any, output: Any) -> Any:
        if (report := late_report(output)) is not None and report.numbers is not None:
            verified.append(sum(report.numbers.verified))
        return update(step, output)

    scheduler.update_from_output = update_and_count
    return verified


def generate(
    llm: LLM,
    prompts: Sequence[Any],
    params: SamplingParams | Sequence[SamplingParams] = GREEDY,
) -> list[list[list[int]]]:
    """Token ids by prompt and answer; all requests are sent at once.

    A prompt is a sequence of token ids or one of vLLM's dictionaries.
    """
    given = [p if isinstance(p, dict) else TokensPrompt(prompt_token_ids=list(p)) for p in prompts]
    outputs = llm.generate(given, params, use_tqdm=False)
    return [[list(o.token_ids) for o in output.outputs] for output in outputs]


def generate_staggered(
    llm: LLM,
    prompts: Sequence[Sequence[int]],
    params: SamplingParams | Sequence[SamplingParams] = GREEDY,
    abort: Sequence[int] = (),
    every: int = 2,
    reset_every: int = 0,
) -> list[list[list[int]]]:
    """As `generate`, with a new request in one of `every` steps.

    Prompts whose index is in `abort` are aborted after 10 tokens. After every `reset_every` steps,
    all requests are preempted, and start again in the next step.
    """
    core = llm.llm_engine
    waiting = list(enumerate(prompts))
    answers: dict[int, list[list[int]]] = {}
    step = 0
    while waiting or core.has_unfinished_requests():
        if waiting and step % every == 0:
            index, prompt = waiting.pop(0)
            own = params if isinstance(params, SamplingParams) else params[index]
            core.add_request(f"staggered-{index}", TokensPrompt(prompt_token_ids=list(prompt)), own)
        for output in core.step():
            index = int(output.request_id.rpartition("-")[2])
            answers[index] = [list(o.token_ids) for o in output.outputs]
            if index in abort and len(answers[index][0]) >= 10:
                core.abort_request([output.request_id])
        step += 1
        if reset_every and step % reset_every == 0:
            assert core.reset_prefix_cache(reset_running_requests=True)
    return [answers[i] for i in range(len(prompts))]


def record_plain(
    model: Path,
    prompts: Sequence[Sequence[int]],
    params: SamplingParams | Sequence[SamplingParams] = GREEDY,
    **settings: Any,
) -> list[list[list[int]]]:
    """Plain vLLM's answers, which the proposers of the tests know from now on."""
    with engine(model, **settings) as llm:
        answers = generate(llm, prompts, params)
    record(prompts, answers)
    return answers


class Turn(NamedTuple):
    """The prompts of a turn, and for each the answers and the number of cached tokens."""

    prompts: list[list[int]]
    answers: list[list[list[int]]]
    cached: list[int | None]


def converse(llm: LLM, params: SamplingParams = GREEDY) -> list[Turn]:
    """Three turns of conversations that grow by their answers; in each, one more branches off.

    Their prompts end around the end of a block of the KV cache.
    """
    rng = random.Random(0)
    block = llm.llm_engine.vllm_config.cache_config.block_size

    def draw(least: int, most: int) -> list[int]:
        return [rng.randrange(3, 128) for _ in range(rng.randint(least, most))]

    prompts = [draw(max(block - 40, 2), block + 40) for _ in range(6)]
    turns = []
    for _ in range(3):
        outputs = llm.generate(
            [TokensPrompt(prompt_token_ids=prompt) for prompt in prompts], params, use_tqdm=False
        )
        answers = [[list(o.token_ids) for o in output.outputs] for output in outputs]
        turns.append(Turn(prompts, answers, [output.num_cached_tokens for output in outputs]))
        prompts = [[*p, *a[-1], *draw(1, 9)] for p, a in zip(prompts, answers, strict=True)]
        prompts[-1] = [*turns[-1].prompts[0], *answers[0][0], *draw(1, 9)]
    return turns


def worker_of(llm: LLM) -> Any:
    return llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker


def runner_of(llm: LLM) -> Any:
    return worker_of(llm).model_runner


def learn_last_step(llm: LLM) -> None:
    """Let the proposer learn the last tokens of all; else it does so in the next step."""
    runner_of(llm)._late.count()


def launched_steps(llm: LLM) -> list[Any]:
    """Will hold the steps that are launched from now on."""
    late, launched = runner_of(llm)._late, []
    add_step = late.add_step
    late.add_step = lambda step: launched.append(step) or add_step(step)
    return launched


def grown_forests(llm: LLM) -> list[DraftForest]:
    """Will hold the drafts of each step from now on, as they are grown."""
    late, found = runner_of(llm)._late, []
    grow = late.grow

    def grow_and_note(*args: Any) -> Any:
        drafts = grow(*args)
        found.append(drafts.forest)
        return drafts

    late.grow = grow_and_note
    return found


def obstacle_of(llm: LLM) -> str | None:
    """Why the engine verifies chains only; None if trees may branch."""
    runner = runner_of(llm)
    groups = [group for groups in runner.attn_groups for group in groups]
    return branching_obstacle(runner.vllm_config, groups, runner.attention)


def drafter_of(llm: LLM) -> LookaheadDrafter:
    return runner_of(llm).drafter


def random_prompts(count: int, longest: int, vocab: int = 128, seed: int = 0) -> list[list[int]]:
    """Prompts of 2 to `longest` random tokens, without special tokens."""
    rng = torch.Generator().manual_seed(seed)
    lengths = torch.randint(2, longest + 1, (count,), generator=rng).tolist()
    return [torch.randint(3, vocab, (n,), generator=rng).tolist() for n in lengths]
