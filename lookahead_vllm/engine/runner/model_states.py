"""What lookahead adds to vLLM's state of a model, which prepares its inputs and its metadata."""

from collections.abc import Callable
from functools import partial
from typing import Any

from vllm.v1.worker.gpu.input_batch import InputBatch

from lookahead_vllm.engine.attention.attended_trees import AttendedTrees
from lookahead_vllm.engine.recurrent import states as recurrent
from lookahead_vllm.engine.step.step import ThisStep
from lookahead_vllm.verify.transfer import to_device

Prepare = Callable[..., dict[str, Any]]


def add_depths(state: Any, this_step: ThisStep) -> None:
    """Wrap the state of a model with M-RoPE: positions follow the depths of nodes."""
    state.prepare_inputs = partial(_with_depths, this_step, state.prepare_inputs)


def add_parents(state: Any, attended: AttendedTrees, with_chains: bool) -> None:
    """Wrap the state of a model with recurrent layers: they get the trees, too.

    `with_chains` is whether they get those of steps with only chains.
    """
    state.prepare_attn = partial(_with_parents, attended, with_chains, state.prepare_attn)


def wait_for_drafts(state: Any, this_step: ThisStep) -> None:
    """Wrap the state of another model: a step that awaits its drafts makes its metadata with them,
    and in a graph with trees on the device."""
    state.prepare_attn = partial(_unless_late, this_step, state.prepare_attn)


def _with_depths(
    this_step: ThisStep, prepare: Prepare, batch: InputBatch, *args: Any
) -> dict[str, Any]:
    """The positions of an answer are one range in all dimensions, so a node moves to its depth by
    the same shift in each."""
    inputs, step = prepare(batch, *args), this_step()
    if step.layout is not None and step.trees.branches:
        inputs["positions"][:, batch.logits_indices] += step.layout.shifts
    return inputs


def _with_parents(
    attended: AttendedTrees,
    with_chains: bool,
    prepare: Prepare,
    batch: InputBatch,
    *args: Any,
    **kwargs: Any,
) -> dict[str, Any]:
    metadata = prepare(batch, *args, **kwargs)
    step = attended.step
    if step.branches or with_chains:
        parents = recurrent.row_parents(step, batch.query_start_loc_np)
        recurrent.set_parents(metadata, to_device(parents, batch.input_ids.device))
    return metadata


def _unless_late(
    this_step: ThisStep, prepare: Prepare, *args: Any, **kwargs: Any
) -> dict[str, Any]:
    if this_step().awaits_drafts:
        return {}
    return prepare(*args, **kwargs)
