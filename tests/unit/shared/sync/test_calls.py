"""Waits that can be given up: every one has an end."""

from __future__ import annotations

import gc
import threading
import time
import weakref
from collections.abc import Callable

import pytest

from shared.errors import CommunicatorError, DeadlineError
from shared.sync.calls import Operation, Sender
from tests.waits import wait_until


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
    assert 0.15 < time.monotonic() - start < 5.0  # ends before the second wait's own end
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


class Calls:
    """A sender's calls, which note what they do, and end when they are told to."""

    def __init__(self) -> None:
        self.sender, self.log = Sender("sending"), list[str]()
        self.release = threading.Event()

    def put(self, name: str, fails: str = "") -> Operation[None]:
        def begin() -> Callable[[], None]:
            self.log.append(f"begin {name}")
            if fails == "begin":
                raise CommunicatorError(f"{name} failed")
            return finish

        def finish() -> None:
            self.release.wait(20)
            self.log.append(f"end {name}")
            if fails == "end":
                raise CommunicatorError(f"{name} failed")

        operation: Operation[None] = Operation(None, 20.0, name)
        assert self.sender.put(operation, begin)
        return operation


def test_calls_begin_in_order_and_the_next_one_before_the_last_has_ended() -> None:
    calls = Calls()
    first = calls.put("a")
    wait_until(lambda: calls.log)
    rest = [calls.put(name) for name in "bc"]
    calls.release.set()
    for operation in (first, *rest):
        operation.result()
    assert [said for said in calls.log if "begin" in said] == ["begin a", "begin b", "begin c"]
    assert [said for said in calls.log if "end" in said] == ["end a", "end b", "end c"]
    assert calls.log.index("begin c") < calls.log.index("end b")
    calls.sender.close()


@pytest.mark.parametrize("fails", ["begin", "end"])
def test_a_call_that_fails_leaves_the_next_one_alone(fails: str) -> None:
    calls = Calls()
    calls.release.set()
    wrong, right = calls.put("a", fails), calls.put("b")
    with pytest.raises(CommunicatorError, match="a failed"):
        wrong.result()
    right.result()
    calls.sender.close()


def test_a_call_that_was_given_up_before_its_turn_never_begins() -> None:
    calls = Calls()
    first = calls.put("a")
    wait_until(lambda: calls.log)
    second = calls.put("b")
    second.cancel(CommunicatorError("given up"))
    calls.release.set()
    first.result()
    calls.put("c").result()
    assert "begin b" not in calls.log
    calls.sender.close()


def test_a_closed_sender_takes_no_call_and_its_thread_ends() -> None:
    calls = Calls()
    calls.release.set()
    calls.put("a").result()
    thread = next(thread for thread in threading.enumerate() if thread.name == "sending")
    calls.sender.close()
    thread.join(20)
    assert not thread.is_alive()
    assert not calls.sender.put(Operation(None, 20.0, "late"), lambda: lambda: None)


def test_a_call_that_has_ended_is_not_kept() -> None:
    """It holds a bucket, on the device."""

    class Bucket:
        pass

    sender, bucket = Sender("keeping"), Bucket()
    operation: Operation[None] = Operation(None, 20.0, "sending")
    sender.put(operation, lambda kept=bucket: lambda: kept and None)  # type: ignore[misc]
    operation.result()
    gone = weakref.ref(bucket)
    del bucket
    wait_until(lambda: gone() is None)
    sender.close()


def test_an_operation_that_has_ended_is_not_kept() -> None:
    """Otherwise it would hold its result until its deadline."""
    operation = Operation(lambda: 3, 1200.0, "adding")
    operation.result()
    gone = weakref.ref(operation)
    del operation

    def is_gone() -> bool:
        gc.collect()  # it and its future know each other
        return gone() is None

    wait_until(is_gone)


def test_only_the_operation_ends_its_future() -> None:
    release = threading.Event()
    operation = Operation(lambda: release.wait(20), 20.0, "sleeping")
    assert not operation.future.cancel()
    release.set()
    assert operation.result()


def test_no_thread_keeps_the_process_alive() -> None:
    """A call that a lost peer blocks may never come back."""
    release = threading.Event()
    operation = Operation(lambda: release.wait(20), 20.0, "sleeping on its own thread")
    calls = Calls()
    sent = calls.put("a")
    names = {"sleeping on its own thread", "sending", "watching deadlines"}
    found = [thread for thread in threading.enumerate() if thread.name in names]
    assert {thread.name for thread in found} == names
    assert all(thread.daemon for thread in found)
    for event in (release, calls.release):
        event.set()
    assert operation.result()
    sent.result()
    calls.sender.close()
