"""Seeded draws that equal those of vLLM's second model runner, its default on GPUs.

Lookahead runs on the first runner, which keeps a generator for each seeded request
(`verify/seeded_draws.py`). The second runner keeps no generators: the noise of a token is a
function of the request's seed, the token's position and the token. So the draw of a node is the
draw of its position.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
from vllm.v1.sample.ops.topk_topp_sampler import apply_top_k_top_p
from vllm.v1.worker.gpu.sample.gumbel import gumbel_sample

if TYPE_CHECKING:
    from vllm.v1.sample.ops.topk_topp_sampler import TopKTopPSampler


class SeededSampler(torch.nn.Module):
    """Replaces the `topk_topp_sampler` of the first runner's sampler, and wraps it.

    Attributes
    ----------
    positions : int64 [rows] or None
        The position of the token before each row of the next call; None if no request has a seed.
    """

    def __init__(self, original: TopKTopPSampler) -> None:
        super().__init__()
        self._original = original
        self.positions: torch.Tensor | None = None

    def forward(
        self,
        logits: torch.Tensor,
        generators: Mapping[int, torch.Generator],
        k: torch.Tensor | None,
        p: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Sampled tokens int64 [rows], and processed logits or logprobs where those are wanted.

        Only the seed of each generator is used. Without generators the original sampler draws.
        """
        if not generators or self.positions is None:
            return self._original(logits, generators, k, p)
        logits = apply_top_k_top_p(logits, k, p)
        device, num_rows = logits.device, len(logits)
        seeds = torch.randint(-(2**63), 2**63 - 1, (num_rows,), device=device)
        given = [(row, _signed(g.initial_seed())) for row, g in generators.items()]
        rows, own = torch.tensor(given).to(device).unbind(dim=1)
        seeds[rows] = own
        sampled = gumbel_sample(
            logits,
            torch.arange(num_rows, device=device),
            torch.ones(num_rows, device=device),
            seeds,
            self.positions,
            apply_temperature=False,
            is_drafting=False,
            use_fp64=self._original.use_fp64_gumbel,
        )
        mode = self._original.logprobs_mode
        if mode == "processed_logits":
            return sampled, logits
        if mode == "processed_logprobs":
            return sampled, logits.log_softmax(dim=-1, dtype=torch.float32)
        return sampled, None

    def warm_up(self, vocab: int, device: torch.device) -> None:
        """Compile the sampling kernel, so that no request waits for it."""
        self.positions = torch.zeros(1, dtype=torch.int64, device=device)
        self(torch.zeros(1, vocab, device=device), {0: torch.Generator(device)}, None, None)

    @contextmanager
    def of_rows(self, some: torch.Tensor) -> Iterator[None]:
        """Within the block, calls are for these rows only, int64 [n]."""
        every = self.positions
        self.positions = None if every is None else every[some]
        try:
            yield
        finally:
            self.positions = every


def _signed(seed: int) -> int:
    """The signed seed that a request gave, from the generator's unsigned one."""
    return seed - (seed >> 63 << 64)
