"""Every option reads the spellings of its values and of its name; other near misses are told."""

from __future__ import annotations

import json
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from lookahead_vllm.draft.allowed import Allowed, OptionError
from lookahead_vllm.draft.options import LookaheadOptions, allowed_values

OPTIONS = [option.name for option in fields(LookaheadOptions)]


def values_of(allowed: Allowed) -> list[Any]:
    """Some allowed values: the words, and the ends of the range or a text."""
    texts = ["a.cache"] if allowed.is_text else []
    return [*allowed.words, *(allowed.numbers or ()), *texts]


def spellings(value: Any) -> list[Any]:
    """Other ways to write `value`, as text and with Python's types."""
    texts = [str(value)] if value is not None else ["None", "null"]
    others: list[Any] = [value]
    if isinstance(value, bool):
        others += [int(value), float(value), str(int(value))]
    elif isinstance(value, int):
        texts += [f"{value:_}", f"{value}.0", f"+{value}"]
        others.append(float(value))
    if value != "a.cache":
        texts += [text.upper() for text in texts] + [text.capitalize() for text in texts]
        texts += [text.replace("_", "-") for text in texts if not text[0].isdigit()]
    return others + texts + [f" {texts[0]}\n", f'"{texts[0]}"', f"'{texts[0]}'"]


CASES = [(name, value) for name in OPTIONS for value in values_of(allowed_values(name))]


@pytest.mark.parametrize(("name", "value"), CASES)
def test_every_spelling_of_a_value_is_read(name: str, value: Any) -> None:
    allowed = allowed_values(name)
    for given in spellings(value):
        read = allowed.read(name, given, "the default")
        assert read == value and type(read) is type(value), given


@pytest.mark.parametrize("name", OPTIONS)
def test_every_spelling_of_a_name_is_read(name: str) -> None:
    default = LookaheadOptions().to_dict()[name]
    words = name.split("_")
    camel = words[0] + "".join(map(str.capitalize, words[1:]))
    for given in (name, name.replace("_", "-"), name.upper(), camel, f" '{name}' "):
        assert LookaheadOptions.from_dict({given: default}) == LookaheadOptions()
    given = {name: default, name.upper(): default}
    with pytest.raises(OptionError, match=f"^{name} was given twice, as '{name}' and as .* once$"):
        LookaheadOptions.from_dict(given)


@pytest.mark.parametrize("name", OPTIONS)
def test_a_misspelled_name_is_told(name: str) -> None:
    for given in (name[:-1], f"lookahead.{name}", name[:1] + name[2:]):
        with pytest.raises(OptionError, match=f"did you mean '{name}'\\?$"):
            LookaheadOptions.from_dict({given: 1})


@pytest.mark.parametrize(
    ("name", "given", "meant"),
    [
        ("proposer", "trie", "ngram_trie"),
        ("proposer", "jacobi", "jacobi_window"),
        ("draft", "singles", "single"),
        ("share", "nones", "none"),
        ("share", False, "namespace"),
        ("window_size", "none", "auto"),
    ],
)
def test_a_wrong_value_is_told_what_to_write(name: str, given: Any, meant: Any) -> None:
    with pytest.raises(OptionError) as error:
        allowed_values(name).read(name, given, LookaheadOptions.from_dict({}).to_dict()[name])
    assert str(error.value).startswith(f"{name}={given!r} was given, but it must be ")
    assert str(error.value).endswith(f"; write {json.dumps(meant)}, or leave {name} out")


def test_null_is_the_default_unless_it_may_mean_none() -> None:
    for name in OPTIONS:
        if "none" in allowed_values(name).words:
            with pytest.raises(OptionError, match=r'; write "namespace", or leave share out$'):
                LookaheadOptions.from_dict({name: None})
        else:
            assert LookaheadOptions.from_dict({name: None}) == LookaheadOptions()


def test_paths_of_python_are_read() -> None:
    assert LookaheadOptions.from_dict({"cache_path": Path("/a/b")}).cache_path == "/a/b"


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize(
    "given", ["", "?", "9" * 5000, "1e999", "nan", float("inf"), {}, [], [[]], object(), b"8", -1]
)
def test_what_means_nothing_gets_one_sentence(name: str, given: Any) -> None:
    if allowed_values(name).is_text and isinstance(given, str) and given:
        return
    with pytest.raises(OptionError) as error:
        LookaheadOptions.from_dict({name: given})
    assert str(error.value).startswith(f"{name}=")
    assert "\n" not in str(error.value) and len(str(error.value)) < 300
