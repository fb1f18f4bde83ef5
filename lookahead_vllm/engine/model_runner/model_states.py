"""What lookahead adds to vLLM's state of a model, which prepares its inputs and its metadata."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from lookahead_vllm.engine.worker import recurrent
from lookahead_vllm.verify.transfer import to_device

if TYPE_CHECKING:
    from vllm.v1.worker.gpu.input_batch import InputBatch

    from lookahead_vllm.engine.model_runner.runner import LookaheadRunner

Prepare = Callable[..., dict[str, Any]]


def extend(runner: LookaheadRunner) -> None:
    """Wrap the methods of the runner's model state."""
    state: Any = runner.model_state
    if getattr(state, "rope_state", None) is not None:
        state.prepare_inputs = partial(_with_depths, runner, state.prepare_inputs)
    prepare_attn = _with_parents if runner.model_config.is_hybrid else _unless_late
    state.prepare_attn = partial(prepare_attn, runner, state.prepare_attn)


def _with_depths(
    runner: LookaheadRunner, prepare: Prepare, batch: InputBatch, *args: Any
) -> dict[str, Any]:
    """Of a model with M-RoPE: the positions of an answer are one range in all dimensions, so a node
    moves to its depth by the same shift in each."""
    inputs, trees = prepare(batch, *args), runner.trees
    if trees.layout is not None and trees.step.branches:
        inputs["positions"][:, batch.logits_indices] += trees.layout.shifts
    return inputs


def _with_parents(
    runner: LookaheadRunner, prepare: Prepare, batch: InputBatch, *args: Any, **kwargs: Any
) -> dict[str, Any]:
    """Of a model with recurrent layers: they get the trees, too."""
    metadata = prepare(batch, *args, **kwargs)
    step = runner.attended_step
    if step.branches or runner.attention.replaces_recurrent_chains:
        parents = recurrent.row_parents(step, batch.query_start_loc_np)
        recurrent.set_parents(metadata, to_device(parents, runner.device))
    return metadata


def _unless_late(
    runner: LookaheadRunner, prepare: Prepare, *args: Any, **kwargs: Any
) -> dict[str, Any]:
    """Of other models: a step that awaits its drafts makes its metadata with them, and in a graph
    with trees on the device."""
    if runner._shape.awaits_drafts and runner.trained is None:
        return {}
    return prepare(*args, **kwargs)
