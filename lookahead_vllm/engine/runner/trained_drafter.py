"""vLLM's own speculator for a trained drafter, after steps whose drafts were trees.

The speculator expects a batch in which the accepted drafts of each request are the first rows after
its root. So the rows are gathered by the accepted path, positions become linear again, and the
drafter's layers get attention metadata without trees. Slots are linear already, and the drafter
writes its own KV anew for all rows of the batch. What it proposes goes to the host, where it is
evidence for the trees of the next step (`draft/growth/chains.py`).
"""

from collections.abc import Callable
from copy import copy
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from vllm.config import CUDAGraphMode, VllmConfig
from vllm.v1.worker.gpu import async_utils, spec_decode
from vllm.v1.worker.gpu.attn_utils import build_slot_mappings_by_layer
from vllm.v1.worker.gpu.input_batch import InputBatch
from vllm.v1.worker.gpu.model_runner import GPUModelRunner
from vllm.v1.worker.gpu.spec_decode.target_dependent_ar import speculator as target_dependent
from vllm.v1.worker.gpu.states import RequestState

from lookahead_vllm.draft.growth.recycling import GAPS
from lookahead_vllm.draft.progress import NUM_ALTERNATIVES, PROPOSED, no_chains
from lookahead_vllm.draft.tree import UNKNOWN
from lookahead_vllm.engine import patches
from lookahead_vllm.engine.config import options_of
from lookahead_vllm.engine.step.step import Chains, ThisStep


def make_speculator(config: VllmConfig, device: torch.device, states: RequestState) -> Any:
    """vLLM's speculator for the trained drafter of the options."""
    own = copy(config)  # shallow: everything else in it is vLLM's
    own.speculative_config = copy(config.speculative_config)
    own.speculative_config.num_speculative_tokens = options_of(config).chain_length
    return spec_decode.init_speculator(own, device, states)


