"""One asyncio event loop in a thread of its own: the bridge between the learner's plain code and the async HTTP client.

All `ServerClient`s of a process live on one such loop, so `generate` and the weight sync may be called from any
thread. Invariants: `run` returns or raises exactly what the coroutine did; a caller that is interrupted cancels what
it started; `close` is bounded in time. Used by `server.py` and `learner/sync/`.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine
from concurrent.futures import Future
from typing import Any, TypeVar

T = TypeVar("T")


class LoopThread:
    def __init__(self, name: str) -> None:
        self._loop = asyncio.new_event_loop()
        # daemon: an interpreter that is leaving because of an error must not wait for an answer
        self._thread = threading.Thread(target=self._loop.run_forever, name=name, daemon=True)
        self._thread.start()

    @property
    def closed(self) -> bool:
        return self._loop.is_closed()

    def submit(self, coroutine: Coroutine[Any, Any, T]) -> Future[T]:
        """Start `coroutine` on the loop; cancelling the future cancels it there."""
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run `coroutine` to its end. Deadlines are the coroutine's own business."""
        future = self.submit(coroutine)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    def close(self, timeout_s: float) -> None:
        """Cancel what still runs and end the thread, within `timeout_s`. A second call does nothing."""
        if self.closed:
            return
        self.submit(_cancel_others()).result(timeout_s)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(timeout_s)
        if not self._thread.is_alive():
            self._loop.close()


async def _cancel_others() -> None:
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)
