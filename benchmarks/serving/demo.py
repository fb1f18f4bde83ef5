"""Compare lookahead and plain vLLM: two servers, one after the other, with the same prompts.

Each is started with `vllm serve`, gets the prompts through the official `openai` client, and is
stopped. Then a table shows the speeds, the tokens accepted by a step of lookahead, and whether the
texts are the same.
"""

import argparse
import signal
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

from openai import OpenAI

from benchmarks.serving.server import ServerError, free_port, get, say, serving, sum_of
from lookahead_vllm.cli.arguments import positive

REPO = Path(__file__).resolve().parents[2]
MODEL = REPO / ".cache" / "models" / "SmolLM2-135M-Instruct"

# Three answers that repeat parts of their prompts, where speculation pays, and a story.
PROMPTS = (
    "Add a docstring to this function and print the whole function again:\n\n"
    "def merge_intervals(intervals):\n"
    "    intervals = sorted(intervals, key=lambda interval: interval[0])\n"
    "    merged = [intervals[0]]\n"
    "    for interval in intervals[1:]:\n"
    "        if interval[0] <= merged[-1][1]:\n"
    "            merged[-1] = (merged[-1][0], max(merged[-1][1], interval[1]))\n"
    "        else:\n"
    "            merged.append(interval)\n"
    "    return merged\n",
    "Context: The Wright brothers, Orville and Wilbur, were American aviation pioneers credited "
    "with inventing, building and flying the world's first successful airplane. They made the "
    "first controlled, sustained flight of an engine-powered, heavier-than-air aircraft with the "
    "Wright Flyer on December 17, 1903, four miles south of Kitty Hawk, North Carolina.\n\n"
    "Question: Who were the Wright brothers and what did they do? Answer from the context.",
    "Write the multiplication table of 7, from 7 x 1 to 7 x 12, one line each.",
    "Write a short story about a lighthouse keeper who finds a letter in a bottle.",
)
WARM_UP = "Name three colours."


@dataclass
class Result:
    """One server's answers to all prompts, and their speed."""

    texts: list[str] = field(default_factory=list)
    tokens: int = 0
    seconds: float = 0.0
    acceptance_length: float | None = None

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.seconds


def bold(text: str) -> str:
    return f"\033[1m{text}\033[0m" if sys.stdout.isatty() else text


def speculation_counters(url: str) -> tuple[float, float]:
    """(drafts, accepted tokens) since the server started; zeros without speculation."""
    metrics, prefix = get(f"{url}/metrics"), "vllm:spec_decode_num"
    drafts = sum_of(metrics, f"{prefix}_drafts_total")
    return drafts, sum_of(metrics, f"{prefix}_accepted_tokens_total")


def stream(client: OpenAI, model: str, prompt: str, max_tokens: int, show: bool) -> tuple[str, int]:
    """Stream one greedy completion, and print it if `show`. Returns the text and its tokens."""
    pieces: list[str] = []
    tokens = 0
    for chunk in client.chat.completions.create(
        model=model,
        messages=[{"role": "user", "content": prompt}],
        temperature=0,
        max_tokens=max_tokens,
        stream=True,
        stream_options={"include_usage": True},
    ):
        if chunk.usage is not None:
            tokens = chunk.usage.completion_tokens
        for choice in chunk.choices:
            pieces.append(choice.delta.content or "")
            if show:
                say(pieces[-1], end="")
    return "".join(pieces), tokens


def run_prompts(url: str, prompts: list[str], max_tokens: int) -> Result:
    client = OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=600)
    model = client.models.list().data[0].id
    stream(client, model, WARM_UP, 16, show=False)
    result = Result()
    drafts_before, accepted_before = speculation_counters(url)
    for number, prompt in enumerate(prompts, 1):
        title = prompt.strip().splitlines()[0]
        say(bold(f"\n--- {number}/{len(prompts)} {title[:70]}{'...' if len(title) > 70 else ''}"))
        started = time.monotonic()
        text, tokens = stream(client, model, prompt, max_tokens, show=True)
        seconds = time.monotonic() - started
        say(f"\n    [{tokens} tokens, {tokens / seconds:.1f} tokens/s]")
        result.texts.append(text)
        result.tokens += tokens
        result.seconds += seconds
    drafts, accepted = speculation_counters(url)
    if drafts > drafts_before:
        result.acceptance_length = 1 + (accepted - accepted_before) / (drafts - drafts_before)
    return result


