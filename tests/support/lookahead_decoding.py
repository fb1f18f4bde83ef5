"""A reference implementation of Lookahead Decoding for one request.

Source: Fu et al., ICML 2024, Algorithms 2 (both branches), 3 and 4 (verification). The model is run
on a separate text for every cell, without masks, batches or a KV cache.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

Choose = Callable[[list[list[int]]], list[int]]
"""Returns the model's next token for each text."""


class RandomTokens:
    """The pseudo-random tokens of a prompt with which windows are filled."""

    def __init__(self, prompt: Sequence[int]) -> None:
        n = min(64, len(prompt))
        last = len(prompt) - 1
        self.seeds = [prompt[int(i * last / (n - 1)) if n > 1 else 0] for i in range(n)]
        self.state = 1

    def __call__(self) -> int:
        self.state = (self.state * 6364136223846793005 + 1442695040888963407) % 2**64
        return self.seeds[(self.state >> 33) % len(self.seeds)]


def tokens_by_step(
    prompt: list[int],
    answer: list[int],
    choose: Choose,
    window_size: int,
    ngram_size: int,
    guess_set_size: int,
    pool_from_prompt: bool = False,
) -> list[list[int]]:
    """The tokens that each step emits if the model samples `answer`; the prefill is the first step.

    Verification is the same for greedy decoding and for sampling (Algorithms 3 and 4). The token
    that the model samples at a node is the next token of the answer, and a branch is accepted as
    long as it has these tokens.
    """
    w, n = window_size, ngram_size
    draw = RandomTokens(prompt)
    levels = [[-1] + [draw() for _ in range(w + n - 3)]]
    pool: dict[int, list[tuple[int, ...]]] = {}

    def insert(first: int, rest: tuple[int, ...]) -> None:
        guesses = pool.setdefault(first, [])
        if rest in guesses:
            guesses.remove(rest)
        guesses.append(rest)
        del guesses[:-guess_set_size]

    if pool_from_prompt:
        for i in range(len(prompt) - n + 1):
            insert(prompt[i], tuple(prompt[i + 1 : i + n]))
    text = list(prompt)
    steps: list[list[int]] = []

    def commit(tokens: list[int]) -> None:
        for token in tokens:
            text.append(token)
            if len(text) >= n and len(text) - n >= len(prompt) - n + 1:
                insert(text[-n], tuple(text[-n + 1 :]))
        steps.append(tokens)

    commit(answer[:1])
    at = 1
    while at < len(answer):
        max_depth = len(answer) - at - 1  # of a node that can be accepted
        if max_depth < 1:
            commit(answer[at:])
            break
        root, columns = text[-1], len(levels[0])
        candidates = [list(rest) for rest in reversed(pool.get(root, []))]
        paths = {
            (k, j): [*levels[0][1 : j + 1], *(levels[i][j] for i in range(1, k + 1))]
            for k in range(len(levels))
            for j in range(columns)
        }
        # Verification: the longest accepted path among candidates and cells.
        accepted = 0
        for branch in [*candidates, *paths.values()]:
            depth = 0
            while depth < min(len(branch), max_depth) and branch[depth] == answer[at + depth]:
                depth += 1
            accepted = max(accepted, depth)
        # Lookahead: the model's token after each cell of the last level.
        last = len(levels) - 1
        cells = [(j, paths[last, j]) for j in range(columns) if last + j <= max_depth]
        output_at = dict(
            zip((j for j, _ in cells), choose([text + path for _, path in cells]), strict=True)
        )
        new_level = [output_at[j] if j in output_at else draw() for j in range(columns)]
        is_full = len(levels) == n - 1
        ngrams = [
            ((levels[0][j] if j else root), (*(level[j] for level in levels[1:]), new_level[j]))
            for j in range(columns)
            if is_full and j in output_at
        ]
        commit(answer[at : at + accepted + 1])
        at += accepted + 1
        for first, rest in ngrams:
            insert(first, rest)
        if is_full:
            levels = [*levels[1:], new_level]
        else:
            levels = [level[1:] for level in levels] + [new_level[1:]]
    return steps
