"""What the verifier needs of a draft tree, which every step of engine tests and fuzzer checks."""

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

from lookahead_vllm.draft.tree import UNKNOWN, DraftTree


def check(tree: DraftTree, vocab_size: int, max_nodes: int) -> None:
    """AssertionError if a tree has too many nodes, foreign tokens, or equal siblings."""
    tokens, parents = tree.tokens.tolist(), tree.parents.tolist()
    assert len(tokens) <= max_nodes
    assert all(0 <= token < vocab_size for token in tokens)
    assert all(-1 <= parent < node for node, parent in enumerate(parents))
    assert len(set(zip(parents, tokens, strict=True))) == len(tokens), "equal siblings"


def _checking(grow: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(grow)
    def checked(self: Any, step: Any) -> Any:
        drafts = grow(self, step)
        slots = step.scheduled.scheduled_spec_decode_tokens
        for req_id, tree in zip(drafts.req_ids, drafts.forest, strict=True):
            if UNKNOWN not in tree.tokens:  # else a drafter's, which are still on the device
                check(tree, self.vocab_size, len(slots.get(req_id, ())))
        return drafts

    return checked


@contextmanager
def checked_trees() -> Iterator[None]:
    """The trees of every step of this process's engines are checked."""
    from lookahead_vllm.engine.runner.runner import LookaheadRunner

    with mock.patch.object(LookaheadRunner, "_grow", _checking(LookaheadRunner._grow)):
        yield
