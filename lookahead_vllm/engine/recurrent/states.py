"""Recurrent layers in a step with draft trees: parents of the rows, the accepted leaf's state.

vLLM gives a request 1 + K state slots, K being `num_speculative_tokens`, and reads the slot whose
index is the number of accepted tokens. So K nodes fit, in a tree of any shape.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from vllm.logger import init_logger
from vllm.model_executor.layers.mamba.abstract import MambaBase
from vllm.model_executor.layers.mamba.mamba_utils import (
    MambaStateShapeCalculator,
    is_conv_state_dim_first,
)
from vllm.platforms import current_platform
from vllm.platforms.interface import CpuArchEnum, Platform
from vllm.v1.attention.backends.gdn_attn import GDNAttentionMetadata
from vllm.v1.attention.backends.mamba_attn import BaseMambaAttentionMetadata
from vllm.v1.attention.backends.utils import mamba_get_block_table_tensor
from vllm.v1.kv_cache_interface import MambaSpec
from vllm.v1.worker.gpu.input_batch import InputBatch
from vllm.v1.worker.gpu.model_states.mamba_hybrid import MambaHybridAttnMetadata

from lookahead_vllm.draft.jit import Int32s
from lookahead_vllm.engine import config, patches
from lookahead_vllm.engine.step.placed_trees import PlacedTrees
from lookahead_vllm.options.allowed import OptionError
from lookahead_vllm.verify.recurrence import StateMover
from lookahead_vllm.verify.recurrence.cpu import DTYPES
from lookahead_vllm.verify.walk import Walk

PARENTS = "lookahead_parents"
"""Attribute of the metadata of recurrent layers: int32 [tokens of the step], as in
`StateRows.parents`. Absent in steps that vLLM's own kernels compute."""

LAYERS = {"MambaMixer2", "ShortConv", "QwenGatedDeltaNetAttention"}
"""The layers whose kernels are replaced, see `kernels.py`."""

logger = init_logger(f"vllm.{__name__}")


def is_recurrent(layer: Any) -> bool:
    """Whether a layer of vLLM's forward context keeps recurrent state instead of KV."""
    return isinstance(layer, MambaBase)


def is_of_states(group: Any) -> bool:
    """Whether the layers of a KV cache group are recurrent."""
    return isinstance(_spec_of(group), MambaSpec)


def _spec_of(group: Any) -> Any:
    """The group's spec, or one of its kinds of layers."""
    return getattr(group.kv_cache_spec, "first_spec", group.kv_cache_spec)


def kinds_of(layers: Sequence[Any]) -> set[str]:
    """The class names of these layers."""
    return {type(layer).__name__ for layer in layers}


def start(
    groups: Sequence[Any], layers: Mapping[str, Any], device: torch.device, num_nodes: int
) -> None:
    """Refuse layers whose states cannot be rolled back, and log the memory that states take.

    `groups` are the runner's attention groups; a draft has at most `num_nodes` nodes.

    Raises
    ------
    OptionError
        One sentence: which layers, and what to write instead.
    """
    own = [group for group in groups if is_recurrent(layers[group.layer_names[0]])]
    for group in own:
        kinds = kinds_of([layers[name] for name in group.layer_names])
        if device.type == "cpu":
            is_arm = current_platform.get_cpu_architecture() == CpuArchEnum.ARM
            # There, vLLM's short convolution copies the windows before it calls its kernel.
            rolls_back = kinds <= (LAYERS - {"ShortConv"} if is_arm else LAYERS)
        else:
            passed = MambaHybridAttnMetadata(is_prefilling=torch.empty(0, dtype=torch.bool))
            rolls_back = bool(passed.get_extra_attn_kwargs(group.get_metadata_builder(), 0))
        if not rolls_back:
            raise OptionError(
                f"the model has recurrent layers of {', '.join(sorted(kinds))}, to which vLLM does "
                "not pass the number of accepted drafts; leave lookahead out of the speculative "
                "config"
            )
    caches = [c for group in own for name in group.layer_names for c in layers[name].kv_cache]
    if device.type == "cpu" and not DTYPES.issuperset(cache.dtype for cache in caches):
        raise OptionError(
            "on a CPU, recurrent layers with drafts need float32 or bfloat16: write "
            "dtype='bfloat16', or leave lookahead out of the speculative config"
        )
    megabytes = sum(cache[0].numel() * cache.element_size() for cache in caches) / 2**20
    logger.info_once(
        "Lookahead: recurrent layers keep a state for each of up to %d nodes of a draft, %.1f MiB "
        "a request instead of %.1f; a smaller num_speculative_tokens takes less.",
        num_nodes,
        (1 + num_nodes) * megabytes,
        megabytes,
    )


