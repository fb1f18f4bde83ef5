"""Options are checked at start-up, and the error for a wrong one says what to write."""

import json
import os
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import pytest

from lookahead_vllm.draft.proposers.registry import CLASS_PATHS
from lookahead_vllm.options.allowed import OptionError
from lookahead_vllm.options.server import ALLOWED, PROPOSERS, LookaheadOptions

OPTIONS = [option.name for option in fields(LookaheadOptions)]


def refused(given: dict[str, Any]) -> str:
    """The one sentence that refuses these options."""
    with pytest.raises(OptionError) as error:
        LookaheadOptions.from_dict(given)
    assert "\n" not in str(error.value) and len(str(error.value)) < 300
    return str(error.value)


def test_every_option_has_allowed_values_and_every_proposer_a_class():
    assert len(OPTIONS) <= 12 and list(ALLOWED) == OPTIONS
    assert set(PROPOSERS) <= CLASS_PATHS.keys()


def test_options_round_trip_through_a_dict():
    assert LookaheadOptions.from_dict({}) == LookaheadOptions()
    options = LookaheadOptions(num_speculative_tokens=32, share="all", budget=8)
    assert LookaheadOptions.from_dict(asdict(options)) == options


@pytest.mark.parametrize("name", OPTIONS)
def test_words_and_both_ends_of_a_range_are_allowed(name):
    allowed = ALLOWED[name]
    assert LookaheadOptions.from_dict({name: None}) == LookaheadOptions()
    for value in (*allowed.words, *(allowed.numbers or ())) or ["a.cache"]:
        allowed.check(name, value, None)
        if isinstance(value, str) and value != "a.cache":
            assert f'write "{value}"' in refused({name: value.upper()})


@pytest.mark.parametrize("name", OPTIONS)
def test_a_misspelled_name_is_told(name):
    for given in (name[:-1], name.upper(), f"lookahead.{name}", name[:1] + name[2:]):
        assert refused({given: 1}).endswith(f"did you mean {name!r}?")


@pytest.mark.parametrize(
    ("name", "given", "meant"),
    [
        ("proposer", "trie", "ngram_trie"),
        ("proposer", "jacobi", "jacobi_window"),
        ("proposer", 3, "auto"),
        ("share", "nones", "none"),
        ("share", False, "namespace"),
        ("window_size", "none", "auto"),
        ("budget", "8", "auto"),
        ("budget", 8.0, "auto"),
        ("num_speculative_tokens", 129, "auto"),
        ("max_nodes", 1023, 4_000_000),
        ("parallel", True, 1),
        ("cache_path", "", "lookahead.cache"),
    ],
)
def test_a_wrong_value_is_told_what_to_write(name, given, meant):
    message = refused({name: given})
    assert message.startswith(f"{name}={given!r} was given, but it must be {ALLOWED[name]}; ")
    assert message.endswith(f"; write {json.dumps(meant)}, or leave {name} out")


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize(
    "given",
    [*("", "?\0", float("nan"), float("inf"), {}, [], [[]], object(), b"8", -1, 2**30), Path("a")],
)
def test_what_means_nothing_gets_one_sentence(name, given):
    assert refused({name: given}).startswith(f"{name}=")


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"depth": 8}, ["'depth' was given", "options are num_speculative_tokens", "leave it out"]),
        ({"window": 8}, ["'window' was given", "did you mean 'window_size'?"]),
        (
            {"proposer": "jacobi_window", "window_size": 15, "num_speculative_tokens": 16},
            ["window_size=15 was given", "59 nodes", "=16;", "leave window_size out"],
        ),
        (
            {"proposer": "hybrid", "window_size": 15, "budget": 16},
            ["59 nodes are more than budget=16"],
        ),
        ({"max_nodes": 1023}, ["a whole number from 1024"]),
        ({"budget": "fast"}, ['"auto" or a whole number from 1 to 128']),
        ({"share": "tenant"}, ["one of none, namespace, all"]),
        (
            {"budget": 12, "num_speculative_tokens": 8},
            ["budget=12 was given", "num_speculative_tokens=8", 'write "auto"'],
        ),
    ],
)
def test_the_error_says_what_was_given_what_is_allowed_and_what_to_write(given, says):
    message = refused(given)
    assert all(part in message for part in says)


