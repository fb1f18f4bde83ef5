"""Which module computes what on which device.

A noun is a folder of `verify/`. Its `__init__.py` describes the arguments and checks them; the
modules beside it have functions of the same names for one device each, and say only what differs.
"""

import importlib
from types import ModuleType
from typing import Literal

import torch

Impl = Literal["auto", "cpu", "reference", "triton", "xformers"]
"""A module of a noun; "auto" is the one of the device. "reference" is plain PyTorch."""

_ON_BOTH = ("history", "place", "recurrence", "walk")

ON_CPUS = {
    **dict.fromkeys(_ON_BOTH, "cpu"),
    "attention": "reference",  # over a GPU's pages; `attention/cpu.py` reads a CPU's
    "latent": "reference",
}
ON_GPUS = {
    **dict.fromkeys(_ON_BOTH, "triton"),
    "attention": "triton",
    "latent": "triton",
}


def module_for(noun: str, device: torch.device, impl: Impl = "auto") -> ModuleType:
    """The module with the functions of `verify/<noun>/` for a device; imported at first use."""
    name = (ON_CPUS if device.type == "cpu" else ON_GPUS)[noun] if impl == "auto" else impl
    return importlib.import_module(f"{__package__}.{noun}.{name}")
