"""The options of one request, and how they reach the worker.

They are written into `SamplingParams.extra_args` (over HTTP: `vllm_xargs`), as one dict under
`lookahead` or flat as `lookahead_reference`, `lookahead_namespace` and so on. The front-end checks
them, tokenizes texts, and replaces them by one dict for the worker. So under KEY lies first what
the client wrote, then a `RequestOptions` (`with_options`), then a dict with MARK
(`fields_for_worker`).
"""

import functools
import itertools
import json
import logging
import reprlib
from collections.abc import Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any, TypeAlias

import numpy as np

from lookahead_vllm.options.allowed import OptionError, check_name
from lookahead_vllm.options.server import KEY, LookaheadOptions

logger = logging.getLogger(f"vllm.{__name__}")

NAMES = ("reference", "namespace", "enabled")
FLAT = {f"{KEY}_{name}": name for name in NAMES}

PREDICTION = f"{KEY}_prediction"
"""The key of OpenAI's `prediction`, as the client sent it."""

TOOL_RESULTS = f"{KEY}_tool_results"
"""The key of the texts of new tool results: a tuple, which a client's JSON cannot contain."""

MARK = "passed"
"""The key with which the front-end marks options that it has checked. Its value is bytes, which a
client's JSON cannot contain, so no client can forge it."""

MOST_COMPARED = 16
"""So many of a request's names are compared with ours: each takes up to 0.1 ms."""
LONGEST_COMPARED = 60
MAX_ANSWERS = 64
"""Of a request with references (`n`): each answer's request brings them to the engine."""
MAX_REFERENCES = 64
MAX_REFERENCE_TOKENS = 16_384
"""In all references of a request."""
BYTES_PER_TOKEN = 4
"""Bytes of a text in UTF-8 that count as one token. The count needs no tokenizer, so a text that is
too long is refused before it is tokenized."""
MAX_NAMESPACE_CHARACTERS = 1024

Reference: TypeAlias = str | bytes
"""A text, or token ids as little-endian int32, which are copied and sent as one piece."""


@dataclass(frozen=True)
class RequestOptions:
    """The options of one request."""

    references: Sequence[Any] = ()
    """Each a Reference that the answer may copy from; in the worker arrays of token ids, int32
    [n]."""
    namespace: str | None = None
    """The user's name for it; in the worker, the result of `shared_namespace`. Requests share
    n-grams with those of the same namespace, and with none if it is None."""
    enabled: bool = True
    """False: no drafts, and nothing is learned from the request."""
    is_predicted: bool = False
    """The references are OpenAI's `prediction`: the answer says how many draft tokens there
    were."""
    spellings: Sequence[Any] = ()
    """Each a Reference: tool results as they were read, then as a call would spell them, see
    `front_end/tool_results.py`; in the worker arrays of token ids, int32 [n]."""


# ---- what a client writes ------------------------------------------------------------------------


def parse_options(
    extra_args: Mapping[str, Any] | None, vocab_size: int, server: LookaheadOptions
) -> RequestOptions:
    """The options in `extra_args`, checked against the server's options.

    Raises
    ------
    OptionError
        An unknown name, a wrong type, a value beyond its limit, or an option given twice.
    """
    extra_args = extra_args or {}
    if isinstance(already_checked := extra_args.get(KEY), RequestOptions):
        return already_checked
    options: dict[str, Any] = {}
    written: dict[str, str] = {}
    for name, spelling, value in () if server.client_options == "none" else _written(extra_args):
        if value is None or (name == "namespace" and server.client_options == "no_namespaces"):
            continue
        if name in written:
            raise OptionError(
                f"{written[name]} and {spelling} were both given, but they mean the same; "
                "write one of them"
            )
        written[name] = spelling
        if name == "reference":
            options["references"] = _references(spelling, value, vocab_size)
            options["is_predicted"] = spelling == "prediction"
        elif name == "namespace":
            options[name] = _namespace(spelling, value)
        else:
            options[name] = _enabled(spelling, value)
    if not options.get("enabled", True):
        options["references"] = ()  # checked, but not used
    elif isinstance(results := extra_args.get(TOOL_RESULTS), tuple):
        options["spellings"] = results
    return RequestOptions(**options)


