"""Steps of vLLM's asynchronous scheduler, or of lookahead's subclass of it, without an engine."""

import random
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from vllm import SamplingParams
from vllm.engine.arg_utils import EngineArgs
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager

from lookahead_vllm.engine import messages

BLOCK = 4


def request(req_id: str, num_prompt: int, max_tokens: int, resumable: bool = False) -> Request:
    """A request whose answer has `max_tokens` tokens."""
    params = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
    return Request(req_id, [7] * num_prompt, params, None, arrival_time=0.0, resumable=resumable)


class LateSteps:
    """A scheduler and a stand-in for its worker; one step is in flight when the next is scheduled.

    The worker writes each token's request and position into the block that the scheduler gave the
    request, and checks in every step that all earlier ones are still there. Requests can use
    `blocks` KV blocks of four tokens. Without options of lookahead, it is plain vLLM. `accepted`
    says how many nodes are accepted of a number of slots.
    """

    def __init__(
        self,
        model: Path,
        blocks: int,
        lookahead: Mapping[str, Any] | None = None,
        accepted: Callable[[int], int] = lambda slots: 0,
        **settings: Any,
    ) -> None:
        if lookahead is not None:
            settings["speculative_config"] = {"method": "lookahead", **lookahead}
        config = EngineArgs(
            model=str(model),
            skip_tokenizer_init=True,
            enable_prefix_caching=False,
            **settings,
        ).create_engine_config()
        config.cache_config.num_gpu_blocks = blocks + 1  # the null block
        spec = FullAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=1, dtype=torch.float32)
        self.scheduler: Any = config.scheduler_config.get_scheduler_cls()(
            vllm_config=config,
            kv_cache_config=KVCacheConfig(blocks + 1, [], [KVCacheGroupSpec(["layer"], spec)]),
            structured_output_manager=StructuredOutputManager(config),
            block_size=BLOCK,
        )
        self.max_model_len = config.model_config.max_model_len
        self.pays = True
        """What the workers report."""
        self.admitted: dict[str, int] = {}
        """The step in which each request started first."""
        self.ended: dict[str, int] = {}
        """The step that was scheduled last when each request had all its tokens."""
        self.preempted: list[str] = []
        self.num_slots = 0
        """The slots of all steps together."""
        self.scheduled: list[set[str]] = []
        """The requests of each step."""
        self._accepted = accepted
        self._in_flight: deque[tuple[Any, set[str]]] = deque()
        self._computed: dict[str, int] = {}
        self._tables: dict[str, list[int]] = {}
        self._kv: dict[tuple[int, int], tuple[str, int]] = {}
        """By block and offset: the request and the position of the token there."""

    def run(self, arrivals: Mapping[int, Sequence[Request]]) -> None:
        """Run until all requests have ended; `arrivals` by the number of the step before which
        they come."""
        last = max(arrivals)
        while len(self.scheduled) <= last or self.scheduler.has_unfinished_requests():
            for new in arrivals.get(len(self.scheduled), ()):
                self.scheduler.add_request(new)
            self.step()
            assert len(self.scheduled) < 5000

    def run_until(self, holds: Callable[[], bool]) -> None:
        """Run until `holds`, for 200 steps at most."""
        for _ in range(200):
            if holds():
                return
            self.step()
        raise AssertionError("it does not hold after 200 steps")

    def step(self) -> None:
        """Schedule a step, then process the one before it."""
        output = self.scheduler.schedule()
        for new in output.scheduled_new_reqs:
            self.admitted.setdefault(new.req_id, len(self.scheduled))
        self.preempted += sorted(output.preempted_req_ids or ())
        self.num_slots += sum(map(len, output.scheduled_spec_decode_tokens.values()))
        self.scheduled.append(set(output.num_scheduled_tokens))
        requests = self.scheduler.requests
        emit = {i for i in output.num_scheduled_tokens if not requests[i].is_prefill_chunk}
        self._in_flight.append((output, emit))
        if len(self._in_flight) > 1:
            self.process()

    def process(self) -> None:
        """Compute the oldest step that is in flight."""
        output, emit = self._in_flight.popleft()
        self._update_tables(output)
        tokens, sizes = [], {}
        for req_id, scheduled in output.num_scheduled_tokens.items():
            slots = len(output.scheduled_spec_decode_tokens.get(req_id, ()))
            start, end = self._computed[req_id], self._computed[req_id] + scheduled
            sizes[req_id] = min(slots, self.max_model_len - 1 - start)
            for position in range(start):
                assert self._kv[self._slot(req_id, position)] == (req_id, position)
            for position in range(start, end - slots + sizes[req_id]):
                self._kv[self._slot(req_id, position)] = req_id, position
            accepted = self._accepted(sizes[req_id]) if req_id in emit else 0
            self._computed[req_id] = end - slots + accepted
            tokens.append([5] * (1 + accepted) if req_id in emit else [])
        req_ids = list(output.num_scheduled_tokens)
        result = ModelRunnerOutput(req_ids, {i: n for n, i in enumerate(req_ids)}, tokens)
        messages.attach(result, messages.LateReport(sizes if self.pays else {}, self.pays, None))
        self.scheduler.update_from_output(output, result)
        for req_id in set(req_ids) - self.scheduler.requests.keys():
            self.ended.setdefault(req_id, len(self.scheduled) - 1)

    def _update_tables(self, output: Any) -> None:
        for req_id, (count,) in messages.kept_blocks(output).items():
            del self._tables[req_id][count:]
        for new in output.scheduled_new_reqs:
            self._tables[new.req_id] = list(new.block_ids[0])
            self._computed[new.req_id] = new.num_computed_tokens
        cached = output.scheduled_cached_reqs
        for req_id, blocks in zip(cached.req_ids, cached.new_block_ids, strict=True):
            self._tables[req_id] += blocks[0] if blocks else []

    def _slot(self, req_id: str, position: int) -> tuple[int, int]:
        assert position < self.max_model_len
        return self._tables[req_id][position // BLOCK], position % BLOCK


def random_arrivals(rng: random.Random, most: int, num_requests: int) -> dict[int, list[Request]]:
    """Requests of up to `most` tokens at random steps."""
    arrivals: dict[int, list[Request]] = {}
    for i in range(num_requests):
        prompt = rng.randrange(1, most - 1)
        new = request(f"r{i}", prompt, rng.randrange(1, most - prompt))
        arrivals.setdefault(rng.randrange(num_requests * 4), []).append(new)
    return arrivals
