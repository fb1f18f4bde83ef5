"""A busy machine may take long to answer."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import requests

from tests.ends.ending import Ending
from tests.ends.watch import has_answered


def test_a_slow_server_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    health: list[Any] = [requests.ReadTimeout(), SimpleNamespace(ok=True)]
    limits = []

    def get(url: str, timeout: float) -> Any:
        result = health.pop(0)
        if isinstance(result, Exception):
            raise result
        return result

    def post(url: str, json: object, timeout: float) -> Any:
        limits.append(timeout)
        return SimpleNamespace(ok=True)

    monkeypatch.setattr(requests, "get", get)
    monkeypatch.setattr(requests, "post", post)
    assert has_answered(Ending("serve", 1, "main", "TERM"), os.getpid(), tmp_path / "log", 1)
    assert limits == [240]
