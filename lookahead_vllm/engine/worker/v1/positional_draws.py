"""Seeded draws as vLLM's second model runner makes them, which is the default on GPUs.

Lookahead runs on the first runner. That one keeps a generator for each seeded request, and tapes
of it (`verify/seeded_draws.py`) tell what nodes draw. In the second one nothing is kept: the noise
of a token is a function of the request's seed, the position it is drawn at and the token, so a
node's draw is its position's.
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
    """Stands in the place of the `topk_topp_sampler` of vLLM's first sampler, around it."""

    def __init__(self, original: TopKTopPSampler) -> None:
        super().__init__()
        self._original = original
        self.positions: torch.Tensor | None = None
        """int64 [rows]: where the next call's rows are drawn, that of the token before; None where
        no request has a seed."""

    def forward(
        self,
        logits: torch.Tensor,
        generators: Mapping[int, torch.Generator],
        k: torch.Tensor | None,
        p: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Tokens int64 [rows], and what the rows' logprobs are taken from, if not the model's.

        A generator stands for its seed. Without any, the draws are the original's.
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
        """Compile the kernel, so that no request waits for it."""
        self.positions = torch.zeros(1, dtype=torch.int64, device=device)
        self(torch.zeros(1, vocab, device=device), {0: torch.Generator(device)}, None, None)

    @contextmanager
    def of_rows(self, some: torch.Tensor) -> Iterator[None]:
        """Let the next calls be for some of the rows alone, int64 [n]."""
        every = self.positions
        self.positions = None if every is None else every[some]
        try:
            yield
        finally:
            self.positions = every


def _signed(seed: int) -> int:
    """A generator's seed, which has no sign, as a request gave it."""
    return seed - (seed >> 63 << 64)
