"""vLLM's own methods beside ours in a replay."""

import sys
from functools import partial
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lookahead_vllm.options.allowed import OptionError
from lookahead_vllm.simulation.peers import SuffixV2
from lookahead_vllm.simulation.proposers import choose_proposers
from lookahead_vllm.simulation.replay import Pace, simulate
from lookahead_vllm.simulation.traces import load_traces
from tests.support.files import jsonl


def replayed(name: str, tmp_path: Path) -> tuple[float, float]:
    """Tokens and nodes a step, of a text that repeats six tokens."""
    line = dict(prompt_token_ids=[1, 2], output_token_ids=[*range(10, 16)] * 5)
    file = load_traces(jsonl(tmp_path / "t.jsonl", line))
    (make,) = choose_proposers(name).values()
    entry = simulate(partial(make, 4, None, 0), 4, [file], ["cold"], pace=Pace(1, 0.01))["cold"]
    return entry["edl"], entry["nodes"]


def test_ngram_drafts_what_followed_the_same_tokens(tmp_path):
    # The prefill has made 10. Seven steps bring 11 to 15, 10 and 11: then two tokens repeat. Four
    # more steps of five tokens, and one of two.
    tokens, nodes = replayed("ngram", tmp_path)
    assert tokens == pytest.approx(29 / 12) and nodes == pytest.approx((4 * 4 + 1) / 12)


class SuffixTree:
    """Stands in for arctic-inference's cache: the last token, again."""

    def __init__(self, max_tree_depth: int, max_cached_requests: int) -> None:
        assert (max_tree_depth, max_cached_requests) == (24, 10000)
        self.texts: dict[int, list[int]] = {}

    def start_request(self, request: int, prompt: Any) -> None:
        self.texts[request] = prompt.tolist()

    def add_active_response(self, request: int, tokens: list[int]) -> None:
        self.texts[request] += tokens

    def speculate(self, request: int, context: Any, **limits: Any) -> Any:
        assert context.tolist() == self.texts[request][-24:]
        most = limits.pop("max_spec_tokens")
        assert most >= 1
        if limits.pop("use_tree_spec"):  # a wrong token, and beside it the right ones
            tokens = [99, *self.texts[request][-6:]][:most]
            return SimpleNamespace(token_ids=tokens, parents=[-1, -1, *range(1, most)][:most])
        assert limits == {"max_spec_factor": 1.0, "max_spec_offset": 0.0, "min_token_prob": 0.1}
        return SimpleNamespace(token_ids=self.texts[request][-6:][:most])

    def stop_request(self, request: int) -> None:
        del self.texts[request]


@pytest.mark.parametrize("name", ["suffix", "suffix_trees"])
def test_suffix_is_driven_as_vllm_does(name, tmp_path, monkeypatch):
    module: Any = ModuleType("arctic_inference.suffix_decoding")
    module.SuffixDecodingCache = SuffixTree
    monkeypatch.setitem(sys.modules, "arctic_inference", ModuleType("arctic_inference"))
    monkeypatch.setitem(sys.modules, module.__name__, module)
    tokens, nodes = replayed(name, tmp_path)
    assert tokens > 2.5 and nodes > 3


def test_a_peer_that_is_not_installed_is_refused(monkeypatch):
    for name in ("arctic_inference.suffix_decoding", "vllm.v1.spec_decode"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(OptionError, match="suffix: it needs arctic-inference: pip install"):
        choose_proposers("suffix")
    with pytest.raises(OptionError, match="ngram: it is vLLM's, which cannot be imported"):
        choose_proposers("ngram")
    with pytest.raises(OptionError, match="did you mean 'suffix'"):
        choose_proposers("sufix")
    with pytest.raises(OptionError, match="ngram has no settings here; leave max=3 out"):
        choose_proposers("ngram:max=3")


# vLLM's `suffix` for Model Runner V2, against a search of everything.


def expected_chain(
    text: list[int], answers: list[list[int]], peer: SuffixV2, most: int
) -> list[int]:
    """Its chain, given the answers that the corpus has had."""

    def matched(before: list[int]) -> int:
        lengths = range(min(len(before), len(text), peer.DEPTH) + 1)
        return max(n for n in lengths if before[len(before) - n :] == text[len(text) - n :])

    own, place = max((matched(text[:end]), end) for end in range(1, len(text)))
    kept = range(len(answers))
    while sum(len(answers[number]) for number in kept) > peer.CORPUS_TOKENS:
        kept = kept[1:]
    found: dict[tuple[int, int], int] = {}
    for size in peer.KEYS:
        for slot in range(peer.SLOTS):
            places = [
                (number, end)
                for number in kept
                for end in range(size, len(answers[number]))
                if number % peer.SLOTS == slot
                and answers[number][end - size : end] == text[len(text) - size :]
            ]
            if places:
                number, end = max(places)
                found[number, end] = matched(answers[number][:end])
    votes = []
    for length in set(found.values()):
        chain: list[int] = []
        expected, share = 0.0, 1.0
        voters = [answers[n][end:] for n, end in sorted(found) if found[n, end] >= length]
        while len(chain) < most:
            ballots = [own[len(chain)] for own in voters if len(own) > len(chain)]
            if not ballots:
                break
            winner = max(range(len(ballots)), key=lambda i: (ballots.count(ballots[i]), i))
            share *= ballots.count(ballots[winner]) / len(voters)
            expected += share
            chain.append(ballots[winner])
            voters = [own for own in voters if own[: len(chain)] == chain]
        votes.append((expected, length, chain))
    _, length, chain = max(votes, default=(0.0, 0, []))
    if length <= own:
        chain = text[place : place + most] if own else []
    return [*chain, *[text[-1]] * (most - len(chain))]


class SmallCorpus(SuffixV2):
    CORPUS_TOKENS, SLOTS, DEPTH = 90, 3, 5


@settings(max_examples=150, deadline=None)
@given(
    texts=st.lists(st.lists(st.integers(1, 3), min_size=6, max_size=30), min_size=2, max_size=12),
    most=st.integers(1, 8),
)
def test_suffix_v2_finds_what_a_search_of_everything_finds(texts, most):
    peer, answers = SmallCorpus(), []
    for text in texts:
        peer.start("one", text[:4])
        row = peer.text_of("one")
        peer.add(row, text[4:])
        tree = peer.tree(row, most, most, may_branch=True)
        assert tree.tokens.tolist() == expected_chain(text, answers, peer, most)
        answers.append(text[4 - peer.PROMPT_TOKENS :])
        peer.finish("one")
