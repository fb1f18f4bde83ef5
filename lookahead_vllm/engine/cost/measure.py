"""The cost of a step on this device: measured when an engine starts, cached for the next start.

Source: the critical decoding length, Lookahead (KDD 2024), section 3.2.
"""

import hashlib
import json
import math
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import numpy as np
import torch
import vllm
from vllm import envs
from vllm.distributed.parallel_state import is_global_first_rank
from vllm.logger import init_logger
from vllm.platforms import current_platform

from lookahead_vllm import __version__
from lookahead_vllm.draft.budget.captured import CapturedSizes, GraphTimes
from lookahead_vllm.draft.budget.cost import CostCurve, StepCost
from lookahead_vllm.engine.cost.timed_passes import (
    IN_GRAPH,
    IN_PIECES,
    WITH_DRAFTS,
    Batch,
    MeasuredRunner,
    PassPlan,
    broadcast,
    is_outdated,
    measure,
    name_of,
)
from lookahead_vllm.kept_file import replacing, set_aside
from lookahead_vllm.machine import cpu_name

logger = init_logger(f"vllm.{__name__}")

MAX_FILES = 64
"""The number of cached measurements that are kept; the oldest are deleted."""


def begin_to_draft(runner: MeasuredRunner) -> None:
    """Start the drafter, with the cost of a step if the budget depends on it.

    Every rank must call this.
    """
    drafter = runner.drafter
    cost = step_cost(runner) if drafter.options.budget == "auto" else None
    if cost is not None:
        cost.parts = drafter.options.parallel
    drafter.begin(runner.vllm_config, cost)
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
    """The cost of a step of this engine's model, in seconds: from the cache, or measured.

    Every rank must call this.
    """
    plan = PassPlan(runner)
    path = _file_of(runner, plan)
    is_first_rank = is_global_first_rank()
    times = broadcast(_read(path, plan) if is_first_rank else None)
    if times is not None and is_outdated(plan, times):
        logger.info_once(
            "Lookahead measures the cost of a step again: passes are faster than in %s.", path
        )
        times = None
    if times is None:
        times, is_certain = measure(plan)
        if not is_certain:
            logger.warning(
                "Lookahead: other programs disturbed the measurement of the cost of a step, so it "
                "is not kept for the next start."
            )
        elif is_first_rank:
            _write(path, times)
    cost = _cost_of(plan, times)
    context, causal, trees = cost.weights[-3:].tolist()
    logger.info_once(
        "Lookahead: a forward pass costs, in ms, "
        "%s; in graphs without drafts %s, with drafts %s; a thousand tokens of context %.3f, and "
        "%.3f for each row (%.3f in trees). Its file is %s.",
        CostCurve(cost.curve.sizes.astype(int).tolist(), (1e3 * cost.curve.times).tolist()),
        *(GraphTimes(graphs.sizes, (1e3 * graphs.times).tolist()) for graphs in cost.captured),
        1e6 * context,
        1e6 * causal,
        1e6 * trees,
        path,
    )
    return cost


def _cost_of(plan: PassPlan, times: Mapping[str, float]) -> StepCost:
    """The cost of a step by the times of a plan's passes; some may be missing.

    Raises
    ------
    TypeError, ValueError
        These are no such times.
    """
    if not all(0 < seconds < math.inf for seconds in times.values()):
        raise ValueError("a time is not above 0")

    def timed(kind: str, sizes: Sequence[int]) -> dict[int, float]:
        names = {size: name_of(kind, size) for size in sizes}
        return {size: times[name] for size, name in names.items() if name in times}

    in_pieces = timed(IN_PIECES, plan.sizes)
    curve = CostCurve(list(in_pieces), list(in_pieces.values()))
    graphs = CapturedSizes(
        _of_all_sizes(plan.captured.without_drafts, timed(IN_GRAPH, plan.captured.without_drafts)),
        _of_all_sizes(plan.captured.with_drafts, timed(WITH_DRAFTS, plan.captured.with_drafts)),
    )
    attention = []
    for batch in plan.batches:
        without_context = _without_context(plan, batch, curve, graphs)
        if batch.name in times and without_context is not None:
            attention.append((batch, times[batch.name], without_context))
    cost = StepCost(curve, *_fit(attention, plan.context), captured=graphs)
    if plan.whole_chain is not None and plan.whole_chain in times:
        cost.chain = max(times[plan.whole_chain] - in_pieces[plan.sizes[0]], 0.0)
    return cost


def _without_context(
    plan: PassPlan, batch: Batch, curve: CostCurve, graphs: CapturedSizes
) -> float | None:
    """The seconds that a batch's pass takes without a context; None if they are not known."""
    size = plan.graph_of(batch)
    if size is None:
        return float(curve(batch.num_tokens))
    in_graphs = graphs.with_drafts if batch.rows > 1 else graphs.without_drafts
    if size > in_graphs.largest:  # there was no time for it
        return None
    return float(in_graphs.times[in_graphs.sizes.index(size)])


def _of_all_sizes(sizes: Sequence[int], timed: Mapping[int, float]) -> GraphTimes:
    """The sizes up to the largest one that was timed, and their times, by interpolation."""
    known = [size for size in sizes if size <= max(timed, default=0)]
    if not known:
        return GraphTimes()
    return GraphTimes(known, np.interp(known, list(timed), list(timed.values())).tolist())


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


def _file_of(runner: MeasuredRunner, plan: PassPlan) -> Path:
    """The cache file, named by a hash of what the measured passes depend on."""
    config = runner.vllm_config
    device = current_platform.get_device_name()
    if current_platform.is_cpu():
        device = f"{cpu_name()}, {torch.get_num_threads()} threads"
    key = [
        config.compute_hash(),
        config.model_config.model,
        str(config.model_config.dtype),
        runner.drafter.options.attention,
        list(plan.runs),
        plan.context,
        device,
        torch.__version__,
        vllm.__version__,
        __version__,
    ]
    name = hashlib.sha256(json.dumps(key).encode()).hexdigest()[:16]
    return Path(envs.VLLM_CACHE_ROOT) / "lookahead_step_cost" / f"{name}.json"


def _read(path: Path, plan: PassPlan) -> dict[str, float] | None:
    """The times of an earlier measurement, or None. A malformed file is set aside.

    Files that another user could have written are not read.
    """
    try:
        with path.open("rb") as file:
            found = os.fstat(file.fileno())
            if found.st_uid != os.geteuid() or found.st_mode & 0o022:
                return None
            times: dict[str, float] = json.load(file)
        _cost_of(plan, times)
        return times
    except (FileNotFoundError, PermissionError, NotADirectoryError):
        return None
    except (OSError, AttributeError, LookupError, TypeError, ValueError) as error:
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


def _write(path: Path, times: dict[str, float]) -> None:
    """Cache a measurement, and delete the oldest files."""
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with replacing(path) as new:
            new.write(json.dumps(times).encode())
        files = sorted(path.parent.glob("*.json"), key=lambda file: file.stat().st_mtime)
        for file in files[:-MAX_FILES]:
            file.unlink(missing_ok=True)
    except OSError as error:
        logger.warning("Lookahead: the cost of a step could not be kept in %s: %s.", path, error)