def check_places(body: Any) -> None:
    """Check that vLLM reads lookahead's options where they are in `body`, a request's JSON.

    Raises
    ------
    OptionError
        vLLM would ignore one of them.
    """
    if not isinstance(body, Mapping):
        return
    if "token_ids" in body:  # of the endpoint /inference/v1/generate
        right, example = "sampling_params.extra_args", '{"sampling_params": {"extra_args": {...}}}'
    else:
        right, example = "vllm_xargs", '{"vllm_xargs": {...}}'
    for place, name in _places(body):
        if place != right:
            raise OptionError(
                f"{reprlib.repr(name)} was given {f'in {place}' if place else 'at the top'} of the "
                f"request, but lookahead's options are read only in {right}; write {example}"
            )


_FIELDS = ("extra_args", "extra_body", "sampling_params", "vllm_xargs")
"""Where options are written; vLLM reads two of them."""
_MAX_DEPTH = 8
"""Of fields inside each other; nobody expects an option to be read in deeper ones."""


def _places(fields: Mapping[str, Any], place: str = "") -> Iterator[tuple[str, str]]:
    """The field and the name of each of lookahead's options in the JSON of a request."""
    for key, value in fields.items():
        if _is_meant_for_us(key):
            yield place, key
        elif key in _FIELDS and isinstance(value, Mapping) and place.count(".") < _MAX_DEPTH:
            yield from _places(value, f"{place}.{key}" if place else key)


def _is_meant_for_us(key: Any) -> bool:
    """Whether a key, however it is spelled, begins with `KEY`."""
    return str(key).strip().lower().startswith(KEY)


def _written(extra_args: Mapping[str, Any]) -> Iterator[tuple[str, str, Any]]:
    """Name, spelling and value of each of lookahead's options in `extra_args`."""
    known = "the options of a request are"
    for place, (key, value) in enumerate(extra_args.items()):
        if key == PREDICTION:
            yield "reference", "prediction", None if value is None else _text_of_prediction(value)
        elif key == KEY and value is not None:
            if not isinstance(value, Mapping):
                example = 'write for instance {"lookahead_enabled": false}'
                raise _wrong(KEY, value, f"be a dict of {', '.join(NAMES)}", example)
            for name, inner in value.items():
                check_name(name, NAMES, f"in {KEY}, {known}")
                yield name, f"{KEY}[{name!r}]", inner
        elif key in FLAT:
            yield FLAT[key], key, value
        elif key != KEY and not (key == TOOL_RESULTS and isinstance(value, tuple)):
            text = str(key)
            is_compared = place < MOST_COMPARED and len(text) < LONGEST_COMPARED
            if (is_compared and _is_near(text)) or _is_meant_for_us(key):
                check_name(key, FLAT, known)


@functools.lru_cache(maxsize=1024)  # a request may have a thousand prompts
def _is_near(text: str) -> bool:
    """Whether an unknown name is so similar to one of ours that it is no other plugin's."""
    return bool(get_close_matches(text, FLAT, cutoff=0.9))


def _text_of_prediction(prediction: Any) -> str:
    content = prediction.get("content") if isinstance(prediction, Mapping) else None
    if isinstance(content, list) and all(isinstance(part, Mapping) for part in content):
        texts = [part.get("text") for part in content]
        content = "".join(texts) if all(isinstance(text, str) for text in texts) else None
    if not isinstance(content, str) or prediction.get("type") != "content":
        example = 'write {"type": "content", "content": "..."}'
        raise _wrong("prediction", prediction, "hold a text", example)
    return content


