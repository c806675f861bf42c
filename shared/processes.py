"""Child processes that do not outlive their parent, however it ends (Linux).

`end_with_parent` asks the kernel for a signal at the parent's end, so SIGKILL of the parent counts too. The request
survives `exec`, but children do not inherit it: each generation asks for itself. A rollout server's engine processes
have a guard of their own (`rollout_server.processes`).

`stop_signals` are those that ask a program to end in its own time. `held_back` keeps a closed terminal from ending the
processes that start meanwhile. `leave_lost_output` is for handlers of signals that a terminal sends to all who use it:
`... | tee log` ends too.

`FEW_SHAPES` are variables of a process that computes on CPU, set before torch is loaded. oneDNN, and ideep, torch's
layer above it, each keep what they have prepared for 1,024 shapes of matrices; ideep has 270 KB for each. Images have
new shapes again and again, so that this memory would grow for hours.
"""

from __future__ import annotations

import ctypes
import os
import select
import signal
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager

FEW_SHAPES: Mapping[str, str] = {"ONEDNN_PRIMITIVE_CACHE_CAPACITY": "32", "LRU_CACHE_CAPACITY": "32"}
_PR_SET_PDEATHSIG = 1
_PRINTED = (1, 2)  # stdout, stderr
_libc = ctypes.CDLL(None, use_errno=True)  # loaded here, so that a child can call it between fork and exec


def end_with_parent(signum: signal.Signals, parent_pid: int | None = None) -> None:
    """This process gets `signum` when its parent ends, or at once if the parent is no longer `parent_pid`.

    The kernel means the parent's *thread* that started this process: start children from a thread that lives on.
    """
    _libc.prctl(_PR_SET_PDEATHSIG, int(signum), 0, 0, 0)
    if parent_pid is not None and os.getppid() != parent_pid:  # it ended before the request
        os.kill(os.getpid(), signum)


def stop_signals() -> tuple[signal.Signals, ...]:
    """Return the signals that ask this program to stop: Ctrl-C, SIGTERM, and SIGHUP, the end of its terminal. `nohup`
    ignores that one, and so does a program that it started."""
    ignored = signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    return (signal.SIGINT, signal.SIGTERM) if ignored else (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@contextmanager
def held_back(signum: signal.Signals) -> Iterator[None]:
    """The signal waits until the end of the block. Processes that start inside the block, and their children, never get
    it. Call it in the main thread."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [signum])
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def leave_lost_output(within_s: float = 0.0, *, streams: Collection[int] = _PRINTED) -> None:
    """Lead streams nowhere if nobody is at their other end any more, or leaves it within this time. Each line that is
    printed there would be an OSError, in the middle of what has still to be saved. `streams` are file descriptors."""
    poll = select.poll()
    for stream in streams:
        poll.register(stream, 0)
    for stream, events in poll.poll(1000 * within_s):
        if events & (select.POLLHUP | select.POLLERR):
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, stream)
            os.close(nowhere)
