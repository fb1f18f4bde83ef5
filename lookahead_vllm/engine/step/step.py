"""One step on Model Runner V2, from the scheduler's output until its tokens are counted."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from enum import Enum, auto
from functools import cached_property
from math import ceil
from typing import Any, NamedTuple

import numpy as np
import torch
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.worker.gpu.cudagraph_utils import BatchExecutionDescriptor

from lookahead_vllm.draft.budget.cost import StepWork
from lookahead_vllm.draft.jit import Int32s, Int64s
from lookahead_vllm.draft.progress import GONE, NO_CHAINS, PROPOSED, EmittedTokens
from lookahead_vllm.draft.tree import UNKNOWN
from lookahead_vllm.draft.verified import Verified
from lookahead_vllm.engine.step.drafts import NO_TREES, Drafts, Plan
from lookahead_vllm.engine.step.placed_trees import NO_DRAFTS, PlacedTrees
from lookahead_vllm.verify.acceptance import paths_of_tokens
from lookahead_vllm.verify.layout.node_layout import NodeLayout
from lookahead_vllm.verify.walk import Walk

Move = Callable[[Walk, slice, torch.Tensor], None]
"""Moves what accepted nodes left in the caches; see `LookaheadRunner._move`."""


def _no_rows() -> Int64s:
    return np.empty(0, np.int64)


class State(Enum):
    """How far a step has come."""

    WAITS = auto()
    """Its drafts, if it may have any, come before vLLM prepares it."""
    SIZED = auto()
    """vLLM prepares it for a given number of nodes of each request. Its drafts come at the model
    call, and padding takes the place of those that are missing."""
    PREPARED = auto()
    """vLLM prepares it for all its slots. Its drafts come at the model call."""
    DRAFTED = auto()
    """They have come, and its rows are placed."""
    EXACT = auto()
    """Its batch has the rows in use."""


class Chains(NamedTuple):
    """What a trained drafter proposes after a step, on its way to the host."""

    length: int
    """How many tokens it proposes."""

    by_request: Int32s
    """int32 [r, K, NUM_ALTERNATIVES, 2], as `EmittedTokens.chains`, of the batch's requests."""
    event: Any
    """When they have arrived."""
    source: torch.Tensor
    """On the device; kept until then."""


