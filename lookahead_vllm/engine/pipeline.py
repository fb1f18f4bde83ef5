"""Exchange of values between pipeline stages."""

from typing import TypeVar

from vllm.distributed.parallel_state import get_pp_group

Value = TypeVar("Value")


def gather_from_stages(value: Value) -> list[Value]:
    """The values of all stages, in order. Every stage must call this."""
    stages = get_pp_group()
    return [stages.broadcast_object(value, stage) for stage in range(stages.world_size)]
