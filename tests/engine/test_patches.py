"""A place of vLLM is patched once, and every patch of a running engine has a reason."""

from collections.abc import Callable
from typing import Any

import pytest
import vllm

from benchmarks.port.seams import SEAMS
from lookahead_vllm.engine import patches
from lookahead_vllm.engine.front_end import stat_logger
from lookahead_vllm.engine.patches import PatchError
from tests.support.driving import engine, generate


def fake() -> Any:
    class Fake:
        size = 1

        def method(self) -> str:
            return "method"

        @classmethod
        def make(cls) -> str:
            return cls.__name__

        @staticmethod
        def plain() -> str:
            return "plain"

    return Fake


def twice(original: Callable[..., str]) -> Callable[..., str]:
    return lambda *args: original(*args) * 2


@pytest.mark.parametrize(
    ("name", "result"), [("method", "method"), ("make", "Fake"), ("plain", "plain")]
)
def test_a_wrapper_gets_the_original(name, result):
    cls = fake()
    kind = type(vars(cls)[name])
    patches.patch(cls, name, twice)
    assert getattr(cls(), name)() == result * 2
    assert type(vars(cls)[name]) is kind


def test_a_place_is_patched_once():
    cls, other = fake(), fake()
    patches.patch(cls, "method", twice)
    with pytest.raises(PatchError, match=r"Fake\.method already; patch it once"):
        patches.patch(cls, "method", twice)
    assert cls().method() == "methodmethod"
    patches.patch(other, "method", twice)
    patches.patch(cls, "make", twice)
    assert patches.is_patched(cls) and patches.is_patched(cls, "make")
    assert not patches.is_patched(cls, "plain")


def test_only_what_a_class_defines_itself_is_patched():
    class Child(fake()):  # type: ignore[misc]
        pass

    for name in ("method", "missing"):
        with pytest.raises(PatchError, match=rf"Child\.{name} does not exist"):
            patches.patch(Child, name, twice)


def test_the_patches_of_an_engine_are_those_of_the_table(llama, tmp_path):
    lookahead = {"budget": 8, "cache_path": str(tmp_path / "a.cache")}
    with engine(llama, lookahead, disable_log_stats=False) as llm:
        generate(llm, [[5, 6, 7]])
    stat_logger.unregister()
    # An engine of another test may have patched recurrent layers.
    release = ".".join(vllm.__version__.split(".")[:2])
    seams = [s for s in SEAMS if s.release in ("", release) and s.use == "wrapped"]
    expected = {p for s in seams if s.area != "Recurrent layers" for p in s.places}
    assert expected <= set(patches.applied())
