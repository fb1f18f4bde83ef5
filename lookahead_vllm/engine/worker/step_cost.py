"""The cost of a step on this device: measured when an engine starts, cached for the next start.

Source: the critical decoding length, Lookahead (KDD 2024), section 3.2.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import vllm
from tqdm import tqdm
from vllm import envs
from vllm.distributed.parallel_state import get_world_group, is_global_first_rank
from vllm.logger import init_logger
from vllm.platforms import current_platform

from lookahead_vllm import __version__
from lookahead_vllm.draft.budget.cost import CostCurve, StepCost
from lookahead_vllm.draft.cache.file import set_aside
from lookahead_vllm.draft.tree import DraftTree
from lookahead_vllm.machine import cpu_name

logger = init_logger(f"vllm.{__name__}")

SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
"""Tokens of the forward passes that are timed without attention to a context."""

MAX_SECONDS = 10.0
"""After this time, sizes and batches that were not measured yet are left out."""

CONTEXT_TOKENS = 1024
"""Context of each row when attention is timed; shorter where it does not fit."""

MAX_FILES = 64
"""Cached measurements that are kept; the oldest are deleted."""


class Batch(NamedTuple):
    """A batch whose attention is timed."""

    requests: int
    rows: int
    """Tokens of each request: a root and its draft."""
    trees: bool


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


def step_cost(runner: Any) -> StepCost:
    """The cost of a step of this engine's model, in seconds: from the cache, or measured.

    Parameters
    ----------
    runner
        A model runner of vLLM with a `drafter` and `schedule_dummy_trees`.
    """
    path = _file_of(runner)
    is_first_rank = is_global_first_rank()
    facts = _broadcast(_read(path) if is_first_rank else None)
    if facts is None:
        facts = measure(runner)
        if is_first_rank:
            _write(path, facts)
    cost = _cost_of(facts)
    logger.info_once(
        "Lookahead: the critical decoding length is %d tokens here; a forward pass costs, in ms, "
        "%s, and %.3f more with drafts; a thousand tokens of context %.3f, and %.3f for each row "
        "(%.3f in trees). Kept in %s.",
        cost.curve.critical_decoding_length,
        CostCurve(facts["sizes"], [1e3 * t for t in facts["times"]]),
        1e3 * facts["drafts"],
        1e6 * facts["context"],
        1e6 * facts["causal"],
        1e6 * facts["trees"],
        path,
    )
    return cost


def _broadcast(value: Any) -> Any:
    """The first rank's value, so that all ranks of a model run the same passes."""
    return get_world_group().broadcast_object(value)


def _cost_of(facts: dict[str, Any]) -> StepCost:
    curve = CostCurve(facts["sizes"], facts["times"])
    return StepCost(curve, facts["context"], facts["causal"], facts["trees"], facts["drafts"])


def measure(runner: Any) -> dict[str, Any]:
    """Time forward passes, logits included, then attention in chains and in trees; in seconds.

    Where CUDA graphs of the whole model serve steps without drafts, those graphs are timed too.
    """
    deadline = time.perf_counter() + MAX_SECONDS
    limit = runner.scheduler_config.max_num_seqs, runner.max_num_tokens
    sizes = [size for size in SIZES if size <= limit[1]]
    batches = [b for b in BATCHES if b.requests <= limit[0] and b.requests * b.rows <= limit[1]]
    if not runner.drafter.may_branch:
        batches = [batch for batch in batches if not batch.trees]
    context = min(CONTEXT_TOKENS, runner.max_model_len - max(b.rows for b in batches))
    has_graphs = runner.compilation_config.cudagraph_mode.has_full_cudagraphs()
    in_pieces = partial(_forward, runner, force_attention=has_graphs, profile_seq_lens=1)
    whole = partial(_forward, runner, uniform_decode=True, profile_seq_lens=1)
    timed: dict[int, float] = {}
    in_graphs: dict[int, float] = {}
    attention: list[tuple[Batch, float]] = []
    with tqdm(
        total=len(sizes) + len(batches),
        desc="Measuring the cost of a step",
        disable=not is_global_first_rank(),
    ) as bar:
        for size in sizes:
            if len(timed) < 3 or _broadcast(time.perf_counter() < deadline):
                timed[size] = _fastest(partial(in_pieces, size))
                if has_graphs and size <= limit[0]:
                    in_graphs[size] = _fastest(partial(whole, size))
            bar.update()
        for batch in batches:
            if _broadcast(time.perf_counter() < deadline):
                with _context(runner, batch, context):
                    attend = partial(
                        _forward,
                        runner,
                        batch.requests * batch.rows,
                        force_attention=True,
                        profile_seq_lens=context + batch.rows,
                    )
                    attention.append((batch, _fastest(attend)))
            bar.update()
    read, causal, trees = _fit(CostCurve(list(timed), list(timed.values())), attention, context)
    times, drafts = _without_drafts(timed, in_graphs)
    return dict(
        sizes=list(timed), times=times, context=read, causal=causal, trees=trees, drafts=drafts
    )


