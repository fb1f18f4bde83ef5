"""How many tokens of OpenAI's Predicted Outputs were accepted, in the `usage` of the answer."""

import functools
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing
from contextvars import ContextVar
from typing import Any

_counts: ContextVar[dict[int, Any] | None] = ContextVar("lookahead_counts", default=None)
"""By the index of an answer: the draft tokens of a request with a prediction, in the task that
answers it."""


def forget() -> None:
    """The request of this task has no prediction."""
    _counts.set(None)


async def counting(outputs: AsyncIterator[Any], shows_metrics: bool) -> AsyncIterator[Any]:
    """The outputs of a request with a prediction, whose `RequestSpecDecodeMetrics` are noted.

    The engine core counts the drafts of such a request on any server; the answer has these metrics
    only if the server `shows_metrics` (`--per-request-spec-decode-metrics`).
    """
    counts: dict[int, Any] = {}
    _counts.set(counts)
    async with aclosing(outputs):  # type: ignore[type-var]
        async for output in outputs:
            for answer in output.outputs:
                if answer.spec_decode_metrics is not None:
                    counts[answer.index] = answer.spec_decode_metrics
                    if not shows_metrics:
                        answer.spec_decode_metrics = None
            yield output


def with_predicted_tokens(original: Callable[..., Any]) -> Callable[..., Any]:
    """vLLM's `UsageInfo`, with `accepted_prediction_tokens` and `rejected_prediction_tokens`."""
    from vllm.entrypoints.serve.engine.protocol import CompletionTokenUsageInfo

    @functools.wraps(original)
    def usage_info(**fields: Any) -> Any:
        if counts := _counts.get():
            drafts = [metrics.to_dict() for metrics in counts.values()]
            accepted = sum(one["num_accepted_draft_tokens"] for one in drafts)
            drafted = sum(one["num_draft_tokens"] for one in drafts)
            details = fields.get("completion_tokens_details")
            fields["completion_tokens_details"] = CompletionTokenUsageInfo(
                reasoning_tokens=details.reasoning_tokens if details else 0,
                accepted_prediction_tokens=accepted,
                rejected_prediction_tokens=drafted - accepted,
            )
        return original(**fields)

    return usage_info
