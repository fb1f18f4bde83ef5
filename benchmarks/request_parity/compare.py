"""Send every request option of vLLM's OpenAI server to a plain and a lookahead server.

The answers must be the same: the same JSON, token for token, or the same refusal.
"""

from __future__ import annotations

import argparse
import contextlib
import inspect
import json
import os
import signal
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import date
from importlib.metadata import version
from operator import attrgetter
from pathlib import Path
from textwrap import fill
from typing import Any

import openai
from openai import OpenAI, Stream
from tqdm import tqdm

from benchmarks.request_parity.answers import (
    DROPPED,
    TOLERANCE,
    VERDICTS,
    Answer,
    Verdict,
    assembled,
    compared,
    draft_counters,
)
from benchmarks.request_parity.endpoint import Endpoint, Sample, SampleError
from benchmarks.request_parity.samples import endpoints
from benchmarks.request_parity.table import Row, document
from benchmarks.serving.demo import MODEL, REPO
from benchmarks.serving.server import ServerError, free_port, get, serving
from lookahead_vllm.cli.arguments import check_output

EPILOG = """\
examples:
  python scripts/compare_options.py                         every option
  python scripts/compare_options.py --out parity.md         the same, with the table in that file
  python scripts/compare_options.py --only stop --only n    some options, printed only
  python scripts/compare_options.py --plain-url http://127.0.0.1:8000 \\
      --lookahead-url http://127.0.0.1:8001                 servers that run already

what it sends:
  The options are the fields of vLLM's own request classes, and some that only OpenAI's
  documentation has. benchmarks/request_parity/samples.py has values for each, good and bad ones; an
  option without a value is an error. Each request is sent in one piece and streamed, to both
  servers at once; up to four requests of an option are sent at a time.

what it compares:
  The whole JSON, of a stream the joined chunks, except for the fields that
  benchmarks/request_parity/answers.py lists as DROPPED: ids, times and the like. Logprobs may
  differ by 0.001. What is sampled without a seed is compared in status and shape.

the table:
  equal            both servers gave the same answer
  refused by both  with the same status and the same error
  differs          anything else; both answers are printed
  drafted          draft tokens that the lookahead server verified for the option's requests
  accepted         how many of those were accepted

The exit status is 0 if nothing differs, 1 if something does, 2 for wrong options, 130 after Ctrl-C.
"""

# What some options need to be served.
SERVING = (
    *("--dtype", "float32", "--enforce-eager", "--max-model-len", "1024"),
    *("--kv-cache-memory-bytes", "512M", "--max-num-seqs", "8", "--served-model-name", "m"),
    *("--enable-auto-tool-choice", "--tool-call-parser", "hermes", "--enable-prompt-embeds"),
    *("--enable-prompt-tokens-details", "--trust-request-mm-kwargs"),
    *("--trust-request-chat-template", "--scheduling-policy", "priority"),
    *("--reasoning-config", '{"reasoning_start_str": "<think>", "reasoning_end_str": "</think>"}'),
)
# A fixed budget: drafts are verified even where they do not pay.
SPECULATION = (
    "--speculative-model=[lookahead]",
    *("--num-speculative-tokens=6", "--speculative-config.budget=6"),
)
STORE = "VLLM_ENABLE_RESPONSES_API_STORE"
OUT = REPO / ".cache" / "compare_options" / "table.md"
ANSWER_SECONDS = 120
CONCURRENT_REQUESTS = 4


