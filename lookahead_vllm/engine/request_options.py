"""The options of one request, and how they reach the worker.

They are written into `SamplingParams.extra_args` (over HTTP: `vllm_xargs`), as one dict under
`lookahead` or flat as `lookahead_reference`, `lookahead_namespace` and so on. The front-end checks
them, tokenizes texts, and replaces them by one dict for the worker.
"""

from __future__ import annotations

import json
import reprlib
from collections.abc import Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
from vllm.exceptions import VLLMValidationError
from vllm.logger import init_logger

from lookahead_vllm.draft.allowed import Allowed, OptionError, nearest
from lookahead_vllm.draft.options import LookaheadOptions
from lookahead_vllm.engine.requested import KEY

if TYPE_CHECKING:
    from vllm.sampling_params import SamplingParams

logger = init_logger(f"vllm.{__name__}")

NAMES = ("reference", "namespace", "enabled", "proposer")
PROPOSERS = ("hybrid", "ngram_trie", "jacobi_window")
FLAT = {f"{KEY}_{name}": name for name in NAMES}

PREDICTION = f"{KEY}_prediction"
"""The key of OpenAI's `prediction`, as the client sent it."""

TOOL_RESULTS = f"{KEY}_tool_results"
"""The key of the texts of new tool results: a tuple, which a client's JSON cannot contain."""

MARK = "passed"
"""The key with which the front-end marks options that it has checked. Its value is bytes, which a
client's JSON cannot contain, so no client can forge it."""

MAX_REFERENCES = 64
MAX_REFERENCE_TOKENS = 16_384
"""In all references of a request."""
BYTES_PER_TOKEN = 4
"""Bytes of a text in UTF-8 that count as one token. The count needs no tokenizer, so a text that is
too long is refused before it is tokenized."""
MAX_NAMESPACE_CHARACTERS = 1024

Reference: TypeAlias = str | bytes
"""A text, or token ids as little-endian int32, which are copied and sent as one piece."""


class RequestError(VLLMValidationError):
    """One sentence: what was given, what is allowed, what to write. A server answers HTTP 400."""


@dataclass(frozen=True)
class RequestOptions:
    """The options of one request.

    Attributes
    ----------
    references : sequence of Reference
        Texts that the answer may copy from; in the worker arrays of token ids, int32 [n].
    namespace : str or None
        The user's name for it; in the worker, the result of `shared_namespace`. Requests share
        n-grams with those of the same namespace, and with none if it is None.
    enabled : bool
        False: no drafts, and nothing is learned from the request.
    proposer : str or None
        One of PROPOSERS, in place of the server's "hybrid".
    is_predicted : bool
        The references are OpenAI's `prediction`: the answer says how many draft tokens there were.
    spellings : sequence of Reference
        Tool results: as they were read, then as a call would spell them, see
        `front_end/tool_results.py`; in the worker arrays of token ids, int32 [n].
    """

    references: Sequence[Any] = ()
    namespace: str | None = None
    enabled: bool = True
    proposer: str | None = None
    is_predicted: bool = False
    spellings: Sequence[Any] = ()


_DEFAULT = LookaheadOptions()


def parse_options(
    extra_args: Mapping[str, Any] | None, vocab_size: int, server: LookaheadOptions = _DEFAULT
) -> RequestOptions:
    """The options in `extra_args`, checked against the server's options.

    Raises
    ------
    RequestError
        An unknown name, a wrong type, a value beyond its limit, or an option given twice.
    """
    if isinstance(already_checked := (extra_args or {}).get(KEY), RequestOptions):
        return already_checked
    results = (extra_args or {}).get(TOOL_RESULTS)
    options: dict[str, Any] = {"spellings": results if isinstance(results, tuple) else ()}
    if server.client_options == "none":
        return RequestOptions(**options)
    given: dict[str, tuple[str, Any]] = {}
    for name, spelling, value in _written(extra_args or {}):
        if value is None or (name == "namespace" and server.client_options == "no_namespaces"):
            continue
        if name in given:
            raise RequestError(
                f"{given[name][0]} and {spelling} were both given, but they mean the same; "
                "write one of them"
            )
        given[name] = spelling, value
    for name, (spelling, value) in given.items():
        if name == "reference":
            options["references"] = _references(spelling, value, vocab_size)
            options["is_predicted"] = spelling == "prediction"
        elif name == "namespace":
            options[name] = _namespace(spelling, value)
        elif name == "enabled":
            options[name] = _enabled(spelling, value)
        else:
            options[name] = _proposer(spelling, value, server)
    if options.get("enabled") is False:
        for name in ("references", "spellings"):
            options.pop(name, None)  # checked, but not used
    return RequestOptions(**options)


