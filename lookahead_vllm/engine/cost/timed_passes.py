"""The forward passes that are timed to know the cost of a step, and how they are timed.

Other programs only make a pass slower. So what counts is the least time of each pass, over rounds
of all passes: what disturbs one round for a while disturbs no single size. Times on which two
rounds do not agree are uncertain.
"""

import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any, NamedTuple, Protocol

from tqdm import tqdm
from vllm.config import VllmConfig
from vllm.distributed.parallel_state import get_world_group, is_global_first_rank

from lookahead_vllm.draft.tree import DraftTree
from lookahead_vllm.engine.drafter.drafter import LookaheadDrafter
from lookahead_vllm.engine.pipeline import gather_from_stages

SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
"""Tokens of the forward passes that are timed without attention to a context."""

CONTEXT_TOKENS = 1024
"""Context of each row when attention is timed; shorter where it does not fit."""

MAX_SECONDS = 10.0
"""A measurement takes about this long at most: passes for which there is no time are left out."""

MIN_PASSES = 3
"""So many passes are timed, however long they take."""

MIN_ROUNDS, MAX_ROUNDS = 4, 12
"""Rounds of a measurement; the first one warms up. After MIN_ROUNDS, only passes whose times do not
agree are repeated."""

AGREEMENT = 1.1
"""The two least times of a pass agree if they differ by at most this factor."""

CHECKED_TOKENS = 16
"""Tokens of the larger passes that check an earlier measurement."""

CHECK_SECONDS = 0.5
"""No pass of a check begins after this time."""

OUTDATED = 1.2
"""An earlier time that is so many times as long as today's was disturbed."""


Prepare = Callable[[], AbstractContextManager[Callable[[], None]]]
"""Returns a context manager, which yields the function that runs a pass."""


class Batch(NamedTuple):
    """A batch whose attention is timed."""

    requests: int
    rows: int
    """Tokens of each request: a root and its draft."""
    trees: bool

    @property
    def name(self) -> str:
        """The name of the pass over this batch."""
        draft = "trees" if self.trees else "chains"
        return f"{self.requests} requests of {self.rows} rows, {draft}, with a context"

    @property
    def num_tokens(self) -> int:
        return self.requests * self.rows

    @property
    def tree(self) -> DraftTree:
        """The draft of each request: its first two nodes are children of the root, and the parent
        of node i is node i - 2."""
        parents = [-1, -1, *range(self.rows - 3)] if self.trees else range(-1, self.rows - 2)
        return DraftTree.from_lists([0] * (self.rows - 1), list(parents)[: self.rows - 1])


BATCHES = (
    Batch(1, 1, False),
    Batch(8, 1, False),
    Batch(32, 1, False),
    Batch(1, 4, False),
    Batch(1, 16, False),
    Batch(8, 4, False),
    Batch(1, 4, True),
    Batch(1, 16, True),
    Batch(8, 4, True),
)


class CapturedTokens(NamedTuple):
    """The numbers of tokens of a runner's graphs of the whole model, rising."""

    without_drafts: Sequence[int] = ()
    with_drafts: Sequence[int] = ()
    longest: int = 0
    """The most tokens of a request in a graph with drafts."""


class ForwardPasses(Protocol):
    """Dummy passes of a model runner, logits included. Each returns when the device is done."""

    attends_in_graphs: bool
    """Whether graphs of the whole model attend to the context of dummy requests."""

    def captured_tokens(self) -> CapturedTokens:
        """For which numbers of tokens `decode_in_graph` and `drafts_in_graph` have a graph."""

    def decode(self, num_tokens: int) -> None:
        """One token of each request, without a graph of the whole model."""

    def decode_in_graph(self, num_tokens: int) -> None:
        """One token of each request, as many as fit into a graph of `num_tokens`."""

    def drafts_in_graph(self, num_tokens: int) -> None:
        """Requests with drafts, `num_tokens` tokens in all, in a graph."""

    def whole_chains(self) -> AbstractContextManager[Any]:
        """In the block, a trained drafter makes all of its passes; else it makes the first one."""

    def with_context(
        self, batch: Batch, context: int, in_graph: bool
    ) -> AbstractContextManager[Callable[[], None]]:
        """Give every request of `batch` a context; yield a function that runs the pass.

        With `in_graph`, it runs in the graph of the whole model for so many tokens, or for more if
        the batch has drafts.
        """


