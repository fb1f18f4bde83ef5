"""The process of one engine on the simulated device, for one method at one batch size.

The only question is None; its answer is a `Measurement`.
"""

import json
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from statistics import fmean, median, quantiles
from typing import Any

from benchmarks.device import graphs, stand_ins
from benchmarks.device.device import HostClock, Launch, SimulatedDevice
from benchmarks.device.host_work import HostWork
from benchmarks.device.text import MAX_POSITIONS, VOCABULARY, Text
from benchmarks.engines.engine_process import Emit, answer_questions
from benchmarks.trace import STEPS, Trace, named_stations

MODEL = dict(
    architectures=["LlamaForCausalLM"],
    model_type="llama",
    vocab_size=VOCABULARY,
    hidden_size=stand_ins.HIDDEN_SIZE,
    intermediate_size=64,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=32,
    max_position_embeddings=MAX_POSITIONS,
    rms_norm_eps=1e-6,
    hidden_act="silu",
    tie_word_embeddings=False,
    bos_token_id=0,
    eos_token_id=1,
    torch_dtype="float32",
)
"""Its layers are not run."""
PROMPT_TOKENS, WARM_UP = 300, 400
COUNTED_STEPS = 20
"""Steps after the measured ones, in which operators are counted."""
CHAIN_TOKENS, DRAFTER_SHARE = 3, 0.05
"""What the drafter proposes, and the time of a pass of it, as a share of the model's."""
MAX_TOKENS = MAX_POSITIONS - PROMPT_TOKENS - 1
TOKEN_SECONDS = 1e-5
"""What each token adds to a pass."""


@dataclass(frozen=True)
class Job:
    """The input of a run; times in milliseconds."""

    lookahead: bool
    proposer: str | None
    """None for the one that lookahead chooses."""
    batch_size: int
    nodes: int
    """Of each request; with 0, the text has nothing to draft."""
    device_ms: float
    steps: int
    host_delay_ms: float
    waits: bool
    """Whether steps are prepared only when their drafts are known."""
    drafter: bool
    """Whether a trained drafter's chain is in the trees."""
    prefix_caching: bool
    prompts_every: int
    """In every so many steps, a new request takes the place of the oldest one; 0 for never."""
    graphs: bool
    """Whether lookahead's steps run in graphs; see `graphs.py`."""
    growers: int
    """Threads that grow trees beside the step's own."""
    trace: str | None
    """The file for a trace of further steps."""


@dataclass(frozen=True)
class Measurement:
    """What one engine's steps were like; times in microseconds unless the name says otherwise."""

    device_wait_us: float
    """The median of the device's idle times before a step; the next two are of the same times."""
    device_wait_p90_us: float
    device_wait_mean_us: float
    step_ms: float
    """The median time from one step to the next."""
    host_us: float
    """The CPU time of the engine's thread in a step, hidden behind the device or not, without the
    next two."""
    polled_us: float
    """The CPU time in a step in which it asks whether the device has ended."""
    stand_ins_us: float
    """The CPU time in a step in which it computes what a GPU's kernels would."""
    launches: float
    """Of kernels outside of the model's forward pass, in a step."""
    operators: float
    """Torch's operators in a step, outside of kernels and the model, views included."""
    nodes_sent: float
    """Nodes of a request in a step."""
    tokens_per_step: float
    """Emitted tokens of a request in a step."""
    steps: int
    """That were measured, two at least."""


def make_llm(job: Job) -> Any:
    """`vllm.LLM` in this process; the model is as `stand_ins.register_model` made it."""
    from vllm import LLM
    from vllm.model_executor.models import registry

    # vLLM's cache is empty, so it would inspect the model's class in a process of its own.
    registry._run_in_subprocess = lambda inspect: inspect()
    speculation: dict[str, Any] = {}
    if job.lookahead:
        method: dict[str, Any] = {"method": "lookahead"}
        if job.proposer:  # without a window, whose nodes a fixed budget would always send
            method |= {"proposer": job.proposer, "window_size": 0}
        if job.nodes:
            method |= {"num_speculative_tokens": job.nodes, "budget": job.nodes}
        speculation["speculative_config"] = method
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(MODEL))
        if job.drafter:
            speculation["speculative_config"]["drafter"] = {
                "method": "draft_model",
                "model": folder,
                "num_speculative_tokens": CHAIN_TOKENS,
            }
        return LLM(
            model=folder,
            load_format=stand_ins.LOAD_FORMAT,
            skip_tokenizer_init=True,
            dtype="float32",
            enforce_eager=True,
            enable_prefix_caching=job.prefix_caching,
            kv_cache_memory_bytes=512 << 20,
            max_model_len=MAX_POSITIONS,
            max_num_seqs=job.batch_size,
            max_num_batched_tokens=max(2048, job.batch_size * (max(job.nodes, 16) + 1)),
            **speculation,
        )


class Steps:
    """The loop of vLLM's `EngineCore`, as in its own process, without clients."""

    def __init__(self, core: Any) -> None:
        self._core = core
        self.num_tokens = 0
        """Tokens emitted so far."""
        self.started: set[str] = set()
        """Requests that emitted a token."""

    def run(self) -> None:
        """Run a step; RuntimeError if a request ended."""
        outputs, executed = self._core.step_fn()
        self._core.post_step(executed)
        for part in (outputs or {}).values():
            for output in part.outputs:
                if output.finish_reason is not None:
                    raise RuntimeError("a request ended too early; measure fewer --steps")
                if output.new_token_ids:
                    self.started.add(output.request_id)
                    self.num_tokens += len(output.new_token_ids)


