"""Messages between runner and scheduler, attached to objects that vLLM sends.

The drafting rank grows the trees after their step was scheduled, and sends them to the other ranks
itself (`LookaheadRunner._grow`). The scheduler gets the numbers of nodes and whether drafts pay
(`LateReport`), and under a grammar the trees (`drafts_of`); the runner gets blocks that were given
back.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from vllm.v1.outputs import DraftTokenIds

from lookahead_vllm.draft.tree import DraftForest
from lookahead_vllm.engine.step_report import StepReport


class LateReport(NamedTuple):
    """Attached to `ModelRunnerOutput`: how many slots were filled, and whether drafts pay."""

    sizes: Mapping[str, int]
    """The number of nodes that were sent, by request id."""
    pays: bool
    """Whether drafts are worth their cost now, so that the scheduler should reserve slots."""
    numbers: StepReport | None
    """For the metrics."""


_ATTRIBUTE = "lookahead"
_KEPT_BLOCKS = "lookahead_kept_blocks"


def attach(carrier: Any, message: LateReport | DraftForest) -> None:
    """Attach `message` to a `ModelRunnerOutput` or a `DraftTokenIds`."""
    setattr(carrier, _ATTRIBUTE, message)


def late_report(model_runner_output: Any) -> LateReport | None:
    """The message of the runner; None from a rank that does not draft."""
    return getattr(model_runner_output, _ATTRIBUTE, None)


def drafts_of(req_ids: Sequence[str], forest: DraftForest) -> DraftTokenIds:
    """The drafts of the step in flight, with their trees."""
    drafts = DraftTokenIds(list(req_ids), [tree.tokens.tolist() for tree in forest])
    attach(drafts, forest)
    return drafts


def forest_of(drafts: DraftTokenIds) -> DraftForest:
    """The trees of `drafts_of`."""
    forest: DraftForest = getattr(drafts, _ATTRIBUTE)
    return forest


def attach_kept_blocks(scheduler_output: Any, kept: Mapping[str, list[int]]) -> None:
    """Send the requests that gave KV blocks back.

    `kept` has the number of blocks that a request keeps in each KV cache group, by request id.
    """
    setattr(scheduler_output, _KEPT_BLOCKS, kept)


def kept_blocks(scheduler_output: Any) -> Mapping[str, list[int]]:
    """What `attach_kept_blocks` attached."""
    kept: Mapping[str, list[int]] = getattr(scheduler_output, _KEPT_BLOCKS, {})
    return kept
