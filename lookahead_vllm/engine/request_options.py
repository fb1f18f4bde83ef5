"""What one request may ask of lookahead, and how that reaches the worker.

A user writes it into `SamplingParams.extra_args` (over HTTP: `vllm_xargs`), as one dict under
`lookahead` or flat as `lookahead_reference`, `lookahead_namespace` and so on. The
front-end checks it, tokenizes texts, and writes the one dict back for the worker.
"""

from __future__ import annotations

import json
import reprlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any, TypeAlias

from vllm.exceptions import VLLMValidationError
from vllm.logger import init_logger

from lookahead_vllm.draft.options import LookaheadOptions
from lookahead_vllm.draft.registry import HAVE_WINDOW
from lookahead_vllm.draft.window_shape import NO_WISHES, Wishes
from lookahead_vllm.engine.config import KEY

logger = init_logger(f"vllm.{__name__}")

NAMES = ("reference", "namespace", "enabled", *Wishes._fields)
FLAT = {f"{KEY}_{name}": name for name in NAMES}

MARK = "passed"
"""The front-end's mark beside a request's options. Its value is bytes, which no JSON of a client
can hold, so that options that another way than the front-end's has let through are not believed."""

MAX_REFERENCES = 64
MAX_REFERENCE_TOKENS = 131_072
CHARACTERS_PER_TOKEN = 4
"""How texts are measured, so that one that is too long is refused before it is tokenized."""
MAX_NAMESPACE = 1024

Reference: TypeAlias = str | list[int]


class RequestError(VLLMValidationError):
    """One sentence: what was given, what is allowed, what to write. HTTP 400 for this request."""


@dataclass(frozen=True)
class RequestOptions:
    """What one request asks of lookahead.

    Attributes
    ----------
    references : sequence of str or list of int
        Texts that the answer may copy from; in the worker token ids only.
    namespace : str or None
        As given by the user. In the worker: whose answers this request learns from and teaches;
        None shares with nobody.
    enabled : bool
        False: no drafts, and nothing is learned from the request.
    wishes : Wishes
        What proposes for it, and how large its lookahead branch is.
    """

    references: Sequence[Any] = ()
    namespace: str | None = None
    enabled: bool = True
    wishes: Wishes = NO_WISHES


_DEFAULT = LookaheadOptions()


def given(
    extra_args: Mapping[str, Any] | None, vocab_size: int, server: LookaheadOptions = _DEFAULT
) -> RequestOptions:
    """What the user asks for, of a server with these options.

    Raises
    ------
    RequestError
        An unknown name, a wrong type, too much, or one thing said twice.
    """
    values: dict[str, Any] = {}
    spellings: dict[str, str] = {}
    for name, spelling, value in _written(extra_args or {}):
        if value is None:
            continue
        if name in values:
            raise RequestError(
                f"{spellings[name]} and {spelling} were both given, but they mean the same; "
                "write one of them"
            )
        values[name], spellings[name] = value, spelling
    options: dict[str, Any] = {}
    if "reference" in values:
        options["references"] = _references(spellings["reference"], values["reference"], vocab_size)
    if "namespace" in values:
        options["namespace"] = _namespace(spellings["namespace"], values["namespace"])
    if "enabled" in values:
        options["enabled"] = _enabled(spellings["enabled"], values["enabled"])
    wishes = {name: values[name] for name in Wishes._fields if name in values}
    if wishes:
        options["wishes"] = Wishes(
            **{name: _wish(spellings[name], name, wishes[name], server) for name in wishes}
        )
    return RequestOptions(**options)


def sent(extra_args: Mapping[str, Any] | None, options: RequestOptions) -> dict[str, Any]:
    """A copy of `extra_args` that says `options`, in the spelling that `given` reads too."""
    others = {k: v for k, v in (extra_args or {}).items() if k != KEY and k not in FLAT}
    return {
        **others,
        KEY: {
            "reference": list(options.references),
            "namespace": options.namespace,
            "enabled": options.enabled,
            **{k: v for k, v in options.wishes._asdict().items() if v is not None},
        },
    }


