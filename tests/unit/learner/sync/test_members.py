"""The watch of servers that are left out, over fake servers (R40)."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine, Iterator
from concurrent.futures import Future
from typing import TypeVar

import pytest
import respx

from learner.rollout.membership import Member
from learner.rollout.server_backend import LoopThread, ServerBackend
from learner.sync.members import ReturnWatch
from tests.unit.learner.rollout.fakes import FakeServer, config
from tests.waits import DEADLINE_S, wait_until

T = TypeVar("T")
FIRST, SECOND = "http://a.test", "http://b.test"


class HeldLoop(LoopThread):
    """Each coroutine's future is done only after `release`, though the coroutine has ended."""

    def __init__(self) -> None:
        super().__init__("held")
        self.ended, self.release = threading.Event(), threading.Event()

    def submit(self, coroutine: Coroutine[object, None, T]) -> Future[T]:
        async def held() -> T:
            found = await coroutine
            self.ended.set()
            await asyncio.to_thread(self.release.wait, DEADLINE_S)
            return found

        return super().submit(held())


@pytest.fixture
def backend() -> Iterator[ServerBackend]:
    with respx.mock(assert_all_called=False) as router:
        for base_url in (FIRST, SECOND):
            FakeServer(router, base_url)
        made = ServerBackend(config([FIRST, SECOND]), run_seed=42)
        yield made
        made.close()


def member(base_url: str) -> Member:
    return Member(base_url=base_url, group_port=1, state="out")


def test_a_server_that_is_lost_while_the_watch_ends_is_watched(backend: ServerBackend) -> None:
    """The watch has found nobody to look at, and its future is not done yet: a new watch begins."""
    backend.loop.close(DEADLINE_S)
    backend.loop = loop = HeldLoop()
    watch = ReturnWatch(backend)
    watch.follow([member(FIRST)])
    wait_until(lambda: watch.ready() == [FIRST])
    watch.follow([])
    assert loop.ended.wait(DEADLINE_S)
    watch.follow([member(SECOND)])
    loop.release.set()
    wait_until(lambda: watch.ready() == [SECOND])
