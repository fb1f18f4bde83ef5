"""Requests whose id comes again: the next turn of a streaming session."""

import pytest
from vllm import LLM, SamplingParams, TokensPrompt
from vllm.v1.request import RequestStatus

from tests.support.driving import GREEDY, drafter_of, engine, generate, of_length, random_prompts
from tests.support.hybrid_models import CACHING, HYBRIDS, settings_of
from tests.support.models import save_config
from tests.support.proposers import record

SEEDED = of_length(40, temperature=1, seed=5, top_k=40)
TURNS = [*random_prompts(1, 40, seed=61), [5, 6], [7], [8, 9, 10]]


def stop_in(text: list[int]) -> int:
    """A token that comes first after a few others."""
    return next(token for i, token in enumerate(text) if i > 5 and token not in text[:i])


def answers_of(
    llm: LLM, stop: int, name: str = "a", sampling: SamplingParams = GREEDY
) -> list[list[int]]:
    """The answer of each turn of a session, which ends at the token `stop`."""
    params = sampling.clone()
    params.stop_token_ids = [stop]
    core = llm.llm_engine.engine_core
    scheduler = core.engine_core.scheduler
    answers: list[list[int]] = []
    for turn in TURNS:
        core.add_request(
            llm.llm_engine.input_processor.process_inputs(
                name,
                TokensPrompt(prompt_token_ids=list(turn)),  # a session extends it
                params,
                core.get_supported_tasks(),
                resumable=True,
            )
        )
        answers.append([])
        request = scheduler.requests[name]
        while request.status != RequestStatus.WAITING_FOR_STREAMING_REQ:
            for output in core.get_output().outputs:
                answers[-1] += output.new_token_ids
    core.abort_requests([name])
    return answers


@pytest.mark.parametrize(
    ("proposer", "sampling"),
    [("hidden_path", GREEDY), ("ngram_trie", GREEDY), ("always_right", SEEDED)],
)
def test_a_session_goes_on_after_a_stop_inside_a_draft(proposer, sampling, llama):
    """Nothing that was drawn after the stop is left for the next turn."""
    with engine(llama, enable_prefix_caching=True) as plain:
        text = generate(plain, TURNS[:1], sampling)[0][0]
        stop = stop_in(text)
        vanilla = answers_of(plain, stop, sampling=sampling)
    assert text[len(vanilla[0]) :], "no draft goes on after the stop"
    record(TURNS[:1], [[text]])
    with engine(llama, {"proposer": proposer, "budget": 16}, enable_prefix_caching=True) as llm:
        assert answers_of(llm, stop, sampling=sampling) == vanilla
        assert answers_of(llm, stop, "b", sampling) == vanilla
        least = len(vanilla[0]) if proposer == "always_right" else 3
        assert drafter_of(llm).counters.accepted_nodes > least
    assert vanilla[0][-1] == stop and len(vanilla[-1]) > 1


def test_a_session_that_its_client_ends_keeps_the_stops_of_the_turn_that_runs(llama):
    """vLLM marks the end by a request with the same id and the session's first parameters."""

    def answer_of(llm: LLM, stop: int) -> list[int]:
        params = GREEDY.clone()
        params.stop_token_ids = [stop]
        core, processor = llm.llm_engine.engine_core, llm.llm_engine.input_processor
        tasks, answer = core.get_supported_tasks(), list[int]()
        turn, end = TokensPrompt(prompt_token_ids=TURNS[0]), TokensPrompt(prompt_token_ids=[0])
        core.add_request(processor.process_inputs("a", turn, params, tasks, resumable=True))
        while core.engine_core.scheduler.requests:
            answer += [t for o in core.get_output().outputs for t in o.new_token_ids]
            if len(answer) == 1:
                core.add_request(processor.process_inputs("a", end, GREEDY, tasks))
        return answer

    with engine(llama) as plain:
        text = generate(plain, TURNS[:1])[0][0]
        vanilla = answer_of(plain, stop_in(text))
    record(TURNS[:1], [[text]])
    with engine(llama, {"proposer": "hidden_path", "budget": 16}) as llm:
        assert answer_of(llm, stop_in(text)) == vanilla
    assert vanilla[-1] == stop_in(text) and len(vanilla) < len(text)


def test_recurrent_states_are_those_before_a_stop_if_no_step_is_in_flight(tmp_path):
    """Where blocks are larger with lookahead, too."""
    model = save_config("nemotron_h", tmp_path, HYBRIDS)
    settings = CACHING | settings_of("nemotron_h") | {"async_scheduling": False}
    lookahead = {"proposer": "hidden_path", "num_speculative_tokens": 32, "budget": 32}
    with engine(model, **settings) as plain:
        stop = stop_in(generate(plain, TURNS[:1])[0][0])
        vanilla = answers_of(plain, stop)
        context = [*TURNS[0], *vanilla[0][:-1], *TURNS[1]]
        assert generate(plain, [context])[0][0][: len(vanilla[1])] == vanilla[1]
        block = plain.llm_engine.vllm_config.cache_config.block_size
    with engine(model, lookahead, drafts=None, **settings) as llm:
        assert llm.llm_engine.vllm_config.cache_config.block_size > block
        assert answers_of(llm, stop) == vanilla
    assert vanilla[0][-1] == stop and len(vanilla[-1]) > 1
