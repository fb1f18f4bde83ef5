"""Tiny random models of real architectures, in float32; LoRA adapters for one of them."""

import json
import re
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import transformers as hf
from safetensors.torch import save_file
from vllm import ModelRegistry
from vllm.config import ModelConfig
from vllm.lora.request import LoRARequest
from vllm.model_executor.model_loader import DummyModelLoader, register_model_loader
from vllm.model_executor.models.interfaces import SupportsMRoPE
from vllm.model_executor.models.qwen2 import Qwen2ForCausalLM
from vllm.model_executor.models.qwen3 import Qwen3ForCausalLM

COMMON: dict[str, Any] = dict(
    vocab_size=128, eos_token_id=1, bos_token_id=0, pad_token_id=2, tie_word_embeddings=False
)
ROTARY: dict[str, Any] = dict(
    COMMON,
    num_hidden_layers=2,
    hidden_size=64,
    intermediate_size=128,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=32,
    hidden_act="silu",
    max_position_embeddings=512,
    rms_norm_eps=1e-6,
)
# For architectures that compute the head size from the hidden size.
DIVIDED: dict[str, Any] = {k: v for k, v in ROTARY.items() if k != "head_dim"} | dict(
    hidden_size=128
)
# The windows are far shorter than the outputs of the tests.
WINDOW = dict(sliding_window=24)
ALTERNATING = dict(WINDOW, layer_types=["sliding_attention", "full_attention"])
GEMMA = dict(ROTARY, hidden_activation="gelu_pytorch_tanh")
SHARED_KV: dict[str, Any] = dict(
    WINDOW,
    num_hidden_layers=4,
    num_kv_shared_layers=2,
    layer_types=["sliding_attention", "full_attention"] * 2,
    hidden_size_per_layer_input=16,
    vocab_size_per_layer_input=128,
)
SCALED = dict(scale_emb=12, scale_depth=1.4, dim_model_base=64)
LOCAL_EXPERTS = dict(num_local_experts=4, num_experts_per_tok=2)
EXPERTS = dict(num_experts_per_tok=2, moe_intermediate_size=32)
LATENT = dict(
    # vLLM compiles its CPU kernel for these sizes.
    kv_lora_rank=512,
    qk_rope_head_dim=64,
    qk_nope_head_dim=32,
    v_head_dim=32,
    n_routed_experts=4,
    n_shared_experts=1,
    first_k_dense_replace=1,
    # Without scaling, vLLM 0.32's rotation on CPU reads past the stride of a latent key.
    rope_scaling=dict(
        type="yarn",
        factor=4.0,
        original_max_position_embeddings=128,
        beta_fast=32,
        beta_slow=1,
        mscale=1.0,
        mscale_all_dim=1.0,
        rope_theta=10000.0,
    ),
    **EXPERTS,
)

