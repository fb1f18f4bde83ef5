"""Read and compare two servers' answers to the same request.

The chunks of a stream are joined first, because a step of speculation sends several tokens in one.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

Verdict: TypeAlias = Literal["equal", "refused by both", "differs"]

DROPPED = {
    *("id", "item_id", "call_id"),  # drawn at random
    *("created", "created_at", "completed_at"),  # times
    "system_fingerprint",  # has a hash of the server's options, and speculation is one of them
    "sequence_number",  # counts a stream's events, and a step of several tokens sends fewer
    # these depend on which of the requests at once came first
    *("cached_tokens", "cached_tokens_per_turn", "cache_write_tokens"),
    *("cache_creation_input_tokens", "cache_read_input_tokens"),
    "rank",  # of a prompt token's alternatives: two of (almost) equal logprob may swap
}
"""Fields that are not compared."""

TOLERANCE = 1e-3
"""Allowed difference of logprobs: float32 sums depend on how many tokens share a step."""

JOINED = {"text", "content", "reasoning", "refusal", "arguments"}
"""Strings that a stream sends in pieces; any other field has the value of the last chunk."""

TEXTLESS = {"<s>", "</s>"}
"""Special tokens of the tests' tokenizer.

A stream of the Responses endpoint has the logprob of a token without text only if the stream's
reader was so slow that plain vLLM sent the token together with the next one.
"""

ALTERNATIVES = {"top_logprobs", "prompt_logprobs"}
"""Lists of the likeliest tokens at each position."""


@dataclass(frozen=True)
class Answer:
    """One server's answer."""

    status: int
    content: Any = None
    """The JSON, of a stream the joined chunks; None for an error."""
    error: Any = None
    """The error's JSON; a stream may report one after a status of 200."""


def assembled(chunks: Sequence[Mapping[str, Any]]) -> Any:
    """The chunks of a stream, joined."""
    if any("type" in chunk for chunk in chunks):
        return _joined_events(chunks)
    whole: Any = None
    for chunk in chunks:
        whole = _merged(whole, dict(chunk), "")
    return whole


def _merged(before: Any, after: Any, key: str) -> Any:
    if before is None or after is None:
        return after if before is None else before
    if isinstance(before, dict) and isinstance(after, dict):
        return {k: _merged(before.get(k), after.get(k), k) for k in {**before, **after}}
    if isinstance(before, list) and isinstance(after, list):
        if any(not isinstance(item, dict) or "index" not in item for item in before + after):
            return before + after
        by_index: dict[int, Any] = {}
        for item in before + after:
            by_index[item["index"]] = _merged(by_index.get(item["index"]), item, key)
        return [by_index[index] for index in sorted(by_index)]
    if isinstance(before, str) and isinstance(after, str) and key in JOINED:
        return before + after
    return after


def _joined_events(events: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The events of the Responses endpoint, with consecutive deltas joined."""
    joined: list[dict[str, Any]] = []
    for event in map(_without_textless, events):
        last = joined[-1] if joined else {}
        same = all(last.get(k) == event.get(k) for k in ("type", "output_index", "content_index"))
        if same and str(event["type"]).endswith(".delta"):
            last["delta"] += event["delta"]
            if event.get("logprobs"):
                last["logprobs"] = [*(last.get("logprobs") or []), *event["logprobs"]]
        else:
            joined.append(event)
    return joined


def _without_textless(value: Any) -> Any:
    """An event, without the logprobs of tokens that have no text."""
    if isinstance(value, Mapping):
        return {key: _without_textless(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_without_textless(item) for item in value if not _is_textless(item)]
    return value


def _is_textless(item: Any) -> bool:
    return isinstance(item, Mapping) and "logprob" in item and item["token"] in TEXTLESS


def compared(plain: Answer, ours: Answer, exact: bool = True) -> tuple[Verdict, list[str]]:
    """The verdict on two answers, and a sentence for each place in which they differ.

    Answers that were sampled without a seed are not `exact`: only their shapes are compared.
    """
    if not exact and plain.error is None and ours.error is None:
        plain, ours = (Answer(a.status, shape(a.content)) for a in (plain, ours))
    places = list(_differences(vars(plain), vars(ours), ""))
    if places:
        return "differs", places
    return ("equal" if plain.error is None else "refused by both"), []


def shape(value: Any) -> Any:
    """An answer's fields without their values, and the first item of each list."""
    if isinstance(value, dict):
        return {k: shape(v) for k, v in value.items() if k not in DROPPED}
    if isinstance(value, list):
        return [shape(value[0])] if value else []
    return None


def _differences(plain: Any, ours: Any, path: str) -> Iterator[str]:
    if isinstance(plain, dict) and isinstance(ours, dict):
        for key in {**plain, **ours}:
            if key in DROPPED:
                continue
            place = f"{path}.{key}".lstrip(".")
            if key not in plain or key not in ours:
                yield f"{place}: only {'plain' if key in plain else 'lookahead'} has it"
            elif key in ALTERNATIVES and isinstance(plain[key], list):
                yield from _alternatives(plain[key], ours[key], place)
            else:
                yield from _differences(plain[key], ours[key], place)
    elif isinstance(plain, list) and isinstance(ours, list):
        if len(plain) != len(ours):
            yield f"{path}: {len(plain)} items in plain's, {len(ours)} in lookahead's"
        for i, (a, b) in enumerate(zip(plain, ours, strict=False)):
            yield from _differences(a, b, f"{path}[{i}]")
    elif isinstance(plain, float) and isinstance(ours, (float, int)):
        if not abs(plain - ours) <= TOLERANCE:
            yield f"{path}: {plain} in plain's, {ours} in lookahead's"
    elif type(plain) is not type(ours) or plain != ours:
        yield f"{path}: {plain!r} in plain's, {ours!r} in lookahead's"


def _alternatives(plain: list[Any], ours: Any, path: str) -> Iterator[str]:
    """Compare lists of the likeliest tokens; tokens of almost equal logprob may be swapped."""
    plain_tables, our_tables = _by_token(plain), _by_token(ours)
    if len(plain_tables) != len(our_tables):
        yield f"{path}: {len(plain_tables)} positions in plain's, {len(our_tables)} in lookahead's"
    for i, (a, b) in enumerate(zip(plain_tables, our_tables, strict=False)):
        if len(a) != len(b):
            yield f"{path}[{i}]: {len(a)} alternatives in plain's, {len(b)} in lookahead's"
        for token in {**a, **b}:
            place = f"{path}[{i}][{token!r}]"
            if token in a and token in b:
                yield from _differences(a[token], b[token], place)
                continue
            alone, other = (a, b) if token in a else (b, a)
            smallest = min(map(_logprob, other.values()), default=float("nan"))
            if not abs(_logprob(alone[token]) - smallest) <= TOLERANCE:
                yield f"{place}: only {'plain' if token in a else 'lookahead'} has it"


def _by_token(positions: Any) -> list[dict[str, Any]]:
    """For each position, tokens mapped to logprobs or to objects with a `logprob`."""
    if not isinstance(positions, list):
        return []
    if all(isinstance(entry, dict) and "token" in entry for entry in positions):
        return [{f"{e['token']} {e.get('bytes')}": e for e in positions}]
    return [entry or {} for entry in positions]


def _logprob(entry: Any) -> float:
    return float(entry["logprob"] if isinstance(entry, dict) else entry)
