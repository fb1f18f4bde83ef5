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
    runner : str
        vLLM's model runner of both servers: "v1" or "v2".
    """

    minutes: float
    seed: int
    rate: float = 20.0
    drawn: int = 1000
    timed: bool = True
    phase_seconds: float = 20.0
    runner: str = "v1"

    @classmethod
    def quick(cls, seed: int, runner: str = "v1") -> Plan:
        """Half a minute in which times and memory cannot be violations."""
        return cls(0.5, seed, 40.0, drawn=50, timed=False, phase_seconds=2.0, runner=runner)