class MeasuredRunner(Protocol):
    """A model runner of vLLM with lookahead."""

    vllm_config: VllmConfig
    drafter: LookaheadDrafter
    max_num_tokens: int

    def forward_passes(self) -> ForwardPasses:
        """Passes to measure the cost of a step with."""


IN_PIECES, IN_GRAPH, WITH_DRAFTS = "in pieces", "in a graph", "in a graph with drafts"
"""Kinds of passes without a context; "in pieces" is outside of graphs of the whole model."""


def name_of(kind: str, num_tokens: int) -> str:
    """The name of a pass without a context."""
    return f"{num_tokens} tokens {kind}"


class PassPlan:
    """The passes that are timed for an engine."""

    def __init__(self, runner: MeasuredRunner) -> None:
        self._passes = passes = runner.forward_passes()
        self.captured = passes.captured_tokens()
        """Of these graphs of the whole model, some are timed."""
        self.sizes = [size for size in SIZES if size <= runner.max_num_tokens]
        """Tokens of the passes outside of such graphs."""
        self.batches = self._batches_of(runner)
        most_rows = max((batch.rows for batch in self.batches), default=0)
        max_model_len = runner.vllm_config.model_config.max_model_len
        self.context = min(CONTEXT_TOKENS, max_model_len - most_rows)
        """Tokens of context of each request of a batch."""
        self._kinds = (
            (IN_PIECES, self.sizes, passes.decode),
            (IN_GRAPH, _about_doubling(self.captured.without_drafts), passes.decode_in_graph),
            (WITH_DRAFTS, _about_doubling(self.captured.with_drafts), passes.drafts_in_graph),
        )
        self.runs: dict[str, Prepare] = {}
        """By the name of a pass, what prepares it."""
        for kind, sizes, run in self._kinds:
            for size in sizes:
                self.runs[name_of(kind, size)] = partial(_ready, partial(run, size))
        self.whole_chain: str | None = None
        """The name of a pass of one token in which a trained drafter makes all of its passes."""
        if (length := runner.drafter.options.chain_length) > 1:
            self.whole_chain = f"a whole chain of {length} tokens"
            self.runs[self.whole_chain] = self._with_whole_chain
        for batch in self.batches:
            in_graph = self.graph_of(batch) is not None
            self.runs[batch.name] = partial(passes.with_context, batch, self.context, in_graph)

    def _batches_of(self, runner: MeasuredRunner) -> list[Batch]:
        """The batches that fit into a step of the engine, and of which it has steps."""
        config = runner.vllm_config
        longest = self.captured.longest
        batches = [batch._replace(rows=min(batch.rows, longest or batch.rows)) for batch in BATCHES]
        return [
            batch
            for batch in batches
            if batch.requests <= config.scheduler_config.max_num_seqs
            and batch.num_tokens <= runner.max_num_tokens
            and batch.rows < config.model_config.max_model_len
            and (runner.drafter.may_branch or not batch.trees)
        ]

    @contextmanager
    def _with_whole_chain(self) -> Iterator[Callable[[], None]]:
        with self._passes.whole_chains():
            yield partial(self._passes.decode, self.sizes[0])

    def graph_of(self, batch: Batch) -> int | None:
        """The tokens of the graph in which a batch is timed; None outside of graphs.

        A dummy run without drafts has as many requests as its graph, so only a graph of just so
        many tokens will do.
        """
        sizes = self.captured.with_drafts if batch.rows > 1 else self.captured.without_drafts
        size = next((size for size in sizes if size >= batch.num_tokens), None)
        if size is None or (batch.rows == 1 and size > batch.num_tokens):
            return None
        if not (self._passes.attends_in_graphs or batch.trees):  # tree attention always does
            return None
        return size

    @property
    def checks(self) -> list[str]:
        """The names of a few short passes: one of each kind."""
        names = [name_of(IN_PIECES, self.sizes[0])]
        for kind, sizes, _ in self._kinds:
            short = [size for size in sizes if size <= CHECKED_TOKENS]
            names.extend(name_of(kind, size) for size in short[-1:])
        short_batches = [batch for batch in self.batches if batch.num_tokens <= CHECKED_TOKENS]
        return names + [batch.name for batch in short_batches[-1:]]


