"""vLLM's KV cache manager, which returns at once for a request that holds enough blocks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.single_type_kv_cache_manager import FullAttentionManager

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.request import Request


class HeldBlocks(KVCacheManager):
    """A request needs a new block every few steps; vLLM counts its blocks anew in each step.

    Where a layer keeps only a window or a state, each step may also free blocks, so vLLM's own
    code does it all.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._singles = self.coordinator.single_type_managers
        """One for each KV cache group."""
        self._may_return = all(type(single) is FullAttentionManager for single in self._singles)

    def allocate_slots(
        self,
        request: Request,
        num_new_tokens: int,
        *args: Any,
        num_lookahead_tokens: int = 0,
        **kwargs: Any,
    ) -> KVCacheBlocks | None:
        if self._may_return and not args and not kwargs:
            request_id = request.request_id
            end = request.num_computed_tokens + num_new_tokens
            num_known = min(end, request.num_tokens)  # drafts are not cached
            end = min(end + num_lookahead_tokens, self.max_model_len)
            for single in self._singles:
                size = single.block_size
                if end > size * len(single.req_to_blocks[request_id]) or (
                    single.enable_caching
                    and num_known // size > single.num_cached_block.get(request_id, 0)
                ):
                    break
            else:
                return self.empty_kv_cache_blocks
        return super().allocate_slots(
            request, num_new_tokens, *args, num_lookahead_tokens=num_lookahead_tokens, **kwargs
        )
