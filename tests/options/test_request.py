"""Options of a request: every way to write them is read, a wrong one refused with one sentence."""

import itertools
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lookahead_vllm.options import request as request_options
from lookahead_vllm.options.allowed import OptionError
from lookahead_vllm.options.request import (
    PREDICTION,
    RequestOptions,
    check_places,
    fields_for_worker,
    options_in_worker,
    parse_options,
    shared_namespace,
    with_options,
    without_references,
)
from lookahead_vllm.options.server import LookaheadOptions

VOCAB, SERVER = 128, LookaheadOptions()


def ids(*tokens: int) -> bytes:
    return np.array(tokens, "<i4").tobytes()


@pytest.mark.parametrize(
    ("extra_args", "expected"),
    [
        (None, RequestOptions()),
        ({"another_plugin": 3}, RequestOptions()),
        ({"lookahead": None}, RequestOptions()),
        ({"lookahead_reference": "a text"}, RequestOptions(("a text",))),
        ({"lookahead_reference": ["a", "", "b"]}, RequestOptions(("a", "b"))),
        ({"lookahead_reference": [5, 6]}, RequestOptions((ids(5, 6),))),
        ({"lookahead": {"reference": [[5, 6], [7]]}}, RequestOptions((ids(5, 6), ids(7)))),
        ({"lookahead": {"reference": ["a", (5, 6)]}}, RequestOptions(("a", ids(5, 6)))),
        ({"lookahead": {"reference": None}}, RequestOptions()),
        ({"lookahead_namespace": "team-a"}, RequestOptions(namespace="team-a")),
        ({"lookahead_enabled": 0}, RequestOptions(enabled=False)),
        ({"lookahead_enabled": 1.0}, RequestOptions()),
        ({"lookahead": {"enabled": False}}, RequestOptions(enabled=False)),
        ({"lookahead_enabled": 0, "lookahead_reference": "a"}, RequestOptions(enabled=False)),
        (
            {"lookahead": {"enabled": True, "namespace": "n"}, "lookahead_reference": "r"},
            RequestOptions(("r",), "n"),
        ),
    ],
)
def test_every_way_to_write_an_option_is_read(extra_args, expected):
    assert parse_options(extra_args, VOCAB, SERVER) == expected


@pytest.mark.parametrize(
    ("extra_args", "parts"),
    [
        ({"lookahead_refrence": "x"}, ["'lookahead_refrence' was", "mean 'lookahead_reference'?"]),
        ({"lookahed_enabled": 0}, ["'lookahed_enabled' was", "did you mean 'lookahead_enabled'?"]),
        ({"lokahead-namespace": 0}, ["namespace' was", "did you mean 'lookahead_namespace'?"]),
        ({"lookahead": {"lookahead_enabled": 0}}, ["did you mean 'enabled'?"]),
        ({" LOOKAHEAD-ENABLED ": 1}, ["did you mean 'lookahead_enabled'?"]),
        (
            {"lookahead": {"Enabled": 1}},
            ["'Enabled' was given, but in lookahead, the options", "did you mean 'enabled'?"],
        ),
        (
            {"lookahead": {"references": "x"}},
            ["'references' was", "did you mean 'reference'?"],
        ),
        (
            {"lookahead": {"depth": 3}},
            ["'depth' was", "reference, namespace, enabled", "out"],
        ),
        ({"lookahead_enable": False}, ["did you mean 'lookahead_enabled'?"]),
        ({"lookahead": [1]}, ["=[1] was", "a dict"]),
        ({"lookahead": "off"}, ["lookahead='off' was", "a dict", '{"lookahead_enabled": false}']),
        ({"lookahead_enabled": "false"}, ["='false' was", "true or false", "leave lookahead_en"]),
        ({"lookahead": {"enabled": 2}}, ["['enabled']=2 was", "true or false"]),
        ({"lookahead_namespace": 7}, ["=7 was", "1 to 1024 characters", 'write "7"']),
        ({"lookahead_namespace": ""}, ["='' was", "1 to 1024 characters", "leave it out"]),
        ({"lookahead_namespace": "n" * 1025}, ["1 to 1024 characters"]),
        ({"lookahead_reference": 7}, ["=7 was", "a list of texts", '["one text", "another"]']),
        ({"lookahead_reference": ["a", 7]}, ["=['a', 7] was", "a list of texts"]),
        ({"lookahead_reference": [7, "a"]}, ["=[7, 'a'] was", "lists of token ids"]),
        ({"lookahead_reference": [[7, True]]}, ["=[[7, True]] was", "lists of token ids"]),
        ({"lookahead_reference": {"a": 1}}, ["={'a': 1} was", "a list of texts"]),
        ({"lookahead_reference": [[7, 128]]}, ["token id 128", "ids are 0 to 127", "the text"]),
        ({"lookahead_reference": [-1]}, ["token id -1", "ids are 0 to 127"]),
        ({"lookahead_reference": ["a"] * 65}, ["65 texts of 65 tokens", "allows 64 texts"]),
        ({"lookahead_reference": "a" * 65_537}, ["16385 tokens", "64 texts of 16384 tokens"]),
        ({"lookahead_reference": "漢" * 21_846}, ["16385 tokens", "64 texts of 16384 tokens"]),
        ({"lookahead_reference": "a" * 10**8}, ["1 texts of 25000000 tokens"]),
        ({"lookahead_reference": [[7] * 16_384, [7]]}, ["16385 tokens", "of 16384 tokens in all"]),
        ({"lookahead_reference": ["a", "\ud800"]}, ["half of a surrogate pair", "in UTF-8"]),
        ({"lookahead_a\nTraceback:": 1}, ["'lookahead_a\\nTraceback:' was given"]),
        ({"lookahead_" + "x" * 10**6: 1}, ["'lookahead_xx...xxx", "' was given", "leave it out"]),
        (
            {"lookahead": {"namespace": "a"}, "lookahead_namespace": "b"},
            ["lookahead['namespace'] and lookahead_namespace were both given", "write one"],
        ),
    ],
)
def test_a_wrong_request_says_what_to_write(extra_args, parts):
    with pytest.raises(OptionError) as error:
        parse_options(extra_args, VOCAB, SERVER)
    for part in parts:
        assert part in str(error.value)
    assert "\n" not in str(error.value)
    assert len(str(error.value)) < 300


