"""Prompts of embeddings: drafts come from the request's own token ids, and outputs stay exact."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from vllm import LLM, SamplingParams
from vllm.inputs import EmbedsPrompt

from tests.support.driving import (
    drafter_of,
    engine,
    generate,
    grown_forests,
    of_length,
    random_prompts,
    runner_of,
)
from tests.support.proposers import record


def embedded(llm: LLM, tokens: Sequence[int], are_ids: Sequence[bool] | None = None) -> Any:
    """A prompt of the embeddings of `tokens`, with the token ids where `are_ids` is true."""
    with torch.inference_mode():
        vectors = runner_of(llm).model.embed_input_ids(torch.tensor(tokens))
    if are_ids is None:
        return EmbedsPrompt(prompt_embeds=vectors)
    placeholder = 0
    ids = [token if is_id else placeholder for token, is_id in zip(tokens, are_ids, strict=True)]
    return EmbedsPrompt(
        prompt_embeds=vectors, prompt_token_ids=ids, prompt_is_token_ids=list(are_ids)
    )


def test_the_prompt_of_an_earlier_request_in_the_same_row_is_not_drafted(llama):
    allowed, secret = range(40, 44), range(100, 120)
    prompt = [token for i, mark in enumerate(secret) for token in (allowed[i % 4], mark)]

    def params(namespace: str, max_tokens: int) -> SamplingParams:
        extra_args = {"lookahead_namespace": namespace}
        return of_length(max_tokens, allowed_token_ids=list(allowed), extra_args=extra_args)

    with engine(llama, {"budget": 8}, max_num_seqs=1, enable_prompt_embeds=True) as llm:
        generate(llm, [prompt], params("one", 2))
        forests = grown_forests(llm)
        generate(llm, [embedded(llm, random_prompts(1, 40)[0])], params("another", 30))
    drafted = {token for forest in forests for token in forest.tokens.tolist()}
    assert drafted and not drafted & set(secret)


@pytest.mark.parametrize("num_seqs", [2, 16])
def test_answers_to_embeddings_stay_plain_vllm_s_on_trees(num_seqs, llama):
    texts = random_prompts(12, 30, seed=5)

    def prompts(llm: LLM) -> list[Any]:
        return [
            embedded(llm, text, [None, [j % 3 > 0 for j in range(len(text))]][i % 2])
            if i % 3
            else text
            for i, text in enumerate(texts)
        ]

    with engine(llama, enable_prompt_embeds=True) as plain:
        vanilla = generate(plain, prompts(plain))
    known_prompts = [
        text if not i % 3 else [t if j % 3 else -1 for j, t in enumerate(text)] if i % 2 else []
        for i, text in enumerate(texts)
    ]
    record(known_prompts, vanilla)
    lookahead = {"proposer": "hidden_path", "budget": 16}
    with engine(llama, lookahead, max_num_seqs=num_seqs, enable_prompt_embeds=True) as llm:
        assert generate(llm, prompts(llm)) == vanilla
        counters = drafter_of(llm).counters
        assert counters.branching_trees > 10 and counters.moved_tokens > 10
