"""The cost of a step on this device: measured when an engine starts, cached for the next start.

Source: the critical decoding length, Lookahead (KDD 2024), section 3.2.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np
import torch
import vllm
from tqdm import tqdm
from vllm import envs
from vllm.distributed.parallel_state import get_world_group, is_global_first_rank
from vllm.logger import init_logger
from vllm.platforms import current_platform

from lookahead_vllm import __version__
from lookahead_vllm.draft.budget.captured import CapturedSizes, GraphTimes
from lookahead_vllm.draft.budget.cost import CostCurve, StepCost
from lookahead_vllm.draft.tree import DraftTree
from lookahead_vllm.engine.worker import weights
from lookahead_vllm.engine.worker.pipeline import gather_from_stages
from lookahead_vllm.kept_file import replacing, set_aside
from lookahead_vllm.machine import cpu_name

if TYPE_CHECKING:
    from vllm.config import VllmConfig

    from lookahead_vllm.engine.worker.drafter import LookaheadDrafter

logger = init_logger(f"vllm.{__name__}")

SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
"""Tokens of the forward passes that are timed without attention to a context."""

MAX_SECONDS = 10.0
"""After this time, sizes and batches that have not been measured are left out."""

CONTEXT_TOKENS = 1024
"""Context of each row when attention is timed; shorter where it does not fit."""

MAX_FILES = 64
"""The number of cached measurements that are kept; the oldest are deleted."""


class Batch(NamedTuple):
    """A batch whose attention is timed."""

    requests: int
    rows: int
    """Tokens of each request: a root and its draft."""
    trees: bool

    @property
    def num_tokens(self) -> int:
        return self.requests * self.rows

    @property
    def tree(self) -> DraftTree:
        """The draft of each request: its first two nodes are children of the root, and the parent
        of node i is node i - 2."""
        parents = [-1, -1, *range(self.rows - 3)] if self.trees else range(-1, self.rows - 2)
        return DraftTree.from_lists([0] * (self.rows - 1), list(parents)[: self.rows - 1])


BATCHES = (
    Batch(1, 1, False),
    Batch(8, 1, False),
    Batch(32, 1, False),
    Batch(1, 4, False),
    Batch(1, 16, False),
    Batch(8, 4, False),
    Batch(1, 4, True),
    Batch(1, 16, True),
    Batch(8, 4, True),
)


class CapturedTokens(NamedTuple):
    """The numbers of tokens of a runner's graphs of the whole model, rising."""

    without_drafts: Sequence[int] = ()
    with_drafts: Sequence[int] = ()
    longest: int = 0
    """The most tokens of a request in a graph with drafts."""


class ForwardPasses(Protocol):
    """Dummy passes of a model runner, logits included. Each returns when the device is done."""

    attends_in_graphs: bool
    """Whether graphs of the whole model attend to the context of dummy requests."""

    def captured_tokens(self) -> CapturedTokens:
        """For which numbers of tokens `decode_in_graph` and `drafts_in_graph` have a graph."""

    def decode(self, num_tokens: int, attends: bool) -> None:
        """One token of each request, without a graph of the whole model.

        With `attends`, the layers attend to a context of one token.
        """

    def decode_in_graph(self, num_tokens: int) -> None:
        """One token of each request, as many as fit into a graph of `num_tokens`."""

    def drafts_in_graph(self, num_tokens: int) -> None:
        """Requests with drafts, `num_tokens` tokens in all, in a graph."""

    def whole_chains(self) -> AbstractContextManager[Any]:
        """In the block, a trained drafter makes all of its passes; else it makes the first one."""

    def with_context(
        self, batch: Batch, context: int, in_graph: bool
    ) -> AbstractContextManager[Callable[[], None]]:
        """Give every request of `batch` a context; yield a function that runs the pass.

        With `in_graph`, it runs in the graph of the whole model for so many tokens, or for more if
        the batch has drafts.
        """


class MeasuredRunner(Protocol):
    """A model runner of vLLM with lookahead."""

    vllm_config: VllmConfig
    drafter: LookaheadDrafter
    max_num_tokens: int

    def get_model(self) -> Any:
        """The model."""

    def forward_passes(self) -> ForwardPasses:
        """Passes to measure the cost of a step with."""


def begin_to_draft(runner: MeasuredRunner) -> None:
    """Start the drafter, with the cost of a step if the budget depends on it.

    Every rank must call this.
    """
    drafter = runner.drafter
    cost = step_cost(runner) if drafter.options.budget == "auto" else None
    if cost is not None:
        cost.parts = drafter.options.parallel
    drafter.begin(runner.vllm_config, cost)
    weights.watch(runner.get_model(), drafter.weights_changed)
    options = drafter.options
    why = f"the budget is fixed at {options.budget} nodes"
    if cost is not None:
        why = f"the critical decoding length is {cost.critical_decoding_length} tokens here"
    logger.info_once(
        "Lookahead drafts with '%s', at most %d nodes for each request: %s.",
        options.proposer,
        options.decoding_length,
        why,
    )