class TrainedDrafter:
    """Wraps the methods of a speculator of vLLM's that depend on what was verified.

    Parameters
    ----------
    runner
        vLLM's.
    this_step
        Returns the step that it follows.

    Attributes
    ----------
    chains : Chains or None
        What it proposed after the last step.
    tokens : Tensor
        int32 [max_num_reqs, K]: its chain after each request that the runner knows.
    dummy_length : int
        The passes of a dummy run.
    """

    def __init__(
        self, runner: GPUModelRunner, this_step: ThisStep, speculator: Any, states: RequestState
    ) -> None:
        self.chains: Chains | None = None
        self.dummy_length: int = speculator.num_speculative_steps
        self._runner, self._this_step, self._speculator = runner, this_step, speculator
        self._none = torch.zeros_like(states.draft_tokens)
        most, device = speculator.max_num_reqs, speculator.device
        chains = no_chains(speculator.num_speculative_steps, most)
        self._chains = torch.from_numpy(chains).to(device)
        """Written by `_choose` at fixed addresses, because a graph may contain it."""
        self.tokens = self._chains[:, :, 0, PROPOSED].clone()
        self._gaps = torch.tensor(GAPS, device=device)
        self._propose = speculator.propose
        speculator.propose = self.propose
        speculator.sample_draft = self._choose
        speculator.init_cudagraph_manager = partial(
            self._init_graphs, speculator.init_cudagraph_manager
        )

    @property
    def layers(self) -> set[str]:
        """The names of the drafter's attention layers."""
        names: set[str] = self._speculator.draft_attn_layer_names
        return names

    def propose(self, *args: Any, dummy_run: bool = False, **kwargs: Any) -> torch.Tensor:
        """Start the drafter; returns placeholders, int64 [r, num_speculative_tokens].

        The arguments are those of vLLM's `BaseSpeculator.propose`.
        """
        length = self._speculator.num_speculative_steps
        if dummy_run:  # with keywords
            kwargs |= {"num_speculative_tokens": self.dummy_length, "dummy_run": True}
            placeholders: torch.Tensor = self._propose(*args, **kwargs)
            return placeholders
        batch, metadata, slots, hidden, aux, *others = args
        batch, hidden, aux = self._by_accepted_path(batch, hidden, aux)
        metadata, slots = self._without_trees(batch, metadata)
        if not self._is_chain_wanted(batch):
            length = 1  # it comes with the pass that writes the drafter's KV
        kwargs["num_speculative_tokens"] = length
        self._propose(batch, metadata, slots, hidden, aux, *others, **kwargs)
        chains = self._chains[: batch.num_reqs]
        chains[:, length:] = UNKNOWN
        self.tokens[batch.idx_mapping.long()] = chains[:, :, 0, PROPOSED]
        self.chains = self._send(chains, length)
        return self._none[: batch.num_reqs]

    def _is_chain_wanted(self, batch: InputBatch) -> bool:
        """Whether the next step may have drafts, and the further passes are worth their time."""
        step = self._this_step()
        # With several engines, all have to run the same passes of experts.
        if self._runner.dp_size > 1:
            return True
        return step.whole.whole_chain if step.has_slots else batch.has_prefill

    def _by_accepted_path(
        self, batch: InputBatch, hidden: torch.Tensor, aux: list[torch.Tensor] | None
    ) -> tuple[InputBatch, torch.Tensor, list[torch.Tensor] | None]:
        """The batch and its states with each request's accepted nodes right after its root."""
        step = self._this_step()
        if step.order is None:
            return batch, hidden, aux
        assert step.layout is not None
        rows = batch.logits_indices
        sources = torch.arange(len(hidden), device=hidden.device)
        sources[rows] = rows[step.order]
        ids, positions = batch.input_ids.clone(), batch.positions.clone()
        ids[rows] = batch.input_ids[sources[rows]]
        positions[rows] -= step.layout.shifts
        batch = replace(batch, input_ids=ids, positions=positions)
        return batch, hidden[sources], None if aux is None else [a[sources] for a in aux]

    def _without_trees(
        self, batch: InputBatch, metadata: dict[str, Any]
    ) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
        """Attention's metadata for the drafter's layers, made by builders that know no trees."""
        runner, own = self._runner, self._speculator.attn_groups
        config = runner.kv_cache_config
        tables = tuple(table[: batch.num_reqs] for table in runner.block_tables.input_block_tables)
        slots = runner.block_tables.slot_mappings[:, : batch.num_tokens]
        exact = replace(
            batch,
            num_reqs_after_padding=batch.num_reqs,
            num_tokens_after_padding=batch.num_tokens,
        )
        made = runner.model_state.prepare_attn(
            exact, CUDAGraphMode.NONE, tables, slots, own, config
        )
        return {**metadata, **made}, build_slot_mappings_by_layer(slots, config)

    def _choose(
        self,
        hidden_states: torch.Tensor,
        sample_src_positions: torch.Tensor,
        idx_mapping: torch.Tensor,
        temperature: torch.Tensor,
        seeds: torch.Tensor,
        draft_step: torch.Tensor,
        draft_logits: torch.Tensor | None,
        spec_step_idx: int = 0,
        **_: Any,  # 0.33: num_steps, 1 where tokens are drafted one after another
    ) -> torch.Tensor:
        """Replaces `sample_draft`: keeps the likeliest tokens of a depth, and drafts the first.

        So it does for a sampled request; any draft is exact there.
        """
        logits = self._speculator.compute_draft_logits(hidden_states, spec_step_idx)
        best, tokens = logits.topk(NUM_ALTERNATIVES, dim=-1)
        gaps = best[:, :1].float() - best.float()
        gaps[:, 0] = gaps[:, 1]
        classes = torch.bucketize(gaps, self._gaps, right=True)
        chosen = torch.stack((tokens, classes), -1).int().unsqueeze(1)
        self._chains[: len(logits)].index_copy_(1, draft_step.view(1).long(), chosen)
        return tokens[:, 0].contiguous()  # vLLM's kernels take no stride

    def _send(self, chains: torch.Tensor, length: int) -> Chains:
        """Start to copy the chains to the host, on the stream that copies the tokens."""
        copies, main = self._runner.output_copy_stream, self._runner.main_stream
        chains = chains.clone()  # the next step's drafter may write earlier
        event = torch.cuda.Event(blocking=True)
        with async_utils.stream(copies, main):
            copies.wait_stream(main)
            by_request = async_utils.async_copy_to_np(chains)
            event.record(copies)
        return Chains(length, by_request, event, chains)

    def _init_graphs(self, init: Callable[[CUDAGraphMode], None], mode: CUDAGraphMode) -> None:
        """Replaces `init_cudagraph_manager`: the first pass never replays a step with drafts.

        vLLM captures it for K + 1 tokens a request, with the metadata of the target's trees.
        """
        manager = target_dependent.SpeculatorCudaGraphManager

        def make(config: Any, device: Any, mode: CUDAGraphMode, *args: Any, **kwargs: Any) -> Any:
            length = kwargs.get("decode_query_len", args[0] if args else 1)
            pieces = mode.mixed_mode() == CUDAGraphMode.PIECEWISE
            in_pieces = CUDAGraphMode.PIECEWISE if pieces else CUDAGraphMode.NONE
            return manager(config, device, in_pieces if length > 1 else mode, *args, **kwargs)

        with patches.swapped(target_dependent, "SpeculatorCudaGraphManager", make):
            init(mode)
