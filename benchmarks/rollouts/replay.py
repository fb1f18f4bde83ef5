"""Replay recorded rollouts through the trie, without a model: what samples learn from each other.

`python -m benchmarks.rollouts.replay OUT.json` takes what `bench_rollouts.py --json` has written
with the method `none`. It replays the samples of an epoch side by side, as they ran, for each way
to share.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

import numpy as np
from tqdm import tqdm

from benchmarks.methods import BASELINE
from benchmarks.rollouts.engine import Request
from lookahead_vllm.draft.options import LookaheadOptions
from lookahead_vllm.draft.stepping import DraftLimits, draft_trees, read
from lookahead_vllm.draft.tree import DraftForest, DraftTree
from lookahead_vllm.draft.trie.proposer import NGramTrieProposer
from lookahead_vllm.simulation.markdown import markdown, number


class Recorded(NamedTuple):
    """Rollouts of some epochs."""

    prompts: list[list[int]]
    requests: list[Request]
    """Of each epoch, in order."""
    epochs: list[list[list[int]]]
    """The token ids of each request, by epoch."""

    @classmethod
    def load(cls, path: Path) -> Recorded:
        """Read a file of `bench_rollouts.py`."""
        content = json.loads(path.read_text())
        requests = [Request(prompt, 0) for prompt in content["prompt_of_sample"]]
        epochs = [epoch["token_ids"] for epoch in content["epochs"][BASELINE]]
        return cls(content["prompts"], requests, epochs)


class SuffixDrafter:
    """vLLM's `suffix` with its default settings: arctic-inference's drafts, which are chains."""

    MAX_TREE_DEPTH, MAX_SPEC_FACTOR, MIN_TOKEN_PROB = 24, 1.0, 0.1

    def __init__(self) -> None:
        from arctic_inference.suffix_decoding import SuffixDecodingCache

        self._cache = SuffixDecodingCache(
            max_tree_depth=self.MAX_TREE_DEPTH, max_cached_requests=10_000
        )
        self._texts: dict[str, list[int]] = {}
        self._ids: dict[str, int] = {}
        self._last_id = 0

    def start(self, name: str, prompt: list[int], namespace: str | None) -> None:
        self._last_id += 1
        self._texts[name], self._ids[name] = list(prompt), self._last_id
        self._cache.start_request(self._ids[name], np.array(prompt, np.int32))

    def read(self, tokens: Mapping[str, Sequence[int]]) -> None:
        for name, new in tokens.items():
            self._texts[name] += new
            self._cache.add_active_response(self._ids[name], list(new))

    def draft(self, names: Sequence[str], most: int) -> DraftForest:
        return DraftForest.of([DraftTree.chain(self._draft(name)) for name in names])

    def _draft(self, name: str) -> list[int]:
        draft = self._cache.speculate(
            self._ids[name],
            np.array(self._texts[name][-self.MAX_TREE_DEPTH :], np.int32),
            max_spec_tokens=self.MAX_TREE_DEPTH,
            max_spec_factor=self.MAX_SPEC_FACTOR,
            min_token_prob=self.MIN_TOKEN_PROB,
        )
        return list(draft.token_ids)

    def finish(self, name: str) -> None:
        self._cache.stop_request(self._ids[name])


class Replayed(NamedTuple):
    """What an epoch came to."""

    steps: int
    tokens_per_step: float
    nodes: float
    """Of a request in a step, on average."""


class TrieDrafter:
    """The trie, which inserts each prompt at once."""

    def __init__(self, options: LookaheadOptions) -> None:
        self._proposer = NGramTrieProposer(options)
        self._proposer.insertion.seconds = np.inf
        self.start, self.finish = self._proposer.start, self._proposer.finish

    def read(self, tokens: Mapping[str, Sequence[int]]) -> None:
        read(self._proposer, tokens)

    def draft(self, names: Sequence[str], most: int) -> DraftForest:
        return draft_trees(self._proposer, [DraftLimits(name, most, most) for name in names])


def replay(
    recorded: Recorded,
    drafter: TrieDrafter | SuffixDrafter,
    namespaces: Sequence[str | None],
    most: int,
) -> list[Replayed]:
    """Replay all epochs with drafts of at most so many nodes; `namespaces` are the requests'."""
    epochs = []
    for texts in recorded.epochs:
        names = [str(i) for i in range(len(texts))]
        for name, request, namespace in zip(names, recorded.requests, namespaces, strict=True):
            drafter.start(name, recorded.prompts[request.prompt], namespace)
        # The prefills emit a token each.
        done = dict.fromkeys(range(len(texts)), 1)
        drafter.read({name: text[:1] for name, text in zip(names, texts, strict=True)})
        steps, decoded = 1, len(texts)
        nodes: list[float] = []
        while live := [i for i, text in enumerate(texts) if done[i] < len(text)]:
            forest = drafter.draft([names[i] for i in live], most)
            emitted = {
                names[i]: texts[i][done[i] : done[i] + 1 + _accepted(tree, texts[i][done[i] : -1])]
                for i, tree in zip(live, forest, strict=True)
            }
            drafter.read(emitted)
            steps, decoded = steps + 1, decoded + len(live)
            nodes.append(forest.num_nodes / len(live))
            for i in live:
                done[i] += len(emitted[names[i]])
                if done[i] >= len(texts[i]):
                    drafter.finish(names[i])
        tokens = sum(map(len, texts))
        mean_nodes = statistics.fmean(nodes) if nodes else 0.0
        epochs.append(Replayed(steps, tokens / decoded, mean_nodes))
    return epochs


