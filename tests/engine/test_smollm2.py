"""A real small model: its output equals plain vLLM's."""

import json
from pathlib import Path
from typing import Any

from vllm import SamplingParams

from tests.support.driving import drafter_of, engine, generate
from tests.support.smollm2 import SMOLLM2 as MODEL

DATA = Path(__file__).parents[1] / "data" / "spec_bench_20.jsonl"
PROMPTS = [json.loads(line)["prompt_token_ids"] for line in DATA.read_text().splitlines()[::7]]
SETTINGS: dict[str, Any] = dict(
    max_model_len=1024, kv_cache_memory_bytes=256 << 20, skip_tokenizer_init=False
)
GREEDY = SamplingParams(temperature=0, max_tokens=32)
SEEDED = SamplingParams(temperature=0.8, top_p=0.9, seed=11, max_tokens=32)


def test_the_output_equals_plain_vllm():
    """Greedy, seeded, and with stop strings that cut a burst of accepted tokens."""
    with engine(MODEL, **SETTINGS) as plain:
        unstopped = plain.generate([{"prompt_token_ids": p} for p in PROMPTS], GREEDY)
        stops = [" ".join(o.outputs[0].text.split()[10:12]) for o in unstopped]
        stopped = [SamplingParams(temperature=0, max_tokens=32, stop=[stop]) for stop in stops]
        vanilla = [generate(plain, PROMPTS, params) for params in (GREEDY, SEEDED, stopped)]
    with engine(MODEL, {"budget": 8}, **SETTINGS) as llm:
        for params, expected in zip((GREEDY, SEEDED, stopped), vanilla, strict=True):
            assert generate(llm, PROMPTS, params) == expected
            # Now the trie holds the answers: long bursts run past the stop strings.
            assert generate(llm, PROMPTS, params) == expected
        counters = drafter_of(llm).counters
        assert counters.branching_trees > 50
        assert counters.moved_tokens > 10