def _without_drafts(
    in_pieces: dict[int, float], in_graphs: dict[int, float]
) -> tuple[list[float], float]:
    """Times of the passes in steps without drafts, and what any draft adds to a step."""
    differences = [in_pieces[size] - seconds for size, seconds in in_graphs.items()]
    drafts = max(0.0, float(np.median(differences))) if differences else 0.0
    return [in_graphs.get(size, seconds - drafts) for size, seconds in in_pieces.items()], drafts


def _fit(
    curve: CostCurve, attention: list[tuple[Batch, float]], context: int
) -> tuple[float, float, float]:
    """Seconds for reading a token of context, and for each row that attends to it in chains and
    in trees; by least squares."""
    features, beyond = [], []
    for batch, seconds in attention:
        work = float(batch.requests * batch.rows * context)
        read = float(batch.requests * context)
        row = [read, 0.0 if batch.trees else work, work if batch.trees else 0.0]
        # Relative errors, so that long passes do not dominate.
        features.append(np.array(row) / seconds)
        beyond.append(1 - float(curve(batch.requests * batch.rows)) / seconds)
    if not features:
        return 0.0, 0.0, 0.0
    read, causal, trees = np.linalg.lstsq(np.array(features), np.array(beyond))[0].clip(0)
    return float(read), float(causal), float(trees or causal)


def _fastest(run: Any) -> float:
    times = []
    for _ in range(4):  # the first one warms up
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return min(times)


def _forward(runner: Any, num_tokens: int, **kwargs: Any) -> None:
    hidden, last = runner._dummy_run(num_tokens, skip_eplb=True, **kwargs)
    # Adapters are laid out for one row of logits a request.
    runner.model.compute_logits(last if runner.lora_config else hidden[:num_tokens])
    runner._sync_device()


@contextmanager
def _context(runner: Any, batch: Batch, context: int) -> Iterator[None]:
    """Give dummy runs `batch.requests` requests, each with KV blocks of its own."""
    config, tables = runner.scheduler_config, runner.input_batch.block_table.block_tables
    saved = config.max_num_seqs
    config.max_num_seqs = batch.requests
    for table in tables:
        width = -(-(context + batch.rows) // table.block_size)
        ids = np.arange(batch.requests * width) % runner.kv_cache_config.num_blocks
        table.block_table.np[: batch.requests, :width] = ids.reshape(batch.requests, width)
    if batch.trees:
        # The parent of node i is node i - 2; the first two are children of the root.
        tree = DraftTree.from_lists([0] * (batch.rows - 1), [-1, -1, *range(batch.rows - 3)])
        runner.schedule_dummy_trees([tree] * batch.requests, context)
    try:
        yield
    finally:
        config.max_num_seqs = saved
        runner.schedule_dummy_trees([])
        for table in tables:
            table.block_table.np[: batch.requests] = 0
            table.commit_block_table(batch.requests)


def _file_of(runner: Any) -> Path:
    """The cache file, named by a hash of config, model, device and versions."""
    device = current_platform.get_device_name()
    if current_platform.is_cpu():
        device = f"{cpu_name()}, {torch.get_num_threads()} threads"
    key = [
        runner.vllm_config.compute_hash(),
        runner.model_config.model,
        str(runner.model_config.dtype),
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
        with path.open() as file:
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
    new = path.with_suffix(f".{os.getpid()}")
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        new.touch(0o600)
        new.write_text(json.dumps(facts))
        new.replace(path)
        files = sorted(path.parent.glob("*.json"), key=lambda file: file.stat().st_mtime)
        for file in files[:-MAX_FILES]:
            file.unlink(missing_ok=True)
    except OSError as error:
        with suppress(OSError):
            new.unlink()
        logger.warning("Lookahead: the cost of a step could not be kept in %s: %s.", path, error)
