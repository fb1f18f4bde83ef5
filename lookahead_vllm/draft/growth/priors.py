"""Acceptance rates that a new trie starts from, learned from replayed texts.

A rate belongs to a kind of evidence and to no token, so `priors.npz` holds no text and suits any
tokenizer. `scripts/learn_priors.py` in commit cdeda46 makes it.
"""

import functools
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

PATH = Path(__file__).with_name("priors.npz")

TRIALS = 20
"""Trials that a prior counts for. Rates with fewer trials in the replayed texts have none."""


class Priors(NamedTuple):
    """Some of the rates of an `AcceptanceRate`."""

    indices: NDArray[np.uint16]
    """uint16 [n]: which."""
    shares: NDArray[np.float32]
    """float32 [n]: their hits over their trials."""


@functools.cache
def load(num_rates: int, path: Path = PATH) -> Priors | None:
    """Read priors; None if there is no such file.

    Raises
    ------
    ValueError
        They were learned for another number of rates.
    """
    if not path.exists():
        return None
    with np.load(path) as file:
        if file["num_rates"] != num_rates:
            raise ValueError(
                f"{path.name} was learned for {file['num_rates']} rates, and there are "
                f"{num_rates}; delete it and learn them anew"
            )
        return Priors(file["indices"], file["shares"].astype(np.float32))
