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

from shared import waits
from shared.errors import DeadlineError
from shared.sync.calls import Operation
from shared.waits import SLICE_S, TimeLeft, result_of, wait_for, within

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
            return await within(limit_s, work())
        except TimeoutError:
            return False

    return asyncio.run(run())


def operation(work_s: float, limit_s: float) -> bool:
    try:
        Operation(lambda: time.sleep(work_s), limit_s, "the work").result()
    except DeadlineError:
        return False
    return True


WAITS = {"condition": condition, "future": future, "coroutine": coroutine, "operation": operation}


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
            await within(5.0, fail())
        with pytest.raises(TimeoutError):
            await within(0.1, slow())

    asyncio.run(run())
    assert ended == [True]


if __name__ == "__main__":
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})
    print("imported", flush=True)
    signal.sigwait({signal.SIGUSR1})
    began = time.monotonic()
    print("waiting", flush=True)
    print(WAITS[sys.argv[1]](max(0.0, began + WORK_S + PAUSE_S - time.monotonic()), LIMIT_S), flush=True)


def test_patience_does_not_count_a_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(waits, "time", SimpleNamespace(monotonic=lambda: now[0]))
    limit = TimeLeft(1.0)
    now[0] += 3600
    assert not limit.is_over()
    begin = now[0]
    while not limit.is_over():
        now[0] += SLICE_S
    assert 0.5 < now[0] - begin <= 1.0


def test_patience_ends_though_there_are_pauses_without_end(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(waits, "time", SimpleNamespace(monotonic=lambda: now[0]))
    limit, number = TimeLeft(1.0), 0
    while not limit.is_over():
        number, now[0] = number + 1, now[0] + 60
    assert number < 1.0 / SLICE_S
