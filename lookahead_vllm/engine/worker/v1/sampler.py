"""vLLM's sampler at every node of a draft tree.

A node is sampled as if it were a request whose output is that of its own request followed by the
path to the node. Penalties, bad words, `min_tokens`, thinking budgets and logits processors see
this history, and vLLM's own code applies them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import copy
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import numpy as np
import torch
from vllm.utils.torch_utils import PIN_MEMORY
from vllm.v1.core.sched.utils import check_stop
from vllm.v1.outputs import LogprobsTensors, SamplerOutput
from vllm.v1.sample.logits_processor import (
    BUILTIN_LOGITS_PROCESSORS,
    BatchUpdate,
    LogitsProcessors,
)
from vllm.v1.sample.metadata import SamplingMetadata
from vllm.v1.sample.sampler import Sampler
from vllm.v1.sample.thinking_budget_state import ThinkingBudgetStateHolder

from lookahead_vllm.draft.jit import Int32s, Int64s
from lookahead_vllm.draft.tree import DraftForest
from lookahead_vllm.engine.worker.v1.node_rows import NodeRows
from lookahead_vllm.verify.seeded_draws import GeneratorStates

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.sampling_params import SamplingParams
    from vllm.v1.worker.gpu_input_batch import CachedRequestState

T = TypeVar("T")
BuildLogitsProcessors = Callable[..., LogitsProcessors]


def keep_all_processors(build: BuildLogitsProcessors) -> BuildLogitsProcessors:
    """Wrap `build_logitsprocs`, which would omit most processors where drafts are verified."""

    def build_logitsprocs(vllm_config: VllmConfig, *args: Any) -> LogitsProcessors:
        return build(without_speculation(vllm_config), *args)

    return build_logitsprocs


def without_speculation(vllm_config: VllmConfig) -> VllmConfig:
    """A shallow copy of the config without `speculative_config`."""
    plain = copy(vllm_config)
    plain.speculative_config = None
    return plain


class NodeProcessors:
    """A second set of vLLM's logits processors, for the nodes of one step.

    A node is added to a processor as vLLM adds a request that resumes after preemption: with its
    parameters, its prompt and its output so far.
    """

    def __init__(
        self,
        vllm_config: VllmConfig,
        device: torch.device,
        custom: Sequence[Any],
        build: BuildLogitsProcessors,
    ) -> None:
        config = without_speculation(vllm_config)
        config.scheduler_config = copy(config.scheduler_config)
        # Processors allocate a slot for each request of the largest batch.
        config.scheduler_config.max_num_seqs = config.scheduler_config.max_num_batched_tokens
        self._all = build(config, device, PIN_MEMORY, False, custom)
        self._has_custom = any(type(p) not in BUILTIN_LOGITS_PROCESSORS for p in self._all.all)
        self._placed: set[int] = set()

    def _concerns(self, params: SamplingParams) -> bool:
        return bool(self._has_custom or params.min_tokens or params.logit_bias or params.min_p)

    def rows_are_alike(
        self, metadata: SamplingMetadata, requests: Iterable[CachedRequestState]
    ) -> bool:
        """Whether one call can sample all rows, roots and nodes alike: nothing depends on the
        history, and no logprobs are requested."""
        thinking = metadata.thinking_budget_state_holder
        return (
            metadata.no_penalties
            and metadata.allowed_token_ids_mask is None
            and not metadata.bad_words_token_ids
            and metadata.max_num_logprobs is None
            and not metadata.logprob_token_ids
            and (thinking is None or not thinking.has_tracked_requests())
            and not any(self._concerns(request.sampling_params) for request in requests)
        )

    def place(self, nodes: NodeRows) -> LogitsProcessors:
        """The processors with this step's nodes; none if they concern no node."""
        added = [
            (node, nodes.params(row), nodes.requests[row].prompt_token_ids, history)
            for row in nodes.rows_where(self._concerns)
            for node, history in zip(nodes.of(row), nodes.histories(row), strict=True)
        ]
        placed = {node for node, *_ in added}
        gone = self._placed - placed
        if not added and not gone:
            return LogitsProcessors()
        update = BatchUpdate(
            batch_size=len(nodes), removed=sorted(gone, reverse=True), added=added, moved=[]
        )
        for processor in self._all.all:
            processor.update_state(update)
        self._placed = placed
        return self._all


