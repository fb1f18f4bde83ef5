"""The metrics `lookahead_vllm:...` on the server's `/metrics`; `docs/metrics.md` explains each.

vLLM's entry point for such loggers, `vllm.stat_logger_plugins`, is not used: it enables the stats
of every server in the environment, even with `--disable-log-stats` and without lookahead. Our
logger is added where vLLM makes its own, which it does only if stats are enabled.
"""

import functools
import time
from collections.abc import Callable, Sequence
from typing import Any

from prometheus_client import REGISTRY, Counter, Gauge, Histogram
from vllm.config import VllmConfig
from vllm.logger import init_logger
from vllm.v1.engine import EngineCoreOutputs, core_client
from vllm.v1.engine.output_processor import OutputProcessor
from vllm.v1.metrics.loggers import AggregateStatLoggerBase, StatLoggerManager
from vllm.v1.metrics.stats import IterationStats, SchedulerStats

from lookahead_vllm.draft.sources import NAMES
from lookahead_vllm.engine import config, patches
from lookahead_vllm.engine.step_report import ReportingStats, StepReport

PREFIX = "lookahead_vllm:"

LENGTH_BUCKETS = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 24, 32, 48, 64)
NODE_BUCKETS = (0, 1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096)
ERROR_BUCKETS = (0.01, 0.02, 0.05, 0.1, 0.15, 0.2, 0.3, 0.5, 1, 2, 5, 10)

SUMMARY_SECONDS = 60
"""At least so much time lies between two summaries in the log."""

logger = init_logger(f"vllm.{__name__}")

_registered: dict[str, Counter | Gauge | Histogram] = {}
"""Our metrics in prometheus_client's registry, which the whole process shares."""


@functools.cache
def install() -> None:
    """Receive step reports and count them, once in each process."""
    patches.patch(core_client, "EngineCoreOutputs", lambda original: ReportingOutputs)
    patches.patch(StatLoggerManager, "__init__", with_lookahead)
    patches.patch(OutputProcessor, "_update_stats_from_finished", without_dropped_tokens)


class ReportingOutputs(EngineCoreOutputs):
    """Decodes an engine's outputs with its reports; vLLM's class drops unknown fields."""

    scheduler_stats: ReportingStats | None = None


def with_lookahead(original: Callable[..., None]) -> Callable[..., None]:
    """`StatLoggerManager.__init__`, which adds our logger for engines with lookahead."""

    @functools.wraps(original)
    def init(
        self: Any,
        vllm_config: VllmConfig,
        *args: Any,
        custom_stat_loggers: Sequence[Any] | None = None,
        **kwargs: Any,
    ) -> None:
        unregister()
        loggers = list(custom_stat_loggers or ())
        if config.is_lookahead(vllm_config):
            loggers.append(LookaheadStatLogger)
        original(self, vllm_config, *args, custom_stat_loggers=loggers, **kwargs)

    return init


def without_dropped_tokens(original: Callable[..., None]) -> Callable[..., None]:
    """`OutputProcessor._update_stats_from_finished`, which counts only tokens of the answer.

    vLLM counts the tokens of a step when they arrive, and then finds the stop string and drops the
    tokens after it.
    """

    @functools.wraps(original)
    def update(
        self: Any, req_state: Any, finish_reason: Any, iteration_stats: IterationStats | None
    ) -> None:
        stats, detokenizer = req_state.stats, req_state.detokenizer
        if iteration_stats is not None and stats is not None and detokenizer is not None:
            dropped = stats.num_generation_tokens - detokenizer.num_output_tokens()
            dropped = min(dropped, iteration_stats.num_generation_tokens)
            if dropped > 0:
                stats.num_generation_tokens -= dropped
                iteration_stats.num_generation_tokens -= dropped
        original(self, req_state, finish_reason, iteration_stats)

    return update


def unregister() -> None:
    """Remove the metrics of an earlier engine in this process, as vLLM does with its own."""
    while _registered:
        REGISTRY.unregister(_registered.popitem()[1])


class LookaheadStatLogger(AggregateStatLoggerBase):
    """Counts the reports of all engines of this front-end, and logs a summary every minute."""

    def __init__(self, vllm_config: VllmConfig, engine_indexes: list[int]) -> None:
        model = vllm_config.model_config.served_model_name
        self._engines = {index: EngineMetrics(model, index) for index in engine_indexes}
        self._summary = Summary()

    def record(
        self,
        scheduler_stats: SchedulerStats | None,
        iteration_stats: IterationStats | None,
        mm_cache_stats: Any = None,
        engine_idx: int = 0,
    ) -> None:
        report = getattr(scheduler_stats, "lookahead", None)
        if report is not None:
            self._engines[engine_idx].count(report)
        self._summary.add(report, iteration_stats)

    def log(self) -> None:
        """Called every ten seconds by vLLM, unless nothing happens."""
        seconds = time.monotonic() - self._summary.begin
        if seconds >= SUMMARY_SECONDS:
            if text := self._summary.text():
                logger.info("Lookahead in the last %.0f s: %s.", seconds, text)
            self._summary = Summary()

    def log_engine_initialized(self) -> None:
        """Log nothing."""


