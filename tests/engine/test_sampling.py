"""Trees with parameters that depend on earlier tokens, or that vLLM refuses with drafts."""

from pathlib import Path
from typing import Any

import pytest
from vllm import SamplingParams

from tests.support.driving import drafter_of, engine, generate, random_prompts, record_plain
from tests.support.logprobs import answers_with_logprobs, assert_same_logprobs
from tests.support.processors import NoRepeat
from tests.support.proposers import record

HIDDEN = {"proposer": "hidden_path", "budget": 16}

PATH_DEPENDENT: list[dict[str, Any]] = [
    dict(repetition_penalty=1.3),
    dict(presence_penalty=0.9),
    dict(frequency_penalty=0.7),
    dict(repetition_penalty=0.7, frequency_penalty=-0.4),
    dict(min_tokens=30),
    dict(min_tokens=9, stop_token_ids=list(range(3, 40))),
    dict(stop_token_ids=[5, 77]),
    dict(allowed_token_ids=list(range(3, 60))),
    dict(logit_bias={7: 4.0, 90: -100.0}),
    dict(min_p=0.2),
    dict(min_p=0.05, logit_bias={11: 2.5}, presence_penalty=0.4, min_tokens=12),
]


def params_of(extra: dict[str, Any], seed: int | None) -> SamplingParams:
    sampling = dict(temperature=0) if seed is None else dict(temperature=0.9, seed=seed, top_k=40)
    return SamplingParams(**{**sampling, "max_tokens": 40, "detokenize": False, **extra})


WITH_TOKENIZER: dict[str, Any] = dict(skip_tokenizer_init=False)


def assert_exact(
    model: Path,
    prompts: list[list[int]],
    params: list[SamplingParams],
    min_accepted: int = 50,
    min_branching: int = 25,
    **settings: Any,
) -> None:
    """Compare with plain vLLM in one batch, then one by one; at least `min_accepted` nodes each."""
    vanilla = record_plain(model, prompts, params, **settings)
    with engine(model, HIDDEN, **settings) as llm:
        assert generate(llm, prompts, params) == vanilla
        counters = drafter_of(llm).counters
        assert counters.accepted_nodes > min_accepted
        assert counters.branching_trees > min_branching
        before = counters.accepted_nodes
        # One by one: the batch then has no rows of other requests.
        for prompt, one, answer in zip(prompts, params, vanilla, strict=True):
            assert generate(llm, [prompt], one) == [answer]
        assert counters.accepted_nodes > before + min_accepted


def test_each_parameter_keeps_its_output_in_a_mixed_batch(llama):
    params = [params_of(e, seed) for e in [*PATH_DEPENDENT, {}] for seed in (None, 3)]
    assert_exact(llama, random_prompts(len(params), 30, seed=13), params, min_accepted=200)


def test_bad_words_keep_the_output(llama):
    """Some bad words are one token; others span several tokens of a path."""
    words = ["q", "the", "ab", "in", *(a + b for a in "xyz" for b in "abcdefgh")]
    params = [
        params_of(dict(bad_words=words, **extra), seed)
        for extra in ({}, dict(frequency_penalty=0.5))
        for seed in (None, 5)
    ]
    params += [params_of({}, None), params_of({}, 1)]
    prompts = random_prompts(len(params), 30, seed=21)
    assert_exact(llama, prompts, params, min_accepted=20, **WITH_TOKENIZER)


@pytest.mark.parametrize("end", ["</think>", "the end</think>"])
def test_thinking_budgets_keep_the_output(end, llama):
    """Budgets run out inside a burst or in the prompt; the model ends or starts thinking itself."""
    start, stop = 3, 4
    thinking = dict(reasoning_config={"reasoning_start_str": "<think>", "reasoning_end_str": end})
    open_prompts = [[*p, start, *p[:2]] for p in random_prompts(6, 12, seed=31)]
    closed = [[start, 9, stop, *p] for p in random_prompts(4, 12, seed=32)]
    budgets = [0, 1, 2, 7, 13, 30, 3, 5, 9, 4]
    params = [
        params_of(dict(thinking_token_budget=b, logit_bias={start: 3.0, stop: 1.0}), seed)
        for b, seed in zip(budgets, [None, 1, None, 2, None, 3, None, 4, None, 5], strict=True)
    ]
    assert_exact(llama, [*open_prompts, *closed], params, **WITH_TOKENIZER, **thinking)


def test_custom_logits_processors_keep_the_output(llama):
    """A processor does not know the parents of a row, so its requests get chains."""
    params = [
        params_of({} if ban is None else dict(extra_args={"ban": ban}), seed)
        for ban in (None, 1.5, 20.0)
        for seed in (None, 8)
    ]
    prompts = random_prompts(len(params), 30, seed=41)
    assert_exact(llama, prompts, params, min_branching=5, logits_processors=[NoRepeat])


LOGPROBS: list[dict[str, Any]] = [
    {},
    dict(logprobs=0),
    dict(logprobs=4),
    dict(logprobs=-1),
    dict(logprobs=2, prompt_logprobs=3),
    dict(logprobs=3, repetition_penalty=1.2, logit_bias={9: 3.0}, min_p=0.1),
]


def assert_exact_logprobs(
    llama: Path, params: list[SamplingParams], seed: int, min_accepted: int, **settings: Any
) -> None:
    prompts = random_prompts(len(params), 30, seed=seed)
    with engine(llama, **settings) as plain:
        vanilla = answers_with_logprobs(plain, prompts, params)
    record(prompts, [[text] for text, *_ in vanilla])
    with engine(llama, HIDDEN, **settings) as llm:
        assert_same_logprobs(answers_with_logprobs(llm, prompts, params), vanilla)
        assert drafter_of(llm).counters.accepted_nodes > min_accepted


@pytest.mark.parametrize(
    "mode", ["raw_logprobs", "raw_logits", "processed_logprobs", "processed_logits"]
)
def test_logprobs_equal_plain_vllms_in_every_mode(mode, llama):
    params = [params_of(e, seed) for e in LOGPROBS for seed in (None, 6)]
    assert_exact_logprobs(llama, params, 51, 100, logprobs_mode=mode, max_logprobs=-1)


def test_logprobs_of_chosen_token_ids_equal_plain_vllms(llama):
    """The batch also has requests without logprobs, with and without nodes."""
    params = [
        params_of(dict(logprob_token_ids=[5, 9, 100]), None),
        params_of(dict(logprob_token_ids=[7], max_tokens=2), None),
        params_of({}, 2),
    ]
    assert_exact_logprobs(llama, params, 61, 10)
