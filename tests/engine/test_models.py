"""Every supported architecture gives plain vLLM's output; others stop start-up with a message."""

import json
from pathlib import Path
from typing import Any

import pytest
from vllm.engine.arg_utils import EngineArgs

from lookahead_vllm.engine import plugin
from lookahead_vllm.options.allowed import OptionError
from tests.support.driving import (
    drafter_of,
    engine,
    generate,
    generate_staggered,
    obstacle_of,
    random_prompts,
    record_plain,
)
from tests.support.models import TINY, WANDERING, save_config

IN_DECODERS = ("qwen2_vl", "qwen3_vl", "deepseek_v2", "deepseek_v3")
"""`test_mrope_and_latents.py` tests these."""
NAMES = tuple(name for name in TINY if name not in IN_DECODERS)

HIDDEN = {"proposer": "hidden_path", "budget": 16}
# Outputs span several blocks; vLLM's chunked attention needs blocks no longer than a chunk.
SETTINGS: dict[str, Any] = dict(load_format=WANDERING, block_size=32)

plugin.register()


CHAINS = {"llama4_chunks": "ChunkedLocalAttention"}
"""Architectures without tree attention, with the reason that the log gives."""

PROMPTS = random_prompts(10, 60)


@pytest.mark.parametrize("name", NAMES)
def test_every_architecture_gives_plain_vllms_output(name, tmp_path):
    """In a batch of 10 with staggered arrivals, and alone; trees branch and KV slots move."""
    model = save_config(name, tmp_path)
    vanilla = record_plain(model, PROMPTS, **SETTINGS)
    distinct = sum(len(set(a[0])) for a in vanilla) / len(vanilla)
    assert distinct > 10, "outputs that loop prove nothing"
    with engine(model, HIDDEN, **SETTINGS) as llm:
        obstacle = obstacle_of(llm)
        assert generate_staggered(llm, PROMPTS) == vanilla
        counters = drafter_of(llm).counters
        assert counters.accepted_nodes > 100
        if name in CHAINS:
            assert CHAINS[name] in obstacle
            assert counters.branching_trees == counters.moved_tokens == 0
        else:
            assert obstacle is None
            assert counters.branching_trees > 50
            assert counters.moved_tokens > 50
        assert generate(llm, PROMPTS[:1]) == vanilla[:1]


def start(folder: Path, architecture: str, **config: Any) -> None:
    sizes = dict(vocab_size=128, hidden_size=64, num_hidden_layers=2, num_attention_heads=4)
    (folder / "config.json").write_text(
        json.dumps(sizes | config | {"architectures": [architecture]})
    )
    EngineArgs(
        model=str(folder),
        skip_tokenizer_init=True,
        max_model_len=128,
        speculative_config={"method": "lookahead"},
    ).create_engine_config()


@pytest.mark.parametrize(
    ("architecture", "config", "reason"),
    [
        ("MambaForCausalLM", dict(model_type="mamba"), "has only recurrent layers"),
        (
            "Mamba2ForCausalLM",
            dict(model_type="mamba2", num_heads=4, head_dim=32),
            "has only recurrent layers",
        ),
        ("JambaForCausalLM", dict(model_type="jamba"), "Mamba 1 layers"),
        ("HrmTextForCausalLM", dict(model_type="hrm_text"), "both directions"),
        ("LlamaForCausalLM", dict(model_type="llama", ngram_vocab_size_ratio=2), "embeds n-grams"),
    ],
)
def test_models_whose_rows_depend_on_more_than_the_path_stop_start_up(
    architecture, config, reason, tmp_path
):
    with pytest.raises(OptionError, match=reason) as error:
        start(tmp_path, architecture, **config)
    message = str(error.value)
    assert str(tmp_path) in message
    assert "leave lookahead out of the speculative config" in message
    assert "\n" not in message
