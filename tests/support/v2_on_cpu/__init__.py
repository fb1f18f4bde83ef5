"""vLLM's Model Runner V2 on a CPU at full speed, without Triton.

V2's kernels are written in Triton, which has no compiler for CPUs here. Numba and torch functions
stand in for vLLM's (`stand_in.STAND_INS`) and for lookahead's, which `verify/implementations.py`
finds; everything else is the code that runs on a GPU.

    from tests.support import v2_on_cpu

    v2_on_cpu.enable()             # before an engine is made; V2 is then vLLM's default
    with v2_on_cpu.enabled(): ...  # the same for a block
    servers.running(model, log, **v2_on_cpu.environment())  # for a server alone

`VLLM_USE_V2_MODEL_RUNNER=0` selects V1 as usual, `async_scheduling=False` synchronous steps.
"""

from __future__ import annotations

from tests.support.v2_on_cpu.activation import (
    disable,
    enable,
    enabled,
    environment,
    load_stand_ins,
    uses_stand_ins,
)

__all__ = [
    "disable",
    "enable",
    "enabled",
    "environment",
    "load_stand_ins",
    "uses_stand_ins",
]
