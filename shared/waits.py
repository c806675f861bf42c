"""Waits with a deadline, by a clock that stops while this process is stopped (by Ctrl-Z, or with its machine). With the
system's clock a wait could end too early, because answers cannot be read while this process is stopped.

In: limits in seconds. Out: deadlines for threads, coroutines and loops that poll, and pauses before work that failed is
tried again. Waits for the end of a process, and waits inside libraries, use the system's clock instead.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import AsyncIterator, Callable
from concurrent import futures
from typing import TypeVar

T = TypeVar("T")
SLICE_S = 0.05  # time between two checks of a state that has no event to wait for
_TICK_S = 0.05
_MOST_PER_TICK_S = 4 * _TICK_S  # if two ticks are further apart, the process was paused


class _AwakeClock:
    """Counts the seconds during which this process ran. A thread ticks every `_TICK_S`. At most `_MOST_PER_TICK_S` of
    the time between two ticks counts, so a pause of the process adds no more than that."""

    def __init__(self) -> None:
        # (seconds counted so far, the system's time) at the last tick; in one tuple, so that both values change
        # together
        self._last = (0.0, time.monotonic())
        self._ticking: threading.Thread | None = None
        self._starting = threading.Lock()

    def now_s(self) -> float:
        # The thread starts at the first call in each process: a fork copies no threads.
        if self._ticking is None or not self._ticking.is_alive():
            self._start()
        return self._at(time.monotonic())

    def _at(self, system_s: float) -> float:
        clock_s, last_s = self._last
        return clock_s + min(system_s - last_s, _MOST_PER_TICK_S)

    def _start(self) -> None:
        with self._starting:
            if self._ticking is None or not self._ticking.is_alive():
                self._tick()
                self._ticking = threading.Thread(target=self._run, name="awake clock", daemon=True)
                self._ticking.start()

    def _run(self) -> None:
        # An event waits here instead of `time.sleep`: a test that replaces `sleep` would make this thread spin.
        never = threading.Event()
        while not never.wait(_TICK_S):
            self._tick()

    def _tick(self) -> None:
        system_s = time.monotonic()
        self._last = (self._at(system_s), system_s)


awake_s = _AwakeClock().now_s


class Deadline:
    """A limit of `limit_s` seconds from now, counted while this process runs. Any number of threads may use it."""

    def __init__(self, limit_s: float) -> None:
        self._at_s = awake_s() + limit_s

    def left_s(self) -> float:
        """Return the seconds that are left, at least 0."""
        return max(0.0, self._at_s - awake_s())

    def is_over(self) -> bool:
        return awake_s() >= self._at_s


def back_off_s(num_failures: int, first_s: float, most_s: float) -> float:
    """Return the seconds to wait after `num_failures` failures in a row: `first_s` after one failure, twice as long
    after each further one, at most `most_s`."""
    # The exponent is bounded, because 2.0 ** 1024 raises OverflowError.
    return min(most_s, first_s * 2.0 ** min(num_failures - 1, 60))


class Retry:
    """The pauses between tries of work that may fail, until `limit_s` from now. The caller decides after which errors
    to try again, and logs the errors."""

    def __init__(self, limit_s: float, pause_s: float) -> None:
        self._deadline, self._pause_s = Deadline(limit_s), pause_s

    def next_s(self, asked_s: float | None = None) -> float | None:
        """Return the seconds until the next try; None: the time is over. `asked_s`: a pause that the other side asked
        for, used instead of `pause_s`."""
        pause_s = self._pause_s if asked_s is None else asked_s
        return None if self._deadline.is_over() else min(pause_s, self._deadline.left_s())

    def wait(self) -> bool:
        """Wait until the next try. Returns False, at once, if the time is over."""
        if (pause_s := self.next_s()) is None:
            return False
        time.sleep(pause_s)
        return True


@contextlib.asynccontextmanager
async def time_limit(limit_s: float) -> AsyncIterator[None]:
    """Cancel the body after `limit_s` seconds in which this process ran (see `Deadline`), and raise TimeoutError, as
    `asyncio.timeout` does."""
    deadline, loop = Deadline(limit_s), asyncio.get_running_loop()
    # asyncio's clock also counts pauses of the process, so the limit is set only once `deadline` is over.
    async with asyncio.timeout(None) as limit:
        timer: asyncio.Handle

        def look() -> None:
            nonlocal timer
            if deadline.is_over():
                limit.reschedule(loop.time())
            else:
                timer = loop.call_later(deadline.left_s(), look)

        timer = loop.call_soon(look)
        try:
            yield
        finally:
            timer.cancel()


async def ends_within(limit_s: float, task: asyncio.Future[object]) -> bool:
    """Return True if `task` ends within `limit_s`. After `limit_s` return False; the task continues."""
    deadline = Deadline(limit_s)
    # The timeout counts pauses of the process too, so the deadline decides whether the time is over.
    while not (await asyncio.wait({task}, timeout=deadline.left_s()))[0]:
        if deadline.is_over():
            return False
    return True


def wait_for(changed: threading.Condition, holds: Callable[[], bool], limit_s: float) -> bool:
    """Return True if `holds` became true within `limit_s`. The caller has the condition's lock."""
    deadline = Deadline(limit_s)
    while not changed.wait_for(holds, timeout=deadline.left_s()):
        if deadline.is_over():
            return False
    return True


def result_of(future: futures.Future[T], limit_s: float) -> T:
    """Return the future's result. Raises TimeoutError after `limit_s`, and the future's own error."""
    deadline = Deadline(limit_s)
    while not futures.wait([future], timeout=deadline.left_s()).done:
        if deadline.is_over():
            raise TimeoutError
    return future.result()
