"""Detects an engine that no longer answers, because a worker that is stopped or hangs causes no error by itself.

In: a ping (a call that a living engine answers soon), and the CPU time of the engine's processes. Out: a ServerError
(503) for all calls that wait for the engine.

Invariants: at most one ping is unanswered, and a ping is never cancelled. An engine whose processes use CPU time may
take BUSY_TURNS times as long for its answer. A stall ends with the ping's answer.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable

from shared.errors import ServerError
from shared.waits import ends_within

# A working engine may be silent this many times as long as an idle one. Without this factor, two working engines on an
# overloaded machine counted as stalled.
BUSY_TURNS = 10
# Working processes use at least this fraction of a core. Processes that use less only wait.
BUSY_SHARE = 0.02


class StallWatch:
    """Asks the engine from time to time for an answer. After `stall_s` without an answer, all calls that wait for the
    engine get an error, until it answers again.

    An engine whose processes use CPU time may take BUSY_TURNS times as long: it may be compiling, or share its cores.
    """

    def __init__(self, stall_s: float) -> None:
        self._stall_s = stall_s
        self._stalled = False
        self._silent_s = 0.0
        self._waiting: set[asyncio.Timeout] = set()

    def check(self) -> None:
        """Raises ServerError (503) if the engine does not answer."""
        if self._stalled:
            raise ServerError(
                "the engine does not answer",
                found=f"no answer for {self._silent_s:.1f} s",
                wanted=f"an answer within engine_stall_s ({self._stall_s:g} s; {BUSY_TURNS} times that if it works)",
                remedy="see whether its process is stopped; restart the server if it stays so",
            ).as_status(503)

    @contextlib.asynccontextmanager
    async def guard(self) -> AsyncIterator[None]:
        """Enclose a wait for the engine. Raises ServerError (503) as soon as the engine stalls."""
        self.check()
        try:
            async with asyncio.timeout(None) as limit:
                self._waiting.add(limit)
                try:
                    yield
                finally:
                    self._waiting.discard(limit)
        except TimeoutError:
            self.check()
            raise

    async def run(self, ping: Callable[[], Awaitable[object]], used_s: Callable[[], dict[int, float]]) -> None:
        """Watch the engine until this task is cancelled. `used_s`: seconds of CPU time that each of the engine's
        processes has used so far; {} if one is stopped."""
        while True:
            asking = asyncio.ensure_future(ping())
            if not await self._answers(asking, used_s):
                self._stalled = True
                waiting, self._waiting = self._waiting, set()
                for limit in waiting:
                    # A limit in the past ends the wait with TimeoutError. `guard` then raises the reason.
                    limit.reschedule(asyncio.get_running_loop().time())
                # The ping is never cancelled (see `VllmEngine._call_workers`): its answer ends the stall.
                await asyncio.wait({asking})
            # Reading the exception marks it as handled. A dead engine is reported elsewhere, not by this watch.
            asking.exception()
            self._stalled = False
            await asyncio.sleep(0.25 * self._stall_s)

    async def _answers(self, asking: asyncio.Future[object], used_s: Callable[[], dict[int, float]]) -> bool:
        """Return True if the engine answers within a turn (a wait) of 0.75 `stall_s`. While the engine's processes use
        CPU time, the engine gets another turn, up to BUSY_TURNS turns. Time in which this process itself is stopped
        does not count."""
        # Two pings are 0.25 `stall_s` apart, so a stall is noticed at most `stall_s` after it begins.
        turn_s, before, self._silent_s = 0.75 * self._stall_s, used_s(), 0.0
        for _ in range(BUSY_TURNS):
            # `ends_within` does not count pauses of this process, so that they are not taken for a silent engine.
            if await ends_within(turn_s, asking):
                return True
            self._silent_s += turn_s
            now = used_s()
            if sum(now[pid] - before[pid] for pid in now.keys() & before) < BUSY_SHARE * turn_s:
                return False
            before = now
        return False
