"""Bugs planted in lookahead, to test that the fuzzer finds them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch

from lookahead_vllm.draft.fleet.replica import Replica
from lookahead_vllm.draft.trie import sessions
from lookahead_vllm.engine import request_options
from lookahead_vllm.engine.model_runner import sampler
from lookahead_vllm.engine.model_runner.late_drafts import LateDrafts
from lookahead_vllm.engine.model_runner.runner import LookaheadRunner
from lookahead_vllm.verify.node_layout import NodeLayout
from lookahead_vllm.verify.place import Split, parts_of
from lookahead_vllm.verify.tree_batch import TreeBatch
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


def _prompt_of_the_request_before(follow: Any) -> Any:
    def wrong(self: LateDrafts, req_id: str, request: Any) -> None:
        own = request.prompt
        request.prompt = vars(self).get("prompt_before", own)
        vars(self)["prompt_before"] = own
        follow(self, req_id, request)

    return wrong


def _none_apart(prefix_hashes: Any) -> Any:
    def wrong(*args: Any) -> Any:
        return prefix_hashes(*args) * 0

    return wrong


def _all_in_common(_: Any) -> Any:
    return lambda a, b: min(len(a), len(b))


def _noise_of_the_next_position(sample: Any) -> Any:
    def wrong(self: Any, *args: Any, **kwargs: Any) -> Any:
        logits, slots, rows, rows_np, positions, ids, depths, *others = args
        positions = positions + (depths > 0)
        return sample(self, logits, slots, rows, rows_np, positions, ids, depths, *others, **kwargs)

    return wrong


def _trimmed_in_place(fill_slots: Any) -> Any:
    def wrong(self: LookaheadRunner, scheduled: Any) -> Any:
        vars(scheduled).update(vars(fill_slots(self, scheduled)))
        return scheduled

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


def _remembered(move: Any) -> Any:
    def wrong(self: Any, slots: torch.Tensor, *args: Any) -> None:
        self.late_move = move, (slots.clone(), *args)

    return wrong


def _after_the_forward_pass(sample_tokens: Any) -> Any:
    def wrong(self: Any, *args: Any) -> Any:
        move, moved = vars(self).pop("late_move", (None, ()))
        if move is not None:
            move(self, *moved)
        return sample_tokens(self, *args)

    return wrong


def _one_too_high(build: Any) -> Any:
    def wrong(*args: Any) -> NodeLayout:
        layout: NodeLayout = build(*args)
        return layout._replace(depths=layout.depths + (layout.depths > 0))

    return wrong


def _one_level_deeper(write: Any) -> Any:
    def wrong(self: Split, *args: Any) -> None:
        write(self, *args)
        *_, depths, _ = parts_of(self.packed, self.most_requests)
        depths += depths > 0

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
    # The prompt of the request before.
    "prompt": [(LateDrafts, "_follow", _prompt_of_the_request_before)],
    # A kept text is taken over by any later request of its namespace.
    "session": [
        (sessions, "prefix_hashes", _none_apart),
        (sessions, "_num_common", _all_in_common),
    ],
    # Nodes are sampled with the noise of the next position.
    "noise": [(sampler.RootSampler, "sample", _noise_of_the_next_position)],
    # The scheduler's own output is trimmed, not a copy.
    "trim-in-place": [(LookaheadRunner, "_fill_slots", _trimmed_in_place)],
    # The walk that moves KV ends one level above the last token's.
    "short-walk": [(sampler, "walk", _one_level_short)],
    # KV moved after the next step's forward pass.
    "late-move": [
        (LookaheadRunner, "_move", _remembered),
        (LookaheadRunner, "sample_tokens", _after_the_forward_pass),
    ],
    # The nodes' positions one too high.
    "position": [(NodeLayout, "build", _one_too_high), (Split, "write", _one_level_deeper)],
}


@contextmanager
def planted(bug: str | None) -> Iterator[None]:
    """Plant this bug in lookahead while the block runs; None plants nothing."""
    with ExitStack() as stack:
        for owner, name, wrong in BUGS[bug] if bug else ():
            stack.enter_context(mock.patch.object(owner, name, wrong(getattr(owner, name))))
        yield