def step_cost(runner: MeasuredRunner) -> StepCost:
    """The cost of a step of this engine's model, in seconds: from the cache, or measured."""
    path = _file_of(runner.vllm_config)
    is_first_rank = is_global_first_rank()
    facts = _broadcast(_read(path) if is_first_rank else None)
    if facts is None:
        facts = measure(runner)
        if is_first_rank:
            _write(path, facts)
    cost = _cost_of(facts)
    captured = cost.captured or CapturedSizes(GraphTimes(), GraphTimes())
    logger.info_once(
        "Lookahead: a forward pass costs, in ms, "
        "%s; in graphs without drafts %s, with drafts %s; a thousand tokens of context %.3f, and "
        "%.3f for each row (%.3f in trees). Kept in %s.",
        CostCurve(facts["sizes"], [1e3 * t for t in facts["times"]]),
        *(GraphTimes(graphs.sizes, [1e3 * t for t in graphs.times]) for graphs in captured),
        1e6 * facts["context"],
        1e6 * facts["causal"],
        1e6 * facts["trees"],
        path,
    )
    return cost


def _broadcast(value: Any) -> Any:
    """The first rank's value, so that all ranks run the same passes."""
    return get_world_group().broadcast_object(value)


def _cost_of(facts: dict[str, Any]) -> StepCost:
    curve = CostCurve(facts["sizes"], facts["times"])
    captured = CapturedSizes(
        GraphTimes(*facts["graphs_without_drafts"]), GraphTimes(*facts["graphs_with_drafts"])
    )
    has_graphs = any(graphs.sizes for graphs in captured)
    cost = StepCost(
        curve,
        facts["context"],
        facts["causal"],
        facts["trees"],
        captured=captured if has_graphs else None,
    )
    cost.chain = float(facts["chain"])
    return cost


def measure(runner: MeasuredRunner) -> dict[str, Any]:
    """Time forward passes, logits included, then attention in chains and in trees; in seconds.

    CUDA graphs of the whole model are timed by themselves, with drafts and without.
    """
    deadline = time.perf_counter() + MAX_SECONDS
    passes = runner.forward_passes()
    captured = passes.captured_tokens()
    config = runner.vllm_config
    limit = config.scheduler_config.max_num_seqs, runner.max_num_tokens
    max_model_len = config.model_config.max_model_len
    sizes = [size for size in SIZES if size <= limit[1]]
    batches = [b._replace(rows=min(b.rows, captured.longest or b.rows)) for b in BATCHES]
    batches = [b for b in batches if b.requests <= limit[0] and b.num_tokens <= limit[1]]
    batches = [batch for batch in batches if batch.rows < max_model_len]
    if not runner.drafter.may_branch:
        batches = [batch for batch in batches if not batch.trees]
    most_rows = max((batch.rows for batch in batches), default=0)
    context = min(CONTEXT_TOKENS, max_model_len - most_rows)
    graphs = [
        (_about_doubling(captured.without_drafts), passes.decode_in_graph),
        (_about_doubling(captured.with_drafts), passes.drafts_in_graph),
    ]
    has_graphs = any(tokens for tokens, _ in graphs)
    timed: dict[int, float] = {}
    in_graphs: tuple[dict[int, float], ...] = ({}, {})
    attention: list[tuple[Batch, float, float]] = []
    with tqdm(
        total=len(sizes) + sum(len(tokens) for tokens, _ in graphs) + len(batches),
        desc="Measuring the cost of a step",
        disable=not is_global_first_rank(),
    ) as bar:
        for size in sizes:
            if len(timed) < 3 or _broadcast(time.perf_counter() < deadline):
                timed[size] = _fastest(partial(passes.decode, size, has_graphs))
            bar.update()
        for times, (tokens, run) in zip(in_graphs, graphs, strict=True):
            for size in tokens:
                if _broadcast(time.perf_counter() < deadline):
                    times[size] = _fastest(partial(run, size))
                bar.update()
        chain = 0.0
        if runner.drafter.options.chain_length > 1:
            with passes.whole_chains():
                whole = _fastest(partial(passes.decode, sizes[0], has_graphs))
            chain = max(whole - timed[sizes[0]], 0.0)
        without_drafts = _of_all_sizes(captured.without_drafts, in_graphs[0])
        with_drafts = _of_all_sizes(captured.with_drafts, in_graphs[1])
        curve = CostCurve(list(timed), list(timed.values()))
        times_in_graphs = CapturedSizes(GraphTimes(*without_drafts), GraphTimes(*with_drafts))
        for batch in batches:
            if _broadcast(time.perf_counter() < deadline):
                without_context = _time_in_graph(batch, passes, times_in_graphs)
                in_graph = without_context is not None
                if without_context is None:
                    without_context = float(curve(batch.num_tokens))
                with passes.with_context(batch, context, in_graph) as attend:
                    attention.append((batch, _fastest(attend), without_context))
            bar.update()
    read, causal, trees = _fit(attention, context)
    return dict(
        sizes=list(timed),
        times=list(timed.values()),
        graphs_without_drafts=without_drafts,
        graphs_with_drafts=with_drafts,
        context=read,
        causal=causal,
        trees=trees,
        chain=chain,
    )