def marked(extra_args: Mapping[str, Any]) -> dict[str, Any]:
    """What `sent` made, with the mark of the front-end, by which `received` believes it."""
    return {**extra_args, KEY: {**extra_args[KEY], MARK: b""}}


def is_marked(extra_args: Any) -> bool:
    """Whether these have passed the front-end."""
    written = extra_args.get(KEY) if isinstance(extra_args, Mapping) else None
    return isinstance(written, dict) and isinstance(written.get(MARK), bytes)


def received(
    extra_args: Mapping[str, Any] | None,
) -> tuple[RequestOptions, dict[str, Any] | None]:
    """What the front-end sent, and `extra_args` without it, as custom logits processors know them.

    A request that did not pass the front-end shares with nobody. Whatever arrives, nothing is
    raised.
    """
    if not isinstance(extra_args, Mapping):
        return RequestOptions(), None
    others = {k: v for k, v in extra_args.items() if k != KEY} or None
    options = _received(extra_args[KEY]) if is_marked(extra_args) else None
    if options is None:
        logger.warning_once(
            "A request reached the engine by a way on which lookahead does not see it: its "
            "namespace and options have no effect, and it shares with nobody."
        )
        return RequestOptions(), others
    return options, others


def _received(written: dict[str, Any]) -> RequestOptions | None:
    """None for what no front-end has sent."""
    if not {"reference", "namespace", "enabled"} <= written.keys():
        return None
    references, namespace, enabled = (written[k] for k in ("reference", "namespace", "enabled"))
    if not (namespace is None or isinstance(namespace, str)) or not isinstance(enabled, bool):
        return None
    if not isinstance(references, list) or not all(map(_is_token_ids, references)):
        return None
    wishes = Wishes(**{name: written.get(name) for name in Wishes._fields})
    for wish, kind in zip(wishes, _WISH_TYPES, strict=True):
        if wish is not None and type(wish) is not kind:
            return None
    return RequestOptions(references, namespace, enabled, wishes)


_WISH_TYPES = (str, int, int, int, bool)


def _is_token_ids(reference: Any) -> bool:
    return isinstance(reference, list) and all(
        type(token) is int and 0 <= token < 2**31 for token in reference
    )


def shared_namespace(
    share: str, adapter: str | None, cache_salt: str | None, namespace: str | None
) -> str | None:
    """The namespace of a request in the terms of `Proposer.start`.

    No two triples of LoRA adapter, cache salt and given namespace have the same one.
    """
    if share == "none":
        return None
    parts = [part or None for part in (adapter, cache_salt, namespace)]
    if share == "all" or not any(parts):
        return ""
    return json.dumps(parts)


def with_prediction(extra_args: Mapping[str, Any] | None, prediction: Any) -> dict[str, Any]:
    """A copy of `extra_args` with OpenAI's `prediction` as its reference."""
    extra_args = dict(extra_args or {})
    if f"{KEY}_reference" in extra_args:
        raise RequestError(
            f"prediction and {KEY}_reference were both given, but they mean the same; "
            "write one of them"
        )
    content = prediction.get("content") if isinstance(prediction, Mapping) else None
    if isinstance(content, list) and all(isinstance(part, Mapping) for part in content):
        texts = [part.get("text") for part in content]
        content = "".join(texts) if all(isinstance(text, str) for text in texts) else None
    if not isinstance(content, str) or prediction.get("type") != "content":
        raise RequestError(
            f"prediction={reprlib.repr(prediction)} was given, but it must hold a text; "
            'write {"type": "content", "content": "..."}'
        )
    return {**extra_args, f"{KEY}_reference": content}


def _written(extra_args: Mapping[str, Any]) -> Iterator[tuple[str, str, Any]]:
    """The name, the spelling and the value of everything that is meant for lookahead."""
    for key, value in extra_args.items():
        if key == KEY:
            if value is not None and not isinstance(value, Mapping):
                raise RequestError(
                    f"{KEY}={reprlib.repr(value)} was given, but it must be a dict of "
                    f"{', '.join(NAMES)}; write for instance " + '{"lookahead_enabled": false}'
                )
            for name, inner in (value or {}).items():
                if name not in NAMES:
                    raise _unknown(f"{KEY}[{name!r}]", name, NAMES)
                yield name, f"{KEY}[{name!r}]", inner
        elif str(key).startswith(KEY):
            if key not in FLAT:
                raise _unknown(key, key, tuple(FLAT))
            yield FLAT[key], key, value


