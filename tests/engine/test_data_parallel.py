"""Data parallelism: a server's engines are exact, share if they are told to, and end together."""

import json
import re
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import psutil
import pytest
import requests
from vllm import SamplingParams

from lookahead_vllm.draft.cache import file as cache_file
from tests.support.driving import engine, generate, random_prompts
from tests.support.redis_server import BINARY, RedisServer
from tests.support.servers import ANSWER_SECONDS, END_SECONDS, cores_of, forked

ENGINES = 2
PROMPTS = random_prompts(6, 40, seed=32)
PARAMETERS: list[dict[str, Any]] = [
    {"temperature": 0, "max_tokens": 90, "ignore_eos": True},
    {"temperature": 0.7, "top_p": 0.9, "seed": 3, "max_tokens": 60},
]


def ask(url: str, prompt: list[int], parameters: dict[str, Any], rank: int | None) -> list[int]:
    """The answer's token ids; `rank` chooses the engine, the server does without."""
    answer = requests.post(
        f"{url}/v1/completions",
        json={"prompt": prompt, "return_token_ids": True, **parameters},
        headers={} if rank is None else {"X-data-parallel-rank": str(rank)},
        timeout=ANSWER_SECONDS,
    )
    answer.raise_for_status()
    token_ids: list[int] = answer.json()["choices"][0]["token_ids"]
    return token_ids


def by_engine(metrics: str, name: str) -> list[float]:
    """The sum of a metric of each engine."""
    sums = [0.0] * ENGINES
    for rank, value in re.findall(
        rf'^{name}{{[^}}]*engine="(\d)"[^}}]*}} (\S+)$', metrics, re.MULTILINE
    ):
        sums[int(rank)] += float(value)
    return sums


@pytest.mark.slow
def test_two_engines_answer_as_plain_vllm_and_end_together(llama, tmp_path, monkeypatch):
    cases = [(prompt, parameters) for parameters in PARAMETERS for prompt in PROMPTS]
    with engine(llama) as plain:
        sampling = [SamplingParams(**parameters) for _, parameters in cases]
        expected = [answer for (answer,) in generate(plain, [case[0] for case in cases], sampling)]
    cache = tmp_path / "learned.cache"
    lookahead = {"method": "lookahead", "budget": 8, "cache_path": str(cache)}
    server = RedisServer(tmp_path) if BINARY else None
    if server is not None:
        lookahead["share_with"] = server.url
    flags = ("--enforce-eager", "--dtype", "float32", "--attention-backend", "CPU_MLA")
    flags += ("--max-model-len", "256", "--kv-cache-memory-bytes", "64M")
    flags += ("--data-parallel-size", str(ENGINES), "--speculative-config", json.dumps(lookahead))
    flags += ("--shutdown-timeout", "60")  # vLLM kills the engines at once without it
    log = tmp_path / "log"
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", cores_of(ENGINES))
    with forked(llama, log, *flags) as server_of_two:
        url, process = server_of_two
        own = [i % ENGINES for i in range(len(cases))]
        for ranks in (own, own, [None] * len(cases)):
            with ThreadPoolExecutor(4) as pool:
                answers = pool.map(lambda case, rank: ask(url, *case, rank), cases, ranks)
            assert list(answers) == expected
        metrics = requests.get(f"{url}/metrics", timeout=ANSWER_SECONDS).text
        processes = server_of_two.all_processes()
        assert len(processes) > 2 * ENGINES  # as many API servers, and the coordinator
        process.terminate()
        process.join(END_SECONDS)
        assert process.exitcode == 0
        assert not psutil.wait_procs(processes, timeout=END_SECONDS)[1]
    names = ["nodes_verified", "nodes_accepted"]
    if server is not None:
        server.kill()
        names.append("fleet_tokens_learned")
    for name in names:
        assert min(by_engine(metrics, f"lookahead_vllm:{name}_total")) > 20, name
    caches = [cache, cache.with_name(f"{cache.name}.dp1")]
    assert all(cache_file.count_ngrams(cache_file.load(path)[0]) > 100 for path in caches)
    text = log.read_text()
    assert "EngineCore_DP1" in text and "Traceback" not in text
