"""Prompts with images: the output is plain vLLM's, and no n-gram spans an image."""

from types import SimpleNamespace

import pytest
import torch
from vllm import SamplingParams

from lookahead_vllm.draft.tree import UNKNOWN
from lookahead_vllm.engine.drafter.live_requests import prompt_tokens
from tests.support.driving import drafter_of, engine, generate, obstacle_of
from tests.support.models import WANDERING
from tests.support.vision_models import VISION_MODELS, save_vision_model

GREEDY = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)
SEEDED = SamplingParams(temperature=0.8, top_k=20, seed=1, max_tokens=40, ignore_eos=True)


@pytest.mark.parametrize("name", VISION_MODELS)
def test_prompts_with_images_get_plain_vllms_output(name, tmp_path):
    """Also in chunks, with cached prefixes and a small cache of encoder outputs."""
    # vLLM's models that read images import it; its PyPI build does not load beside a CPU torch.
    pytest.importorskip("torchvision", exc_type=(ImportError, RuntimeError))
    prompts = save_vision_model(name, tmp_path)
    settings = dict(
        skip_tokenizer_init=False,
        load_format=WANDERING,
        limit_mm_per_prompt={"image": 1},
        enable_prefix_caching=True,
        max_num_batched_tokens=48,
        max_num_seqs=4,
    )
    with engine(tmp_path, **settings) as plain:
        greedy = generate(plain, prompts, GREEDY)
        # One by one: seeded requests whose prompts come in chunks stop plain vLLM on a CPU.
        seeded = [generate(plain, [prompt], SEEDED)[0] for prompt in prompts]
    assert len({tuple(answer) for [answer] in greedy}) == len(greedy), "images must matter"
    with engine(tmp_path, {"num_speculative_tokens": 6, "budget": 6}, **settings) as llm:
        assert obstacle_of(llm) is None
        assert generate(llm, prompts, GREEDY) == greedy
        assert generate(llm, prompts, SEEDED) == seeded
        assert generate(llm, prompts, GREEDY) == greedy
        assert drafter_of(llm).counters.branching_trees > 50
        assert drafter_of(llm).counters.accepted_nodes > 50


def test_tokens_that_stand_for_an_image_are_unknown():
    whole = SimpleNamespace(offset=1, length=2, is_embed=None)
    rows = SimpleNamespace(offset=4, length=3, is_embed=torch.tensor([True, False, True]))
    request = SimpleNamespace(
        prompt_token_ids=[5, 9, 9, 6, 9, 8, 9, 7],
        prompt_is_token_ids=None,
        mm_features=[SimpleNamespace(mm_position=place) for place in (whole, rows)],
    )
    prompt = prompt_tokens(request)  # type: ignore[arg-type]
    assert prompt.tolist() == [5, UNKNOWN, UNKNOWN, 6, UNKNOWN, 8, UNKNOWN, 7]
