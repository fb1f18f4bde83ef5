"""Where draft trees may branch: attention can verify them, and accepted KV can be moved."""

from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

from vllm.config import VllmConfig
from vllm.logger import init_logger

from lookahead_vllm.engine.attention.tree_attention import TreeAttention
from lookahead_vllm.engine.config import options_of
from lookahead_vllm.engine.pipeline import gather_from_stages
from lookahead_vllm.engine.recurrent.states import LAYERS, RequestStates, is_recurrent, kinds_of

logger = init_logger(f"vllm.{__name__}")


class Branching(NamedTuple):
    """What the attention of an engine can verify."""

    has_drafts: bool
    """Whether requests with drafts can share a step with others; without it, there are none."""
    may_branch: bool
    movers: Sequence[Any]
    """One for each KV cache group, where trees may branch; None for a group of drafters' layers
    only. See `kv_movers`."""
    of_chains: bool
    """Whether tree attention also computes chains."""
    merges_contexts: bool = False
    """Whether, in graphs with trees, it computes draft blocks alone; see `TreeAttention`."""


NOTHING_BRANCHES = Branching(True, False, (), False)


def decide(
    config: VllmConfig,
    groups: Sequence[Any],
    kv_cache_groups: Sequence[Any],
    attention: TreeAttention,
    without: Collection[str] = (),
) -> Branching:
    """Decide whether trees may branch in this engine; if not, the reason is logged.

    `groups` are the runner's attention groups, and `kv_cache_groups` those of its KV cache. The
    layers `without` compute no trees: those of a trained drafter.
    """
    if without:
        groups = [group for group in groups if not set(group.layer_names) <= set(without)]
    rows = attention.unsupported_rows(groups)
    if rows:
        logger.info_once("Lookahead drafts nothing here: %s.", rows)
    obstacle = branching_obstacle(config, groups, attention, without)
    if config.parallel_config.pipeline_parallel_size > 1:
        # Each stage has layers of its own.
        obstacle = next(filter(None, gather_from_stages(obstacle)), None)
    if obstacle:
        logger.info_once("Lookahead verifies chains, not trees, here: %s.", obstacle)
        return NOTHING_BRANCHES._replace(has_drafts=not rows)
    layers = config.compilation_config.static_forward_context
    movers = kv_movers(layers, kv_cache_groups, attention, without)
    names = [name for group in groups for name in group.layer_names if name not in without]
    merges = options_of(config).attention == "auto" and attention.merges_contexts(
        groups, [layers[name] for name in names]
    )
    return Branching(not rows, True, movers, attention.replaces_chains, merges)


def branching_obstacle(
    config: VllmConfig,
    groups: Sequence[Any],
    attention: TreeAttention,
    without: Collection[str] = (),
) -> str | None:
    """Why this engine's attention cannot verify branching trees, or None if it can."""
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
        own = [layers[name] for name in group.layer_names if name not in without]
        if is_recurrent(own[0]):
            if others := kinds_of(own) - LAYERS:
                return f"a node has no recurrent state in layers of {', '.join(sorted(others))}"
            if config.mamba_config.enable_stochastic_rounding:
                return "vLLM rounds recurrent states at random"
        elif reason := attention.obstacle(group, own, config.cache_config.cache_dtype):
            return reason
    return None


def kv_movers(
    layers: Mapping[str, Any],
    kv_cache_groups: Sequence[Any],
    attention: TreeAttention,
    without: Collection[str],
) -> list[Any]:
    """A mover for each KV cache group; it moves the KV of all layers with a cache of their own.
    None for a group without such layers, as on a stage of a pipeline that has none of its layers.

    Groups of recurrent layers get a `RequestStates`.
    """
    movers: list[Any] = []
    for group in kv_cache_groups:
        own = [layers[name] for name in group.layer_names if name not in without]
        if not own:
            movers.append(None)
            continue
        if is_recurrent(own[0]):
            movers.append(RequestStates(own, group))
            continue
        # Layers that share their KV with an earlier one hold the same tensor.
        caches = {layer.kv_cache.data_ptr(): layer.kv_cache for layer in own}
        movers.append(attention.mover(list(caches.values()), own[0]))
    return movers
