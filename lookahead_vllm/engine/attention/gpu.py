"""vLLM's CUDA attention backends, with tree attention for the rows of branching trees.

The FlashAttention and Triton backends share a cache layout and the fields
that are used here, so both get the same builder and implementation.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from tqdm import tqdm
from vllm.distributed.parallel_state import is_global_first_rank
from vllm.model_executor.layers.attention.mla_attention import QueryLenSupport
from vllm.platforms import current_platform
from vllm.utils.torch_utils import canonicalize_singleton_dim_strides
from vllm.v1.attention import selector
from vllm.v1.attention.backend import AttentionType, CommonAttentionMetadata
from vllm.v1.attention.backends import fa_utils
from vllm.v1.attention.backends.flash_attn import (
    FlashAttentionBackend,
    FlashAttentionImpl,
    FlashAttentionMetadataBuilder,
)
from vllm.v1.attention.backends.mla import triton_mla
from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend
from vllm.v1.attention.backends.triton_attn import (
    TritonAttentionBackend,
    TritonAttentionImpl,
    TritonAttentionMetadataBuilder,
)
from vllm.v1.kv_cache_interface import is_quantized_kv_cache

from lookahead_vllm.engine.attention import latent as latent_attention
from lookahead_vllm.engine.attention.attended_trees import (
    AttendedTrees,
    GraphBuffers,
    contexts_only,
    without_contexts,
)
from lookahead_vllm.engine.attention.tree_attention import TreeAttention, dtype_obstacle
from lookahead_vllm.options.allowed import OptionError
from lookahead_vllm.verify.attention import PagedCall, paged_attention
from lookahead_vllm.verify.devices import Impl
from lookahead_vllm.verify.layout.paged_batch import PagedBatch
from lookahead_vllm.verify.moves.triton import PagedKVMover

MAX_HEAD_SIZE = 256

_NOT_BY_XFORMERS = 'attention="xformers" was given, but {}; leave attention out'

if TYPE_CHECKING:
    from vllm.v1.attention.backend import AttentionImpl as _Impl
    from vllm.v1.attention.backend import AttentionMetadataBuilder as _Builder
else:
    _Builder = _Impl = object


class _TreeBuilder(_Builder):
    """Adds the step's trees to the metadata."""

    attended = AttendedTrees()
    """The runner's."""

    @property
    def reads_buffers(self) -> bool:
        """Whether a graph that has no `GraphBuffers` can be replayed without `build`, because it
        only reads the inputs of the step, at fixed addresses."""
        return True

    def refresh(self, graph: GraphBuffers) -> None:
        """Make what else a graph reads of the step, on the device, instead of calling `build`."""
        self.update_draft_decode_metadata(graph.metadata[self])

    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: CommonAttentionMetadata,
        fast_build: bool = False,
    ) -> Any:
        trees, graph = self.attended.trees, self.attended.graph
        if graph is not None and graph.trees.holds_all:
            batch = graph.trees.batch
            without = contexts_only(common_attn_metadata, graph.seq_lens)
        elif graph is not None:
            batch, count = graph.trees.batch, graph.trees.num_trees
            without = without_contexts(
                common_attn_metadata,
                batch.requests[:count],
                batch.sizes[:count],
                out=graph.seq_lens,
            )
        elif trees is not None:
            batch = PagedBatch.build(trees, self.device)
            without = without_contexts(common_attn_metadata, batch.requests, batch.sizes)
        else:
            return super().build(common_prefix_len, common_attn_metadata, fast_build)
        built = super().build(common_prefix_len, without, fast_build)
        built.trees, built.is_of_contexts = batch, graph is not None and graph.trees.holds_all
        if graph is not None:
            graph.metadata.setdefault(self, built)  # the first one is that of the capture
        return built