SHARING = {"share_with": "redis://:secret@h"}


@pytest.mark.parametrize(
    ("given", "option", "missing"),
    [
        ({"window_size": 8}, "window_size", "a window"),
        ({"proposer": "ngram_trie", "window_size": 4}, "window_size", "a window"),
        *(
            ({"proposer": "jacobi_window", **given}, next(iter(given)), "a trie")
            for given in (
                {"max_nodes": 4096},
                {"drafter": "path"},
                {"share": "all"},
                {"cache_path": "a.cache"},
                SHARING,
            )
        ),
        ({**SHARING, "share": "none"}, "share_with", "requests that learn from each other"),
    ],
)
def test_an_option_without_effect_is_refused(given, option, missing):
    message = refused(given)
    assert message.startswith(f"{option} was given, but it has no effect without {missing}")
    assert message.endswith(f", or leave {option} out") and "secret" not in message


@pytest.mark.parametrize(
    "path", [".", "missing/a.cache", "sealed/a.cache", "x" * 300, "loop", "a\0b"]
)
def test_an_unwritable_cache_path_is_refused_at_start(path, tmp_path, monkeypatch):
    (tmp_path / "sealed").mkdir()
    (tmp_path / "loop").symlink_to("loop")
    access = os.access
    # Root may write everywhere.
    may_write = lambda path, mode: path.name != "sealed" and access(path, mode)  # noqa: E731
    monkeypatch.setattr(os, "access", may_write)
    options = LookaheadOptions(cache_path=str(tmp_path / path))
    with pytest.raises(OptionError, match="no file can be written as"):
        options.with_checked_cache()


def test_cache_path_becomes_absolute(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    for given in ("a.cache", "~/a.cache", str(tmp_path / "a.cache")):
        options = LookaheadOptions(cache_path=given).with_checked_cache()
        assert options.cache_path == str((tmp_path / "a.cache").resolve())
    assert LookaheadOptions().with_checked_cache() == LookaheadOptions()


@pytest.mark.parametrize(
    ("given", "parameters", "length", "window"),
    [
        ({"proposer": "jacobi_window"}, 7e9, 119, (15, 5)),
        ({"proposer": "jacobi_window"}, 13e9, 79, (10, 5)),
        ({"proposer": "jacobi_window"}, 34e9, 55, (7, 5)),
        ({"proposer": "jacobi_window", "num_speculative_tokens": 32}, 7e9, 32, (4, 5)),
        ({"proposer": "jacobi_window", "window_size": 5}, 7e9, 39, (5, 5)),
        ({"proposer": "hybrid"}, 7e9, 64, (4, 5)),
        ({"proposer": "hybrid", "budget": 8}, 7e9, 8, (0, 5)),
        ({"proposer": "hybrid", "window_size": 0}, 7e9, 64, (0, 5)),
    ],
)
def test_auto_follows_the_papers_table_4(given, parameters, length, window):
    options = LookaheadOptions.from_dict(given).for_model(parameters)
    assert options.decoding_length == length
    assert options.window == window
    assert LookaheadOptions.from_dict(asdict(options)) == options


@pytest.mark.parametrize(
    ("given", "critical_length", "proposer"),
    [
        ({}, 63, "ngram_trie"),
        ({}, 64, "hybrid"),
        ({"budget": 16}, 128, "ngram_trie"),
        ({"budget": 64}, 1, "hybrid"),
        ({"proposer": "hybrid"}, 1, "hybrid"),
        ({"proposer": "jacobi_window"}, 128, "jacobi_window"),
    ],
)
def test_auto_drafts_from_all_sources_where_tokens_are_nearly_free(
    given, critical_length, proposer
):
    options = LookaheadOptions.from_dict(given)
    assert options.for_step_cost(critical_length).proposer == proposer


@pytest.mark.parametrize(
    ("given", "length"),
    [
        ({}, 16),
        ({"proposer": "hybrid"}, 16),
        ({"num_speculative_tokens": 32}, 32),
        ({"budget": 24}, 24),
        ({"proposer": "jacobi_window", "window_size": 7}, 55),
        ({"proposer": "hybrid", "window_size": 7}, 64),
    ],
)
def test_auto_has_fewer_nodes_where_there_is_less_room(given, length):
    assert LookaheadOptions.from_dict(given).at_most(16).decoding_length == length
