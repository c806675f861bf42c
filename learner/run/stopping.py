"""Ends a run early, with a checkpoint: at Ctrl-C, SIGTERM or a closed terminal, or when its time is over.

In: signals. Out: `Stopped`, raised in the main thread. The first signal only records a request. The trainer calls
`StopRequest.check` at each step. `check` is collective, so all ranks raise `Stopped` at the same point. If no check
comes within half of `timeout_s` (during a long wait for rollouts), `Stopped` interrupts the main thread, but never
while a checkpoint is written. After the whole `timeout_s`, or at a second Ctrl-C, the process ends at once.

`TimeLimit` only says when `training.max_minutes` have passed.
"""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType

from learner.policy.parallel import Ranks
from shared.processes import leave_lost_output, stop_signals

_STDERR = 2
_LEAVE_S = 0.1  # seconds to wait after a signal, so that a `tee` of the output, which gets it too, ends first
_AGAIN_S = 0.2  # seconds between two tries to interrupt, while a checkpoint is written


class Stopped(BaseException):
    """The run was asked to stop. A stop is no error, so the class is a BaseException like KeyboardInterrupt: `except
    Exception` does not catch it. `agreed`: all ranks raise it at the same point."""

    def __init__(self, signum: int, *, agreed: bool) -> None:
        super().__init__(f"stopped by {signal.Signals(signum).name}")
        self.agreed = agreed
        # The exit code is that of a shell: 130 for SIGINT, 143 for SIGTERM.
        self.exit_code = 128 + signum


@contextmanager
def told_before_the_first_step() -> Iterator[None]:
    """Let SIGTERM end the process at once, with a message, inside the `with` block: nothing has been learned yet. A
    thread ends the process, because the main thread may be in a long call, such as loading the model."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    reading, writing = socket.socketpair()
    # `set_wakeup_fd` takes only descriptors that do not block.
    writing.setblocking(False)

    def watch() -> None:
        while data := reading.recv(1):
            if data[0] == signal.SIGTERM and signal.getsignal(signal.SIGTERM) is _too_early:
                _too_early(signal.SIGTERM, None)

    handler = signal.signal(signal.SIGTERM, _too_early)
    wakeup = signal.set_wakeup_fd(writing.fileno(), warn_on_full_buffer=False)
    threading.Thread(target=watch, name="early-stop", daemon=True).start()
    try:
        yield
    finally:
        signal.set_wakeup_fd(wakeup)
        if signal.getsignal(signal.SIGTERM) is _too_early:
            signal.signal(signal.SIGTERM, handler)
        writing.close()


def _too_early(signum: int, frame: FrameType | None) -> None:
    _end(signum, f"{signal.Signals(signum).name} before the first step or after the last: nothing to save")


def _forget_in_child() -> None:
    """Undo the handling of `told_before_the_first_step` in a forked child."""
    # A signal to the child would be written to the socket that the parent's thread reads, and would end the parent.
    if signal.getsignal(signal.SIGTERM) is _too_early:
        # Only the main thread can set handlers, and another thread may have forked.
        with suppress(ValueError):
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGTERM, signal.SIG_DFL)


os.register_at_fork(after_in_child=_forget_in_child)


class StopRequest:
    """Turns signals into a request to stop. `timeout_s`: max seconds from the first signal to the end of the
    process."""

    def __init__(self, ranks: Ranks, *, timeout_s: float) -> None:
        self._ranks, self._timeout_s = ranks, timeout_s
        self._signum = 0  # number of the signal that requested the stop; 0: no signal
        self._last_call: threading.Timer | None = None
        self._is_held_off = False

    def check(self) -> None:
        """Raises Stopped on every rank if a rank has got a signal. Collective."""
        signum = int(self._ranks.all_reduce_max(self._signum))
        if signum:
            # The timer that would interrupt this rank is switched off, because all ranks stop here together.
            signal.setitimer(signal.ITIMER_REAL, 0.0)
            raise Stopped(signum, agreed=True)

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Handle signals inside the `with` block. Only the main thread can call this."""
        handlers = {**dict.fromkeys(stop_signals(), self._asked), signal.SIGALRM: self._break_in}
        previous = {signum: signal.signal(signum, handler) for signum, handler in handlers.items()}
        try:
            yield
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0.0)
            if self._last_call is not None:
                self._last_call.cancel()
            for signum, handler in previous.items():
                signal.signal(signum, handler)

    @contextmanager
    def held_off(self) -> Iterator[None]:
        """Delay interruptions until the end of the `with` block, which writes a checkpoint and waits for no other rank.
        After `timeout_s` the process ends even inside the `with` block."""
        self._is_held_off = True
        try:
            yield
        finally:
            self._is_held_off = False

    def _asked(self, signum: int, frame: FrameType | None) -> None:
        if self._signum:
            # A launcher may send SIGTERM twice, so only a second Ctrl-C, by a person, ends the process.
            if signum == signal.SIGINT:
                _end(signum, "ended at once; the newest checkpoint is complete")
            return
        self._signum = signum
        # A terminal's signal also ends the `tee` that reads this program's output, and printing would then fail.
        leave_lost_output(_LEAVE_S)
        _say(f"{signal.Signals(signum).name}: saving and stopping, at most {self._timeout_s:g} s; Ctrl-C ends at once")
        signal.setitimer(signal.ITIMER_REAL, self._timeout_s / 2)
        why = "not stopped in time (training.stop_timeout_s)"
        self._last_call = threading.Timer(self._timeout_s, _end, (signum, why))
        self._last_call.daemon = True
        self._last_call.start()

    def _break_in(self, signum: int, frame: FrameType | None) -> None:
        # A checkpoint that is interrupted would have to be written again, with less time.
        if self._is_held_off:
            signal.setitimer(signal.ITIMER_REAL, _AGAIN_S)
            return
        raise Stopped(self._signum, agreed=False)


class TimeLimit:
    """Says whether `training.max_minutes` have passed since this object was made. Rank 0's clock decides for all ranks.

    `ends_by_evaluating`: the minutes must also suffice for a last evaluation, which is expected to take as long as the
    evaluation before it."""

    def __init__(
        self,
        ranks: Ranks,
        minutes: float | None,
        *,
        ends_by_evaluating: bool,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._ranks, self._minutes, self._reserves, self._clock = ranks, minutes, ends_by_evaluating, clock
        self._began_s, self._evaluation_s = clock(), 0.0

    def evaluated(self, seconds: float) -> None:
        """Note the seconds that an evaluation took."""
        self._evaluation_s = seconds

    def is_over(self) -> bool:
        """Return True, on every rank, if the run's time is over. Collective if there is a limit."""
        if self._minutes is None:
            return False
        spent_s = self._clock() - self._began_s + self._evaluation_s * self._reserves
        return self._ranks.broadcast_object(spent_s >= 60 * self._minutes)


def _say(text: str) -> None:
    with suppress(OSError):  # the reader of stderr may have ended.
        # A signal handler must not wait for the lock of a stream.
        os.write(_STDERR, f"learner: {text}\n".encode())


def _end(signum: int, why: str) -> None:
    _say(why)
    # `sys.exit` would not work here: this may run in another thread, while the main thread is in a call that does not
    # return.
    os._exit(128 + signum)
