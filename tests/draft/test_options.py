"""Options are checked at construction, and the error for a wrong one says what to write."""

import os
from pathlib import Path
from typing import Any

import pytest

from lookahead_vllm.draft.options import LookaheadOptions, OptionError


def test_missing_options_have_defaults():
    assert LookaheadOptions.from_dict({}) == LookaheadOptions()
    assert LookaheadOptions.from_dict({"num_speculative_tokens": None}) == LookaheadOptions()


def test_options_round_trip_through_a_dict():
    options = LookaheadOptions(num_speculative_tokens=32, share="all", budget=8)
    assert LookaheadOptions.from_dict(options.to_dict()) == options


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"depth": 8}, ["'depth' was given", "options are num_speculative_tokens", "leave it out"]),
        ({"window": 8}, ["'window' was given", "did you mean 'window_size'?"]),
        (
            {"proposer": "jacobi_window", "window_size": 15, "num_speculative_tokens": 16},
            ["window_size=15 and ngram_size=5", "59 nodes", "=16;", "leave window_size out"],
        ),
        (
            {"proposer": "hybrid", "window_size": 15, "budget": 16},
            ["59 nodes are more than budget=16"],
        ),
        ({"num_speculative_tokens": 129}, ["=129 was given", "from 1 to 128", 'write "auto"']),
        ({"max_nodes": 1023}, ["=1023 was given", "from 1024", "write 4000000"]),
        ({"proposer": 3}, ["=3 was given", "one of auto, ngram_trie", 'write "auto"']),
        (
            {"budget": "fast"},
            ["='fast' was given", '"auto" or a whole number from 1 to 128', 'write "auto"'],
        ),
        ({"share": "tenant"}, ["='tenant' was given", "one of none, namespace, all"]),
        ({"cache_path": ""}, ["='' was given", "the path of a file", 'write "lookahead.cache"']),
        ({"cache_interval": float("nan")}, ["=nan was given", "a number of seconds"]),
        (
            {"budget": 12, "num_speculative_tokens": 8},
            ["budget=12 was given", "num_speculative_tokens=8", 'write "auto"'],
        ),
    ],
)
def test_the_error_says_what_was_given_what_is_allowed_and_what_to_write(given, says):
    with pytest.raises(OptionError) as error:
        LookaheadOptions.from_dict(given)
    for part in says:
        assert part in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("path", "says"),
    [
        (".", ["that is a directory", "lookahead.cache'"]),
        ("missing/a.cache", ["there is no directory", "missing'; make it"]),
        ("sealed/a.cache", ["this user may not write in", "sealed'; allow it"]),
    ],
)
def test_an_unwritable_cache_path_is_refused_at_start(path, says, tmp_path, monkeypatch):
    (tmp_path / "sealed").mkdir()
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path).name != "sealed")
    options = LookaheadOptions(cache_path=str(tmp_path / path))
    with pytest.raises(OptionError) as error:
        options.with_checked_cache()
    for part in says:
        assert part in str(error.value)
    assert "\n" not in str(error.value)


SHARING = {"share_with": "redis://:secret@h"}


@pytest.mark.parametrize(
    ("given", "option", "missing"),
    [
        ({"window_size": 8}, "window_size", "a window"),
        ({"proposer": "ngram_trie", "ngram_size": 4}, "ngram_size", "a window"),
        *(
            ({"proposer": "jacobi_window", **given}, next(iter(given)), "a trie")
            for given in (
                {"branch_length": 8},
                {"max_nodes": 4096},
                {"drafter": "path"},
                {"share": "all"},
                {"cache_path": "a.cache"},
                SHARING,
            )
        ),
        ({**SHARING, "share": "none"}, "share_with", "requests that learn from each other"),
        ({"cache_interval": 20}, "cache_interval", "a cache file"),
        ({"share_messages": 20}, "share_messages", "a server to share with"),
    ],
)
def test_an_option_without_effect_is_refused(
    given: dict[str, Any], option: str, missing: str
) -> None:
    says = f"^{option} was given, but it has no effect without {missing}.*, or leave {option} out$"
    with pytest.raises(OptionError, match=says) as error:
        LookaheadOptions.from_dict(given)
    assert "secret" not in str(error.value)


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
        ({"proposer": "jacobi_window", "window_size": 5, "ngram_size": 4}, 7e9, 29, (5, 4)),
        ({"proposer": "hybrid"}, 7e9, 64, (4, 5)),
        ({"proposer": "hybrid", "budget": 8}, 7e9, 8, (0, 5)),
        ({"proposer": "hybrid", "window_size": 0}, 7e9, 64, (0, 5)),
    ],
)
def test_auto_follows_the_papers_table_4(given, parameters, length, window):
    options = LookaheadOptions.from_dict(given).for_model(parameters)
    assert options.decoding_length == length
    assert options.window == window
    assert LookaheadOptions.from_dict(options.to_dict()) == options


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
