"""In float32 the output equals plain vLLM's, token for token, for every draft."""

import threading
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from vllm import LLM
from vllm.sampling_params import BeamSearchParams

from lookahead_vllm.draft.growth import growers
from lookahead_vllm.engine.drafter import drafter
from tests.support.driving import (
    GREEDY,
    drafter_of,
    engine,
    generate,
    generate_staggered,
    obstacle_of,
    of_length,
    random_prompts,
    record_plain,
    runner_of,
)
from tests.support.proposers import record
from tests.support.standing_by import STANDS_BY

Answers = list[list[list[int]]]

HIDDEN = {"proposer": "hidden_path", "budget": 16}
TRIE = {"proposer": "ngram_trie", "budget": 16}
SEEDED = [
    of_length(40, temperature=0.8, seed=1, **extra)
    for extra in (dict(), dict(top_k=5), dict(top_p=0.7), dict(top_k=20, top_p=0.9, n=4), dict(n=4))
]
LONG = of_length(90)
PROMPTS = random_prompts(12, 30, seed=3)
LONG_PROMPTS = random_prompts(8, 40, seed=2)
IN_CHUNKS = [random_prompts(1, 60, seed=s)[0] * 3 for s in (8, 9)]


class Plain(NamedTuple):
    """Plain vLLM's answers, all of one engine."""

    greedy: Answers
    """To `PROMPTS`."""
    seeded: Answers
    """To the first six, with `SEEDED` and, the last one, `GREEDY`."""
    long: Answers
    """To `LONG_PROMPTS`."""
    in_chunks: Answers
    """To `IN_CHUNKS`; plain vLLM on a CPU crashes if it reads them in chunks."""


@pytest.fixture(scope="module")
def plain(llama: Path) -> Plain:
    with engine(llama) as llm:
        return Plain(
            generate(llm, PROMPTS),
            generate(llm, PROMPTS[:6], [*SEEDED, GREEDY]),
            generate(llm, LONG_PROMPTS, LONG),
            generate(llm, IN_CHUNKS, [SEEDED[0], GREEDY]),
        )


@pytest.mark.parametrize(
    "settings",
    [
        pytest.param({"enable_prefix_caching": True}, id="prefix_caching"),
        pytest.param({"max_num_batched_tokens": 48, "max_num_seqs": 3}, id="chunked_prefill"),
        pytest.param({"block_size": 32}, id="small_blocks"),
        pytest.param({"max_model_len": 96}, id="runs_into_max_model_len"),
    ],
)
def test_output_equals_plain_vllm_under_every_engine_setting(settings, llama):
    shared = random_prompts(1, 60, seed=5)[0]
    prompts = [(shared + p)[:70] for p in random_prompts(8, 60, seed=1)]
    params = of_length(60)
    vanilla = record_plain(llama, prompts, params, **settings)
    with engine(llama, HIDDEN, **settings) as llm:
        assert generate_staggered(llm, prompts, params) == vanilla
        assert generate(llm, prompts, params) == vanilla
        assert drafter_of(llm).counters.moved_tokens > 50


def test_output_in_float16_equals_plain_vllms(llama):
    """Of these prompts; others may come to a near tie."""
    params = [GREEDY, GREEDY, *SEEDED[:2]]
    vanilla = record_plain(llama, PROMPTS[:4], params, dtype="float16")
    with engine(llama, HIDDEN, dtype="float16") as llm:
        assert generate(llm, PROMPTS[:4], params) == vanilla
        assert drafter_of(llm).counters.moved_tokens > 5


def test_output_over_an_fp8_cache_equals_plain_vllms(llama):
    vanilla = record_plain(llama, PROMPTS, kv_cache_dtype="fp8")
    with engine(llama, HIDDEN, kv_cache_dtype="fp8") as llm:
        assert "holds torch.uint8" in str(obstacle_of(llm))
        assert generate(llm, PROMPTS) == vanilla


@pytest.mark.parametrize(
    ("dtype", "cache", "drafts"),
    [
        ("bfloat16", "float16", True),
        ("float32", "bfloat16", False),
        ("float32", "int8_per_token_head", False),
    ],
)
def test_no_dtype_of_the_cache_ends_an_engine(dtype, cache, drafts, llama):
    """Trees would not read what vLLM's kernel writes; where slots overlap, there are no drafts."""
    with engine(llama, TRIE, drafts, dtype=dtype, kv_cache_dtype=cache) as llm:
        assert f"not the model's torch.{dtype}" in str(obstacle_of(llm))
        assert all(len(answer) == 40 for [answer] in generate(llm, [PROMPTS[0] * 2] * 3))


def test_preempted_requests_keep_their_output(llama, plain, preempted):
    record(LONG_PROMPTS, plain.long)
    for lookahead in (HIDDEN, TRIE):
        preempted.clear()
        with engine(llama, lookahead, block_size=32, num_gpu_blocks_override=14) as llm:
            assert generate(llm, LONG_PROMPTS, LONG) == plain.long
        assert preempted


