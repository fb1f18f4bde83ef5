"""Lookahead parallelism: ranks with whole models verify parts of the trees; the output is exact."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from vllm import LLM, SamplingParams
from vllm.sampling_params import StructuredOutputsParams

from tests.fuzz.processes import EXTENSION, share_recorded
from tests.support.driving import engine, generate, generate_staggered, random_prompts
from tests.support.logprobs import answers_with_logprobs, assert_same_logprobs
from tests.support.ranks import (
    GREEDY,
    PROMPTS,
    SEEDED,
    Answers,
    Verified,
    a_process_each,
    insert_whole_texts,
    plain_answers,
    record_trees,
    verified,
)

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


class Plain(NamedTuple):
    """What plain vLLM answers on one rank."""

    answers: Answers
    to_batches: list[Any]


@pytest.fixture(scope="module")
def plain(llama: Path) -> Plain:
    with engine(llama, **WITH_TOKENIZER) as llm:
        return Plain(plain_answers(llm), answers_to_batches(llm))


def answers_to_batches(llm: LLM) -> list[Any]:
    return [
        answer
        for params in BATCHES
        for answer in answers_with_logprobs(llm, TEXTS[: len(params)], params)
    ]


@contextmanager
def replicas(
    model: Path, count: int, lookahead: dict[str, Any], tmp_path: Path, **settings: Any
) -> Iterator[LLM]:
    settings["worker_extension_cls"] = EXTENSION
    with (
        a_process_each(count * settings.get("tensor_parallel_size", 1), tmp_path),
        engine(model, {"parallel": count, **lookahead}, **settings) as llm,
    ):
        share_recorded(llm)
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
    assert first.counters["moved_tokens"] and len(other.trees) > 20


def test_two_replicas(llama, plain, tmp_path):
    answers = plain.answers
    with replicas(llama, 2, HYBRID, tmp_path, **WITH_TOKENIZER) as llm:
        assert generate_staggered(llm, PROMPTS, GREEDY) == answers.greedy
        assert generate(llm, PROMPTS, SEEDED) == answers.seeded
        assert generate_staggered(llm, PROMPTS, GREEDY, reset_every=3) == answers.greedy
        aborted = generate_staggered(llm, PROMPTS, GREEDY, abort=[1, 4])
        for i, (answer, whole) in enumerate(zip(aborted, answers.greedy, strict=True)):
            assert answer == whole or (i in (1, 4) and answer[0] == whole[0][: len(answer[0])])
        check_ranks(llm)
        # Parameters, grammars and logprobs: nodes of some requests are shared, of others not.
        for _ in range(2):
            assert_same_logprobs(answers_to_batches(llm), plain.to_batches)


def test_two_replicas_of_two_ranks(llama, plain, tmp_path):
    with replicas(llama, 2, HYBRID, tmp_path, tensor_parallel_size=2) as llm:
        assert generate(llm, PROMPTS, GREEDY) == plain.answers.greedy
        assert generate(llm, PROMPTS, SEEDED) == plain.answers.seeded
        first, same, *others = llm.collective_rpc(verified)
        assert first.trees == same.trees
        for other in others:
            check_rank(first, other)


def test_preempted_requests_and_cached_prefixes(llama, plain, tmp_path, preempted):
    few = {"num_gpu_blocks_override": 12, "block_size": 32, "enable_prefix_caching": True}
    tight = {"max_num_seqs": 4, "max_num_batched_tokens": 100}
    with replicas(llama, 2, HYBRID, tmp_path, **few, **tight) as llm:
        assert generate_staggered(llm, PROMPTS, GREEDY) == plain.answers.greedy
        assert generate(llm, PROMPTS, SEEDED) == plain.answers.seeded
        check_ranks(llm)
    assert preempted
