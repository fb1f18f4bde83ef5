"""The command line of `scripts/bench_step.py`: the measurement on CPU, and the simulated device."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from benchmarks.command_line import positives
from benchmarks.device import step_overhead
from benchmarks.device.rows import METHODS
from lookahead_vllm.cli.arguments import check_output, positive
from lookahead_vllm.draft.options import MAX_DECODING_LENGTH

DESCRIPTION = """\
Measure what lookahead adds to a step outside the model, on a very small model: as time on a CPU,
or (--device-ms, --runner v2) as the time that a simulated device waits for the host."""

EPILOG = f"""\
on a CPU:
{step_overhead.EPILOG}
on the simulated device:
  What a GPU would wait for, measured without one. The model's forward pass is replaced by one
  that a device runs for --device-ms, plus --token-us for each token, while the host goes on. It
  takes no core. Launches are queued in order. Streams and events are the device's: sampled
  tokens reach the host when the device has ended their step, and a host that reads them before
  it has waited gets nonsense. Scheduler, model runner, sampler and lookahead are the real ones,
  in the loop of vLLM's engine core, in one process. Under V2, vLLM's Triton kernels are replaced
  by the stand-ins for CPUs in tests/support/v2_on_cpu.

  methods:
    plain_v1       plain vLLM, first model runner, synchronous steps
    plain_v2       plain vLLM, second model runner, asynchronous scheduling
    lookahead_v1   lookahead on the first runner
    lookahead_v2   lookahead on the second runner; with --nodes above 0, from the trie
    hybrid_v2      the same, from the trie and the model's choices
    waiting_v2     lookahead_v2 in steps that vLLM prepares only when the drafts are known: with
                   prompts, adapters, M-RoPE, prompt embeddings or several replicas
    fleet_v2       lookahead_v2 that shares (share_with) with three other engines, each with as many
                   requests of 200 tokens a second; starts a redis-server
    drafter_v2     lookahead_v2 with a trained drafter, whose three tokens are right three times in
                   four each; a pass of it takes 5 % of the model's time, and its launches are in
                   no figure but the length of a step
  nodes:
    0              the default options, and a text without patterns, in which no node pays
    4, 16, ...     up to that many nodes for each request in every step (`budget`), in a text
                   with patterns, of which about two tokens in three can be predicted

  columns, over --steps steps after a warm-up; all requests decode:
    device waits   microseconds from the end of a forward pass on the device to the launch of the
                   next one; 0 if that was launched before
    longer         the median of the waits minus that of plain vLLM on the same runner
    step, host     milliseconds from one launch to the next, and the host's CPU time in it, hidden
                   or not
    nodes, tokens/step
                   of a request in a step: nodes that were sent, tokens that were emitted

  what counts as what:
    The host's time is the CPU time of the engine's thread, which sleeps while it waits for the
    device: other programs on the machine do not count. The engine measures its steps by the same
    clock.
    The device's time is that of the forward pass alone. Everything else that a GPU would do
    (sampling, matching, KV moves, the kernels that prepare inputs) runs on the host, in the same
    way for all methods. After the launch of a forward pass this work is hidden behind it, as on
    a GPU. Before the launch it counts as waiting, in place of the kernel launches that it stands
    for. Not counted: launching the forward pass itself (a CUDA graph, or the kernels of every
    layer), clients, and the API server.

examples:
  scripts/cpu_env.sh python scripts/bench_step.py --runner v2 --device-ms 6 --json device.json

  what 2 ms more of host work cost: 2 ms in a synchronous step, nothing in an asynchronous one
      --device-ms 6 --methods plain_v1,plain_v2 --batch-sizes 8 --host-delay-ms 2

