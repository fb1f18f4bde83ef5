"""Random draws of seeded requests, for draft nodes.

Without speculation, vLLM draws from a request's generator once per emitted token. A node at depth d
is the output d positions after the root's, so it needs the draw of that output. After the step, the
generator must have advanced by as many draws as tokens were emitted.
"""

from __future__ import annotations

from collections.abc import Callable

import torch


class GeneratorStates:
    """The states that a generator passes through over its next `length` draws.

    Parameters
    ----------
    generator
        The request's generator; the constructor does not advance it.
    draw
        Advances a generator by the sampler's draw for one token.
    length
        Number of draws to look ahead.
    """

    def __init__(
        self, generator: torch.Generator, draw: Callable[[torch.Generator], object], length: int
    ) -> None:
        self._generator = generator
        copy = torch.Generator(generator.device)
        self._states = [generator.get_state()]
        copy.set_state(self._states[0])
        for _ in range(length):
            draw(copy)
            self._states.append(copy.get_state())

    def generator_after(self, draws: int) -> torch.Generator:
        """A new generator, `draws` draws ahead of the request's."""
        generator = torch.Generator(self._generator.device)
        generator.set_state(self._states[draws])
        return generator

    def advance(self, draws: int) -> None:
        """Move the request's generator `draws` draws ahead of where it was at construction."""
        self._generator.set_state(self._states[draws])