class Summary:
    """Whether drafts help: the numbers of some time, of all engines together."""

    def __init__(self) -> None:
        self.begin = time.monotonic()
        self._steps = self._tokens = self._verified = self._accepted = 0
        """The first two of requests that decode."""
        self._seconds = self._plain_seconds = 0.0
        """Of measured steps, and as predicted without drafts."""
        self._texts_held: float | None = None

    def add(self, report: StepReport | None, stats: IterationStats | None) -> None:
        """Count what a step reported, and the tokens that arrived with it."""
        if stats is not None:
            self._steps += len(stats.inter_token_latencies_iter)
            first_tokens = len(stats.time_to_first_tokens_iter)
            self._tokens += max(stats.num_generation_tokens - first_tokens, 0)
        if report is not None:
            self._verified += sum(report.verified)
            self._accepted += sum(report.accepted)
            self._seconds += sum(measured for _, measured in report.costs)
            self._plain_seconds += report.plain_seconds
            if report.texts_held is not None:
                self._texts_held = report.texts_held

    def text(self) -> str:
        """For the log; empty if no request decoded."""
        if not self._steps:
            return ""
        if not self._verified:
            return "no draft was worth its cost"
        length = self._tokens / self._steps
        text = (
            f"{length:.2f} tokens a step of a request, "
            f"{self._accepted / self._verified:.0%} of {self._verified} draft tokens accepted"
        )
        if self._texts_held is not None:
            text += f", {self._texts_held:.0%} of what was read in the trie"
        if not self._plain_seconds:
            return text
        # One token at a time, the requests would have needed `length` times as many steps.
        speedup = length * self._plain_seconds / self._seconds
        return f"{text}, about {speedup:.2f} times as fast as without drafts"


COUNTERS = {
    "draft_seconds": ("draft_seconds", "Wall time of learning from tokens and growing trees."),
    "evictions": ("trie_evictions", "N-grams that were pruned to make room for newer ones."),
    "published": ("fleet_tokens_published", "Tokens sent to other servers."),
    "learned": ("fleet_tokens_learned", "Tokens read from other servers."),
    "dropped": ("fleet_dropped", "Tokens that could not be sent, and messages refused."),
}
GAUGES = {
    "trie_nodes": ("trie_nodes", "N-grams that the trie holds."),
    "trie_bytes": ("trie_bytes", "Memory of the trie and its tables."),
    "texts_held": ("trie_texts_held", "Share of the n-grams of live and kept texts in the trie."),
    "lag_seconds": ("fleet_lag_seconds", "Age of the latest message of another server when read."),
}
"""Both by a field of the report: the name of its series, and what it says."""


class EngineMetrics:
    """The series of one engine, which are 0 before its first step."""

    def __init__(self, model: str, engine: int) -> None:
        series = functools.partial(_series, (model, str(engine)))
        about = "Draft nodes that went through the model."
        self._verified = series(Counter, "nodes_verified", about, by_source=True)
        about = "Draft nodes that became output."
        self._accepted = series(Counter, "nodes_accepted", about, by_source=True)
        self._lengths = series(
            Histogram,
            "acceptance_length",
            "Tokens that a request with a draft emitted in a step.",
            buckets=LENGTH_BUCKETS,
        )
        self._nodes = series(
            Histogram,
            "step_nodes",
            "Draft nodes sent in a step, of all requests together.",
            buckets=NODE_BUCKETS,
        )
        self._error = series(
            Histogram,
            "step_cost_error",
            "How far the cost model was off: |measured - predicted| / predicted, by step.",
            buckets=ERROR_BUCKETS,
        )
        self._predicted = series(
            Counter, "step_predicted_seconds", "Time that the cost model predicted for steps."
        )
        self._measured = series(Counter, "step_measured_seconds", "Time that the same steps took.")
        self._counters = {field: series(Counter, *of) for field, of in COUNTERS.items()}
        self._gauges = {field: series(Gauge, *of) for field, of in GAUGES.items()}

    def count(self, report: StepReport) -> None:
        for source, verified, accepted in zip(NAMES, report.verified, report.accepted, strict=True):
            self._verified[source].inc(verified)
            self._accepted[source].inc(accepted)
        for length, requests in report.lengths.items():
            for _ in range(requests):
                self._lengths.observe(length)
        for nodes in report.nodes_sent:
            self._nodes.observe(nodes)
        for predicted, measured in report.costs:
            self._error.observe(abs(measured - predicted) / predicted)
            self._predicted.inc(predicted)
            self._measured.inc(measured)
        for field, counter in self._counters.items():
            counter.inc(getattr(report, field))
        for field, gauge in self._gauges.items():
            if (value := getattr(report, field)) is not None:
                gauge.set(value)


def _series(
    engine: tuple[str, str],
    kind: Any,
    name: str,
    documentation: str,
    buckets: Sequence[float] | None = None,
    by_source: bool = False,
) -> Any:
    """One engine's series of a metric; `by_source`, a dict by the names of the sources."""
    if name not in _registered:
        options: dict[str, Any] = {}
        if kind is Histogram:
            options["buckets"] = buckets
        elif kind is Gauge:
            options["multiprocess_mode"] = "mostrecent"  # of several API servers, as vLLM does
        labels = ["model_name", "engine", "source"] if by_source else ["model_name", "engine"]
        _registered[name] = kind(PREFIX + name, documentation, labels, **options)
    metric = _registered[name]
    if by_source:
        return {source: metric.labels(*engine, source) for source in NAMES}
    return metric.labels(*engine)
