"""In float32 the output equals plain vLLM's, token for token, for every draft."""

from __future__ import annotations

from pathlib import Path

import pytest
from vllm import LLM, SamplingParams
from vllm.sampling_params import BeamSearchParams
from vllm.v1.core.sched.scheduler import Scheduler

from tests.support import proposers
from tests.support.driving import (
    GREEDY,
    drafter_of,
    engine,
    generate,
    generate_staggered,
    random_prompts,
)
from tests.support.proposers import record

pytestmark = pytest.mark.usefixtures("runner")

HIDDEN = {"proposer": "hidden_path", "budget": 16}
TRIE = {"proposer": "ngram_trie", "budget": 16}


@pytest.mark.parametrize(
    "settings",
    [
        pytest.param({"enable_prefix_caching": True}, id="prefix_caching"),
        pytest.param({"max_num_batched_tokens": 48, "max_num_seqs": 3}, id="chunked_prefill"),
        pytest.param({"block_size": 32}, id="small_blocks"),
        pytest.param({"max_model_len": 96}, id="runs_into_max_model_len"),
    ],
)
def test_output_equals_plain_vllm_under_every_engine_setting(settings: dict, llama: Path) -> None:
    shared = random_prompts(1, 60, seed=5)[0]
    prompts = [(shared + p)[:70] for p in random_prompts(8, 60, seed=1)]
    params = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True, detokenize=False)
    with engine(llama, **settings) as plain:
        vanilla = generate(plain, prompts, params)
    record(prompts, vanilla)
    with engine(llama, HIDDEN, **settings) as llm:
        assert generate_staggered(llm, prompts, params) == vanilla
        assert generate(llm, prompts, params) == vanilla
        assert drafter_of(llm).counters.moved_tokens > 50