def parser() -> argparse.ArgumentParser:
    """The command line."""
    result = argparse.ArgumentParser(
        description=__doc__, epilog=EPILOG, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = result.add_argument
    add(
        "--model",
        default=str(MODEL),
        metavar="DIR",
        help="a folder (default: the prepared SmolLM2-135M-Instruct; the samples name its tokens)",
    )
    add("--plain-url", metavar="URL", help="a plain server, as in http://127.0.0.1:8000")
    add("--lookahead-url", metavar="URL", help="a lookahead server with the same other options")
    add(
        "--only",
        action="append",
        metavar="OPTION",
        help="this option of every endpoint that has it; repeatable; without --out the "
        "table is only printed",
    )
    add(
        "--out",
        type=Path,
        metavar="FILE.md",
        help="write the table there (default: .cache/compare_options/table.md in this repository; "
        "with --only, nowhere)",
    )
    return result


# ---- requests -----------------------------------------------------------------------------------


class Server:
    """A server, used through the official client."""

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/").removesuffix("/v1")
        self.client = OpenAI(
            base_url=f"{self.url}/v1", api_key="none", max_retries=0, timeout=ANSWER_SECONDS
        )
        self.model = self.client.models.list().data[0].id

    def ask(self, endpoint: Endpoint, body: Mapping[str, Any]) -> Answer:
        """Send one request and wait for its whole answer.

        Raises
        ------
        ServerError
            The server does not answer any more.
        """
        create = attrgetter(endpoint.method)(self.client).create
        named = inspect.signature(create).parameters
        arguments = {k: v for k, v in body.items() if k in named}
        others = {k: v for k, v in body.items() if k not in named}
        chunks: list[dict[str, Any]] = []
        streamed = False
        try:
            answer = create(**arguments, extra_body=others)
            streamed = isinstance(answer, Stream)
            if not streamed:
                return self._finished(answer)
            chunks += map(_json, answer)
            return Answer(200, assembled(chunks))
        except openai.APIConnectionError as error:
            # vLLM refuses some requests in this way, after their stream has begun.
            if streamed and not isinstance(error, openai.APITimeoutError):
                return Answer(200, assembled(chunks), "the connection broke inside the stream")
            raise ServerError(f"{self.url} does not answer {json.dumps(body)[:600]}") from error
        except openai.APIStatusError as error:
            return Answer(error.status_code, error=error.body)
        except openai.APIError as error:  # inside a stream
            return Answer(200, assembled(chunks), error.body)

    def _finished(self, answer: Any) -> Answer:
        """The answer; of a background request, poll until it is there."""
        deadline = time.monotonic() + ANSWER_SECONDS
        while getattr(answer, "status", "") in ("queued", "in_progress"):
            if time.monotonic() > deadline:
                raise ServerError(f"{self.url} has not finished {answer.id} in the background")
            time.sleep(0.2)
            answer = self.client.responses.retrieve(answer.id)
        return Answer(200, _json(answer))

    def counters(self) -> list[int]:
        """Draft tokens, and accepted ones, since the server started."""
        return draft_counters(get(f"{self.url}/metrics"))


def _json(answer: Any) -> dict[str, Any]:
    return dict(answer.model_dump(mode="json", exclude_unset=True, warnings=False))


# ---- comparing ----------------------------------------------------------------------------------


class Comparison:
    """Sends each request to two servers, and compares their answers."""

    def __init__(self, plain: Server, ours: Server) -> None:
        self.servers = (plain, ours)
        self.requests = ThreadPoolExecutor(CONCURRENT_REQUESTS)
        self.answers = ThreadPoolExecutor(2 * CONCURRENT_REQUESTS)

    def row(self, endpoint: Endpoint, option: str, bar: tqdm[None]) -> Row:
        """Send all samples of an option."""
        row = Row(option, option in endpoint.fields())
        before = self.servers[1].counters()
        bar.set_description(f"{endpoint.name}: {option}")
        sent = [
            (sample, streamed)
            for sample in endpoint.samples[option]
            for streamed in endpoint.stream_modes(option, sample)
        ]

        def verdict(sample: Sample, streamed: bool) -> Verdict:
            result = self._verdict(endpoint, option, sample, streamed)
            bar.update()
            return result

        verdicts = self.requests.map(lambda each: verdict(*each), sent)
        for (sample, streamed), result in zip(sent, verdicts, strict=True):
            row.add(str(sample), streamed, result)
        after = self.servers[1].counters()
        row.drafted, row.accepted = (b - a for a, b in zip(before, after, strict=True))
        return row

    def _verdict(self, endpoint: Endpoint, option: str, sample: Sample, streamed: bool) -> Verdict:
        model = {"model": self.servers[0].model}
        if sample.setup:
            self._ask(endpoint, {**endpoint.base, **model, **sample.setup})
        body = {**model, **endpoint.body(option, sample, streamed)}
        plain, ours = self._ask(endpoint, body)
        verdict, places = compared(plain, ours, sample.exact)
        if places:
            tqdm.write(f"\nDIFFERS: {endpoint.name}, {json.dumps(body)}")
            for place in places[:12]:
                tqdm.write(f"  {place}")
            tqdm.write(f"  plain:     {json.dumps(vars(plain))}")
            tqdm.write(f"  lookahead: {json.dumps(vars(ours))}")
        return verdict

    def _ask(self, endpoint: Endpoint, body: dict[str, Any]) -> list[Answer]:
        return list(self.answers.map(lambda server: server.ask(endpoint, body), self.servers))


# ---- the run ------------------------------------------------------------------------------------


@contextlib.contextmanager
def servers(options: argparse.Namespace) -> Iterator[tuple[Server, Server]]:
    """The servers that --plain-url and --lookahead-url name, or two that are started here."""
    if options.plain_url:
        yield Server(options.plain_url), Server(options.lookahead_url)
        return
    logs = REPO / ".cache" / "compare_options"
    logs.mkdir(parents=True, exist_ok=True)
    os.environ[STORE] = "1"
    with contextlib.ExitStack() as stack:
        urls = []
        for name, flags in (("plain", ()), ("lookahead", SPECULATION)):
            port = free_port()
            command = ["vllm", "serve", options.model, "--host", "127.0.0.1", "--port", str(port)]
            running = serving([*command, *SERVING, *flags], port, logs / f"{name}.log")
            urls.append(stack.enter_context(running))
        yield Server(urls[0]), Server(urls[1])


def head(model: str, rows: Sequence[Row]) -> str:
    """The text above the table."""
    counts = [sum(row.count()[verdict] for row in rows) for verdict in VERDICTS]
    drafted, accepted = sum(r.drafted for r in rows), sum(r.accepted for r in rows)
    dropped = "\n".join(f"- `{name}`: {why}" for name, why in DROPPED.items())
    versions = ", ".join(f"{name} {version(name)}" for name in ("lookahead-vllm", "vllm", "openai"))
    summary = (
        f"Every request went through the official `openai` client to two servers, one plain and "
        f"one with lookahead, in one piece and streamed, {CONCURRENT_REQUESTS} at a time. "
        f"{sum(counts)} requests: {counts[0]} equal, {counts[1]} refused by both with the same "
        f"status and error, {counts[2]} differ. For them the lookahead server verified {drafted} "
        f"draft tokens and accepted {accepted}."
    )
    return f"""\
# Every request option, with and without lookahead

Generated by `scripts/compare_options.py` on {date.today()}, with {Path(model).name} in float32 on
CPU: {versions}.

{fill(summary, 100)}

The options are the fields of vLLM's request classes; those marked as OpenAI's are not among them.
A request asks greedily for 24 tokens where its option does not say otherwise. The servers:

```bash
export {STORE}=1
vllm serve MODEL {_lines(SERVING)}
# the other one: the same, and
vllm serve MODEL ... {_lines(SPECULATION)}
```

Logprobs may differ by {TOLERANCE}. What is sampled without a seed is compared in status and shape.
These fields are not compared:

{dropped}
"""


def _lines(flags: Sequence[str]) -> str:
    """Flags as a shell takes them, one to a line."""
    quoted = (f"'{flag}'" if set(flag) & set("{[") else flag for flag in flags)
    return " ".join(quoted).replace(" --", " \\\n    --")


def compare(options: argparse.Namespace, chosen: Mapping[Endpoint, list[str]]) -> int:
    """Send all requests and write the table; returns the exit status."""
    total = sum(
        len(endpoint.stream_modes(option, sample))
        for endpoint, names in chosen.items()
        for option in names
        for sample in endpoint.samples[option]
    )
    form = "{desc} {n_fmt}/{total_fmt} |{bar}| {elapsed}, {remaining} left"
    with servers(options) as pair, tqdm(total=total, bar_format=form) as bar:
        comparison = Comparison(*pair)
        sections = {
            f"/v1/{endpoint.name}": [comparison.row(endpoint, option, bar) for option in names]
            for endpoint, names in chosen.items()
        }
    rows = [row for section in sections.values() for row in section]
    text = document(head(options.model, rows), sections)
    if options.out:
        options.out.write_text(text, encoding="utf-8")
        print(f"\nwritten: {options.out}")
    else:
        print(f"\n{text[text.index('## ') :]}")
    if not any(row.drafted for row in rows):
        print("no draft was verified: this says nothing about speculation", file=sys.stderr)
        return 1
    differing = sum(row.count()["differs"] for row in rows)
    print(f"{total} requests, {differing} differ")
    return 1 if differing else 0


def choose(only: Sequence[str] | None) -> dict[Endpoint, list[str]]:
    """The options of each endpoint to be sent: all of them, or those of `only`."""
    known = {endpoint: endpoint.options() for endpoint in endpoints()}
    every = {option for names in known.values() for option in names}
    for option in only or ():
        if option not in every:
            raise SampleError(f"--only {option}: no endpoint has it; there are {sorted(every)}")
    return {e: [o for o in names if not only or o in only] for e, names in known.items()}


def main(argv: Sequence[str]) -> int:
    """Do what the command line says; the exit status is explained in `--help`."""
    arguments = parser()
    options = arguments.parse_args(argv)
    if bool(options.plain_url) != bool(options.lookahead_url):
        arguments.error("--plain-url and --lookahead-url go together")
    if not options.only and not options.out:
        OUT.parent.mkdir(parents=True, exist_ok=True)
        options.out = OUT
    if options.out:
        try:
            check_output(options.out, SampleError)
        except SampleError as error:
            arguments.error(f"--out: {error}")
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda number, _: sys.exit(128 + number))
    try:
        return compare(options, choose(options.only))
    except SampleError as error:
        arguments.error(str(error))
    except openai.APIConnectionError:
        arguments.error(f"no server answers at {options.plain_url} or {options.lookahead_url}")
    except ServerError as error:
        print(f"\ncompare_options: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\ninterrupted; nothing was written", file=sys.stderr)
        return 130
