"""Lookahead parallelism: ranks with whole models verify parts of the trees; the output is exact."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import vllm
from vllm import LLM, SamplingParams, TokensPrompt
from vllm.sampling_params import StructuredOutputsParams
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import RequestStatus

from tests.fuzz.processes import WorkerExtension
from tests.support.driving import engine, generate, generate_staggered, random_prompts
from tests.support.models import save_tiny_model
from tests.support.proposers import RECORDED, record
from tests.support.ranks import (
    GREEDY,
    PROMPTS,
    SEEDED,
    Answers,
    Verified,
    insert_whole_texts,
    plain_answers,
    record_trees,
    verified,
)
from tests.support.servers import cores_of

HYBRID = {"proposer": "hybrid", "num_speculative_tokens": 48, "budget": 24}
"""A tree and the accepted nodes of another one fit into a step."""

HIDDEN = {"proposer": "hidden_path", "num_speculative_tokens": 16, "budget": 16}


THINK, END_OF_THINKING = 3, 4
PARAMETERS: list[dict[str, Any]] = [
    {},
    dict(repetition_penalty=1.3, frequency_penalty=0.4),
    dict(min_tokens=30, stop_token_ids=list(range(3, 40))),
    dict(min_p=0.05, logit_bias={11: 2.5}, presence_penalty=0.4),
    dict(bad_words=["q", "the", "xa", "yb"]),
    dict(logprobs=3),
    dict(logprobs=2, repetition_penalty=1.2),
    dict(structured_outputs=StructuredOutputsParams(regex="[a-f]+ (x|y) the age is [0-9]{20}")),
    dict(structured_outputs=StructuredOutputsParams(regex="([a-z]{2} )*"), logprobs=1),
]
THINKING = [
    dict(thinking_token_budget=budget, logit_bias={THINK: 3.0, END_OF_THINKING: 1.0})
    for budget in (0, 3, 7)
]
SAMPLING: list[dict[str, Any]] = [
    dict(temperature=0),
    dict(temperature=0.9, seed=3, top_k=40),
]
BATCHES = [
    [SamplingParams(**{**how, "max_tokens": 40, **extra}) for extra in extras for how in SAMPLING]
    for extras in (PARAMETERS, THINKING)
]
"""Requests with thinking budgets have a batch of their own: when one ends, vLLM 0.32 and 0.33 may
apply its state to another request of its batch (`ThinkingBudgetStateHolder.sync_batch`)."""
TEXTS = random_prompts(len(BATCHES[0]), 30, seed=13)
WITH_TOKENIZER: dict[str, Any] = dict(
    skip_tokenizer_init=False,
    structured_outputs_config={"backend": "xgrammar"},
    reasoning_config={"reasoning_start_str": "<think>", "reasoning_end_str": "</think>"},
)

pytestmark = pytest.mark.usefixtures("shared_runner")


class Plain(NamedTuple):
    """What plain vLLM answers on one rank."""

    answers: Answers
    to_batches: list[tuple[list[int], Any]]


@pytest.fixture(scope="module")
def plain(llama: Path, shared_runner: str) -> Plain:
    with engine(llama, **WITH_TOKENIZER) as llm:
        return Plain(plain_answers(llm), answers_to_batches(llm))


def answers_to_batches(llm: LLM) -> list[tuple[list[int], Any]]:
    """Tokens and logprobs."""
    outputs = [
        output.outputs[0]
        for params in BATCHES
        for output in llm.generate(
            [TokensPrompt(prompt_token_ids=p) for p in TEXTS[: len(params)]],
            params,
            use_tqdm=False,
        )
    ]
    return [(list(output.token_ids), output.logprobs) for output in outputs]


@contextmanager
def replicas(
    model: Path, count: int, lookahead: dict[str, Any], tmp_path: Path, **settings: Any
) -> Iterator[LLM]:
    num_ranks = count * settings.get("tensor_parallel_size", 1)
    extension = f"{WorkerExtension.__module__}.{WorkerExtension.__name__}"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_WORKER_MULTIPROC_METHOD", "spawn")
        patch.setenv("VLLM_CPU_OMP_THREADS_BIND", cores_of(num_ranks))
        patch.setenv("VLLM_CACHE_ROOT", str(tmp_path))
        settings["worker_extension_cls"] = extension
        with engine(model, {"parallel": count, **lookahead}, **settings) as llm:
            llm.collective_rpc("record_answers", args=(list(RECORDED), list(RECORDED.values())))
            llm.collective_rpc(record_trees)
            llm.collective_rpc(insert_whole_texts)
            yield llm


def check_ranks(llm: LLM) -> None:
    """The ranks verified parts of the same trees, and all of them received KV."""
    first, *others = llm.collective_rpc(verified)
    assert first.drafts and first.counters["branching_trees"] > 20
    assert not first.counters["failures"]
    for other in others:
        check_rank(first, other)


def check_rank(first: Verified, other: Verified) -> None:
    assert not other.drafts and other.trees != first.trees
    if not other.counters["trees"]:  # on V2, only the drafting rank counts
        assert first.counters["moved_tokens"] and len(other.trees) > 20
        return
    for name in ("trees", "branching_trees", "nodes", "accepted_nodes"):
        assert first.counters[name] == other.counters[name], name
    assert first.counters["moved_tokens"] and other.counters["moved_tokens"]


def recompute(worker: Any) -> None:
    """In a worker: compute the KV of accepted nodes again, and count in which ways it comes."""
    runner = worker.model_runner
    worker.recompute()
    runner.num_sent, original = 0, runner._send

    def send(lacking: Any) -> None:
        runner.num_sent += len(lacking)
        original(lacking)

    runner._send = send


def recomputed_and_sent(worker: Any) -> tuple[int, int]:
    """In a worker: tokens computed again, and requests whose KV could not be."""
    runner = worker.model_runner
    return runner.num_recomputed, getattr(runner, "num_sent", 0)


def test_two_replicas(llama: Path, plain: Plain, tmp_path: Path, shared_runner: str) -> None:
    answers = plain.answers
    with replicas(llama, 2, HYBRID, tmp_path, **WITH_TOKENIZER) as llm:
        for recomputes in (False, True)[: 1 + (shared_runner == "v1")]:
            if recomputes:
                assert llm.collective_rpc(recomputed_and_sent) == [(0, 0)] * 2
                llm.collective_rpc(recompute)
            assert generate_staggered(llm, PROMPTS, GREEDY) == answers.greedy
            assert generate(llm, PROMPTS, GREEDY) == answers.greedy
            assert generate(llm, PROMPTS, SEEDED) == answers.seeded
        if shared_runner == "v1":
            assert all(
                recomputed > 20 and sent <= 3 * len(PROMPTS)  # when they end
                for recomputed, sent in llm.collective_rpc(recomputed_and_sent)
            )
        assert generate_staggered(llm, PROMPTS, GREEDY, reset_every=3) == answers.greedy
        aborted = generate_staggered(llm, PROMPTS, GREEDY, abort=[1, 4])
        for i, (answer, whole) in enumerate(zip(aborted, answers.greedy, strict=True)):
            assert answer == whole or (i in (1, 4) and answer[0] == whole[0][: len(answer[0])])
        check_ranks(llm)
        # Parameters, grammars and logprobs: nodes of some requests are shared, of others not.
        for _ in range(2):
            check_batches(answers_to_batches(llm), plain.to_batches)


def check_batches(answers: list[Any], expected: list[Any]) -> None:
    for (tokens, logprobs), (same_tokens, same_logprobs) in zip(answers, expected, strict=True):
        assert tokens == same_tokens
        assert (logprobs is None) == (same_logprobs is None)
        for at_token, same in zip(logprobs or (), same_logprobs or (), strict=True):
            assert at_token.keys() == same.keys()
            for token, logprob in same.items():
                assert at_token[token].logprob == pytest.approx(logprob.logprob, abs=1e-4)


def _cache_whole_answers(patch: pytest.MonkeyPatch) -> None:
    """As vLLM 0.33 does: the last block of a request that ends is cached when it is full."""
    original = Scheduler._update_request_with_output

    def update(self: Any, request: Any, new: list[int], is_stale: bool = False) -> Any:
        is_running, sampled = request.status == RequestStatus.RUNNING, len(new)
        new, stopped = original(self, request, new, is_stale)
        if is_running and not is_stale:
            request.num_computed_tokens -= sampled - len(new)
            self.kv_cache_manager.cache_blocks(request, request.num_computed_tokens)
        return new, stopped

    patch.setattr(Scheduler, "_update_request_with_output", update)


@pytest.mark.parametrize("shared_runner", ["v1"], indirect=True)
def test_the_next_turn_of_a_conversation(
    llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its cached prefix has the KV of the nodes that were accepted last, on all ranks."""
    settings: dict[str, Any] = dict(enable_prefix_caching=True, block_size=32)
    first_turn = [  # whose last computed token is the last of a block
        SamplingParams(temperature=0, max_tokens=20 + (13 - len(p)) % 32, ignore_eos=True)
        for p in PROMPTS
    ]
    with engine(llama, **settings) as llm:
        first = generate(llm, PROMPTS, first_turn)
        prompts = [[*p, *a, 5, 7, 9] for p, (a,) in zip(PROMPTS, first, strict=True)]
        second = generate(llm, prompts, GREEDY)
    record([*PROMPTS, *prompts], [*first, *second])
    if vllm.__version__.startswith("0.32"):
        _cache_whole_answers(monkeypatch)
    with replicas(llama, 2, HIDDEN, tmp_path, **settings) as llm:
        llm.collective_rpc(recompute)
        assert generate(llm, PROMPTS, first_turn) == first
        assert generate(llm, prompts, GREEDY) == second
        assert all(sent for _, sent in llm.collective_rpc(recomputed_and_sent))


