"""Tests of what `bench.jitter` measures of threads, and of the figures that it makes."""

from __future__ import annotations

import threading
import time

import pytest

from bench.jitter import RowTimes, WayTimes, figures, sampling, schedule, shown


def busy(until: threading.Event) -> None:
    while not until.is_set():
        sum(range(1000))


def test_the_seconds_of_a_thread_are_its_own() -> None:
    native_id = threading.get_native_id()
    before, own = schedule(native_id), time.thread_time()
    while time.thread_time() < own + 0.05:
        pass
    after = schedule(native_id)
    assert after[0] - before[0] == pytest.approx(time.thread_time() - own, abs=0.02)
    assert after[1] >= before[1]


def test_a_sampling_profiler_names_threads_and_leaves_out_those_that_wait() -> None:
    ended, begun = threading.Event(), threading.Event()
    waits = threading.Thread(target=ended.wait, args=(30.0,), name="waits")
    works = threading.Thread(target=busy, args=(ended,), name="works")
    with sampling(0.001) as lines:
        waits.start()
        works.start()
        deadline = time.monotonic() + 30.0
        while not lines.get("works") and time.monotonic() < deadline:
            begun.wait(0.01)
        ended.set()
        waits.join()
        works.join()
    assert "waits" not in lines
    assert any("test_jitter.py" in line and line.endswith("busy") for line in lines["works"])
    assert "busy" in shown("beside", WayTimes(lines=lines))


def test_a_row_that_waits_for_the_lock_is_told_from_one_that_waits_for_a_core() -> None:
    """Beside rollouts: 0.3 s of a row of 1 s are neither on a core nor waiting for one."""
    alone = WayTimes(rows=[RowTimes(wall_s=0.5, cpu_s=0.5, runnable_s=0.0, device_s=0.4)], kernels_s=0.1)
    beside = WayTimes(rows=[RowTimes(wall_s=1.0, cpu_s=0.5, runnable_s=0.2)], answers=50, answers_cpu_s=0.1)
    found = {figure.name: figure.value for figure in figures({"alone": alone, "beside": beside})}
    assert found["beside: it waits for the device or the lock"] == pytest.approx(0.3)
    assert found["alone: it waits for the device or the lock"] == 0.0
    assert found["alone: between the row's events on the device"] == 0.4
    assert found["alone: the row's kernels"] == 0.1
    assert found["a row beside against alone"] == 2.0
    assert found["the rollouts' threads on a core, per answer"] == pytest.approx(2.0)
    assert "a row apart against idle" not in found
