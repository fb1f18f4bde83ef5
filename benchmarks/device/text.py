"""The texts that the simulated model writes: each token follows from the last one and its place."""

import random
from typing import Any

VOCABULARY = 1024
MAX_POSITIONS = 8192

LOOP, NUM_LOOPS = 16, 8
"""A patterned text is in one of some loops of tokens ..."""
SURPRISE = 0.3
"""... and goes to another one after a token with this probability."""

NUM_SURPRISES = 65_521


class Text:
    """A rule by which texts go on.

    The next token depends on the token and its position alone. So it is known at every node of a
    draft tree without attention, and trees change no answer. Patterned texts have loops that
    drafters learn; in others, the next token is any of the vocabulary's, with the same probability.
    """

    def __init__(self, patterned: bool) -> None:
        rng = random.Random(0)
        self.patterned = patterned
        self.shifts = [rng.randrange(VOCABULARY) for _ in range(MAX_POSITIONS)]
        self.surprises = [
            rng.randrange(LOOP * NUM_LOOPS) if rng.random() < SURPRISE else -1
            for _ in range(NUM_SURPRISES)
        ]

    def next_token(self, token: int, position: int) -> int:
        """The token after `token` at `position`."""
        if not self.patterned:
            # For one position a bijection, so that two texts never become the same.
            return (5 * token + self.shifts[position % MAX_POSITIONS]) % VOCABULARY
        surprise = self.surprises[(131 * position + token) % NUM_SURPRISES]
        return surprise if surprise >= 0 else token - token % LOOP + (token + 1) % LOOP

    def prompts(self, number: int, length: int) -> list[list[int]]:
        """Prompts that the rule wrote itself, each from another token on."""
        result = []
        for i in range(number):
            tokens = [i * 7 % (LOOP * NUM_LOOPS if self.patterned else VOCABULARY)]
            while len(tokens) < length:
                tokens.append(self.next_token(tokens[-1], len(tokens) - 1))
            result.append(tokens)
        return result


class TextOnDevice:
    """The same rule for tensors."""

    def __init__(self, text: Text) -> None:
        import torch

        self._patterned = text.patterned
        self._shifts = torch.tensor(text.shifts)
        self._surprises = torch.tensor(text.surprises)

    def next_tokens(self, tokens: Any, positions: Any) -> Any:
        """The tokens after `tokens` at `positions`, both integers [n]; int64 [n]."""
        tokens, positions = tokens.long(), positions.long()
        if not self._patterned:
            return (5 * tokens + self._shifts[positions % MAX_POSITIONS]) % VOCABULARY
        surprises = self._surprises[(131 * positions + tokens) % NUM_SURPRISES]
        return surprises.where(surprises >= 0, tokens - tokens % LOOP + (tokens + 1) % LOOP)
