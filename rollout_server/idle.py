"""Let an idle worker on CPU give its core to others.

vLLM's workers, where they are processes of their own (several ranks), read their orders from shared memory and
busy-wait for a whole second after the last one. On a machine without a GPU that second belongs to whoever computes
next: in a loop of rollout, learn, sync it made learning 2.5 times slower on two cores. After `SPIN_S` without an order
the worker sleeps until vLLM's own notification wakes it.
Called at the import of `worker.py`, before vLLM makes the worker's queues.
"""

from __future__ import annotations

SPIN_S = 0.005  # longer than the engine's work between two decoding steps


def sleep_when_idle() -> None:
    """Shorten the busy-wait of queues that this process opens from now on; only where there is no GPU."""
    from vllm.distributed.device_communicators import shm_broadcast
    from vllm.platforms import current_platform

    waiting = getattr(shm_broadcast, "SpinCondition", None)
    if current_platform.is_cpu() and waiting is not None:
        waiting.__init__.__defaults__ = (SPIN_S,)
