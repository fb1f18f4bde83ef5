"""The tables of servers under load."""

import pytest

from benchmarks.serving.arrivals import Latencies
from benchmarks.serving.latencies import Measured, table, verdict


def latencies(tpot: float, tokens_per_s: float = 50.0) -> Latencies:
    return {
        "tpot_mean": tpot, "tpot_p99": 2 * tpot, "ttft_mean": 50.0, "ttft_p99": 90.0,
        "tokens_per_s": tokens_per_s, "requests_per_s": 1.0,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("ratios", "metric", "expected"),
    [
        ([1.10, 1.12, 1.08], "tpot_mean", "worse"),
        ([1.10, 1.12, 1.08], "tokens_per_s", "better"),
        ([0.90, 0.88, 0.92], "ttft_p99", "better"),
        ([0.90, 0.88, 0.92], "tokens_per_s", "worse"),
        ([1.10, 0.99, 1.12], "tpot_mean", "within spread"),
        ([1.50], "tpot_mean", None),
    ],
)
def test_a_method_is_worse_if_its_ratio_differs_from_1_by_more_than_the_spread(
    ratios, metric, expected
):
    assert verdict(ratios, metric) == expected


def test_the_table_compares_round_by_round():
    # The machine was busy in the second round, which does not change the ratio.
    measured: Measured = {
        0.5: {
            "none": [latencies(10), latencies(20)],
            "lookahead": [latencies(8), latencies(16.4, tokens_per_s=40)],
        }
    }
    lines = table(measured).splitlines()
    cells = [cell.strip() for cell in lines[2].strip("|").split("|")]
    assert cells == [
        "0.50", "TPOT, mean, ms", "15.0 (10.0–20.0)", "12.2 (8.0–16.4)", "0.81 (0.80–0.82)",
        "better",
    ]  # fmt: skip
