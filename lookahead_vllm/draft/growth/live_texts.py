"""The texts of the live requests, and the spaces that they read and write."""

import numpy as np

from lookahead_vllm.draft.growth.candidates import CHOICES, NUM_SPACES
from lookahead_vllm.draft.jit import Int32s, Int64s, kernel
from lookahead_vllm.draft.progress import no_chains
from lookahead_vllm.draft.request_rows import RequestRows
from lookahead_vllm.draft.sources import ANSWERS
from lookahead_vllm.draft.tree import UNKNOWN
from lookahead_vllm.draft.trie.sessions import MAX_ANSWER_TOKENS, Session
from lookahead_vllm.draft.trie.suffix import NUM_HASHES, Hashes
from lookahead_vllm.draft.trie.table import NO_SPACE


class LiveTexts:
    """A row for each live request.

    Attributes
    ----------
    hashes : uint64 [capacity, NUM_HASHES]
    spaces : int32 [capacity, NUM_SPACES]
    numbers : int64 [capacity]
        A number for each request, which no later one gets.
    chains : int32 [capacity, chain_length, NUM_ALTERNATIVES, 2]
        What a trained drafter proposes after each text.
    sessions : dict of int to Session
        By row, of the texts that are in the trie.
    """

    def __init__(self, chain_length: int) -> None:
        self.request_rows = RequestRows()
        self.hashes: Hashes = np.zeros((self.request_rows.capacity, NUM_HASHES), np.uint64)
        self.spaces: Int32s = np.zeros((self.request_rows.capacity, NUM_SPACES), np.int32)
        self.numbers: Int64s = np.zeros(self.request_rows.capacity, np.int64)
        self._last_number = 0
        self.chains = no_chains(chain_length, self.request_rows.capacity)
        self.sessions: dict[int, Session] = {}
        self._answers: Int32s = np.empty((self.request_rows.capacity, MAX_ANSWER_TOKENS), np.int32)
        """int32 [capacity, MAX_ANSWER_TOKENS]: the tokens that were inserted behind each prompt."""
        self._answer_sizes: Int64s = np.zeros(self.request_rows.capacity, np.int64)
        """int64 [capacity]: how many; those behind MAX_ANSWER_TOKENS are counted, not kept."""
        self._with_choices = True
        self._choices: Int32s = np.zeros(self.request_rows.capacity, np.int32)
        """int32 [capacity]: each text's space for the model's choices, also while it is unused."""

    @property
    def arrays(self) -> tuple[Hashes, Int32s, Int32s]:
        """The fields of TextArrays."""
        return self.hashes, self.spaces, self.chains

    def add(self, request_id: str) -> int:
        """The row of a new text, which has no spaces yet."""
        row = self.request_rows.add(request_id)
        self.hashes = self.request_rows.resized(self.hashes)
        self.spaces = self.request_rows.resized(self.spaces)
        self.numbers = self.request_rows.resized(self.numbers)
        self.chains = self.request_rows.resized(self.chains)
        self._choices = self.request_rows.resized(self._choices)
        self._answers = self.request_rows.resized(self._answers)
        self._answer_sizes = self.request_rows.resized(self._answer_sizes)
        self._answer_sizes[row] = 0
        self.spaces[row], self._choices[row] = NO_SPACE, NO_SPACE
        self._last_number += 1
        self.numbers[row] = self._last_number
        self.chains[row] = UNKNOWN
        return row

    def add_to_answers(self, rows: Int64s, tokens: Int32s, sizes: Int64s) -> None:
        """The `tokens` int32 [n] of these texts were inserted, `sizes` int64 [t] of each."""
        add_to_answers(self._answers, self._answer_sizes, rows, tokens, sizes)

    def answer_of(self, row: int) -> Int32s | None:
        """The tokens that were inserted behind a prompt; None if they are too many."""
        size = self._answer_sizes[row]
        return self._answers[row, :size] if size <= MAX_ANSWER_TOKENS else None

    def keep_choices_in(self, row: int, space: int) -> None:
        """Give the text a space for the model's choices."""
        self._choices[row] = space
        if self._with_choices:
            self.spaces[row, CHOICES] = space

    def use_choices(self, with_choices: bool) -> None:
        """Whether all texts read and write the model's choices from now on."""
        self._with_choices = with_choices
        self.spaces[:, CHOICES] = self._choices if with_choices else NO_SPACE

    def spaces_of(self, row: int) -> set[int]:
        """All spaces of a text."""
        return {*self.spaces[row].tolist(), int(self._choices[row])}

    def shared_spaces(self) -> set[int]:
        """The shared spaces of the texts, and possibly of some ended requests."""
        return {*self.spaces[:, ANSWERS].tolist(), *self._choices.tolist()}


@kernel
def add_to_answers(
    answers: Int32s, answer_sizes: Int64s, rows: Int64s, tokens: Int32s, sizes: Int64s
) -> None:
    at = 0
    for i, row in enumerate(rows):
        for _ in range(sizes[i]):
            if answer_sizes[row] < answers.shape[1]:
                answers[row, answer_sizes[row]] = tokens[at]
            answer_sizes[row] += 1
            at += 1
