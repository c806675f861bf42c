"""A call that may never come back, on a thread of its own, so that whoever waits for it can give it up.

Invariants: a wait ends with the call's result, with its error, with the error it was cancelled with, or, when the
deadline has passed, with a DeadlineError that names the call. A call that was given up keeps its thread until it ends
by itself; the thread is a daemon, so it never keeps the process. Used around collectives, which a lost peer may block.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from typing import Generic, NoReturn, TypeVar

from shared.errors import DeadlineError, ProjectError

T = TypeVar("T")


class Operation(Generic[T]):
    """Starts `call` at once. `on_failure` runs once, before a wait raises."""

    def __init__(
        self, call: Callable[[], T], timeout_s: float, what: str, on_failure: Callable[[], None] | None = None
    ) -> None:
        self.what = what
        self._timeout_s = timeout_s
        self._deadline = time.monotonic() + timeout_s
        self._on_failure = on_failure
        self._outcome: queue.SimpleQueue[Callable[[], T]] = queue.SimpleQueue()
        self._settled: Callable[[], T] | None = None
        self.ended = False  # the call itself is over, waited for or not

        def target() -> None:
            try:
                outcome = _returning(call())
            except BaseException as error:
                outcome = _raising(error)
            self.ended = True
            self._outcome.put(outcome)

        threading.Thread(target=target, name=what, daemon=True).start()

    def done(self, wait_s: float) -> bool:
        """Wait up to `wait_s` for the end; False where there is none yet. Raises what `result` raises."""
        if self._settled is None:
            left_s = self._deadline - time.monotonic()
            try:
                self._settle(self._outcome.get(timeout=max(0.0, min(wait_s, left_s))))
            except queue.Empty:
                if wait_s < left_s:
                    return False
                self._settle(_raising(self.late()))
        self.result()
        return True

    def result(self) -> T:
        """Wait until the end or the deadline. Raises the call's error, or DeadlineError."""
        while self._settled is None:
            self.done(self._timeout_s)
        return self._settled()

    def cancel(self, error: ProjectError) -> None:
        """Let whoever waits, on any thread, go on with `error`; the call itself is given up."""
        self._outcome.put(_raising(error))

    def _settle(self, outcome: Callable[[], T]) -> None:
        self._settled = outcome
        try:
            outcome()
        except BaseException:
            if self._on_failure is not None:
                self._on_failure()

    @property
    def overdue(self) -> bool:
        return not self.ended and time.monotonic() > self._deadline

    def late(self) -> DeadlineError:
        return DeadlineError(
            f"{self.what} did not end in time",
            found=f"{self._timeout_s:.1f} s without an end",
            wanted="an end within the deadline",
            remedy="look for a process that died or can't be reached, or raise the timeout",
        )


def _returning(result: T) -> Callable[[], T]:
    return lambda: result


def _raising(error: BaseException) -> Callable[[], NoReturn]:
    def call() -> NoReturn:
        raise error

    return call