TINY: dict[str, dict[str, Any]] = {
    "llama": dict(ROTARY, architecture="LlamaForCausalLM"),
    "llama4_chunks": dict(
        ROTARY,
        architecture="Llama4ForCausalLM",
        model_type="llama4_text",
        intermediate_size_mlp=128,
        num_local_experts=4,
        num_experts_per_tok=1,
        interleave_moe_layer_step=2,
        attention_chunk_size=32,
        layer_types=["chunked_attention", "full_attention"],
        no_rope_layers=[1, 0],
    ),
    "mistral_window": dict(ROTARY, **WINDOW, architecture="MistralForCausalLM"),
    "mixtral": dict(ROTARY, **LOCAL_EXPERTS, architecture="MixtralForCausalLM"),
    "qwen2": dict(DIVIDED, architecture="Qwen2ForCausalLM"),
    "qwen2_moe": dict(
        DIVIDED,
        **EXPERTS,
        architecture="Qwen2MoeForCausalLM",
        num_experts=4,
        shared_expert_intermediate_size=64,
        decoder_sparse_step=1,
    ),
    # Defined below: text models with images in their prompts.
    "qwen2_vl": dict(
        DIVIDED,
        architecture="MRoPEQwen2ForCausalLM",
        model_type="qwen2",
        rope_parameters=dict(rope_type="default", rope_theta=10000.0, mrope_section=[4, 6, 6]),
    ),
    "qwen3_vl": dict(
        ROTARY,
        architecture="MRoPEQwen3ForCausalLM",
        model_type="qwen3",
        rope_parameters=dict(
            rope_type="default",
            rope_theta=10000.0,
            mrope_section=[6, 5, 5],
            mrope_interleaved=True,
        ),
    ),
    "qwen3": dict(ROTARY, architecture="Qwen3ForCausalLM"),
    "gemma2_soft_cap": dict(
        GEMMA,
        **ALTERNATING,
        architecture="Gemma2ForCausalLM",
        query_pre_attn_scalar=32,
        attn_logit_softcapping=5.0,
        final_logit_softcapping=30.0,
    ),
    "gemma3_alternating": dict(
        GEMMA,
        **ALTERNATING,
        architecture="Gemma3ForCausalLM",
        model_type="gemma3_text",
        query_pre_attn_scalar=32,
    ),
    "gemma3n_shared_kv": dict(
        GEMMA,
        **SHARED_KV,
        architecture="Gemma3nForCausalLM",
        model_type="gemma3n_text",
        activation_sparsity_pattern=[0.0] * 4,
        laurel_rank=8,
    ),
    "gemma4_long_heads": dict(
        GEMMA,
        **SHARED_KV,
        architecture="Gemma4ForCausalLM",
        model_type="gemma4_text",
        global_head_dim=512,
    ),
    "gpt2": dict(
        COMMON,
        architecture="GPT2LMHeadModel",
        model_type="gpt2",
        n_layer=2,
        n_embd=64,
        n_head=2,
        n_positions=512,
    ),
    "gpt_oss_sinks": dict(ROTARY, **ALTERNATING, **LOCAL_EXPERTS, architecture="GptOssForCausalLM"),
    "opt": dict(
        COMMON,
        architecture="OPTForCausalLM",
        num_hidden_layers=2,
        hidden_size=64,
        word_embed_proj_dim=64,
        ffn_dim=128,
        num_attention_heads=2,
        max_position_embeddings=512,
    ),
    "bloom_alibi": dict(
        COMMON, architecture="BloomForCausalLM", n_layer=2, hidden_size=64, n_head=2
    ),
    "chatglm": dict(
        COMMON,
        architecture="ChatGLMModel",
        model_type="chatglm",
        num_layers=2,
        padded_vocab_size=128,
        hidden_size=64,
        ffn_hidden_size=128,
        kv_channels=32,
        num_attention_heads=2,
        seq_length=512,
        multi_query_attention=True,
        multi_query_group_num=1,
        original_rope=True,
        add_qkv_bias=True,
    ),
    "glm": dict(ROTARY, architecture="GlmForCausalLM"),
    "glm4": dict(ROTARY, architecture="Glm4ForCausalLM"),
    # Their config classes come with the checkpoints; Llama's has the same fields.
    "internlm2": dict(DIVIDED, architecture="InternLM2ForCausalLM", model_type="llama", bias=False),
    "internlm3": dict(
        DIVIDED, architecture="InternLM3ForCausalLM", model_type="llama", bias=False, qkv_bias=True
    ),
    "minicpm": dict(DIVIDED, **SCALED, architecture="MiniCPMForCausalLM", model_type="llama"),
    "minicpm3": dict(
        DIVIDED | dict(num_key_value_heads=4),
        **SCALED,
        architecture="MiniCPM3ForCausalLM",
        q_lora_rank=32,
        kv_lora_rank=32,
        qk_nope_head_dim=32,
        qk_rope_head_dim=32,
        v_head_dim=32,
    ),
    "phi": dict(DIVIDED, architecture="PhiForCausalLM", hidden_act="gelu_new"),
    "phi3_window_long_rope": dict(
        DIVIDED,
        **WINDOW,
        architecture="Phi3ForCausalLM",
        original_max_position_embeddings=128,
        rope_scaling=dict(
            type="longrope", long_factor=[2.0] * 16, short_factor=[1.0] * 16, rope_theta=10000.0
        ),
    ),
    "deepseek_v2": dict(
        DIVIDED,
        **LATENT,
        architecture="DeepseekV2ForCausalLM",
        topk_method="greedy",
        n_group=1,
        topk_group=1,
        q_lora_rank=None,
    ),
    "deepseek_v3": dict(
        DIVIDED,
        **LATENT,
        architecture="DeepseekV3ForCausalLM",
        q_lora_rank=32,
        n_group=2,
        topk_group=1,
    ),
}


PATCHES = range(102, 128)
"""The tokens that stand for patches of an image: the longer pieces of the tests' tokenizer."""


class ImagePrompts:
    """A text model whose prompts contain images, as Qwen2-VL and Qwen3-VL number positions.

    Consecutive `PATCHES` are an image with three columns. The position of a patch is (first, first
    + row, first + column), where `first` follows the text before. The text after an image continues
    one above the image's highest position, in all three dimensions. Low logits keep `PATCHES` out
    of the outputs, so a request that is preempted keeps the positions of its prompt.
    """

    def get_mrope_input_positions(
        self, input_tokens: list[int], mm_features: list[Any]
    ) -> tuple[torch.Tensor, int]:
        positions: list[tuple[int, int, int]] = []
        first = end = patches = 0
        for token in input_tokens:
            if token in PATCHES:
                row, column = divmod(patches, 3)
                positions.append((first, first + row, first + column))
                patches += 1
                end = max(end, first + row + 1, first + column + 1)
            else:
                positions.append((end, end, end))
                first = end = end + 1
                patches = 0
        return torch.tensor(positions).T, end - len(input_tokens)

    def compute_logits(self, hidden_states: torch.Tensor) -> torch.Tensor:
        logits = super().compute_logits(hidden_states)  # type: ignore[misc]
        logits[:, PATCHES.start :] -= 1000
        return logits