def _accepted(tree: DraftTree, text: Sequence[int]) -> int:
    """How many tokens of the text are a path from the tree's root."""
    children = {
        (parent, token): node
        for node, (parent, token) in enumerate(
            zip(tree.parents.tolist(), tree.tokens.tolist(), strict=True)
        )
    }
    node = -1
    for depth, token in enumerate(text):
        child = children.get((node, token))
        if child is None:
            return depth
        node = child
    return len(text)


def sharing_table(recorded: Recorded, nodes: Sequence[int]) -> str:
    """Tokens a step, for each way to share and number of nodes."""
    ways: dict[str, list[str | None]] = {
        "alone": [None for _ in recorded.requests],
        "a namespace for each prompt": [str(request.prompt) for request in recorded.requests],
        "one namespace": ["" for _ in recorded.requests],
    }
    body = []
    for count in tqdm(nodes, desc="sharing"):
        for way, namespaces in ways.items():
            options = LookaheadOptions(
                proposer="ngram_trie", num_speculative_tokens=count, budget=count
            )
            epochs = replay(recorded, TrieDrafter(options), namespaces, count)
            body.append([way, str(count), *(_cell(epoch) for epoch in epochs)])
    if find_spec("arctic_inference") is not None:
        epochs = replay(recorded, SuffixDrafter(), ways["one namespace"], 1)
        mean = statistics.fmean(epoch.nodes for epoch in epochs)
        body.append(
            ["vLLM's suffix", f"{number(mean, 1)} on average", *(_cell(epoch) for epoch in epochs)]
        )
    epochs_named = [f"epoch {i + 1}" for i in range(len(recorded.epochs))]
    return markdown(["samples share", "nodes", *epochs_named], body)


def _cell(epoch: Replayed) -> str:
    return f"{number(epoch.tokens_per_step)} ({epoch.steps})"


def main() -> None:
    """Print the tables of the file on the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("file", type=Path, metavar="OUT.json")
    recorded = Recorded.load(parser.parse_args().file)
    print("tokens a step (and steps to the batch's end):\n")
    print(sharing_table(recorded, [4, 16, 64]))


if __name__ == "__main__":
    main()