The exit status is 0, or 1 if an engine failed, 2 for wrong options, 130 after Ctrl-C.
"""

ON_A_CPU: dict[str, Any] = {"batch_sizes": [1, 16, 64], "nodes": [16]}
ON_THE_DEVICE: dict[str, Any] = {
    "batch_sizes": [1, 8, 32, 64],
    "nodes": [0, 4, 16],
    "device_ms": 6.0,
    "token_us": 10.0,
    "steps": 200,
    "host_delay_ms": 0.0,
}
MIN_STEPS = 10


class OptionsError(ValueError):
    """Wrong options; the message says what to write instead."""


def numbers_of_nodes(text: str) -> list[int]:
    """Numbers from 0 to MAX_DECODING_LENGTH, separated by commas; duplicates are dropped."""
    for part in text.split(","):
        if not part.strip().isdecimal() or int(part) > MAX_DECODING_LENGTH:
            raise argparse.ArgumentTypeError(
                f"{part!r} is not a number of nodes from 0 to {MAX_DECODING_LENGTH}"
            )
    return list(dict.fromkeys(map(int, text.split(","))))


def method_names(text: str) -> list[str]:
    """Names of METHODS, separated by commas; duplicates are dropped."""
    names = [name.strip() for name in text.split(",")]
    for name in names:
        if name not in METHODS:
            raise argparse.ArgumentTypeError(
                f"there is no method {name!r}; there are {', '.join(METHODS)}"
            )
    return list(dict.fromkeys(names))


def parser() -> argparse.ArgumentParser:
    """The command line of both measurements."""
    result = argparse.ArgumentParser(
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )

    def defaults(name: str) -> str:
        on_a_cpu, on_the_device = (",".join(map(str, d[name])) for d in (ON_A_CPU, ON_THE_DEVICE))
        return f"default: {on_a_cpu} on a CPU, {on_the_device} on the simulated device"

    add = result.add_argument
    add("--batch-sizes", type=positives, metavar="N,M", help=defaults("batch_sizes"))
    add("--nodes", type=numbers_of_nodes, metavar="N", help=f"of each draft; {defaults('nodes')}")
    add("--json", type=Path, metavar="OUT.json", help="write everything there")
    add("--one", nargs=2, metavar=("SIZE", "METHOD"), help=argparse.SUPPRESS)
    add = result.add_argument_group("the simulated device").add_argument
    add(
        "--runner",
        choices=("v1", "v2"),
        help="v2: the simulated device with all methods; v1: with those of the first runner, or "
        "without --device-ms, the measurement on a CPU (default)",
    )
    add("--device-ms", type=float, metavar="MS", help="the time of a forward pass (default: 6)")
    add(
        "--token-us",
        type=float,
        metavar="US",
        help="what each token adds to it, in microseconds (default: 10)",
    )
    add("--methods", type=method_names, metavar="A,B", help=f"any of {', '.join(METHODS)}")
    add("--steps", type=positive, metavar="N", help="measured steps (default: 200)")
    add(
        "--host-delay-ms",
        type=float,
        metavar="MS",
        help="keep the host busy for this time before each step, to see what that costs",
    )
    return result


def is_simulated(options: argparse.Namespace) -> bool:
    """Whether the simulated device is asked for."""
    return options.device_ms is not None or options.runner == "v2"


def check(options: argparse.Namespace) -> None:
    """Fill in the defaults of the measurement that is asked for.

    Raises
    ------
    OptionsError
        Something cannot be measured or written.
    """
    simulated = is_simulated(options)
    if options.json:
        check_output(options.json, OptionsError)
    if not simulated:
        for name in ("methods", "token_us", "steps", "host_delay_ms"):
            if getattr(options, name) is not None:
                flag = "--" + name.replace("_", "-")
                raise OptionsError(f"{flag} is for the simulated device; add --device-ms 6")
    for name, value in (ON_THE_DEVICE if simulated else ON_A_CPU).items():
        if getattr(options, name) is None:
            setattr(options, name, value)
    if simulated:
        _check_methods(options)
    elif len(options.nodes) > 1 or options.nodes[0] < 1:
        raise OptionsError("--nodes: on a CPU, write one number of at least 1")


def _check_methods(options: argparse.Namespace) -> None:
    first_only = options.runner == "v1"
    possible = [name for name, m in METHODS.items() if not (first_only and m.second_runner)]
    options.methods = options.methods or possible
    for name in options.methods:
        if name not in possible:
            raise OptionsError(f"{name} does not run with --runner v1; leave --runner out")
    if options.steps < MIN_STEPS:
        raise OptionsError(
            f"--steps {options.steps} is too few for a median; write {MIN_STEPS} or more"
        )
    if not options.device_ms > 0 or min(options.token_us, options.host_delay_ms) < 0:
        raise OptionsError("--device-ms must be above 0, --token-us and --host-delay-ms at least 0")
