"""The shape before the tokens: vLLM prepares a step while the device computes the one before.

In a step that only decodes, all that depends on the last tokens, and on how many nodes each request
gets, is data on the device. So vLLM prepares the step for all slots, without waiting. At the model
call the tokens have arrived: the drafts are grown, and one kernel writes the rows that they need
(`verify/place/`). What the host still wants to know is made exact after the launch.
"""

from collections.abc import Callable
from copy import copy
from typing import Any

import numpy as np
import torch
from vllm.utils.platform_utils import is_uva_available
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.worker.gpu import buffer_utils
from vllm.v1.worker.gpu.cudagraph_utils import BatchExecutionDescriptor
from vllm.v1.worker.gpu.model_runner import GPUModelRunner
from vllm.v1.worker.gpu.model_states.default import DefaultModelState

from lookahead_vllm.draft.jit import Int32s
from lookahead_vllm.draft.tree import DraftForest
from lookahead_vllm.engine.config import options_of
from lookahead_vllm.engine.step.placed_trees import PlacedTrees
from lookahead_vllm.engine.step.step import State, Step
from lookahead_vllm.verify.layout.fixed_batch import FixedBatch
from lookahead_vllm.verify.layout.node_layout import NodeLayout, width_of
from lookahead_vllm.verify.place import Placer, RequestTable, Split, StepRows

MAX_KNOWN_VIEWS = 1024


class LateMetadata(dict[str, Any]):
    """Attention's metadata by layer, made when the first layer asks for it.

    By then, the layers before it have been launched.
    """

    def __init__(self, build: Callable[[], dict[str, Any]]) -> None:
        super().__init__()
        self._build = build

    def __missing__(self, layer: str) -> Any:
        if not len(self):
            self.update(self._build())
            return self[layer]
        raise KeyError(layer)

    def get(self, layer: str, default: Any = None) -> Any:
        """As `dict.get`."""
        try:
            return self[layer]
        except KeyError:
            return default