class Measurement(NamedTuple):
    """Seconds of passes, by their names in the plan."""

    times: dict[str, float]
    is_certain: bool
    """Whether the two least times of each pass agree."""


def measure(plan: PassPlan) -> Measurement:
    """Time the passes of a plan, those that there is time for. Every rank must call this."""
    start = time.perf_counter()
    rounds: dict[str, list[float]] = {}

    def run_round(names: Iterable[str]) -> None:
        for name in names:
            rounds.setdefault(name, []).append(_seconds(plan.runs[name]))

    with tqdm(
        total=MIN_ROUNDS, desc="Measuring the cost of a step", disable=not is_global_first_rank()
    ) as bar:
        for name in plan.runs:
            in_time = time.perf_counter() < start + MAX_SECONDS / MIN_ROUNDS
            if len(rounds) < MIN_PASSES or broadcast(in_time):
                run_round([name])
        bar.update()
        for _ in range(1, MIN_ROUNDS):
            run_round(list(rounds))
            bar.update()
    for _ in range(MIN_ROUNDS, MAX_ROUNDS):
        in_time = time.perf_counter() < start + MAX_SECONDS
        repeated = broadcast(_uncertain(rounds) if in_time else [])
        if not repeated:
            break
        run_round(repeated)
    least = {name: min(times) for name, times in rounds.items()}
    return broadcast(Measurement(least, not _uncertain(rounds)))


def _uncertain(rounds: Mapping[str, list[float]]) -> list[str]:
    """The passes whose two least times do not agree."""
    least = {name: sorted(times)[:2] for name, times in rounds.items()}
    return [name for name, (first, second) in least.items() if second > AGREEMENT * first]


def is_outdated(plan: PassPlan, times: Mapping[str, float]) -> bool:
    """Whether a pass is clearly faster now than in an earlier measurement: that was disturbed.

    A slower pass says nothing: the machine may be busy now. Every rank must call this.
    """
    deadline = time.perf_counter() + CHECK_SECONDS
    for name in plan.checks:
        if name not in times or not broadcast(time.perf_counter() < deadline):
            continue
        now = min(_seconds(plan.runs[name]) for _ in range(2))
        if broadcast(times[name] > OUTDATED * now):
            return True
    return False


def broadcast(value: Any) -> Any:
    """The first rank's value, so that all ranks run the same passes."""
    return get_world_group().broadcast_object(value)


def _seconds(prepare: Prepare) -> float:
    """The time of a pass; in a pipeline, the sum over all stages, through which a step runs."""
    with prepare() as run:
        start = time.perf_counter()
        run()
        elapsed = time.perf_counter() - start
    return sum(gather_from_stages(elapsed))


def _ready(run: Callable[[], None]) -> AbstractContextManager[Callable[[], None]]:
    return nullcontext(run)


def _about_doubling(sizes: Sequence[int]) -> list[int]:
    """Some of these rising sizes, the first and the last among them."""
    chosen = list(sizes[:1])
    for size, larger in zip(sizes[1:], [*sizes[2:], math.inf], strict=False):
        if larger > 2 * chosen[-1]:
            chosen.append(size)
    return chosen
