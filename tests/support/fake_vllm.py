"""A stand-in for the command `vllm`: `serve` answers everything with status 200, and `bench` writes
fixed figures.

Both append their arguments to the file `calls` in the folder of this script. Tests run a copy, see
tests/benchmarks/test_serving.py.
"""

import json
import sys
from http.server import BaseHTTPRequestHandler, HTTPServer
from itertools import pairwise
from pathlib import Path


class HealthHandler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()


def record_call(call: str) -> None:
    with Path(__file__).with_name("calls").open("a") as calls:
        calls.write(call + "\n")


def serve(arguments: list[str]) -> None:
    port = int(arguments[arguments.index("--port") + 1])
    has_lookahead = "--speculative-config" in arguments
    record_call(f"serve {port} {'lookahead' if has_lookahead else 'none'}")
    HTTPServer(("127.0.0.1", port), HealthHandler).serve_forever()


def bench(arguments: list[str]) -> None:
    options = dict(pairwise(arguments))
    record_call(json.dumps(options))
    if options["--seed"] == "13":
        sys.exit("unlucky")
    unanswered = options["--seed"] == "12"
    result = {
        "completed": int(options["--num-prompts"]) - unanswered,
        "output_throughput": 50.0,
        "request_throughput": 2.0,
    }
    result |= {
        f"{kind}_{metric}_ms": 5.0 for kind in ("mean", "p99") for metric in ("tpot", "ttft")
    }
    Path(options["--result-dir"], options["--result-filename"]).write_text(json.dumps(result))


if __name__ == "__main__":
    command = {"serve": serve, "bench": bench}[sys.argv[1]]
    command(sys.argv[2:])
