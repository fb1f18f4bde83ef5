"""How long a run takes, and what it sends."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Plan:
    """The parameters of a run.

    Attributes
    ----------
    minutes : float
        Duration, without the start of the servers.
    seed : int
        Seed of everything that is drawn.
    rate : float
        Hostile clients per second in the phases.
    drawn : int
        Maximum of bad requests that are drawn, in addition to the fixed ones.
    timed : bool
        Whether times and memory can be violations.
    phase_seconds : float
        Duration of a phase.
    """

    minutes: float
    seed: int
    rate: float = 20.0
    drawn: int = 1000
    timed: bool = True
    phase_seconds: float = 20.0

    @classmethod
    def quick(cls, seed: int) -> Plan:
        """Two minutes in which times and memory cannot be violations."""
        return cls(minutes=2, seed=seed, drawn=150, timed=False, phase_seconds=8)
