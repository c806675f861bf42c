"""The engine's processes: when idle they use no core, and they never outlive the server (Linux).

`sleep_when_idle`: vLLM's workers in separate processes (several ranks) read commands from shared memory, and busy-wait
for a second after each command. With `sleep_when_idle` a worker sleeps after `SPIN_S` without a command, until vLLM's
notification wakes it.

`end_with_server`: each worker watches the server. When the server has ended, even by SIGKILL, the worker ends all of
the server's descendants: engine cores, the data-parallel coordinator, other workers, and itself.

`cpu_seconds` distinguishes a busy engine from a stopped one.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import threading
from collections.abc import Iterable
from pathlib import Path

from shared.processes import descendants

SPIN_S = 0.005  # seconds of busy-waiting before a worker sleeps; the gap between two decoding steps is shorter


def sleep_when_idle() -> None:
    """Shorten the busy-wait of queues that this process opens from now on, if there is no GPU. Call `sleep_when_idle`
    before vLLM makes the worker's queues."""
    from vllm.distributed.device_communicators import shm_broadcast
    from vllm.platforms import current_platform

    waiting = getattr(shm_broadcast, "SpinCondition", None)
    # Without a GPU the learner needs these cores: busy-waiting made learning 2.5 times slower on two cores.
    if current_platform.is_cpu() and waiting is not None:
        # vLLM passes no spin time when it makes its queues, so the default is changed.
        waiting.__init__.__defaults__ = (SPIN_S,)


# Environment variable with the server's process id: vLLM offers no other way to pass a value to its processes.
SERVER_PID_VARIABLE = "ROLLOUT_SERVER_PID"
_LOOK_EVERY_S = 2.0


def end_with_server() -> None:
    """Start the thread that watches the server. Does nothing without a server (SERVER_PID_VARIABLE is not set)."""
    server_pid = os.environ.get(SERVER_PID_VARIABLE)
    # vLLM's processes notice a dead parent late or never.
    if server_pid is not None:
        threading.Thread(target=_watch, args=(int(server_pid),), name="watching the server", daemon=True).start()


def cpu_seconds(pids: Iterable[int]) -> dict[int, float]:
    """Return the seconds of CPU time that each of these processes has used so far. Ended children are counted too,
    because an engine that waits for its compiler is busy. Returns {} if a process is stopped (SIGSTOP, a debugger).
    Processes that have ended are left out."""
    used, named = {}, set(pids)
    for pid in named:
        with contextlib.suppress(OSError):  # the process has ended
            state, seconds = _stat(pid)
            if state in "Tt":
                return {}
            used[pid] = seconds + sum(map(_seconds_of_child, descendants(pid) - named))
    return used


def _seconds_of_child(pid: int) -> float:
    try:
        return _stat(pid)[1]
    except OSError:  # the child has just ended, so its CPU time is already counted in its parent's
        return 0.0


def _stat(pid: int) -> tuple[str, float]:
    """Return a process's state, and the seconds of CPU time of the process and its ended children. Raises OSError if
    the process is gone."""
    state, *fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    # Fields 10 to 13 are user and system time, of the process and of its ended children.
    return state, sum(map(int, fields[10:14])) / os.sysconf("SC_CLK_TCK")


def _watch(server_pid: int) -> None:
    # If the parent has ended, process 1 is the parent now. Process 1 must not be killed.
    family = {os.getppid(), os.getpid()} - {1, server_pid}
    with contextlib.suppress(ProcessLookupError):  # the server has already ended.
        # A descriptor always means the same process, while a process id may be reused.
        server = os.pidfd_open(server_pid)
        # `select` returns the descriptor once the server has ended. The server's children cannot be listed after its
        # end.
        family |= descendants(server_pid)
        while not select.select([server], [], [], _LOOK_EVERY_S)[0]:
            family = descendants(server_pid)
    for pid in sorted(family, key=lambda pid: pid == os.getpid()):  # this process last
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
