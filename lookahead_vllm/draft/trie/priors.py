"""Acceptance rates that a new trie starts from, learned from replayed texts.

A rate belongs to a kind of evidence and to no token, so `priors.npz` holds no text and suits any
tokenizer. `scripts/learn_priors.py` makes it.
"""

from __future__ import annotations

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
                f"{num_rates}; delete it and run scripts/learn_priors.py"
            )
        return Priors(file["indices"], file["shares"].astype(np.float32))


def of_trials(hits: NDArray[np.float32], trials: NDArray[np.float32]) -> Priors:
    """The shares of the rates with enough trials, rounded as in a file.

    Parameters
    ----------
    hits, trials : float32 [num_rates]
        As an `AcceptanceRate` has counted them.
    """
    indices = np.flatnonzero(trials >= TRIALS)
    shares = (hits[indices] / trials[indices]).astype(np.float16)
    return Priors(indices.astype(np.uint16), shares.astype(np.float32))


def save(hits: NDArray[np.float32], trials: NDArray[np.float32], path: Path = PATH) -> Priors:
    """Write the priors `of_trials`; returns what `load` will return."""
    priors = of_trials(hits, trials)
    shares = priors.shares.astype(np.float16)
    np.savez_compressed(path, num_rates=len(trials), indices=priors.indices, shares=shares)
    return priors
