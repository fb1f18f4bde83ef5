"""The draft trees of one step on Model Runner V2, from the drafts to what was accepted."""

from __future__ import annotations

from collections.abc import Callable

import torch

from lookahead_vllm.draft.proposer import Verified
from lookahead_vllm.engine.model_runner.drafts import NO_TREES, Drafts
from lookahead_vllm.engine.worker.attended import AttendedTrees
from lookahead_vllm.engine.worker.draft_step import NO_DRAFTS, DraftStep
from lookahead_vllm.verify.node_layout import NodeLayout
from lookahead_vllm.verify.walk import Walk

Move = Callable[[Walk, slice, torch.Tensor], None]
"""Moves what accepted nodes left in the caches; see `LookaheadRunner._move`."""


class StepTrees:
    """What the stations of a runner's step know of its draft trees.

    The runner has one, forgets its content when a step begins, and fills it in from station to
    station. The sampler, the graphs and the builders of attention metadata read the same object.

    Attributes
    ----------
    drafts : Drafts
        As they were grown. Under lookahead parallelism, this rank's part of them.
    whole : Drafts
        The same, on all ranks that share them.
    has_slots : bool
        Whether the scheduler has reserved slots for drafts in this step.
    step : DraftStep
        `drafts` in the order of the batch.
    whole_step : DraftStep
        `whole` in the order of the batch.
    layout : NodeLayout or None
        Their rows of logits, on the device; None in a step without drafts.
    move : callable or None
        See `Move`; None if all trees are chains.
    order : Tensor or None
        int64 [n]: `Walk.order` of all rows of logits; None if all trees are chains.
    verified : Verified or None
        The model's choices, for proposers that need them.
    attended : AttendedTrees
        For the builders of attention metadata.
    attended_step : DraftStep
        The drafts in the next forward pass, of a step or a dummy run.
    branches : bool
        For the graphs: whether a tree of the next forward pass has, or may get, two branches.
    """

    def __init__(self) -> None:
        self.attended = AttendedTrees()
        self.attended_step = NO_DRAFTS
        self.branches = False
        self.forget()

    def forget(self) -> None:
        """Forget the step before."""
        self.drafts: Drafts = NO_TREES
        self.whole: Drafts = NO_TREES
        self.has_slots = False
        self.step: DraftStep = NO_DRAFTS
        self.whole_step: DraftStep = NO_DRAFTS
        self.layout: NodeLayout | None = None
        self.move: Move | None = None
        self.order: torch.Tensor | None = None
        self.verified: Verified | None = None
