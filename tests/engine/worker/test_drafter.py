"""The drafter's limits of a tree, without an engine."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from vllm import SamplingParams

from lookahead_vllm.engine import request_options
from lookahead_vllm.engine.worker.drafter import LookaheadDrafter


@pytest.mark.parametrize(("num_tokens", "nodes"), [(1000, 64), (1 << 15, 16), (1 << 17, 4)])
def test_where_vllm_reads_the_reasoning_at_each_node_long_texts_get_small_trees(
    num_tokens: int, nodes: int
) -> None:
    drafter: Any = object.__new__(LookaheadDrafter)
    drafter._with_grammar = {"under a grammar"}
    for request_id, reads_reasoning, expected in (
        ("under a grammar", True, nodes),
        ("under a grammar", False, 64),
        ("free", True, 64),
    ):
        drafter.reads_reasoning = reads_reasoning
        assert drafter.most_nodes_of(request_id, num_tokens, 64) == expected


def test_a_request_that_is_announced_again_keeps_its_references() -> None:
    """The scheduler sends them once; a preempted request comes again without them."""
    drafter: Any = object.__new__(LookaheadDrafter)
    drafter.is_drafting_rank, drafter._options, drafter._with_grammar = True, {}, set()
    options = request_options.RequestOptions(references=(np.array([7, 8], np.int32).tobytes(),))
    first = SamplingParams(extra_args=request_options.fields_for_worker(None, options))
    drafter.announce("r", first)
    drafter.announce("r", request_options.without_references(first))
    assert [own.tolist() for own in drafter._options["r"].references] == [[7, 8]]