def delayed(function: Callable[..., Any], seconds: float) -> Callable[..., Any]:
    """The function, with the host busy for some time before each call."""

    def call(*args: Any, **kwargs: Any) -> Any:
        end = time.thread_time() + seconds
        while time.thread_time() < end:
            pass
        return function(*args, **kwargs)

    return call


def measure(job: Job) -> Callable[[], Measurement]:
    """Start an engine; returns the function that runs and measures its steps."""
    clock = HostClock()
    clock.install()  # lookahead decides by the times that it measures
    device = SimulatedDevice(clock)
    from vllm import SamplingParams, TokensPrompt

    from lookahead_vllm.engine.drafter import drafter

    stand_ins.install(device)
    drafter.num_growers = lambda parallel: job.growers
    work = HostWork(clock)
    work.watch()
    if job.graphs:
        graphs.install(work)
    text = Text(patterned=job.nodes > 0)

    def seconds_of(num_tokens: int) -> float:
        return 1e-3 * job.device_ms + TOKEN_SECONDS * num_tokens

    stand_ins.register_model(device, work, text, seconds_of, DRAFTER_SHARE)
    engine: Any = make_llm(job).llm_engine
    core = engine.engine_core.engine_core
    if job.host_delay_ms:
        core.scheduler.schedule = delayed(core.scheduler.schedule, 1e-3 * job.host_delay_ms)
    if job.waits:
        core.model_executor.driver_worker.worker.model_runner._shape.is_possible = False

    def run() -> Measurement:
        params = SamplingParams(
            temperature=0, max_tokens=MAX_TOKENS, ignore_eos=True, detokenize=False
        )
        num_new = (WARM_UP + job.steps) // job.prompts_every + 2 if job.prompts_every else 0
        prompts = iter(enumerate(text.prompts(job.batch_size + num_new, PROMPT_TOKENS)))

        def start_request() -> int:
            i, prompt = next(prompts)
            engine.add_request(str(i), TokensPrompt(prompt_token_ids=prompt), params)
            return i

        def run_step(number: int) -> None:
            if job.prompts_every and number % job.prompts_every == 0:
                engine.abort_request([str(start_request() - job.batch_size)])
            steps.run()

        for _ in range(job.batch_size):
            start_request()
        steps = Steps(core)
        while len(steps.started) < job.batch_size:
            steps.run()
        for number in range(WARM_UP):
            run_step(number)
        first, before, begin = len(of_model(device)), steps.num_tokens, time.thread_time()
        work.stand_ins = work.polled = 0.0
        for number in range(job.steps):
            run_step(number)
        seconds = time.thread_time() - begin, work.polled, work.stand_ins
        emitted, launches = steps.num_tokens - before, of_model(device)[first - 1 :]
        work.launches = work.operators = 0
        with work.counting_operators():
            for _ in range(COUNTED_STEPS):
                steps.run()
        if job.trace:
            trace_steps(Path(job.trace), steps, core, device)
        return summary(job, launches, emitted, seconds, work)

    return run


def trace_steps(path: Path, steps: Steps, core: Any, device: SimulatedDevice) -> None:
    """Run and trace a few steps; the device's lane has its forward passes."""
    trace, first = Trace(), len(device.launches)
    runner = core.model_executor.driver_worker.worker.model_runner
    with named_stations(trace.span, scheduler=core.scheduler, runner=runner, device=device):
        for _ in range(STEPS):
            with trace.span("step"):
                steps.run()
    for launch in device.launches[first:]:
        trace.add("device", f"{launch.tokens} rows", launch.start, launch.end)
    trace.write(path)


def of_model(device: SimulatedDevice) -> list[Launch]:
    """The launches of the model; a drafter's have no tokens."""
    return [launch for launch in device.launches if launch.tokens]


def summary(
    job: Job,
    launches: Sequence[Launch],
    num_tokens: int,
    seconds: tuple[float, float, float],
    work: HostWork,
) -> Measurement:
    """The measurement of these launches; the first one only ends the wait before the next.

    `seconds` are the CPU time of all steps, of which the host polled, and computed for the device.
    """
    waits = [1e6 * launch.wait for launch in launches[1:]]
    requests = job.batch_size * len(waits)
    host, polled, stand_ins = (1e6 * part / job.steps for part in seconds)
    return Measurement(
        device_wait_us=median(waits),
        device_wait_p90_us=quantiles(waits, n=10, method="inclusive")[-1],
        device_wait_mean_us=fmean(waits),
        step_ms=1e3 * median(after.start - launch.start for launch, after in pairwise(launches)),
        host_us=host - polled - stand_ins,
        polled_us=polled,
        stand_ins_us=stand_ins,
        launches=work.launches / COUNTED_STEPS,
        operators=work.operators / COUNTED_STEPS,
        nodes_sent=sum(launch.tokens for launch in launches[1:]) / requests - 1,
        tokens_per_step=num_tokens / (job.batch_size * job.steps),
        steps=len(waits),
    )


def run(job: dict[str, Any], questions: Iterator[Any], emit: Emit) -> None:
    """Measure, as `answer_questions` asks for it."""
    measured = measure(Job(**job))
    emit("ready")
    for _ in questions:
        emit("answer", answer=asdict(measured()))


if __name__ == "__main__":
    answer_questions(run)
