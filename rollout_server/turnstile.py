"""The gate with waiting: calls wait for updates, updates wait for calls, both up to a deadline.

`app.py` wraps every call that generates or scores in `call()`, `sync.py` every update in `update()`. Lives on one event
loop. A call that is waiting counts in `waiting`, one that was let in in `gate.in_flight`.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Literal

from rollout_server.gate import Gate
from shared.errors import DeadlineError, ServerBusyError


class Turnstile:
    def __init__(self, gate: Gate, *, queue_timeout_s: float, drain_timeout_s: float) -> None:
        self.gate = gate
        self.waiting = 0
        self._queue_timeout_s = queue_timeout_s
        self._drain_timeout_s = drain_timeout_s
        self._changed = asyncio.Event()

    @asynccontextmanager
    async def call(self) -> AsyncIterator[int]:
        """Hold a place in the serving version, which is yielded.

        Raises ServerPoisonedError, or ServerBusyError where the wait for an update took too long.
        """
        if not self.gate.try_enter():
            await self._wait_to_enter()
        try:
            yield self.gate.ver
        finally:
            self.gate.leave()
            self._notify()

    @asynccontextmanager
    async def update(self, incarnation: str, ver: int, mode: Literal["full", "adapter"]) -> AsyncIterator[None]:
        """Hold the weights alone: entered when all calls have ended, left as the new version, or poisoned by whatever
        the body raises. Raises SyncError where the gate refuses, DeadlineError where calls do not end."""
        self.gate.begin_update(incarnation, ver, mode)
        try:
            await self._drain()
            yield
        except BaseException as error:
            self.gate.fail(str(error) or type(error).__name__)
            raise
        else:
            self.gate.complete()
        finally:
            self._notify()

    async def _wait_to_enter(self) -> None:
        self.waiting += 1
        try:
            async with asyncio.timeout(self._queue_timeout_s):
                await self._until(self.gate.try_enter)
        except TimeoutError:
            raise ServerBusyError(
                "a weight update is under way",
                found=f"{self._queue_timeout_s:g} s of waiting for it",
                wanted="its end",
                remedy="try again later, or raise the server's queue_timeout_s",
            ) from None
        finally:
            self.waiting -= 1

    async def _drain(self) -> None:
        try:
            async with asyncio.timeout(self._drain_timeout_s):
                await self._until(self.gate.drained)
        except TimeoutError:
            raise DeadlineError(
                "calls in flight did not end before the update",
                found=f"{self.gate.in_flight} in flight after {self._drain_timeout_s:g} s",
                wanted="none",
                remedy="raise the server's drain_timeout_s, or lower max_tokens",
            ) from None

    async def _until(self, predicate: Callable[[], bool]) -> None:
        while not predicate():
            await self._changed.wait()

    def _notify(self) -> None:
        # Not a Condition: taking its lock can be cancelled, and the news that a call has ended would be lost.
        self._changed.set()
        self._changed = asyncio.Event()
