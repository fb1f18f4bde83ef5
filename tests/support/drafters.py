"""Tiny trained drafters, with the weights of `models.WANDERING`."""

from pathlib import Path
from typing import Any

from vllm import LLM

from lookahead_vllm.draft.progress import PROPOSED
from lookahead_vllm.draft.tree import UNKNOWN, DraftForest
from tests.support.driving import runner_of
from tests.support.hybrid_models import HYBRIDS
from tests.support.models import NOISY, TINY, save_config

_LLAMA = {**TINY["llama"], "model_type": "llama"}
_HEAD = {**_LLAMA, "num_hidden_layers": 1}

CONFIGS: dict[str, dict[str, Any]] = {
    **TINY,
    **HYBRIDS,
    f"{NOISY}llama": _LLAMA,
    "eagle": _HEAD,
    "eagle3": {
        **_HEAD,
        "architecture": "LlamaForCausalLMEagle3",
        "draft_vocab_size": 128,
        "eagle_aux_hidden_state_layer_ids": [0, 1, 2],
        "num_aux_hidden_states": 3,
    },
    "mimo": {
        **TINY["qwen2"],
        "architecture": "MiMoForCausalLM",
        "model_type": "qwen2",
        "num_nextn_predict_layers": 1,
    },
    "qwen3_next_mtp": {
        **HYBRIDS["qwen3_next"],
        "model_type": "qwen3_next",
        "num_nextn_predict_layers": 1,
    },
}
"""Of targets and drafters."""

_MODELS = {"draft_model": f"{NOISY}llama", "eagle": "eagle", "eagle3": "eagle3", "mtp": None}
"""The model of each of vLLM's methods; None if it is a part of the target."""

TARGETS: dict[str, tuple[str, ...]] = {
    "draft_model": ("llama", "mistral_window", "mixtral", "falcon_h1", "qwen3_next"),
    "eagle": ("llama",),
    "eagle3": ("llama",),
    "mtp": ("mimo", "qwen3_next_mtp"),
}
"""The targets for which each method can draft."""


def save_drafter(method: str, folder: Path, length: int = 4) -> dict[str, Any]:
    """Write a drafter that proposes `length` tokens; returns lookahead's option."""
    drafter: dict[str, Any] = {"method": method, "num_speculative_tokens": length}
    model = _MODELS[method]
    if model is not None:
        drafter["model"] = str(save_config(model, folder, CONFIGS))
    return drafter


def record_chains(llm: LLM) -> dict[tuple[int, int], list[int]]:
    """Will hold what the drafter proposes by prompt and number of tokens, from now on.

    Requests have the ids of `generate_staggered`.
    """
    trained, chains = runner_of(llm).trained, {}
    propose = trained._propose

    def propose_and_record(batch: Any, *args: Any, **kwargs: Any) -> None:
        propose(batch, *args, **kwargs)
        num_sampled, num_rejected = args[4:6]
        lengths = batch.seq_lens[: batch.num_reqs] - num_rejected + 1
        for row in num_sampled.nonzero().flatten().tolist():
            index = int(batch.req_ids[row].split("-")[1])
            chain = trained._chains[row, : kwargs["num_speculative_tokens"], 0, PROPOSED]
            chains[index, int(lengths[row])] = chain.tolist()

    trained._propose = propose_and_record
    return chains


def record_unknown_chains(llm: LLM) -> list[DraftForest]:
    """Will hold the forests of steps that were launched before the host knew them."""
    late, found = runner_of(llm)._late, []
    add_step = late.add_step

    def add_and_record(step: Any) -> None:
        forest = step.whole_trees.forest
        if forest.num_nodes and forest.tokens[0] == UNKNOWN:
            found.append(forest)
        add_step(step)

    late.add_step = add_and_record
    return found
