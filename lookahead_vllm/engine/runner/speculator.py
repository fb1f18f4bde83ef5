"""The speculator that vLLM's runner calls for drafts after each step: it makes none."""

from typing import Any

import torch


class LateSpeculator:
    """Makes no drafts: they are grown at the start of the next step (`late_drafts.py`).

    Replaces the result of `init_speculator`.
    """

    supports_mm_inputs = False
    draft_logits = None
    num_query_per_req = 1
    num_extra_query_per_req = 0
    pcp_manager = None

    def __init__(self, vllm_config: Any, device: torch.device, req_states: Any) -> None:
        self._no_tokens = torch.zeros_like(req_states.draft_tokens)

    def init_cudagraph_manager(self, cudagraph_mode: Any) -> None:
        """Do nothing: there is no graph."""

    def capture(self) -> None:
        """Do nothing: there is no graph."""

    def propose(self, input_batch: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Placeholders, int64 [requests, num_speculative_tokens]."""
        return self._no_tokens[: input_batch.num_reqs]


def without_dense_texts(request_state: type, *args: Any, **kwargs: Any) -> Any:
    """vLLM's `RequestState` without the texts on the device, which an n-gram method would read."""
    return request_state(*args, **{**kwargs, "use_dense_all_token_ids": False})
