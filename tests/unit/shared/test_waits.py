"""Waits with a deadline, and what happens to them when this process stands still (a real SIGSTOP)."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared import waits
from shared.errors import DeadlineError
from shared.sync.calls import Operation
from shared.waits import Deadline, Retry, back_off_s, ends_within, result_of, time_limit, wait_for

LONG_S, SHORT_S = 30.0, 0.2
LIMIT_S, WORK_S, PAUSE_S = 1.5, 0.3, 2.5  # the pause is longer than the limit, and the work much shorter


def later(what: Callable[[], object], delay_s: float) -> None:
    timer = threading.Timer(delay_s, what)
    timer.daemon = True
    timer.start()


def condition(work_s: float, limit_s: float) -> bool:
    changed, ended = threading.Condition(), threading.Event()

    def end() -> None:
        with changed:
            ended.set()
            changed.notify_all()

    later(end, work_s)
    with changed:
        return wait_for(changed, ended.is_set, limit_s)


def future(work_s: float, limit_s: float) -> bool:
    found: Future[bool] = Future()
    later(lambda: found.set_result(True), work_s)
    try:
        return result_of(found, limit_s)
    except TimeoutError:
        return False


def coroutine(work_s: float, limit_s: float) -> bool:
    async def work() -> bool:
        await asyncio.sleep(work_s)
        for _ in range(10):  # an answer comes through several layers
            await asyncio.sleep(0)
        return True

    async def run() -> bool:
        try:
            async with time_limit(limit_s):
                return await work()
        except TimeoutError:
            return False

    return asyncio.run(run())


def task(work_s: float, limit_s: float) -> bool:
    async def run() -> bool:
        return await ends_within(limit_s, asyncio.ensure_future(asyncio.sleep(work_s)))

    return asyncio.run(run())


def polled(work_s: float, limit_s: float) -> bool:
    ended, deadline = threading.Event(), Deadline(limit_s)
    later(ended.set, work_s)
    while not ended.is_set() and not deadline.is_over():
        time.sleep(0.01)
    return ended.is_set()


def operation(work_s: float, limit_s: float) -> bool:
    try:
        Operation(lambda: time.sleep(work_s), limit_s, "the work").result()
    except DeadlineError:
        return False
    return True


WAITS = {
    "condition": condition,
    "future": future,
    "coroutine": coroutine,
    "task": task,
    "polled": polled,
    "operation": operation,
}


@pytest.mark.parametrize("wait", WAITS.values(), ids=list(WAITS))
def test_what_comes_in_time_is_taken_and_what_does_not_is_given_up(wait: Callable[[float, float], bool]) -> None:
    assert wait(0.0, LONG_S)
    begin = time.monotonic()
    assert not wait(LONG_S, SHORT_S)
    assert time.monotonic() - begin < LONG_S


def test_a_pause_of_the_process_itself_does_not_count() -> None:
    """Stopped and continued, as Ctrl-Z and `fg` do; each wait in a process of its own, all at once."""
    with contextlib.ExitStack() as stack:
        started = {name: stack.enter_context(_waiting(name)) for name in WAITS}
        for process in started.values():
            stack.callback(process.kill)
        assert _lines(started) == dict.fromkeys(WAITS, "imported\n")
        _signal(started, signal.SIGUSR1)
        assert _lines(started) == dict.fromkeys(WAITS, "waiting\n")
        time.sleep(0.1)
        _signal(started, signal.SIGSTOP)
        time.sleep(PAUSE_S)
        _signal(started, signal.SIGCONT)
        assert _lines(started) == dict.fromkeys(WAITS, "True\n")


def _waiting(name: str) -> subprocess.Popen[str]:
    return subprocess.Popen([sys.executable, "-m", __name__, name], stdout=subprocess.PIPE, text=True)


def _signal(processes: dict[str, subprocess.Popen[str]], signum: signal.Signals) -> None:
    for process in processes.values():
        process.send_signal(signum)


def _lines(processes: dict[str, subprocess.Popen[str]]) -> dict[str, str]:
    return {name: process.stdout.readline() for name, process in processes.items() if process.stdout is not None}


def test_an_error_is_raised_and_work_that_is_given_up_is_cancelled() -> None:
    ended = []

    async def fail() -> None:
        raise ValueError("no")

    async def slow() -> None:
        try:
            await asyncio.sleep(30)
        finally:
            ended.append(True)

    async def run() -> None:
        with pytest.raises(ValueError, match="no"):
            async with time_limit(5.0):
                await fail()
        for limit_s in (0.1, 0.0):
            with pytest.raises(TimeoutError):
                async with time_limit(limit_s):
                    await slow()

    asyncio.run(run())
    assert ended == [True, True]


def _clock(monkeypatch: pytest.MonkeyPatch) -> tuple[waits._AwakeClock, list[float]]:
    """A clock whose ticks the test makes, and the system's time, to be set."""
    system_s = [100.0]
    monkeypatch.setattr(waits, "time", SimpleNamespace(monotonic=lambda: system_s[0]))
    return waits._AwakeClock(), system_s


