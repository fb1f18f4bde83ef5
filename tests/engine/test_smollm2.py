"""A real small model: its output in this process and over HTTP."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import requests
from openai import OpenAI
from vllm import SamplingParams

from lookahead_vllm.draft.budget.cost import CostCurve, StepCost
from lookahead_vllm.draft.cache import file as cache_file
from tests.support.driving import drafter_of, engine, generate
from tests.support.servers import ANSWER_SECONDS, serve
from tests.support.smollm2 import SMOLLM2 as MODEL

ROOT = Path(__file__).parents[2]
PROMPTS = [
    json.loads(line)["prompt_token_ids"]
    for line in (ROOT / "tests" / "data" / "spec_bench_20.jsonl").read_text().splitlines()
]
REAL = dict(max_model_len=1024, kv_cache_memory_bytes=256 << 20)


@pytest.mark.usefixtures("runner")
def test_the_output_equals_plain_vllm() -> None:
    prompts = PROMPTS[::7]
    params = [
        SamplingParams(temperature=0, max_tokens=32, detokenize=False),
        SamplingParams(temperature=0.8, top_p=0.9, seed=11, max_tokens=32, detokenize=False),
    ]
    with engine(MODEL, **REAL) as plain:
        vanilla = [generate(plain, prompts, p) for p in params]
    with engine(MODEL, {"budget": 8}, **REAL) as llm:
        for p, expected in zip(params, vanilla, strict=True):
            assert generate(llm, prompts, p) == expected
            assert generate(llm, prompts[:2], p) == expected[:2]
        counters = drafter_of(llm).counters
        assert counters.branching_trees > 50
        assert counters.moved_tokens > 10
    with engine(MODEL, {}, **REAL) as llm:  # the number of nodes follows from the step cost
        # Nodes are sent, however slow the machine.
        drafter_of(llm).proposer.cost = StepCost(CostCurve([1, 1024], [10.0, 10.1]))
        assert generate(llm, prompts, params[0]) == vanilla[0]
        assert drafter_of(llm).counters.accepted_nodes > 10


@pytest.mark.parametrize("runner", ["v2"], indirect=True)
@pytest.mark.usefixtures("runner")
def test_stop_strings_cut_a_burst_of_accepted_tokens() -> None:
    settings = dict(REAL, skip_tokenizer_init=False)
    prompts = PROMPTS[:6]
    with engine(MODEL, **settings) as plain:
        unstopped = plain.generate(
            [{"prompt_token_ids": p} for p in prompts],
            SamplingParams(temperature=0, max_tokens=32),
            use_tqdm=False,
        )
        stops = [" ".join(o.outputs[0].text.split()[10:12]) for o in unstopped]
        params = [SamplingParams(temperature=0, max_tokens=32, stop=[s]) for s in stops]
        vanilla = generate(plain, prompts, params)
    with engine(MODEL, {"budget": 8}, **settings) as llm:
        assert generate(llm, prompts, params) == vanilla
        # Now the trie holds every answer: long bursts run past the stop string.
        assert generate(llm, prompts, params) == vanilla


@pytest.fixture(scope="module")
def urls(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, str]]:
    """The URLs of a plain server and of one with lookahead."""
    logs = tmp_path_factory.mktemp("logs")
    cache = logs / "lookahead.cache"
    shared = (
        "--dtype=float32",
        "--enforce-eager",
        "--max-model-len=1024",
        "--kv-cache-memory-bytes=536870912",
        "--served-model-name=m",
    )
    with (
        serve(MODEL, logs / "plain.log", *shared) as plain,
        serve(
            MODEL,
            logs / "lookahead.log",
            *shared,
            "--speculative-model=[lookahead]",
            "--num-speculative-tokens=6",
            "--speculative-config.budget=6",  # a fixed budget, so that slow machines draft too
            f"--speculative-config.cache_path={cache}",
            "--speculative-config.cache_interval=5",
        ) as lookahead,
    ):
        yield plain, lookahead
    assert cache_file.read_header(cache).namespaces > 0


@contextmanager
def verifying(url: str) -> Iterator[None]:
    """Fails unless the server with lookahead verifies nodes of drafts in the block."""
    before = counted(url, "lookahead_vllm:nodes_verified_total")
    yield
    assert counted(url, "lookahead_vllm:nodes_verified_total") > before, "there were no drafts"


def counted(url: str, name: str) -> float:
    """The sum of a metric of a server."""
    metrics = requests.get(f"{url}/metrics", timeout=ANSWER_SECONDS).text
    return sum(float(n) for n in re.findall(rf"^{name}{{.*}} (\S+)$", metrics, re.MULTILINE))


def client(url: str) -> OpenAI:
    return OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)


def complete(url: str, prompt: list[int], stream: bool) -> str:
    answer = client(url).completions.create(
        model="m", prompt=prompt, max_tokens=20, temperature=0, stream=stream
    )
    if not stream:
        return answer.choices[0].text
    return "".join(chunk.choices[0].text for chunk in answer)


@pytest.mark.parametrize("stream", [False, True])
def test_16_clients_get_plain_vllms_output(urls: tuple[str, str], stream: bool) -> None:
    plain, lookahead = urls
    prompts = PROMPTS[:16]
    with verifying(lookahead), ThreadPoolExecutor(16) as pool:
        expected = list(pool.map(lambda p: complete(plain, p, stream), prompts))
        assert list(pool.map(lambda p: complete(lookahead, p, stream), prompts)) == expected


def test_chats_get_plain_vllms_output(urls: tuple[str, str]) -> None:
    def chat(url: str) -> str | None:
        answer = client(url).chat.completions.create(
            model="m",
            messages=[{"role": "user", "content": "Name three rivers, three times each."}],
            max_tokens=40,
            temperature=0.7,
            seed=5,
        )
        return answer.choices[0].message.content

    plain, lookahead = urls
    with verifying(lookahead):
        assert chat(plain) == chat(lookahead)


def test_disconnects_and_malformed_requests_leave_others_unchanged(urls: tuple[str, str]) -> None:
    plain, lookahead = urls

    def leave_early(prompt: list[int]) -> None:
        stream = client(lookahead).completions.create(
            model="m", prompt=prompt, max_tokens=400, temperature=0, stream=True
        )
        for _ in zip(range(4), stream, strict=False):
            pass
        stream.close()

    def malformed(body: dict) -> int:
        return requests.post(
            f"{lookahead}/v1/completions", json=body, timeout=ANSWER_SECONDS
        ).status_code

    bad = [
        {"model": "m", "prompt": "x", "temperature": -3},
        {"model": "m", "prompt": "x", "max_tokens": -1},
        {"model": "m", "prompt": "x", "max_tokens": 100_000},
        {"model": "m", "prompt": [999_999_999], "max_tokens": 4},
        {"model": "m", "prompt": "x", "top_p": 7},
    ]
    expected = [complete(plain, p, False) for p in PROMPTS[:4]]
    with verifying(lookahead), ThreadPoolExecutor(16) as pool:
        leaving = [pool.submit(leave_early, p) for p in PROMPTS[4:7]]
        refused = [pool.submit(malformed, body) for body in bad]
        answers = list(pool.map(lambda p: complete(lookahead, p, False), PROMPTS[:4]))
    assert answers == expected
    assert [r.result() for r in refused] == [400] * len(bad)
    for future in leaving:
        future.result()
    assert complete(lookahead, PROMPTS[0], False) == expected[0]


def test_request_options_are_applied_or_refused(urls: tuple[str, str]) -> None:
    plain, lookahead = urls
    question = [{"role": "user", "content": "Name three rivers, three times each."}]
    bodies = {
        "completions": {"model": "m", "prompt": "Three rivers:", "max_tokens": 12},
        "chat/completions": {"model": "m", "messages": question, "max_tokens": 12},
    }

    def post(url: str, endpoint: str, **extra: Any) -> requests.Response:
        body = {**bodies[endpoint], "temperature": 0, **extra}
        return requests.post(f"{url}/v1/{endpoint}", json=body, timeout=ANSWER_SECONDS)

    bad = [
        ({"vllm_xargs": {"lookahead_refrence": "x"}}, "did you mean lookahead_reference?"),
        ({"vllm_xargs": {"lookahead_enabled": "no"}}, "must be true or false"),
        ({"vllm_xargs": {"lookahead_reference": "x" * 600_000}}, "64 texts of 16384 tokens in all"),
        ({"vllm_xargs": {"lookahead_reference": [999_999]}}, "the model's ids are 0 to"),
    ]
    bad_prediction = {"prediction": {"type": "content"}}
    cases = [(e, b, message, s) for e in bodies for b, message in bad for s in (False, True)]
    cases.append(("chat/completions", bad_prediction, "prediction={'type': 'content'}", True))
    expected = complete(plain, PROMPTS[0], False)
    with ThreadPoolExecutor(8) as pool:
        answer = pool.submit(complete, lookahead, PROMPTS[0], True)
        refused = [pool.submit(post, lookahead, e, **b, stream=s) for e, b, _, s in cases]
        for future, (*_, message, _) in zip(refused, cases, strict=True):
            assert future.result().status_code == 400
            assert message in future.result().json()["error"]["message"]
        assert answer.result() == expected

    for endpoint in bodies:
        choice = post(plain, endpoint).json()["choices"][0]
        text = choice["text"] if endpoint == "completions" else choice["message"]["content"]
        good: list[dict[str, Any]] = [
            {
                "vllm_xargs": {
                    "lookahead_reference": [text, "x" * 9_000],
                    "lookahead_namespace": "n",
                }
            },
            {"vllm_xargs": {"lookahead_enabled": False}, "cache_salt": "s"},
        ]
        if endpoint != "completions":
            good.append({"prediction": {"type": "content", "content": text}})
        for extra in good:
            answer = post(lookahead, endpoint, **extra)
            assert answer.ok, answer.text
            assert answer.json()["choices"][0] == choice


def test_drafts_were_accepted(urls: tuple[str, str]) -> None:
    plain, lookahead = urls
    theirs = counted(lookahead, "vllm:spec_decode_num_accepted_tokens_total")
    ours = counted(lookahead, "lookahead_vllm:nodes_accepted_total")
    assert ours >= theirs > 50  # ours counts requests that are aborted during a step
    assert "lookahead_vllm:" not in requests.get(f"{plain}/metrics", timeout=ANSWER_SECONDS).text
