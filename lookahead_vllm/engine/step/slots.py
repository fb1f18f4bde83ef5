"""Drafts in place of the slots that the scheduler reserved, in a step that waits for them."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.worker.gpu.states import RequestState

from lookahead_vllm.engine.step.drafts import Drafts
from lookahead_vllm.verify.transfer import to_device


def filled(scheduled: SchedulerOutput, drafts: Drafts) -> SchedulerOutput:
    """The scheduler's output with drafts in place of slots, and without unused slots.

    It is a copy: in the engine's own process, the scheduler still needs the original.
    """
    slots, sizes = scheduled.scheduled_spec_decode_tokens, drafts.sizes
    counts = {
        req_id: count - len(slots.get(req_id, ())) + sizes.get(req_id, 0)
        for req_id, count in scheduled.num_scheduled_tokens.items()
    }
    return replace(
        scheduled,
        num_scheduled_tokens=counts,
        total_num_scheduled_tokens=sum(counts.values()),
        scheduled_spec_decode_tokens={i: slots[i][:n] for i, n in sizes.items()},
    )


def write_tokens(
    states: RequestState, drafts: Drafts, with_slots: Sequence[str], rows: torch.Tensor
) -> None:
    """Copy the nodes' tokens to vLLM's table, from which it reads the step's input.

    `rows` int64 [s] of the table belong to the requests `with_slots`.
    """
    forest = drafts.forest
    if not forest.num_nodes:
        return
    place = {req_id: i for i, req_id in enumerate(with_slots)}
    own = np.array([place.get(req_id, -1) for req_id in drafts.req_ids])  # -1: without nodes
    tokens = np.zeros((len(with_slots), int(forest.sizes.max())), np.int64)
    tokens[own[forest.owners], forest.places] = forest.tokens
    table = states.draft_tokens
    table[rows, : tokens.shape[1]] = to_device(tokens, table.device).to(table.dtype)


def write_lengths(states: RequestState, drafts: Drafts) -> None:
    """Correct vLLM's lengths on the host, which count the slots of the step before as tokens.

    Attention that computes the rows of a draft as a prompt reads the context's length there.
    """
    rows = np.array([states.req_id_to_index[req_id] for req_id in drafts.req_ids], np.int64)
    is_known = drafts.num_tokens > 0
    states.num_computed_tokens_np[rows[is_known]] = drafts.num_tokens[is_known] - 1
