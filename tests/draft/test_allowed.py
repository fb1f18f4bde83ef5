"""Every option takes the values that are documented; of others one sentence says what to write."""

from __future__ import annotations

import json
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from lookahead_vllm.draft.allowed import OptionError
from lookahead_vllm.draft.options import LookaheadOptions, allowed_values

OPTIONS = [option.name for option in fields(LookaheadOptions)]


@pytest.mark.parametrize("name", OPTIONS)
def test_words_and_both_ends_of_a_range_are_allowed(name: str) -> None:
    allowed = allowed_values(name)
    values = [*allowed.words, *(allowed.numbers or ())] or ["a.cache"]
    for value in values:
        allowed.check(name, value, None)
        if isinstance(value, str) and value != "a.cache":
            with pytest.raises(OptionError, match=f'write "{value}"'):
                allowed.check(name, value.upper(), None)


@pytest.mark.parametrize("name", OPTIONS)
def test_null_is_the_default(name: str) -> None:
    assert LookaheadOptions.from_dict({name: None}) == LookaheadOptions()


@pytest.mark.parametrize("name", OPTIONS)
def test_a_misspelled_name_is_told(name: str) -> None:
    for given in (name[:-1], name.upper(), f"lookahead.{name}", name[:1] + name[2:]):
        with pytest.raises(OptionError, match=f"did you mean '{name}'\\?$"):
            LookaheadOptions.from_dict({given: 1})


@pytest.mark.parametrize(
    ("name", "given", "meant"),
    [
        ("proposer", "trie", "ngram_trie"),
        ("proposer", "jacobi", "jacobi_window"),
        ("share", "nones", "none"),
        ("share", False, "namespace"),
        ("window_size", "none", "auto"),
        ("budget", "8", "auto"),
        ("budget", 8.0, "auto"),
        ("parallel", True, 1),
    ],
)
def test_a_wrong_value_is_told_what_to_write(name: str, given: Any, meant: Any) -> None:
    with pytest.raises(OptionError) as error:
        LookaheadOptions.from_dict({name: given})
    assert str(error.value).startswith(f"{name}={given!r} was given, but it must be ")
    assert str(error.value).endswith(f"; write {json.dumps(meant)}, or leave {name} out")


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize(
    "given",
    [*("", "?\0", float("nan"), float("inf"), {}, [], [[]], object(), b"8", -1, 10**9), Path("a")],
)
def test_what_means_nothing_gets_one_sentence(name: str, given: Any) -> None:
    if name in ("max_nodes", "max_text_nodes") and given == 10**9:
        return
    with pytest.raises(OptionError) as error:
        LookaheadOptions.from_dict({name: given})
    assert str(error.value).startswith(f"{name}=")
    assert "\n" not in str(error.value) and len(str(error.value)) < 300
