"""Waits that can be given up: every one has an end."""

from __future__ import annotations

import gc
import threading
import time
import traceback
import weakref
from collections.abc import Callable, Iterator
from functools import partial

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


class Held:
    """Something as large as a bucket, in a local variable of a call."""


@pytest.fixture
def _no_collector() -> Iterator[None]:
    """Garbage collection is rare in a long run, and knows nothing of a GPU's memory."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("_no_collector")
@pytest.mark.parametrize("fails", ["begin", "end", "alone"])
@pytest.mark.parametrize("keeps", ["nothing", "the error"])
def test_a_call_that_has_failed_is_not_kept(fails: str, keeps: str) -> None:
    """The frames of an error's traceback hold a bucket. So do those of the error's cause."""
    held: list[weakref.ref[Held]] = []

    def fail(bucket: Held) -> None:
        part = bucket
        try:
            raise OSError(f"of a {type(part).__name__}")
        except OSError as error:
            raise CommunicatorError("broken") from error

    def begin(bucket: Held) -> Callable[[], None]:
        if fails == "begin":
            fail(bucket)
        return partial(fail, bucket)

    sender, bucket = Sender("keeping"), Held()
    held.append(weakref.ref(bucket))
    if fails == "alone":
        operation: Operation[None] = Operation(partial(fail, bucket), 20.0, "sending")
    else:
        operation = Operation(None, 20.0, "sending")
        sender.put(operation, lambda kept=bucket: begin(kept))  # type: ignore[misc]
    del bucket
    error = operation.future.exception(20.0)
    assert isinstance(error, CommunicatorError)
    told = "".join(traceback.format_exception(error))
    assert "in fail\n" in told, "the place is still told"
    assert "OSError: of a Held" in told
    if keeps == "nothing":
        del operation, error
    wait_until(lambda: held[0]() is None)
    sender.close()


@pytest.mark.usefixtures("_no_collector")
@pytest.mark.parametrize("ends", ["well", "with an error", "cancelled"])
def test_an_operation_that_has_ended_is_not_kept(ends: str) -> None:
    """Otherwise it would hold its result until its deadline."""
    release = threading.Event()
    release.set()
    operation = Operation(lambda: 1 // (ends == "well") + release.wait(20), 1200.0, "adding")
    if ends == "cancelled":
        release.clear()
        operation = Operation(lambda: release.wait(20), 1200.0, "sleeping")
        operation.cancel(CommunicatorError("given up"))
    operation.future.exception(20.0)
    gone = weakref.ref(operation)
    del operation
    release.set()
    wait_until(lambda: gone() is None)


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