def _time_in_graph(batch: Batch, passes: ForwardPasses, graphs: CapturedSizes) -> float | None:
    """The time without a context, in seconds, in the graph that runs such a step.

    None if the batch cannot be timed in a graph. A dummy run without drafts has as many requests as
    its graph, so only a graph of just so many tokens will do.
    """
    times = graphs.with_drafts if batch.rows > 1 else graphs.without_drafts
    size = times.padded(batch.num_tokens)
    if size not in times.sizes or (batch.rows == 1 and size > batch.num_tokens):
        return None
    if not (passes.attends_in_graphs or batch.trees):  # tree attention always does
        return None
    return float(times.times[times.sizes.index(size)])


def _about_doubling(sizes: Sequence[int]) -> list[int]:
    """Some of these rising sizes, the first and the last among them."""
    chosen = list(sizes[:1])
    for size, larger in zip(sizes[1:], [*sizes[2:], math.inf], strict=False):
        if larger > 2 * chosen[-1]:
            chosen.append(size)
    return chosen


def _of_all_sizes(sizes: Sequence[int], timed: dict[int, float]) -> list[list[Any]]:
    """The sizes up to the largest one that was timed, and their times, by interpolation."""
    known = [size for size in sizes if size <= max(timed, default=0)]
    if not known:
        return [[], []]
    return [known, np.interp(known, list(timed), list(timed.values())).tolist()]


def _fit(attention: list[tuple[Batch, float, float]], context: int) -> tuple[float, float, float]:
    """Seconds for reading a token of context, and for each row that attends to it in chains and
    in trees; by least squares.

    `attention` has batches with the seconds of their passes, with the context and without it.
    """
    features, beyond = [], []
    for batch, seconds, without_context in attention:
        work = float(batch.requests * batch.rows * context)
        read = float(batch.requests * context)
        row = [read, 0.0 if batch.trees else work, work if batch.trees else 0.0]
        # Relative errors, so that long passes do not dominate.
        features.append(np.array(row) / seconds)
        beyond.append(1 - without_context / seconds)
    if not features:
        return 0.0, 0.0, 0.0
    read, causal, trees = np.linalg.lstsq(np.array(features), np.array(beyond))[0].clip(0)
    return float(read), float(causal), float(trees or causal)


def _fastest(run: Any) -> float:
    """The least time of several runs, in seconds; in a pipeline, the sum over all stages."""
    times = []
    for _ in range(4):  # the first one warms up
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return sum(gather_from_stages(min(times)))  # a step runs through all stages


def _file_of(config: VllmConfig) -> Path:
    """The cache file, named by a hash of config, model, device and versions."""
    device = current_platform.get_device_name()
    if current_platform.is_cpu():
        device = f"{cpu_name()}, {torch.get_num_threads()} threads"
    key = [
        config.compute_hash(),
        config.model_config.model,
        str(config.model_config.dtype),
        device,
        torch.__version__,
        vllm.__version__,
        __version__,
    ]
    name = hashlib.sha256(json.dumps(key).encode()).hexdigest()[:16]
    return Path(envs.VLLM_CACHE_ROOT) / "lookahead_step_cost" / f"{name}.json"


def _read(path: Path) -> dict[str, Any] | None:
    """An earlier measurement, or None. A malformed file is set aside.

    Files that another user could have written are not read.
    """
    try:
        with path.open("rb") as file:
            found = os.fstat(file.fileno())
            if found.st_uid != os.geteuid() or found.st_mode & 0o022:
                return None
            facts: dict[str, Any] = json.load(file)
        _cost_of(facts)
        return facts
    except (FileNotFoundError, PermissionError, NotADirectoryError):
        return None
    except (OSError, LookupError, TypeError, ValueError) as error:
        problem = error
    with suppress(OSError):
        set_aside(path)
    logger.warning(
        "Lookahead: %s does not hold the cost of a step (%s); it is set aside, and the cost is "
        "measured anew.",
        path,
        problem,
    )
    return None


def _write(path: Path, facts: dict[str, Any]) -> None:
    """Cache a measurement, and delete the oldest files."""
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with replacing(path) as new:
            new.write(json.dumps(facts).encode())
        files = sorted(path.parent.glob("*.json"), key=lambda file: file.stat().st_mtime)
        for file in files[:-MAX_FILES]:
            file.unlink(missing_ok=True)
    except OSError as error:
        logger.warning("Lookahead: the cost of a step could not be kept in %s: %s.", path, error)
