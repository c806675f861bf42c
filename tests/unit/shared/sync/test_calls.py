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
    assert 0.15 < time.monotonic() - start < 2
    release.set()


def test_cancel_ends_a_wait_on_another_thread() -> None:
    release = threading.Event()
    operation = Operation(lambda: release.wait(10), 10.0, "sleeping")
    threading.Timer(0.1, operation.cancel, [CommunicatorError("given up")]).start()
    start = time.monotonic()
    with pytest.raises(CommunicatorError, match="given up"):
        operation.result()
    assert time.monotonic() - start < 2
    release.set()
