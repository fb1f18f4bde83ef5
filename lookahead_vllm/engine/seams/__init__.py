"""Every place where lookahead touches vLLM, one file for each of vLLM's processes.

`compatibility.py` compares all of them with an installation of vLLM.
"""

from lookahead_vllm.engine.seams import (
    attention_v1,
    config,
    front_end,
    scheduler,
    shutdown,
    worker,
    worker_v1,
)
from lookahead_vllm.engine.seams.seam import Seam

SEAMS: tuple[Seam, ...] = (
    *config.SEAMS,
    *front_end.SEAMS,
    *scheduler.SEAMS,
    *shutdown.SEAMS,
    *worker.SEAMS,
    *worker_v1.SEAMS,
    *attention_v1.SEAMS,
)

__all__ = ["SEAMS", "Seam"]
