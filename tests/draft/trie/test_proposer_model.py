"""The proposer against a plain model of it, and against what each request may see."""

from collections import defaultdict
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from lookahead_vllm.draft.options import LookaheadOptions
from lookahead_vllm.draft.proposer import DraftLimits
from lookahead_vllm.draft.trie.acceptance_rate import AcceptanceRate
from lookahead_vllm.draft.trie.proposer import NGramTrieProposer
from tests.support.reference_trie import ProposerModel


def draft(proposer, request_id, max_nodes=16, max_depth=64, may_branch=True):
    limits = [DraftLimits(request_id, max_nodes, max_depth, may_branch)]
    return proposer.propose(limits)[0]


steps = st.lists(
    st.tuples(
        st.sampled_from("abcd"),
        st.sampled_from(["start", "reference", "extend", "extend", "propose", "finish"]),
        st.lists(st.integers(0, 5), max_size=8),
        st.sampled_from(["", "x", None]),
    ),
    max_size=25,
)


@settings(deadline=None)
@given(steps)
def test_it_proposes_what_the_plain_model_of_it_proposes(steps):
    proposer, model = (
        NGramTrieProposer(LookaheadOptions(num_speculative_tokens=24)),
        ProposerModel(),
    )
    proposer.rate = AcceptanceRate()  # the model has no learned priors
    live, serial = {}, 0

    def check(request_id):
        tree = draft(proposer, request_id, max_nodes=24, max_depth=6)
        assume(not proposer.trie.num_pruned)  # rarely, a line is full
        paths = []
        for token, parent in zip(tree.tokens.tolist(), tree.parents.tolist(), strict=True):
            paths.append((*(paths[parent] if parent >= 0 else ()), token))
        truth = model.propose(*live[request_id], 200, 6)
        likeliest = [prob for prob, _ in truth[:24]]
        assert tree.probs.tolist() == pytest.approx(likeliest, rel=1e-3)
        held = {path: prob for prob, path in truth}
        assert [held[path] for path in paths] == pytest.approx(tree.probs.tolist(), rel=1e-3)

    for request_id, action, tokens, namespace in steps:
        if action in ("start", "reference"):
            serial += 1
            references = [tokens[::-1], tokens[1:]] if action == "reference" else []
            spaces = [f"own {serial}", namespace, f"reference {serial}" if references else None]
            live[request_id] = spaces, list(tokens)
            proposer.start(request_id, tokens, namespace, references)
            for reference in references:
                for space in (spaces[2], spaces[0]):
                    for i, token in enumerate(reference):
                        model.trie.insert(space, tokens + reference[:i], token)
            for i, token in enumerate(tokens):
                model.trie.insert(spaces[0], tokens[:i], token)
        elif action == "finish":
            live.pop(request_id, None)
            proposer.finish(request_id)
        elif request_id in live and action == "extend":
            proposer.extend({request_id: tokens})
            model.extend(*live[request_id], tokens)
        elif request_id in live:
            check(request_id)
    assume(live)
    for request_id in live:
        check(request_id)


def pairs(text):
    """Two tokens next to each other, or with one between them."""
    return set(pairwise(text)) | set(zip(text, text[2:], strict=False))


@settings(deadline=None)
@given(steps, st.sampled_from([1024, 100_000]))
def test_no_draft_has_n_grams_that_only_another_namespace_has_seen(steps, max_nodes):
    """Each token was seen after the last but one or two, by the request or in its namespace."""
    proposer = NGramTrieProposer(LookaheadOptions(max_nodes=max_nodes))
    flood = np.random.default_rng(0).integers(1000, 9000, 300).tolist()
    seen, live = defaultdict(set), {}

    def check(request_id):
        own, shared, text = live[request_id]
        tree = draft(proposer, request_id)
        paths = []
        for token, parent in zip(tree.tokens.tolist(), tree.parents.tolist(), strict=True):
            before = paths[parent] if parent >= 0 else text
            assert {(last, token) for last in before[-2:]} & (seen[own] | seen[shared])
            paths.append([*before, token])

    for step, (request_id, action, tokens, namespace) in enumerate(steps):
        # Every text begins with the same two tokens, so that a draft always has two before it.
        if action in ("start", "reference"):
            text = [7, 8, *tokens]
            references = [tokens[::-1]] if action == "reference" else []
            live[request_id] = step, namespace if namespace is not None else step, text
            proposer.start(request_id, text, namespace, references)
            for reference in ([], *references):
                seen[step] |= pairs(text + reference)
        elif action == "finish":
            live.pop(request_id, None)
            proposer.finish(request_id)
        elif request_id in live and action == "extend":
            proposer.extend({request_id: tokens})
            own, shared, text = live[request_id]
            new = pairs(text[-2:] + tokens) - pairs(text[-2:])
            seen[own] |= new
            seen[shared] |= new
            text += tokens
            proposer.start("flood", flood[step:], "flood")
            proposer.extend({"flood": flood[step:]})
        elif request_id in live:
            check(request_id)
    assume(live)
    for request_id in live:
        check(request_id)
