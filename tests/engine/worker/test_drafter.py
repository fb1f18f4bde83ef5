"""The drafter's limits of a tree, without an engine."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from lookahead_vllm.engine.worker.drafter import LiveRequest, LookaheadDrafter


@pytest.mark.parametrize(("num_tokens", "nodes"), [(1000, 64), (1 << 15, 16), (1 << 17, 4)])
def test_where_vllm_reads_the_reasoning_at_each_node_long_texts_get_small_trees(
    num_tokens: int, nodes: int
) -> None:
    drafter: Any = object.__new__(LookaheadDrafter)
    drafter.options = SimpleNamespace(decoding_length=64)
    drafter.may_branch, drafter._max_model_len, drafter.max_step_nodes = True, 1 << 20, 2000
    drafter._with_grammar = {"under a grammar"}
    for request_id, reads_reasoning, expected in (
        ("under a grammar", True, nodes),
        ("under a grammar", False, 64),
        ("free", True, 64),
    ):
        drafter._reads_reasoning = reads_reasoning
        limits = drafter.limits_of(LiveRequest(request_id, 500, frozenset()), num_tokens)
        assert limits.max_nodes == expected
