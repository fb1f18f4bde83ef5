"""Bugs planted in lookahead, to test that the fuzzer finds them."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partialmethod
from typing import Any
from unittest import mock

import torch
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackendImpl

from lookahead_vllm.engine.scheduler.scheduler import LookaheadScheduler
from lookahead_vllm.engine.step import sampler
from lookahead_vllm.engine.workers.cpu import LookaheadCPUWorker
from lookahead_vllm.options import request as request_options
from lookahead_vllm.verify.layout.tree_batch import TreeBatch
from tests.fuzz.play import Rounds

MANY_ROWS = 16
"""A step with so many rows reads a prompt, rather than nodes of a draft."""


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


def _in_lookahead(write: Callable[..., None]) -> Callable[[Any], Any]:
    """A wrapper of the part of a round with lookahead: `write` writes K and V there.

    It gets vLLM's own function and its arguments.
    """

    def wrapper(play_lookahead: Any) -> Any:
        own = CPUAttentionBackendImpl.do_kv_cache_update

        def wrong(*args: Any) -> Any:
            changed = partialmethod(lambda *given: write(own, *given))
            with mock.patch.object(CPUAttentionBackendImpl, own.__name__, changed):
                return play_lookahead(*args)

        return wrong

    return wrapper


def _stale(own: Any, impl: Any, layer: Any, *given: Any) -> None:
    key, value, kv_cache, slots = given
    before = getattr(layer, "slots_before", slots[:0])
    layer.slots_before = slots.clone()
    own(impl, layer, key, value, kv_cache, slots.where(~torch.isin(slots, before), -1))


def _shifted(own: Any, impl: Any, layer: Any, *given: Any) -> None:
    key, value, kv_cache, slots = given
    if 1 < len(slots) < MANY_ROWS and slots[-1] == slots[-2] + 1:
        key = torch.cat([key[:-1], key[-2:-1]])
    own(impl, layer, key, value, kv_cache, slots)


def _without_repetition_detection(add_request: Any) -> Any:
    def wrong(self: Any, request: Any) -> None:
        request.sampling_params.repetition_detection = None
        add_request(self, request)

    return wrong


def _ends_the_turn_that_runs(add_request: Any) -> Any:
    def wrong(self: Any, request: Any) -> None:
        if (session := self.requests.get(request.request_id)) and request.resumable:
            session.max_tokens = request.max_tokens
        add_request(self, request)

    return wrong


def _clears_kv(pause: Any) -> Any:
    def wrong(self: Any) -> None:
        pause(self)
        for cache in self.model_runner.kv_caches:
            cache.zero_()

    return wrong


Patch = tuple[Any, str, Callable[[Any], Any]]
"""The object and the attribute that are replaced, and the wrapper of the original."""

BUGS: dict[str, list[Patch]] = {
    # A wrong bit in a tree's mask.
    "mask": [(TreeBatch, "build", _wrong_mask_bit)],
    # One namespace for all requests.
    "namespace": [(request_options, "shared_namespace", _one_namespace)],
    # A request that turns lookahead off gets drafts.
    "off": [(request_options, "_enabled", lambda _: lambda *_: True)],
    # Repetitions end no request.
    "repetition": [(LookaheadScheduler, "add_request", _without_repetition_detection)],
    # An input that a session sends early shortens the answer to the one before.
    "early input": [(LookaheadScheduler, "add_request", _ends_the_turn_that_runs)],
    # A pause clears the KV cache of requests that go on.
    "pause": [(LookaheadCPUWorker, "synchronize_device", _clears_kv)],
    # Nodes are sampled with the noise of the next position.
    "noise": [(sampler.RootSampler, "sample", _noise_of_the_next_position)],
    # In an fp8 cache, K and V of a rejected node are not overwritten.
    "stale cache": [(Rounds, "_play_lookahead", _in_lookahead(_stale))],
    # There, K of a step's last node is that of the row before it.
    "shifted cache": [(Rounds, "_play_lookahead", _in_lookahead(_shifted))],
}


@contextmanager
def planted(bug: str) -> Iterator[None]:
    """Plant this bug in lookahead while the block runs."""
    with ExitStack() as stack:
        for owner, name, wrong in BUGS[bug]:
            stack.enter_context(mock.patch.object(owner, name, wrong(getattr(owner, name))))
        yield
