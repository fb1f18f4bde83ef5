"""Every place in vLLM that lookahead replaces or overrides, one file for each area.

What is only called, read or set is found in the code itself, see `compatibility.problems`.
"""

from lookahead_vllm.engine.seams import (
    front_end,
    recurrent,
    scheduler,
    worker,
    worker_v1,
    worker_v2,
)
from lookahead_vllm.engine.seams.seam import Seam

SEAMS: tuple[Seam, ...] = (
    *front_end.SEAMS,
    *scheduler.SEAMS,
    *worker.SEAMS,
    *worker_v1.SEAMS,
    *recurrent.SEAMS,
    *worker_v2.SEAMS,
)

__all__ = ["SEAMS", "Seam"]