@pytest.mark.parametrize("shared_runner", ["v2"], indirect=True)  # they exchange alike on V1
@pytest.mark.parametrize(("count", "ranks"), [(3, 1), (2, 2)])
def test_more_ranks(llama: Path, plain: Plain, tmp_path: Path, count: int, ranks: int) -> None:
    with replicas(llama, count, HYBRID, tmp_path, tensor_parallel_size=ranks) as llm:
        assert generate(llm, PROMPTS, GREEDY) == plain.answers.greedy
        assert generate(llm, PROMPTS, SEEDED) == plain.answers.seeded
        first, *same = llm.collective_rpc(verified)
        for other in same[: ranks - 1]:
            assert first.trees == other.trees
        for other in same[ranks - 1 :]:
            check_rank(first, other)


def test_preempted_requests_and_cached_prefixes(
    llama: Path,
    plain: Plain,
    tmp_path: Path,
    shared_runner: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    preempted: list[str] = []
    original = Scheduler._preempt_request

    def count(self: Scheduler, request: Any, *args: Any, **kwargs: Any) -> None:
        preempted.append(request.request_id)
        original(self, request, *args, **kwargs)

    monkeypatch.setattr(Scheduler, "_preempt_request", count)
    few = {"num_gpu_blocks_override": 12, "block_size": 32, "enable_prefix_caching": True}
    tight = {"max_num_seqs": 4, "max_num_batched_tokens": 100}  # no room to recompute in each step
    with replicas(llama, 2, HYBRID, tmp_path, **few, **tight) as llm:
        for recomputes in (False, True)[: 1 + (shared_runner == "v1")]:
            if recomputes:
                llm.collective_rpc(recompute)
            assert generate_staggered(llm, PROMPTS, GREEDY) == plain.answers.greedy
            assert generate(llm, PROMPTS, SEEDED) == plain.answers.seeded
        check_ranks(llm)
        assert shared_runner == "v2" or all(
            recomputed > 20 and sent for recomputed, sent in llm.collective_rpc(recomputed_and_sent)
        )
    assert preempted


@pytest.mark.parametrize("shared_runner", ["v1"], indirect=True)
def test_a_sliding_window_recomputes_nothing(tmp_path: Path) -> None:
    """The scheduler gives back blocks behind the window that a recomputed row would attend to."""
    model = save_tiny_model("mistral_window", tmp_path)
    with engine(model, block_size=32) as llm:
        expected = generate(llm, PROMPTS, GREEDY)
    with replicas(model, 2, HYBRID, tmp_path, block_size=32) as llm:
        llm.collective_rpc(recompute)
        assert generate_staggered(llm, PROMPTS, GREEDY) == expected
        assert generate(llm, PROMPTS, GREEDY) == expected
        check_ranks(llm)
        assert llm.collective_rpc(recomputed_and_sent) == [(0, 0)] * 2
