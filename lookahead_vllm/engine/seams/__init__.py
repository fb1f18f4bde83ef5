"""Every place where lookahead touches vLLM, one file per area (config, scheduler, attention, ...).

`compatibility.py` compares all of them with an installation of vLLM.
"""

from lookahead_vllm.engine.seams import (
    attention,
    config,
    front_end,
    graphs_v2,
    late_shape_v2,
    recurrent,
    scheduler,
    worker,
    worker_v1,
    worker_v2,
)
from lookahead_vllm.engine.seams.seam import Seam

COMMON: tuple[Seam, ...] = (
    *config.SEAMS,
    *front_end.SEAMS,
    *scheduler.SEAMS,
    *worker.SEAMS,
    *attention.SEAMS,
)
"""Whichever model runner is used."""

BY_RUNNER: dict[str, tuple[Seam, ...]] = {
    "v1": (*worker_v1.SEAMS, *recurrent.SEAMS),
    "v2": (*worker_v2.SEAMS, *graphs_v2.SEAMS, *late_shape_v2.SEAMS),
}
"""What only one of vLLM's model runners needs."""

SEAMS: tuple[Seam, ...] = (*COMMON, *BY_RUNNER["v1"], *BY_RUNNER["v2"])

__all__ = ["BY_RUNNER", "COMMON", "SEAMS", "Seam"]