def check_places(body: Any) -> None:
    """Check that vLLM reads lookahead's options where they are in `body`, a request's JSON.

    Raises
    ------
    RequestError
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
            raise RequestError(
                f"{reprlib.repr(name)} was given {f'in {place}' if place else 'at the top'} of the "
                f"request, but lookahead's options are read only in {right}; write {example}"
            )


_FIELDS = ("extra_args", "extra_body", "sampling_params", "vllm_xargs")
"""Where options are written; vLLM reads two of them."""


def _places(fields: Mapping[str, Any], place: str = "") -> Iterator[tuple[str, str]]:
    """The field and the name of each of lookahead's options in the JSON of a request."""
    for key, value in fields.items():
        if _is_meant_for_us(key):
            yield place, key
        elif key in _FIELDS and isinstance(value, Mapping):
            yield from _places(value, f"{place}.{key}" if place else key)


def with_options(extra_args: Mapping[str, Any] | None, options: RequestOptions) -> dict[str, Any]:
    """A copy of extra_args that holds options; parse_options returns them as they are."""
    return {**_others(extra_args), KEY: options}


def fields_for_worker(
    extra_args: Mapping[str, Any] | None, options: RequestOptions
) -> dict[str, Any]:
    """A copy of `extra_args` with `options` as a dict for the worker, in types of msgpack.

    All references must be token ids.
    """
    return {
        **_others(extra_args),
        KEY: {
            "reference": list(options.references),
            "namespace": options.namespace,
            "enabled": options.enabled,
            "proposer": options.proposer,
            "is_predicted": options.is_predicted,
            "spellings": list(options.spellings),
            MARK: b"",
        },
    }


def _others(extra_args: Mapping[str, Any] | None) -> dict[str, Any]:
    """The part of `extra_args` that is not lookahead's."""
    given = extra_args or {}
    return {k: v for k, v in given.items() if k not in (KEY, PREDICTION, TOOL_RESULTS, *FLAT)}


def without_references(params: SamplingParams) -> SamplingParams:
    """`params`, or a copy in which the lists of references and of spellings are empty."""
    fields = (params.extra_args or {}).get(KEY)
    names = ("reference", "spellings")
    if not isinstance(fields, Mapping) or not any(map(fields.get, names)):
        return params
    params = copy(params)
    params.extra_args = {**params.extra_args, KEY: {**fields, **{name: [] for name in names}}}
    return params


def is_marked(extra_args: Any) -> bool:
    """Whether the front-end has checked these `extra_args`."""
    fields = extra_args.get(KEY) if isinstance(extra_args, Mapping) else None
    return isinstance(fields, dict) and isinstance(fields.get(MARK), bytes)


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
        logger.warning_once(
            "A request reached the engine without passing lookahead's front-end: its namespace and "
            "options have no effect, and it shares with no other request."
        )
        return RequestOptions(), others
    fields = extra_args[KEY]
    references, spellings = (
        [np.frombuffer(text, "<i4") for text in fields[name]] for name in ("reference", "spellings")
    )
    values = {name: fields[name] for name in (*NAMES[1:], "is_predicted")}
    return RequestOptions(references, spellings=tuple(spellings), **values), others


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


def with_prediction(extra_args: Mapping[str, Any] | None, prediction: Any) -> dict[str, Any]:
    """A copy of `extra_args` that holds OpenAI's `prediction`, which `parse_options` checks."""
    return {**(extra_args or {}), PREDICTION: prediction}


def _text_of_prediction(prediction: Any) -> str:
    content = prediction.get("content") if isinstance(prediction, Mapping) else None
    if isinstance(content, list) and all(isinstance(part, Mapping) for part in content):
        texts = [part.get("text") for part in content]
        content = "".join(texts) if all(isinstance(text, str) for text in texts) else None
    if not isinstance(content, str) or prediction.get("type") != "content":
        example = 'write {"type": "content", "content": "..."}'
        raise _wrong("prediction", prediction, "hold a text", example)
    return content


def _written(extra_args: Mapping[str, Any]) -> Iterator[tuple[str, str, Any]]:
    """Name, spelling and value of each of lookahead's options in `extra_args`."""
    for key, value in extra_args.items():
        if key == TOOL_RESULTS and isinstance(value, tuple):
            continue
        elif key == PREDICTION:
            yield "reference", "prediction", None if value is None else _text_of_prediction(value)
        elif key == KEY:
            for name, inner in _fields_of(value).items():
                if name not in NAMES:
                    raise _unknown(str(name), NAMES, f" in {KEY}")
                yield name, f"{KEY}[{name!r}]", inner
        elif key in FLAT:
            yield FLAT[key], key, value
        elif _is_meant_for_us(key) or _is_misspelled(str(key)):
            raise _unknown(str(key), tuple(FLAT))