def print_table(ours: Result, plain: Result) -> None:
    acceptance = "-" if ours.acceptance_length is None else f"{ours.acceptance_length:.2f}"
    same = sum(a == b for a, b in zip(ours.texts, plain.texts, strict=True))
    rows = (
        ("", "lookahead", "plain vLLM"),
        ("tokens", str(ours.tokens), str(plain.tokens)),
        ("tokens/s", f"{ours.tokens_per_s:.1f}", f"{plain.tokens_per_s:.1f}"),
        ("ratio", f"{ours.tokens_per_s / plain.tokens_per_s:.2f}", "1.00"),
        ("mean acceptance length", acceptance, "-"),
        ("same texts", f"{same} of {len(ours.texts)}", "-"),
    )
    say()
    for number, row in enumerate(rows):
        say(f"{row[0]:<24}{row[1]:>14}{row[2]:>14}")
        if number == 0:
            say("-" * 52)
    say()


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="demo.sh",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="examples:\n"
        "  demo.sh                                   the four built-in prompts\n"
        "  demo.sh --prompts 1 --max-tokens 64       a quick look\n"
        "  demo.sh --prompt 'List ten rivers.'       a prompt of yours (repeat it for more)\n",
    )
    parser.add_argument(
        "--model",
        default=str(MODEL),
        help="a Hugging Face folder (default: the prepared SmolLM2-135M-Instruct)",
    )
    parser.add_argument(
        "--dtype",
        choices=("float32", "bfloat16"),
        default="float32",
        help="float32 (default): the texts are the same, token for token. bfloat16: faster; where "
        "two tokens are almost equally likely, another may be chosen, because a step over several "
        "tokens rounds differently from several steps over one",
    )
    parser.add_argument(
        "--max-tokens", type=positive, default=128, help="of each completion (default: 128)"
    )
    parser.add_argument(
        "--prompts",
        type=positive,
        default=len(PROMPTS),
        metavar="N",
        help=f"use the first N built-in prompts (default: all {len(PROMPTS)})",
    )
    parser.add_argument(
        "--prompt", action="append", metavar="TEXT", help="use this prompt instead; repeatable"
    )
    args = parser.parse_args()
    if args.prompt is None:
        args.prompt = list(PROMPTS[: args.prompts])
    return args


def _demo() -> int:
    args = parse_args()
    # Needed if the demo was started with SIGINT ignored, as in `demo.sh &`.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda number, _: sys.exit(128 + number))

    logs = REPO / ".cache" / "demo"
    logs.mkdir(parents=True, exist_ok=True)
    results: list[Result] = []
    for name, flags in (("lookahead", ["--speculative-model=[lookahead]"]), ("plain", [])):
        port = free_port()
        command = ["vllm", "serve", args.model, *flags]
        command += ["--host", "127.0.0.1", "--port", str(port), "--dtype", args.dtype]
        command += ["--max-model-len", "2048", "--max-num-seqs", "8"]
        command += ["--kv-cache-memory-bytes", "512M"]
        with serving(command, port, logs / f"{name}.log") as url:
            results.append(run_prompts(url, args.prompt, args.max_tokens))

    ours, plain = results
    print_table(ours, plain)
    if ours.texts == plain.texts:
        say(f"The texts are the same, in {args.dtype}.")
        return 0
    if args.dtype == "float32":
        say("The texts differ, and in float32 they must not: please report this.")
        return 1
    say(f"Some texts differ: rounding in {args.dtype}. With --dtype float32 they are the same.")
    return 0


def main() -> int:
    """Run the demo; the exit status is explained in `--help`."""
    try:
        return _demo()
    except ServerError as error:
        print(f"\ndemo: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\ndemo: interrupted; the server is stopped", file=sys.stderr)
        return 130
