"""What the stages of a pipeline have to know of each other."""

from __future__ import annotations

from typing import TypeVar

from vllm.distributed.parallel_state import get_pp_group

Value = TypeVar("Value")


def of_all_stages(value: Value) -> list[Value]:
    """This stage's value and those of all others, in order; every stage takes part."""
    stages = get_pp_group()
    return [stages.broadcast_object(value, stage) for stage in range(stages.world_size)]