def _is_meant_for_us(key: Any) -> bool:
    """Whether a key, however it is spelled, begins with `KEY`."""
    return str(key).strip().lower().startswith(KEY)


def _is_misspelled(key: str) -> bool:
    """Whether a key is so similar to one of ours that it is not another plugin's."""
    return len(key) < 60 and bool(get_close_matches(key, FLAT, cutoff=0.9))


def _fields_of(value: Any) -> Mapping[Any, Any]:
    """The dict under `lookahead`; empty if it is None."""
    if value is not None and not isinstance(value, Mapping):
        example = 'write for instance {"lookahead_enabled": false}'
        raise _wrong(KEY, value, f"be a dict of {', '.join(NAMES)}", example)
    return value or {}


def _unknown(name: str, known: Sequence[str], where: str = "") -> RequestError:
    close = nearest(name, known)
    return RequestError(
        f"{reprlib.repr(name)}{where} was given, but the options of a request are "
        f"{', '.join(known)}; " + (f"did you mean {close}?" if close else "leave it out")
    )


def _references(spelling: str, value: Any, vocab_size: int) -> tuple[Reference, ...]:
    items = [value] if isinstance(value, str) else value
    if isinstance(items, list | tuple) and items and type(items[0]) is int:
        items = [items]  # the token ids of one text
    if not isinstance(items, list | tuple) or not all(
        isinstance(item, str | list | tuple) for item in items
    ):
        raise _wrong_reference(spelling, value)
    tokens = sum(map(len, items)) // BYTES_PER_TOKEN  # a lower bound: a character has >= 1 byte
    if tokens <= MAX_REFERENCE_TOKENS:
        tokens = sum(_tokens_of(item, spelling) for item in items)
    if len(items) > MAX_REFERENCES or tokens > MAX_REFERENCE_TOKENS:
        raise RequestError(
            f"{spelling} was given with {len(items)} texts of {tokens} tokens or more "
            f"({BYTES_PER_TOKEN} bytes of a text count as one), but this server allows "
            f"{MAX_REFERENCES} texts of {MAX_REFERENCE_TOKENS} tokens in all; write only what the "
            "answer may copy from"
        )
    return tuple(
        item if isinstance(item, str) else _token_ids(spelling, value, item, vocab_size)
        for item in items
        if item
    )


def _tokens_of(item: Reference | Sequence[int], spelling: str = "") -> int:
    """How many tokens a reference counts as, see `BYTES_PER_TOKEN`."""
    if isinstance(item, str):
        try:
            return -(-len(item.encode()) // BYTES_PER_TOKEN)
        except UnicodeEncodeError:
            raise RequestError(
                f"{spelling} holds half of a surrogate pair, which is no character; write a text "
                "that can be encoded in UTF-8"
            ) from None
    return len(item) // 4 if isinstance(item, bytes) else len(item)


def _token_ids(spelling: str, value: Any, ids: Sequence[Any], vocab_size: int) -> bytes:
    """`ids`, one text of the option's `value`, as a `Reference`."""
    for token in ids:
        if type(token) is not int:
            raise _wrong_reference(spelling, value)
        if not 0 <= token < vocab_size:
            raise RequestError(
                f"{spelling} holds the token id {reprlib.repr(token)}, but the model's ids are 0 "
                f"to {vocab_size - 1}; write ids of this model's tokenizer, or the text"
            )
    return np.array(ids, "<i4").tobytes()


def _wrong_reference(spelling: str, value: Any) -> RequestError:
    allowed = "be a text, a list of texts, or a list of lists of token ids"
    return _wrong(spelling, value, allowed, 'write for instance ["one text", "another"]')


def _wrong(spelling: str, value: Any, must: str, advice: str) -> RequestError:
    return RequestError(f"{spelling}={reprlib.repr(value)} was given, but it must {must}; {advice}")


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


def _proposer(spelling: str, value: Any, server: LookaheadOptions) -> str:
    if server.proposer != "hybrid":
        raise RequestError(
            f"{spelling}={reprlib.repr(value)} was given, but this server's proposer is "
            f"{server.proposer!r}; leave it out, or start the server with "
            '"proposer": "hybrid"'
        )
    try:
        Allowed(PROPOSERS).check(spelling, value, server.proposer)
    except OptionError as error:
        raise RequestError(str(error)) from None
    name: str = value
    return name
