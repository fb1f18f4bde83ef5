"""The console command `lookahead-vllm`."""

import argparse
import importlib
import os
import sys
from collections.abc import Sequence

import lookahead_vllm
from lookahead_vllm.cli.arguments import escape_unprintable

COMMANDS = {
    "check": "check whether lookahead works here: this machine, this vLLM, this GPU",
    "cache": "build a cache file from texts",
    "simulate": "compare proposers on recorded generations, without a model",
}
"""Subcommands and their help. Each is `main` of the module of that name in this folder.

The module is imported when its subcommand runs: it may import numba, torch and vLLM, which take
seconds.
"""


def parser() -> argparse.ArgumentParser:
    """The command line up to the subcommand; the subcommand parses the rest."""
    width = max(map(len, COMMANDS))
    lines = [f"  {name:{width}}  {line}" for name, line in COMMANDS.items()]
    result = argparse.ArgumentParser(
        prog="lookahead-vllm",
        usage="%(prog)s [-h] [--version] COMMAND ...",
        description="Lossless speculative decoding for vLLM without a draft model. The server is "
        "vLLM's: vllm serve MODEL --speculative-model='[lookahead]'. This command checks the "
        "installation, builds cache files and replays recorded answers.",
        epilog="\n".join(
            ["commands:", *lines, "", "`lookahead-vllm COMMAND --help` explains a command."]
        ),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    result.add_argument("--version", action="version", version=lookahead_vllm.__version__)
    result.add_argument("command", choices=COMMANDS, metavar="COMMAND", help="one of those below")
    return result


def main(argv: Sequence[str] | None = None) -> int:
    """Run a subcommand and return its exit status; `argv` is the command line by default."""
    arguments = sys.argv[1:] if argv is None else argv
    escape_unprintable()
    command = parser().parse_args(arguments[:1]).command
    try:
        status: int = importlib.import_module(f"lookahead_vllm.cli.{command}").main(arguments[1:])
        sys.stdout.flush()
    except KeyboardInterrupt:
        print("\ninterrupted; nothing was written", file=sys.stderr)
        return 130
    except BrokenPipeError:  # of `| head`; what is left goes nowhere, at the interpreter's end too
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    return status