def test_of_a_pause_only_a_part_of_a_second_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, system_s = _clock(monkeypatch)
    begin = clock._at(system_s[0])
    system_s[0] += 3600
    clock._tick()
    assert 0 < clock._at(system_s[0]) - begin < 1


@given(seconds=st.lists(st.floats(0.0, 1000.0), max_size=50))
def test_the_clock_never_goes_back_and_never_runs_ahead_of_the_system(seconds: list[float]) -> None:
    with pytest.MonkeyPatch.context() as monkeypatch:
        clock, system_s = _clock(monkeypatch)
        last = clock._at(system_s[0])
        for index, passed_s in enumerate(seconds):
            system_s[0] += passed_s
            now = clock._at(system_s[0])
            assert 0.0 <= now - last <= passed_s + 1e-9
            if index % 2:
                clock._tick()
                assert clock._at(system_s[0]) == now
            last = now


def test_time_passes_in_a_process_that_was_forked() -> None:
    """The ticking thread stays behind in the parent."""
    text = (
        "import os, sys, time; from shared import waits; waits.awake_s(); pid = os.fork()\n"
        "if pid: sys.exit(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))\n"
        "deadline, end = waits.Deadline(1.0), time.monotonic() + 30\n"
        "while not deadline.is_over() and time.monotonic() < end: time.sleep(0.01)\n"
        "os._exit(0 if deadline.is_over() else 1)\n"
    )
    assert subprocess.run([sys.executable, "-c", text], timeout=60).returncode == 0


if __name__ == "__main__":
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})
    print("imported", flush=True)
    signal.sigwait({signal.SIGUSR1})
    began = time.monotonic()
    print("waiting", flush=True)
    print(WAITS[sys.argv[1]](max(0.0, began + WORK_S + PAUSE_S - time.monotonic()), LIMIT_S), flush=True)


def test_tries_end_with_their_time_and_the_last_one_is_at_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]

    def sleep(seconds: float) -> None:
        now[0] += seconds

    monkeypatch.setattr(waits, "awake_s", lambda: now[0])
    monkeypatch.setattr(waits, "time", SimpleNamespace(sleep=sleep, monotonic=time.monotonic))  # the clock ticks on
    retry, tried_at = Retry(2.5, 1.0), [0.0]
    assert retry.next_s(0.25) == 0.25, "the other side's wish"
    assert retry.next_s(9.0) == 2.5, "no wish is longer than what is left"
    while retry.wait():
        tried_at.append(now[0])
    assert tried_at == [0.0, 1.0, 2.0, 2.5]
    assert retry.next_s() is None
    assert not Retry(0.0, 1.0).wait(), "without time there is one try"


def test_pauses_double_up_to_the_longest() -> None:
    assert [back_off_s(n, 1.0, 60.0) for n in (1, 2, 3, 6, 7, 10_000)] == [1.0, 2.0, 4.0, 32.0, 60.0, 60.0]
