"""What Model Runner V2 needs on a CPU: the import adds it to the package.

Not in this package's `__init__`: vLLM imports that in each of its processes, and a plain worker on
a CPU must not have numba loaded when it starts.
"""

from __future__ import annotations

from lookahead_vllm.verify.cpu.kv_moves import SlotMover
from lookahead_vllm.verify.implementations import ON_CPUS

ON_CPUS.update({noun: f"tests.support.v2_on_cpu.{noun}" for noun in ("history", "place", "walk")})
SlotMover.move_paths = lambda self, src, dst: self.move(src.flatten(), dst.flatten())
