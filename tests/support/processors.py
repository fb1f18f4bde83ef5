"""A custom logits processor whose penalties depend on the whole text."""

from __future__ import annotations

from typing import Any

import torch
from vllm.v1.sample.logits_processor import BatchUpdate, LogitsProcessor
from vllm.v1.sample.logits_processor.builtin import process_dict_updates


class NoRepeat(LogitsProcessor):
    """Penalises tokens that followed the last two tokens earlier in the text.

    Raises one more logit, chosen by the length of the text. The strength of both is the request's
    extra argument `ban`.
    """

    def __init__(self, vllm_config: Any, device: torch.device, is_pin_memory: bool) -> None:
        self.requests: dict[int, tuple[list[int], list[int], float]] = {}

    def is_argmax_invariant(self) -> bool:
        return False

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        process_dict_updates(
            self.requests,
            batch_update,
            lambda params, prompt, output: (
                (prompt, output, params.extra_args["ban"])
                if "ban" in (params.extra_args or {})
                else None
            ),
        )

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        for row, (prompt, output, ban) in self.requests.items():
            text = [*(prompt or []), *output]
            last = text[-2:]
            for i in range(len(text) - 2):
                if text[i : i + 2] == last:
                    logits[row, text[i + 2]] -= ban
            logits[row, len(text) % logits.shape[1]] += ban
        return logits
