"""Target-guided decoding: a model gives recorded answers, whatever its weights are.

Source: LLMA (Yang et al., 2023), section 3.2, which measures the speed of a large model on recorded
answers. The model runs as usual; then, at every position from which a token is sampled, the logit
of the recorded token is raised above all others. A large model with random weights then accepts the
drafts that the real model would have accepted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeAlias

import numpy as np
import torch

from lookahead_vllm.engine import patches
from lookahead_vllm.verify.transfer import to_device

LIKELIEST = 1e4
"""A logit above all logits of a model."""
Rows: TypeAlias = tuple[torch.Tensor, torch.Tensor]
"""Of logits: the text of each row's request, and its position, as in `Guide.raise_logits`."""
NO_TEXT = -1
"""The number of the text of requests without a recorded answer."""


def follow(llm: Any, prompts: Sequence[Sequence[int]], answers: Sequence[Sequence[int]]) -> None:
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


def _install(worker: Any, prompts: list[list[int]], answers: list[list[int]]) -> None:
    """Runs in a worker; plain vLLM's on a CPU has vLLM's first model runner."""
    runner = worker.model_runner
    guide = Guide(prompts, answers, runner.device)
    if hasattr(runner, "_sample"):
        _guide_first(runner, guide)
    else:
        _guide_second(runner, guide)


def _guide_first(runner: Any, guide: Guide) -> None:
    execute, original = runner.execute_model, runner._sample
    texts: dict[str, int] = {}

    def execute_model(scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        for request in scheduler_output.scheduled_new_reqs:
            texts[request.req_id] = guide.text_of(request.prompt_token_ids)
        return execute(scheduler_output, *args, **kwargs)

    def sample(logits: torch.Tensor, spec_decode_metadata: Any) -> Any:
        req_ids = runner.input_batch.req_ids
        if spec_decode_metadata is None:
            rows = runner.query_start_loc.gpu[1 : len(req_ids) + 1] - 1
            counts = torch.ones(len(req_ids), dtype=torch.int64)
        else:
            rows = spec_decode_metadata.logits_indices
            counts = torch.tensor(spec_decode_metadata.num_draft_tokens) + 1
        numbers = [texts.get(req_id, NO_TEXT) for req_id in req_ids]
        of_rows = to_device(torch.tensor(numbers).repeat_interleave(counts), logits.device)
        guide.raise_logits(logits, of_rows, runner.positions[rows.long()])
        return original(logits, spec_decode_metadata)

    runner.execute_model, runner._sample = execute_model, sample


def _guide_second(runner: Any, guide: Guide) -> None:
    execute, original = runner.execute_model, runner.sample
    # int64 [entries]: the text of each entry of the runner's table of requests.
    texts = torch.full((runner.max_num_reqs,), NO_TEXT, device=runner.device)

    def execute_model(scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        output = execute(scheduler_output, *args, **kwargs)
        if new := scheduler_output.scheduled_new_reqs:
            entries = [runner.req_states.req_id_to_index[request.req_id] for request in new]
            numbers = [guide.text_of(request.prompt_token_ids) for request in new]
            places, values = to_device(torch.tensor([entries, numbers]), runner.device)
            texts[places] = values
        return output

    def sample(hidden_states: torch.Tensor, batch: Any, grammar_output: Any) -> Any:
        def rows() -> Rows:
            return texts[batch.expanded_idx_mapping], batch.positions[batch.logits_indices]

        with _guiding(runner.model, guide, rows):
            return original(hidden_states, batch, grammar_output)

    runner.execute_model, runner.sample = execute_model, sample
    if getattr(runner.cudagraph_manager, "tails", None):
        _guide_tails(runner, guide, texts)


def _guide_tails(runner: Any, guide: Guide, texts: torch.Tensor) -> None:
    """Capture lookahead's tails again: in the graphs, logits are computed, raised and sampled."""
    manager = runner.cudagraph_manager
    make_tail = manager.make_tail

    def make_guided(desc: Any, num_choices: int) -> Callable[[], Any]:
        launch = make_tail(desc, num_choices)
        rows, _ = runner._shape.rows_in_graph(desc)

        def guided_launch() -> Any:
            with _guiding(runner.model, guide, lambda: (texts[rows.entries], rows.positions)):
                return launch()

        return guided_launch

    manager.make_tail = make_guided
    with torch.inference_mode():
        manager.capture_tails()
    assert manager.tails, "the log has the reason"


@contextmanager
def _guiding(model: Any, guide: Guide, rows: Callable[[], Rows]) -> Iterator[None]:
    """In the block, the model's logits are raised; `rows` is called after they are computed."""
    compute_logits = model.compute_logits

    def guided(hidden: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = compute_logits(hidden)
        guide.raise_logits(logits, *rows())
        return logits

    with patches.swapped(model, "compute_logits", guided):
        yield


class Guide:
    """The recorded texts, and what follows each of their positions."""

    def __init__(
        self,
        prompts: Sequence[Sequence[int]],
        answers: Sequence[Sequence[int]],
        device: torch.device,
    ) -> None:
        texts = [[*prompt, *answer] for prompt, answer in zip(prompts, answers, strict=True)]
        self._text_of_prompt = {tuple(prompt): i for i, prompt in enumerate(prompts)}
        # [texts + 1, longest + 1]: the token after each position, and its logit; past a text's end,
        # and in the whole row NO_TEXT, -inf for token 0.
        shape = len(texts) + 1, max(map(len, texts), default=0) + 1
        tokens, logits = np.zeros(shape, np.int64), np.full(shape, -np.inf, np.float32)
        for number, text in enumerate(texts):
            tokens[number, : len(text) - 1] = text[1:]
            logits[number, : len(text) - 1] = LIKELIEST
        self._tokens, self._logits = torch.from_numpy(tokens).to(device), torch.from_numpy(logits)

    def text_of(self, prompt: Sequence[int] | None) -> int:
        """The number of the text that begins with this prompt, or NO_TEXT."""
        return self._text_of_prompt.get(tuple(prompt or ()), NO_TEXT)

    def raise_logits(
        self, logits: torch.Tensor, texts: torch.Tensor, positions: torch.Tensor
    ) -> None:
        """Raise the logit of the recorded next token in every row of a step's logits, in place.

        A few launches, and no wait for the device: on a GPU, the host may be what a step waits for.

        Parameters
        ----------
        logits : float [n, vocabulary]
        texts : int64 [n]
            The number of the text of each row's request.
        positions : int [n]
            The position of the token that each row follows.
        """
        self._logits = self._logits.to(logits.device, logits.dtype)  # once
        place = texts, positions.clamp(max=self._tokens.shape[1] - 1)
        tokens, raised = self._tokens[place], self._logits[place]
        logits.scatter_reduce_(1, tokens[:, None], raised[:, None], "amax")