def _unknown(spelling: str, name: str, known: Sequence[str]) -> RequestError:
    close = get_close_matches(str(name), known, n=1)
    return RequestError(
        f"{spelling} was given, but lookahead knows {', '.join(known)} of a request; "
        + (f"did you mean {close[0]}?" if close else "leave it out")
    )


def _references(spelling: str, value: Any, vocab_size: int) -> list[Reference]:
    items = [value] if isinstance(value, str) else value
    if isinstance(items, list | tuple) and items and type(items[0]) is int:
        items = [items]  # the token ids of one text
    if not isinstance(items, list | tuple) or not all(
        isinstance(item, str | list | tuple) for item in items
    ):
        raise _wrong_reference(spelling, value)
    tokens = sum(
        -(-len(item) // CHARACTERS_PER_TOKEN) if isinstance(item, str) else len(item)
        for item in items
    )
    if len(items) > MAX_REFERENCES or tokens > MAX_REFERENCE_TOKENS:
        raise RequestError(
            f"{spelling} was given with {len(items)} texts of {tokens} tokens in all "
            f"({CHARACTERS_PER_TOKEN} characters count as one), but at most {MAX_REFERENCES} and "
            f"{MAX_REFERENCE_TOKENS} are allowed; write only what the answer may copy from"
        )
    for item in items:
        for token in () if isinstance(item, str) else item:
            if type(token) is not int:
                raise _wrong_reference(spelling, value)
            if not 0 <= token < vocab_size:
                raise RequestError(
                    f"{spelling} holds the token id {token}, but the model knows 0 to "
                    f"{vocab_size - 1}; write ids of this model's tokenizer, or the text"
                )
    return [item if isinstance(item, str) else list(item) for item in items if item]


def _wrong_reference(spelling: str, value: Any) -> RequestError:
    return RequestError(
        f"{spelling}={reprlib.repr(value)} was given, but it must be a text, a list of texts, or "
        'a list of lists of token ids; write for instance ["one text", "another"]'
    )


def _namespace(spelling: str, value: Any) -> str:
    if not isinstance(value, str) or not 0 < len(value) <= MAX_NAMESPACE:
        raise RequestError(
            f"{spelling}={reprlib.repr(value)} was given, but it must be a text of 1 to "
            f'{MAX_NAMESPACE} characters; write for instance "team-a", or leave it out'
        )
    return value


def _wish(spelling: str, name: str, value: Any, server: LookaheadOptions) -> Any:
    if server.proposer not in HAVE_WINDOW or (name == "proposer" and server.proposer != "hybrid"):
        raise RequestError(
            f"{spelling}={reprlib.repr(value)} was given, but this server's proposer is "
            f"{server.proposer!r}; leave it out, or start the server with "
            '"proposer": "hybrid"'
        )
    if name == "proposer":
        if value not in (choices := ("hybrid", "ngram_trie", "jacobi_window")):
            raise RequestError(
                f"{spelling}={reprlib.repr(value)} was given, but it must be one of "
                f"{', '.join(choices)}; write hybrid, or leave it out"
            )
        return value
    if name == "pool_from_prompt":
        return _enabled(spelling, value)
    low = {"window_size": 0, "ngram_size": 2, "guess_set_size": 1}[name]
    high = getattr(server, name)
    if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high:
        raise RequestError(
            f"{spelling}={reprlib.repr(value)} was given, but it must be a whole number from "
            f"{low} to the server's {high}; write {high}, or leave it out"
        )
    if value != int(value):
        raise RequestError(
            f"{spelling}={reprlib.repr(value)} was given, but it must be a whole number; "
            f"write {int(value)}"
        )
    return int(value)


def _enabled(spelling: str, value: Any) -> bool:
    # vLLM's HTTP server makes numbers of JSON's booleans.
    if not isinstance(value, bool | int | float) or value not in (0, 1):
        raise RequestError(
            f"{spelling}={reprlib.repr(value)} was given, but it must be true or false; "
            "write true, or leave it out"
        )
    return bool(value)
