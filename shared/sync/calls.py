"""Calls that may never come back, on threads of their own, so that whoever waits for one can give it up.

Invariants: an operation ends once, with the first of these: the call's result, the call's error, the error that it was
cancelled with, or, at its deadline, a DeadlineError that names the call. It ends at its deadline even if nobody asks.
What has ended keeps its result or its error, and no bucket waits for garbage collection.
A call that was given up keeps its thread until it ends by itself. The thread is a daemon, so it never keeps the process
alive. Collectives run this way, because a lost peer may block them: joining a group on a thread for that one call, a
group's broadcasts on the one thread of its `Sender`.
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
Begin = Callable[[], Callable[[], None]]  # begins something, and returns what waits for its end


class Operation(Generic[T]):
    """Starts `call` at once; without one, whoever made the operation gives it to `run`. After a failure `on_failure`
    runs once, on any thread, before anyone hears of the failure. `future` is for those who wait for several at once;
    only the operation may end it."""

    def __init__(
        self, call: Callable[[], T] | None, timeout_s: float, what: str, on_failure: Callable[[], None] | None = None
    ) -> None:
        self.what = what
        self.future: Future[T] = Future()
        # A future that runs cannot be cancelled from outside, so only the operation ends it.
        self.future.set_running_or_notify_cancel()
        self.deadline = Deadline(timeout_s)
        self._timeout_s, self._on_failure = timeout_s, on_failure
        # The lock is never released: a future that is set twice raises InvalidStateError.
        self._unended = threading.Lock()  # whoever gets it may end the operation
        _end_in_time(self)
        if call is not None:
            threading.Thread(target=self.run, args=(call,), name=what, daemon=True).start()

    def done(self, wait_s: float) -> bool:
        """Wait up to `wait_s` for the end; False if it has not come yet. Raises what `result` raises."""
        if not wait([self.future], wait_s).done:
            return False
        self.result()
        return True

    def result(self) -> T:
        """Wait for the end. Raises the call's error, the one it was cancelled with, or DeadlineError."""
        return self.future.result()

    def cancel(self, error: BaseException) -> None:
        """End with `error`, unless it has ended before; the call itself is given up."""
        if not self._unended.acquire(blocking=False):
            return
        try:
            if self._on_failure is not None:
                self._on_failure()
        finally:
            self._end()
            self.future.set_exception(error)

    def expire(self) -> None:
        """End as one whose deadline has passed."""
        self.cancel(
            DeadlineError(
                f"{self.what} did not end in time",
                found=f"{self._timeout_s:.1f} s without an end",
                wanted="an end within the deadline",
                remedy="look for a process that died or can't be reached, or raise the timeout",
            )
        )

    def run(self, call: Callable[[], T]) -> None:
        """End with the outcome of `call`, unless it has ended before."""
        try:
            result = call()
        except BaseException as error:  # goes to whoever waits
            self.cancel(_without_frames(error))
            return
        if self._unended.acquire(blocking=False):
            self._end()
            self.future.set_result(result)

    def _end(self) -> None:
        with _changed:
            _under_way.discard(self)


def _without_frames(error: BaseException) -> BaseException:
    """Return the error with its tracebacks as a note, in words. Their frames, and the functions that ran in them, would
    hold a bucket as long as anyone holds the error."""
    error.add_note("".join(traceback.format_exception(error)))
    one: BaseException | None = error
    seen: set[int] = set()
    while one is not None and id(one) not in seen:
        seen.add(id(one))
        one.__traceback__ = None
        one = one.__cause__ or one.__context__
    return error


class Sender:
    """One thread for calls that must begin in order, started with the first one. It ends once it is closed.

    A call is two: `begin` returns `finish`, which waits for the end. The next one begins before the last one has ended,
    so that a device never waits for this thread. The thread knows nothing of who gives it calls, and keeps no call that
    has ended: a call holds a bucket's memory.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._jobs: deque[tuple[Operation[None], Begin]] = deque()
        self._changed = threading.Condition()
        self._closed = False
        self._thread: threading.Thread | None = None

    def put(self, operation: Operation[None], begin: Begin) -> bool:
        """Run the call in its turn, as `operation`; False if the sender was closed before."""
        with self._changed:
            if self._closed:
                return False
            self._jobs.append((operation, begin))
            self._changed.notify()
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
                self._thread.start()
        return True

    def close(self) -> None:
        """Take no more calls. Those that were taken still run. May be called again, from any thread."""
        with self._changed:
            self._closed = True
            self._changed.notify()

    def _run(self) -> None:
        last = None
        while job := self._next(may_wait=True):
            while job or last:
                begun = _begun(*job) if job else None
                if last:
                    last()
                last = begun
                # These names would keep the call, and its bucket's memory, through the next wait.
                del job, begun
                job = self._next(may_wait=False)

    def _next(self, *, may_wait: bool) -> tuple[Operation[None], Begin] | None:
        with self._changed:
            while may_wait and not self._jobs and not self._closed:
                self._changed.wait()
            return self._jobs.popleft() if self._jobs else None


def _begun(operation: Operation[None], begin: Begin) -> Callable[[], None] | None:
    """Begin a call. Returns what waits for its end; None if it was given up before, or has failed."""
    if operation.future.done():
        return None
    try:
        finish = begin()
    except BaseException as error:  # goes to whoever waits
        operation.cancel(_without_frames(error))
        return None
    return lambda: operation.run(finish)


# One thread ends what is overdue. Those who wait can't be relied on for that: on CUDA the caller may itself wait for
# the device (to allocate memory, say), which a broadcast without its peer holds up.
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
            overdue = _overdue()
            if not overdue:
                _changed.wait(_until_next_s())
        while overdue:  # keeps nothing that has ended
            overdue.pop().expire()


def _overdue() -> list[Operation[Any]]:
    found = [operation for operation in _under_way if operation.deadline.is_over()]
    _under_way.difference_update(found)
    return found


def _until_next_s() -> float | None:
    """Returns None if nothing is under way."""
    return min((operation.deadline.left_s() for operation in _under_way), default=None)
