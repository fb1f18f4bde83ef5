"""Bugs planted in lookahead, to test that the fuzzer finds them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

from lookahead_vllm.draft.fleet.replica import Replica
from lookahead_vllm.draft.trie import sessions
from lookahead_vllm.engine.model_runner import sampler
from lookahead_vllm.options import request as request_options
from lookahead_vllm.verify.layout.tree_batch import TreeBatch
from lookahead_vllm.verify.walk import Walk


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


def _into_the_first_namespace(put: Any) -> Any:
    def wrong(self: Replica, digest: str, pieces: Any) -> None:
        put(self, next(iter(self.followed)), pieces)

    return wrong


def _none_apart(prefix_hashes: Any) -> Any:
    def wrong(*args: Any) -> Any:
        return prefix_hashes(*args) * 0

    return wrong


def _all_in_common(_: Any) -> Any:
    return lambda a, b: min(len(a), len(b))


def _keeping_spellings(continue_with: Any) -> Any:
    def wrong(self: Any, *args: Any) -> None:
        kept, self.spellings = self.spellings, []
        continue_with(self, *args)
        self.spellings = kept

    return wrong


def _noise_of_the_next_position(sample: Any) -> Any:
    def wrong(self: Any, *args: Any, **kwargs: Any) -> Any:
        logits, slots, rows, rows_np, positions, ids, depths, *others = args
        positions = positions + (depths > 0)
        return sample(self, logits, slots, rows, rows_np, positions, ids, depths, *others, **kwargs)

    return wrong


def _one_level_short(walk: Any) -> Any:
    def wrong(*args: Any) -> Walk:
        path: Walk = walk(*args)
        longer = (path.num_sampled > 1).nonzero()[:, 0]
        last = path.num_sampled[longer].long() - 1
        for column in (path.origins, path.targets):  # the deepest accepted node stays where it is
            column[longer, last] = column[longer, 0]
        return path

    return wrong


Patch = tuple[Any, str, Callable[[Any], Any]]
"""The object and the attribute that are replaced, and the wrapper of the original."""

BUGS: dict[str, list[Patch]] = {
    # A wrong bit in a tree's mask.
    "mask": [(TreeBatch, "build", _wrong_mask_bit)],
    # One namespace for all requests.
    "namespace": [(request_options, "shared_namespace", _one_namespace)],
    # All that other engines send goes to one namespace.
    "fleet": [(Replica, "put", _into_the_first_namespace)],
    # A kept text is taken over by any later request of its namespace.
    "session": [
        (sessions, "prefix_hashes", _none_apart),
        (sessions, "_num_common", _all_in_common),
    ],
    # The tool results of a conversation are found after another turn in their place.
    "spelling": [(sessions.Session, "continue_with", _keeping_spellings)],
    # Nodes are sampled with the noise of the next position.
    "noise": [(sampler.RootSampler, "sample", _noise_of_the_next_position)],
    # The walk that moves KV ends one level above the last token's.
    "short-walk": [(sampler, "walk", _one_level_short)],
}


@contextmanager
def planted(bug: str) -> Iterator[None]:
    """Plant this bug in lookahead while the block runs."""
    with ExitStack() as stack:
        for owner, name, wrong in BUGS[bug]:
            stack.enter_context(mock.patch.object(owner, name, wrong(getattr(owner, name))))
        yield