@dataclass(eq=False)
class Step:
    """All that is known of one step.

    The runner makes it from the scheduler's output, and each station adds what it finds out. The
    drafting rank keeps it until its tokens are counted. `docs/design.md`, "A step", lists the
    stations.
    """

    scheduled: SchedulerOutput
    """The scheduler's output, with all slots."""
    work_before: StepWork | None = None
    """The `work` of the step before."""
    state: State = State.WAITS

    # begin
    has_slots: bool = False
    """Whether the scheduler has reserved slots for drafts."""
    most_nodes: int | None = None
    """The most nodes of all trees, if vLLM prepares the step before they are known."""
    repeats: bool = False
    """Whether the step has the batch of the step before, which vLLM has prepared already."""
    may_repeat: bool = False
    """Whether the next step may have the same batch."""
    has_new_blocks: bool = False
    """Whether the KV blocks of a request have changed since the step before."""
    shaped: Any = None
    """SchedulerOutput: what vLLM prepares, with fewer slots, or with drafts in place of slots."""
    found: Any = None
    """What `gather_batch_req_state` has returned."""

    # place
    prepared: Any = None
    """InputBatch: the batch as vLLM has prepared it."""
    batch: Any = None
    """The same; once the step is EXACT, with only the rows in use."""
    tables: tuple[torch.Tensor, ...] = ()
    """The block tables, which vLLM has returned: views of its buffers."""
    slots: Any = None
    """Tensor int64 [groups, tokens]: the KV slots, likewise."""

    # draft
    plan: Plan | None = None
    """On the drafting rank, for the drafts."""
    drafts: Drafts = NO_TREES
    """Under lookahead parallelism, this rank's part of `whole`."""
    whole: Drafts = NO_TREES
    """The drafts as they were grown, on all ranks that share them."""
    graph: BatchExecutionDescriptor | None = None
    """The graph that runs a step that was prepared before its drafts; None outside of graphs."""
    rows: Int64s = field(default_factory=_no_rows)
    """int64 [t]: the row of the batch of each tree of such a step, or of one that is SIZED."""
    elapsed: float | None = None
    """Seconds from the launch of the step before to that of this one; None if unknown."""

    # settle
    trees: PlacedTrees = NO_DRAFTS
    """`drafts` in the order of the batch."""
    whole_trees: PlacedTrees = NO_DRAFTS
    """`whole` in the order of the batch."""
    layout: NodeLayout | None = None
    """Their rows of logits, on the device; None in a step without drafts."""
    move: Move | None = None
    """None if all trees are chains."""

    # sample, walk
    has_tail: bool = False
    """Whether it is sampled in a captured graph; see `tail.py`."""
    verified: Verified | None = None
    """The model's choices, for proposers that need them."""
    order: torch.Tensor | None = None
    """int64 [n]: `Walk.order` of all rows of logits; None if all trees are chains."""

    # keep
    output: Any = None
    """AsyncOutput, on the drafting rank."""
    launched: float = 0.0
    """When it was launched, by `time.perf_counter`."""
    requests: Int64s = field(default_factory=_no_rows)
    """int64 [r]: the progress of the output's requests; GONE once a request has ended, because
    its row and its id may be used again before the tokens come."""
    work: StepWork | None = None
    """What the time of the step depends on; None if it reads a prompt."""
    chains: Chains | None = None
    """What a trained drafter proposes after the tokens."""
    proposed: Int32s | None = None
    """int32 [r, K]: what it proposed before them, if the host knew this before the launch."""

    # ---- before the tokens -----------------------------------------------------------------------

    def __post_init__(self) -> None:
        self.has_slots = bool(self.scheduled.scheduled_spec_decode_tokens)
        self.shaped = self.scheduled

    @property
    def num_slots(self) -> int:
        """The slots of a step that only decodes."""
        scheduled = self.scheduled
        return scheduled.total_num_scheduled_tokens - len(scheduled.num_scheduled_tokens)

    @property
    def is_prepared_early(self) -> bool:
        """Whether vLLM has prepared it, or will, before it is known how many rows a request has."""
        return self.state not in (State.WAITS, State.SIZED)

    @property
    def awaits_drafts(self) -> bool:
        """Whether its drafts come at the model call, and are not there yet."""
        return self.state is State.PREPARED or (
            self.state is State.SIZED and self.drafts is NO_TREES
        )

    @property
    def offered(self) -> SchedulerOutput:
        """The scheduler's output with the slots that trees may take; in a step that is prepared
        early, those of other requests, too."""
        return self.scheduled if self.is_prepared_early else self.shaped

    def size(self, last: Step, each: int | None = None) -> None:
        """vLLM may prepare the step before its drafts are known, for `each` nodes of every request,
        within its slots.

        By default, a request gets the mean of what it would need and what all need on average, by
        the trees of the `last` step. One that had no room for more nodes needs twice as many.
        """
        slots = self.scheduled.scheduled_spec_decode_tokens
        had, room = last.whole.sizes, last.offered.scheduled_spec_decode_tokens
        need = {req_id: had.get(req_id, 0) for req_id in slots}
        need |= {req_id: 2 * n for req_id, n in need.items() if n == len(room.get(req_id, ()))}
        mean = sum(need.values()) / len(need)
        sized = {
            req_id: own[: each or max(1, ceil((need[req_id] + mean) / 2))]
            for req_id, own in slots.items()
        }
        counts = self.scheduled.num_scheduled_tokens | {
            req_id: 1 + len(own) for req_id, own in sized.items()
        }
        self.state, self.shaped = State.SIZED, _with_slots(self.scheduled, counts, sized)

    def prepare_early(self, most_nodes: int) -> None:
        """vLLM may prepare the step before its drafts are known, for at most so many nodes.

        With fewer nodes than slots, vLLM prepares a copy with as many slots: only their number
        counts, since the nodes may be of any requests.
        """
        self.state, self.most_nodes, self.may_repeat = State.PREPARED, most_nodes, True
        if most_nodes < self.num_slots:
            self.shaped = _cut(self.scheduled, most_nodes)

    def repeat(self, last: Step) -> bool:
        """Take over what vLLM has prepared for the `last` step, if this one has its batch.

        What is prepared early depends on nothing but the requests and their numbers of slots: all
        else is written by the kernel that places the rows.
        """
        counts, before = self.scheduled.num_scheduled_tokens, last.scheduled.num_scheduled_tokens
        if not last.may_repeat or list(counts.items()) != list(before.items()):
            return False
        self.state, self.most_nodes, self.plan = State.PREPARED, last.most_nodes, last.plan
        self.repeats = self.may_repeat = True
        self.shaped, self.found, self.prepared = last.shaped, last.found, last.prepared
        self.tables, self.slots = last.tables, last.slots
        return True

    # ---- after the launch ------------------------------------------------------------------------

    @property
    def has_ended(self) -> bool:
        """Whether its tokens, and the chains after them, have reached the host."""
        chains = self.chains
        return _has_passed(self.output.copy_event) and (chains is None or _has_passed(chains.event))

    def wait(self) -> None:
        """Wait until it has ended."""
        self.output.copy_event.synchronize()
        if self.chains is not None:
            self.chains.event.synchronize()

    @property
    def emitted(self) -> EmittedTokens:
        """Its tokens, once they have arrived."""
        output = self.output
        tokens = np.ascontiguousarray(output.sampled_token_ids, np.int64)
        return EmittedTokens(
            self.requests,
            tokens,
            np.ascontiguousarray(output.num_sampled_tokens_np, np.int32),
            NO_CHAINS if self.chains is None else self.chains.by_request,
        )

    @cached_property
    def accepted_paths(self) -> Int32s:
        """The accepted nodes of its trees, as in `paths_of_tokens`."""
        rows = self.whole_trees.rows
        tokens = np.ascontiguousarray(self.output.sampled_token_ids[rows])
        counts = self.output.num_sampled_tokens_np[rows]
        return paths_of_tokens(self.whole_trees.forest, tokens, counts)

    def fill_in_chains(self, before: Step) -> None:
        """Fill in the tokens of a step that was launched with the chains of the one `before`."""
        forest, chains = self.whole_trees.forest, before.chains
        if chains is None or not forest.num_nodes or forest.tokens[0] != UNKNOWN:
            return
        row_of = {row: i for i, row in enumerate(before.requests.tolist())}
        rows = self.requests[self.whole_trees.rows]
        places = np.array([row_of.get(row, -1) for row in rows.tolist()])
        tokens = chains.by_request[places[forest.owners], forest.places, 0, PROPOSED]
        forest.tokens[:] = np.where(rows[forest.owners] == GONE, UNKNOWN, tokens)

    def drop(self, req_id: str, row: int) -> None:
        """A request has ended: its tokens do not count, and no choices are learned."""
        self.requests[self.requests == row] = GONE
        if self.verified is not None and req_id in self.verified.request_ids:
            self.verified = None

    def mark_accepted(self) -> None:
        """Fill in what was accepted of what was verified."""
        if self.verified is not None and self.whole_trees.forest.num_nodes:
            self.whole_trees.mark_accepted(self.verified, self.accepted_paths)


def _has_passed(event: Any) -> bool:
    """Whether the device has reached this event.

    On a CPU, vLLM's events have no `query`, and a step ends before it returns.
    """
    query = getattr(event, "query", None)
    return query is None or bool(query())


def _cut(scheduled: SchedulerOutput, most: int) -> SchedulerOutput:
    """A copy with `most` slots, of the first requests."""
    slots: dict[str, list[int]] = {}
    counts = dict.fromkeys(scheduled.num_scheduled_tokens, 1)
    for req_id, own in scheduled.scheduled_spec_decode_tokens.items():
        if most:
            slots[req_id] = own[:most]
            counts[req_id] += len(slots[req_id])
            most -= len(slots[req_id])
    return _with_slots(scheduled, counts, slots)


def _with_slots(
    scheduled: SchedulerOutput, counts: dict[str, int], slots: dict[str, list[int]]
) -> SchedulerOutput:
    return replace(
        scheduled,
        num_scheduled_tokens=counts,
        total_num_scheduled_tokens=sum(counts.values()),
        scheduled_spec_decode_tokens=slots,
    )


ThisStep = Callable[[], Step]
"""Returns the step that the runner is in, for what vLLM calls without it."""
