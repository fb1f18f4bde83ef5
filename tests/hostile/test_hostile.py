"""Hostile clients do not affect others. `scripts/hostile.py` also checks times."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from tests.hostile import bad_requests, cache_files
from tests.hostile.bad_requests import Limits, Request
from tests.hostile.clients import CUTS, Reply
from tests.hostile.phases import HostileActions
from tests.hostile.plan import Plan
from tests.hostile.play import play
from tests.hostile.report import faults_of
from tests.hostile.watch import growth

ONE_SENTENCE = b'{"error": {"message": "5 was given, but a text is allowed; write one"}}'
STREAM = b'data: {"choices": []}\n\n'


@pytest.mark.parametrize("name", cache_files.FILES)
def test_a_server_starts_over_an_invalid_cache_file(name: str, tmp_path: Path) -> None:
    assert cache_files.faults_with(name, tmp_path) == []


def test_loading_a_valid_cache_file_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    good = {"good": lambda path: path.write_bytes(path.with_name("good").read_bytes())}
    monkeypatch.setattr(cache_files, "FILES", good)
    loaded, warned = cache_files.faults_with("good", tmp_path)
    assert loaded == "it was loaded" and "warned 0 times" in warned


@pytest.mark.parametrize(
    ("expected", "reply", "kinds"),
    [
        ("refused", Reply(400, ONE_SENTENCE, 0.1), []),
        ("refused", Reply(422, b'{"detail": "no JSON"}', 0.1), []),
        ("answered", Reply(200, STREAM, 0.1), []),
        ("either", Reply(400, ONE_SENTENCE, 0.1), []),
        ("either", Reply(200, STREAM, 0.1), []),
        ("refused", Reply(200, STREAM, 0.1), ["accepted"]),
        ("answered", Reply(400, ONE_SENTENCE, 0.1), ["refused"]),
        ("either", Reply(0, b"", 0.1), ["no answer"]),
        ("refused", Reply(500, ONE_SENTENCE, 0.1), ["5xx"]),
        ("answered", Reply(200, STREAM + b'data: {"error": {}}', 0.1), ["error in a stream"]),
        ("refused", Reply(400, b'{"error": {"message": "%s"}}' % (b"x" * 2048), 0.1), ["long"]),
        ("refused", Reply(400, b'{"error": {"message": "a\\nb"}}', 0.1), ["lines"]),
        ("refused", Reply(400, b'{"error": {"message": ""}}', 0.1), ["form"]),
        ("refused", Reply(400, b"Bad Request", 0.1), ["form"]),
        ("refused", Reply(400, ONE_SENTENCE, 9.0), ["slow"]),
    ],
)
def test_each_fault_of_a_reply_is_named(
    expected: bad_requests.Expected, reply: Reply, kinds: list[str]
) -> None:
    request = Request("", "/v1/completions", b"{}", expected)
    assert [fault.kind for fault in faults_of(request, reply)] == kinds


def test_a_drawn_request_depends_only_on_its_seed() -> None:
    a, b = ([bad_requests.draw(random.Random(seed)) for seed in range(300)] for _ in range(2))
    assert a == b
    assert {request.path for request in a} == set(bad_requests.ENDPOINTS)
    assert {request.expected for request in a} == {"refused", "either"}


def test_renamed_loads_differ_only_in_field_names() -> None:
    actions = HostileActions(random.Random(1), Limits(tokens=100, live=1000))
    kinds = set()
    for seed in range(300):
        kind, action = actions.draw(random.Random(seed), renamed=False)
        kind_renamed, renamed = actions.draw(random.Random(seed), renamed=True)
        kinds.add(kind)
        assert kind == kind_renamed
        bodies = [a.body if isinstance(a, Request) else a[1] for a in (action, renamed)]
        assert len(bodies[0]) == len(bodies[1])
        assert b"lookahead" not in bodies[1] and b'"prediction"' not in bodies[1]
    assert kinds >= {"bad requests", "a new namespace", "largest references", "aborted streams"}


def test_references_have_the_limit_size_or_one_letter_more() -> None:
    requests = list(bad_requests.around_limits(Limits(tokens=12, live=96)))
    sizes = {
        (r.expected, len(json.loads(r.body).get("vllm_xargs", {}).get("lookahead_reference", "")))
        for r in requests
        if "ASCII" in r.name or "Chinese" in r.name or "emoji" in r.name
    }
    assert sizes >= {("answered", 48), ("refused", 49)}  # ASCII
    assert sizes >= {("answered", 16), ("refused", 17)}  # three bytes each
    assert sizes >= {("answered", 12), ("refused", 13)}  # four


def test_growth_compares_the_last_tenth_with_the_first() -> None:
    assert growth([100] * 10 + [500] * 80 + [103] * 10) == pytest.approx(0.03)
    assert growth([100]) == 0


@pytest.mark.slow
def test_hostile_clients_do_not_affect_a_good_client(tmp_path: Path) -> None:
    report = play(Plan.quick(seed=1), tmp_path)
    print(report.table())
    assert not report.violations, "\n".join(report.violations)
    assert report.memory["lookahead"]["all processes"][1] < 0.25
    assert report.namespaces and report.good_answers
    kinds = {"bad requests", "a new namespace", "largest references", "aborted streams"}
    assert report.sent.keys() >= {*kinds, "read slowly"} and report.sent.keys() & CUTS.keys()
