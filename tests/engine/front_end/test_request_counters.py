"""vLLM's counters of requests and tokens do not depend on how many tokens come at once."""

from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
from prometheus_client import REGISTRY
from vllm import LLM, SamplingParams, TokensPrompt

from lookahead_vllm.engine.front_end import stat_logger
from lookahead_vllm.options.request import PREDICTION
from tests.support.driving import drafter_of, engine, of_length
from tests.support.proposers import record

PROMPTS = [[5, 6, 7, 8] * 8, [9, 10, 11] * 6, [20, 21] * 5, [30, 31, 32] * 4]
DEPENDS_ON_STEPS = ("seconds", "spec_decode", "iteration_tokens_total", "_info", "_created")
"""Parts of the names of metrics that depend on time, or on how many steps there are."""


@pytest.fixture(autouse=True)
def _no_metrics_left() -> Iterator[None]:
    yield
    stat_logger.unregister()


def counted() -> Counter[Any]:
    """vLLM's metrics that depend on the requests only, by name and labels."""
    totals: Counter[Any] = Counter()
    for family in REGISTRY.collect():
        for sample in family.samples:
            if sample.name.startswith("vllm:") and depends_on_requests(sample.name):
                totals[sample.name, *sorted(sample.labels.items())] += sample.value
    return totals


def depends_on_requests(name: str) -> bool:
    if name.endswith("_seconds_count"):
        return "inter_token" not in name
    if name == "vllm:iteration_tokens_total_sum":
        return True
    return not any(part in name for part in DEPENDS_ON_STEPS)


def answers(llm: LLM, params: list[SamplingParams]) -> list[tuple[int, list[int]]]:
    prompts = [TokensPrompt(prompt_token_ids=prompt) for prompt in PROMPTS for _ in params]
    outputs = llm.generate(prompts, params * len(PROMPTS), use_tqdm=False)
    return [(len(o.prompt_token_ids or ()), list(a.token_ids)) for o in outputs for a in o.outputs]


def params_of(texts: list[str], tokens: list[list[int]]) -> list[SamplingParams]:
    """Requests that end in every way, most of them in the middle of a burst."""
    stop = [text[len(text) // 2 : len(text) // 2 + 2] for text in texts]
    common: dict[str, Any] = dict(temperature=0, max_tokens=40)
    return [
        SamplingParams(**common, stop=stop),
        SamplingParams(**common, stop=stop, include_stop_str_in_output=True, min_tokens=9),
        SamplingParams(**common, stop_token_ids=[own[len(own) // 2] for own in tokens]),
        SamplingParams(**common, ignore_eos=True),
        SamplingParams(**{**common, "temperature": 0.5}, seed=3, n=3, stop=stop),
    ]


def test_counters_of_requests_and_tokens_are_those_of_plain_vllm(llama):
    settings: dict[str, Any] = dict(skip_tokenizer_init=False, disable_log_stats=False)
    with engine(llama, **settings) as plain:
        prompts = [TokensPrompt(prompt_token_ids=prompt) for prompt in PROMPTS]
        free = of_length(40, detokenize=True)
        unstopped = plain.generate(prompts, free, use_tqdm=False)
        params = params_of(
            [o.outputs[0].text for o in unstopped],
            [list(o.outputs[0].token_ids) for o in unstopped],
        )
        expected = [answers(plain, params) for _ in range(2)]
        expected_counts = counted()
    with engine(llama, {"budget": 16}, **settings) as llm:
        llm.generate(prompts, free, use_tqdm=False)
        assert [answers(llm, params) for _ in range(2)] == expected
        counts = counted()
    emitted = sum(len(tokens) for run in expected for _, tokens in run) + 40 * len(PROMPTS)
    (generated,) = (n for (name, *_), n in counts.items() if name == "vllm:generation_tokens_total")
    assert generated == emitted
    assert counts == expected_counts


def test_the_next_turn_finds_all_blocks_of_an_answer(llama):
    """A burst may fill the last block of an answer."""
    settings: dict[str, Any] = dict(
        disable_log_stats=False, enable_prefix_caching=True, block_size=32
    )

    def hits(llm: LLM) -> list[Any]:
        found = []
        for length in range(32, 42, 2):  # a block is full after 31 tokens
            prompt = [length, *PROMPTS[0]]
            for _ in range(2):
                tokens = TokensPrompt(prompt_token_ids=prompt)
                (output,) = llm.generate([tokens], of_length(length), use_tqdm=False)
                answer = list(output.outputs[0].token_ids)
                found.append((prompt, answer, output.num_cached_tokens))
                prompt = [*prompt, *answer, 9]
        return found

    with engine(llama, **settings) as plain:
        expected, expected_counts = hits(plain), counted()
    record([prompt for prompt, _, _ in expected], [[answer] for _, answer, _ in expected])
    with engine(llama, {"proposer": "always_right", "budget": 16}, **settings) as llm:
        assert hits(llm) == expected
        assert counted() == expected_counts


@pytest.mark.parametrize("level", ["none", "summary", "detailed"])
def test_drafts_are_counted_by_request(llama, level):
    """Of requests with a prediction always, of all with --per-request-spec-decode-metrics."""
    params = [of_length(40, detokenize=True) for _ in PROMPTS]
    params[1].extra_args = {PREDICTION: {"type": "content", "content": "a prediction"}}
    settings = dict(skip_tokenizer_init=False, per_request_spec_decode_metrics=level)
    with engine(llama, {"budget": 16}, **settings) as llm:
        prompts = [TokensPrompt(prompt_token_ids=prompt) for prompt in PROMPTS]
        outputs = llm.generate(prompts, params, use_tqdm=False)
        metrics = [output.outputs[0].spec_decode_metrics for output in outputs]
        if level == "none":
            assert [one is not None for one in metrics] == [False, True, False, False]
            params[1].stop = [outputs[1].outputs[0].text[9:19]]  # which the front-end finds
            (output,) = llm.generate(prompts[1], params[1], use_tqdm=False)
            drafts = output.outputs[0].spec_decode_metrics
            assert 0 < drafts.num_draft_tokens <= metrics[1].num_draft_tokens
            return
        counted = [one.to_dict() for one in metrics]
        counters = drafter_of(llm).counters
        for name, number in (
            ("num_spec_steps", counters.trees),
            ("num_draft_tokens", counters.nodes),
            ("num_accepted_draft_tokens", counters.accepted_nodes),
        ):
            assert sum(one[name] for one in counted) == number > 0
        assert all(("per_step_drafted" in one) == (level == "detailed") for one in counted)
