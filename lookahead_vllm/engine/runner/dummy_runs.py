"""What a runner computes before the first request: kernels, memory, the cost of a step."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from vllm.platforms import current_platform

from lookahead_vllm.draft.tree import DraftTree
from lookahead_vllm.engine import patches
from lookahead_vllm.engine.cost.timed_passes import CapturedTokens
from lookahead_vllm.engine.drafter.drafter import LookaheadDrafter
from lookahead_vllm.engine.recurrent import states as recurrent
from lookahead_vllm.engine.runner.warm_up import WarmUpDrafts
from lookahead_vllm.engine.step.late_shape import LateShape
from lookahead_vllm.engine.step.placed_trees import NO_DRAFTS, PlacedTrees
from lookahead_vllm.engine.step.sampler import max_chunk_rows

if TYPE_CHECKING:
    from vllm.v1.worker.gpu.input_batch import InputBatch
    from vllm.v1.worker.gpu.model_runner import GPUModelRunner as _Base

    from lookahead_vllm.engine.runner.trained_drafter import TrainedDrafter
else:
    _Base = object


class DummyRuns(_Base):
    """The part of a lookahead runner that runs at start-up.

    vLLM measures memory, and captures graphs, with dummy runs: steps of requests that do not exist.
    """

    drafter: LookaheadDrafter
    trained: TrainedDrafter | None = None
    """A drafter with weights, if the options have one."""
    dummies_are_tokens = False
    """Whether the model computes the tokens of a dummy run as it computes those of a step."""
    dummies_have_drafts = False
    """Whether a dummy run in a graph has the requests of the dummy step with their contexts."""
    _dummy_step = NO_DRAFTS
    """The drafts of dummy runs."""
    _shape: LateShape

    def _attend(self, step: PlacedTrees) -> None:
        raise NotImplementedError

    def schedule_dummy_trees(self, trees: Sequence[DraftTree], context: int = 0) -> None:
        """Give the next dummy runs one request for each tree, with `context` committed tokens."""
        self._dummy_step = PlacedTrees.of_dummies(trees, context)

    def prepare_dummy_attn(self, input_batch: InputBatch, *args: Any, **kwargs: Any) -> Any:
        self._attend(self._dummy_step)
        tables, slots = super().prepare_dummy_attn(input_batch, *args, **kwargs)
        if self.dummies_are_tokens:
            input_batch.is_padding.fill_(False)
            most = self.kv_cache_config.num_blocks - 1
            for table, group in zip(tables, self.kv_cache_config.kv_cache_groups, strict=True):
                if recurrent.is_of_states(group):  # whose null block counts as padding
                    blocks = torch.arange(table.numel(), device=table.device) % most + 1
                    table.copy_(blocks.view(table.shape))
        return tables, slots

    def _dummy_sampler_run(self, hidden_states: torch.Tensor) -> None:
        """Sample one row of each request, as vLLM does when it measures the memory that a step
        needs, and allocate the logits of a step with the most nodes.

        On a CPU, what is allocated once counts as taken, and steps have few nodes.
        """
        super()._dummy_sampler_run(hidden_states)
        if current_platform.is_cpu():
            return
        rows = min(len(hidden_states) + self.drafter.max_step_nodes, self.max_num_tokens)
        if self.lora_config is None:
            zeros = hidden_states.new_zeros(rows, hidden_states.shape[1])
            logits = self.model.compute_logits(zeros)
        else:  # adapters are laid out for one row of logits a request
            logits = torch.empty(rows, self.vocab_size, dtype=self.dtype, device=self.device)
        chunk = logits[: max_chunk_rows(self.vocab_size)].float()
        del logits, chunk

    # ---- kernels ---------------------------------------------------------------------------------

    def compile_node_kernels(self) -> None:
        """Compile the kernels that a step with drafts launches around the forward pass."""
        self._shape.warm_up()
        if self.is_last_pp_rank:  # the others do not sample
            sampler: Any = self.rejection_sampler
            sampler.history.warm_up(self.vocab_size, self.device)

    @contextmanager
    def warming_up(self) -> Iterator[None]:
        """In the block, vLLM's made-up requests get drafts, and nothing is learned from them."""
        drafter = self.drafter
        most = drafter.max_step_nodes
        if current_platform.is_cpu():  # whose kernels are compiled for any number of rows
            most = min(most, 2 * self.max_num_reqs)
        drafts = WarmUpDrafts(drafter.may_branch, most)
        masks: Any = self.structured_outputs_worker
        with (
            patches.swapped(self, "_late", drafts),
            patches.swapped(masks, "apply_grammar_bitmask", masks.warm_up)
            if self.is_last_pp_rank
            else nullcontext(),
        ):
            yield

    # ---- the cost of a step ----------------------------------------------------------------------

    def without_full_graphs(self) -> AbstractContextManager[Any]:
        """In the block, steps run without CUDA graphs of the whole model."""
        return nullcontext()

    def attends_in_graphs(self) -> bool:
        """Whether dummy runs in such graphs attend to their context."""
        return True

    def captured_tokens(self) -> CapturedTokens:
        """The numbers of tokens for which there are such graphs."""
        return CapturedTokens()
