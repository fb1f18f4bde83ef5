"""CUDA graphs of whole steps with drafts, in addition to those that plain vLLM has.

vLLM's manager captures a graph for each number of requests that decode one token. A step with
drafts has other numbers of tokens in each request. Graphs for such steps are captured for a few
numbers of tokens: vLLM's kernels read the lengths of the requests on the device, and tree attention
reads the trees from fixed buffers. Steps with prompts never use them.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

from vllm.config import CUDAGraphMode
from vllm.logger import init_logger
from vllm.v1.worker.gpu.cudagraph_utils import (
    BatchExecutionDescriptor,
    CudaGraphManager,
    ModelCudaGraphManager,
)

from lookahead_vllm.engine import patches
from lookahead_vllm.engine.attention.attended_trees import AttendedTrees
from lookahead_vllm.engine.cost.timed_passes import CapturedTokens

logger = init_logger(f"vllm.{__name__}")


MIN_ROWS_OF_OWN_TAILS = 128
"""Below, a tail takes the time of reading the weights of its logits, however many rows it has."""


def sizes_with_drafts(captured: Sequence[int], most: int) -> list[int]:
    """The capture sizes that get a graph for drafts, each about twice the one before.

    Parameters
    ----------
    captured
        The sizes that vLLM captures.
    most
        The most tokens of a step with drafts.
    """
    return _spaced([size for size in captured if 2 <= size <= most], 2)


def _spaced(sizes: Sequence[int], growth: float) -> list[int]:
    """Some of the sizes, each at most `growth` times the one before, if there is such a one."""
    sizes = sorted(sizes)
    chosen = sizes[:1]
    while chosen and chosen[-1] < sizes[-1]:
        larger = [size for size in sizes if size > chosen[-1]]
        chosen.append(max((s for s in larger if s <= growth * chosen[-1]), default=larger[0]))
    return chosen


class _AnnouncedCapture(CudaGraphManager):
    """Announces each graph before its inputs are prepared, and before its model is captured.

    List it after ModelCudaGraphManager.
    """

    before_capture: Callable[[BatchExecutionDescriptor], None]
    before_model: Callable[[BatchExecutionDescriptor], None]

    def capture(self, create_forward_fn: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
        def create(desc: BatchExecutionDescriptor, warmup: bool) -> Callable[..., None]:
            self.before_capture(desc)
            forward: Callable[..., None] = create_forward_fn(desc, warmup=warmup)

            def run(*args: Any) -> None:
                self.before_model(desc)
                forward(*args)

            return run

        super().capture(create, *args, **kwargs)


MakeTail = Callable[[BatchExecutionDescriptor, int], Callable[[], Any]]


class Tail(NamedTuple):
    """The captured tail of a step."""

    graph: Any
    result: Any
    """What its capture has returned."""


class DraftGraphManager(ModelCudaGraphManager, _AnnouncedCapture):
    """vLLM's manager with graphs for steps with drafts; `attended` tells whether they branch.

    Attributes
    ----------
    before_replay : callable
        Called with the graph that was chosen for a step, before it is replayed; returns the one
        that runs the step. Set by the runner.
    begin_graph : callable
        Called before the model while a graph for drafts is captured: what it launches is captured,
        too. Set by the runner.
    make_tail : callable
        Called for each of `descs_with_tails` when all are captured: what the result launches
        becomes the tail of this graph, what it returns is kept. Set by the runner.
    numbers_of_choices : tuple of int
        Each graph has a tail for each of these numbers of the model's choices at a row.
    tails : dict
        The tails by the graph that runs before them and their number of choices; none if one could
        not be captured. With several ranks, the engine does not start then.
    """

    before_replay: Callable[[BatchExecutionDescriptor], BatchExecutionDescriptor] | None
    begin_graph: Callable[[BatchExecutionDescriptor], None] | None
    make_tail: MakeTail | None
    numbers_of_choices: tuple[int, ...] = (0,)
    tails: dict[tuple[BatchExecutionDescriptor, int], Tail]

    def __init__(self, attended: AttendedTrees, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._attended = attended
        self.before_replay = self.begin_graph = self.make_tail = None
        self.tails = {}
        self._draft_graphs: dict[tuple[int, int], BatchExecutionDescriptor] = {}
        """By the number of tokens of a step, which may be less than the graph's, and the number of
        active adapters."""
        self._own_tails: dict[int, BatchExecutionDescriptor] = {}
        """Plain vLLM's graphs that have tails, by the number of tokens of a graph."""
        self._longest = 0
        self._use_buffers: Callable[[int | None], None] | None = None

    # ---- what is captured ------------------------------------------------------------------------

    def add_draft_graphs(
        self, longest: int, use_buffers: Callable[[int | None], None] | None = None
    ) -> list[int]:
        """Also capture graphs for steps with drafts; returns their numbers of tokens.

        None are captured if vLLM captures no graphs of the whole model. If vLLM captures graphs for
        any batch, chains run in them, and only branching trees need others.

        Parameters
        ----------
        longest
            The most tokens of a request in a step with drafts.
        use_buffers
            Called before a graph is captured, with its number of tokens if it is for drafts, else
            with None. Without it, no tree branches.
        """
        mode = self.cudagraph_mode
        captures = self.compilation_config.cudagraph_capture_sizes
        if not captures or mode.decode_mode() != CUDAGraphMode.FULL:
            return []
        if use_buffers is None and mode.mixed_mode() == CUDAGraphMode.FULL:
            return []
        self._longest, self._use_buffers = longest, use_buffers
        sizes = sizes_with_drafts(captures, self.max_num_reqs * longest)
        descs = self._capture_descs.setdefault(CUDAGraphMode.FULL, [])
        self._choose_own_tails([desc for desc in descs if desc.num_active_loras == 0], sizes)
        for adapters in self.lora_capture_cases:
            first = 1
            for size in sizes:
                desc = BatchExecutionDescriptor(
                    cg_mode=CUDAGraphMode.FULL,
                    num_tokens=size,
                    num_reqs=min(size, self.max_num_reqs),
                    max_query_len=longest,
                    num_active_loras=adapters,
                )
                descs.append(desc)
                for num_tokens in range(first, size + 1):
                    self._draft_graphs[num_tokens, adapters] = desc
                first = size + 1
        # The largest one first: it determines the size of the output buffers.
        descs[:] = sorted(descs, key=lambda desc: desc.num_tokens, reverse=True)
        return sizes

    def _choose_own_tails(
        self, plain: Sequence[BatchExecutionDescriptor], sizes: Sequence[int]
    ) -> None:
        """Large steps of one token a request get tails of about their size, since those of the
        graphs for drafts, of these sizes, would compute up to twice as many logits."""
        by_size = {
            desc.num_tokens: desc
            for desc in plain
            if MIN_ROWS_OF_OWN_TAILS <= desc.num_tokens <= self.max_num_reqs
        }
        first = MIN_ROWS_OF_OWN_TAILS
        for size in _spaced([*by_size], 1.125):
            if size not in sizes:
                self._own_tails |= dict.fromkeys(range(first, size + 1), by_size[size])
            first = size + 1

    def before_capture(self, desc: BatchExecutionDescriptor) -> None:
        if self._use_buffers is not None:
            self._use_buffers(desc.num_tokens if desc.max_query_len is not None else None)

    def before_model(self, desc: BatchExecutionDescriptor) -> None:
        if self.begin_graph is not None and desc.max_query_len is not None:
            self.begin_graph(desc)

    def capture(self, *args: Any, **kwargs: Any) -> None:
        try:
            super().capture(*args, **kwargs)
        finally:
            if self._use_buffers is not None:
                self._use_buffers(None)
        self.capture_tails()

    def capture_tails(self) -> None:
        """Capture the tails of all graphs, in place of those that there are."""
        self.tails = {}
        if self.make_tail is not None and self._draft_graphs:
            try:
                for num_choices in self.numbers_of_choices:
                    self.tails |= self._capture_tails(self.make_tail, num_choices)
            except Exception:
                if self.tp_size > 1:  # the other ranks would wait for this one in every step
                    logger.error("LOOKAHEAD_VLLM_TAILS=0 leaves out the capture that has failed.")
                    raise
                self.tails = {}
                logger.exception("Lookahead samples outside of graphs: the capture has failed.")

    def _capture_tails(
        self, make_tail: MakeTail, num_choices: int
    ) -> dict[tuple[BatchExecutionDescriptor, int], Tail]:
        """Capture the tails as vLLM captures the graphs, in the same memory."""
        descs = self.descs_with_tails()
        graphs: dict[BatchExecutionDescriptor, Any] = {}
        results: dict[BatchExecutionDescriptor, Any] = {}

        def create(desc: BatchExecutionDescriptor, warmup: bool) -> Callable[..., None]:
            launch = make_tail(desc, num_choices)

            def run(*args: Any) -> None:
                results[desc] = launch()

            return run

        with (
            patches.swapped(self, "_capture_descs", {CUDAGraphMode.FULL: descs}),
            patches.swapped(self, "graphs", graphs),
            # vLLM takes what it measures there for the memory of further graphs of the model.
            patches.swapped(self, "_capture_mem_samples", None),
        ):
            CudaGraphManager.capture(self, create, "Capturing CUDA graphs of sampling")
        return {(desc, num_choices): Tail(graph, results[desc]) for desc, graph in graphs.items()}

    def descs_with_tails(self) -> list[BatchExecutionDescriptor]:
        """The graphs that get tails, the largest one first."""
        own = set(self._own_tails.values())
        descs = self._capture_descs.get(CUDAGraphMode.FULL, [])
        return [desc for desc in descs if desc.max_query_len is not None or desc in own]

    def tail_of(self, desc: BatchExecutionDescriptor) -> BatchExecutionDescriptor | None:
        """The graph whose tail follows this one, None if there is none.

        Most of plain vLLM's graphs have none of their own: the smallest tail that holds their rows
        takes what is missing for padding.
        """
        if desc.max_query_len is None:
            small = self._draft_graphs.get((desc.num_tokens, 0), desc)
            desc = self._own_tails.get(desc.num_tokens, small)
        return desc if (desc, 0) in self.tails else None

    def replay_tail(self, desc: BatchExecutionDescriptor, num_choices: int) -> Any:
        """Launch the tail of a graph that has one; returns its results."""
        tail = self.tails[desc, num_choices]
        tail.graph.replay()
        return tail.result

    # ---- which graph runs a step -----------------------------------------------------------------

    def dispatch(
        self,
        num_reqs: int,
        num_tokens: int,
        uniform_token_count: int | None,
        num_active_loras: int,
        max_query_len: int | None = None,
        num_ubatches: int = 1,
    ) -> BatchExecutionDescriptor:
        """Find the graph for a step.

        Data parallel ranks agree on the arguments, and must find the same graph. Whether trees
        branch may differ between ranks, but it counts only if vLLM's graphs take any batch, and
        then several ranks have no branching trees.
        """
        any_batch = self.cudagraph_mode.mixed_mode() == CUDAGraphMode.FULL
        has_drafts = (
            uniform_token_count != 1
            and max_query_len is not None  # else the step reads a prompt
            and max_query_len <= self._longest
            and num_ubatches == 1
        )
        if self._graphs_captured and has_drafts and (self._attended.may_branch or not any_batch):
            adapters = self._resolve_effective_loras(num_active_loras)
            desc = self._draft_graphs.get((num_tokens, adapters))
            if desc is not None:
                return desc
        desc = super().dispatch(
            num_reqs,
            num_tokens,
            uniform_token_count,
            num_active_loras,
            max_query_len=max_query_len,
            num_ubatches=num_ubatches,
        )
        if (
            self._attended.may_branch and desc.cg_mode == CUDAGraphMode.FULL
        ):  # it has no tree attention
            return BatchExecutionDescriptor(
                cg_mode=CUDAGraphMode.NONE,
                num_tokens=num_tokens,
                num_reqs=num_reqs,
                num_active_loras=desc.num_active_loras,
                num_ubatches=num_ubatches,
            )
        return desc

    def most_draft_tokens(self) -> int:
        """The tokens of the largest graph for drafts, without adapters; 0 if there is none."""
        if not self._graphs_captured:
            return 0
        return max((tokens for tokens, adapters in self._draft_graphs if not adapters), default=0)

    def smallest(self, num_reqs: int, num_tokens: int) -> BatchExecutionDescriptor:
        """The smallest graph of a step that decodes, of at most `most_draft_tokens`; plain vLLM's
        if every request has one token."""
        plain = self.plain(num_reqs) if num_tokens == num_reqs else None
        return plain or self._draft_graphs[num_tokens, 0]

    def plain(self, num_reqs: int) -> BatchExecutionDescriptor | None:
        """Plain vLLM's graph of a step in which so many requests have one token each."""
        desc = super().dispatch(num_reqs, num_reqs, 1, 0, max_query_len=1)
        return desc if desc.cg_mode == CUDAGraphMode.FULL else None

    def run_fullgraph(self, desc: BatchExecutionDescriptor) -> Any:
        if self.before_replay is not None:
            desc = self.before_replay(desc)
        return super().run_fullgraph(desc)

    @contextmanager
    def in_pieces(self) -> Iterator[None]:
        """In the block, no step runs in a graph of the whole model."""
        pieces = {
            key: [desc for desc in descs if desc.cg_mode != CUDAGraphMode.FULL]
            for key, descs in self._candidates.items()
        }
        with (
            patches.swapped(self, "_candidates", pieces),
            patches.swapped(self, "_draft_graphs", {}),
        ):
            yield

    def captured_tokens(self) -> CapturedTokens:
        """The numbers of tokens for which graphs of the whole model were captured."""
        if not self._graphs_captured:
            return CapturedTokens()
        descs = self._capture_descs.get(CUDAGraphMode.FULL, [])
        plain = sorted({desc.num_tokens for desc in descs if desc.max_query_len is None})
        # Graphs for any batch may hold more tokens than there can be requests.
        needed = [s for i, s in enumerate(plain) if not i or plain[i - 1] < self.max_num_reqs]
        drafts = sorted({desc.num_tokens for desc in descs if desc.max_query_len is not None})
        return CapturedTokens(needed, drafts, self._longest if drafts else 0)
