"""The command line of `scripts/bench_step.py`."""

import argparse
from pathlib import Path

from benchmarks.command_line import positives
from benchmarks.device.rows import METHODS
from lookahead_vllm.cli.arguments import check_output, positive
from lookahead_vllm.machine import num_cores
from lookahead_vllm.options.server import MAX_DECODING_LENGTH

DESCRIPTION = """\
Measure the time that a simulated device waits for the host in a step, and the host's time."""

EPILOG = """\
What a GPU would wait for, measured without one. The model's forward pass is replaced by one that
a device runs for --device-ms, plus 10 µs for each token, while the host goes on. It takes no
core. Launches are queued in order. Streams and events are the device's: sampled tokens reach the
host when the device has ended their step, and a host that reads them before it has waited gets
nonsense. Scheduler, model runner, sampler and lookahead are the real ones, in the loop of vLLM's
engine core, in one process, with the kernels for CPUs.

  methods:
    plain          plain vLLM on Model Runner V2
    lookahead      with --nodes above 0, from the trie
    hybrid         the same, from the trie and the model's choices
    waiting        lookahead in steps that vLLM prepares only when the drafts are known: with
                   prompts, adapters, M-RoPE, prompt embeddings or several replicas
    drafter        lookahead with a trained drafter, whose three tokens are right three times in
                   four each; a pass of it takes 5 % of the model's time, and its launches are in
                   no figure but the length of a step
  nodes:
    0              the default options, and a text without patterns, in which no node pays
    4, 16, ...     up to that many nodes for each request in every step (`budget`), in a text
                   with patterns, of which about two tokens in three can be predicted

  columns, over --steps steps after a warm-up; all requests decode:
    device waits   microseconds from the end of a forward pass on the device to the launch of the
                   next one; 0 if that was launched before
    longer         the median of the waits minus that of plain vLLM
    step, host     milliseconds from one launch to the next, and the host's work in it, hidden or
                   not: CPU time without polling and without what stands in for kernels
    polled         milliseconds of CPU time in which the host asks whether the device has ended
    launches       of kernels in a step, outside of the model's forward pass; with --graphs, what is
                   captured behind it is one
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
  scripts/cpu_env.sh python scripts/bench_step.py --json device.json

  what 2 ms more of host work cost
      --methods plain,lookahead --batch-sizes 8 --host-delay-ms 2

The exit status is 0, or 1 if an engine failed, 2 for wrong options, 130 after Ctrl-C.
"""

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
    """The command line."""
    result = argparse.ArgumentParser(
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = result.add_argument
    add(
        "--methods",
        type=method_names,
        default=list(METHODS),
        metavar="A,B",
        help="see below (default: all)",
    )
    add(
        "--batch-sizes",
        type=positives,
        default=[1, 8, 32, 64],
        metavar="N,M",
        help="default: 1,8,32,64",
    )
    add(
        "--nodes",
        type=numbers_of_nodes,
        default=[0, 4, 16],
        metavar="N,M",
        help="of each draft (default: 0,4,16)",
    )
    add("--steps", type=positive, default=200, metavar="N", help="measured steps (default: 200)")
    add(
        "--device-ms",
        type=float,
        default=6.0,
        metavar="MS",
        help="the time of a forward pass (default: 6)",
    )
    add(
        "--host-delay-ms",
        type=float,
        default=0.0,
        metavar="MS",
        help="keep the host busy for this time before each step, to see what that costs",
    )
    add(
        "--prefix-caching",
        action="store_true",
        help="with vLLM's prefix caching, which hashes each full block",
    )
    add(
        "--prompts-every",
        type=positive,
        default=0,
        metavar="N",
        help="in every N-th step a request is aborted, and a new one begins (default: never)",
    )
    add(
        "--graphs",
        action="store_true",
        help="lookahead launches its model, and what follows it, as graphs, as it does on a GPU",
    )
    add(
        "--growers",
        type=int,
        default=0,
        metavar="N",
        help="threads that grow trees beside the step's own, for which the machine needs as many "
        "idle cores (default: 0; on a GPU, up to 3)",
    )
    add("--json", type=Path, metavar="OUT.json", help="write everything there")
    add(
        "--trace",
        type=Path,
        metavar="OUT.json",
        help="of a single engine: write 20 further steps there, host and device, for "
        "https://ui.perfetto.dev or chrome://tracing",
    )
    return result


def check(options: argparse.Namespace) -> None:
    """Raise OptionsError if something cannot be measured or written."""
    for path in filter(None, (options.json, options.trace)):
        check_output(path, OptionsError)
    if options.trace and max(map(len, (options.methods, options.batch_sizes, options.nodes))) > 1:
        raise OptionsError("--trace needs one of --methods, of --batch-sizes and of --nodes")
    if options.steps < MIN_STEPS:
        raise OptionsError(
            f"--steps {options.steps} is too few for a median; write {MIN_STEPS} or more"
        )
    if not options.device_ms > 0 or options.host_delay_ms < 0:
        raise OptionsError("--device-ms must be above 0, and --host-delay-ms at least 0")
    if not 0 <= options.growers < num_cores():
        raise OptionsError(
            f"--growers {options.growers} must be less than the {num_cores()} cores of this machine"
        )
