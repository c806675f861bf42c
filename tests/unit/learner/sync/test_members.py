"""The watch of servers that are left out, over fake servers (R40)."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Coroutine, Iterator
from concurrent.futures import Future
from dataclasses import replace
from typing import TypeVar

import pytest
import respx

from learner.records import ServerChange
from learner.rollout.client import ServerClient
from learner.rollout.membership import Member, Membership, State
from learner.rollout.server_backend import ServerBackend
from learner.sync import members as members_module
from learner.sync.members import Members, ReturnWatch
from shared.aio import LoopThread
from shared.errors import DeadlineError, ServerUnreachableError, UnauthorizedError
from shared.wire import ServerStatus
from tests.syncs import ONE_RANK
from tests.unit.learner.rollout.fakes import FakeServer, config, error
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
def servers() -> Iterator[list[FakeServer]]:
    with respx.mock(assert_all_called=False) as router:
        yield [FakeServer(router, base_url) for base_url in (FIRST, SECOND)]


@pytest.fixture
def backend(servers: list[FakeServer]) -> Iterator[ServerBackend]:
    made = ServerBackend(config([FIRST, SECOND]), run_seed=42)
    yield made
    made.close()


def member(base_url: str, state: State = "out") -> Member:
    return Member(base_url=base_url, group_port=1, state=state)


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


def test_a_new_process_is_checked_beside_the_run(backend: ServerBackend) -> None:
    """A slow one holds no step: until its check has ended it is not ready."""
    go, asked = threading.Event(), list[str]()

    async def check(client: ServerClient, status: ServerStatus) -> None:
        asked.append(client.base_url)
        await asyncio.to_thread(go.wait, DEADLINE_S)

    watch = ReturnWatch(backend, check)
    watch.follow([member(FIRST)])
    wait_until(lambda: asked == [FIRST])
    assert watch.ready() == []
    go.set()
    wait_until(lambda: watch.ready() == [FIRST])
    assert watch.fit == {"fake"}
    assert asked == [FIRST], "a process is checked once"


def test_a_process_that_came_meanwhile_is_waited_for_only_where_it_is_needed(
    backend: ServerBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def check(client: ServerClient, status: ServerStatus) -> None:
        await asyncio.sleep(0.5)

    monkeypatch.setattr(members_module, "LAST_LOOK_S", 0.1)
    status = backend.loop.run(backend.client(FIRST).status())
    two = tuple(member(url, "serving") for url in (FIRST, SECOND))
    for min_servers, waits in ((1, False), (2, True)):
        backend.adopt(Membership(members=two, min_servers=min_servers))
        members = Members(backend, ONE_RANK, control=None, check=check)
        with contextlib.nullcontext() if waits else pytest.raises(DeadlineError, match="new"):
            members.check(two[0], status)


def test_why_a_server_that_answers_stays_out_is_an_event(servers: list[FakeServer], backend: ServerBackend) -> None:
    """D15, R40: its token was changed, say. It is told once, and again only if the reason is another one."""
    backend.adopt(replace(backend.membership, min_servers=1))
    members = Members(backend, ONE_RANK, control=None)
    servers[0].status.mock(return_value=error(UnauthorizedError("the bearer token is wrong")))
    members.leave_out(FIRST, ServerUnreachableError("killed"))
    told: list[ServerChange] = []

    def is_told() -> bool:
        told.extend(members.changes())
        return len(told) > 1

    wait_until(is_told)
    assert [(change.what, change.base_url) for change in told] == [("lost", FIRST), ("refused", FIRST)]
    assert "token is wrong" in told[1].because
    num_looks = servers[0].status.call_count
    wait_until(lambda: servers[0].status.call_count > num_looks + 1)
    assert list(members.changes()) == []
