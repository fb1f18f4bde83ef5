"""What may follow a text, by what the tries saw follow it, and how good the evidence is.

Source: multi-stage retrieval, Lookahead (KDD 2024), section 4.3.
"""

from __future__ import annotations

from numba import njit

from lookahead_vllm.draft.trie import NONE, Ints, Nodes, find

MAX_CONTINUATIONS = 32  # of one text
MAX_SIBLINGS = 16  # looked at below one match; siblings stand roughly most frequent first

_SHARES, _GAPS, _SOURCES = 7, 4, 3


def num_buckets(max_suffix: int) -> int:
    """How many kinds of evidence there are for suffixes of at most `max_suffix` tokens."""
    return (max_suffix + 1) * _SHARES * _GAPS * _SOURCES


@njit(cache=True)
def _share_bucket(count: float, total: float) -> int:
    """The share of a continuation; one that always followed is told by how often that was."""
    share = count / total
    if share < 0.1:
        return 0
    if share < 0.3:
        return 1
    if share < 0.6:
        return 2
    if share < 0.95:
        return 3
    return 4 if total < 1.5 else 5 if total < 2.5 else 6


@njit(cache=True)
def find_continuations(
    nodes: Nodes,
    edges: Ints,
    own: Ints,
    answers: Ints,
    prompt_weight: float,
    tokens: Ints,
    buckets: Ints,
) -> int:
    """Collect what followed the longest suffix, then shorter ones, until it is enough.

    `own` and `answers`, int32 [max_suffix + 1], are the suffixes matched in the request's own trie
    and in that of the answers (see `trie.match_suffixes`). Fills `tokens` and `buckets`, int32
    [MAX_CONTINUATIONS], and returns how many. A bucket tells four things apart: the longest suffix
    that the token followed, how much longer the longest match is, the token's share of what
    followed there (own text counts `prompt_weight` times), and which tries saw it.
    """
    found = 0
    longest = 0
    for suffix in range(len(own) - 1, 0, -1):
        own_total = answers_total = 0.0
        if own[suffix] != NONE:
            own_total = nodes[own[suffix]].total * prompt_weight
        if answers[suffix] != NONE:
            answers_total = nodes[answers[suffix]].total * 1.0
        total = own_total + answers_total
        if total <= 0:
            continue
        longest = max(longest, suffix)
        before = found
        for trie in range(2):
            match = own[suffix] if trie == 0 else answers[suffix]
            child = NONE if match == NONE else nodes[match].first
            seen = 0
            while child != NONE and seen < MAX_SIBLINGS and found < len(tokens):
                seen += 1
                token = nodes[child].token
                known = nodes[child].freq <= 0  # an answer's context, which was never an answer
                for i in range(found):
                    known = known or tokens[i] == token
                if not known:
                    tokens[found] = token
                    found += 1
                child = nodes[child].next
        for i in range(before, found):
            count = 0.0
            source = -1
            node = find(nodes, edges, own[suffix], tokens[i])
            if node != NONE:
                count += nodes[node].freq * prompt_weight
                source += 1
            node = find(nodes, edges, answers[suffix], tokens[i])
            if node != NONE and nodes[node].freq > 0:
                count += nodes[node].freq
                source += 2
            gap = min(_GAPS - 1, longest - suffix)
            share = _share_bucket(count, total)
            buckets[i] = ((suffix * _SHARES + share) * _GAPS + gap) * _SOURCES + source
        if found == len(tokens):
            break
    return found
