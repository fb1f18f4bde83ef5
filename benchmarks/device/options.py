"""The command line of `scripts/bench_step.py`: the measurement on CPU, and the simulated device."""

from __future__ import annotations

import argparse
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from benchmarks.device.engine import CLOCKS
from benchmarks.device.rows import METHODS
from benchmarks.device.timeline import FILE_TYPES
from benchmarks.engines import step_overhead
from lookahead_vllm.cli.arguments import check_output, positive, positives
from lookahead_vllm.draft.options import MAX_DECODING_LENGTH

BATCH_SIZES, NODES = [1, 8, 32, 64], [0, 4, 16]
DEVICE_MS, TOKEN_US, STEPS = 6.0, 10.0, 200
MIN_STEPS, MAX_BATCH_SIZE = 10, 1024

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
  nodes:
    0              the default options, and a text without patterns, in which no node pays
    4, 16, ...     up to that many nodes for each request in every step (`budget`), in a text
                   with patterns, of which about two tokens in three can be predicted

  figures, in microseconds a step, over --steps steps after a warm-up; all requests decode:
    device waits   from the end of a forward pass on the device to the launch of the next one; 0
                   if that was launched before. JSON: `device_wait_us` is the median
    longer than plain
                   the difference to plain vLLM on the same runner
    the host meanwhile
                   what the host did while the device waited; the sum is the mean of the waits.
                   `prepare` is the runner's work before the forward pass, without `inputs` (tokens
                   and positions) and `attention` (its metadata), `sample` that after it, `draft`
                   learning and drafting, `wait` waking up
    step, host     from one launch to the next; the host's CPU time in it, hidden or not, with
                   polling for the device at the end of a wait
    nodes, tokens/step
                   of a request in a step: nodes that were sent, tokens that were emitted

  what counts as what:
    The host's time is the CPU time of the engine's thread, which sleeps while it waits for the
    device: other programs on the machine do not count. The engine measures its steps by the same
    clock. On an idle machine --clock wall gives the same, and the latency of waking up.
    The device's time is that of the forward pass alone. Everything else that a GPU would do
    (sampling, matching, KV moves, the kernels that prepare inputs) runs on the host, in the same
    way for all methods. After the launch of a forward pass this work is hidden behind it, as on
    a GPU. Before the launch it counts as waiting, in place of the kernel launches that it stands
    for. Not counted: launching the forward pass itself (a CUDA graph, or the kernels of every
    layer), clients, and the API server.

examples:
  scripts/cpu_env.sh python scripts/bench_step.py --runner v2 --device-ms 6 \\
      --json device.json --timeline device.svg

  what 2 ms more of host work cost: 2 ms in a synchronous step, nothing in an asynchronous one
      --device-ms 6 --methods plain_v1,plain_v2 --batch-sizes 8 --host-delay-ms 2

