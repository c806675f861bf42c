"""No process of the engine outlives the server, not even when it is killed with SIGKILL (Linux).

vLLM's processes notice a dead parent late or never. So each worker watches the server and, when it has gone, ends all
that descended from it: the engine cores, the data-parallel coordinator, the other workers, itself. Called by
`worker.py`; `__main__.py` sets the variable.

Let an idle worker on CPU give its core to others.

vLLM's workers, where they are processes of their own (several ranks), read their orders from shared memory and
busy-wait for a whole second after the last one. On a machine without a GPU that second belongs to whoever computes
next: in a loop of rollout, learn, sync it made learning 2.5 times slower on two cores. After `SPIN_S` without an order
the worker sleeps until vLLM's own notification wakes it.
Called at the import of `worker.py`, before vLLM makes the worker's queues.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import threading
from pathlib import Path

SPIN_S = 0.005  # longer than the engine's work between two decoding steps


def sleep_when_idle() -> None:
    """Shorten the busy-wait of queues that this process opens from now on; only where there is no GPU."""
    from vllm.distributed.device_communicators import shm_broadcast
    from vllm.platforms import current_platform

    waiting = getattr(shm_broadcast, "SpinCondition", None)
    if current_platform.is_cpu() and waiting is not None:
        waiting.__init__.__defaults__ = (SPIN_S,)


# How a process that vLLM starts learns whom it belongs to: by inheritance, for vLLM's start-up hands nothing on.
SERVER_PID_VARIABLE = "ROLLOUT_SERVER_PID"
_LOOK_EVERY_S = 2.0


def end_with_server() -> None:
    """Watch from now on, on a thread. Nothing where the variable is not set: this process is no server's then."""
    server_pid = os.environ.get(SERVER_PID_VARIABLE)
    if server_pid is not None:
        threading.Thread(target=_watch, args=(int(server_pid),), name="watching the server", daemon=True).start()


def descendants(pid: int) -> set[int]:
    """Children of a process, theirs, and so on."""
    found: set[int] = set()
    for children in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(OSError):  # the thread has ended meanwhile
            for child in map(int, children.read_text().split()):
                found |= {child, *descendants(child)}
    return found


def _watch(server_pid: int) -> None:
    family = {os.getppid(), os.getpid()} - {1, server_pid}
    with contextlib.suppress(ProcessLookupError):  # gone already
        server = os.pidfd_open(server_pid)
        # Readable once the process has ended; who its children were can't be asked any more then.
        family |= descendants(server_pid)
        while not select.select([server], [], [], _LOOK_EVERY_S)[0]:
            family = descendants(server_pid)
    for pid in sorted(family, key=lambda pid: pid == os.getpid()):  # itself last
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
