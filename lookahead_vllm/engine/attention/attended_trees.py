"""What tree attention computes in a forward pass, and what is left for vLLM's own kernels."""

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from vllm.v1.attention.backend import CommonAttentionMetadata

from lookahead_vllm.engine.step.placed_trees import NO_DRAFTS, PlacedTrees
from lookahead_vllm.verify.layout.fixed_batch import FixedBatch
from lookahead_vllm.verify.layout.tree_batch import TreeBatch


class GraphBuffers(NamedTuple):
    """What attention in a captured graph reads at fixed addresses, apart from vLLM's buffers."""

    trees: FixedBatch
    """The branching trees of the step that the graph runs, or with `holds_all` all requests."""
    seq_lens: torch.Tensor
    """int32 [requests]: the context plus rows of each request, for vLLM's kernel. Requests with
    branching trees have no context there. With `holds_all` it is the context of each request."""
    metadata: dict[Any, Any]
    """What each builder made of the step that was captured; it refers to buffers only."""


@dataclass
class AttendedTrees:
    """The trees of the next forward pass, for the builders of attention metadata.

    A runner has one, fills it in before vLLM builds the metadata, and shares it with all builders.
    """

    step: PlacedTrees = NO_DRAFTS
    """The drafts of a step or a dummy run."""
    trees: TreeBatch | None = None
    """What tree attention computes of them; None if it computes nothing."""
    may_branch: bool = False
    """For the graphs: whether a tree has, or may get, two branches."""
    graph: GraphBuffers | None = None
    """The buffers that hold the same trees, if a graph with trees runs the pass or is captured."""


def contexts_only(metadata: CommonAttentionMetadata, out: torch.Tensor) -> CommonAttentionMetadata:
    """Metadata of attention to the contexts alone, which is not causal; `out` gets their lengths.

    `out` is int32 [at least one for each request].
    """
    starts = metadata.query_start_loc
    seq_lens = torch.sub(metadata.seq_lens, starts[1:] - starts[:-1], out=out[: len(starts) - 1])
    return replace(metadata, seq_lens=seq_lens, causal=False)


def without_contexts(
    metadata: CommonAttentionMetadata,
    rows: torch.Tensor,
    sizes: torch.Tensor,
    out: torch.Tensor | None = None,
) -> CommonAttentionMetadata:
    """Metadata in which requests with branching trees have no context.

    vLLM's kernel runs over the whole batch. Without a context it spends little time on the rows
    that tree attention overwrites afterwards.

    Parameters
    ----------
    rows, sizes : int32 [t]
        The rows of the batch with trees, and the tokens of each tree.
    out : int32 [at least one for each request], optional
        A buffer for the lengths. By default they are in a new tensor.
    """
    if out is None:
        out = torch.empty_like(metadata.seq_lens)
    seq_lens = out[: len(metadata.seq_lens)].copy_(metadata.seq_lens)
    seq_lens[rows.long()] = sizes.to(seq_lens.dtype)
    return replace(metadata, seq_lens=seq_lens)
