"""An engine that stops answering (R16): noticed in time, whoever waits is told, and it may come back."""

from __future__ import annotations

import asyncio

import pytest

from rollout_server.engine import StallWatch
from shared.errors import ServerError

STALL_S = 0.4


async def wait_for(watch: StallWatch) -> str:
    async with watch.guard():
        await asyncio.sleep(10)
    return "answered"


def test_an_engine_that_stops_is_noticed_and_one_that_goes_on_is_used_again() -> None:
    async def run() -> None:
        answers = asyncio.Event()
        answers.set()
        watch = StallWatch(STALL_S)
        running = asyncio.create_task(watch.run(answers.wait))
        waiting = asyncio.create_task(wait_for(watch))
        await asyncio.sleep(2 * STALL_S)
        watch.check()
        assert not waiting.done()
        answers.clear()
        with pytest.raises(ServerError, match="does not answer") as caught:
            await asyncio.wait_for(waiting, 2 * STALL_S)
        assert caught.value.http_status == 503
        with pytest.raises(ServerError):
            await wait_for(watch)
        answers.set()
        await asyncio.sleep(0.05)
        async with watch.guard():
            pass
        running.cancel()

    asyncio.run(run())


def test_a_timeout_of_the_caller_s_own_stays_one() -> None:
    async def run() -> None:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.05):
                await wait_for(StallWatch(STALL_S))

    asyncio.run(run())


def test_an_engine_that_fails_is_not_one_that_stops() -> None:
    async def fail() -> None:
        raise RuntimeError("dead")

    async def run() -> None:
        watch = StallWatch(STALL_S)
        running = asyncio.create_task(watch.run(fail))
        await asyncio.sleep(2 * STALL_S)
        watch.check()
        assert not running.done()
        running.cancel()

    asyncio.run(run())