class NodeThinking:
    """Thinking budgets of nodes: the state of a node follows from its parent's.

    Replaces a `ThinkingBudgetStateHolder` in sampling metadata. vLLM's holder counts calls, so its
    state cannot be computed from the output only.
    """

    def __init__(self, roots: ThinkingBudgetStateHolder, nodes: NodeRows) -> None:
        self._roots = roots
        self._nodes = nodes
        self._rows = [row for row in nodes.rows if row in roots._state]
        self._holder = copy(roots)
        self._holder._state = {}
        self._holder.cu_num_tokens = {}
        self._holder._mask_capacity = len(nodes)
        self._longest_marker = max(len(roots.think_start_token_ids), len(roots.think_end_token_ids))

    def has_tracked_requests(self) -> bool:
        return bool(self._rows)

    def update_state(self, output_token_ids: list[list[int]], *_: Any, **__: Any) -> None:
        done: dict[int, dict[str, Any]] = {}
        parents = {
            node: (row, parent)
            for row in self._rows
            for node, parent in zip(
                self._nodes.of(row), self._nodes.tree(row).parents.tolist(), strict=True
            )
        }
        while len(done) < len(parents):
            level: dict[int, dict[str, Any]] = {}
            for node, (row, parent) in parents.items():
                before = (
                    self._roots._state[row] if parent < 0 else done.get(self._nodes.of(row)[parent])
                )
                if node not in done and before is not None:
                    level[node] = self._continued(before)
            self._holder._state = level
            self._holder.update_state(output_token_ids, None)
            done |= level
        self._holder._state = done

    def _continued(self, before: dict[str, Any]) -> dict[str, Any]:
        """A copy of the parent's state, which scans only for markers that end after its history.

        vLLM looks for a marker in all that follows `scan_offset` until it finds one. So the state
        knows the markers of the parent's history.
        """
        scanned = len(before["output_tok_ids"]) + 1 - self._longest_marker
        return {**before, "scan_offset": max(before["scan_offset"], scanned)}

    def apply_to_logits(self, logits: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        return self._holder.apply_to_logits(logits, False, None)

    def accept(self, row: int, place: int) -> None:
        """Make the state at this node of the request's tree the request's state."""
        if row in self._rows:
            self._roots._state[row] = self._holder._state[self._nodes.of(row)[place]]


def _take(rows: Int64s, tensor: torch.Tensor) -> torch.Tensor:
    return tensor[torch.from_numpy(rows).to(tensor.device)]


def _of_rows(owners: Int64s, tensor: torch.Tensor | None) -> torch.Tensor | None:
    return None if tensor is None else _take(owners, tensor)


def _spread(owners: Int64s, by_request: Mapping[int, T]) -> dict[int, T]:
    """The value of each row's request, by row."""
    if not by_request:
        return {}
    return {
        row: by_request[owner] for row, owner in enumerate(owners.tolist()) if owner in by_request
    }


def spread_metadata(metadata: SamplingMetadata, owners: Int64s) -> SamplingMetadata:
    """Sampling metadata of n rows that belong to the requests `owners` int64 [n].

    Of the settings of single requests, only seeds are kept.
    """
    pick = partial(_of_rows, owners)
    return replace(
        metadata,
        generators=_spread(owners, metadata.generators),
        temperature=pick(metadata.temperature),
        top_p=pick(metadata.top_p),
        top_k=pick(metadata.top_k),
        output_token_ids=[],
        logitsprocs=LogitsProcessors(),
        spec_token_ids=None,
        thinking_budget_state_holder=None,
    )


def node_metadata(
    metadata: SamplingMetadata,
    nodes: NodeRows,
    generators: Mapping[int, torch.Generator],
    processors: LogitsProcessors,
    thinking: NodeThinking | None,
) -> SamplingMetadata:
    """The sampling metadata of node rows, made from that of the requests.

    Parameters
    ----------
    generators
        Generators of the nodes of seeded requests, by node.
    """
    pick = partial(_of_rows, nodes.owners)
    bad_words = metadata.bad_words_token_ids
    with_history = {*bad_words, *nodes.rows_where(_has_penalty)}
    if thinking is not None:
        with_history.update(thinking._rows)
    histories: list[Sequence[int]] = [[] for _ in range(len(nodes))]
    for row in with_history.intersection(nodes.rows):
        own = nodes.of(row)
        histories[own.start : own.stop] = nodes.histories(row)
    alike = spread_metadata(metadata, nodes.owners)
    return replace(
        alike,
        generators={**alike.generators, **generators},
        prompt_token_ids=pick(metadata.prompt_token_ids),
        frequency_penalties=pick(metadata.frequency_penalties),
        presence_penalties=pick(metadata.presence_penalties),
        repetition_penalties=pick(metadata.repetition_penalties),
        output_token_ids=histories,
        allowed_token_ids_mask=pick(metadata.allowed_token_ids_mask),
        bad_words_token_ids=_spread(nodes.owners, bad_words),
        logitsprocs=processors,
        logprob_token_ids=_spread(nodes.owners, metadata.logprob_token_ids or {}),
        thinking_budget_state_holder=thinking,
    )


def _has_penalty(params: SamplingParams) -> bool:
    return bool(
        params.presence_penalty or params.frequency_penalty or params.repetition_penalty != 1
    )


def generator_states_for(
    sampler: Sampler,
    generators: dict[int, torch.Generator],
    nodes: NodeRows,
    vocab: int,
) -> dict[int, GeneratorStates]:
    """The generator states of each seeded request, for the draws at its nodes.

    Call it after the roots were sampled, which took the step's first draw of each generator.
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
        row: GeneratorStates(generators[row], draw, int(nodes.tree(row).depths.max()))
        for row in generators.keys() & nodes.rows
    }


class Draws(NamedTuple):
    """What was sampled in a step."""

    at_roots: SamplerOutput
    """A row for each request."""
    at_nodes: SamplerOutput
    """A row for each node."""
    states: Mapping[int, GeneratorStates] = {}
    """By row of the batch, of requests with a generator and a tree."""
    thinking: NodeThinking | None = None
    requests: Sequence[CachedRequestState] = ()
    """Those of the batch, by row, if there are `states`."""

    def advance(self, rows: Int64s, paths: Int32s, emitted: Int32s, max_model_len: int) -> None:
        """Advance generators and thinking budgets past the accepted nodes.

        A generator does not advance past a stop: the next turn of a session goes on with it.

        Parameters
        ----------
        rows : int64 [t]
            The row of each tree's request.
        paths : int32 [t, longest]
            The accepted nodes of each tree, as in `accepted_paths`.
        emitted : int32 [r, 1 + longest]
            The tokens of each request of the batch, as in `emitted_tokens`.
        """
        if not self.states and self.thinking is None:
            return
        for row, path in zip(rows.tolist(), paths, strict=True):
            length = int((path >= 0).sum())
            if row in self.states:
                tokens = emitted[row, : 1 + length].tolist()
                self.states[row].advance(_first_stop(self.requests[row], tokens, max_model_len))
            if self.thinking is not None and length:
                self.thinking.accept(row, int(path[length - 1]))


def _first_stop(request: CachedRequestState, tokens: list[int], max_model_len: int) -> int:
    """The index of the first of these next tokens at which vLLM stops; the last index if none."""
    params = request.sampling_params
    assert params is not None  # pooling requests have no generators
    for i in range(len(tokens)):
        output = [*request.output_token_ids, *tokens[: i + 1]]
        after: Any = SimpleNamespace(
            sampling_params=params,
            pooling_params=None,
            output_token_ids=output,
            num_output_tokens=len(output),
            num_tokens=request.num_tokens + i + 1,
            max_tokens=params.max_tokens,
        )
        if check_stop(after, max_model_len):
            return i
    return len(tokens) - 1


def tokens_of(output: SamplerOutput) -> Int32s:
    """The sampled tokens, int32 [rows], on the host."""
    tokens: Int32s = output.sampled_token_ids[:, 0].int().cpu().numpy()
    return tokens


def merged_logprobs(
    roots: SamplerOutput, nodes: SamplerOutput, forest: DraftForest, rows: Int64s, paths: Int32s
) -> LogprobsTensors | None:
    """The logprobs of the emitted tokens, as many rows a request as the most tokens emitted.

    None if no logprobs were requested.

    Parameters
    ----------
    roots, nodes
        Samples at the roots of all requests, and at the nodes.
    forest, rows : int64 [t]
        The trees and the rows of their requests.
    paths : int32 [t, longest]
        The accepted nodes of each tree, as in `accepted_paths`.
    """
    if roots.logprobs_tensors is None:
        return None
    num_reqs = len(roots.sampled_token_ids)
    # The sampled row of each emitted token: roots first, then nodes.
    places: Int64s = np.zeros((num_reqs, 1 + paths.shape[1]), np.int64)
    places[:, 0] = np.arange(num_reqs)
    places[rows, 1:] = np.where(paths < 0, 0, num_reqs + forest.firsts[:-1, None] + paths)
    flat = torch.from_numpy(places.reshape(-1)).to(roots.sampled_token_ids.device)
    joined = _joined(roots.logprobs_tensors, nodes.logprobs_tensors, num_reqs + forest.num_nodes)
    return LogprobsTensors(*(tensor[flat] for tensor in joined))


def _joined(
    roots: LogprobsTensors, nodes: LogprobsTensors | None, num_rows: int
) -> Iterable[torch.Tensor]:
    """Token ids, logprobs and ranks of roots and nodes, padded to the wider of the two.

    Widths differ if a request with `logprob_token_ids` has no nodes.
    """
    for name, filler in (
        ("logprob_token_ids", 0),
        ("logprobs", float("-inf")),
        ("selected_token_ranks", 0),
    ):
        parts = [getattr(part, name) for part in (roots, nodes) if part is not None]
        width = max(part.shape[-1] for part in parts)
        joined = parts[0].new_full((num_rows, width)[: parts[0].ndim], filler)
        start = 0
        for part in parts:
            here = joined[start : start + len(part)]
            here[..., : part.shape[-1]].copy_(part)
            start += len(part)
        yield joined