class MRoPEQwen2ForCausalLM(ImagePrompts, Qwen2ForCausalLM, SupportsMRoPE):
    """The text part of Qwen2.5-VL."""


class MRoPEQwen3ForCausalLM(ImagePrompts, Qwen3ForCausalLM, SupportsMRoPE):
    """The text part of Qwen3-VL, which interleaves the dimensions."""


for _model in (MRoPEQwen2ForCausalLM, MRoPEQwen3ForCausalLM):
    ModelRegistry.register_model(_model.__name__, _model)


WANDERING = "wandering"
"""The load format for a folder without weights."""
STAGED = "wandering_stages"
"""The same where pipeline stages share a model: each parameter follows from its name."""
CALM = "calm"
"""The same for models in bfloat16."""
NOISY = "noisy_"
"""The beginning of a folder's name whose weights are those of another one, with some noise."""


@register_model_loader(WANDERING)
class WanderingModelLoader(DummyModelLoader):
    """Random weights, the same for every engine.

    Their variance is larger than usual, so that outputs do not fall into loops.
    """

    width = 3.0
    by_name = False

    def load_weights(self, model: torch.nn.Module, model_config: ModelConfig) -> None:
        rng = torch.Generator().manual_seed(0)  # on the CPU, whatever the model's device
        noise = 0.05 * Path(model_config.model).name.startswith(NOISY)
        for name, parameter in model.named_parameters():
            weights = parameter.data
            if self.by_name:
                rng.manual_seed(zlib.crc32(name.encode()))
            if weights.ndim > 1:
                mean = 0.0
                width = (0.1 if "embed" in name else self.width) * weights.shape[-1] ** -0.5
            elif name.endswith("sinks"):  # of the size of the attention scores
                mean, width = 10.0, 5.0
            elif name.endswith("weight"):  # norms
                mean, width = 1.0, 0.1
            else:
                mean, width = 0.0, 0.1
            drawn = torch.empty(weights.shape, dtype=weights.dtype)
            drawn.normal_(mean, width, generator=rng)
            if noise:
                drawn += noise * width * torch.randn(drawn.shape)
            weights.copy_(drawn)


@register_model_loader(STAGED)
class StagedModelLoader(WanderingModelLoader):
    """The same, whichever layers of the model are loaded."""

    by_name = True


@register_model_loader(CALM)
class CalmModelLoader(WanderingModelLoader):
    """The same with less variance, which does not blow bfloat16's rounding up."""

    width = 1.5


def save_config(name: str, folder: Path, configs: Mapping[str, Mapping[str, Any]] = TINY) -> Path:
    """Write the config of the model `name` to `folder / name`, and return that path."""
    path = folder / name
    path.mkdir(exist_ok=True)
    config = dict(configs[name])
    architecture = config.pop("architecture")
    words = re.sub(r"(?<=[a-z0-9])(?=[A-Z][a-z0-9])", "_", architecture.removesuffix("ForCausalLM"))
    config.setdefault("model_type", words.lower())
    (path / "config.json").write_text(json.dumps(config | {"architectures": [architecture]}))
    return path


def save_tiny_model(name: str, folder: Path) -> Path:
    """As `save_config`, with weights in safetensors for engines without `WANDERING`."""
    path = folder / name
    if not path.exists():
        config = hf.AutoConfig.from_pretrained(save_config(name, folder))
        torch.manual_seed(0)
        model = hf.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.ndim > 1 and parameter is not model.get_input_embeddings().weight:
                    parameter.mul_(8)
        model.save_pretrained(path)
    return path


def save_adapter(path: Path, seed: int) -> LoRARequest:
    """Write a random LoRA adapter of rank 8 for the query projections of the tiny Llama."""
    path.mkdir(exist_ok=True)
    config = {"peft_type": "LORA", "r": 8, "lora_alpha": 8, "target_modules": ["q_proj"]}
    (path / "adapter_config.json").write_text(json.dumps({**config, "bias": "none"}))
    rng = torch.Generator().manual_seed(seed)
    name = "base_model.model.model.layers.{}.self_attn.q_proj.lora_{}.weight"
    shapes = {"A": (8, 64), "B": (128, 8)}
    weights = {
        name.format(layer, part): torch.randn(*shape, generator=rng) / 2
        for layer in range(2)
        for part, shape in shapes.items()
    }
    save_file(weights, path / "adapter_model.safetensors")
    return LoRARequest(path.name, seed, str(path))
