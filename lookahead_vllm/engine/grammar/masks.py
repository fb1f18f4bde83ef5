"""Grammar masks on the device, as many as a step needs."""

from typing import Any

import numpy as np
import torch
from vllm.v1.worker.gpu.structured_outputs import StructuredOutputsWorker

from lookahead_vllm.engine.grammar.tree_walk import EQUALLY_MANY_MASKS, numbers_of_masks


class GrowingMasks(StructuredOutputsWorker):
    """vLLM's worker for grammars, with memory for one mask a request at first.

    vLLM reserves a mask for each token of the longest draft of every request: a gigabyte for 1024
    requests, drafts of 64 tokens and a vocabulary of 128256.
    """

    logits_indices: torch.Tensor
    grammar_bitmask: torch.Tensor

    def __init__(self, max_num_logits: int, *args: Any, mask_stride: int, **kwargs: Any) -> None:
        super().__init__(max_num_logits // mask_stride, *args, mask_stride=mask_stride, **kwargs)
        self._longest = mask_stride
        """The most masks of a request."""

    def apply_grammar_bitmask(
        self,
        logits: torch.Tensor,
        input_batch: Any,
        grammar_req_ids: list[str],
        grammar_bitmask: np.ndarray,
    ) -> None:
        if EQUALLY_MANY_MASKS and grammar_req_ids:
            self.mask_stride = len(grammar_bitmask) // len(grammar_req_ids)
        if len(grammar_bitmask) > len(self.grammar_bitmask):
            self._grow(len(grammar_bitmask))
        super().apply_grammar_bitmask(logits, input_batch, grammar_req_ids, grammar_bitmask)

    def warm_up(
        self,
        logits: torch.Tensor,
        input_batch: Any,
        grammar_req_ids: list[str],
        grammar_bitmask: np.ndarray,
    ) -> None:
        """Compile what `apply_grammar_bitmask` launches, on the masks of vLLM's warm-up.

        With vLLM 0.33 there is a kernel for each number of masks of a request.
        """
        for num_masks in numbers_of_masks(self._longest) if EQUALLY_MANY_MASKS else [1]:
            masks = np.repeat(grammar_bitmask[:1], num_masks, axis=0)
            GrowingMasks.apply_grammar_bitmask(
                self, logits, input_batch, grammar_req_ids[:1], masks
            )

    def _grow(self, num_masks: int) -> None:
        size = 1 << (num_masks - 1).bit_length()
        self.logits_indices = self.logits_indices.new_empty(size)
        self.grammar_bitmask = self.grammar_bitmask.new_empty(size, self.grammar_bitmask.shape[1])
        # The memory may have been another tensor's, which earlier kernels of this stream still use.
        self.copy_stream.wait_stream(torch.cuda.current_stream())
