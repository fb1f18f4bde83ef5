"""Which module computes what on which device.

`verify/<noun>.py` checks the arguments and describes them; the functions of a device's module have
the same names.
"""

from __future__ import annotations

import importlib
from types import ModuleType

import torch

_NOUNS = ("history", "place", "recurrence", "walk")

ON_GPUS = {noun: f"lookahead_vllm.verify.gpu.triton_{noun}" for noun in _NOUNS}
ON_CPUS = {noun: f"lookahead_vllm.verify.cpu.{noun}" for noun in _NOUNS}


def module_for(noun: str, device: torch.device) -> ModuleType:
    """The module with the functions of `verify/<noun>.py` for a device."""
    return importlib.import_module((ON_CPUS if device.type == "cpu" else ON_GPUS)[noun])
