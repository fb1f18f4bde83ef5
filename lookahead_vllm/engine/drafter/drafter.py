"""The proposer of a worker, with all that it needs: cost, cache file, fleet, counters."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from llvmlite.binding import ffi
from vllm.config import ParallelConfig, VllmConfig
from vllm.logger import init_logger
from vllm.platforms import current_platform

from lookahead_vllm import compilation, machine
from lookahead_vllm.draft.budget.cost import StepCost, StepWork
from lookahead_vllm.draft.cache.keeper import CacheKeeper
from lookahead_vllm.draft.fleet.exchange import Exchange
from lookahead_vllm.draft.growth.growers import MAX_THREADS
from lookahead_vllm.draft.proposers.proposer import NoProposer, Proposer
from lookahead_vllm.draft.proposers.registry import make_proposer
from lookahead_vllm.engine import config
from lookahead_vllm.engine.attention.branching import Branching
from lookahead_vllm.engine.drafter.cache import open_cache
from lookahead_vllm.engine.drafter.fleet import join_fleet
from lookahead_vllm.engine.drafter.recorder import Counters, StepRecorder

logger = init_logger(f"vllm.{__name__}")


def _hide_dunders_of_llvmlite() -> None:
    """Let a second engine start in this process after numba has been loaded.

    On CPU a starting worker reads every attribute of every module (`_rebind_kernels`). llvmlite's
    library handle resolves any name, `__dict__` included, and breaks that.
    """
    handle = type(ffi.lib)
    original = handle.__getattr__

    def getattr_without_dunders(self: Any, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return original(self, name)

    handle.__getattr__ = getattr_without_dunders


_hide_dunders_of_llvmlite()


MAX_LOGITS_BYTES = 512 << 20
"""The most bytes of logits at the nodes of a step."""

STALL_SECONDS, STALL_SLOWDOWN = 1.0, 20.0
"""A step that takes longer than this, and so many times as long as predicted, was stopped on its
way, for instance by a debugger."""

CORES_PER_GROWER = 4
"""Of each rank on a machine; vLLM's own threads need the others."""


def num_growers(parallel: ParallelConfig) -> int:
    """How many threads grow trees beside the step's own.

    They wait for the last fifth of each step. None on a CPU, whose cores run the model.
    """
    if current_platform.is_cpu():
        return 0
    ranks = parallel.local_world_size * parallel.data_parallel_size_local
    return min(MAX_THREADS, machine.num_cores() // (CORES_PER_GROWER * max(ranks, 1)))


class LookaheadDrafter:
    """Holds the proposer of a worker.

    Of the ranks that share a model, only one drafts: the first of the last pipeline stage. Its
    drafts are sent to all ranks.

    Attributes
    ----------
    may_branch : bool
        Whether this engine's attention can verify branching trees.
    is_drafting_rank : bool
        Whether this rank drafts.
    proposer : Proposer
        Drafts nothing before `begin`, and on ranks that do not draft.
    max_step_nodes : int
        The most nodes of a step; its logits have a row for each.
    """

    def __init__(self, vllm_config: VllmConfig) -> None:
        self.options = config.options_of(vllm_config)
        self.may_branch = False
        parallel = vllm_config.parallel_config
        ranks_of_a_stage = parallel.world_size // parallel.pipeline_parallel_size
        self.is_drafting_rank = parallel.rank == parallel.world_size - ranks_of_a_stage
        self.proposer: Proposer = NoProposer()
        self._cache: CacheKeeper | None = None
        self._exchange: Exchange | None = None
        self.recorder = StepRecorder()
        self._model = model = vllm_config.model_config
        row_bytes = model.get_vocab_size() * model.dtype.itemsize
        most = self.options.decoding_length
        self.max_step_nodes = min(
            max(MAX_LOGITS_BYTES // row_bytes, most),
            most * vllm_config.scheduler_config.max_num_seqs,
        )
        self.reads_reasoning = bool(vllm_config.structured_outputs_config.reasoning_parser)
        """Whether a grammar may begin only after the reasoning, which vLLM looks for."""
        compilation.wait()
        compilation.compile_verification()

    def use(self, branching: Branching) -> None:
        """Draft what this engine's attention can verify."""
        self.may_branch = branching.may_branch
        if not branching.has_drafts:
            self.max_step_nodes = 0

    def begin(self, vllm_config: VllmConfig, cost: StepCost | None) -> None:
        """Choose the proposer by the cost of a step, and make it on the rank that drafts.

        `cost` is None if the budget is fixed.
        """
        self.options = self.options.for_step_cost(cost.critical_decoding_length if cost else 0)
        if not self.is_drafting_rank:
            return
        num_tokens = vllm_config.scheduler_config.max_num_seqs * self.max_model_len
        self.proposer = make_proposer(self.options, num_tokens)
        self.proposer.cost = cost
        self.proposer.use_threads(num_growers(vllm_config.parallel_config))
        self._cache = open_cache(vllm_config, self.options, self.proposer)
        self._exchange = join_fleet(vllm_config, self.options, self.proposer)
        if self._exchange is not None:
            self.recorder.traffic = self._exchange.traffic
        self.recorder.follow(self.proposer)  # evictions before the restart are not counted again

    @property
    def max_model_len(self) -> int:
        """The most tokens of a request; at start-up, vLLM may fit it to the memory."""
        return self._model.max_model_len

    @property
    def counters(self) -> Counters:
        """Numbers of drafts since the worker started."""
        return self.recorder.counters

    @contextmanager
    def surviving(self, task: str) -> Iterator[None]:
        """Let the step go on without drafts if the proposer fails in the block; logged once."""
        try:
            yield
        except Exception as error:
            self.recorder.counters.failures += 1
            logger.error_once(
                "Lookahead: proposer '%s' failed to %s (%s: %s). Such steps have no drafts.",
                self.options.proposer,
                task,
                type(error).__name__,
                error,
            )

    def observe_step(self, work: StepWork | None, elapsed: float) -> None:
        """Learn what a step costs, and report it; `elapsed` in seconds.

        A step that stalled is not reported. It is learned, because the machine may be as slow as
        this from now on: `StepCost` bounds what one step changes.
        """
        cost = self.proposer.cost
        if work is None or cost is None:
            return
        predicted = cost.observe(work, elapsed)
        if elapsed <= max(STALL_SECONDS, STALL_SLOWDOWN * predicted):
            report = self.recorder.report
            report.costs.append((predicted, elapsed))
            report.plain_seconds += cost.predict(work.without_drafts())

    def shutdown(self) -> None:
        """Leave the fleet, and save the cache, because the engine ends."""
        if self._exchange is not None:
            self._exchange.close()
        if self._cache is not None:
            self._cache.close()
