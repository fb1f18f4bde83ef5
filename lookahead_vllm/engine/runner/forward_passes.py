"""Dummy passes of vLLM's Model Runner V2, to measure the cost of a step."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import torch

from lookahead_vllm.engine import patches
from lookahead_vllm.engine.cost.timed_passes import Batch, CapturedTokens

if TYPE_CHECKING:
    from lookahead_vllm.engine.runner.dummy_runs import DummyRuns


class RunnerPasses:
    """The `ForwardPasses` of a runner."""

    def __init__(self, runner: DummyRuns) -> None:
        self._runner = runner
        self._has_whole_chains = False
        self.attends_in_graphs: bool = runner.attends_in_graphs()

    def whole_chains(self) -> AbstractContextManager[Any]:
        return patches.swapped(self, "_has_whole_chains", True)

    def captured_tokens(self) -> CapturedTokens:
        captured: CapturedTokens = self._runner.captured_tokens()
        return captured

    def decode(self, num_tokens: int) -> None:
        with self._runner.without_full_graphs():
            self._run(num_tokens)

    def decode_in_graph(self, num_tokens: int) -> None:
        self._run(min(num_tokens, self._runner.max_num_reqs))

    def drafts_in_graph(self, num_tokens: int) -> None:
        """See `ForwardPasses`. Drafts are chains, of one token each if they can be."""
        requests = min(num_tokens // 2, self._runner.max_num_reqs)
        with patches.swapped(self._runner, "max_num_reqs", requests):
            self._run(num_tokens)

    @contextmanager
    def with_context(
        self, batch: Batch, context: int, in_graph: bool
    ) -> Iterator[Callable[[], None]]:
        runner = self._runner
        with_drafts = in_graph and batch.rows > 1
        if batch.trees or with_drafts:
            runner.schedule_dummy_trees([batch.tree] * batch.requests, context)
        # vLLM would give a context to all requests that fill a graph.
        options = {} if with_drafts else {"context_len": context}
        try:
            with (
                patches.swapped(runner, "max_num_reqs", batch.requests),
                patches.swapped(runner, "dummies_have_drafts", with_drafts),
                nullcontext() if in_graph else runner.without_full_graphs(),
            ):
                yield lambda: self._run(batch.num_tokens, **options)
        finally:
            runner.schedule_dummy_trees([])

    def _run(self, num_tokens: int, **kwargs: Any) -> None:
        runner = self._runner
        trained = None if self._has_whole_chains else runner.trained
        # vLLM sends padding to no expert, and equal tokens to the same ones.
        with (
            patches.swapped(runner, "dummies_are_tokens", True),
            nullcontext() if trained is None else patches.swapped(trained, "dummy_length", 1),
        ):
            hidden, last = runner._dummy_run(
                num_tokens, skip_eplb=True, randomize_inputs=True, **kwargs
            )
        if runner.is_last_pp_rank:
            # vLLM has set the adapters for one row of logits a request.
            runner.model.compute_logits(last if runner.lora_config else hidden[:num_tokens])
        torch.accelerator.synchronize()
