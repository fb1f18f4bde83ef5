"""Which module computes what on which device.

`verify/<noun>/__init__.py` checks the arguments and describes them; the functions of a device's
module, beside it, have the same names.
"""

from __future__ import annotations

import importlib
from types import ModuleType

import torch

_NOUNS = ("history", "place", "recurrence", "walk")

ON_GPUS = {noun: f"lookahead_vllm.verify.{noun}.triton" for noun in _NOUNS}
ON_CPUS = {noun: f"lookahead_vllm.verify.{noun}.cpu" for noun in _NOUNS}


def module_for(noun: str, device: torch.device) -> ModuleType:
    """The module with the functions of `verify/<noun>/` for a device."""
    return importlib.import_module((ON_CPUS if device.type == "cpu" else ON_GPUS)[noun])
