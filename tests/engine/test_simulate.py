"""`simulate` says what an engine does: as many tokens a step."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from vllm import LLM, TokensPrompt

from benchmarks.engines.generate import Generation
from benchmarks.engines.target_guided import follow
from lookahead_vllm.options.server import LookaheadOptions
from lookahead_vllm.simulation.proposers import proposer_of
from lookahead_vllm.simulation.replay import Pace, simulate
from lookahead_vllm.simulation.traces import Trace, TraceFile, load_traces
from tests.support.driving import engine, of_length
from tests.support.models import TINY, WANDERING, save_config

NODES = 16
AGENTS = Path(__file__).parents[1] / "data" / "agents.jsonl"


def renumbered(file: TraceFile) -> tuple[TraceFile, int]:
    """The same texts with as few token ids as possible, and their number."""
    parts = [part for trace in file.traces for part in (trace.prompt, trace.output)]
    known = np.unique(np.concatenate(parts))
    new = (np.searchsorted(known, part).astype(np.int32) for part in parts)
    traces = [replace(trace, prompt=next(new), output=next(new)) for trace in file.traces]
    return replace(file, traces=traces), len(known)


def answer(llm: LLM, sessions: Sequence[Sequence[Trace]]) -> list[Generation]:
    """Answer all sessions at a time, each turn after the one before."""
    core = llm.llm_engine
    traces = {f"{s}-{t}": turn for s, own in enumerate(sessions) for t, turn in enumerate(own)}
    generations = {request_id: Generation() for request_id in traces}

    def send(request_id: str) -> None:
        trace = traces[request_id]
        prompt = TokensPrompt(prompt_token_ids=trace.prompt.tolist())
        core.add_request(request_id, prompt, of_length(len(trace.output)))

    for session in range(len(sessions)):
        send(f"{session}-0")
    while core.has_unfinished_requests():
        for output in core.step():
            generations[output.request_id].observe(output.outputs[0].token_ids)
            session, turn = map(int, output.request_id.split("-"))
            if output.finished and turn + 1 < len(sessions[session]):
                send(f"{session}-{turn + 1}")
    for request_id, generation in generations.items():
        assert generation.token_ids == traces[request_id].output.tolist()
    return list(generations.values())


def test_an_engine_emits_as_many_tokens_a_step_as_simulate_says(tmp_path):
    """For sessions of an agent, whose turns come back with a cached prefix."""
    file, vocabulary = renumbered(load_traces(AGENTS))
    longest = max(len(trace.prompt) + len(trace.output) for trace in file.traces)
    sizes = dict(vocab_size=vocabulary, max_position_embeddings=longest)
    config = {"llama": TINY["llama"] | sizes}
    with engine(
        save_config("llama", tmp_path, config),
        {"num_speculative_tokens": NODES, "budget": NODES},
        load_format=WANDERING,
        enable_prefix_caching=True,
        max_model_len=longest,
    ) as llm:
        prompts = [trace.prompt.tolist() for trace in file.traces]
        follow(llm, prompts, [trace.output.tolist() for trace in file.traces])
        generations = answer(llm, file.sessions)
    options = LookaheadOptions(proposer="ngram_trie")
    make = partial(proposer_of, options, NODES, None, len(file.sessions) * longest)
    said = simulate(make, NODES, [file], ["cold"], pace=Pace(len(file.sessions)))["cold"]
    tokens = sum(len(generation.token_ids) - 1 for generation in generations)
    steps = sum(generation.steps for generation in generations)
    assert tokens == said["tokens"]
    assert steps == pytest.approx(said["steps"], rel=0.03)
