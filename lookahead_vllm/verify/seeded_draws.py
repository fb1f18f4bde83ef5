"""The random draws of a seeded request, looked at before they are spent.

Without speculation a request's generator is drawn from once per emitted token. A node at depth d
stands for the output d places after the root's, so it has to use that output's draw; and when the
step is over, the generator has to stand where it would after as many tokens as were emitted.
"""

from __future__ import annotations

from collections.abc import Callable

import torch


class GeneratorStates:
    """The states that a generator passes through over its next `length` draws.

    Parameters
    ----------
    generator
        The request's own; the tape leaves it where it was.
    draw
        Advances a generator by what the sampler draws for one token.
    length
        How many draws ahead to look.
    """

    def __init__(
        self, generator: torch.Generator, draw: Callable[[torch.Generator], object], length: int
    ) -> None:
        self._generator = generator
        scout = torch.Generator(generator.device)
        self._states = [generator.get_state()]
        scout.set_state(self._states[0])
        for _ in range(length):
            draw(scout)
            self._states.append(scout.get_state())

    def after(self, draws: int) -> torch.Generator:
        """A new generator that stands `draws` draws ahead."""
        generator = torch.Generator(self._generator.device)
        generator.set_state(self._states[draws])
        return generator

    def spend(self, draws: int) -> None:
        """Move the request's own generator `draws` draws ahead."""
        self._generator.set_state(self._states[draws])
