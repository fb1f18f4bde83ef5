"""Lookahead Decoding for one request, as slowly and plainly as the paper writes it.

Source: Fu et al., ICML 2024, Algorithms 2 (both branches), 3 and 4 (verification). Every cell and
every candidate is a text of its own that the model is asked about; there is no mask, no batch and
no KV cache.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

Choose = Callable[[list[list[int]]], list[int]]
"""What the model says after each of some texts."""


class Draws:
    """The pseudo-random tokens of a prompt that windows are filled with."""

    def __init__(self, prompt: Sequence[int]) -> None:
        n = min(64, len(prompt))
        last = len(prompt) - 1
        self.seeds = [prompt[int(i * last / (n - 1)) if n > 1 else 0] for i in range(n)]
        self.state = 1

    def __call__(self) -> int:
        self.state = (self.state * 6364136223846793005 + 1442695040888963407) % 2**64
        return self.seeds[(self.state >> 33) % len(self.seeds)]


def bursts(
    prompt: list[int],
    answer: list[int],
    choose: Choose,
    window_size: int,
    ngram_size: int,
    guess_set_size: int,
    pool_from_prompt: bool = False,
    shift: str = "one",
) -> list[list[int]]:
    """What is emitted step by step, where the model samples `answer`; the prefill's token first.

    The walk through the candidates is the same for greedy decoding and for sampling (Algorithms 3
    and 4): the token that the model samples at a node is the next of the answer, and a branch
    goes on as long as it has that token.
    """
    w, n = window_size, ngram_size
    draw = Draws(prompt)
    levels = [[-1] + [draw() for _ in range(w + n - 3)]]
    pool: dict[int, list[tuple[int, ...]]] = {}

    def meet(first: int, rest: tuple[int, ...]) -> None:
        known = pool.setdefault(first, [])
        if rest in known:
            known.remove(rest)
        known.append(rest)
        del known[:-guess_set_size]

    if pool_from_prompt:
        for i in range(len(prompt) - n + 1):
            meet(prompt[i], tuple(prompt[i + 1 : i + n]))
    text = list(prompt)
    done: list[list[int]] = []

    def commit(burst: list[int]) -> None:
        for token in burst:
            text.append(token)
            if len(text) >= n and len(text) - n >= len(prompt) - n + 1:
                meet(text[-n], tuple(text[-n + 1 :]))
        done.append(burst)

    commit(answer[:1])
    at = 1
    while at < len(answer):
        left = len(answer) - at - 1  # the deepest node that can still be accepted
        if left < 1:
            commit(answer[at:])
            break
        root, columns = text[-1], len(levels[0])
        candidates = [list(rest) for rest in reversed(pool.get(root, []))]
        paths = {
            (k, j): [*levels[0][1 : j + 1], *(levels[i][j] for i in range(1, k + 1))]
            for k in range(len(levels))
            for j in range(columns)
        }
        # Verification: the deepest node that agrees, among candidates and cells.
        hits = 0
        for branch in [*candidates, *paths.values()]:
            depth = 0
            while depth < min(len(branch), left) and branch[depth] == answer[at + depth]:
                depth += 1
            hits = max(hits, depth)
        # Lookahead: what the model says after each cell of the last level.
        last = len(levels) - 1
        cells = [(j, paths[last, j]) for j in range(columns) if last + j <= left]
        said_at = dict(
            zip((j for j, _ in cells), choose([text + path for _, path in cells]), strict=True)
        )
        said = [said_at[j] if j in said_at else draw() for j in range(columns)]
        full = len(levels) == n - 1
        ngrams = [
            ((levels[0][j] if j else root), (*(level[j] for level in levels[1:]), said[j]))
            for j in range(columns)
            if full and j in said_at
        ]
        commit(answer[at : at + hits + 1])
        at += hits + 1
        for first, rest in ngrams:
            meet(first, rest)
        if full:
            levels = [*levels[1:], said]
        else:
            levels = [level[1:] for level in levels] + [said[1:]]
        if shift == "one":
            continue
        for _ in range(hits):
            if shift == "paper" and len(levels) == n - 1:
                levels = [*levels[1:], [draw() for _ in levels[0]]]
            else:
                levels = [[*level[1:], draw()] for level in levels]
    return done
