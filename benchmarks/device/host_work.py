"""What the host does in a step, apart from what is not its work on a GPU."""

import functools
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from benchmarks.device.device import HostClock


class HostWork:
    """Times and counts what a step's CPU time contains beside the host's work.

    The host's clock stops while a function stands in for a kernel.
    """

    def __init__(self, clock: HostClock) -> None:
        self._clock = clock
        self.stand_ins = 0.0
        """Seconds in functions that compute what a GPU's kernels would."""
        self.polled = 0.0
        """Seconds in which the host only asks whether the device has ended."""
        self.launches = 0
        """Of kernels outside of the model's forward pass: calls of these functions, and while
        `counting_operators`, torch's operators that launch one."""
        self.operators = 0
        """Of torch outside of these functions, views included, while `counting_operators`."""
        self._inside = False

    def kernel(self, function: Callable[..., Any], launches: int = 1) -> Callable[..., Any]:
        """The function, which stands for so many launches of kernels."""

        @functools.wraps(function)
        def run(*args: Any, **kwargs: Any) -> Any:
            if self._inside:
                return function(*args, **kwargs)
            self._inside = True
            begin = time.thread_time()
            try:
                with self._clock.stopped():
                    return function(*args, **kwargs)
            finally:
                self.stand_ins += time.thread_time() - begin
                self.launches += launches
                self._inside = False

        return run

    def polling(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function, which only waits for the device."""

        @functools.wraps(function)
        def run(*args: Any, **kwargs: Any) -> Any:
            begin = time.thread_time()
            try:
                return function(*args, **kwargs)
            finally:
                self.polled += time.thread_time() - begin

        return run

    def watch(self) -> None:
        """Watch this process's kernels for CPUs, and lookahead's waiting."""
        from lookahead_vllm.engine.cpu_kernels.table import CPUKernel
        from lookahead_vllm.engine.drafter.waiter import Waiter
        from lookahead_vllm.verify.moves.cpu import HostMover
        from lookahead_vllm.verify.place import cpu as place
        from lookahead_vllm.verify.walk import cpu as walk

        for owner, name in (
            *((CPUKernel, "_launch"), (place.Placer, "__call__"), (walk, "walk_rows")),
            (HostMover, "move_paths"),
        ):
            setattr(owner, name, self.kernel(getattr(owner, name)))
        Waiter.wait = self.polling(Waiter.wait)  # type: ignore[method-assign]

    @contextmanager
    def counting_operators(self) -> Iterator[None]:
        """Count torch's operators, which takes time."""
        from torch.utils._python_dispatch import TorchDispatchMode

        work = self

        class Counting(TorchDispatchMode):
            def __torch_dispatch__(self, operator: Any, _: Any, args: Any = (), kwargs: Any = None):  # type: ignore[no-untyped-def]
                if not work._inside:
                    work.operators += 1
                    work.launches += _launches_a_kernel(operator)
                return operator(*args, **(kwargs or {}))

        with Counting():
            yield


@functools.cache
def _launches_a_kernel(operator: Any) -> bool:
    """Whether an operator is neither a view nor an allocation."""
    returned = [r.alias_info for r in operator._schema.returns]
    is_view = any(alias is not None and not alias.is_write for alias in returned)
    return not is_view and "empty" not in operator.__name__
