"""Where draft trees may branch: attention can verify them, and accepted KV can be moved."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import ModuleType
from typing import TYPE_CHECKING, Any

from vllm.logger import init_logger

from lookahead_vllm.engine.worker.pipeline import gather_from_stages
from lookahead_vllm.engine.worker.recurrent import (
    LAYERS,
    is_recurrent,
    kinds_of,
    state_mover,
)

if TYPE_CHECKING:
    from vllm.config import VllmConfig

logger = init_logger(f"vllm.{__name__}")


def decide(runner: Any, groups: Sequence[Any]) -> list[Any]:
    """Decide whether trees may branch in this engine; if not, the reason is logged.

    Sets `drafter.may_branch`, and whether tree attention also computes chains, `trees_of_chains`,
    and requests that decode one token, `trees_of_singles`.

    Parameters
    ----------
    runner
        A lookahead runner with its KV cache.
    groups
        Its attention groups.

    Returns
    -------
    list
        The result of `kv_movers`; empty if trees may not branch.
    """
    if reason := runner.attention.unsupported_rows(groups):
        logger.info_once("Lookahead drafts nothing here: %s.", reason)
        runner.drafter.max_step_nodes = 0
    obstacle = branching_obstacle(runner.vllm_config, groups, runner.attention)
    if runner.vllm_config.parallel_config.pipeline_parallel_size > 1:
        # Each stage has layers of its own.
        obstacle = next(filter(None, gather_from_stages(obstacle)), None)
    runner.drafter.may_branch = obstacle is None
    is_latent = runner.model_config.use_mla
    runner.trees_of_chains = obstacle is None and runner.attention.replaces_chains(is_latent)
    runner.trees_of_singles = runner.trees_of_chains and not is_latent
    if obstacle:
        logger.info_once("Lookahead verifies chains, not trees, here: %s.", obstacle)
        return []
    layers = runner.compilation_config.static_forward_context
    return kv_movers(layers, runner.kv_cache_config.kv_cache_groups, runner.attention)


def branching_obstacle(
    config: VllmConfig, groups: Sequence[Any], attention: ModuleType
) -> str | None:
    """Why this engine's attention cannot verify branching trees, or None if it can.

    Parameters
    ----------
    groups
        The runner's attention groups.
    attention
        Tree attention on this device: `cpu_attention` or `gpu_attention`.
    """
    model, parallel = config.model_config, config.parallel_config
    multimodal = model.multimodal_config
    if model.uses_mrope and multimodal is not None and multimodal.is_multimodal_pruning_enabled():
        return "vLLM sets positions anew where it prunes video tokens"
    if hasattr(model.hf_text_config, "index_topk"):
        return "its sparse indexer treats the rows of a draft as one text"
    if model.is_encoder_decoder:
        return "the model attends to an encoder as well"
    if config.kv_transfer_config is not None:
        return "KV leaves the engine before accepted tokens are compacted"
    if max(parallel.decode_context_parallel_size, parallel.prefill_context_parallel_size) > 1:
        return "the KV of a text is spread over several ranks"
    if config.aux_output_config.enabled:
        return "vLLM returns the experts of a request's first rows, not of the accepted ones"
    if parallel.use_ubatching:
        return "steps run as several batches"
    layers = config.compilation_config.static_forward_context
    for group in groups:
        own = [layers[name] for name in group.layer_names]
        if is_recurrent(own[0]):
            if others := kinds_of(own) - LAYERS:
                return f"a node has no recurrent state in layers of {', '.join(sorted(others))}"
        elif reason := attention.obstacle(group, own, config.cache_config.cache_dtype):
            return str(reason)
    return None


def kv_movers(
    layers: Mapping[str, Any], kv_cache_groups: Sequence[Any], attention: ModuleType
) -> list[Any]:
    """A mover for each KV cache group; it moves the KV of all layers with a cache of their own.

    Groups of recurrent layers get a `StateMover`.

    Parameters
    ----------
    layers
        vLLM's attention layers by name.
    """
    movers: list[Any] = []
    for group in kv_cache_groups:
        own = [layers[name] for name in group.layer_names]
        if is_recurrent(own[0]):
            movers.append(state_mover(own))
            continue
        # Layers that share their KV with an earlier one hold the same tensor.
        caches = {layer.kv_cache.data_ptr(): layer.kv_cache for layer in own}
        movers.append(attention.mover(list(caches.values()), own[0]))
    return movers
