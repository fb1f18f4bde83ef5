"""Which module computes what on which device."""

from __future__ import annotations

import importlib
from types import ModuleType

import torch

_GPU, _CPU = "lookahead_vllm.verify.gpu", "lookahead_vllm.verify.cpu"

ON_GPUS = {
    "history": f"{_GPU}.triton_history",
    "place": f"{_GPU}.triton_place",
    "recurrence": f"{_GPU}.triton_recurrence",
    "walk": f"{_GPU}.triton_walk",
}
ON_CPUS = {"recurrence": f"{_CPU}.recurrence"}
"""The first model runner needs no others. The tests add theirs, to run the second one on a CPU."""


def module_for(noun: str, device: torch.device) -> ModuleType:
    """The module with the functions of `verify/<noun>.py` for a device."""
    return importlib.import_module((ON_CPUS if device.type == "cpu" else ON_GPUS)[noun])
