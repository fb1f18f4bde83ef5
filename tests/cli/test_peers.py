"""vLLM's own methods beside ours in a replay."""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from lookahead_vllm.cli.peers import PEERS
from lookahead_vllm.options.allowed import OptionError
from lookahead_vllm.simulation.proposers import choose_proposers
from lookahead_vllm.simulation.replay import Pace, simulate
from lookahead_vllm.simulation.traces import load_traces
from tests.support.files import jsonl


def replayed(name: str, tmp_path: Path) -> tuple[float, float]:
    """Tokens and nodes a step, of a text that repeats six tokens."""
    line = dict(prompt_token_ids=[1, 2], output_token_ids=[*range(10, 16)] * 5)
    file = load_traces(jsonl(tmp_path / "t.jsonl", line))
    (make,) = choose_proposers(name, PEERS).values()
    entry = simulate(partial(make, 4, None, 0), 4, [file], ["cold"], pace=Pace(1, 0.01))["cold"]
    return entry["edl"], entry["nodes"]


def test_prompt_lookup_drafts_what_followed_the_same_tokens(tmp_path: Path) -> None:
    # The prefill has made 10. Seven steps bring 11 to 15, 10 and 11: then two tokens repeat. Four
    # more steps of five tokens, and one of two.
    tokens, nodes = replayed("prompt_lookup", tmp_path)
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
def test_suffix_is_driven_as_vllm_does(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module: Any = ModuleType("arctic_inference.suffix_decoding")
    module.SuffixDecodingCache = SuffixTree
    monkeypatch.setitem(sys.modules, "arctic_inference", ModuleType("arctic_inference"))
    monkeypatch.setitem(sys.modules, module.__name__, module)
    tokens, nodes = replayed(name, tmp_path)
    assert tokens > 2.5 and nodes > 3


def test_a_peer_that_is_not_installed_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("arctic_inference.suffix_decoding", "vllm.v1.spec_decode"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(OptionError, match="suffix: it needs arctic-inference: pip install"):
        choose_proposers("suffix", PEERS)
    with pytest.raises(OptionError, match="prompt_lookup: it is vLLM's, which cannot be imported"):
        choose_proposers("prompt_lookup", PEERS)
    with pytest.raises(OptionError, match="did you mean 'suffix'"):
        choose_proposers("sufix", PEERS)
    with pytest.raises(OptionError, match="prompt_lookup has no settings here; leave max=3 out"):
        choose_proposers("prompt_lookup:max=3", PEERS)
