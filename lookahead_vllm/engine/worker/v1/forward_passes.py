"""Dummy passes of vLLM's first model runner, to measure the cost of a step."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import numpy as np

from lookahead_vllm.engine.worker.timed_passes import Batch, CapturedTokens

if TYPE_CHECKING:
    from lookahead_vllm.engine.worker.v1.runner import SynchronousRunner


class RunnerPasses:
    """See `ForwardPasses`."""

    attends_in_graphs = False

    def __init__(self, runner: SynchronousRunner) -> None:
        self._runner = runner

    def captured_tokens(self) -> CapturedTokens:
        """See `ForwardPasses`. There are no graphs on a CPU."""
        return CapturedTokens()

    def decode(self, num_tokens: int, attends: bool) -> None:
        """See `ForwardPasses`."""
        self._run(num_tokens, force_attention=attends, profile_seq_lens=1)

    def whole_chains(self) -> AbstractContextManager[Any]:
        """See `ForwardPasses`. There is no drafter."""
        return nullcontext()

    def decode_in_graph(self, num_tokens: int) -> None:
        """See `ForwardPasses`. Never called."""
        raise NotImplementedError

    def drafts_in_graph(self, num_tokens: int) -> None:
        """See `ForwardPasses`. Never called."""
        raise NotImplementedError

    @contextmanager
    def with_context(
        self, batch: Batch, context: int, in_graph: bool
    ) -> Iterator[Callable[[], None]]:
        """See `ForwardPasses`. Every request gets KV blocks of its own. Never in a graph."""
        runner = self._runner
        config, tables = runner.scheduler_config, runner.input_batch.block_table.block_tables
        saved = config.max_num_seqs
        config.max_num_seqs = batch.requests
        for table in tables:
            block_ids = table.block_table.np[: batch.requests]
            # Recurrent layers have a block for each row, and skip the null block.
            width = max(-(-(context + batch.rows) // table.block_size), batch.rows)
            width = min(width, block_ids.shape[1])
            ids = 1 + np.arange(batch.requests * width) % (runner.kv_cache_config.num_blocks - 1)
            block_ids[:, :width] = ids.reshape(batch.requests, width)
        if batch.trees:
            runner.schedule_dummy_trees([batch.tree] * batch.requests, context)
        try:
            yield lambda: self._run(
                batch.requests * batch.rows,
                force_attention=True,
                profile_seq_lens=context + batch.rows,
            )
        finally:
            config.max_num_seqs = saved
            runner.schedule_dummy_trees([])
            for table in tables:
                table.block_table.np[: batch.requests] = 0
                table.commit_block_table(batch.requests)

    def _run(self, num_tokens: int, **kwargs: Any) -> None:
        runner = self._runner
        hidden, last = runner._dummy_run(num_tokens, skip_eplb=True, **kwargs)
        # vLLM has set the adapters for one row of logits a request.
        runner.model.compute_logits(last if runner.lora_config else hidden[:num_tokens])
        runner._sync_device()
