"""Runs calls that may never return on separate threads, so that callers can stop waiting for them.

Invariants: an operation ends once: with the call's result or error, with the error that cancelled it, or at its
deadline with a DeadlineError that names the call. The first of these events decides. An operation ends at its deadline
even if no caller waits. An ended operation keeps only its result or error, so a bucket's memory is freed without
garbage collection. A call that nobody waits for any more keeps its thread until the call ends. Collectives run this
way, because a lost peer may block them: joining a group on a thread for that call, a group's broadcasts on the thread
of its `Sender`.
"""

from __future__ import annotations

import threading
import traceback
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, wait
from typing import Any, Generic, TypeVar

from shared.errors import DeadlineError
from shared.waits import Deadline

T = TypeVar("T")
Begin = Callable[[], Callable[[], None]]  # starts work, and returns a function that waits for its end


class Operation(Generic[T]):
    """A call with a deadline. `call` starts at once; None: the creator passes the call to `run` later. If the operation
    fails, `on_failure` runs once, on any thread, before `future` ends. `future` lets callers wait for several
    operations; only the operation may end it."""

    def __init__(
        self, call: Callable[[], T] | None, timeout_s: float, what: str, on_failure: Callable[[], None] | None = None
    ) -> None:
        self.what = what
        self.future: Future[T] = Future()
        # A future that is running cannot be cancelled by callers, so only the operation ends it.
        self.future.set_running_or_notify_cancel()
        self.deadline = Deadline(timeout_s)
        self._timeout_s, self._on_failure = timeout_s, on_failure
        # The lock is never released, because setting a future twice raises InvalidStateError.
        self._unended = threading.Lock()  # the thread that gets this lock may end the operation
        _end_in_time(self)
        # The thread is a daemon, so that a call that never returns does not keep the process alive.
        if call is not None:
            threading.Thread(target=self.run, args=(call,), name=what, daemon=True).start()

    def done(self, wait_s: float) -> bool:
        """Wait up to `wait_s`; return True if the operation has ended. Raises the errors of `result`."""
        if not wait([self.future], wait_s).done:
            return False
        self.result()
        return True

    def result(self) -> T:
        """Wait for the end, and return the call's result. Raises the call's error, the error of `cancel`, or
        DeadlineError."""
        return self.future.result()

    def cancel(self, error: BaseException) -> None:
        """End with `error`, unless the operation has already ended. The result or error of the call is then ignored."""
        if not self._unended.acquire(blocking=False):
            return
        try:
            if self._on_failure is not None:
                self._on_failure()
        finally:
            self._end()
            self.future.set_exception(error)

    def expire(self) -> None:
        """End with a DeadlineError, unless the operation has already ended."""
        self.cancel(
            DeadlineError(
                f"{self.what} did not end in time",
                found=f"{self._timeout_s:.1f} s without an end",
                wanted="an end within the deadline",
                remedy="look for a process that died or can't be reached, or raise the timeout",
            )
        )

    def run(self, call: Callable[[], T]) -> None:
        """Run `call`, and end with its result or error, unless the operation has already ended."""
        try:
            result = call()
        except BaseException as error:  # `result` raises this error for the caller that waits
            self.cancel(_without_frames(error))
            return
        if self._unended.acquire(blocking=False):
            self._end()
            self.future.set_result(result)

    def _end(self) -> None:
        with _changed:
            _under_way.discard(self)


def _without_frames(error: BaseException) -> BaseException:
    """Return the error with its tracebacks as a note, in text. The frames of a traceback would keep a bucket's memory
    as long as the error exists."""
    error.add_note("".join(traceback.format_exception(error)))
    one: BaseException | None = error
    seen: set[int] = set()
    # Errors may have each other as causes, in a circle.
    while one is not None and id(one) not in seen:
        seen.add(id(one))
        one.__traceback__ = None
        one = one.__cause__ or one.__context__
    return error


class Sender:
    """A thread for calls that must begin in order. The thread starts with the first call, and ends once the sender is
    closed.

    A call has two parts: `begin` returns `finish`, which waits for the end. The thread keeps no reference to an ended
    call, because a call holds a bucket's memory.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._jobs: deque[tuple[Operation[None], Begin]] = deque()
        self._changed = threading.Condition()
        self._closed = False
        self._thread: threading.Thread | None = None

    def put(self, operation: Operation[None], begin: Begin) -> bool:
        """Queue a call. `operation` ends when the call ends. Returns False if the sender is closed."""
        with self._changed:
            if self._closed:
                return False
            self._jobs.append((operation, begin))
            self._changed.notify()
            if self._thread is None:
                # One thread serves all calls: with a thread for each bucket a broadcast of 1 KB took 0.56 ms instead of
                # 0.34.
                self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
                self._thread.start()
        return True

    def close(self) -> None:
        """Take no more calls. Queued calls still run. May be called again, from any thread."""
        with self._changed:
            self._closed = True
            self._changed.notify()

    def _run(self) -> None:
        last = None
        while job := self._next(may_wait=True):
            while job or last:
                # The next call begins before the last one has ended, so that the device never waits for this thread.
                begun = _begun(*job) if job else None
                if last:
                    last()
                last = begun
                # The names `job` and `begun` would keep the call, and its bucket's memory, through the next wait.
                del job, begun
                job = self._next(may_wait=False)

    def _next(self, *, may_wait: bool) -> tuple[Operation[None], Begin] | None:
        with self._changed:
            while may_wait and not self._jobs and not self._closed:
                self._changed.wait()
            return self._jobs.popleft() if self._jobs else None


def _begun(operation: Operation[None], begin: Begin) -> Callable[[], None] | None:
    """Begin a call. Returns the function that waits for its end; None if the operation has ended or the call fails."""
    # The operation has ended already if the group was left while the call was queued.
    if operation.future.done():
        return None
    try:
        finish = begin()
    except BaseException as error:  # `result` raises this error for the caller that waits
        operation.cancel(_without_frames(error))
        return None
    return lambda: operation.run(finish)


# One thread ends overdue operations. A waiting caller could not end them: on CUDA a broadcast without its peer blocks
# the device, and the caller may then wait for the device too (to allocate memory, say).
_under_way: set[Operation[Any]] = set()
_changed = threading.Condition()
_watcher: threading.Thread | None = None


def _end_in_time(operation: Operation[T]) -> None:
    global _watcher
    with _changed:
        _under_way.add(operation)
        if _watcher is None or not _watcher.is_alive():
            _watcher = threading.Thread(target=_watch, name="watching deadlines", daemon=True)
            _watcher.start()
        _changed.notify()


def _watch() -> None:
    while True:
        with _changed:
            overdue = [operation for operation in _under_way if operation.deadline.is_over()]
            _under_way.difference_update(overdue)
            if not overdue:
                _changed.wait(min((operation.deadline.left_s() for operation in _under_way), default=None))
        # `pop` leaves no reference to an ended operation, which would keep a bucket's memory.
        while overdue:
            overdue.pop().expire()