def test_preempted_requests_keep_their_output(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    preempted: list[str] = []
    original = Scheduler._preempt_request

    def count(self: Scheduler, request, *args, **kwargs):
        preempted.append(request.request_id)
        return original(self, request, *args, **kwargs)

    prompts = random_prompts(8, 40, seed=2)
    params = SamplingParams(temperature=0, max_tokens=90, ignore_eos=True, detokenize=False)
    with engine(llama) as plain:
        vanilla = generate(plain, prompts, params)
    record(prompts, vanilla)
    monkeypatch.setattr(Scheduler, "_preempt_request", count)
    for lookahead in (HIDDEN, TRIE):
        preempted.clear()
        with engine(llama, lookahead, block_size=32, num_gpu_blocks_override=14) as llm:
            assert generate(llm, prompts, params) == vanilla
        assert preempted


def test_max_tokens_cuts_a_burst_of_accepted_tokens(llama: Path) -> None:
    prompts = random_prompts(12, 30, seed=3)
    with engine(llama) as plain:
        vanilla = generate(plain, prompts)
    record(prompts, vanilla)
    params = [
        SamplingParams(temperature=0, max_tokens=1 + i, ignore_eos=True, detokenize=False)
        for i in range(12)
    ]
    expected = [[answer[0][: 1 + i]] for i, answer in enumerate(vanilla)]
    for proposer in ("always_right", "hidden_path"):
        with engine(llama, {"proposer": proposer, "budget": 16}) as llm:
            assert generate(llm, prompts, params) == expected


def test_stop_tokens_cut_a_burst_of_accepted_tokens(llama: Path) -> None:
    prompts = random_prompts(6, 30, seed=4)
    with engine(llama) as plain:
        record(prompts, generate(plain, prompts))
        stops = [proposers.RECORDED[tuple(p)][0][7 + i] for i, p in enumerate(prompts)]
        params = [
            SamplingParams(temperature=0, max_tokens=40, stop_token_ids=[s], detokenize=False)
            for s in stops
        ]
        vanilla = generate(plain, prompts, params)
    with engine(llama, {"proposer": "always_right"}) as llm:
        assert generate(llm, prompts, params) == vanilla


def test_aborted_requests_leave_other_requests_unchanged(llama: Path) -> None:
    prompts = random_prompts(10, 30, seed=6)
    with engine(llama) as plain:
        vanilla = generate(plain, prompts)
    record(prompts, vanilla)
    with engine(llama, HIDDEN) as llm:
        aborted = [1, 4, 5]
        answers = generate_staggered(llm, prompts, abort=aborted)
        for i, (answer, expected) in enumerate(zip(answers, vanilla, strict=True)):
            if i in aborted:
                assert answer[0] == expected[0][: len(answer[0])]
            else:
                assert answer == expected
        assert generate(llm, prompts) == vanilla
        assert not [r for r in drafter_of(llm)._live if r.startswith("staggered")]


SEEDED = [
    SamplingParams(temperature=0.8, seed=1, **extra)
    for extra in (
        dict(max_tokens=40, ignore_eos=True, detokenize=False),
        dict(max_tokens=40, ignore_eos=True, detokenize=False, top_k=5),
        dict(max_tokens=40, ignore_eos=True, detokenize=False, top_p=0.7),
        dict(max_tokens=40, ignore_eos=True, detokenize=False, top_k=20, top_p=0.9, n=4),
        dict(max_tokens=40, ignore_eos=True, detokenize=False, n=4),
    )
]


def test_seeded_output_equals_plain_vllm(llama: Path) -> None:
    """Each node uses the random draw of its output position; greedy requests share the batch."""
    prompts = random_prompts(6, 30, seed=7)
    params = [*SEEDED, GREEDY]
    with engine(llama) as plain:
        vanilla = generate(plain, prompts, params)
    record(prompts, vanilla)
    for lookahead in (HIDDEN, TRIE):
        with engine(llama, lookahead) as llm:
            assert generate(llm, prompts, params) == vanilla
            assert generate(llm, prompts, params) == vanilla
            assert drafter_of(llm).counters.accepted_nodes > 50


def test_a_seeded_prompt_may_be_prefilled_in_chunks(llama: Path) -> None:
    """Plain vLLM on CPU crashes here, so the expected output comes from a prefill in one piece."""
    prompts = [random_prompts(1, 60, seed=s)[0] * 3 for s in (8, 9)]
    params = [SEEDED[0], GREEDY]
    with engine(llama) as plain:
        vanilla = generate(plain, prompts, params)
    record(prompts, vanilla)
    with engine(llama, HIDDEN, max_num_batched_tokens=32, max_num_seqs=2) as llm:
        assert generate(llm, prompts, params) == vanilla


def test_logprobs_are_those_of_the_accepted_path(llama: Path) -> None:
    prompts = random_prompts(4, 30, seed=10)
    params = SamplingParams(
        temperature=0, max_tokens=20, ignore_eos=True, detokenize=False, logprobs=3
    )

    def logprobs(llm):
        outputs = llm.generate([{"prompt_token_ids": p} for p in prompts], params, use_tqdm=False)
        return [o.outputs[0] for o in outputs]

    with engine(llama) as plain:
        vanilla = logprobs(plain)
    record(prompts, [[list(o.token_ids)] for o in vanilla])
    with engine(llama, HIDDEN) as llm:
        for mine, theirs in zip(logprobs(llm), vanilla, strict=True):
            assert mine.token_ids == theirs.token_ids
            for a, b in zip(mine.logprobs, theirs.logprobs, strict=True):
                assert a.keys() == b.keys()
                for token in a:
                    assert a[token].rank == b[token].rank
                    assert a[token].logprob == pytest.approx(b[token].logprob, abs=1e-4)


@pytest.mark.parametrize("proposer", ["always_right", "always_wrong", "hidden_path"])
@pytest.mark.parametrize("nodes", [1, 7, 64])
def test_valid_drafts_never_change_the_output(proposer: str, nodes: int, llama: Path) -> None:
    prompts = random_prompts(5, 30, seed=11)
    with engine(llama) as plain:
        vanilla = generate(plain, prompts)
    record(prompts, vanilla)
    with engine(llama, {"proposer": proposer, "num_speculative_tokens": nodes}) as llm:
        assert generate(llm, prompts) == vanilla
        counters = drafter_of(llm).counters
        if proposer == "always_wrong":
            assert counters.trees and not counters.accepted_nodes
        if proposer == "always_right":
            assert counters.accepted_nodes == counters.nodes > 0


def test_malformed_trees_are_not_verified(llama: Path, caplog: pytest.LogCaptureFixture) -> None:
    prompts = random_prompts(3, 30, seed=12)
    with engine(llama) as plain:
        vanilla = generate(plain, prompts)
    with engine(llama, {"proposer": "malformed", "budget": 16}, drafts=False) as llm:
        assert generate(llm, prompts) == vanilla
        counters = drafter_of(llm).counters
        assert counters.refused_trees == 3 * (GREEDY.max_tokens - 2)
        assert counters.nodes == 0


def test_a_proposer_that_raises_costs_its_step_the_drafts_and_nothing_else(llama: Path) -> None:
    prompts = random_prompts(4, 30, seed=16)
    with engine(llama) as plain:
        vanilla = generate(plain, prompts)
    record(prompts, vanilla)
    with engine(llama, {"proposer": "failing", "budget": 16}) as llm:
        assert generate(llm, prompts) == vanilla
        counters = drafter_of(llm).counters
        assert counters.failures > 1
        assert counters.accepted_nodes > 16


def test_no_request_is_padded_with_empty_drafts(
    llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With one token left to compute, vLLM would reserve room for 16 placeholder drafts."""
    padded: list[bool] = []
    original = Scheduler.schedule

    def schedule(self: Scheduler, *args):
        output = original(self, *args)
        drafts = output.scheduled_spec_decode_tokens
        padded.extend(new.req_id in drafts for new in output.scheduled_new_reqs)
        return output

    monkeypatch.setattr(Scheduler, "schedule", schedule)
    block = random_prompts(1, 200, seed=17)[0][:32]
    prompts = [[*block, 5], [7], [*block, 6], [9], [*block, 5]]
    with engine(llama) as plain:
        vanilla = generate(plain, prompts)
    record(prompts, vanilla)
    with engine(llama, HIDDEN, enable_prefix_caching=True, block_size=32) as llm:
        assert generate_staggered(llm, prompts) == vanilla
        assert generate(llm, prompts) == vanilla
    assert padded and not any(padded)


def test_beam_search_and_requests_with_lookahead_off_get_no_drafts(llama: Path) -> None:
    prompts = random_prompts(2, 30, seed=19)
    beams = BeamSearchParams(beam_width=3, max_tokens=12, ignore_eos=True)
    off = SamplingParams(
        temperature=0, max_tokens=20, detokenize=False, extra_args={"lookahead_enabled": False}
    )

    def ask(llm: LLM) -> list[list[list[int]]]:
        outputs = llm.beam_search([{"prompt_token_ids": p} for p in prompts], beams)
        return [[s.tokens for s in o.sequences] for o in outputs] + generate(llm, prompts, off)

    with engine(llama, skip_tokenizer_init=False) as plain:
        vanilla = ask(plain)
    with engine(llama, HIDDEN, drafts=False, skip_tokenizer_init=False) as llm:
        assert ask(llm) == vanilla
        assert drafter_of(llm).counters.trees == 0
