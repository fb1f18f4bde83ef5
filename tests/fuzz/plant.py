"""Bugs planted in lookahead, to test that the fuzzer finds them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from lookahead_vllm.engine import request_options
from lookahead_vllm.engine.worker.v1.runner import LookaheadRunner
from lookahead_vllm.verify.cpu.kv_moves import KVMover
from lookahead_vllm.verify.seeded_draws import GeneratorStates
from lookahead_vllm.verify.tree_batch import TreeBatch


def _wrong_mask_bit(build: Any) -> Any:
    def wrong(*args: Any, **kwargs: Any) -> TreeBatch:
        batch = build(*args, **kwargs)
        batch.masks[-1, 0] ^= 2  # toggle whether the last node attends to the first
        return batch

    return wrong


def _moved_one_too_far(move: Any) -> Any:
    def wrong(self: KVMover, src: torch.Tensor, dst: torch.Tensor) -> None:
        move(self, src, torch.cat((dst[:-1], dst[-1:] + 1)))

    return wrong


def _one_draw_ahead(generator_after: Any) -> Any:
    def wrong(self: GeneratorStates, draws: int) -> torch.Generator:
        return generator_after(self, min(draws + 1, len(self._states) - 1))

    return wrong


def _one_namespace(namespace_of: Any) -> Any:
    def wrong(*_: Any) -> str | None:
        namespace: str | None = namespace_of("all", None, None, None)
        return namespace

    return wrong


def _prompt_of_the_row(follow: Any) -> Any:
    def wrong(self: LookaheadRunner, request_id: str) -> Any:
        batch, params = self.input_batch, self.requests[request_id].sampling_params
        row = batch.req_id_to_index[request_id]
        prompt = batch.token_ids_cpu[row, : batch.num_prompt_tokens[row]]
        return self.drafter.follow(request_id, prompt, params)

    return wrong


BUGS: dict[str, tuple[Any, str, Callable[[Any], Any]]] = {
    "mask": (TreeBatch, "build", _wrong_mask_bit),
    "kv": (KVMover, "move", _moved_one_too_far),
    "generator": (GeneratorStates, "generator_after", _one_draw_ahead),
    "namespace": (request_options, "shared_namespace", _one_namespace),
    "row": (LookaheadRunner, "_follow", _prompt_of_the_row),
}
"""By name: the object and the attribute that are patched, and the wrapper of the original."""


@contextmanager
def planted(bug: str | None) -> Iterator[None]:
    """Plant this bug in lookahead while the block runs; None plants nothing."""
    if bug is None:
        yield
        return
    owner, name, wrong = BUGS[bug]
    original = getattr(owner, name)
    setattr(owner, name, wrong(original))
    try:
        yield
    finally:
        setattr(owner, name, original)
