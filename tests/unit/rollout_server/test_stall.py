"""An engine that stops answering (R16): noticed in time, whoever waits is told, and it may come back."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
import time

import pytest

from rollout_server.processes import cpu_seconds
from rollout_server.stalls import BUSY_TURNS, StallWatch
from shared.errors import ServerError
from shared.processes import descendants
from tests.pauses import pause_soon
from tests.waits import until, wait_until

STALL_S, SHORT_S = 0.8, 0.1


def idle() -> dict[int, float]:
    return {1: 0.0, 2: 0.0}


def working() -> dict[int, float]:
    """Process 2 has ended, and another came, which is not the engine's to count."""
    now = time.monotonic()
    return {1: now, 2: 1e9} if int(now * 10) % 2 else {1: now, 3: -1e9}


async def wait_for(watch: StallWatch) -> str:
    async with watch.guard():
        await asyncio.sleep(600)
    return "answered"


def test_an_engine_that_stops_is_noticed_and_one_that_goes_on_is_used_again() -> None:
    async def run() -> None:
        answers = asyncio.Event()
        answers.set()
        watch = StallWatch(STALL_S)
        running = asyncio.create_task(watch.run(answers.wait, idle))
        waiting = asyncio.create_task(wait_for(watch))
        await asyncio.sleep(2 * STALL_S)
        watch.check()
        assert not waiting.done()
        answers.clear()
        with pytest.raises(ServerError, match="does not answer") as caught:
            await asyncio.wait_for(waiting, 60.0)
        assert caught.value.http_status == 503
        with pytest.raises(ServerError):
            await wait_for(watch)
        answers.set()
        await until(lambda: not watch._stalled)
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
        running = asyncio.create_task(watch.run(fail, idle))
        await asyncio.sleep(2 * STALL_S)
        watch.check()
        assert not running.done()
        running.cancel()

    asyncio.run(run())


def test_an_engine_that_works_gets_more_time_but_not_for_ever() -> None:
    """It compiles, or shares its cores with others: what waits for it is not given up."""

    async def run() -> float:
        watch = StallWatch(SHORT_S)
        begin = time.monotonic()
        running = asyncio.create_task(watch.run(asyncio.Event().wait, working))
        with pytest.raises(ServerError, match="does not answer") as caught:
            await wait_for(watch)
        running.cancel()
        assert "no answer for" in caught.value.found
        return time.monotonic() - begin

    assert asyncio.run(run()) > 0.7 * BUSY_TURNS * SHORT_S


@pytest.mark.slow
def test_a_pause_of_the_server_itself_is_no_silence_of_the_engine() -> None:
    async def run() -> None:
        watch = StallWatch(STALL_S)

        async def answer() -> None:
            await asyncio.sleep(0.5 * STALL_S)
            for _ in range(10):  # an answer comes through several queues
                await asyncio.sleep(0)

        running = asyncio.create_task(watch.run(answer, idle))
        waiting = asyncio.create_task(wait_for(watch))
        pause_soon(after_s=0.25 * STALL_S, for_s=3 * STALL_S)
        end = time.monotonic() + 5 * STALL_S
        while time.monotonic() < end:
            await asyncio.sleep(0.05 * STALL_S)
            watch.check()
        assert not waiting.done()
        running.cancel()
        waiting.cancel()

    asyncio.run(run())


def test_work_is_told_from_waiting_and_from_being_stopped() -> None:
    child = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    waiting = subprocess.Popen(["sleep", "60"])
    try:
        wait_until(lambda: cpu_seconds([child.pid])[child.pid] > 0.2)
        assert cpu_seconds([waiting.pid])[waiting.pid] == pytest.approx(0.0, abs=0.1)
        child.send_signal(signal.SIGSTOP)
        wait_until(lambda: cpu_seconds([child.pid, waiting.pid]) == {})
        child.send_signal(signal.SIGCONT)
        wait_until(lambda: cpu_seconds([child.pid]).keys() == {child.pid})
    finally:
        for one in (child, waiting):
            one.kill()
            one.wait()
    assert cpu_seconds([child.pid]) == {}


def test_a_compiler_that_a_process_started_works_for_it() -> None:
    """vLLM compiles at its first answers: the engine waits for a child that came after the server was ready."""
    compile_ = "import time; end = time.process_time() + 0.3\nwhile time.process_time() < end: pass\ntime.sleep(1)"
    engine = f"import subprocess, sys, time; subprocess.run([sys.executable, '-c', {compile_!r}]); time.sleep(60)"
    process = subprocess.Popen([sys.executable, "-c", engine])
    try:
        wait_until(lambda: cpu_seconds([process.pid])[process.pid] > 0.25)
        used = cpu_seconds([process.pid])[process.pid]
        wait_until(lambda: not descendants(process.pid))
        assert cpu_seconds([process.pid])[process.pid] >= used  # it is not forgotten when it has ended
        assert cpu_seconds([process.pid, -1]).keys() == {process.pid}
    finally:
        process.kill()
        process.wait()
