"""A custom logits processor whose penalties depend on the whole text."""

from typing import Any

import torch
from vllm.v1.worker.gpu.sample.logits_processor.interface import LogitsProcessor


class NoRepeat(LogitsProcessor):
    """Penalises tokens that followed the last two tokens earlier in the text.

    Raises one more logit, chosen by the length of the text. The strength of both is the request's
    extra argument `ban`. Like vLLM's own processors, it takes the rows before a row for its draft.
    """

    def __init__(self, vllm_config: Any, req_states: Any) -> None:
        self.states = req_states
        self.bans: dict[int, float] = {}

    @classmethod
    def validate_params(cls, sampling_params: Any) -> None:
        """Everything is valid."""

    def add_request(self, req_idx: int, sampling_params: Any) -> bool:
        self.bans.pop(req_idx, None)
        if "ban" in (sampling_params.extra_args or {}):
            self.bans[req_idx] = sampling_params.extra_args["ban"]
        return req_idx in self.bans

    def apply(self, logits: torch.Tensor, ctx: Any) -> torch.Tensor:
        for row, slot in enumerate(ctx.expanded_idx_mapping.tolist()):
            if (ban := self.bans.get(slot)) is None:
                continue
            length = int(self.states.total_len.gpu[slot])
            depth = int(ctx.expanded_local_pos[row])
            draft = ctx.input_ids[row - depth + 1 : row + 1].tolist()
            text = self.states.all_token_ids.gpu[slot, :length].tolist() + draft
            last = text[-2:]
            for i in range(len(text) - 2):
                if text[i : i + 2] == last:
                    logits[row, text[i + 2]] -= ban
            logits[row, len(text) % logits.shape[1]] += ban
        return logits
