"""Bugs planted in lookahead, to test that the fuzzer finds them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

from lookahead_vllm.engine.step import sampler
from lookahead_vllm.options import request as request_options
from lookahead_vllm.verify.layout.tree_batch import TreeBatch


def _wrong_mask_bit(build: Any) -> Any:
    def wrong(*args: Any, **kwargs: Any) -> TreeBatch:
        batch = build(*args, **kwargs)
        batch.masks[-1, 0] ^= 2  # toggle whether the last node attends to the first
        return batch

    return wrong


def _one_namespace(namespace_of: Any) -> Any:
    def wrong(*_: Any) -> str | None:
        namespace: str | None = namespace_of("all", None, None, None)
        return namespace

    return wrong


def _noise_of_the_next_position(sample: Any) -> Any:
    def wrong(self: Any, *args: Any, **kwargs: Any) -> Any:
        logits, slots, rows, rows_np, positions, ids, depths, *others = args
        positions = positions + (depths > 0)
        return sample(self, logits, slots, rows, rows_np, positions, ids, depths, *others, **kwargs)

    return wrong


Patch = tuple[Any, str, Callable[[Any], Any]]
"""The object and the attribute that are replaced, and the wrapper of the original."""

BUGS: dict[str, list[Patch]] = {
    # A wrong bit in a tree's mask.
    "mask": [(TreeBatch, "build", _wrong_mask_bit)],
    # One namespace for all requests.
    "namespace": [(request_options, "shared_namespace", _one_namespace)],
    # Nodes are sampled with the noise of the next position.
    "noise": [(sampler.RootSampler, "sample", _noise_of_the_next_position)],
}


@contextmanager
def planted(bug: str) -> Iterator[None]:
    """Plant this bug in lookahead while the block runs."""
    with ExitStack() as stack:
        for owner, name, wrong in BUGS[bug]:
            stack.enter_context(mock.patch.object(owner, name, wrong(getattr(owner, name))))
        yield
