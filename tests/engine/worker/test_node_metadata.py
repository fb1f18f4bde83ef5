"""On the first runner, thinking budgets and penalties at nodes are exact."""

from __future__ import annotations

from copy import copy, deepcopy
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from vllm import SamplingParams
from vllm.v1.sample.logits_processor import BatchUpdate, LogitsProcessors
from vllm.v1.sample.metadata import SamplingMetadata
from vllm.v1.sample.sampler import Sampler
from vllm.v1.sample.thinking_budget_state import ThinkingBudgetStateHolder

from lookahead_vllm.draft.tree import DraftForest, DraftTree
from lookahead_vllm.engine.worker.v1.node_rows import NodeRows
from lookahead_vllm.engine.worker.v1.sampler import NodeThinking, node_metadata
from tests.support.attention_cases import random_tree

MARKERS = [([0], [1]), ([0, 1], [1, 2]), ([0], [1, 1, 2]), ([2, 0, 2], [1])]


def tree_of(rng: np.random.Generator, nodes: int, vocab: int) -> DraftTree:
    tree = random_tree(rng, nodes)
    return DraftTree.from_lists(rng.integers(0, vocab, nodes).tolist(), tree.parents.tolist())


def path_to(tree: DraftTree, node: int) -> list[int]:
    path: list[int] = []
    while node >= 0:
        path.insert(0, int(tree.tokens[node]))
        node = int(tree.parents[node])
    return path


def holder_of(start: list[int], end: list[int]) -> ThinkingBudgetStateHolder:
    config: Any = SimpleNamespace(reasoning_start_token_ids=start, reasoning_end_token_ids=end)
    return ThinkingBudgetStateHolder(config, 8, 0, torch.device("cpu"), False)


def request_of(params: dict[str, Any], prompt: list[int], output: list[int]) -> Any:
    params = {"detokenize": False, **params}
    return SimpleNamespace(
        sampling_params=SamplingParams(**params), prompt_token_ids=prompt, output_token_ids=output
    )


def track(holder: ThinkingBudgetStateHolder, requests: list[Any]) -> None:
    added = [
        (i, r.sampling_params, r.prompt_token_ids, r.output_token_ids)
        for i, r in enumerate(requests)
    ]
    holder.sync_batch(BatchUpdate(batch_size=len(added), removed=[], added=added, moved=[]))


def column(requests: list[Any], name: str) -> torch.Tensor:
    return torch.tensor([float(getattr(r.sampling_params, name)) for r in requests])


def metadata_of(
    requests: list[Any], vocab: int, thinking: ThinkingBudgetStateHolder | None = None
) -> SamplingMetadata:
    """As vLLM makes it for these requests."""
    prompts = torch.full((len(requests), max(len(r.prompt_token_ids) for r in requests)), vocab)
    for i, request in enumerate(requests):
        prompts[i, : len(request.prompt_token_ids)] = torch.tensor(request.prompt_token_ids)
    repetition, frequency, presence = (
        column(requests, f"{name}_penalty") for name in ("repetition", "frequency", "presence")
    )
    return SamplingMetadata(
        temperature=None,
        all_greedy=True,
        all_random=False,
        top_p=None,
        top_k=None,
        generators={},
        max_num_logprobs=None,
        no_penalties=bool((repetition == 1).all() and not (frequency.any() or presence.any())),
        prompt_token_ids=prompts,
        frequency_penalties=frequency,
        presence_penalties=presence,
        repetition_penalties=repetition,
        output_token_ids=[r.output_token_ids for r in requests],
        allowed_token_ids_mask=None,
        bad_words_token_ids={},
        logitsprocs=LogitsProcessors(),
        thinking_budget_state_holder=thinking,
    )


def at_nodes(
    logits: torch.Tensor, metadata: SamplingMetadata, nodes: NodeRows
) -> tuple[torch.Tensor, NodeThinking | None]:
    """The logits of the nodes as they are sampled."""
    holder = metadata.thinking_budget_state_holder
    thinking = None if holder is None else NodeThinking(holder, nodes)
    of_nodes = node_metadata(metadata, nodes, {}, LogitsProcessors(), thinking)
    return Sampler().apply_logits_processors(logits.clone(), of_nodes, False), thinking


