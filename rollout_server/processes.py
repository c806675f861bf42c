"""How the engine's processes behave: they give their core to others when idle, and never outlive the server (Linux).

`sleep_when_idle`: vLLM's workers, if they are processes of their own (several ranks), read orders from shared memory
and busy-wait for a whole second after the last one. Without a GPU, others need that second: in a loop of rollout,
learn, sync the wait made learning 2.5 times slower on two cores. Now the worker sleeps after `SPIN_S` without an order,
until vLLM's own notification wakes it.

`end_with_server`, the orphan guard: vLLM's processes notice a dead parent late or never. So each worker watches the
server. When the server is gone, even by SIGKILL, the worker ends everything that descended from it: engine cores, the
data-parallel coordinator, other workers, itself.

`give_memory_back`: glibc keeps freed memory below a block that is still in use. Images of many sizes come and go, so
without this a worker without a GPU grows with the number of requests.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import os
import select
import signal
import threading
from pathlib import Path

_libc = ctypes.CDLL(None)
SPIN_S = 0.005  # longer than the engine's work between two decoding steps


def sleep_when_idle() -> None:
    """Shorten the busy-wait of queues that this process opens from now on, if there is no GPU. Call it before vLLM
    makes the worker's queues."""
    from vllm.distributed.device_communicators import shm_broadcast
    from vllm.platforms import current_platform

    waiting = getattr(shm_broadcast, "SpinCondition", None)
    if current_platform.is_cpu() and waiting is not None:
        waiting.__init__.__defaults__ = (SPIN_S,)


# Tells a process that vLLM starts whose it is. By inheritance, because vLLM's start-up hands nothing on.
SERVER_PID_VARIABLE = "ROLLOUT_SERVER_PID"
_LOOK_EVERY_S = 2.0
_GIVE_BACK_EVERY = 5  # looks


def end_with_server() -> None:
    """Watch from now on, on a thread. Does nothing if the variable is not set: there is no server then."""
    server_pid = os.environ.get(SERVER_PID_VARIABLE)
    if server_pid is not None:
        threading.Thread(target=_watch, args=(int(server_pid),), name="watching the server", daemon=True).start()


def descendants(pid: int) -> set[int]:
    """Children of a process, their children, and so on."""
    found: set[int] = set()
    for children in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(OSError):  # the thread has ended
            for child in map(int, children.read_text().split()):
                found |= {child, *descendants(child)}
    return found


def give_memory_back() -> None:
    """Freed memory goes back to the kernel (glibc; other allocators do as they like)."""
    trim = getattr(_libc, "malloc_trim", None)
    if trim is not None:
        trim(0)


def _watch(server_pid: int) -> None:
    family = {os.getppid(), os.getpid()} - {1, server_pid}
    with contextlib.suppress(ProcessLookupError):  # gone already
        server = os.pidfd_open(server_pid)
        # Readable once the process has ended. Its children cannot be asked for after that.
        family |= descendants(server_pid)
        for look in itertools.count(1):
            if select.select([server], [], [], _LOOK_EVERY_S)[0]:
                break
            family = descendants(server_pid)
            if look % _GIVE_BACK_EVERY == 0:
                give_memory_back()
    for pid in sorted(family, key=lambda pid: pid == os.getpid()):  # itself last
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
