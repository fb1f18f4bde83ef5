"""The results of the simulated device, and the table made of them."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from benchmarks.device.engine import Measurement
from lookahead_vllm.simulation.markdown import MISSING, markdown


class Method(NamedTuple):
    """What runs on the device."""

    lookahead: bool
    proposer: str | None = None
    """None for the one that lookahead chooses."""
    waits: bool = False
    """Whether its steps are prepared only when their drafts are known."""
    drafter: bool = False
    """Whether a trained drafter's chain is in its trees."""


METHODS = {
    "plain": Method(lookahead=False),
    "lookahead": Method(lookahead=True),
    "hybrid": Method(lookahead=True, proposer="hybrid"),
    "waiting": Method(lookahead=True, waits=True),
    "drafter": Method(lookahead=True, drafter=True),
}


@dataclass(frozen=True)
class Run:
    """One engine to measure."""

    method: str
    batch_size: int
    nodes: int

    @property
    def name(self) -> str:
        """The method, with its nodes if it drafts, and the batch size."""
        nodes = f", {self.nodes} nodes" if METHODS[self.method].lookahead else ""
        return f"{self.method}{nodes}, batch {self.batch_size}"


@dataclass(frozen=True)
class Row(Measurement, Run):
    """A run and what was measured."""


def table(rows: Sequence[Row]) -> str:
    """A line for each row."""
    plain = {row.batch_size: row.device_wait_us for row in rows if row.method == "plain"}
    body = []
    for row in rows:
        base = plain.get(row.batch_size)
        waits = (row.device_wait_us, row.device_wait_p90_us, row.device_wait_mean_us)
        body.append(
            [
                row.name,
                "{:.0f} ({:.0f}, {:.0f})".format(*waits),
                MISSING if base is None else f"{row.device_wait_us - base:+.0f}",
                f"{row.step_ms:.2f}",
                f"{1e-3 * row.host_us:.2f}",
                f"{1e-3 * row.polled_us:.2f}",
                f"{row.launches:.0f}",
                f"{row.nodes_sent:.1f}",
                f"{row.tokens_per_step:.2f}",
            ]
        )
    head = ["", "device waits, µs: median (p90, mean)", "longer", "step, ms", "host, ms"]
    head += ["polled, ms", "launches"]
    return markdown([*head, "nodes", "tokens/step"], body)
