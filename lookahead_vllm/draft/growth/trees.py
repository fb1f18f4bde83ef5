"""A draft tree, grown best first.

Source: hierarchical multi-branch drafts, Lookahead (KDD 2024), section 4.1: branches that share a
prefix share its nodes, and if there are too many nodes, the best ones are kept.

Take the likeliest node, add its candidates, repeat. What a node needs of the trie is spread over
memory, so several trees are grown in turns.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from lookahead_vllm.draft.growth.acceptance_rate import (
    MAX_ESTIMATE,
    Float32s,
    Inputs,
    RateArrays,
    estimate,
    weight_set,
)
from lookahead_vllm.draft.growth.candidates import (
    CHOICES,
    CHOSEN,
    MAX_CANDIDATES,
    NUM_SOURCES,
    SPARSE_ANSWERS,
    SPARSE_OWN,
    TOKEN,
    Candidates,
    Lookups,
    find_candidates,
    look_up,
    match,
)
from lookahead_vllm.draft.growth.chains import find_drafted, follow_chain, is_drafted
from lookahead_vllm.draft.growth.recycling import (
    find_choices,
    is_from_cell,
    is_listed,
    look_up_choices,
)
from lookahead_vllm.draft.jit import Int32s, Int64s, borrowing_kernel, kernel
from lookahead_vllm.draft.sources import ANSWERS, DRAFTER, OWN, RECYCLED, REFERENCE, WINDOW
from lookahead_vllm.draft.trie.suffix import (
    NUM_CONTIGUOUS,
    NUM_HASHES,
    NUM_SUFFIXES,
    WHOLE,
    Hashes,
    advance,
)
from lookahead_vllm.draft.trie.table import TrieArrays

MIN_PROBABILITY = 0.001  # nodes less likely than this are never drafted

MIN_CANDIDATES = 6
"""The candidates found for the least likely node; MAX_CANDIDATES for a node of probability 1."""
MIN_SPARSE_PROBABILITY = 0.2
"""Sparse suffixes are looked up for nodes at least this likely."""

NUM_HANDS = 4
"""The most trees that a thread has in hand."""


class TextArrays(NamedTuple):
    """The arrays of the live texts, a row for each."""

    hashes: Hashes
    """uint64 [capacity, NUM_HASHES]"""
    spaces: Int32s
    """int32 [capacity, NUM_SPACES]: of the trie and of the model's choices."""
    chains: Int32s
    """int32 [capacity, K, NUM_ALTERNATIVES, 2]: what a drafter proposes after each text."""


# Columns of the trees to grow, int64 [t, 4]: the row of the text, the most nodes, the most levels,
# and whether the tree may branch.
ROW, NODES, DEPTH, MAY_BRANCH = range(4)


class TreeLimits(NamedTuple):
    """How large any tree may be."""

    max_nodes: int
    max_depth: int
    min_prob: float
    """Nodes less likely than this are left out."""


class Nodes(NamedTuple):
    """The nodes of a tree, or of all trees of a step."""

    fields: Int32s
    """int32 [3, n]: tokens, parents, depths."""
    probs: Float32s
    """float32 [n]"""
    sources: NDArray[np.uint8]
    """uint8 [n]"""


class InHand(NamedTuple):
    """The trees that a thread grows in turns, as arrays that are reused.

    While the memory fetches what the next node of one tree needs, the thread works on the others.
    """

    state: Int64s
    """int64 [h, 4]: the number of the TREE, -1 for none; how many nodes have GROWN; how many BUDS,
    which are nodes that may be taken next, come after them, likeliest first; the node that is HERE,
    -1 for the root, gets its children next."""
    hashes: Hashes
    """uint64 [h, max_nodes + 1, NUM_HASHES]: the root's, then those of each node with children."""
    places: Int32s
    """int32 [h, max_nodes + 1]: likewise, on the drafter's chain."""
    lookups: Lookups
    """Of the node that is HERE, [h, ...] each."""
    nodes: Nodes
    """[h, ...] each: the parents come before their children, and probabilities fall or are equal.
    Not those of SharedTrees, because threads that write to the same line of memory wait for each
    other."""


TREE, GROWN, BUDS, HERE = range(4)


@kernel
def new_nodes(size: int) -> Nodes:
    """Arrays for so many nodes."""
    return Nodes(
        np.empty((3, size), np.int32), np.empty(size, np.float32), np.empty(size, np.uint8)
    )


