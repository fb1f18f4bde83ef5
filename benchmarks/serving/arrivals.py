"""Requests that arrive at a server over time, sent and measured by `vllm bench serve`."""

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypedDict

MAX_PROMPT_TOKENS = 1024
"""`vllm bench serve` leaves out longer prompts of its ShareGPT format."""


class Latencies(TypedDict):
    """What a client measures, in milliseconds and tokens a second.

    tpot_mean, tpot_p99
        Time per output token of a request: from its first token to its last, over the tokens after
        the first; the mean and the 99th percentile of the requests.
    ttft_mean, ttft_p99
        Time to first token; the mean and the 99th percentile of the requests.
    tokens_per_s
        Emitted tokens over the time from the first request to the end of the last answer.
    requests_per_s
        Answers over the same time.
    """

    tpot_mean: float
    tpot_p99: float
    ttft_mean: float
    ttft_p99: float
    tokens_per_s: float
    requests_per_s: float


class LoadFailed(Exception):
    """Not all requests were answered; the message says why."""


@dataclass(frozen=True)
class Load:
    """A number of requests, and when they arrive."""

    count: int
    rate: float | None = None
    """Requests a second, as a Poisson process. Without it, a closed loop of `concurrency` clients,
    each of which sends a request as soon as its previous one is answered."""
    concurrency: int | None = None
    seed: int = 0
    """Determines which prompts are sent, in which order and when."""


def write_requests(texts: Sequence[str], path: Path) -> None:
    """Write prompts as `vllm bench serve` reads them: as ShareGPT's conversations.

    Its format `custom` would need pandas.
    """
    turns = [{"conversations": [{"value": text}, {"value": ""}]} for text in texts]
    path.write_text(json.dumps(turns))


def bench_serve(
    url: str, model: str, requests: Path, load: Load, max_tokens: int, salt: str, log: Path
) -> Latencies:
    """Send requests of a file of `write_requests` to a server, and wait for the greedy answers.

    The model's tokenizer counts the tokens of the prompts. KV and n-grams of requests with another
    `salt` are not used. LoadFailed if the client failed, or not every request was answered; the log
    has everything that the client prints.
    """
    result = log.with_suffix(".json")
    result.unlink(missing_ok=True)
    arrival = ["--request-rate", "inf" if load.rate is None else str(load.rate)]
    if load.concurrency is not None:
        arrival += ["--max-concurrency", str(load.concurrency)]
    command = [
        *(str(Path(sys.executable).parent / "vllm"), "bench", "serve", "--disable-tqdm"),
        *("--base-url", url, "--model", model, "--backend", "openai"),
        *("--dataset-name", "sharegpt", "--dataset-path", str(requests), "--no-oversample"),
        *("--num-prompts", str(load.count), "--seed", str(load.seed), *arrival),
        *("--sharegpt-output-len", str(max_tokens), "--temperature", "0"),
        *("--extra-body", json.dumps({"cache_salt": salt})),
        *("--percentile-metrics", "ttft,tpot", "--metric-percentiles", "99"),
        *("--save-result", "--result-dir", str(log.parent), "--result-filename", result.name),
    ]
    with log.open("w") as output:
        status = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env={"VLLM_NO_USAGE_STATS": "1", "TOKENIZERS_PARALLELISM": "false", **os.environ},
        ).returncode
    if status != 0 or not result.is_file():
        end = "\n".join(log.read_text(errors="replace").splitlines()[-12:])
        raise LoadFailed(f"`vllm bench serve` ended with status {status}; its log, {log}:\n{end}")
    return _latencies(json.loads(result.read_text()), load.count, log)


def _latencies(measured: dict[str, Any], count: int, log: Path) -> Latencies:
    if measured["completed"] != count:
        raise LoadFailed(
            f"{count - measured['completed']} of {count} requests were not answered; see {log}"
        )
    return {
        "tpot_mean": measured["mean_tpot_ms"],
        "tpot_p99": measured["p99_tpot_ms"],
        "ttft_mean": measured["mean_ttft_ms"],
        "ttft_p99": measured["p99_ttft_ms"],
        "tokens_per_s": measured["output_throughput"],
        "requests_per_s": measured["request_throughput"],
    }
