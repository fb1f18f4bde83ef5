"""Measure the step compression of the lookahead branch: tokens a step by W, N, G and source."""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

from tqdm import tqdm

from benchmarks.command_line import (
    PROMPT_LINES,
    add_engine_arg,
    engine_environment,
    interrupted,
    kv_cache_bytes,
    rank_environment,
)
from benchmarks.engines import generate
from benchmarks.engines.fresh_engine import FreshEngine, RunFailed
from benchmarks.engines.generate import Generation, Job, Turn
from benchmarks.engines.rows import decode_steps, tokens_per_step
from benchmarks.methods import SpeculativeConfig
from benchmarks.prompts import PromptError, context_length, load_prompts, model_tokenizer
from lookahead_vllm.cli.arguments import check_outputs, escape_unprintable, positive
from lookahead_vllm.simulation.markdown import markdown


class Setting(NamedTuple):
    """One configuration, a row of the table."""

    name: str
    config: SpeculativeConfig
    paper: float | None = None
    """S in the paper's Table 3: LLaMA-2-7B-Chat on MT-Bench."""


def jacobi(
    ngram: int, window: int, guesses: int, paper: float | None = None, **more: Any
) -> Setting:
    """Lookahead Decoding with these (N, W, G), with room for all of its nodes."""
    prompt = ", with prompt" if more.get("pool_from_prompt") else ""
    config = {
        "method": "lookahead",
        "proposer": "jacobi_window",
        "ngram_size": ngram,
        "window_size": window,
        "guess_set_size": guesses,
        "num_speculative_tokens": 128,
        "budget": 128,
        **more,
    }
    return Setting(f"({ngram}, {window}, {guesses}){prompt}{_devices(more)}", config, paper)


def tree(name: str, proposer: str, nodes: int = 64, **more: Any) -> Setting:
    """Draft trees with a fixed number of nodes."""
    config = {
        "method": "lookahead",
        "proposer": proposer,
        "num_speculative_tokens": nodes,
        "budget": nodes,
        **more,
    }
    return Setting(f"{name}, {nodes} nodes{_devices(more)}", config)


def _devices(config: SpeculativeConfig) -> str:
    return f", {config['parallel']} devices" if config.get("parallel", 1) > 1 else ""


SETS = {
    "table": [
        jacobi(5, 15, 15, 1.96),
        jacobi(5, 15, 15, 2.05, pool_from_prompt=True),
        jacobi(5, 1, 30, 1.12),
        jacobi(5, 1, 30, 1.59, pool_from_prompt=True),
        jacobi(5, 30, 1, 1.79),
    ],
    "sources": [
        tree("trie", "ngram_trie"),
        tree("trie and recycled", "hybrid", window_size=0),
        tree("hybrid", "hybrid"),
    ],
    "scaling": [jacobi(5, w, w) for w in (1, 2, 4, 8, 16)],
    "devices": [
        setting
        for devices in (1, 2, 4)
        for setting in (
            jacobi(5, 2 * devices, 2 * devices, parallel=devices),
            jacobi(5, 2 * devices, 2 * devices),
            tree("hybrid", "hybrid", 16 * devices, parallel=devices),
            tree("hybrid", "hybrid", 16 * devices),
        )
    ],
}

EPILOG = f"""\
examples:
  python scripts/bench_window.py --model .cache/models/SmolLM2-135M-Instruct \\
      --prompts spec_bench_dev.jsonl --limit 60 --json out.json --plot out.png
  python scripts/bench_window.py ... --sets sources --limit 24

{PROMPT_LINES}

sets:
  table     the paper's Table 3: (N, W, G), with and without the prompt's n-grams in the pool
  sources   trees of 64 nodes from the trie, from the model's recycled choices, from a window
  scaling   W = G from 1 to 16, the paper's Figure 4
  devices   W = G = 2, and 16 nodes of hybrid, for each of 1, 2 and 4 devices: on as many replicas,
            and the same trees on one

columns:
  S       tokens a step, without the prefill's step and token; the bonus token included
  paper   the paper's figure for LLaMA-2-7B-Chat on MT-Bench
  nodes   draft tokens a step

Each setting has an engine of its own with a cold drafter, and answers the prompts one at a time;
decoding is greedy, up to the end of sequence or --max-tokens. S does not depend on the machine.

The exit status is 0, 1 if a setting failed, 2 for wrong options, 130 after Ctrl-C.
"""


