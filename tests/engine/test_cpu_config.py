"""On a CPU, plain vLLM runs Model Runner V2 only where a variable says so."""

from typing import Any

from vllm import LLM
from vllm.config import VllmConfig
from vllm.v1.worker.cpu.model_runner import CPUModelRunner
from vllm.v1.worker.cpu_model_runner import CPUModelRunner as FirstRunner
from vllm.v1.worker.cpu_worker import CPUWorker

from lookahead_vllm.engine.cpu_config import ConfigOnCPU
from lookahead_vllm.engine.plugin import PLAIN_V2
from lookahead_vllm.engine.workers.cpu import PlainCPUWorker
from tests.support.driving import engine, generate, random_prompts, runner_of, worker_of

SETTINGS: dict[str, Any] = dict(max_num_batched_tokens=96)
"""Prompts are read in chunks."""
PROMPTS = [[*prompt, *range(3, 60)] for prompt in random_prompts(8, 60, seed=4)]


def parts_of(llm: LLM) -> tuple[type, type, type]:
    """The classes of its config, its worker and its runner."""
    return type(llm.llm_engine.vllm_config), type(worker_of(llm)), type(runner_of(llm))


def test_plain_vllm_answers_alike_with_the_variable_and_without(llama, monkeypatch):
    """Without it, nothing of the engine is ours."""
    with engine(llama, **SETTINGS) as llm:
        assert parts_of(llm) == (ConfigOnCPU, PlainCPUWorker, CPUModelRunner)
        assert llm.llm_engine.vllm_config.scheduler_config.async_scheduling
        answers = generate(llm, PROMPTS)
    monkeypatch.delenv(PLAIN_V2)
    with engine(llama, **SETTINGS) as llm:
        assert parts_of(llm) == (VllmConfig, CPUWorker, FirstRunner)
        assert not llm.llm_engine.vllm_config.scheduler_config.async_scheduling
        assert generate(llm, PROMPTS) == answers
