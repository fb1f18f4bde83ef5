"""Stands in for the command `vllm`: a server that is healthy, and a client that says its figures.

Both note how they were called in the file `calls` beside this one. Tests copy it; see
test_bench_serve.py.
"""

import json
import sys
from http.server import BaseHTTPRequestHandler, HTTPServer
from itertools import pairwise
from pathlib import Path


class Healthy(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()


def note(call: str) -> None:
    with Path(__file__).with_name("calls").open("a") as calls:
        calls.write(call + "\n")


def serve(arguments: list[str]) -> None:
    if "--broken" in arguments:
        sys.exit("no such option")
    port = int(arguments[arguments.index("--port") + 1])
    note(f"serve {port} {'lookahead' if '--speculative-config' in arguments else 'none'}")
    HTTPServer(("127.0.0.1", port), Healthy).serve_forever()


def bench(arguments: list[str]) -> None:
    given = dict(pairwise(arguments))
    note(json.dumps(given))
    if given["--seed"] == "13":
        sys.exit("unlucky")
    unanswered = given["--seed"] == "12"
    result = {
        "completed": int(given["--num-prompts"]) - unanswered,
        "output_throughput": 50.0,
        "request_throughput": 2.0,
    }
    result |= {f"{kind}_{what}_ms": 5.0 for kind in ("mean", "p99") for what in ("tpot", "ttft")}
    Path(given["--result-dir"], given["--result-filename"]).write_text(json.dumps(result))


if __name__ == "__main__":
    command = {"serve": serve, "bench": bench}[sys.argv[1]]
    command(sys.argv[2:])