The exit status is 0, or 1 if an engine failed, 2 for wrong options, 130 after Ctrl-C.
"""

SIMULATION_ONLY = ("methods", "token_us", "steps", "clock", "host_delay_ms", "timeline")


class OptionsError(ValueError):
    """Wrong options; the message says what to write instead."""


def milliseconds(text: str) -> float:
    """A number from 0.1 to 1000."""
    return _number(text, 0.1, 1000)


def small_time(text: str) -> float:
    """A number from 0 to 1000."""
    return _number(text, 0, 1000)


def _number(text: str, low: float, high: float) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not low <= value <= high:  # a NaN is refused too
        raise argparse.ArgumentTypeError(f"{text!r} is not a number from {low:g} to {high:g}")
    return value


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
    add = result.add_argument
    add(
        "--batch-sizes",
        type=positives,
        metavar="N,M",
        help=f"default: 1,16,64 on a CPU, {_listed(BATCH_SIZES)} on the simulated device",
    )
    add(
        "--nodes",
        type=numbers_of_nodes,
        metavar="N",
        help=f"of each draft; default: 16 on a CPU, {_listed(NODES)} on the simulated device",
    )
    add("--json", type=Path, metavar="OUT.json", help="write everything there")
    add("--one", nargs=2, metavar=("SIZE", "METHOD"), help=argparse.SUPPRESS)
    add = result.add_argument_group("the simulated device").add_argument
    add(
        "--runner",
        choices=("v1", "v2"),
        help="v2: the simulated device with all methods; v1: with those of the first runner, or "
        "without --device-ms, the measurement on a CPU (default)",
    )
    add(
        "--device-ms",
        type=milliseconds,
        metavar="MS",
        help=f"the time of a forward pass (default: {DEVICE_MS:g})",
    )
    add(
        "--token-us",
        type=small_time,
        metavar="US",
        help=f"what each token adds to it, in microseconds (default: {TOKEN_US:g})",
    )
    add("--methods", type=method_names, metavar="A,B", help=f"any of {', '.join(METHODS)}")
    add("--steps", type=positive, metavar="N", help=f"measured steps (default: {STEPS})")
    add(
        "--clock",
        choices=tuple(CLOCKS),
        help="of the host: its CPU time (default), so that other programs do not count, or wall",
    )
    add(
        "--host-delay-ms",
        type=small_time,
        metavar="MS",
        help="keep the host busy for this time before each step, to see what that costs",
    )
    add(
        "--timeline",
        type=Path,
        metavar="OUT.svg",
        help="draw some steps of the largest batch size there, as .svg or .png",
    )
    return result


def _listed(numbers: list[int]) -> str:
    return ",".join(map(str, numbers))


def is_simulated(options: argparse.Namespace) -> bool:
    """Whether the simulated device is asked for."""
    return options.device_ms is not None or options.runner == "v2"


def cpu_arguments(options: argparse.Namespace) -> list[str]:
    """The command line of `step_overhead` for these options.

    Raises
    ------
    OptionsError
        An option is for the simulated device alone.
    """
    for name in SIMULATION_ONLY:
        if getattr(options, name) is not None:
            flag = "--" + name.replace("_", "-")
            raise OptionsError(f"{flag} is for the simulated device; add --device-ms {DEVICE_MS:g}")
    result: list[str] = []
    if options.batch_sizes is not None:
        result += ["--batch-sizes", _listed(options.batch_sizes)]
    if options.nodes is not None:
        if len(options.nodes) > 1 or options.nodes[0] < 1:
            raise OptionsError(
                f"--nodes {_listed(options.nodes)} is for the simulated device; add --device-ms "
                f"{DEVICE_MS:g}, or write one number of at least 1"
            )
        result += ["--nodes", str(options.nodes[0])]
    if options.json is not None:
        result += ["--json", str(options.json)]
    if options.one is not None:
        result += ["--one", *options.one]
    return result


def check(options: argparse.Namespace) -> None:
    """Fill in the simulated device's defaults.

    Raises
    ------
    OptionsError
        Something cannot be measured or written.
    """
    of_runner = [
        name
        for name, method in METHODS.items()
        if options.runner != "v1" or not method.second_runner
    ]
    defaults = dict(
        batch_sizes=BATCH_SIZES,
        nodes=NODES,
        device_ms=DEVICE_MS,
        token_us=TOKEN_US,
        methods=of_runner,
        steps=STEPS,
        clock=next(iter(CLOCKS)),
        host_delay_ms=0.0,
    )
    for name, value in defaults.items():
        if getattr(options, name) is None:
            setattr(options, name, value)
    for name in options.methods:
        if name not in of_runner:
            raise OptionsError(f"{name} does not run with --runner v1; leave --runner out")
    if options.steps < MIN_STEPS:
        raise OptionsError(
            f"--steps {options.steps} is too few for a median; write {MIN_STEPS} or more"
        )
    if max(options.batch_sizes) > MAX_BATCH_SIZE:
        raise OptionsError(
            f"--batch-sizes {max(options.batch_sizes)} is too many; write up to {MAX_BATCH_SIZE}"
        )
    _check_files(options)


def _check_files(options: argparse.Namespace) -> None:
    for path in filter(None, (options.json, options.timeline)):
        check_output(path, OptionsError)
    if not options.timeline:
        return
    if options.timeline.suffix not in FILE_TYPES:
        types = " or ".join(FILE_TYPES)
        raise OptionsError(f"--timeline {options.timeline}: the name must end in {types}")
    try:
        version("matplotlib")
    except PackageNotFoundError:
        raise OptionsError("--timeline needs matplotlib: pip install matplotlib") from None
