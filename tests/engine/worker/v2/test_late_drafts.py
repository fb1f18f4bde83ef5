"""Late drafts when requests and the device do not behave."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import pytest
from vllm import SamplingParams
from vllm.sampling_params import StructuredOutputsParams

from lookahead_vllm.engine.worker.v2 import grammar_copies
from lookahead_vllm.engine.worker.v2.runner import LookaheadRunner


def test_no_step_waits_for_the_first_grammar(monkeypatch: pytest.MonkeyPatch) -> None:
    may_start = threading.Event()

    class Manager:
        def __init__(self, config: Any) -> None:
            assert may_start.wait(60)
            self.initialised: list[str] = []

        def grammar_init(self, request: Any) -> None:
            self.initialised.append(request.request_id)

        def clear_backend(self) -> None:
            self.initialised.clear()

    monkeypatch.setattr(grammar_copies, "StructuredOutputManager", Manager)
    copies = grammar_copies.GrammarCopies(None)  # type: ignore[arg-type]
    params = SamplingParams(structured_outputs=StructuredOutputsParams(regex="a+"))
    copies.start(
        SimpleNamespace(  # type: ignore[arg-type]
            req_id="r", prompt_token_ids=[1], prompt_embeds=None, sampling_params=params
        )
    )
    copies.advance("r", [5])
    assert "r" not in copies  # its tokens wait for the grammar
    may_start.set()
    copies._compiling.submit(lambda: None).result()
    assert copies._manager.initialised == ["r"]  # type: ignore[union-attr]
    copies.shutdown()


def test_the_cache_is_saved_even_if_the_device_has_failed() -> None:
    ended: list[str] = []

    def learn() -> None:
        raise RuntimeError("the device has failed")

    class Base:
        def shutdown(self) -> None:
            ended.append("vLLM")

    class Runner(LookaheadRunner, Base):  # type: ignore[misc]
        def __init__(self) -> None:
            self._late: Any = SimpleNamespace(learn=learn)
            self.drafter: Any = SimpleNamespace(shutdown=lambda: ended.append("drafter"))
            self._grammars: Any = SimpleNamespace(shutdown=lambda: ended.append("grammars"))

    with pytest.raises(RuntimeError, match="the device has failed"):
        Runner().shutdown()
    assert ended == ["drafter", "grammars", "vLLM"]
