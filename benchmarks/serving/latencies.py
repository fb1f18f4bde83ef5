"""Compare the latencies of plain vLLM and other methods over several rounds."""

import statistics
from collections.abc import Mapping, Sequence
from typing import Literal, TypeAlias

from benchmarks.methods import BASELINE
from benchmarks.serving.arrivals import Latencies
from benchmarks.tables import with_spread
from lookahead_vllm.simulation.markdown import MISSING, markdown

Metric: TypeAlias = Literal["tpot_mean", "tpot_p99", "ttft_mean", "ttft_p99", "tokens_per_s"]

TITLES: dict[Metric, str] = {
    "tpot_mean": "TPOT, mean, ms",
    "tpot_p99": "TPOT, p99, ms",
    "ttft_mean": "TTFT, mean, ms",
    "ttft_p99": "TTFT, p99, ms",
    "tokens_per_s": "tokens/s",
}

MORE_IS_BETTER = {"tokens_per_s"}

Verdict: TypeAlias = Literal["better", "within spread", "worse"]

Measured: TypeAlias = Mapping[float, Mapping[str, Sequence[Latencies]]]
"""By rate, in requests a second, and by method: the latencies of each round."""


def values(rounds: Sequence[Latencies], metric: Metric) -> list[float]:
    """A metric in every round."""
    return [latencies[metric] for latencies in rounds]


def ratios(measured: Measured, rate: float, method: str, metric: Metric) -> list[float]:
    """The method's metric over plain vLLM's, for each round that both have finished."""
    rounds = measured[rate]
    plain, other = (values(rounds.get(name, []), metric) for name in (BASELINE, method))
    return [b / a for a, b in zip(plain, other, strict=False)]


def verdict(ratios: Sequence[float], metric: Metric) -> Verdict | None:
    """Whether the median of the rounds' ratios differs from 1 by more than their spread.

    The spread is the range from the smallest to the largest. None for a single round, which has no
    spread.
    """
    if len(ratios) < 2:
        return None
    gain = 1 - statistics.median(ratios)
    if abs(gain) <= max(ratios) - min(ratios):
        return "within spread"
    return "better" if (gain < 0) == (metric in MORE_IS_BETTER) else "worse"


def table(measured: Measured) -> str:
    """One line for each rate and metric: medians, the smallest and largest round in brackets."""
    head = ["requests/s", "", BASELINE]
    for method in _others(measured):
        head += [method, "ratio", "verdict"]
    body = []
    for rate, rounds in measured.items():
        for place, (metric, title) in enumerate(TITLES.items()):
            line = [f"{rate:.2f}" if place == 0 else "", title]
            line.append(_cell(values(rounds.get(BASELINE, []), metric), 1))
            for method in _others(measured):
                compared = ratios(measured, rate, method, metric)
                line.append(_cell(values(rounds.get(method, []), metric), 1))
                line += [_cell(compared, 2), verdict(compared, metric) or MISSING]
            body.append(line)
    return markdown(head, body)


def _others(measured: Measured) -> list[str]:
    methods = dict.fromkeys(method for rounds in measured.values() for method in rounds)
    return [method for method in methods if method != BASELINE]


def _cell(runs: Sequence[float], digits: int) -> str:
    return with_spread(statistics.median(runs), runs, digits) if runs else MISSING