OPTION = {"lookahead_enabled": False}


@pytest.mark.parametrize(
    ("body", "written", "read"),
    [
        (OPTION, "at the top", "vllm_xargs"),
        ({"Lookahead-Enabled": 0}, "at the top", "vllm_xargs"),
        ({"lookahead": {"enabled": False}}, "at the top", "vllm_xargs"),
        ({"vllm_xargs": OPTION, "lookahead_namespace": "a"}, "at the top", "vllm_xargs"),
        ({"extra_body": OPTION}, "in extra_body", "vllm_xargs"),
        ({"extra_body": {"vllm_xargs": OPTION}}, "in extra_body.vllm_xargs", "vllm_xargs"),
        ({"extra_args": OPTION}, "in extra_args", "vllm_xargs"),
        ({"token_ids": [5], "vllm_xargs": OPTION}, "in vllm_xargs", "sampling_params.extra_args"),
    ],
)
def test_an_option_where_vllm_ignores_it_is_refused(body, written, read):
    says = f"was given {written} of the request, but lookahead's options are read only in {read};"
    with pytest.raises(OptionError, match=says):
        check_places(body)


def test_fields_may_be_nested_to_any_depth():
    """As in plain vLLM, which ignores them."""
    body: dict[str, Any] = {}
    for _ in range(2000):
        body = {"extra_body": body}
    check_places(body)


@pytest.mark.parametrize(
    "body",
    [
        {"prompt": "lookahead_enabled", "vllm_xargs": OPTION},
        {"token_ids": [5], "sampling_params": {"extra_args": OPTION}},
        {"prompt": "a", "vllm_xargs": None, "metadata": OPTION},
        {"extra_body": "lookahead", "looked_up": 1},
        *([OPTION], "lookahead", None),
    ],
)
def test_an_option_where_vllm_reads_it_is_not(body):
    check_places(body)


@pytest.mark.parametrize(
    "largest",
    [["a" * 1024] * 64, ["漢" * 21_845], ["🙂" * 16_384], [[7] * 16_384], [[7] * 16_383, "abcd"]],
)
def test_the_largest_reference_is_allowed(largest):
    options = parse_options({"lookahead_reference": largest}, VOCAB, SERVER)
    assert len(options.references) == len(largest)


def test_options_that_a_server_does_not_accept_are_ignored():
    extra_args = {"lookahead_reference": "a", "lookahead": {"namespace": ["x"], "enabled": True}}
    server = LookaheadOptions(client_options="no_namespaces")
    assert parse_options(extra_args, VOCAB, server) == RequestOptions(("a",))
    extra_args = {"lookahead_reference": 7, "lookahead_depth": 3, "lookahead_enabled": False}
    extra_args[PREDICTION] = "a b"
    server = LookaheadOptions(client_options="none")
    assert parse_options(extra_args, VOCAB, server) == RequestOptions()


def test_the_worker_receives_the_sent_options():
    extra_args = {"another_plugin": 3, "lookahead_namespace": "n", "lookahead": {"enabled": False}}
    before = dict(extra_args)
    sent_args = fields_for_worker(extra_args, RequestOptions((ids(5, 6),), "n", False))
    assert extra_args == before
    assert sent_args["another_plugin"] == 3 and len(sent_args) == 2
    options, others = options_in_worker(sent_args)
    assert [reference.tolist() for reference in options.references] == [[5, 6]]
    assert (options.namespace, options.enabled, others) == ("n", False, {"another_plugin": 3})


def test_checked_options_are_not_checked_again():
    options = RequestOptions((ids(500, 600),), "n")
    extra_args = with_options({"another_plugin": 3, "lookahead_enabled": 7}, options)
    assert parse_options(extra_args, VOCAB, SERVER) is options
    assert extra_args == {"another_plugin": 3, "lookahead": options}


