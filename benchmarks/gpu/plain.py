"""Find settings with which plain vLLM works on this GPU.

    python benchmarks/gpu/plain.py MODEL PROMPTS.jsonl LEVEL_FILE OUT.json

A level is a set of arguments of `vllm.LLM`, tried in a process of its own. The first level that
answers all prompts is written to LEVEL_FILE, a line for each argument (`KEY=JSON`) or environment
variable (`env KEY=VALUE`), and OUT.json gets times and tokens/s of each level that was tried. The
exit status is 0 if a level works.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from itertools import takewhile
from pathlib import Path
from typing import Any

LEVELS: dict[str, dict[str, Any]] = {
    "default": {},
    # Where the second model runner's kernels fail with this Triton. `env` is not vLLM's.
    "first runner": {"env": {"VLLM_USE_V2_MODEL_RUNNER": "0"}},
    # Where FlashAttention's library does not run.
    "triton attention": {"attention_backend": "TRITON_ATTN"},
    # Where torch.compile fails with this torch.
    "no compilation": {"compilation_config": {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}},
    "eager": {"enforce_eager": True},
    "eager, triton attention": {"enforce_eager": True, "attention_backend": "TRITON_ATTN"},
}
PROMPTS = 8
MAX_TOKENS = 64
LEVEL_SECONDS = 120


def engine_args(model: str, level: dict[str, Any]) -> dict[str, Any]:
    """Arguments of `vllm.LLM`; random weights where the folder has none."""
    args: dict[str, Any] = {
        "model": model,
        "max_model_len": 2048,
        "max_num_seqs": PROMPTS,
        "gpu_memory_utilization": 0.3,
        "enable_prefix_caching": False,
        "seed": 0,
    }
    if not any(Path(model).glob("*.safetensors")):
        args["load_format"] = "dummy"
    if not (Path(model) / "tokenizer.json").is_file():
        args["skip_tokenizer_init"] = True
    return {**args, **level}


def answer(model: str, prompts: Path, level: dict[str, Any]) -> dict[str, Any]:
    """Answer one prompt, then all: tokens/s, times, and how far answers are as recorded."""
    started = time.monotonic()
    from vllm import LLM, SamplingParams

    imported = time.monotonic()
    llm = LLM(**engine_args(model, level))
    ready = time.monotonic()
    lines = [json.loads(text) for text in prompts.read_text().splitlines()][:PROMPTS]
    requests = [{"prompt_token_ids": line["prompt_token_ids"]} for line in lines]
    params = SamplingParams(temperature=0, max_tokens=MAX_TOKENS, ignore_eos=True)
    llm.generate(requests[:1], SamplingParams(temperature=0, max_tokens=4), use_tqdm=False)
    speeds = {}
    for name, chosen in (("one", requests[:1]), ("eight", requests)):
        start = time.monotonic()
        outputs = llm.generate(chosen, params, use_tqdm=False)
        seconds = time.monotonic() - start
        tokens = sum(len(output.outputs[0].token_ids) for output in outputs)
        speeds[name] = {"tokens": tokens, "tokens_per_s": tokens / seconds}
    answers = [list(output.outputs[0].token_ids) for output in outputs]
    recorded = [line["output_token_ids"][:MAX_TOKENS] for line in lines]
    return {
        **speeds,
        "import_s": imported - started,
        "start_s": ready - imported,
        "text": outputs[0].outputs[0].text,
        # The recorded answers are those of this model in bfloat16 on a CPU.
        "as_recorded": [common_prefix(a, b) for a, b in zip(answers, recorded, strict=True)],
    }


def common_prefix(a: Sequence[int], b: Sequence[int]) -> int:
    """How many tokens two answers have in common before they first differ."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(a, b, strict=False)))


def level_lines(level: dict[str, Any]) -> str:
    """A level as LEVEL_FILE has it."""
    args = dict(level)
    lines = [f"env {key}={value}" for key, value in args.pop("env", {}).items()]
    lines += [f"{key}={json.dumps(value)}" for key, value in args.items()]
    return "".join(f"{line}\n" for line in lines)


def try_level(name: str, argv: Sequence[str]) -> int | str:
    """Run a level in a new process: its exit status, or "too slow"."""
    process = subprocess.Popen([sys.executable, __file__, *argv, name], start_new_session=True)
    code: int | str
    try:
        code = process.wait(timeout=LEVEL_SECONDS)
    except subprocess.TimeoutExpired:
        code = "too slow"
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)  # also an engine that outlived the process
    return code


def main(argv: Sequence[str]) -> int:
    """Try the levels in order; with a fifth argument, run that one in this process."""
    model, prompts, level_file, out = argv[0], *map(Path, argv[1:4])
    if len(argv) > 4:
        level = dict(LEVELS[argv[4]])
        os.environ.update(level.pop("env", {}))
        out.write_text(json.dumps(answer(model, prompts, level)))
        return 0
    results: dict[str, dict[str, Any]] = {}
    works = False
    for name, level in LEVELS.items():
        out.unlink(missing_ok=True)
        print(f"=== level: {name}", flush=True)
        start = time.monotonic()
        code = try_level(name, argv)
        results[name] = {"seconds": time.monotonic() - start, "code": code}
        works = code == 0 and out.is_file()
        if works:
            results[name] |= json.loads(out.read_text())
            level_file.write_text(level_lines(level))
            print(json.dumps(results[name], indent=1))
            print(f"LEVEL: {name}")
            break
    out.write_text(json.dumps(results, indent=1) + "\n")
    return 0 if works else 1


if __name__ == "__main__":
    if len(sys.argv) < 5:
        sys.exit(__doc__)
    sys.exit(main(sys.argv[1:]))
