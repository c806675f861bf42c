"""Child processes that do not outlive their parent, even if it is killed (Linux).

`end_with_parent` asks the kernel for a signal at the parent's end, which comes even after SIGKILL. The request survives
`exec`, but children do not inherit it: each child has to ask for itself. A rollout server's engine processes have
another guard (`rollout_server.processes`).

`stop_signals` returns the signals that ask a program to end cleanly. `held_back` keeps a closed terminal from ending
processes that start inside its block. `leave_lost_output` is for signal handlers: a terminal's signal also ends the
`tee` of `... | tee log`, and printing would then fail.

`FEW_SHAPES` are environment variables for computing on CPU, set before torch is loaded.

`without_working_directory` returns environment variables with which a child process imports our modules, and not
modules of the same name in the working directory. `children` and `descendants` list what a process has started.
`describe`, `exit_code` and `last_words` say how a process ended.
"""

from __future__ import annotations

import ctypes
import os
import select
import signal
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

# oneDNN, and ideep above it, each keep code for 1,024 matrix shapes, ideep with 270 KB per shape. Images have ever new
# shapes, so this memory would grow for hours.
FEW_SHAPES: Mapping[str, str] = {"ONEDNN_PRIMITIVE_CACHE_CAPACITY": "32", "LRU_CACHE_CAPACITY": "32"}
_PR_SET_PDEATHSIG = 1
_PRINTED = (1, 2)  # stdout, stderr
_LAST_LINES = 3  # number of a log's last lines in an error

# The library is loaded here, so that a child can call it between fork and exec.
_libc = ctypes.CDLL(None, use_errno=True)


def end_with_parent(signum: signal.Signals, parent_pid: int | None = None) -> None:
    """Make the kernel send `signum` to this process when its parent ends; at once if `parent_pid` has already ended.

    The signal also comes if only the parent's *thread* that started this process ends, so use a thread that does not
    end.
    """
    _libc.prctl(_PR_SET_PDEATHSIG, int(signum), 0, 0, 0)
    # If the parent ended before the request, no signal will come.
    if parent_pid is not None and os.getppid() != parent_pid:
        os.kill(os.getpid(), signum)


def stop_signals() -> tuple[signal.Signals, ...]:
    """Return the signals that ask this program to stop: Ctrl-C, SIGTERM, and SIGHUP, the end of its terminal. SIGHUP is
    left out if it is ignored, as under `nohup`."""
    ignored = signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    return (signal.SIGINT, signal.SIGTERM) if ignored else (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@contextmanager
def held_back(signum: signal.Signals) -> Iterator[None]:
    """Delay the signal until the end of the `with` block. Processes that start inside the `with` block, and their
    children, never get the signal. Use this block in the main thread only."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [signum])
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def leave_lost_output(within_s: float = 0.0, *, streams: Collection[int] = _PRINTED) -> None:
    """Redirect to /dev/null the streams whose reader has ended, or ends within `within_s`. Without this each printed
    line would raise OSError, and could stop a save. `streams`: file descriptors."""
    poll = select.poll()
    for stream in streams:
        # The event mask is 0: errors and hang-ups are always reported.
        poll.register(stream, 0)
    for stream, events in poll.poll(1000 * within_s):
        if events & (select.POLLHUP | select.POLLERR):
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, stream)
            os.close(nowhere)


def without_working_directory(environment: Mapping[str, str]) -> dict[str, str]:
    """Return environment variables for a Python process that runs one of our modules with `-m`.

    Without these variables Python looks for modules in the working directory first, and a folder `shared`, `deploy` or
    `learner` there hides our package. In a clone of the repository, PYTHONPATH names the clone, because our packages
    may not be installed.
    """
    root = Path(__file__).resolve().parents[1]
    safe = {"PYTHONSAFEPATH": "1"}
    if not (root / "pyproject.toml").exists():
        return safe
    others = [path for path in environment.get("PYTHONPATH", "").split(os.pathsep) if path and path != str(root)]
    return safe | {"PYTHONPATH": os.pathsep.join([str(root), *others])}


def children(pid: int) -> set[int]:
    """Return the processes that a process has started and not yet reaped. Empty if the process is gone."""
    found: set[int] = set()
    for listed in Path(f"/proc/{pid}/task").glob("*/children"):
        with suppress(OSError):  # the thread has ended meanwhile
            found.update(map(int, listed.read_text().split()))
    return found


def descendants(pid: int) -> set[int]:
    """Return the children of a process, their children, and so on."""
    found = children(pid)
    return found.union(*map(descendants, found))


def exit_code(returncode: int) -> int:
    """Return a shell's exit code for a `Popen.returncode`: 128 + n if signal n ended the process."""
    return 128 - returncode if returncode < 0 else returncode


def describe(returncode: int) -> str:
    """Return how a process ended, in words."""
    if returncode >= 0:
        return f"ended with exit code {returncode}"
    return f"was ended by {signal.Signals(-returncode).name}"


def last_words(log: Path | None) -> str:
    """Return the end of what a program wrote to `log`: its own errors, or the last lines."""
    if log is None or not log.exists():
        return "(no log)"
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    # The program's own errors come first, because libraries may print other lines after them.
    lines = [line for line in lines if line.startswith("error")] or lines
    return " | ".join(lines[-_LAST_LINES:]) or "(empty log)"
