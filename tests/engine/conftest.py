"""Fixtures of the tests that start engines."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support import proposers
from tests.support.models import save_tiny_model
from tests.support.tokenizer import save_tokenizer


@pytest.fixture(scope="session")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tokenizer(save_tiny_model("llama", tmp_path_factory.mktemp("models")))


@pytest.fixture(autouse=True)
def _clear_recorded() -> Iterator[None]:
    proposers.RECORDED.clear()
    yield
