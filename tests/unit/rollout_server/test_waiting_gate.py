"""Waiting at the gate (R10): calls for updates, updates for calls, each with an end."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

import pytest

from rollout_server.gate import Gate, WaitingGate
from shared.errors import DeadlineError, ServerBusyError, ServerPoisonedError
from tests.waits import let_others_run


def run(call: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(call, 10))


def waiting_gate(queue_timeout_s: float = 5.0, drain_timeout_s: float = 5.0) -> WaitingGate:
    gate = Gate()
    gate.open_group("a")
    return WaitingGate(gate, queue_timeout_s=queue_timeout_s, drain_timeout_s=drain_timeout_s)


def test_an_update_waits_for_calls_and_calls_for_the_update() -> None:
    async def check() -> None:
        t, seen, release, loaded = waiting_gate(), [], asyncio.Event(), asyncio.Event()

        async def call(until: asyncio.Event | None) -> None:
            async with t.call() as ver:
                seen.append(ver)
                if until:
                    await until.wait()

        async def update() -> None:
            async with t.exclusive("a", 7, "full"):
                seen.append("written")
                await loaded.wait()

        early = asyncio.create_task(call(release))
        await let_others_run()
        updating = asyncio.create_task(update())
        await let_others_run()
        late = [asyncio.create_task(call(None)) for _ in range(3)]
        await let_others_run()
        assert (seen, t.gate.state, t.waiting) == ([0], "draining", 3)
        release.set()
        await early
        await let_others_run()
        assert (seen, t.gate.state, t.waiting) == ([0, "written"], "updating", 3)
        loaded.set()
        await asyncio.gather(updating, *late)
        assert (seen, t.gate.in_flight, t.waiting) == ([0, "written", 7, 7, 7], 0, 0)

    run(check())


@pytest.mark.parametrize(
    ("error", "because"), [(ValueError("the bytes differ"), "the bytes differ"), (OSError(), "OSError")]
)
def test_an_update_that_fails_says_why_to_later_calls(error: Exception, because: str) -> None:
    async def check() -> None:
        t = waiting_gate()
        with pytest.raises(type(error)):
            async with t.exclusive("a", 7, "full"):
                raise error
        with pytest.raises(ServerPoisonedError) as raised:
            async with t.call():
                pass
        assert raised.value.found == because

    run(check())


def test_waits_end_at_their_deadlines() -> None:
    async def check() -> None:
        t = waiting_gate(queue_timeout_s=0.05, drain_timeout_s=0.1)
        async with t.call():
            with pytest.raises(DeadlineError, match=r"1 in flight after 0.1 s"):
                async with t.exclusive("a", 1, "full"):
                    pass
        assert t.gate.state == "poisoned"
        async with t.exclusive("a", 1, "full"):
            with pytest.raises(ServerBusyError, match=r"0.05 s of waiting"):
                async with t.call():
                    pass
        assert (t.gate.state, t.waiting) == ("serving", 0)

    run(check())


def test_a_failed_update_lets_those_who_wait_hear_why() -> None:
    async def check() -> None:
        t = waiting_gate()

        async def call() -> None:
            async with t.call():
                pass

        waiting: list[asyncio.Task[None]] = []

        async def update() -> None:
            async with t.exclusive("a", 1, "full"):
                waiting.append(asyncio.create_task(call()))
                await let_others_run()
                raise RuntimeError("half way")

        with pytest.raises(RuntimeError, match="half way"):
            await update()
        with pytest.raises(ServerPoisonedError, match="half way"):
            await waiting[0]

    run(check())


def test_cancelled_calls_leave() -> None:
    async def check() -> None:
        t = waiting_gate()

        async def call() -> None:
            async with t.call():
                await asyncio.Event().wait()

        calls = [asyncio.create_task(call()) for _ in range(3)]
        await let_others_run()

        async def update() -> None:
            async with t.exclusive("a", 1, "full"):
                pass

        updating = asyncio.create_task(update())
        await let_others_run()
        for task in calls:
            task.cancel()
        await updating
        assert (t.gate.in_flight, t.gate.ver) == (0, 1)

    run(check())
