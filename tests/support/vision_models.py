"""Tiny random models that read images, with the processors and the tokenizer that they need."""

from pathlib import Path
from typing import Any

import numpy as np
import transformers as hf
from PIL import Image
from transformers import PreTrainedTokenizerBase

from tests.support.tokenizer import save_tokenizer

TEXT = dict(
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=32,
    vocab_size=136,
    max_position_embeddings=512,
)
TOWER = dict(hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2)
TEXTS = (
    "what is in",
    "the name is",
    "true",
    "an image:",
    "where is it",
    "name:",
    "10 10",
    "is it?",
)


def _save_llava(path: Path, tokenizer: PreTrainedTokenizerBase) -> str:
    """LLaVA: a patch is one token, and positions are linear."""
    image = "<image>"
    tokenizer.add_special_tokens({"additional_special_tokens": [image]})
    hf.LlavaConfig(
        vision_config=hf.CLIPVisionConfig(**TOWER, image_size=28, patch_size=14, projection_dim=32),
        text_config=hf.LlamaConfig(**TEXT),
        image_token_index=tokenizer.convert_tokens_to_ids(image),
        vision_feature_layer=-1,
        architectures=["LlavaForConditionalGeneration"],
    ).save_pretrained(path)
    hf.LlavaProcessor(
        image_processor=hf.CLIPImageProcessor(
            size={"shortest_edge": 28}, crop_size={"height": 28, "width": 28}
        ),
        tokenizer=tokenizer,
        patch_size=14,
        vision_feature_select_strategy="default",
        image_token=image,
        num_additional_image_tokens=1,
    ).save_pretrained(path)
    return image


def _save_qwen2_vl(path: Path, tokenizer: PreTrainedTokenizerBase) -> str:
    """Qwen2-VL: images of any size, and M-RoPE positions."""
    names = ["<|image_pad|>", "<|video_pad|>", "<|vision_start|>", "<|vision_end|>"]
    tokenizer.add_special_tokens({"additional_special_tokens": names})
    image, video, start, end = (tokenizer.convert_tokens_to_ids(name) for name in names)
    sections = dict(rope_type="default", mrope_section=[4, 6, 6], rope_theta=10000.0)
    hf.Qwen2VLConfig(
        vision_config=dict(
            depth=2, embed_dim=32, hidden_size=64, num_heads=2, mlp_ratio=2, patch_size=14
        ),
        text_config=dict(TEXT, rope_parameters=sections),
        image_token_id=image,
        video_token_id=video,
        vision_start_token_id=start,
        vision_end_token_id=end,
        architectures=["Qwen2VLForConditionalGeneration"],
    ).save_pretrained(path)
    hf.Qwen2VLImageProcessor(min_pixels=28**2, max_pixels=16 * 28**2).save_pretrained(path)
    return "<|vision_start|><|image_pad|><|vision_end|>"


VISION_MODELS = {"llava": _save_llava, "qwen2_vl": _save_qwen2_vl}


def save_vision_model(name: str, path: Path) -> list[dict[str, Any]]:
    """Write the model `name` to a folder; returns prompts for it.

    The prompts have different texts and four different images, so some images occur twice.
    """
    tokenizer = hf.AutoTokenizer.from_pretrained(save_tokenizer(path))
    placeholder = VISION_MODELS[name](path, tokenizer)
    tokenizer.save_pretrained(path)
    rng = np.random.default_rng(0)
    sizes = [(56, 84, 3), (28, 28, 3), (56, 28, 3), (84, 84, 3)]
    images = [Image.fromarray(rng.integers(0, 256, size, dtype=np.uint8)) for size in sizes]
    return [
        {"prompt": f"u:{placeholder}{text}", "multi_modal_data": {"image": images[i % 4]}}
        for i, text in enumerate(TEXTS)
    ]
