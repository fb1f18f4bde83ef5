"""The proposer against a plain model of it, and against what each request may see."""

from collections import defaultdict

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from lookahead_vllm.draft.growth.acceptance_rate import AcceptanceRate
from lookahead_vllm.draft.proposers.ngram_trie import NGramTrieProposer
from lookahead_vllm.draft.proposers.stepping import read
from lookahead_vllm.options.server import LookaheadOptions
from tests.support.drafting import check_all_were_seen, draft, paths, seen_in
from tests.support.reference_trie import ProposerModel

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
        truth = model.propose(*live[request_id], 200, 6)
        likeliest = [prob for prob, _ in truth[:24]]
        assert tree.probs.tolist() == pytest.approx(likeliest, rel=1e-3)
        held = {path: prob for prob, path in truth}
        drafted = [held[tuple(path)] for path in paths(tree)]
        assert drafted == pytest.approx(tree.probs.tolist(), rel=1e-3)

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
            read(proposer, {request_id: tokens})
            model.extend(*live[request_id], tokens)
        elif request_id in live:
            check(request_id)
    assume(live)
    for request_id in live:
        check(request_id)


# Few tokens, so that texts of different namespaces share contexts and continue them differently.
namespace_steps = st.lists(
    st.tuples(
        st.sampled_from("abc"),
        st.sampled_from(["start", "reference", "extend", "extend", "extend", "finish"]),
        st.lists(st.integers(0, 3), min_size=1, max_size=4),
        st.sampled_from(["", "x", None]),
    ),
    min_size=4,
    max_size=12,
)


def check_isolation(steps, max_nodes):
    """Fail if a draft has a token that neither its request nor its namespace has seen there."""
    proposer = NGramTrieProposer(LookaheadOptions(max_nodes=max_nodes))
    flood = np.random.default_rng(0).integers(1000, 9000, 300).tolist()
    seen, live = defaultdict(set), {}

    def check(request_id):
        own, shared, text = live[request_id]
        check_all_were_seen(draft(proposer, request_id), text, seen[own] | seen[shared])

    for step, (request_id, action, tokens, namespace) in enumerate(steps):
        if action in ("start", "reference") or (action == "extend" and request_id not in live):
            # Every text begins with the same two tokens, so that two are before each draft.
            text = [7, 8] if action == "extend" else [7, 8, *tokens]
            references = [tokens[::-1]] if action == "reference" else []
            live[request_id] = step, namespace if namespace is not None else step, text
            proposer.start(request_id, text, namespace, references)
            seen[step] |= seen_in(text, 0)
            for reference in references:
                seen[step] |= seen_in(text + reference, len(text))
        if action == "extend":
            read(proposer, {request_id: tokens})
            own, shared, text = live[request_id]
            text += tokens
            new = seen_in(text, len(text) - len(tokens))
            seen[own] |= new
            seen[shared] |= new
            proposer.start("flood", flood[step:], "flood")
            read(proposer, {"flood": flood[step:]})
        elif action == "finish":
            live.pop(request_id, None)
            proposer.finish(request_id)
        for request_id in live:
            check(request_id)


@settings(deadline=None)
@given(namespace_steps, st.sampled_from([1024, 100_000]))
def test_no_draft_has_n_grams_that_only_another_namespace_has_seen(steps, max_nodes):
    check_isolation(steps, max_nodes)
