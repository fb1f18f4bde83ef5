"""Target-guided decoding: a model gives recorded answers, whatever its weights are.

Source: LLMA (Yang et al., 2023), section 3.2, which measures the speed of a large model on recorded
answers. The model runs as usual; then, at every position from which a token is sampled, the logit
of the recorded token is raised above all others. A large model with random weights then accepts the
drafts that the real model would have accepted.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from lookahead_vllm.verify.transfer import to_device

LIKELIEST = 1e4
"""A logit above all logits of a model."""
NO_TEXT = -1
"""The number of the text of requests without a recorded answer."""


def follow(
    llm: Any,
    prompts: Sequence[Sequence[int]],
    answers: Sequence[Sequence[int]],
) -> None:
    """Give requests with these prompts these answers; other requests do not change.

    Tokens after the end of an answer are the model's own.

    Raises
    ------
    ValueError
        An answer has a token outside the model's vocabulary.
    """
    vocabulary = llm.llm_engine.model_config.get_vocab_size()
    largest = max((max(answer, default=0) for answer in answers), default=0)
    if largest >= vocabulary:
        raise ValueError(
            f"an answer has the token {largest}, but the model knows 0 to {vocabulary - 1}; take "
            "answers of its tokenizer, or a model with a larger vocabulary"
        )
    llm.collective_rpc(_install, args=([*map(list, prompts)], [*map(list, answers)]))


def _install(
    worker: Any, prompts: list[list[int]], answers: list[list[int]], *_unused: Any
) -> None:
    """Runs in a worker, for both of vLLM's model runners: on GPUs plain vLLM uses the second.

    Callers of earlier releases give two more lists; they have no meaning now.
    """
    runner = worker.model_runner
    guide = Guide(prompts, answers, runner.device)
    execute = runner.execute_model

    def execute_model(scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        for request in scheduler_output.scheduled_new_reqs:
            guide.add_request(request.req_id, request.prompt_token_ids)
        return execute(scheduler_output, *args, **kwargs)

    runner.execute_model = execute_model
    if hasattr(runner, "_sample"):
        _guide_first(runner, guide)
    else:
        _guide_second(runner, guide)


def _guide_first(runner: Any, guide: Guide) -> None:
    original = runner._sample

    def sample(logits: torch.Tensor, spec_decode_metadata: Any) -> Any:
        req_ids = runner.input_batch.req_ids
        if spec_decode_metadata is None:
            rows = runner.query_start_loc.gpu[1 : len(req_ids) + 1] - 1
            counts = torch.ones(len(req_ids), dtype=torch.int64)
        else:
            rows = spec_decode_metadata.logits_indices
            counts = torch.tensor(spec_decode_metadata.num_draft_tokens) + 1
        guide.guide(logits, req_ids, counts, runner.positions[rows.long()])
        return original(logits, spec_decode_metadata)

    runner._sample = sample


def _guide_second(runner: Any, guide: Guide) -> None:
    original, compute_logits = runner.sample, runner.model.compute_logits

    def sample(hidden_states: torch.Tensor, batch: Any, grammar_output: Any) -> Any:
        def guided(hidden: torch.Tensor) -> torch.Tensor:
            logits: torch.Tensor = compute_logits(hidden)
            counts = torch.from_numpy(batch.cu_num_logits_np).diff().long()
            positions = batch.positions[batch.logits_indices]
            guide.guide(logits, batch.req_ids, counts, positions)
            return logits

        runner.model.compute_logits = guided
        try:
            return original(hidden_states, batch, grammar_output)
        finally:
            runner.model.compute_logits = compute_logits

    runner.sample = sample


class Guide:
    """The recorded texts, and the text that each request follows."""

    def __init__(
        self,
        prompts: Sequence[Sequence[int]],
        answers: Sequence[Sequence[int]],
        device: torch.device,
    ) -> None:
        texts = [[*prompt, *answer] for prompt, answer in zip(prompts, answers, strict=True)]
        self._text_of_prompt = {tuple(prompt): i for i, prompt in enumerate(prompts)}
        self._text_of_request: dict[str, int] = {}
        # int64 [texts + 1, longest + 1]: -1 after a text's end, and in the whole row NO_TEXT.
        table = np.full((len(texts) + 1, max(map(len, texts), default=0) + 1), -1, np.int64)
        for row, text in zip(table, texts, strict=False):
            row[: len(text)] = text
        self._texts = torch.from_numpy(table).to(device)

    def add_request(self, request_id: str, prompt: Sequence[int] | None) -> None:
        """Find the text of a new request by its prompt."""
        text = self._text_of_prompt.get(tuple(prompt or ()), NO_TEXT)
        self._text_of_request[request_id] = text

    def guide(
        self,
        logits: torch.Tensor,
        req_ids: Sequence[str],
        counts: torch.Tensor,
        positions: torch.Tensor,
    ) -> None:
        """Raise the logit of the recorded next token in every row of a step's logits, in place.

        Parameters
        ----------
        logits : float [n, vocabulary]
        req_ids
            The requests of the batch.
        counts : int64 [len(req_ids)]
            The number of rows of each request, in the order of the rows; on the CPU.
        positions : int [n]
            The position of the token that each row follows.
        """
        numbers = [self._text_of_request.get(req_id, NO_TEXT) for req_id in req_ids]
        texts = torch.tensor(numbers).repeat_interleave(counts)
        end = self._texts.shape[1] - 1
        columns = (positions.long() + 1).clamp(max=end)
        recorded = self._texts[to_device(texts, self._texts.device), columns]
        place = torch.arange(len(recorded), device=recorded.device), recorded.clamp(min=0)
        logits[place] = logits[place].masked_fill(recorded >= 0, LIKELIEST)
