"""Waits that can be given up: every one has an end."""

from __future__ import annotations

import threading
import time

import pytest

from shared.errors import CommunicatorError, DeadlineError
from shared.sync.calls import Operation


def test_gives_the_result_again_and_again() -> None:
    operation = Operation(lambda: 3, 5.0, "adding")
    assert operation.done(5.0)
    assert [operation.result(), operation.result()] == [3, 3]


def test_raises_the_calls_error_after_on_failure_ran_once() -> None:
    failures: list[str] = []
    operation = Operation(lambda: 1 // 0, 5.0, "dividing", on_failure=lambda: failures.append("failed"))
    for _ in range(2):
        with pytest.raises(ZeroDivisionError):
            operation.result()
    assert failures == ["failed"]


def test_passes_its_deadline_in_slices() -> None:
    release = threading.Event()
    operation = Operation(lambda: release.wait(10), 0.2, "sleeping")
    start = time.monotonic()
    assert not operation.done(0.05)
    with pytest.raises(DeadlineError, match=r"sleeping did not end in time; found 0.2 s"):
        operation.done(5.0)
    assert 0.15 < time.monotonic() - start < 5.0  # before the second wait's own end
    release.set()


def test_cancel_ends_a_wait_on_another_thread() -> None:
    release = threading.Event()
    operation = Operation(lambda: release.wait(60), 60.0, "sleeping")
    threading.Timer(0.1, operation.cancel, [CommunicatorError("given up")]).start()
    start = time.monotonic()
    with pytest.raises(CommunicatorError, match="given up"):
        operation.result()
    assert time.monotonic() - start < 60.0
    release.set()


def test_ends_at_its_deadline_though_nobody_asks() -> None:
    """A caller may itself be held up by what the call waits for."""
    failed, release = threading.Event(), threading.Event()
    late = Operation(lambda: release.wait(60), 60.0, "sleeping longer")
    operation = Operation(lambda: release.wait(60), 0.2, "sleeping", on_failure=failed.set)
    assert failed.wait(20.0)
    with pytest.raises(DeadlineError, match="sleeping did not"):
        operation.result()
    assert not late.done(0.0)
    release.set()
    assert late.result()


def test_what_comes_after_the_end_changes_nothing() -> None:
    """R09: one outcome for everyone who asks, and the first one."""
    release = threading.Event()
    failures: list[str] = []
    operation = Operation(lambda: release.wait(10), 10.0, "sleeping", on_failure=lambda: failures.append("failed"))
    operation.cancel(CommunicatorError("given up"))
    operation.cancel(CommunicatorError("given up again"))
    release.set()
    for _ in range(2):
        with pytest.raises(CommunicatorError, match=r"given up$"):
            operation.result()
    assert failures == ["failed"]
