"""What a worker counts and times: since it started, and for the report of the current step."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from lookahead_vllm.draft.fleet.exchange import Traffic
from lookahead_vllm.draft.jit import Int32s
from lookahead_vllm.draft.tree import DraftForest
from lookahead_vllm.engine.step_report import StepReport
from lookahead_vllm.verify.acceptance import tally

TEXTS_SECONDS = 10.0
"""So often, it is measured how much of the texts the trie holds."""


@dataclass
class Counters:
    """Drafts of one worker since it started."""

    trees: int = 0
    branching_trees: int = 0
    nodes: int = 0
    accepted_nodes: int = 0
    moved_tokens: int = 0
    failures: int = 0
    """Exceptions of the proposer."""


class StepRecorder:
    """The counters of a worker, and the report of its current step.

    Attributes
    ----------
    counters : Counters
        Since the worker started.
    report : StepReport
        Since the last `take_report`.
    traffic : Traffic or None
        Of the engine's fleet, if it shares with one.
    """

    def __init__(self) -> None:
        self.counters = Counters()
        self.report = StepReport()
        self.traffic: Traffic | None = None
        self._reported_traffic = Traffic()
        self._reported_pruned = 0
        self._next_look = 0.0
        """When the texts will be measured."""
        self._proposer: Any = None
        self._trie: Any = None

    def follow(self, proposer: Any) -> None:
        """Make the proposer's trie, if it has one, part of the reports."""
        self._proposer = proposer
        self._trie = proposer.trie if getattr(proposer, "has_trie", False) else None
        self._reported_pruned = 0 if self._trie is None else self._trie.num_pruned

    @contextmanager
    def drafting(self) -> Iterator[None]:
        """Add the wall time of the block to that of drafting."""
        begin = time.perf_counter()
        try:
            yield
        finally:
            self.report.draft_seconds += time.perf_counter() - begin

    def count_drafts(self, forest: DraftForest, paths: Int32s) -> None:
        """Count verified trees and their accepted nodes; `paths` as in `accepted_paths`."""
        counters, report, counts = self.counters, self.report, tally(forest, paths)
        verified, accepted = counts.verified.tolist(), counts.accepted.tolist()
        lengths = counts.lengths.tolist()
        counters.trees += sum(lengths)
        counters.branching_trees += counts.branching
        counters.nodes += forest.num_nodes
        counters.accepted_nodes += sum(accepted)
        counters.moved_tokens += counts.moved
        report.count_nodes(verified, accepted)
        report.count_lengths(lengths)

    def take_report(self) -> StepReport:
        """The report, with the trie's size and what was pruned; begins a new one."""
        report, self.report = self.report, StepReport()
        if self._trie is not None:
            pruned = self._trie.num_pruned
            report.evictions += pruned - self._reported_pruned
            self._reported_pruned = pruned
            report.trie_nodes = self._trie.num_filled
            report.trie_bytes = self._proposer.num_bytes
            if (now := time.monotonic()) >= self._next_look:
                self._next_look = now + TEXTS_SECONDS
                report.texts_held = self._proposer.held_share()
        if self.traffic is not None:
            traffic, last = replace(self.traffic), self._reported_traffic
            report.published = traffic.published - last.published
            report.learned = traffic.learned - last.learned
            report.dropped = traffic.dropped - last.dropped
            report.lag_seconds = traffic.lag_seconds
            self._reported_traffic = traffic
        return report