@borrowing_kernel
def copy_nodes(nodes: Nodes, first: int, size: int, result: Nodes, at: int) -> None:
    """Copy `size` nodes, from the `first` one on, to `result` from `at` on."""
    for i in range(size):
        for field in range(3):
            result.fields[field, at + i] = nodes.fields[field, first + i]
        result.probs[at + i] = nodes.probs[first + i]
        result.sources[at + i] = nodes.sources[first + i]


@kernel
def new_in_hand(num: int, max_nodes: int) -> InHand:
    hashes = np.empty((num, max_nodes + 1, NUM_HASHES), np.uint64)
    places = np.empty((num, max_nodes + 1), np.int32)
    keys = np.empty((num, NUM_SOURCES, NUM_SUFFIXES), np.int64)
    lookups = Lookups(keys, np.empty_like(keys), np.empty((num, NUM_SOURCES), np.int64))
    fields, probs = np.empty((num, 3, max_nodes), np.int32), np.empty((num, max_nodes), np.float32)
    nodes = Nodes(fields, probs, np.empty((num, max_nodes), np.uint8))
    return InHand(np.full((num, 4), -1, np.int64), hashes, places, lookups, nodes)


@borrowing_kernel
def nodes_of(in_hand: InHand, hand: int) -> Nodes:
    nodes = in_hand.nodes
    return Nodes(nodes.fields[hand], nodes.probs[hand], nodes.sources[hand])


@borrowing_kernel
def lookups_of(in_hand: InHand, hand: int) -> Lookups:
    lookups = in_hand.lookups
    return Lookups(lookups.keys[hand], lookups.slots[hand], lookups.matches[hand])


@borrowing_kernel
def bounds_of(tree: Int64s, limits: TreeLimits) -> tuple[int, int, int]:
    """The max_nodes and max_depth of one tree, and whether it may branch, 0 or 1."""
    max_nodes = max(min(tree[NODES], limits.max_nodes), 0)
    max_depth = max(min(tree[DEPTH], limits.max_depth), 0)
    return max_nodes, max_depth, tree[MAY_BRANCH]


@borrowing_kernel
def _num_suffixes(prob: np.float32) -> int:
    return NUM_SUFFIXES if prob >= MIN_SPARSE_PROBABILITY else NUM_CONTIGUOUS


@borrowing_kernel
def _look_up(
    trie: TrieArrays,
    lines: Int32s,
    spaces: Int32s,
    in_hand: InHand,
    hand: int,
    here: int,
    num_suffixes: int,
) -> None:
    hashes = in_hand.hashes[hand, here + 1]
    look_up(trie, spaces, hashes, lookups_of(in_hand, hand), num_suffixes)
    look_up_choices(lines, spaces[CHOICES], hashes)


@borrowing_kernel
def begin_tree(
    trie: TrieArrays,
    lines: Int32s,
    texts: TextArrays,
    row: int,
    bounds: tuple[int, int, int],
    in_hand: InHand,
    hand: int,
) -> bool:
    """Take the tree of a text in hand, and look its root up; False if it can have no nodes."""
    state = in_hand.state[hand]
    state[GROWN], state[BUDS], state[HERE] = 0, 0, -1
    in_hand.places[hand, 0] = 0
    for i in range(NUM_HASHES):
        in_hand.hashes[hand, 0, i] = texts.hashes[row, i]
    max_nodes, max_depth, _ = bounds
    if max_nodes == 0 or max_depth == 0:
        return False
    _look_up(trie, lines, texts.spaces[row], in_hand, hand, -1, NUM_SUFFIXES)
    return True


@borrowing_kernel
def take_buds(
    trie: TrieArrays,
    lines: Int32s,
    texts: TextArrays,
    row: int,
    bounds: tuple[int, int, int],
    in_hand: InHand,
    hand: int,
) -> bool:
    """Take the likeliest buds until one may get children, and look it up; False if none does."""
    max_nodes, max_depth, _ = bounds
    state, hashes, places = in_hand.state[hand], in_hand.hashes[hand], in_hand.places[hand]
    nodes = nodes_of(in_hand, hand)
    fields, probs = nodes.fields, nodes.probs
    while state[BUDS] > 0:
        here = state[GROWN]
        state[GROWN], state[BUDS] = here + 1, state[BUDS] - 1
        parent = fields[1, here]
        fields[2, here] = depth = 1 if parent < 0 else fields[2, parent] + 1
        # No child of the likeliest node may be likelier than the last of all places.
        is_full = here + 1 + state[BUDS] >= max_nodes
        is_last = here + 1 == max_nodes
        is_low = is_full and (is_last or probs[here] * MAX_ESTIMATE <= probs[max_nodes - 1])
        if depth < max_depth and not is_low:
            state[HERE] = here
            advance(hashes[parent + 1], fields[0, here], hashes[here + 1])
            places[here + 1] = follow_chain(texts.chains[row], places[parent + 1], fields[0, here])
            num_suffixes = _num_suffixes(probs[here])
            _look_up(trie, lines, texts.spaces[row], in_hand, hand, here, num_suffixes)
            return True
    return False


