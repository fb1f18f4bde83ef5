"""The results of the simulated device, and the tables made of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from statistics import fmean, median, quantiles
from typing import Any, NamedTuple

from benchmarks.device.engine import Measurement
from benchmarks.device.pieces import PIECES
from lookahead_vllm.simulation.markdown import MISSING, markdown


class Method(NamedTuple):
    """What runs on the device."""

    second_runner: bool
    lookahead: bool
    proposer: str | None = None
    """None for the one that lookahead chooses."""
    waits: bool = False
    """Whether its steps are prepared only when their drafts are known."""


METHODS = {
    "plain_v1": Method(second_runner=False, lookahead=False),
    "plain_v2": Method(second_runner=True, lookahead=False),
    "lookahead_v1": Method(second_runner=False, lookahead=True),
    "lookahead_v2": Method(second_runner=True, lookahead=True),
    "hybrid_v2": Method(second_runner=True, lookahead=True, proposer="hybrid"),
    "waiting_v2": Method(second_runner=True, lookahead=True, waits=True),
}
"""V1 is vLLM's first model runner with synchronous steps, V2 the second with asynchronous ones."""

MIN_PIECE_US = 1.0
"""Pieces that take less of a wait are left out of the table."""


@dataclass(frozen=True)
class Row:
    """One method at one batch size; times in microseconds a step unless the name says otherwise."""

    method: str
    batch_size: int
    nodes: int
    device_wait_us: float
    """The median."""
    device_wait_p90_us: float
    device_wait_mean_us: float
    by_piece_us: dict[str, float]
    """What the host did while the device waited; the sum is the mean."""
    step_ms: float
    host_ms: float
    """The CPU time of the host, hidden behind the device or not."""
    nodes_sent: float
    tokens_per_step: float
    steps: int

    @property
    def name(self) -> str:
        """The method, with its nodes if it drafts."""
        return (
            f"{self.method}, {self.nodes} nodes" if METHODS[self.method].lookahead else self.method
        )

    def to_dict(self) -> dict[str, Any]:
        """The row as JSON."""
        return asdict(self)


def make_row(method: str, batch_size: int, nodes: int, measured: Measurement) -> Row:
    """The row of a measurement with at least two steps."""
    waits = measured.waits
    return Row(
        method=method,
        batch_size=batch_size,
        nodes=nodes,
        device_wait_us=median(waits),
        device_wait_p90_us=quantiles(waits, n=10, method="inclusive")[-1],
        device_wait_mean_us=fmean(waits),
        by_piece_us=measured.waits_by_piece,
        step_ms=measured.step_ms,
        host_ms=measured.host_ms,
        nodes_sent=measured.nodes_sent,
        tokens_per_step=measured.tokens_per_step,
        steps=len(waits),
    )


def wait_table(rows: Sequence[Row]) -> str:
    """The waits of each method, over batch sizes."""
    sizes = sorted({row.batch_size for row in rows})
    body = []
    for name in dict.fromkeys(row.name for row in rows):
        by_size = {row.batch_size: row for row in rows if row.name == name}
        body.append(
            [
                name,
                *(
                    f"{row.device_wait_us:.0f} ({row.device_wait_p90_us:.0f}, "
                    f"{row.device_wait_mean_us:.0f})"
                    if (row := by_size.get(size))
                    else MISSING
                    for size in sizes
                ),
            ]
        )
    head = ["device waits, µs: median (p90, mean)", *(f"batch {size}" for size in sizes)]
    return markdown(head, body)


def difference_table(rows: Sequence[Row]) -> str:
    """How much longer the device waits than under plain vLLM with the same runner; "" for none."""
    plain = {
        (METHODS[row.method].second_runner, row.batch_size): row
        for row in rows
        if not METHODS[row.method].lookahead
    }
    sizes = sorted({row.batch_size for row in rows})
    body = []
    drafting = [row for row in rows if METHODS[row.method].lookahead]
    for name in dict.fromkeys(row.name for row in drafting):
        cells = [name]
        for size in sizes:
            row = next((r for r in drafting if (r.name, r.batch_size) == (name, size)), None)
            base = row and plain.get((METHODS[row.method].second_runner, size))
            if row is None or base is None:
                cells.append(MISSING)
                continue
            added = row.device_wait_us - base.device_wait_us
            mean = row.device_wait_mean_us - base.device_wait_mean_us
            cells.append(f"{added:+.0f} ({mean:+.0f})")
        if set(cells[1:]) != {MISSING}:
            body.append(cells)
    if not body:
        return ""
    head = ["longer than plain, µs: median (mean)", *(f"batch {size}" for size in sizes)]
    return markdown(head, body)


def piece_table(rows: Sequence[Row]) -> str:
    """What the host did while the device waited, and what the steps were like."""
    pieces = [p for p in PIECES if any(row.by_piece_us[p] >= MIN_PIECE_US for row in rows)]
    body = [
        [
            f"{row.name}, batch {row.batch_size}",
            *(f"{row.by_piece_us[piece]:.0f}" for piece in pieces),
            f"{row.step_ms:.2f}",
            f"{row.host_ms:.2f}",
            f"{row.nodes_sent:.1f}",
            f"{row.tokens_per_step:.2f}",
        ]
        for row in rows
    ]
    head = ["the host meanwhile, µs, mean", *pieces, "step, ms", "host, ms", "nodes", "tokens/step"]
    return markdown(head, body)
