"""Recent answers by request uuid, so that a retry never makes a second rollout (the design's "exactly once").

A repeat of a uuid is answered with the same rollout, of the version that it was made with: also after a later sync, and
that answer's `ver` says so, since a second rollout of a sample would be trained twice. Repeats of a request that is
still running share it. The same uuid with other content is refused. Failures are not kept. The least recently used
answer is forgotten first. Lives on one event loop; called by `app.py`.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from shared.errors import RequestError

T = TypeVar("T")


@dataclass
class _Entry(Generic[T]):
    fingerprint: str
    task: asyncio.Task[T]
    num_waiting: int = 0


class RecentAnswers(Generic[T]):
    def __init__(self, size: int) -> None:
        self._size = size
        self._entries: OrderedDict[str, _Entry[T]] = OrderedDict()

    async def get(self, uuid: str, fingerprint: str, compute: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """The answer of this uuid; `compute()` where there is none. Raises RequestError where the uuid was used for
        something else, and whatever `compute` raises. When all who wait are cancelled, so is the computation."""
        entry = self._entries.get(uuid)
        if entry is None:
            entry = self._entries[uuid] = _Entry(fingerprint, asyncio.create_task(compute()))
        elif entry.fingerprint != fingerprint:
            raise RequestError(
                f"uuid {uuid!r} was used for another request",
                found="other messages, images or decoding settings",
                wanted="a uuid per request",
                remedy="let every request have a fresh uuid; only an exact repeat may use it again",
            )
        self._entries.move_to_end(uuid)
        entry.num_waiting += 1
        try:
            return await asyncio.shield(entry.task)
        finally:
            entry.num_waiting -= 1
            self._tidy(uuid, entry)

    def _tidy(self, uuid: str, entry: _Entry[T]) -> None:
        if entry.num_waiting == 0 and not entry.task.done():
            entry.task.cancel()
        failed = entry.task.cancelled() or entry.task.cancelling() or not entry.task.done() or entry.task.exception()
        if failed and entry.num_waiting == 0 and self._entries.get(uuid) is entry:
            del self._entries[uuid]
        while len(self._entries) > self._size:
            oldest = next((key for key, old in self._entries.items() if old.task.done()), None)
            if oldest is None:
                return
            del self._entries[oldest]
