"""What compiled loops tell the processor, and the interpreter."""

import sys
import threading
import time

from lookahead_vllm.draft.instructions import pause_unlocked


def test_a_thread_that_polls_leaves_the_interpreter_to_others():
    """Without a pause it would keep the lock for the switch interval, here longer than the test."""
    is_done = threading.Event()

    def other() -> None:
        time.sleep(0.01)  # takes the lock afterwards
        is_done.set()

    pause_unlocked()  # compiled now
    interval = sys.getswitchinterval()
    sys.setswitchinterval(300.0)
    try:
        thread = threading.Thread(target=other)
        thread.start()
        end = time.perf_counter() + 60.0
        while not is_done.is_set() and time.perf_counter() < end:
            pause_unlocked()
        assert is_done.is_set()
    finally:
        sys.setswitchinterval(interval)
        thread.join()