@pytest.mark.parametrize(
    ("extra_args", "others"),
    [
        (None, None),
        ({"lookahead_enabled": 0}, None),
        ({"lookahead_enabled": 0, "lookahead": {}}, None),
        ({"other": None}, {"other": None}),
    ],
)
@pytest.mark.parametrize("prediction", [None, {"type": "content", "content": "a"}])
@pytest.mark.parametrize("checked_early", [True, False])
def test_logits_processors_see_the_other_arguments(extra_args, others, prediction, checked_early):
    """Where there are none, they see None, as vLLM's server gives them."""
    written = extra_args
    if prediction is not None:
        written = {**(written or {}), PREDICTION: prediction}
    if checked_early:
        written = with_options(written, parse_options(written, VOCAB, SERVER))
    parse_options(written, VOCAB, SERVER)  # raises nothing
    sent_args = fields_for_worker(written, RequestOptions())
    assert options_in_worker(sent_args)[1] == others


def test_only_the_worker_keeps_references():
    sender = SimpleNamespace(
        extra_args=fields_for_worker({"other": 1}, RequestOptions((ids(5, 6),), "n"))
    )
    kept = without_references(sender)
    assert options_in_worker(kept.extra_args) == (RequestOptions((), "n"), {"other": 1})
    assert len(options_in_worker(sender.extra_args)[0].references) == 1
    plain = SimpleNamespace(extra_args={"other": 1})
    assert without_references(plain) is plain


def test_a_request_that_bypasses_the_front_end_shares_with_none():
    options, others = options_in_worker(None)
    assert options.namespace is None and others is None
    forged = fields_for_worker({"other": 1}, RequestOptions((), '[null, "salt", null]'))
    del forged["lookahead"]["passed"]
    assert options_in_worker(forged) == (RequestOptions(), {"other": 1})


ANYTHING: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.binary(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text() | st.integers(), inner),
    max_leaves=8,
)


@settings(deadline=None)
@given(extra_args=ANYTHING | st.fixed_dictionaries({"lookahead": ANYTHING}))
def test_no_unchecked_value_is_a_namespace(extra_args):
    options, others = options_in_worker(extra_args)
    assert options == RequestOptions()
    assert others is None or "lookahead" not in others


def test_different_triples_have_different_namespaces():
    names = (None, "a", "b", "", '"', '", "', "null", '["a", null, null]')
    spaces: dict[str | None, tuple] = {}
    for triple in itertools.product(names, repeat=3):
        same = tuple(part or None for part in triple)
        assert spaces.setdefault(shared_namespace("namespace", *triple), same) == same
    assert spaces[""] == (None, None, None)
    assert None not in spaces


def test_share_overrides_the_triple():
    assert shared_namespace("all", "adapter", "salt", "n") == ""
    assert shared_namespace("none", None, None, None) is None


@pytest.mark.parametrize(
    "content", ["a b", [{"type": "text", "text": "a "}, {"type": "text", "text": "b"}]]
)
def test_a_prediction_is_a_reference(content):
    extra_args = {"another_plugin": 3}
    predicted = {**extra_args, PREDICTION: {"type": "content", "content": content}}
    assert parse_options(predicted, VOCAB, SERVER) == RequestOptions(("a b",), is_predicted=True)
    assert extra_args == {"another_plugin": 3}
    sent_args = fields_for_worker(predicted, RequestOptions())
    assert options_in_worker(sent_args) == (RequestOptions(), extra_args)


WRONG_PREDICTIONS: list[Any] = [
    "a b",
    {},
    {"type": "content"},
    {"type": "text", "content": "a"},
    {"type": "content", "content": [{"type": "image_url"}]},
]


@pytest.mark.parametrize("prediction", WRONG_PREDICTIONS)
def test_a_wrong_prediction_is_refused(prediction):
    with pytest.raises(OptionError, match=r"it must hold a text; write {\"type\": \"content\""):
        parse_options({PREDICTION: prediction}, VOCAB, SERVER)


def test_a_prediction_and_a_reference_exclude_each_other():
    prediction = {"type": "content", "content": "b"}
    for written in ({"lookahead_reference": "a"}, {"lookahead": {"reference": "a"}}):
        ((name, _),) = written.items()
        with pytest.raises(OptionError, match=f"{name}.* and prediction were both given"):
            parse_options({**written, PREDICTION: prediction}, VOCAB, SERVER)


def test_few_of_a_request_s_names_are_compared_with_ours(monkeypatch):
    """A client may send names by the ten thousand."""
    compared: list[str] = []
    monkeypatch.setattr(
        request_options, "get_close_matches", lambda text, *_, **more: compared.append(text)
    )
    names = {
        "".join(order): 1 for order in itertools.islice(itertools.permutations("ookahead_x"), 500)
    }
    assert parse_options(names, VOCAB, SERVER) == RequestOptions()
    assert len(compared) == 16
    assert parse_options(names, VOCAB, SERVER) == RequestOptions()
    assert len(compared) == 16
