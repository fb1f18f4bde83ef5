"""The KV blocks of requests, in the first model runner's batch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def keep_first(runner: Any, request_id: str, counts: Sequence[int]) -> None:
    """Keep the first `counts` blocks of each KV cache group: the scheduler freed the others."""
    for block_ids, count in zip(runner.requests[request_id].block_ids, counts, strict=True):
        del block_ids[count:]
    row = runner.input_batch.req_id_to_index.get(request_id)
    if row is not None:
        tables = runner.input_batch.block_table.block_tables
        for table, count in zip(tables, counts, strict=True):
            table.num_blocks_per_row[row] = count