def _references(spelling: str, value: Any, vocab_size: int) -> tuple[Reference, ...]:
    wrong = _wrong(
        spelling,
        value,
        "be a text, a list of texts, or a list of lists of token ids",
        'write for instance ["one text", "another"]',
    )
    texts = [value] if isinstance(value, str) else value
    if isinstance(texts, list | tuple) and texts and type(texts[0]) is int:
        texts = [texts]  # the token ids of one text
    if not isinstance(texts, list | tuple):
        raise wrong
    if not all(isinstance(text, str | list | tuple) for text in texts):
        raise wrong
    try:
        encoded = [text.encode() for text in texts if isinstance(text, str)]
    except UnicodeEncodeError:
        raise OptionError(
            f"{spelling} holds half of a surrogate pair, which is no character; write a text that "
            "can be encoded in UTF-8"
        ) from None
    lists = [text for text in texts if not isinstance(text, str)]
    tokens = sum(-(-len(text) // BYTES_PER_TOKEN) for text in encoded) + sum(map(len, lists))
    if len(texts) > MAX_REFERENCES or tokens > MAX_REFERENCE_TOKENS:
        raise OptionError(
            f"{spelling} was given with {len(texts)} texts of {tokens} tokens "
            f"({BYTES_PER_TOKEN} bytes of a text count as one), but this server allows "
            f"{MAX_REFERENCES} texts of {MAX_REFERENCE_TOKENS} tokens in all; write only what the "
            "answer may copy from"
        )
    for token in itertools.chain.from_iterable(lists):
        if type(token) is not int:
            raise wrong
        if not 0 <= token < vocab_size:
            raise OptionError(
                f"{spelling} holds the token id {reprlib.repr(token)}, but the model's ids are 0 "
                f"to {vocab_size - 1}; write ids of this model's tokenizer, or the text"
            )
    return tuple(
        text if isinstance(text, str) else np.array(text, "<i4").tobytes() for text in texts if text
    )


def _wrong(spelling: str, value: Any, must: str, advice: str) -> OptionError:
    return OptionError(f"{spelling}={reprlib.repr(value)} was given, but it must {must}; {advice}")


def _namespace(spelling: str, value: Any) -> str:
    if not isinstance(value, str) or not 0 < len(value) <= MAX_NAMESPACE_CHARACTERS:
        meant = f'write "{value}"' if type(value) in (int, float) else 'write for instance "team-a"'
        allowed = f"be a text of 1 to {MAX_NAMESPACE_CHARACTERS} characters"
        raise _wrong(spelling, value, allowed, f"{meant}, or leave it out")
    return value


def _enabled(spelling: str, value: Any) -> bool:
    # vLLM's HTTP server converts JSON's booleans to numbers.
    if not isinstance(value, bool | int | float) or value not in (0, 1):
        raise _wrong(spelling, value, "be true or false", f"leave {spelling} out")
    return bool(value)


# ---- on the way to the worker --------------------------------------------------------------------


def with_options(
    extra_args: Mapping[str, Any] | None, options: RequestOptions | Mapping[str, Any]
) -> dict[str, Any]:
    """A copy of extra_args that holds `options` in place of what the client wrote.

    `parse_options` returns RequestOptions as they are.
    """
    ours = (KEY, PREDICTION, TOOL_RESULTS, *FLAT)
    return {k: v for k, v in (extra_args or {}).items() if k not in ours} | {KEY: options}


def fields_for_worker(
    extra_args: Mapping[str, Any] | None, options: RequestOptions
) -> dict[str, Any]:
    """A copy of `extra_args` with `options` as a dict for the worker, in types of msgpack.

    All references must be token ids.
    """
    return with_options(extra_args, {**vars(options), MARK: b""})


def without_references(params: Any) -> Any:
    """These sampling parameters, or a copy that has neither references nor spellings."""
    fields = (params.extra_args or {}).get(KEY)
    if not isinstance(fields, Mapping) or not (fields.get("references") or fields.get("spellings")):
        return params
    params = copy(params)
    params.extra_args = {**params.extra_args, KEY: {**fields, "references": (), "spellings": ()}}
    return params


def is_marked(extra_args: Any) -> bool:
    """Whether the front-end has checked these `extra_args`."""
    fields = extra_args.get(KEY) if isinstance(extra_args, Mapping) else None
    return isinstance(fields, dict) and isinstance(fields.get(MARK), bytes)


@functools.cache
def _warn_of_unchecked() -> None:
    """Warn once."""
    logger.warning(
        "A request reached the engine without passing lookahead's front-end: its namespace and "
        "options have no effect, and it shares with no other request."
    )


def options_in_worker(
    extra_args: Mapping[str, Any] | None,
) -> tuple[RequestOptions, dict[str, Any] | None]:
    """In the worker: the options, and the rest of `extra_args`, for custom logits processors.

    The rest is None if it is empty, because vLLM's front-end has no empty one. A request whose
    options the front-end has not checked gets the default options, and shares with no other.
    """
    if not isinstance(extra_args, Mapping):
        return RequestOptions(), None
    others = {k: v for k, v in extra_args.items() if k != KEY} or None
    if not is_marked(extra_args):
        _warn_of_unchecked()
        return RequestOptions(), others
    fields = {name: value for name, value in extra_args[KEY].items() if name != MARK}
    for name in ("references", "spellings"):
        fields[name] = tuple(np.frombuffer(text, "<i4") for text in fields[name])
    return RequestOptions(**fields), others


def shared_namespace(
    share: str, adapter: str | None, cache_salt: str | None, namespace: str | None
) -> str | None:
    """The namespace of a request, as `Proposer.start` takes it.

    With `share="namespace"`, it is unique for each triple of LoRA adapter, cache salt and given
    namespace; None and "" count as the same.
    """
    if share == "none":
        return None
    parts = [part or None for part in (adapter, cache_salt, namespace)]
    if share == "all" or not any(parts):
        return ""
    return json.dumps(parts)
