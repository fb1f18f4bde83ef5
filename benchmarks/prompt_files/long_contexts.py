"""Prompts with a long context in front: other recorded requests with their answers."""

import random
from collections.abc import Iterator, Sequence

from benchmarks.prompt_files.line import Line


def long_contexts(
    recorded: Sequence[Line], count: int, tokens: int, shared: bool, rng: random.Random
) -> Iterator[Line]:
    """Recorded requests, each behind a context of other ones, `tokens` tokens a prompt.

    Parameters
    ----------
    recorded : sequence of Line
        With `prompt_token_ids` and `output_token_ids`; those of the context have other prompts than
        the request, and repeat if they are too few.
    tokens : int
        The length of every prompt; a request whose own prompt is longer is left out.
    shared : bool
        Whether all prompts begin with the same context, as several questions about one document do;
        else each has the other requests in an order of its own.

    Raises
    ------
    ValueError
        There is nothing to make a context of.
    """
    requests = recorded[:count]
    others = recorded[count:] if shared else recorded
    if len(others) < (1 if shared else 2):
        raise ValueError(
            f"{len(recorded)} recorded requests are too few for {count} prompts and a context of "
            "other requests; take fewer prompts (--count), or a longer file"
        )
    common = context(others, tokens, rng) if shared else None
    for trace in requests:
        prompt = trace["prompt_token_ids"]
        room = tokens - len(prompt)
        if room < 0:
            continue
        front = common
        if front is None:
            front = context([other for other in others if other is not trace], tokens, rng)
        yield {
            "category": f"{tokens} tokens",
            "prompt_token_ids": [*front[:room], *prompt],
            "output_token_ids": trace["output_token_ids"],
        }


def context(others: Sequence[Line], tokens: int, rng: random.Random) -> list[int]:
    """At least `tokens` token ids: requests and their answers, in random order."""
    result: list[int] = []
    while len(result) < tokens:
        for trace in rng.sample(list(others), len(others)):
            result += [*trace["prompt_token_ids"], *trace["output_token_ids"]]
    return result