class LateShape:
    """Writes the rows of the steps of a runner that are prepared before their drafts are known.

    Parameters
    ----------
    runner
        vLLM's, which has its KV cache.
    chains : Tensor or None
        The tokens of a trained drafter, see `TrainedDrafter`.

    Attributes
    ----------
    is_possible : bool
        Whether this engine has such steps.
    """

    def __init__(self, runner: GPUModelRunner, chains: torch.Tensor | None) -> None:
        self.is_possible = _is_possible(runner)
        buffers, tables = runner.input_buffers, runner.block_tables
        self._states = states = runner.req_states
        self._rows = StepRows(
            buffers.input_ids,
            buffers.positions,
            buffers.is_padding,
            buffers.query_start_loc,
            buffers.seq_lens,
            tables.slot_mappings,
            buffers.positions.new_empty(len(buffers.input_ids)),
            *buffers.input_ids.new_empty(3, len(buffers.input_ids)),
        )
        self._all_rows = torch.arange(len(buffers.input_ids), device=runner.device)
        """int64 [t]: 0, 1, ..."""
        self._known_views: dict[tuple[int, int, int, int], dict[str, Any]] = {}
        table = RequestTable(
            states.num_computed_tokens.gpu,
            states.last_sampled_tokens,
            self._rows.ids.new_zeros(1, 1) if chains is None else chains,
            tuple(table.gpu for table in tables.block_tables),
            tuple(tables.block_sizes),
        )
        self._placer = Placer(table, self._rows)
        most_requests = len(self._rows.lengths)
        size = Split.size(most_requests, len(self._rows.ids))
        memory = buffer_utils.UvaBuffer if is_uva_available() else buffer_utils.NonUvaBuffer
        self._memory: Any = memory(size, torch.int32)
        """Of a step with slots, on the host and as the device reads it, also in graphs. It is
        written again only when the device has read it: then the step's tokens have arrived, or,
        before drafts that are not waited for, `_was_read`."""
        self._was_read = None if chains is None else torch.cuda.Event(external=True)
        """Recorded behind what reads a step's rows, also in graphs."""
        self._with_slots = Split(self._memory.np, most_requests)
        self._without_slots = Split(np.zeros(size, np.int32), most_requests)
        self._copies = buffer_utils.UvaBufferPool(size, torch.int32)
        """Of steps without slots, which wait for no tokens: as many as steps may be under way."""
        self._packed: torch.Tensor
        """The split of the step as the device reads it."""
        self.split = self._with_slots
        """The rows of the step."""
        self.split.clear()

    def warm_up(self) -> None:
        """Compile what a step launches, by a step without requests: all rows become padding."""
        none = np.empty(0, np.int64)
        self._with_slots.write(DraftForest.of([]), none, none)
        for lengths in (None, torch.zeros_like(self._rows.lengths)):
            self._placer.place(self._memory.uva(), 0, len(self._rows.ids), lengths)
        torch.accelerator.synchronize()  # the device reads `split`
        self.clear()

    def can_prepare(self, scheduled: SchedulerOutput) -> bool:
        """Whether vLLM may prepare a step before its drafts are known; all ranks answer alike."""
        if (
            not self.is_possible
            or not scheduled.num_scheduled_tokens
            or scheduled.scheduled_new_reqs
            or scheduled.has_structured_output_requests
        ):
            return False
        return not self.reads_prompts(scheduled)

    def reads_prompts(self, scheduled: SchedulerOutput) -> bool:
        """Whether a request of the step does not decode yet."""
        states = self._states
        entries = [states.req_id_to_index[i] for i in scheduled.num_scheduled_tokens]
        read = states.num_computed_prefill_tokens[entries]
        return bool((read < states.prefill_len.np[entries]).any())

    # ---- at the model call -----------------------------------------------------------------------

    def share_out(self, step: Step, trees: FixedBatch | None = None) -> Split:
        """The rows of a step whose drafts have come, or that has no slots, in the order of the
        batch. Its branching trees are written to `trees`."""
        step.state = State.DRAFTED
        if step.repeats and not step.has_slots:
            return self.split  # that of the step before
        step.rows = step.drafts.rows_in(step.prepared.req_ids)
        split = self.split = self._with_slots if step.has_slots else self._without_slots
        drafts, entries = step.drafts, step.prepared.idx_mapping_np
        if self._was_read is not None and not drafts.waited:
            self._was_read.synchronize()
        if trees is None:
            split.write(drafts.forest, step.rows, entries)
        else:
            trees.write(split, drafts.forest, step.rows, entries, drafts.num_tokens - 1)
        self._packed = (
            self._memory.uva() if step.has_slots else self._copies.copy_to_uva(split.packed)
        )
        return split

    def place(self, num_filled: int) -> None:
        """Write these rows to vLLM's buffers."""
        self._placer.place(self._packed, self.split.num_requests, num_filled)
        self._note_read()

    def place_in_graph(
        self, graph: BatchExecutionDescriptor, lengths: torch.Tensor, contexts_only: bool
    ) -> None:
        """Call this while a graph is captured: it will write the rows of the step that it runs.

        The lengths for attention go to `lengths`, see `Placer.place`.
        """
        most_requests, num_filled = graph.num_reqs or graph.num_tokens, graph.num_tokens
        packed = self._memory.uva()
        self._placer.place(packed, most_requests, num_filled, lengths, contexts_only)
        self._note_read()

    def _note_read(self) -> None:
        if self._was_read is not None:
            self._was_read.record()

    def rows_in_graph(self, graph: BatchExecutionDescriptor) -> tuple[StepRows, torch.Tensor]:
        """The rows that a graph computes, at their addresses, and int64 [n]: 0, 1, ..."""
        num_rows, num_requests = graph.num_tokens, graph.num_reqs or graph.num_tokens
        rows = StepRows(*(part[:num_rows] for part in self._rows))._replace(
            starts=self._rows.starts[: num_requests + 1],
            lengths=self._rows.lengths[:num_requests],
            slots=self._rows.slots[:, :num_rows],
        )
        return rows, self._all_rows[:num_rows]

    def clear(self) -> None:
        """The next graph finds its rows in vLLM's buffers."""
        self.split = self._with_slots
        self.split.clear()
        self._memory.uva()

    def inputs(self) -> dict[str, torch.Tensor]:
        """The model's inputs, without padding."""
        count = self.split.num_rows
        return {"input_ids": self._rows.ids[:count], "positions": self._rows.positions[:count]}

    def trees(self, step: Step) -> PlacedTrees:
        """The trees of the step, in its rows."""
        return step.drafts.placed(step.rows, self.split.starts)

    def layout(self, forest: DraftForest) -> NodeLayout:
        """Where the nodes of the step are; all of its rows have logits."""
        rows = slice(self.split.num_rows)
        parents, places, depths = (part[rows] for part in self._rows[-3:])
        return NodeLayout(parents, places, depths, width_of(forest))

    def is_padding(self) -> torch.Tensor:
        """Of the rows without padding, bool [n]: False."""
        return self._rows.is_padding[: self.split.num_rows]

    # ---- after the launch ------------------------------------------------------------------------

    def settle(self, step: Step) -> None:
        """Leave only the rows in use in the batch of a step, and the padding of its graph."""
        graph, batch, split, drafts = step.graph, step.prepared, self.split, step.drafts
        num_reqs, num_rows = split.num_requests, split.num_rows
        padded_reqs = num_reqs if graph is None else graph.num_reqs or num_reqs
        padded = num_rows if graph is None else graph.num_tokens
        starts = np.full(padded_reqs + 1, num_rows, np.int32)
        starts[: num_reqs + 1] = split.starts
        sizes: Int32s = np.diff(split.starts)
        contexts = batch.num_computed_tokens_np.copy()  # an upper bound
        is_known = drafts.num_tokens > 0
        contexts[step.rows[is_known]] = drafts.num_tokens[is_known] - 1
        lengths = np.zeros(padded_reqs, np.int32)
        lengths[:num_reqs] = contexts + sizes
        num_nodes = num_rows - num_reqs
        exact = copy(batch)
        vars(exact).update(
            self._views(num_reqs, padded_reqs, num_rows, padded),
            num_scheduled_tokens=sizes,
            num_draft_tokens=num_nodes,
            num_draft_tokens_per_req=sizes - 1 if num_nodes else None,
            query_start_loc_np=starts,
            seq_lens_cpu_upper_bound=torch.from_numpy(lengths),
            num_computed_tokens_np=contexts,
            cu_num_logits_np=starts[: num_reqs + 1],
            max_query_len=None if graph is None else graph.max_query_len,
        )
        step.batch, step.state = exact, State.EXACT

    def _views(self, num_reqs: int, padded_reqs: int, num_rows: int, padded: int) -> dict[str, Any]:
        """The fields of a batch that are views of the buffers, made once for each size."""
        shape, rows = (num_reqs, padded_reqs, num_rows, padded), self._rows
        if shape not in self._known_views:
            self._known_views[shape] = dict(
                num_reqs_after_padding=padded_reqs,
                num_tokens=num_rows,
                num_tokens_after_padding=padded,
                query_start_loc=rows.starts[: padded_reqs + 1],
                seq_lens=rows.lengths[:padded_reqs],
                input_ids=rows.ids[:padded],
                positions=rows.positions[:padded],
                is_padding=rows.is_padding[:padded],
                logits_indices=self._all_rows[:num_rows],
                cu_num_logits=rows.starts[: num_reqs + 1],  # every row has logits
                expanded_idx_mapping=rows.entries[:num_rows],
                expanded_local_pos=rows.places[:num_rows],
            )
            if len(self._known_views) > MAX_KNOWN_VIEWS:
                del self._known_views[next(iter(self._known_views))]
        return self._known_views[shape]


def _is_possible(runner: GPUModelRunner) -> bool:
    """Whether all that depends on the rows of a step is data that `place` writes."""
    config, parallel = runner.vllm_config, runner.parallel_config
    return (
        type(runner.model_state) is DefaultModelState
        and runner.model_state.rope_state is None
        and runner.lora_config is None  # adapters are laid out by the host, for each row
        and not runner.uses_inputs_embeds
        and options_of(config).parallel == 1  # replicas share the rows of a step
        and runner.dp_size == 1  # ranks agree on the size of a graph before it is known
        and parallel.pipeline_parallel_size == 1
        and parallel.decode_context_parallel_size == 1
        and parallel.prefill_context_parallel_size == 1
        and not parallel.use_ubatching
        and not parallel.enable_eplb
        and config.kv_transfer_config is None
        and config.ec_transfer_config is None
        and not config.aux_output_config.enabled
        and not config.cache_config.kv_sharing_fast_prefill
        and bool(runner.block_tables.slot_mapping_enabled.all())
    )
