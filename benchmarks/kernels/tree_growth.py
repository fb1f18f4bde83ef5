"""Time the growth of a step's trees over the number of threads, without a model.

The texts are made of sentences that repeat with errors, from a fixed seed. One proposer for each
number of threads learns the same texts. In every step they take turns, in changing order, so that
other load on the machine affects all of them.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from statistics import median

import numpy as np

from lookahead_vllm.draft.options import LookaheadOptions
from lookahead_vllm.draft.proposer import DraftLimits
from lookahead_vllm.draft.trie.proposer import NGramTrieProposer

NGRAMS, CACHED_ANSWERS, ANSWER_TOKENS, PROMPT_TOKENS = 2_000_000, 800, 256, 300
VOCABULARY, SENTENCES, SENTENCE_TOKENS, ERROR_RATE = 32_000, 2_000, 12, 0.1
WARM_UP = 20


def text(rng: np.random.Generator, num_tokens: int) -> list[int]:
    """Sentences of a fixed set, with single tokens replaced."""
    sentences = np.random.default_rng(0).integers(0, VOCABULARY, (SENTENCES, SENTENCE_TOKENS))
    # Some sentences are much more frequent than others.
    chosen = (SENTENCES * rng.random(-(-num_tokens // SENTENCE_TOKENS)) ** 3).astype(int)
    tokens = sentences[chosen].ravel()[:num_tokens].copy()
    wrong = rng.random(num_tokens) < ERROR_RATE
    tokens[wrong] = rng.integers(0, VOCABULARY, wrong.sum())
    return [int(token) for token in tokens]


def measure(trees: int, nodes: int, threads: Sequence[int], steps: int) -> list[dict[str, float]]:
    """A row for each number of threads, microseconds a step: medians unless named otherwise."""
    rng = np.random.default_rng(1)
    proposers = [
        NGramTrieProposer(
            LookaheadOptions(
                num_speculative_tokens=nodes, budget=nodes, max_nodes=NGRAMS, draft_threads=count
            )
        )
        for count in threads
    ]
    answers = [text(rng, ANSWER_TOKENS) for _ in range(CACHED_ANSWERS)]
    prompts = [text(rng, PROMPT_TOKENS) for _ in range(trees)]
    emitted = [text(rng, 2 * (WARM_UP + steps)) for _ in range(trees)]
    for proposer in proposers:
        proposer.insertion.seconds = float("inf")
        for answer in answers:
            proposer.start("cached", [0])
            proposer.extend({"cached": answer})
            proposer.finish("cached")
        for i, prompt in enumerate(prompts):
            proposer.start(str(i), prompt)
    limits = [DraftLimits(str(i), nodes, 64) for i in range(trees)]
    propose: list[list[float]] = [[] for _ in threads]
    learn: list[list[float]] = [[] for _ in threads]
    grown = 0
    for step in range(WARM_UP + steps):
        new = {str(i): tokens[2 * step : 2 * step + 2] for i, tokens in enumerate(emitted)}
        for turn in range(len(threads)):
            place = (step + turn) % len(threads)
            times = [time.perf_counter()]
            proposers[place].extend(new)
            times.append(time.perf_counter())
            forest = proposers[place].propose(limits)
            times.append(time.perf_counter())
            if step >= WARM_UP:
                learn[place].append((times[1] - times[0]) * 1e6)
                propose[place].append((times[2] - times[1]) * 1e6)
                grown += forest.num_nodes if place == 0 else 0
    return [
        {
            "trees": trees,
            "threads": count,
            "nodes of a tree": grown / (steps * trees),
            "propose": median(propose[i]),
            "fastest tenth": float(np.percentile(propose[i], 10)),
            "learn": median(learn[i]),
        }
        for i, count in enumerate(threads)
    ]


def print_growth(
    all_trees: Sequence[int], nodes: int, threads: Sequence[int], steps: int
) -> list[dict[str, float]]:
    """Measure, print a table in Markdown, and return its rows."""
    rows: list[dict[str, float]] = []
    for trees in all_trees:
        rows += measure(trees, nodes, threads, steps)
    print("| " + " | ".join(rows[0]) + " |")
    print("| --: " * len(rows[0]) + "|")
    for row in rows:
        print("| " + " | ".join(f"{value:.4g}" for value in row.values()) + " |")
    return rows