class _TreeImpl(_Impl):
    trees_by: Impl = "auto"
    """What computes trees in graphs: the option `attention`."""

    def forward(
        self,
        layer: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        attn_metadata: Any,
        output: torch.Tensor,
        **scales: torch.Tensor | None,
    ) -> torch.Tensor:
        trees, lse = getattr(attn_metadata, "trees", None), None
        if trees is not None and attn_metadata.is_of_contexts:
            lse = self.attend_contexts(query, kv_cache, output, attn_metadata)
        else:
            super().forward(layer, query, key, value, kv_cache, attn_metadata, output, **scales)
        if trees is not None and self.attn_type == AttentionType.DECODER:
            table = attn_metadata.block_table
            self.attend_trees(layer, query, kv_cache, output, table, trees, lse)
        return output

    def attend_contexts(
        self, query: torch.Tensor, kv_cache: torch.Tensor, output: torch.Tensor, metadata: Any
    ) -> torch.Tensor:
        """Write the attention of all rows to their contexts alone; returns the logarithms of the
        sums of its exponentials, float32 [heads, at least one for each row]."""
        raise NotImplementedError

    def attend_trees(
        self,
        layer: Any,
        query: torch.Tensor,
        kv_cache: torch.Tensor,
        output: torch.Tensor,
        block_table: torch.Tensor,
        trees: PagedBatch,
        context_lse: torch.Tensor | None = None,
    ) -> None:
        """Overwrite the rows of `trees` in `output`; see `PagedCall` for `context_lse`."""
        keys, values = kv_cache.transpose(1, 2).split(self.head_size, dim=-1)
        scales = {}
        if is_quantized_kv_cache(self.kv_cache_dtype):
            fp8 = current_platform.fp8_dtype()
            keys, values = keys.view(fp8), values.view(fp8)
            scales = {"k_scale": layer._k_scale, "v_scale": layer._v_scale}
            if query.dtype == fp8:  # the layer quantized it for vLLM's kernel
                query = (query.float() * layer._q_scale).to(output.dtype)
        left, _ = self.sliding_window
        call = PagedCall(
            query,
            keys,
            values,
            output,
            block_table,
            trees,
            self.scale,
            sliding_window=left + 1 if left >= 0 else -1,
            alibi_slopes=self.alibi_slopes,
            soft_cap=self.logits_soft_cap,
            sinks=self.sinks,
            context_lse=context_lse,
            **scales,
        )
        # xformers' kernel is compiled for each shape of a batch. Those of graphs are few, and
        # compiled before they are captured; outside, requests would wait.
        in_graph = trees.expected_requests is not None
        paged_attention(call, self.trees_by if in_graph else "auto")

    def fused_output_quant_supported(self, quant_key: Any) -> bool:
        """False: tree attention overwrites rows before they are quantized."""
        return False


class TreeFlashAttentionMetadataBuilder(_TreeBuilder, FlashAttentionMetadataBuilder):
    @property
    def reads_buffers(self) -> bool:
        """False for version 3, whose schedule `build` makes of the lengths."""
        return not self.aot_schedule


class TreeFlashAttentionImpl(_TreeImpl, FlashAttentionImpl):
    def attend_contexts(
        self, query: torch.Tensor, kv_cache: torch.Tensor, output: torch.Tensor, metadata: Any
    ) -> torch.Tensor:
        count = metadata.num_actual_tokens
        parts = kv_cache.transpose(1, 2).split(self.head_size, dim=-1)
        keys, values = map(canonicalize_singleton_dim_strides, parts)  # as vLLM does
        _, lse = fa_utils.flash_attn_varlen_func(
            query[:count],
            keys,
            values,
            out=output[:count],
            cu_seqlens_q=metadata.query_start_loc,
            max_seqlen_q=metadata.max_query_len,
            seqused_k=metadata.seq_lens,
            max_seqlen_k=metadata.max_seq_len,
            softmax_scale=self.scale,
            softcap=self.logits_soft_cap,
            block_table=metadata.block_table,
            scheduler_metadata=metadata.scheduler_metadata,
            num_splits=metadata.max_num_splits,
            fa_version=self.vllm_flash_attn_version,
            return_softmax_lse=True,
        )
        return lse


class TreeFlashAttentionBackend(FlashAttentionBackend):
    get_impl_cls = staticmethod(lambda: TreeFlashAttentionImpl)
    get_builder_cls = staticmethod(lambda: TreeFlashAttentionMetadataBuilder)


class TreeTritonAttentionMetadataBuilder(_TreeBuilder, TritonAttentionMetadataBuilder):
    def build_for_cudagraph_capture(self, common_attn_metadata: CommonAttentionMetadata) -> Any:
        if self.attended.trees is None:
            return super().build_for_cudagraph_capture(common_attn_metadata)
        return self.build(0, common_attn_metadata)  # vLLM shortens all requests to one token


class TreeTritonAttentionImpl(_TreeImpl, TritonAttentionImpl):
    """The Triton backend's implementation, with trees."""


class TreeTritonAttentionBackend(TritonAttentionBackend):
    get_impl_cls = staticmethod(lambda: TreeTritonAttentionImpl)
    get_builder_cls = staticmethod(lambda: TreeTritonAttentionMetadataBuilder)


