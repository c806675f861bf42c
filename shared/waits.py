"""Waits with a deadline in which no time passes while this process itself stands still: Ctrl-Z and `fg`, a machine that
was paused or held up. What is waited for may have come meanwhile, and only this process has not seen it.

Each wait is cut into ticks, and a tick counts once, however long it took. `TimeLeft` is for those who wait for several
things in turn, such as the parts of an answer.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Coroutine
from concurrent import futures
from typing import Any, TypeVar

T = TypeVar("T")
TICKS = 20
SLICE_S = 0.05
_MOST_PER_SLICE_S = 4 * SLICE_S  # more is a pause, not a late thread


async def within(limit_s: float, work: Coroutine[Any, Any, T]) -> T:
    """Its result. Raises TimeoutError after `limit_s`, and what it raises; it has ended then."""
    task = asyncio.ensure_future(work)
    try:
        if await ends_within(limit_s, task):
            return task.result()
        raise TimeoutError
    finally:
        task.cancel()
        await asyncio.wait({task})


async def ends_within(limit_s: float, task: asyncio.Future[Any]) -> bool:
    """It goes on if it does not end."""
    for _ in range(TICKS):
        if (await asyncio.wait({task}, timeout=limit_s / TICKS))[0]:
            return True
    return False


def wait_for(changed: threading.Condition, holds: Callable[[], bool], limit_s: float) -> bool:
    """Whether `holds` became true within `limit_s`. The caller has the condition's lock."""
    return any(changed.wait_for(holds, timeout=limit_s / TICKS) for _ in range(TICKS))


def result_of(future: futures.Future[T], limit_s: float) -> T:
    """Raises TimeoutError after `limit_s`, and what the future's work raises."""
    for _ in range(TICKS):
        if futures.wait([future], timeout=limit_s / TICKS).done:
            return future.result()
    raise TimeoutError


class TimeLeft:
    """How many seconds are left to wait, in slices of SLICE_S. Of one that took far longer, only a part counts, so the
    limit ends however often there are pauses. Not for several threads."""

    def __init__(self, limit_s: float) -> None:
        self.left_s = limit_s
        self._asked_at = time.monotonic()

    def is_over(self) -> bool:
        """Call it after every slice."""
        now = time.monotonic()
        self.left_s -= min(now - self._asked_at, _MOST_PER_SLICE_S)
        self._asked_at = now
        return self.left_s <= 0
