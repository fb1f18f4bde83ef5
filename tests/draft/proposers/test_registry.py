"""A proposer is made of the options, with a table for prompts as large as they may be."""

from typing import Any

import pytest

from lookahead_vllm.draft.proposers import registry
from lookahead_vllm.options.server import PROPOSERS, LookaheadOptions


@pytest.mark.parametrize("name", PROPOSERS)
def test_prompts_have_a_table_within_a_share_of_the_memory(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    most = 4000
    memory = most * registry.MEMORY_SHARE * registry.BYTES_PER_NODE
    monkeypatch.setattr(registry, "memory_bytes", lambda: memory)
    options = LookaheadOptions(proposer=name, max_nodes=2048)
    for num_tokens, nodes in ((0, 0), (10, 200), (1000, most)):
        proposer: Any = registry.make_proposer(options, num_tokens)
        has_trie = name != "jacobi_window"
        assert len(proposer.trie.edges) == (2048 + nodes if has_trie else 1024)
