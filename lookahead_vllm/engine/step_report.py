"""What a step tells the metrics, and how it travels from the runner to the front-end.

The runner fills a `StepReport` and attaches it to the output of the step; the scheduler moves it
on into the stats that vLLM sends with every output; `stat_logger.py` counts it where `/metrics` is
served. Every number is that of the step alone, so reports may come from several engines and go to
several front-ends: whoever adds them up, nothing is lost and nothing counted twice.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from vllm.v1.metrics.stats import SchedulerStats

from lookahead_vllm.draft.sources import NAMES

PARTS = ("draft", "verify", "compaction")
"""What is timed: growing the trees, sampling and matching their nodes, moving accepted KV."""

_REPORT = "lookahead_report"
"""The attribute of a `ModelRunnerOutput` under which its step's report goes to the scheduler."""


@dataclass
class StepReport:
    """One step's numbers, or those of several steps if the first ones could not be sent at once.

    It crosses a process boundary as msgpack, which knows Python's numbers and not NumPy's.
    """

    verified: list[int] = field(default_factory=lambda: [0] * len(NAMES))
    """Nodes that went through the model, by source."""
    accepted: list[int] = field(default_factory=lambda: [0] * len(NAMES))
    """Those of them that became output, by source."""
    lengths: dict[int, int] = field(default_factory=dict)
    """How many requests with a draft emitted so many tokens (accepted nodes and one more)."""
    budgets: list[int] = field(default_factory=list)
    """Nodes sent in all trees together: one number for each step in which a request could have had
    a draft, 0 where none was worth its cost."""
    costs: list[tuple[float, float]] = field(default_factory=list)
    """(predicted, measured) seconds of each step that the cost model predicted and that could be
    measured: the engine did not wait for a request in between."""
    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(PARTS, 0.0))
    """Wall time by part."""
    refused_trees: int = 0
    """Trees of the proposer that were malformed, so that their request got no draft."""
    evictions: int = 0
    """N-grams that were pruned from the trie."""
    trie_nodes: int | None = None
    """N-grams in the trie; None: not looked at in this step."""
    trie_bytes: int | None = None
    """What the proposer's tables take; None: as above."""

    def count_nodes(self, verified: Iterable[int], accepted: Iterable[int]) -> None:
        """Add nodes by source, in the order of `sources.NAMES`."""
        for total, counts in ((self.verified, verified), (self.accepted, accepted)):
            for source, count in enumerate(counts):
                total[source] += int(count)

    def count_lengths(self, lengths: Iterable[int]) -> None:
        """Add the tokens that each request with a draft emitted."""
        for length in lengths:
            self.lengths[length] = self.lengths.get(length, 0) + 1


class TrieGauges:
    """Looks at a drafter for the reports, and at its proposer's trie, if that has one."""

    def __init__(self, drafter: Any) -> None:
        self._counters = drafter.counters
        self._refused = 0
        self._proposer = drafter.proposer
        self._trie = getattr(drafter.proposer, "trie", None)
        self._pruned = 0 if self._trie is None else self._trie.num_pruned

    def look(self, report: StepReport) -> None:
        """Put into `report` what the trie holds, and what went since the last look."""
        refused = self._counters.refused_trees
        report.refused_trees += refused - self._refused
        self._refused = refused
        if self._trie is None:
            return
        pruned = self._trie.num_pruned
        report.evictions += pruned - self._pruned
        self._pruned = pruned
        report.trie_nodes = self._trie.num_filled
        report.trie_bytes = self._proposer.num_bytes


@dataclass
class ReportingStats(SchedulerStats):
    """vLLM's stats of a step with ours; whoever does not know of the field passes over it."""

    lookahead: StepReport | None = None


def attach(output: Any, report: StepReport) -> None:
    """Send `report` with a `ModelRunnerOutput`."""
    setattr(output, _REPORT, report)


def attached(output: Any) -> StepReport | None:
    """The report that came with a `ModelRunnerOutput`."""
    return getattr(output, _REPORT, None)


def with_report(stats: SchedulerStats | None, report: StepReport | None) -> SchedulerStats | None:
    """The stats that the scheduler sends to the front-end; None where stats are turned off."""
    if stats is None or report is None:
        return stats
    return ReportingStats(**vars(stats), lookahead=report)
