"""A slow and simple model of the trie proposer: dicts for the trie, dicts for the rates.

It leaves out what small tests do not reach: pruning between suffixes and the decay of frequencies.
"""

import math
from collections import defaultdict

import numpy as np

from lookahead_vllm.draft.growth import acceptance_rate as learned
from lookahead_vllm.draft.growth.candidates import MAX_CANDIDATES
from lookahead_vllm.draft.growth.trees import (
    MIN_CANDIDATES,
    MIN_PROBABILITY,
    MIN_SPARSE_PROBABILITY,
)
from lookahead_vllm.draft.trie.suffix import NUM_CONTIGUOUS, NUM_SPARSE, NUM_SUFFIXES, ORDERS, WHOLE
from lookahead_vllm.draft.trie.table import (
    COUNT_SHIFT,
    MAX_UINT16,
    SLOTS_PER_LINE,
    TOKEN_MASK,
    USE,
    TrieArrays,
    locate,
    matches,
    region_of,
    spaces_of,
)

SUFFIXES = range(NUM_SUFFIXES)


def found_after(trie, space, hashes, suffix):
    """What followed a suffix in a Trie and how often, as (token, count), the latest first."""
    first, lines = region_of(TrieArrays(*trie.arrays), space)
    key, slot = locate(first, lines, space, hashes, suffix)
    matching = matches(trie.edges, key, slot)
    uses = trie.edges[slot : slot + SLOTS_PER_LINE, USE].tolist()
    found = [use for i, use in enumerate(uses) if matching >> i & 1]
    return [(use & TOKEN_MASK, use >> COUNT_SHIFT & MAX_UINT16) for use in found]


def count_edges(trie):
    """The number of edges of a Trie in spaces that are not eliminated."""
    return sum(space > 0 or trie.is_live(space) for space in spaces_of(trie.edges).tolist())


def context(text, suffix):
    """The tokens of a suffix; None stands for positions before the beginning."""
    if suffix == WHOLE:  # prompts are shorter than PROMPT_END
        return suffix, tuple(text)
    if suffix < len(ORDERS):
        length = ORDERS[suffix]
    else:
        length, text = suffix - NUM_CONTIGUOUS + 1, text[:-1]
    return suffix, tuple(([None] * length + list(text))[-length:])


class TrieModel:
    """For every space and suffix: the tokens that followed it and how often, in slots."""

    def __init__(self):
        self.slots = defaultdict(list)

    def insert(self, space, text, token):
        for suffix in SUFFIXES:
            slots = self.slots[space, context(text, suffix)]
            held = [t for t, _ in slots]
            if token in held:
                at = held.index(token)
                seen = slots[at][1]
            elif len(slots) < 4:
                at, seen = len(slots), 0
                slots.append(None)
            else:
                at, seen = max(range(len(slots)), key=lambda i: (-slots[i][1], i)), 0
            slots.pop(at)
            slots.insert(0, (token, seen + 1))

    def followers(self, space, text, suffix):
        return self.slots.get((space, context(text, suffix)), [])


def share_of(count, total):
    for step, bound in enumerate((5, 10, 30, 60, 95)):
        if 100 * count < bound * total:
            return step
    return 5 if total == 1 else 6 if total == 2 else 7 if total < 5 else 8


PARTS = (0, 0, 1, 2, 3, 3, 4, 4, 4)


def coarse(kind):
    if kind is None:
        return None
    suffix, share, gap, _ = kind
    return 5 if suffix == WHOLE else min(suffix, 4), PARTS[share], gap


