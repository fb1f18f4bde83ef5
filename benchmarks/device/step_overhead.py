"""Measure the time that lookahead adds to a step outside the model, on a very small model."""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.engines.stopwatch import Stopwatch
from lookahead_vllm.simulation.markdown import markdown

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "bench_step.py"

EPILOG = """\
columns, milliseconds a step, medians over the steps in which all requests decode:
  plain      plain vLLM, the whole step except for the forward pass and the logits
  lookahead  the same with drafts of --nodes nodes for every request
  added      their difference: the cost of drafts outside the model, including vLLM's own
             bookkeeping for drafts and sampling at every node
  draft, verify, compaction
             parts of it: growing trees and learning from the last step; sampling at every
             root and node, and matching; moving the KV of accepted nodes
  nodes      verified nodes of a request in a step
  accepted   accepted nodes of a request in a step

The model is a Llama of two small layers with random weights, in float32, with eager execution.
Each figure of plain vLLM and of lookahead is measured in a process of its own.
"""

LLAMA = dict(
    architectures=["LlamaForCausalLM"],
    model_type="llama",
    vocab_size=512,
    hidden_size=64,
    intermediate_size=64,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=32,
    max_position_embeddings=2048,
    rms_norm_eps=1e-6,
    hidden_act="silu",
    tie_word_embeddings=False,
    bos_token_id=0,
    eos_token_id=1,
    torch_dtype="float32",
)
PROMPT_TOKENS, STEPS, WARM_UP = 300, 60, 20
NOISE = 0.2  # standard deviation, added to logits of about 1


def make_llm(size: int, nodes: int, lookahead: bool) -> Any:
    """`vllm.LLM` in this process, with random weights."""
    import torch
    from vllm import LLM
    from vllm.model_executor.model_loader import DummyModelLoader, register_model_loader

    @register_model_loader("markov")
    class MarkovModelLoader(DummyModelLoader):
        """Weights with which the next token depends only on the last one."""

        def load_weights(self, model: torch.nn.Module, model_config: Any) -> None:
            rng = torch.Generator().manual_seed(0)
            for name, weight in model.named_parameters():
                weight.data.normal_(int(weight.ndim < 2), 0.125, generator=rng)
                if name.endswith(("o_proj.weight", "down_proj.weight")):
                    weight.data.zero_()

    speculation: dict[str, Any] = {}
    if lookahead:
        speculation["speculative_config"] = {
            "method": "lookahead",
            "num_speculative_tokens": nodes,
            "budget": nodes,
        }
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(LLAMA))
        return LLM(
            model=folder,
            load_format="markov",
            skip_tokenizer_init=True,
            dtype="float32",
            enforce_eager=True,
            enable_prefix_caching=False,
            kv_cache_memory_bytes=256 << 20,
            max_model_len=2048,
            max_num_seqs=size,
            max_num_batched_tokens=size * max(nodes + 1, 64),
            **speculation,
        )


def time_model(runner: Any) -> Stopwatch:
    """Time the forward pass and the logits of a model runner, and add noise to the logits."""
    import torch

    compute_logits = runner.model.compute_logits

    def noisy_logits(hidden: torch.Tensor) -> torch.Tensor:
        """Without noise the text would loop; with more of it no draft would be right."""
        logits = compute_logits(hidden)
        return logits + NOISE * torch.randn_like(logits)

    stopwatch = Stopwatch()
    runner._model_forward = stopwatch.timing(runner._model_forward)
    runner.model.compute_logits = stopwatch.timing(noisy_logits)
    return stopwatch


def start_requests(engine: Any, runner: Any, size: int) -> None:
    """Add random prompts, and step until all requests decode."""
    from vllm import SamplingParams, TokensPrompt

    rng = random.Random(0)
    params = SamplingParams(temperature=0, max_tokens=1700, ignore_eos=True, detokenize=False)
    for i in range(size):
        prompt = [rng.randrange(3, 60) for _ in range(PROMPT_TOKENS)]
        engine.add_request(str(i), TokensPrompt(prompt_token_ids=prompt), params)
    while len(runner.input_batch.req_ids) < size or any(
        not request.output_token_ids for request in runner.requests.values()
    ):
        engine.step()


def measure(size: int, nodes: int, lookahead: bool) -> dict[str, float]:
    """Medians of the steps of one engine, in milliseconds."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ["LOOKAHEAD_VLLM_PROFILE"] = "1"
    os.environ["VLLM_USE_V2_MODEL_RUNNER"] = "0"  # lookahead's runner, for plain vLLM too
    engine: Any = make_llm(size, nodes, lookahead).llm_engine
    # Not before: it loads numba, with which plain vLLM does not start on a CPU.
    from lookahead_vllm.engine.worker import step_recorder

    runner = engine.engine_core.engine_core.model_executor.driver_worker.worker.model_runner
    stopwatch = time_model(runner)
    start_requests(engine, runner, size)
    outside: list[float] = []
    parts: dict[str, list[float]] = {name: [] for name in ("draft", "verify", "compaction")}
    counters = runner.drafter.counters if lookahead else None
    for step in range(WARM_UP + STEPS):
        if step == WARM_UP and counters:
            verified, accepted = counters.nodes, counters.accepted_nodes
        stopwatch.seconds = 0.0
        before = dict(step_recorder.seconds)
        start = time.perf_counter()
        engine.step()
        if step >= WARM_UP:
            outside.append((time.perf_counter() - start - stopwatch.seconds) * 1e3)
            for name in parts:
                parts[name].append((step_recorder.seconds[name] - before.get(name, 0.0)) * 1e3)
    assert engine.get_num_unfinished_requests() == size, "a request ended too early"
    result = {"outside": median(outside)} | {name: median(values) for name, values in parts.items()}
    if counters:
        result["nodes"] = (counters.nodes - verified) / (size * STEPS)
        result["accepted"] = (counters.accepted_nodes - accepted) / (size * STEPS)
    return result


def run(options: argparse.Namespace) -> int:
    """Measure each batch size; returns 1 if an engine failed."""
    [nodes] = options.nodes
    if options.one:
        size, method = options.one
        print(json.dumps(measure(int(size), nodes, method == "lookahead")))
        return 0
    rows: list[dict[str, float]] = []
    for size in options.batch_sizes:
        measured: dict[str, dict[str, float]] = {}
        for method in ("plain", "lookahead"):
            command = [sys.executable, str(SCRIPT), "--nodes", str(nodes)]
            done = subprocess.run(
                [*command, "--one", str(size), method], capture_output=True, text=True, check=False
            )
            if done.returncode:
                print(done.stderr[-3000:], file=sys.stderr)
                return 1
            measured[method] = json.loads(done.stdout.splitlines()[-1])
        plain, ours = measured["plain"]["outside"], measured["lookahead"].pop("outside")
        rows.append(
            {"batch": size, "plain": plain, "lookahead": ours, "added": ours - plain}
            | measured["lookahead"]
        )
        print(f"batch {size}: {ours - plain:.2f} ms a step", file=sys.stderr)
    print(
        markdown(
            list(rows[0]),
            [[f"{v:g}" if k == "batch" else f"{v:.2f}" for k, v in row.items()] for row in rows],
        )
    )
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1) + "\n")
    return 0