def known(state: dict[str, Any]) -> dict[str, Any]:
    """All of a thinking state but where its next search begins."""
    return {**state, "output_tok_ids": list(state["output_tok_ids"]), "scan_offset": 0}


@pytest.mark.parametrize(("start", "end"), MARKERS)
def test_thinking_states_are_those_of_vllm(start: list[int], end: list[int]) -> None:
    """Texts of three tokens are full of markers, which also span the committed text and a path."""
    rng = np.random.default_rng(0)
    forced = ended = 0
    for _ in range(60):
        prompt = rng.integers(0, 3, rng.integers(1, 6)).tolist()
        params = dict(thinking_token_budget=int(rng.integers(0, 12)))
        request = request_of(params, prompt, [])
        holder, plain = holder_of(start, end), holder_of(start, end)
        track(holder, [request])
        track(plain, [request])
        for _ in range(6):
            # One step without a draft, then one with a tree.
            request.output_token_ids.append(int(rng.integers(0, 3)))
            for each in (holder, plain):
                each.update_state([request.output_token_ids], None)
            tree = tree_of(rng, 12, 3)
            nodes = NodeRows([request], DraftForest.of([tree]), np.zeros(1, np.int64))
            logits, thinking = at_nodes(
                torch.zeros(12, 3), metadata_of([request], 3, holder), nodes
            )
            assert thinking is not None
            states = []
            for node in range(12):
                alone, path = copy(plain), path_to(tree, node)
                alone._state = deepcopy(plain._state)
                for length in range(1, len(path) + 1):
                    alone.update_state([[*request.output_token_ids, *path[:length]]], None)
                states.append(alone._state[0])
                assert known(thinking._holder._state[node]) == known(alone._state[0])
                expected = alone.apply_to_logits(torch.zeros(1, 3), False, None)
                assert logits[node].equal(expected[0])
                forced += bool(expected.any())
                ended += alone._state[0]["scan_offset"] > 0
            accepted = int(rng.integers(0, 12))
            thinking.accept(0, accepted)
            plain._state[0] = states[accepted]
            request.output_token_ids += path_to(tree, accepted)
    assert forced > 100 and ended > 100


def test_penalties_are_those_of_vllm() -> None:
    """Some requests have no penalties, some no nodes, some no output."""
    vocab, rng = 23, np.random.default_rng(1)
    settings = [
        dict(repetition_penalty=1.3),
        {},
        dict(frequency_penalty=-0.7),
        dict(presence_penalty=0.9, repetition_penalty=0.7, frequency_penalty=0.3),
        dict(frequency_penalty=0.5),
    ]
    for _ in range(10):
        requests = [
            request_of(
                params,
                rng.integers(0, vocab, 1 + rng.integers(9)).tolist(),
                rng.integers(0, vocab, rng.integers(30)).tolist(),
            )
            for params in settings
        ]
        rows = np.flatnonzero(rng.random(len(settings)) < 0.7)
        trees = [tree_of(rng, int(rng.integers(1, 14)), vocab) for _ in rows]
        nodes = NodeRows(requests, DraftForest.of(trees), rows)
        logits = torch.from_numpy(rng.normal(size=(len(nodes), vocab))).float()
        metadata = metadata_of(requests, vocab)
        alone = []
        for row, tree in zip(rows.tolist(), trees, strict=True):
            for node in range(len(tree)):
                one = copy(requests[row])
                one.output_token_ids = [*one.output_token_ids, *path_to(tree, node)]
                alone.append(one)
        if alone:
            as_requests = metadata_of(alone, vocab)
            expected = Sampler().apply_logits_processors(logits.clone(), as_requests, False)
            assert at_nodes(logits, metadata, nodes)[0].equal(expected)