def parser() -> argparse.ArgumentParser:
    """The command line."""
    result = argparse.ArgumentParser(
        description=__doc__, epilog=EPILOG, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = result.add_argument
    add("--model", required=True, metavar="DIR", help="the model's folder, or its name on a hub")
    add("--prompts", required=True, type=Path, metavar="FILE.jsonl", help="see below")
    add("--limit", type=positive, metavar="N", help="N prompts, the same number of each category")
    add("--max-tokens", type=positive, default=128, metavar="N", help="default: 128")
    add(
        "--sets",
        type=sets,
        default=list(SETS),
        metavar="A,B",
        help=f"any of {', '.join(SETS)} (default: all)",
    )
    add("--json", type=Path, metavar="OUT.json", help="write everything there")
    add("--plot", type=Path, metavar="OUT.png", help="draw S over W there; needs scaling")
    add("--kv-cache-gib", type=float, metavar="G", help="of each engine (default: 1 on CPU)")
    add("--threads", metavar="BIND", help="VLLM_CPU_OMP_THREADS_BIND")
    add_engine_arg(result)
    return result


def sets(text: str) -> list[str]:
    """Names of sets, separated by commas."""
    names = [name.strip() for name in text.split(",")]
    for name in names:
        if name not in SETS:
            raise argparse.ArgumentTypeError(f"{name!r} is not one of {', '.join(SETS)}")
    return names


class Measurement:
    """All settings of one call, and their results so far."""

    def __init__(self, options: argparse.Namespace) -> None:
        if options.plot and "scaling" not in options.sets:
            raise PromptError("--plot draws the set `scaling`; name it in --sets")
        check_outputs(options, PromptError)
        self.options = options
        self.prompts = load_prompts(options.prompts, model_tokenizer(options.model), options.limit)
        self.settings: dict[str, Setting] = {}
        for name in options.sets:
            for setting in SETS[name]:
                self.settings.setdefault(setting.name, setting)
        self.turns: dict[str, Turn] = {}
        self.failed: dict[str, str] = {}

    def run(self) -> None:
        """Measure the settings one after the other."""
        options = self.options
        length = context_length(self.prompts, options.max_tokens, options.model)
        args = {
            "model": options.model,
            "max_model_len": length,
            "max_num_seqs": 1,
            "enable_prefix_caching": False,
            **({"kv_cache_memory_bytes": size} if (size := kv_cache_bytes(options)) else {}),
            **dict(options.engine_arg),
        }
        total = len(self.prompts) * len(self.settings)
        with tempfile.TemporaryDirectory() as folder, tqdm(total=total, unit="answer") as bar:
            for number, setting in enumerate(self.settings.values()):
                bar.set_description(setting.name)
                job = Job(
                    {**args, "speculative_config": setting.config},
                    [prompt.token_ids for prompt in self.prompts],
                    options.max_tokens,
                )

                def show(event: dict[str, Any], first: int = number * len(self.prompts)) -> None:
                    if event["event"] == "finished":
                        bar.update(first + event["done"] - bar.n)

                log = Path(folder, f"{number}.log")
                environment = {
                    **engine_environment(options),
                    **rank_environment(options, setting.config),
                }
                try:
                    with FreshEngine(
                        generate.__name__, asdict(job), environment, log, show
                    ) as engine:
                        engine.wait_until_ready()
                        answer = engine.ask(list(range(len(self.prompts))))
                    self.turns[setting.name] = Turn.read(answer)
                except RunFailed as error:
                    self.failed[setting.name] = str(error)

    def rows(self) -> list[dict[str, Any]]:
        """A row for each setting that was measured."""
        categories = [prompt.category for prompt in self.prompts]
        rows = []
        for name, turn in self.turns.items():
            by_category: dict[str, list[Generation]] = {}
            for category, generation in zip(categories, turn.generations, strict=True):
                by_category.setdefault(category, []).append(generation)
            steps = decode_steps(turn.generations)
            rows.append(
                {
                    "setting": name,
                    "S": tokens_per_step(turn.generations) or 0.0,
                    "paper": self.settings[name].paper,
                    "nodes": sum(each.draft_tokens for each in turn.generations) / max(steps, 1),
                    "by_category": {
                        name: tokens_per_step(each) or 0.0 for name, each in by_category.items()
                    },
                    "config": self.settings[name].config,
                }
            )
        return rows


def table(rows: Sequence[dict[str, Any]]) -> str:
    """The rows in Markdown, with a column for each category."""
    categories = list(rows[0]["by_category"]) if rows else []
    body = [
        [
            row["setting"],
            f"{row['S']:.2f}",
            f"{row['paper']:.2f}" if row["paper"] else "–",
            f"{row['nodes']:.1f}",
            *(f"{row['by_category'][category]:.2f}" for category in categories),
        ]
        for row in rows
    ]
    return markdown(["setting", "S", "paper", "nodes", *categories], body)


def plot(rows: Sequence[dict[str, Any]], path: Path) -> None:
    """S over W, logarithmic, as the paper's Figure 4."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    found = {row["setting"]: row["S"] for row in rows}
    settings = [setting for setting in SETS["scaling"] if setting.name in found]
    widths = [setting.config["window_size"] for setting in settings]
    figure, axis = pyplot.subplots(figsize=(5.5, 4), layout="constrained")
    axis.plot(widths, [found[setting.name] for setting in settings], "o-")
    axis.set_xscale("log", base=2)
    axis.set_xticks(widths, [str(width) for width in widths])
    axis.set_xlabel("W = G (N = 5)")
    axis.set_ylabel("tokens a step")
    axis.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=150)
    pyplot.close(figure)


def main(argv: Sequence[str]) -> int:
    """Measure; the exit status is explained in `--help`."""
    escape_unprintable()
    arguments = parser()
    options = arguments.parse_args(argv)
    try:
        measurement = Measurement(options)
    except PromptError as error:
        arguments.error(str(error))
    stopped = interrupted(measurement.run)
    rows = measurement.rows()
    if rows:
        if options.json:
            content = {"argv": list(argv), "rows": rows, "failed": measurement.failed}
            options.json.write_text(json.dumps(content, indent=1) + "\n")
        print(table(rows))
        if options.plot:
            plot(rows, options.plot)
    for name, reason in measurement.failed.items():
        print(f"{name}: {reason}", file=sys.stderr)
    return 130 if stopped else 1 if measurement.failed else 0
