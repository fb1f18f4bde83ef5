"""Helper threads: every task is done once, by any thread, and no thread needs Python's lock."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
from numba.core import types

from lookahead_vllm.draft.jit import kernel
from lookahead_vllm.draft.threads import (
    _NOT_FINISHED,
    _NOT_TAKEN,
    HelperThreads,
    _exchange,
    _subtract,
    finish_task,
    offer_tasks,
    take_task,
    wait_for_offer,
    wait_for_tasks,
)

_usleep = types.ExternalFunction("usleep", types.intc(types.uintc))
MAX_SLEEPS = 20_000  # of a millisecond


@kernel(nogil=True)
def help_counting(done, shared):
    while wait_for_offer(shared):
        count_some(done, shared)


@kernel
def count_some(done, shared):
    task = take_task(shared)
    while task >= 0:
        done[task] += 1  # not atomic: two threads with one task could lose a count
        finish_task(shared)
        task = take_task(shared)


@kernel
def offer_often(done, sizes, shared, num_helpers):
    """The number of offers after which not every task was done exactly once."""
    wrong = 0
    for size in sizes:
        done[:] = 0
        offer_tasks(shared, size, num_helpers)
        count_some(done, shared)
        wait_for_tasks(shared)
        for task in range(len(done)):
            if done[task] != (1 if task < size else 0):
                wrong += 1
                break
    return wrong


@kernel(nogil=True)
def help_meeting(state, shared):
    while wait_for_offer(shared):
        meet_some(state, shared)


@kernel
def meet_some(state, shared):
    """Each task waits until all of them are being done; state: how many are not, and failures."""
    task = take_task(shared)
    while task >= 0:
        _subtract(state, 0, 1)
        sleeps = 0
        while _subtract(state, 0, 0) > 0 and sleeps < MAX_SLEEPS:
            _usleep(1000)
            sleeps += 1
        if sleeps == MAX_SLEEPS:
            _subtract(state, 1, -1)
        finish_task(shared)
        task = take_task(shared)


@kernel
def offer_meeting(state, num_threads, shared):
    """Holds Python's lock all the time."""
    _exchange(state, 0, num_threads)
    offer_tasks(shared, num_threads, num_threads - 1)
    meet_some(state, shared)
    wait_for_tasks(shared)


@kernel(nogil=True)
def help_slowly(nothing, shared):
    while wait_for_offer(shared):
        while take_task(shared) >= 0:
            _usleep(20_000)
            finish_task(shared)


@kernel
def offer_slowly(shared):
    """The tasks that are not finished when the wait for them ends."""
    offer_tasks(shared, 2, 1)
    while _subtract(shared, _NOT_TAKEN, 0) > 0:
        _usleep(100)
    wait_for_tasks(shared)
    return shared[_NOT_FINISHED]


def run_apart(source):
    """Run Python code in a process of its own: a wait that never ends must not stop the tests."""
    run = subprocess.run(
        [sys.executable, "-c", "from tests.draft.test_threads import *\n" + source],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert (run.returncode, run.stdout, run.stderr) == (0, "ends\n", "")


@pytest.mark.parametrize("num_helpers", [0, 1, 3])
def test_every_task_is_done_once(num_helpers):
    # Any number may be woken: too few, or more than there are tasks.
    run_apart(
        "done = np.zeros(40, np.int64)\n"
        f"helpers = HelperThreads({num_helpers}, help_counting, done)\n"
        "sizes = np.random.default_rng(0).integers(1, len(done), 50_000)\n"
        f"for woken in range({num_helpers + 1}):\n"
        "    assert offer_often(done, sizes, helpers.shared, woken) == 0\n"
        "print('ends')\n"
    )


@pytest.mark.parametrize("num_threads", [2, 4])
def test_threads_work_at_the_same_time_while_one_holds_the_lock(num_threads):
    state = np.zeros(2, np.int64)
    helpers = HelperThreads(num_threads - 1, help_meeting, state)
    # The threads need the lock once, to begin.
    time.sleep(0.2)
    for _ in range(3):
        offer_meeting(state, num_threads, helpers.shared)
    assert state[1] == 0
    helpers.stop()


def test_a_signal_does_not_end_a_wait():
    received = []
    helpers = HelperThreads(1, help_slowly, np.zeros(1, np.int64))
    time.sleep(0.2)
    previous = signal.signal(signal.SIGALRM, lambda *_: received.append(1))
    signal.setitimer(signal.ITIMER_REAL, 0.001, 0.001)
    try:
        unfinished = [offer_slowly(helpers.shared) for _ in range(10)]
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)
    assert received and unfinished == [0] * 10
    helpers.stop()


@pytest.mark.parametrize("ending", ["stop", "delete"])
def test_the_threads_end(ending):
    helpers = HelperThreads(3, help_counting, np.zeros(4, np.int64))
    threads = helpers.threads
    assert all(thread.is_alive() for thread in threads)
    if ending == "stop":
        helpers.stop()
    del helpers
    gc.collect()
    for thread in threads:
        thread.join(120)
    assert not any(thread.is_alive() for thread in threads)


def test_a_forked_process_does_all_tasks_itself():
    done = np.zeros(40, np.int64)
    helpers = HelperThreads(2, help_counting, done)
    sizes = np.random.default_rng(2).integers(1, len(done), 1000)
    assert offer_often(done, sizes, helpers.shared, 2) == 0
    child = os.fork()
    if child == 0:
        os._exit(offer_often(done, sizes, helpers.shared, 2))
    end = time.monotonic() + 20
    ended, status = 0, 0
    while not ended and time.monotonic() < end:
        ended, status = os.waitpid(child, os.WNOHANG)
        time.sleep(0.01)
    if not ended:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    assert ended and os.waitstatus_to_exitcode(status) == 0
    assert offer_often(done, sizes, helpers.shared, 2) == 0  # the parent's threads still help
    helpers.stop()
