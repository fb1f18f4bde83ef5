"""Hostile clients do not affect others. `scripts/hostile.py` runs longer."""

import pytest

from tests.hostile.bad_requests import Request
from tests.hostile.clients import CUTS, Reply
from tests.hostile.play import Plan, play
from tests.hostile.report import faults_of

ONE_SENTENCE = b'{"error": {"message": "5 was given, but a text is allowed; write one"}}'
STREAM = b'data: {"choices": []}\n\n'


@pytest.mark.parametrize(
    ("expected", "reply", "kinds"),
    [
        ("refused", Reply(400, ONE_SENTENCE, 0.1), []),
        ("answered", Reply(200, STREAM, 0.1), []),
        ("refused", Reply(200, STREAM, 0.1), ["accepted"]),
        ("answered", Reply(400, ONE_SENTENCE, 0.1), ["refused"]),
        ("either", Reply(0, b"", 0.1), ["no answer"]),
        ("refused", Reply(500, ONE_SENTENCE, 0.1), ["5xx"]),
        ("answered", Reply(200, STREAM + b'data: {"error": {}}', 0.1), ["error in a stream"]),
        ("refused", Reply(400, b'{"error": {"message": "%s"}}' % (b"x" * 2048), 0.1), ["long"]),
        ("refused", Reply(400, b'{"error": {"message": "a\\nb"}}', 0.1), ["lines"]),
        ("refused", Reply(400, b"Bad Request", 0.1), ["form"]),
        ("refused", Reply(400, ONE_SENTENCE, 9.0), ["slow"]),
    ],
)
def test_each_fault_of_a_reply_is_named(expected, reply, kinds):
    request = Request("", "/v1/completions", b"{}", expected)
    assert [fault.kind for fault in faults_of(request, reply)] == kinds


@pytest.mark.slow
def test_hostile_clients_do_not_affect_a_good_client(tmp_path):
    report = play(Plan(minutes=0.25, seed=1, rate=40.0, is_quick=True), tmp_path)
    print(report.table())
    assert not report.violations, "\n".join(report.violations)
    assert report.memory_growth < 0.25
    assert report.namespaces and report.good_answers
    kinds = {"bad requests", "a new namespace", "largest references", "aborted streams"}
    assert report.sent.keys() >= {*kinds, "read slowly"} and report.sent.keys() & CUTS.keys()