class ProposerModel:
    """`sources` are spaces: own text, answers, references; None where there is none."""

    def __init__(self):
        self.trie = TrieModel()
        self.trials = {}
        self.weights = defaultdict(lambda: np.array(learned._INITIAL_WEIGHTS))

    def continuations(self, spaces, text, max_size=MAX_CANDIDATES, sparse=True):
        """Evidence by token, in the order in which it is found, and the longest matches."""
        found, longest = {}, [0, 0, 0]

        def place(token, may_add=True):
            if token not in found and may_add and len(found) < max_size:
                found[token] = [None, None, None, 0, 0]
            return found.get(token)

        order = [0, 1, 2]
        if spaces[1] is not None and self.trie.followers(spaces[1], text, WHOLE):
            order = [1, 0, 2]
        for source in order:
            space = spaces[source]
            if space is None:
                continue
            stage = 0
            for suffix in reversed(range(WHOLE if source == 0 else NUM_CONTIGUOUS)):
                followers = self.trie.followers(space, text, suffix)
                if not followers or (stage >= 2 and suffix > 1):
                    continue
                longest[source] = longest[source] or suffix + 1
                total = sum(count for _, count in followers)
                for rank, (token, count) in enumerate(followers):
                    share = share_of(count, total)
                    row = place(token, suffix > 0 or share > 0)
                    if row and row[source] is None:
                        row[source] = (suffix, share, min(stage, 2), min(rank, 1))
                stage += 1
            for skipped in range(NUM_SPARSE) if source < 2 and sparse else ():
                followers = self.trie.followers(space, text, NUM_CONTIGUOUS + skipped)
                total = sum(count for _, count in followers)
                for token, count in followers:
                    row = place(token)
                    if row:
                        row[3 + source] += (1 + share_of(count, total) // 2) * 6**skipped
        return found, longest

    def rate(self, key, guess):
        """The log odds of a rate; `guess` before its first trial."""
        if key not in self.trials:
            return guess
        hits, trials = self.trials[key]
        share = min(max(hits / trials, 0.0005), 0.999)
        return float(np.float32(math.log(share / (1 - share))))

    def estimate(self, token, row, weights):
        first = [math.log(r / (1 - r)) for r in (0.15, 0.15, learned.REFERENCE_RATE)]
        if row[1] and row[1][0] == WHOLE and row[1][1] >= 5:
            first[1] = math.log(learned.REPEAT_RATE / (1 - learned.REPEAT_RATE))
        keys = [(source, row[source]) for source in range(3)]
        inputs = [self.rate(key, guess) for key, guess in zip(keys, first, strict=True)]
        if row[2] is None:
            inputs[2] = 0.0
        both = min(max(inputs[0] + inputs[1] - math.log(0.12 / 0.88), -5.8), 3.5)
        keys.append(("pair", coarse(row[0]), coarse(row[1])))
        inputs.append(self.rate(keys[-1], both))
        level = min(max(int(inputs[3] + 8), 0), 15)
        for name, what in (("level", None), ("sparse", (row[3], row[4]))):
            keys.append((name, what, level))
            inputs.append(self.rate(keys[-1], inputs[3]))
        inputs += [0.0, 0.0, 0.4]  # there are no choices of the model
        odds = float(np.dot(weights, inputs))
        prob = min(max(1 / (1 + math.exp(-odds)), 0.002), 0.995)
        guesses = [*first, both, inputs[3], inputs[3]]
        return prob, keys, inputs, guesses

    def learn(self, spaces, text, emitted):
        found, longest = self.continuations(spaces, text)
        weights = self.weights[spaces[2] is not None, longest[0], longest[1]]
        for token, row in found.items():
            prob, keys, inputs, guesses = self.estimate(token, row, weights)
            if prob < learned.MIN_LEARNED_PROBABILITY:
                continue
            hit = float(token == emitted)
            for i, (key, guess) in enumerate(zip(keys, guesses, strict=True)):
                if i == 2 and row[2] is None:
                    continue
                worth = 4.0 if i < 4 else 2.0
                hits, trials = self.trials.get(key, (worth / (1 + math.exp(-guess)), worth))
                hits, trials = hits + hit, trials + 1
                if trials > 400:
                    hits, trials = hits / 2, trials / 2
                self.trials[key] = hits, trials
            weights += learned.LEARNING_RATE * (hit - prob) * np.array(inputs)

    def extend(self, spaces, text, tokens):
        """Append `tokens` to `text`, learn from them and insert them into the trie."""
        for token in tokens:
            self.learn(spaces, text, token)
            for space in spaces[:2]:
                if space is not None:
                    self.trie.insert(space, text, token)
            text.append(token)

    def propose(self, spaces, text, max_nodes, max_depth):
        """Nodes as (probability, path), likeliest first."""
        nodes, buds, path, prob = [], [], (), 1.0
        while len(nodes) < max_nodes:
            if len(path) < max_depth:
                longer = [*text, *path]
                max_size = MIN_CANDIDATES + int((MAX_CANDIDATES - MIN_CANDIDATES) * prob)
                found, longest = self.continuations(
                    spaces, longer, max_size, prob >= MIN_SPARSE_PROBABILITY
                )
                weights = self.weights[spaces[2] is not None, longest[0], longest[1]]
                probs = {t: self.estimate(t, row, weights)[0] for t, row in found.items()}
                total = sum(probs.values())
                if total > 1 and longest[1] == WHOLE + 1:
                    best = max(probs, key=probs.__getitem__)
                    scale = (1 - probs[best]) / (total - probs[best])
                    probs = {t: p if t == best else p * scale for t, p in probs.items()}
                elif total > 1:
                    probs = {t: p / total for t, p in probs.items()}
                buds += [
                    (p * prob, (*path, t)) for t, p in probs.items() if p * prob >= MIN_PROBABILITY
                ]
            if not buds:
                break
            best = max(buds)
            buds.remove(best)
            prob, path = best
            nodes.append(best)
        return nodes