@pytest.mark.parametrize("proposer", ["always_right", "hidden_path"])
def test_max_tokens_and_stop_tokens_cut_a_burst(proposer, llama, plain):
    record(PROMPTS, plain.greedy)
    texts = [text for (text,) in plain.greedy]
    short = [of_length(1 + i) for i in range(len(PROMPTS))]
    stopped = [of_length(40, stop_token_ids=[text[7 + i]]) for i, text in enumerate(texts)]
    with engine(llama, {"proposer": proposer, "budget": 16}) as llm:
        assert generate(llm, PROMPTS, short) == [[text[: 1 + i]] for i, text in enumerate(texts)]
        for (answer,), text, params in zip(
            generate(llm, PROMPTS, stopped), texts, stopped, strict=True
        ):
            assert answer == text[: 1 + text.index(params.stop_token_ids[0])]


def test_aborted_requests_leave_other_requests_unchanged(llama, plain):
    record(PROMPTS, plain.greedy)
    with engine(llama, HIDDEN) as llm:
        aborted = [1, 4, 5]
        answers = generate_staggered(llm, PROMPTS, abort=aborted)
        for i, (answer, expected) in enumerate(zip(answers, plain.greedy, strict=True)):
            if i in aborted:
                assert answer[0] == expected[0][: len(answer[0])]
            else:
                assert answer == expected
        assert generate(llm, PROMPTS) == plain.greedy
        live = runner_of(llm)._late._requests._requests
        assert not [req_id for req_id in live if req_id.startswith("staggered")]


def test_seeded_output_equals_plain_vllm(llama, plain):
    """Each node uses the random draw of its output position; greedy requests share the batch."""
    record(PROMPTS[:6], plain.seeded)
    for lookahead in (HIDDEN, TRIE):
        with engine(llama, lookahead) as llm:
            assert generate(llm, PROMPTS[:6], [*SEEDED, GREEDY]) == plain.seeded
            assert generate(llm, PROMPTS[:6], [*SEEDED, GREEDY]) == plain.seeded
            assert drafter_of(llm).counters.accepted_nodes > 50


def test_a_seeded_prompt_may_be_prefilled_in_chunks(llama, plain):
    record(IN_CHUNKS, plain.in_chunks)
    with engine(llama, HIDDEN, max_num_batched_tokens=32, max_num_seqs=2) as llm:
        assert generate(llm, IN_CHUNKS, [SEEDED[0], GREEDY]) == plain.in_chunks


@pytest.mark.parametrize(
    ("proposer", "nodes"), [("always_right", 1), ("always_wrong", 7), ("hidden_path", 64)]
)
def test_valid_drafts_never_change_the_output(proposer, nodes, llama, plain):
    record(PROMPTS, plain.greedy)
    with engine(llama, {"proposer": proposer, "num_speculative_tokens": nodes}) as llm:
        assert generate(llm, PROMPTS) == plain.greedy
        counters = drafter_of(llm).counters
        if proposer == "always_wrong":
            assert counters.trees and not counters.accepted_nodes
        if proposer == "always_right":
            assert counters.accepted_nodes == counters.nodes > 0


def test_threads_that_grow_trees_change_no_output(llama, plain, monkeypatch):
    monkeypatch.setattr(drafter, "num_growers", lambda parallel: 2)
    monkeypatch.setattr(*STANDS_BY)
    calls, compiled = list[int](), growers.help_grow

    def help_grow(*arguments: Any) -> None:
        calls.append(threading.get_ident())
        compiled(*arguments)

    monkeypatch.setattr(growers, "help_grow", help_grow)
    with engine(llama, TRIE, max_num_seqs=len(PROMPTS), async_scheduling=True) as llm:
        assert generate(llm, PROMPTS) == plain.greedy
    assert len(calls) > 20 and len({*calls}) == 2


def test_beam_search_and_requests_with_lookahead_off_get_no_drafts(llama):
    prompts = random_prompts(2, 30, seed=19)
    beams = BeamSearchParams(beam_width=3, max_tokens=12, ignore_eos=True)
    off = of_length(20, extra_args={"lookahead_enabled": False})

    def ask(llm: LLM) -> list[list[list[int]]]:
        outputs = llm.beam_search([{"prompt_token_ids": p} for p in prompts], beams)
        return [[s.tokens for s in o.sequences] for o in outputs] + generate(llm, prompts, off)

    with engine(llama, skip_tokenizer_init=False) as plain:
        vanilla = ask(plain)
    with engine(llama, HIDDEN, drafts=False, skip_tokenizer_init=False) as llm:
        assert ask(llm) == vanilla
        assert drafter_of(llm).counters.trees == 0
