"""Fixtures of the tests that start engines."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path

import pytest

from tests.support import proposers, v2_on_cpu
from tests.support.models import save_tiny_model
from tests.support.tokenizer import save_tokenizer


@pytest.fixture(scope="session")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tokenizer(save_tiny_model("llama", tmp_path_factory.mktemp("models")))


@pytest.fixture(params=["v1", "v2"])
def runner(request: pytest.FixtureRequest) -> Iterator[str]:
    """The test runs on each of vLLM's model runners; the second one's steps are asynchronous.

    A module asks for it with `pytestmark = pytest.mark.usefixtures("runner")`.
    """
    with v2_on_cpu.enabled() if request.param == "v2" else nullcontext():
        yield request.param


@pytest.fixture(autouse=True)
def _clear_recorded() -> Iterator[None]:
    proposers.RECORDED.clear()
    yield
