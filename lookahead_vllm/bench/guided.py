"""Target-guided decoding: a model that says what was recorded, whatever its weights are.

Source: LLMA (Yang et al., 2023), section 3.2, where the speed of a large model is measured on
recorded answers. The model runs as ever; then, at every position from which a token is sampled, the
recorded one is made the likeliest. So a large model with made-up weights accepts what the real one
would have.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

LIKELIEST = 1e4
"""A logit that no other reaches."""


def follow(llm: Any, prompts: Sequence[Sequence[int]], answers: Sequence[Sequence[int]]) -> None:
    """Let requests with these prompts get these answers; others are left alone.

    What lies behind the end of an answer is the model's own.

    Raises
    ------
    ValueError
        An answer has a token that the model does not know.
    """
    vocabulary = llm.llm_engine.model_config.get_vocab_size()
    most = max((max(answer, default=0) for answer in answers), default=0)
    if most >= vocabulary:
        raise ValueError(
            f"an answer has the token {most}, but the model knows 0 to {vocabulary - 1}; take "
            "answers of its tokenizer, or a model with a larger vocabulary"
        )
    llm.collective_rpc(_install, args=([*map(list, prompts)], [*map(list, answers)]))


def _install(worker: Any, prompts: list[list[int]], answers: list[list[int]]) -> None:
    runner = worker.model_runner
    guide = Guide(prompts, answers, runner.device)
    original = runner._sample

    def sample(logits: torch.Tensor, spec_decode_metadata: Any) -> Any:
        guide.guide(runner, logits, spec_decode_metadata)
        return original(logits, spec_decode_metadata)

    runner._sample = sample


class Guide:
    """The recorded texts, and where each request stands in them."""

    def __init__(
        self,
        prompts: Sequence[Sequence[int]],
        answers: Sequence[Sequence[int]],
        device: torch.device,
    ) -> None:
        texts = [[*prompt, *answer] for prompt, answer in zip(prompts, answers, strict=True)]
        self._known = {tuple(prompt): i for i, prompt in enumerate(prompts)}
        self._of_request: dict[str, int] = {}
        # int64 [texts + 1, longest + 1]: -1 behind the end, and everywhere in the last one, which
        # nobody recorded.
        table = np.full((len(texts) + 1, max(map(len, texts), default=0) + 1), -1, np.int64)
        for row, text in zip(table, texts, strict=False):
            row[: len(text)] = text
        self._texts = torch.from_numpy(table).to(device)

    def guide(self, runner: Any, logits: torch.Tensor, spec_decode_metadata: Any) -> None:
        """Raise the recorded next token of every row of the logits, which are those of a step."""
        req_ids = runner.input_batch.req_ids
        texts = torch.tensor([self._text_of(i, runner.requests) for i in req_ids])
        if spec_decode_metadata is None:
            rows = runner.query_start_loc.gpu[1 : len(req_ids) + 1] - 1
        else:
            rows = spec_decode_metadata.logits_indices
            counts = torch.tensor(spec_decode_metadata.num_draft_tokens) + 1
            texts = texts.repeat_interleave(counts)
        behind = self._texts.shape[1] - 1
        places = (runner.positions[rows.long()].long() + 1).clamp(max=behind)
        said = self._texts[texts.to(self._texts.device), places]
        place = torch.arange(len(said), device=said.device), said.clamp(min=0)
        logits[place] = logits[place].masked_fill(said >= 0, LIKELIEST)

    def _text_of(self, request_id: str, requests: Mapping[str, Any]) -> int:
        found = self._of_request.get(request_id)
        if found is None:
            prompt = tuple(requests[request_id].prompt_token_ids or ())
            found = self._of_request[request_id] = self._known.get(prompt, len(self._texts) - 1)
        return found
