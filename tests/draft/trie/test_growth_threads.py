"""Drafts do not depend on the number of threads that grow them."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lookahead_vllm.draft.options import LookaheadOptions
from lookahead_vllm.draft.proposer import DraftLimits, Verified
from lookahead_vllm.draft.trie import growth_threads
from lookahead_vllm.draft.trie.growth_threads import MIN_SHARED_TREES
from lookahead_vllm.draft.trie.hybrid import HybridProposer
from lookahead_vllm.draft.trie.proposer import NGramTrieProposer

THREADS = (1, 2, 4)
FIELDS = ("tokens", "parents", "probs", "depths", "sources", "firsts")


@pytest.fixture(autouse=True)
def _shared_calls(monkeypatch):
    """The number of forests that several threads grew: so that no test passes without one."""
    calls = []
    grow_all = growth_threads.GrowthThreads.grow_all

    def counted(self, *arguments):
        calls.append(len(arguments[1]))
        return grow_all(self, *arguments)

    monkeypatch.setattr(growth_threads.GrowthThreads, "grow_all", counted)
    return calls


def contents(forest):
    """The bytes of all arrays of a forest, with their dtypes and shapes."""
    arrays = [getattr(forest, name) for name in FIELDS]
    return [(array.dtype, array.shape, array.tobytes()) for array in arrays]


def learned(proposer):
    return [array.tobytes() for array in proposer.rate.arrays]


def make(kind, threads, **options):
    options = {"max_nodes": 32_768, "budget": 24, "num_speculative_tokens": 24} | options
    return kind(LookaheadOptions(draft_threads=threads, **options))


def random_limits(rng, request_ids):
    chosen = rng.permutation(request_ids)[: rng.integers(1, len(request_ids) + 1)]
    return [
        DraftLimits(
            str(request_id),
            int(rng.integers(0, 30)),
            int(rng.integers(0, 20)),
            bool(rng.random() < 0.8),
        )
        for request_id in chosen
    ]


@pytest.mark.parametrize("kind", [NGramTrieProposer, HybridProposer])
@settings(max_examples=15, deadline=None)
@given(st.integers(0, 2**32 - 1), st.integers(1, 90), st.integers(2, 40))
def test_the_forest_is_the_same_for_any_number_of_threads(kind, seed, num_requests, vocabulary):
    rng = np.random.default_rng(seed)
    draft = str(rng.choice(["hierarchical", "single"]))
    options = {"proposer": "hybrid"} if kind is HybridProposer else {}
    proposers = [make(kind, threads, draft=draft, **options) for threads in THREADS]
    requests = [f"r{i}" for i in range(num_requests)]
    for request_id in requests:
        prompt = rng.integers(0, vocabulary, rng.integers(1, 60)).tolist()
        references = [prompt[::-1]] if rng.random() < 0.3 else []
        for proposer in proposers:
            proposer.insertion.seconds = float("inf")
            proposer.start(request_id, prompt, rng_namespace(prompt), references)
    for _ in range(4):
        emitted = {
            request_id: rng.integers(0, vocabulary, rng.integers(0, 5)).tolist()
            for request_id in requests
        }
        limits = random_limits(rng, requests)
        forests = []
        for proposer in proposers:
            proposer.extend(emitted)
            forests.append(proposer.propose(limits))
        expected, *others = forests
        assert [contents(forest) for forest in others] == [contents(expected)] * len(others)
        assert len({tuple(learned(proposer)) for proposer in proposers}) == 1
        if kind is HybridProposer:
            ids = [limit.request_id for limit in limits]
            verified = Verified.nothing(ids, expected, proposers[0].num_choices)
            shape = verified.at_roots.shape, verified.at_nodes.shape, verified.gaps.shape
            verified = verified._replace(
                at_roots=rng.integers(0, vocabulary, shape[0]).astype(np.int32),
                at_nodes=rng.integers(0, vocabulary, shape[1]).astype(np.int32),
                gaps=np.sort(rng.random(shape[2]).astype(np.float32) * 4, axis=1),
            )
            for proposer in proposers:
                proposer.observe(verified)


def rng_namespace(prompt):
    return ("", "a", None)[prompt[0] % 3]


def test_few_trees_are_grown_by_one_thread_and_many_by_several(_shared_calls):
    proposer = make(NGramTrieProposer, 2)
    assert _shared_calls == [MIN_SHARED_TREES]  # at start-up, to compile
    _shared_calls.clear()
    limits = []
    for i in range(200):
        proposer.start(str(i), [1, 2, 3, 1, 2])
        limits.append(DraftLimits(str(i), 8, 8))
    for count in (0, 1, MIN_SHARED_TREES - 1, MIN_SHARED_TREES, 64, 65, 200):
        forest = proposer.propose(limits[:count])
        assert len(forest) == count and (forest.sizes > 0).all()
    assert _shared_calls == [MIN_SHARED_TREES, 64, 65, 200]


def test_another_process_loads_the_compiled_kernels():
    make(NGramTrieProposer, 2)  # compiles them, if no earlier process has
    source = (
        "from lookahead_vllm.draft.options import LookaheadOptions\n"
        "from lookahead_vllm.draft.trie import growth_threads\n"
        "from lookahead_vllm.draft.trie.proposer import NGramTrieProposer\n"
        "NGramTrieProposer(LookaheadOptions(draft_threads=2, max_nodes=4096))\n"
        "for name in ('_help', '_grow_together'):\n"
        "    stats = getattr(growth_threads, name).stats\n"
        "    print(sum(stats.cache_hits.values()), sum(stats.cache_misses.values()))\n"
    )
    run = subprocess.run(
        [sys.executable, "-c", source], capture_output=True, text=True, timeout=300, check=False
    )
    assert (run.returncode, run.stdout, run.stderr) == (0, "1 0\n1 0\n", "")
