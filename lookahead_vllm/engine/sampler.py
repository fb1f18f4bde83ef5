"""vLLM's own sampler at every node of a draft tree.

The root row of each request is sampled by vLLM exactly as it is without speculation. The node
rows are sampled by the same `Sampler`, with each request's parameters repeated for its nodes;
only requests whose sampling does not depend on the path have nodes (see `eligibility.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray
from vllm.v1.outputs import LogprobsTensors, SamplerOutput
from vllm.v1.sample.logits_processor import LogitsProcessors
from vllm.v1.sample.metadata import SamplingMetadata
from vllm.v1.sample.sampler import Sampler

from lookahead_vllm.draft.tree import DraftTree
from lookahead_vllm.verify.noise import DrawTape


def node_metadata(
    metadata: SamplingMetadata, rows: torch.Tensor, generators: dict[int, torch.Generator]
) -> SamplingMetadata:
    """The sampling metadata of node rows, `rows[i]` being the request of the i-th."""

    def pick(tensor: torch.Tensor | None) -> torch.Tensor | None:
        return None if tensor is None else tensor[rows]

    return replace(
        metadata,
        temperature=pick(metadata.temperature),
        top_p=pick(metadata.top_p),
        top_k=pick(metadata.top_k),
        generators=generators,
        no_penalties=True,
        prompt_token_ids=None,
        output_token_ids=[],
        allowed_token_ids_mask=None,
        bad_words_token_ids={},
        logitsprocs=LogitsProcessors(),
        logprob_token_ids=None,
        spec_token_ids=None,
        thinking_budget_state_holder=None,
    )


def tapes_for(
    sampler: Sampler,
    generators: dict[int, torch.Generator],
    trees: dict[int, DraftTree],
    vocab: int,
) -> dict[int, DrawTape]:
    """Each seeded request's draws for the outputs that its nodes stand for.

    Called after the root row was sampled, which spent the first draw of the step.
    """

    def draw(generator: torch.Generator) -> None:
        if generator.device.type == "cpu" and not sampler.use_fp64_gumbel:
            torch.randint(0, 2**31, (1,), generator=generator, dtype=torch.long)
        else:
            dtype = torch.float64 if sampler.use_fp64_gumbel else torch.float32
            torch.empty(vocab, dtype=dtype, device=generator.device).exponential_(
                generator=generator
            )

    return {
        row: DrawTape(generators[row], draw, int(tree.depths.max()))
        for row, tree in trees.items()
        if row in generators
    }


def merge_outputs(
    roots: SamplerOutput,
    nodes: SamplerOutput,
    emitted: Sequence[Sequence[int]],
    sources: Sequence[Sequence[int]],
) -> SamplerOutput:
    """One output row a request, as wide as the longest burst.

    Parameters
    ----------
    roots, nodes
        What was sampled at the R root rows and at the node rows.
    emitted
        For each of the R requests, the tokens to emit, at least one.
    sources
        For each emitted token its row in the concatenation of `roots` and `nodes`.
    """
    width = max(map(len, emitted))
    tokens: NDArray[np.int32] = np.full((len(emitted), width), -1, dtype=np.int32)
    index: NDArray[np.int64] = np.zeros((len(emitted), width), dtype=np.int64)
    for row, (burst, where) in enumerate(zip(emitted, sources, strict=True)):
        tokens[row, : len(burst)] = burst
        index[row, : len(where)] = where
    device = roots.sampled_token_ids.device
    logprobs = None
    if roots.logprobs_tensors is not None and nodes.logprobs_tensors is not None:
        flat = torch.from_numpy(index.reshape(-1)).to(device)
        r, n = roots.logprobs_tensors, nodes.logprobs_tensors
        logprobs = LogprobsTensors(
            torch.cat([r.logprob_token_ids, n.logprob_token_ids])[flat],
            torch.cat([r.logprobs, n.logprobs])[flat],
            torch.cat([r.selected_token_ranks, n.selected_token_ranks])[flat],
        )
    return SamplerOutput(torch.from_numpy(tokens).to(device), logprobs)
