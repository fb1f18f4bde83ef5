"""Over 20,000 requests, neither the memory nor the work of a proposal grows."""

from pathlib import Path

import numpy as np
import pytest

from lookahead_vllm.draft.stepping import DraftLimits, draft_trees, read
from lookahead_vllm.draft.trie import proposer as ngram_trie
from lookahead_vllm.draft.trie.proposer import NGramTrieProposer
from lookahead_vllm.options.server import LookaheadOptions
from tests.support.reference_trie import count_edges

REQUESTS, AT_A_TIME = 20_000, 8
PHRASES = 4000


def arrays_in(arguments):
    """The arrays among the arguments and in their tuples."""
    for argument in arguments:
        if isinstance(argument, np.ndarray):
            yield argument
        elif isinstance(argument, tuple):
            yield from arrays_in(argument)


@pytest.mark.slow
def test_memory_and_proposals_stay_as_they_are_over_20_000_requests(monkeypatch):
    """Answers are made of phrases, some of which are frequent, and of tokens that never recur."""
    rng = np.random.default_rng(0)
    phrases = [rng.integers(0, 30_000, rng.integers(3, 12)).tolist() for _ in range(PHRASES)]
    proposer = NGramTrieProposer(LookaheadOptions(max_nodes=100_000))
    memory, work, drafted, sizes = [], [], [], []
    begin_and_grow = ngram_trie.begin_and_grow

    def counted(*arguments):
        """Record the sizes of the tables that a proposal reads."""
        sizes.append([array.size for array in arrays_in(arguments) if array.ndim > 1])
        return begin_and_grow(*arguments)

    monkeypatch.setattr(ngram_trie, "begin_and_grow", counted)
    live: dict[str, list[int]] = {}

    def text(length):
        words: list[int] = []
        while len(words) < length:
            which = int(rng.zipf(1.3)) % PHRASES
            words += phrases[which] if rng.random() < 0.8 else rng.integers(0, 30_000, 5).tolist()
        return words[:length]

    for serial in range(REQUESTS):
        namespace = ("", "x", None)[serial % 3]
        references = [text(30)] if serial % 10 == 0 else []
        proposer.start(str(serial), text(int(rng.integers(5, 60))), namespace, references)
        live[str(serial)] = text(int(rng.integers(4, 28)))
        while len(live) >= AT_A_TIME:  # three tokens of each request
            for request_id in list(live):
                read(proposer, {request_id: live[request_id][:3]})
                live[request_id] = live[request_id][3:]
                if not live[request_id]:
                    del live[request_id]
                    proposer.finish(request_id)
            limits = [DraftLimits(request_id, 16, 16) for request_id in live]
            trees = draft_trees(proposer, limits)
            if limits:
                drafted.append(np.mean([len(tree) for tree in trees]))
        if (serial + 1) % 2000 == 0:
            memory.append(int(Path("/proc/self/statm").read_text().split()[1]))
            work.append(np.max(sizes, axis=0).tolist())
            sizes.clear()

    assert len(work) == 10 and np.mean(drafted[-1000:]) > 2
    assert proposer.trie.num_pruned > 1_000_000
    assert count_edges(proposer.trie) <= 100_000
    assert np.count_nonzero(proposer.trie.live[:, 0]) <= 2 * len(live)  # own texts and references
    assert memory[-1] - memory[2] < 1000, memory  # pages of 4 KiB
    assert all(reached == work[0] for reached in work), work
