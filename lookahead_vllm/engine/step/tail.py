"""The tail of a step: what follows the model, in a captured graph of its own.

It serves steps whose requests are drawn from the model's logits as they are, scaled by a
temperature. All that it reads is at fixed addresses.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from vllm.v1.worker.gpu.buffer_utils import StagedWriteTensor
from vllm.v1.worker.gpu.sample.gumbel import gumbel_sample

from lookahead_vllm.verify.choices import pack_choices
from lookahead_vllm.verify.place import StepRows
from lookahead_vllm.verify.walk import empty_walk, walk


class Draws:
    """What draws the tokens of requests, by their entries: vLLM's own copies move.

    Attributes
    ----------
    suffices : bool [entries]
        Whether a request needs nothing else: no processing of its logits, no logprobs.
    """

    def __init__(self, num_entries: int, device: torch.device) -> None:
        self.suffices: NDArray[np.bool_] = np.zeros(num_entries, np.bool_)
        self._temperatures = StagedWriteTensor(num_entries, torch.float32, device)
        self._seeds = StagedWriteTensor(num_entries, torch.int64, device)

    def add_request(self, entry: int, temperature: float, seed: int, suffices: bool) -> None:
        """A request begins; the device knows of it after `apply_staged_writes`."""
        self._temperatures.stage_write_elem(entry, temperature)
        self._seeds.stage_write_elem(entry, seed)
        self.suffices[entry] = suffices

    def apply_staged_writes(self) -> None:
        """Copy what is new to the device."""
        self._temperatures.apply_write()
        self._seeds.apply_write()

    def sample(self, logits: Tensor, entries: Tensor, positions: Tensor, use_fp64: bool) -> Tensor:
        """The tokens of n rows, int64 [n], as vLLM's sampler draws them.

        Parameters
        ----------
        logits : float [n, vocabulary]
            They are not changed.
        entries : int64 [n]
            NO_ENTRY for padding.
        positions : int64 [n]
        """
        sampled: Tensor = gumbel_sample(
            logits,
            entries,
            self._temperatures.gpu,
            self._seeds.gpu,
            positions,
            apply_temperature=True,
            is_drafting=False,
            use_fp64=use_fp64,
        )
        return sampled


class Emitted(NamedTuple):
    """Buffers of all tails, for at most m requests: the host copies them while the next graph runs,
    so only the next tail has to follow the copy."""

    tokens: Tensor
    """int64 [m, width]: as in `Walk`."""
    num_sampled: Tensor
    """int32 [m]: as in `Walk`."""

    @classmethod
    def empty(cls, num_requests: int, width: int, device: torch.device) -> "Emitted":
        """New buffers; `width` is at least the most rows of a request."""
        tokens = torch.empty(num_requests, width, dtype=torch.int64, device=device)
        return cls(tokens, torch.empty(num_requests, dtype=torch.int32, device=device))


class Sampled(NamedTuple):
    """What the tail of n rows and r requests leaves at fixed addresses, padding included."""

    tokens: Tensor
    """int64 [r, width]: as in `Walk`. This and `num_sampled` are the first rows of `Emitted`."""
    num_sampled: Tensor
    """int32 [r]: as in `Walk`."""
    num_rejected: Tensor
    """int32 [r]: the nodes of each request that were not accepted. The memory of this and the rest
    belongs to all graphs: it must be read, in stream order, before the next one runs."""
    choices: Tensor | None
    """int32 [2, n, k]: as `pack_choices` returns them."""


def run_tail(
    logits: Tensor,
    rows: StepRows,
    indices: Tensor,
    draws: Draws,
    movers: Sequence[Any],
    emitted: Emitted,
    use_fp64: bool,
    num_choices: int,
) -> Sampled:
    """Sample at all rows of a step that only decodes, walk, and move the KV of accepted nodes.

    Parameters
    ----------
    logits : float [n, vocabulary]
    rows
        n rows and r requests, with padding: rows without an entry, requests without rows.
    indices : int64 [n]
        0, 1, ...
    movers
        One for each group of layers, see `kv_movers`; none if trees do not branch.
    num_choices : int
        How many of the model's choices at each row are wanted.
    """
    sampled = draws.sample(logits, rows.entries, rows.positions, use_fp64)
    num_requests, width = len(rows.lengths), emitted.tokens.shape[1]
    path = empty_walk(len(logits), num_requests, width, logits.device)
    tokens, num_sampled = (part[:num_requests] for part in emitted)
    path = path._replace(tokens=tokens, num_sampled=num_sampled)
    walk(rows.ids, sampled, rows.parents, rows.starts, indices, width, path)
    for mover, slots in zip(movers, rows.slots, strict=bool(movers)):
        mover.move_paths(slots[path.origins], slots[path.targets])
    num_rejected = rows.starts.diff() - path.num_sampled
    choices = pack_choices(logits, num_choices) if num_choices else None
    return Sampled(path.tokens, path.num_sampled, num_rejected, choices)
