"""The numbers of a step for the metrics, and how they get from the worker to the front-end.

The worker fills a `StepReport` and sends it with a `LateReport`. The scheduler moves it into
the stats that vLLM sends with every output. `front_end/stat_logger.py` adds it to the metrics that
`/metrics` serves. Each report covers its own step only, so reports of several engines can be added
in several front-ends without loss and without counting twice.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field

from vllm.v1.metrics.stats import SchedulerStats

from lookahead_vllm.draft.sources import NAMES


@dataclass
class StepReport:
    """Numbers of one step, or of several if earlier ones had no output to attach them to.

    It is sent as msgpack, so it holds Python's numbers and not NumPy's.
    """

    verified: list[int] = field(default_factory=lambda: [0] * len(NAMES))
    """Verified nodes, by source."""
    accepted: list[int] = field(default_factory=lambda: [0] * len(NAMES))
    """Accepted nodes, by source."""
    lengths: dict[int, int] = field(default_factory=dict)
    """Requests with a draft, counted by the tokens that they emitted (accepted nodes + 1)."""
    nodes_sent: list[int] = field(default_factory=list)
    """Nodes of all trees, for each step in which a request could have had a draft; 0 if no node
    was worth its cost."""
    costs: list[tuple[float, float]] = field(default_factory=list)
    """(predicted, measured) seconds of each step that was predicted and measured."""
    plain_seconds: float = 0.0
    """The predicted time of the same steps without their drafts."""
    draft_seconds: float = 0.0
    """Wall time of learning from emitted tokens and of growing the trees."""
    evictions: int = 0
    """N-grams that were pruned from the trie."""
    trie_nodes: int | None = None
    """N-grams in the trie; None if there is no trie."""
    trie_bytes: int | None = None
    """Size of the proposer's tables in bytes; None if there is no trie."""
    texts_held: float | None = None
    """How much of the live and kept texts the trie holds; None in most steps."""
    published: int = 0
    """Tokens that were sent to the engine's fleet; this and the next three as in `Traffic`."""
    learned: int = 0
    dropped: int = 0
    lag_seconds: float | None = None

    def count_nodes(self, verified: Iterable[int], accepted: Iterable[int]) -> None:
        """Add nodes by source, in the order of `sources.NAMES`."""
        for total, counts in ((self.verified, verified), (self.accepted, accepted)):
            for source, count in enumerate(counts):
                total[source] += int(count)

    def count_lengths(self, requests: Iterable[int]) -> None:
        """Add requests with a draft, given by their accepted nodes: none, one, and so on."""
        for emitted, count in enumerate(requests, 1):
            if count:
                self.lengths[emitted] = self.lengths.get(emitted, 0) + count


@dataclass
class ReportingStats(SchedulerStats):
    """vLLM's stats of a step with our report; vLLM's own code ignores the field."""

    lookahead: StepReport | None = None


def with_report(stats: SchedulerStats | None, report: StepReport | None) -> SchedulerStats | None:
    """The stats that the scheduler sends to the front-end; None if stats are turned off."""
    if stats is None or report is None:
        return stats
    return ReportingStats(**vars(stats), lookahead=report)