@borrowing_kernel
def _source_of(evidence: Int32s, i: int) -> int:
    if evidence[REFERENCE, i]:
        return REFERENCE
    if evidence[OWN, i]:
        return OWN
    if evidence[ANSWERS, i]:
        return ANSWERS
    if is_drafted(evidence[CHOSEN, i]):
        return DRAFTER
    if is_listed(evidence[CHOSEN, i]):
        return WINDOW if is_from_cell(evidence[CHOSEN, i]) else RECYCLED
    if evidence[SPARSE_OWN, i]:
        return OWN
    # A line's token that a drafter does not propose has lost what told that it is listed.
    return ANSWERS if evidence[SPARSE_ANSWERS, i] else RECYCLED


@borrowing_kernel
def find_all(
    trie: TrieArrays,
    lines: Int32s,
    spaces: Int32s,
    hashes: Hashes,
    chain: Int32s,
    place: int,
    lookups: Lookups,
    candidates: Candidates,
    max_size: int,
) -> int:
    """Collect the candidates of a text that was looked up, from all sources; their number."""
    evidence, longest = candidates.evidence, candidates.longest
    size = find_candidates(trie.edges, spaces, lookups, candidates, max_size)
    longest[CHOICES], size = find_choices(lines, spaces[CHOICES], hashes, evidence, size, max_size)
    longest[CHOICES], size = find_drafted(chain, place, evidence, longest[CHOICES], size)
    return size


@borrowing_kernel
def expand(
    trie: TrieArrays,
    lines: Int32s,
    texts: TextArrays,
    learned: RateArrays,
    row: int,
    bounds: tuple[int, int, int],
    min_prob: np.float32,
    in_hand: InHand,
    hand: int,
    candidates: Candidates,
    inputs: Inputs,
    shares: Float32s,
) -> None:
    """Put the children of the node that is HERE among the buds.

    A child's probability is its parent's times the learned acceptance rate of its evidence, scaled
    down where siblings would add up to more than their parent.
    """
    state, nodes = in_hand.state[hand], nodes_of(in_hand, hand)
    lookups = lookups_of(in_hand, hand)
    size, num_buds, here = state[GROWN], state[BUDS], state[HERE]
    max_nodes, _, may_branch = bounds
    spaces, hashes = texts.spaces[row], in_hand.hashes[hand, here + 1]
    evidence, longest = candidates.evidence, candidates.longest
    fields, probs, sources = nodes.fields, nodes.probs, nodes.sources
    prob = np.float32(1) if here < 0 else probs[here]
    # Only the likeliest children of an unlikely node can matter.
    max_found = MIN_CANDIDATES + np.int64((MAX_CANDIDATES - MIN_CANDIDATES) * prob)
    match(trie.edges, spaces, lookups, _num_suffixes(prob))
    num_found = find_all(
        trie,
        lines,
        spaces,
        hashes,
        texts.chains[row],
        in_hand.places[hand, here + 1],
        lookups,
        candidates,
        max_found,
    )
    estimate(evidence, num_found, learned, weight_set(longest, spaces), inputs, shares)
    total = np.float32(0)
    best = 0
    for i in range(num_found):
        total += shares[i]
        if shares[i] > shares[best]:
            best = i
    scale = best_scale = np.float32(1)
    if total > np.float32(1):
        if longest[ANSWERS] == WHOLE + 1:
            # An answer that repeats another one is certain enough for a long branch.
            scale = (np.float32(1) - shares[best]) / (total - shares[best])
        else:
            scale = best_scale = np.float32(1) / total
    for i in range(num_found):
        likely = prob * shares[i] * (best_scale if i == best else scale)
        if likely < min_prob or (i != best and not may_branch):
            continue
        if size + num_buds < max_nodes:
            num_buds += 1
        elif likely <= probs[max_nodes - 1]:
            continue
        at = size + num_buds - 1
        while at > size and probs[at - 1] < likely:
            probs[at], sources[at] = probs[at - 1], sources[at - 1]
            fields[0, at], fields[1, at] = fields[0, at - 1], fields[1, at - 1]
            at -= 1
        probs[at], fields[0, at], fields[1, at] = likely, evidence[TOKEN, i], here
        sources[at] = _source_of(evidence, i)
    state[BUDS] = num_buds
