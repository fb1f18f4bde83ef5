"""Pipeline parallelism on vLLM's first model runner: what the stages before the last one do.

Only the last stage samples, so only it accepts nodes. With the next step, the scheduler sends the
other stages the tokens that each request with a draft emitted. Before that step's forward pass, and
before blocks are reassigned, they move the accepted nodes' KV.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from vllm.distributed.parallel_state import get_pp_group

from lookahead_vllm.draft.jit import Int64s
from lookahead_vllm.engine.messages import StageUpdate
from lookahead_vllm.engine.worker.draft_step import DraftStep
from lookahead_vllm.engine.worker.drafter import LookaheadDrafter
from lookahead_vllm.verify.acceptance import paths_of_tokens


class EarlierStage:
    """The drafts that a stage before the last one has computed, until their outcome arrives."""

    def __init__(self) -> None:
        self._computed: dict[str, tuple[DraftStep, int]] = {}
        """By request id: the step of its last draft, and the draft's index in the step."""

    def remember(self, step: DraftStep, req_ids: Sequence[str]) -> None:
        """Keep the drafts of a step; `req_ids` are the requests of the batch."""
        for tree, row in enumerate(step.rows.tolist()):
            self._computed[req_ids[row]] = step, tree

    def forget(self, request_id: str) -> None:
        """Drop the draft of a request that has ended."""
        self._computed.pop(request_id, None)

    def settle(self, runner: Any, emitted: Mapping[str, StageUpdate]) -> None:
        """Append the tokens of accepted nodes to their requests, and move their KV.

        vLLM sends this stage only the last token, as if the request had emitted one token.

        Parameters
        ----------
        runner
            The stage's runner, with the block tables of the step that computed the drafts.
        emitted
            As in `messages.DraftsToVerify`.
        """
        origins: list[Int64s] = []
        targets: list[Int64s] = []
        requests: list[Any] = []
        for req_id, (tokens, keeps_kv) in emitted.items():
            computed = self._computed.pop(req_id, None)
            if (request := runner.requests.get(req_id)) is None:
                continue
            request.output_token_ids.extend(tokens[:-1])
            _append_to_row(runner.input_batch, req_id, tokens[:-1])
            if computed is None or not keeps_kv:
                continue
            step, tree = computed
            root = int(step.contexts[tree])
            forest = step.forest.take(np.array([tree]), step.forest.sizes[[tree]])
            path = paths_of_tokens(forest, np.array([tokens]), np.array([len(tokens)], np.int32))[0]
            places = np.arange(len(path))
            moved = path != places
            if moved.any():
                requests.append(request)
                origins.append(root + 1 + path[moved])
                targets.append(root + 1 + places[moved])
        if requests:
            _move(runner, requests, origins, targets)


def earlier_stage(runner: Any) -> EarlierStage | None:
    """The record of a stage before the last one; None on the last stage.

    Also gives the stage a drafter, because vLLM makes one only on the last stage.
    """
    if get_pp_group().is_last_rank:
        return None
    runner.drafter = LookaheadDrafter(runner.vllm_config)
    return EarlierStage()


def _append_to_row(batch: Any, req_id: str, tokens: list[int]) -> None:
    row = batch.req_id_to_index.get(req_id)
    if row is None:
        return
    start = int(batch.num_tokens_no_spec[row])
    end = start + len(tokens)
    batch.token_ids_cpu[row, start:end] = tokens
    batch.is_token_ids[row, start:end] = True
    batch.num_tokens_no_spec[row] = end


def _move(
    runner: Any, requests: Sequence[Any], origins: Sequence[Int64s], targets: Sequence[Int64s]
) -> None:
    """Move KV between these positions of each request, int64 [m], in all layers of the stage."""
    counts = [len(positions) for positions in origins]
    owners = np.repeat(np.arange(len(requests)), counts)
    positions = np.stack([np.concatenate(origins), np.concatenate(targets)])
    runner.drafter.recorder.counters.moved_tokens += positions.shape[1]
    for i, (mover, group) in enumerate(
        zip(runner._movers, runner.kv_cache_config.kv_cache_groups, strict=True)
    ):
        size = group.kv_cache_spec.block_size
        blocks = np.array(
            [
                [requests[owner].block_ids[i][position // size] for owner, position in pairs]
                for pairs in (zip(owners, row, strict=True) for row in positions.tolist())
            ],
            np.int64,
        )
        slots = torch.from_numpy(blocks * size + positions % size).to(runner.device)
        mover.move(*slots)
