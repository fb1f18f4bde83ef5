"""Tiny random models of real architectures, in float32."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers as hf

COMMON: dict[str, Any] = dict(
    vocab_size=128,
    num_hidden_layers=2,
    eos_token_id=1,
    bos_token_id=0,
    pad_token_id=2,
    tie_word_embeddings=False,
)
ROTARY: dict[str, Any] = dict(
    COMMON,
    hidden_size=64,
    intermediate_size=128,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=32,
    max_position_embeddings=512,
)

TINY: dict[str, Callable[[], hf.PretrainedConfig]] = {
    "llama": lambda: hf.LlamaConfig(**ROTARY),
    "qwen3": lambda: hf.Qwen3Config(**ROTARY),
    # The window is far shorter than the texts.
    "mistral_window": lambda: hf.MistralConfig(**ROTARY, sliding_window=24),
    "gemma3_alternating": lambda: hf.Gemma3TextConfig(
        **ROTARY,
        sliding_window=24,
        layer_types=["sliding_attention", "full_attention"],
        query_pre_attn_scalar=32,
    ),
    "gpt2_learned_positions": lambda: hf.GPT2Config(
        **{k: v for k, v in COMMON.items() if k != "num_hidden_layers"},
        n_layer=2,
        n_embd=64,
        n_head=2,
        n_positions=512,
    ),
    "opt_learned_positions": lambda: hf.OPTConfig(
        **COMMON,
        hidden_size=64,
        word_embed_proj_dim=64,
        ffn_dim=128,
        num_attention_heads=2,
        max_position_embeddings=512,
    ),
    "bloom_alibi": lambda: hf.BloomConfig(
        **{
            **{k: v for k, v in COMMON.items() if k != "num_hidden_layers"},
            "tie_word_embeddings": True,
        },
        n_layer=2,
        hidden_size=64,
        n_head=2,
    ),
}


def save_tiny_model(name: str, folder: Path) -> Path:
    """Write the model `name` to a folder of its own under `folder`.

    Weights are drawn wider than usual: the text then wanders instead of falling into a loop.
    """
    path = folder / name
    if not path.exists():
        torch.manual_seed(0)
        model = hf.AutoModelForCausalLM.from_config(TINY[name](), dtype=torch.float32)
        with torch.no_grad():
            embeddings = {
                id(m.weight) for m in model.modules() if isinstance(m, torch.nn.Embedding)
            }
            for parameter in model.parameters():
                if parameter.ndim > 1:
                    parameter.mul_(1.0 if id(parameter) in embeddings else 8.0)
        model.save_pretrained(path)
    return path