class GPUTreeAttention(TreeAttention):
    """vLLM's backends FlashAttention and Triton with paged tree attention."""

    replaces_chains = replaces_recurrent_chains = False  # vLLM's kernels compute them

    def register(self) -> None:
        for backend, ours in (
            (AttentionBackendEnum.FLASH_ATTN, TreeFlashAttentionBackend),
            (AttentionBackendEnum.TRITON_ATTN, TreeTritonAttentionBackend),
        ):
            register_backend(backend, f"{__name__}.{ours.__name__}")
        latent_attention.register()
        # Its workspace has a row for each token of the longest drafts of all requests.
        triton_mla.TritonMLAMetadataBuilder.query_len_support = QueryLenSupport.SINGLE_ONLY
        # A plain engine in this process may have selected the backend already.
        selector._cached_get_attn_backend.cache_clear()

    def merges_contexts(self, groups: Sequence[Any], layers: Sequence[Any]) -> bool:
        """FlashAttention 3 takes half of the time of tree attention for a context; its windows
        follow places instead of depths, so layers with one keep the trees."""
        return all(group.backend is TreeFlashAttentionBackend for group in groups) and all(
            impl.vllm_flash_attn_version == 3
            and impl.sliding_window == (-1, -1)
            and impl.alibi_slopes is None
            and impl.sinks is None
            and impl.attn_type == AttentionType.DECODER
            and not is_quantized_kv_cache(impl.kv_cache_dtype)
            for impl in [layer.impl for layer in layers]
        )

    def obstacle(self, group: Any, layers: Sequence[Any], cache_dtype: str) -> str | None:
        if latent_attention.is_latent(layers):
            return latent_attention.obstacle(group, layers, cache_dtype)
        # Layers with another attention pattern (chunks, an encoder) use a backend derived from
        # ours.
        if group.backend not in (TreeFlashAttentionBackend, TreeTritonAttentionBackend):
            return (
                f"there is no tree attention for the backend {group.backend.__name__}; FLASH_ATTN "
                "and TRITON_ATTN have it (--attention-backend)"
            )
        builder = group.get_metadata_builder()
        if is_quantized_kv_cache(cache_dtype) and cache_dtype not in ("fp8", "fp8_e4m3"):
            return f"there is no tree attention over a KV cache of {cache_dtype}"
        if builder.headdim > MAX_HEAD_SIZE:
            return f"there is no tree attention for heads of {builder.headdim}"
        config = builder.vllm_config.model_config
        if not is_quantized_kv_cache(cache_dtype) and (
            reason := dtype_obstacle(layers, config.dtype)
        ):
            return reason
        if config.rswa_window is not None or config.is_mm_prefix_lm:
            return "rows attend to more than the rows before them"
        names = "_k_scale", "_v_scale"
        scales = [getattr(layer, name, None) for layer in layers for name in names]
        if any(scale is not None and scale.numel() > 1 for scale in scales):
            return "its KV cache has a scale for each head"
        if any(getattr(layer.impl, "use_alibi_sqrt", False) for layer in layers):
            return "it uses the square root variant of ALiBi"
        if any(getattr(layer.impl, "chunk_lookback", -1) > -1 for layer in layers):
            return "rows attend to a chunk of the context"
        return None

    def unsupported_rows(self, groups: Sequence[Any]) -> str | None:
        """Most backends of latent attention compute decode rows only if all requests have equally
        many."""
        for group in groups:
            builder = group.get_metadata_builder()
            support = getattr(builder, "query_len_support", None)
            if support is not None and support.name != "VARLEN":
                return f"{group.backend.__name__} computes requests of different lengths as prompts"
        return None

    def mover(self, kv_caches: Sequence[torch.Tensor], layer: Any) -> PagedKVMover:
        if latent_attention.is_latent([layer]):
            kv_caches = [cache.unsqueeze(1) for cache in kv_caches]  # the latents are one head
        return PagedKVMover(kv_caches)

    def warm_up(
        self, layers: Sequence[Any], dtype: torch.dtype, implementation: Impl = "auto"
    ) -> None:
        """Compile the kernels of a step with trees, so that no request waits for it.

        From now on, `implementation` computes the trees of these layers in graphs. Raises
        OptionError if xformers cannot.
        """
        from lookahead_vllm.verify.attention.triton import empty_batches

        for layer in tqdm(layers, "Compiling tree attention", disable=not is_global_first_rank()):
            if latent_attention.is_latent([layer]):
                if implementation == "xformers":
                    raise OptionError(_NOT_BY_XFORMERS.format("xformers has no latent attention"))
                latent_attention.warm_up(layer, dtype)
                continue
            impl, device = layer.impl, layer.kv_cache.device
            impl.trees_by = implementation
            query = torch.zeros(1, impl.num_heads, impl.head_size, dtype=dtype, device=device)
            block_table = torch.zeros(1, 1, dtype=torch.int32, device=device)
            inputs = layer, query, layer.kv_cache, query.clone(), block_table
            for batch in empty_batches(
                impl.num_heads, impl.num_kv_heads, impl.head_size, dtype, device
            ):
                impl.attend_trees(*inputs, batch)
            if implementation == "xformers":
                try:
                    impl.attend_trees(*inputs, replace(batch, expected_requests=1))
                except ValueError as reason:
                    raise OptionError(_NOT_BY_XFORMERS.format(reason)) from None
