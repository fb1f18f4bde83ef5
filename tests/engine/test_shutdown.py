"""An engine process notices a signal in time to save its cache file."""

from __future__ import annotations

import signal
import threading
import time
from queue import Queue
from typing import Any

from vllm.v1.engine import EngineCoreRequestType

from lookahead_vllm.engine import shutdown


def test_a_signal_that_interrupts_no_wait_wakes_the_loop() -> None:
    """Another thread receives it; Python runs the handler in the main thread, once that wakes."""
    received: list[int] = []
    input_queue: Queue[Any] = Queue()

    def send() -> None:
        time.sleep(0.2)
        signal.pthread_kill(threading.get_ident(), signal.SIGTERM)

    original = signal.signal(signal.SIGTERM, lambda number, _: received.append(number))
    try:
        shutdown._wake_on_signals.__wrapped__(input_queue)
        threading.Thread(target=send).start()
        assert input_queue.get(timeout=30) == (EngineCoreRequestType.WAKEUP, None)
        assert received == [signal.SIGTERM]
    finally:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGTERM, original)