def with_nodes_in_pages(original: Callable[..., None]) -> Callable[..., None]:
    """Let vLLM choose blocks that hold a short convolution's window with the nodes of a draft.

    Models with such layers report the size of the window without nodes.
    """

    @functools.wraps(original)
    def align(platform: type[Platform], vllm_config: Any, *args: Any, **kwargs: Any) -> None:
        shape: Callable[..., Any] = MambaStateShapeCalculator.short_conv_state_shape
        if config.is_lookahead(vllm_config):
            shape = functools.partial(shape, num_spec=vllm_config.num_speculative_tokens)
        with patches.swapped(MambaStateShapeCalculator, "short_conv_state_shape", shape):
            original(platform, vllm_config, *args, **kwargs)

    return align


# ---- the step ------------------------------------------------------------------------------------


def row_parents(step: PlacedTrees, starts: Int32s) -> Int32s:
    """The place of each token's parent among the tokens of its request, int32 [n]; -1 for roots.

    Tokens of a prompt, and of a request without a draft, are chains. `starts`, int32 [r + 1], are
    the first token of each request among the n tokens of the step, then n.
    """
    parents = np.arange(-1, starts[-1] - 1, dtype=np.int32) - np.repeat(
        starts[:-1], np.diff(starts)
    )
    forest = step.forest
    parents[step.starts[forest.owners] + 1 + forest.places] = forest.parents + 1
    return parents


def set_parents(metadata: Mapping[str, Any], parents: torch.Tensor) -> None:
    """Make `verify/recurrence/` compute the drafted rows of a step.

    `metadata` is by layer, and `parents` the result of `row_parents` on the device.
    """
    for layer_metadata in metadata.values():
        if isinstance(layer_metadata, BaseMambaAttentionMetadata | GDNAttentionMetadata):
            setattr(layer_metadata, PARENTS, parents)


class StatePlaces(NamedTuple):
    """Where the states of r requests are; see `StateMover.commit`."""

    columns: torch.Tensor
    """int32 [r, 1 + K]"""
    stops: torch.Tensor
    """int32 [r]"""


class RequestStates:
    """Commits accepted paths in the recurrent layers of one KV cache group.

    The states of a request are in columns of its block table. With prefix caching, the first of
    them moves on with each block, and the state at the end of a block stays for other requests:
    vLLM copies it after the step, from the column of the token there.
    """

    def __init__(self, layers: Sequence[Any], group: Any) -> None:
        self._spec = _spec_of(group)
        windows = [_window(layer.kv_cache[0]) for layer in layers]
        states = [layer.kv_cache[1] for layer in layers if len(layer.kv_cache) > 1]
        # A window has the entries that the kernel reads, and one more for each node.
        width = windows[0].shape[2] - layers[0].num_spec + 1
        self._mover = StateMover(states, windows, width)

    def places(self, table: torch.Tensor, batch: InputBatch, requests: slice) -> StatePlaces:
        """Where the states of a batch's `requests` are; may be a view of its block `table`."""
        spec, lengths = self._spec, batch.seq_lens[requests]
        columns = mamba_get_block_table_tensor(
            table[requests], lengths, spec, spec.mamba_cache_mode
        )
        before = lengths - batch.query_start_loc.diff()[requests]
        return StatePlaces(columns, spec.block_size - before % spec.block_size)

    def commit(self, places: StatePlaces, path: Walk, starts: torch.Tensor) -> None:
        """Move the states of the requests of a walk; `starts` are those of the walk."""
        self._mover.commit(places.columns, path.places(starts), path.num_sampled, places.stops)


def _window(cache: torch.Tensor) -> torch.Tensor:
    """A layer's cache of inputs as [slots, dim, length]."""
    return cache if is_conv_state_dim_first() else cache.transpose(-1, -2)
