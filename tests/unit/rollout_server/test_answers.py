"""Exactly once: a repeated uuid gets the same rollout, whenever it comes."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

import pytest

from rollout_server.service import RecentAnswers
from shared.errors import RequestError


class Maker:
    def __init__(self) -> None:
        self.started = 0
        self.cancelled = 0
        self.go = asyncio.Event()

    async def make(self) -> int:
        self.started += 1
        mine = self.started
        try:
            await self.go.wait()
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        return mine


def run(call: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(call, 10))


def test_repeats_share_one_computation_before_and_after_it_ends() -> None:
    async def check() -> None:
        answers, maker = RecentAnswers[int](10), Maker()
        both = [asyncio.create_task(answers.get("u", "same", maker.make)) for _ in range(2)]
        await asyncio.sleep(0)
        maker.go.set()
        assert await asyncio.gather(*both) == [1, 1]
        assert await answers.get("u", "same", maker.make) == 1
        assert await answers.get("v", "same", maker.make) == 2

    run(check())


def test_a_uuid_used_for_something_else_is_refused() -> None:
    async def check() -> None:
        answers, maker = RecentAnswers[int](10), Maker()
        maker.go.set()
        await answers.get("u", "one", maker.make)
        with pytest.raises(RequestError, match="'u' was used for another request"):
            await answers.get("u", "other", maker.make)
        assert maker.started == 1

    run(check())


def test_failures_are_not_kept() -> None:
    async def check() -> None:
        answers, maker = RecentAnswers[int](10), Maker()
        maker.go.set()

        async def fail() -> int:
            raise ValueError("no")

        with pytest.raises(ValueError, match="no"):
            await answers.get("u", "same", fail)
        assert await answers.get("u", "same", maker.make) == 1

    run(check())


def test_only_the_last_to_go_cancels_and_a_retry_starts_anew() -> None:
    async def check() -> None:
        answers, maker = RecentAnswers[int](10), Maker()
        first, second = (asyncio.create_task(answers.get("u", "same", maker.make)) for _ in range(2))
        await asyncio.sleep(0.01)
        first.cancel()
        await asyncio.sleep(0.01)
        assert (maker.started, maker.cancelled) == (1, 0)
        second.cancel()
        await asyncio.sleep(0.01)
        assert (maker.started, maker.cancelled) == (1, 1)
        maker.go.set()
        assert await answers.get("u", "same", maker.make) == 2

    run(check())


def test_the_least_recently_used_is_forgotten_first() -> None:
    async def check() -> None:
        answers, maker = RecentAnswers[int](2), Maker()
        maker.go.set()
        for uuid in ("a", "b", "a", "c"):
            await answers.get(uuid, "same", maker.make)
        assert await answers.get("a", "same", maker.make) == 1
        assert await answers.get("b", "same", maker.make) == 4

    run(check())
