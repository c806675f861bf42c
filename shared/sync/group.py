"""Broadcasts from a learner to the workers of rollout servers: gloo on CPU, NCCL between GPUs (R09).

In: tensors that every rank has allocated with the same size. Out: the source's bytes on every rank.

Invariants: ranks 0..n-2 are servers' workers, the last rank is the learner; rank 0 listens, on the address that it was
configured with and on no other; the group lies outside every default process group; every operation has a deadline and
ends in a result, a CommunicatorError or a DeadlineError. After its first failure a communicator has left its group.

`start_join` and `start_broadcast` do not block: they return an `Operation` to poll or to wait for. Several broadcasts
may be under way; they run one after the other, in the order in which they were started.

NCCL is called through vLLM's binding, because torch's own group has a watchdog that ends the process when a peer dies.
Broadcasts run on a stream of the group's own, so several groups of one process send at once, and nothing else on the
device waits for a peer. NCCL is only called on threads that can be abandoned. A group never spans two ranks on one GPU.
"""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any, Literal

import torch
import torch.distributed as dist

from shared.errors import CommunicatorError, ProjectError
from shared.sync.calls import Operation
from shared.sync.meeting import Membership, late, local_address, meet

Backend = Literal["gloo", "nccl"]
Broadcast = Callable[[Callable[[], None]], None]  # blocking; calls its argument once the next one may begin

# torch's own timeouts know more about what is missing, so ours comes a little later.
_GRACE_S = 1.0
_LEAVE_PATIENCE_S = 5.0  # at the process's end, for groups that are being left


class Communicator(ABC):
    """A group that was joined. Operations are started from one thread; `abort` may be called from any."""

    def __init__(self, member: Membership) -> None:
        self.rank, self.world_size, self.device = member.rank, member.world_size, member.device
        self._timeout_s = member.timeout_s
        self._pending: list[Operation[None]] = []
        self._issued = threading.Event()  # the last broadcast that was started is in its place in the group's order
        self._issued.set()
        self._aborted = False

    def broadcast(self, tensor: torch.Tensor, src: int, timeout_s: float | None = None) -> None:
        """Fill `tensor` (contiguous, on `device`) with rank `src`'s; returns when the bytes are there.

        Raises CommunicatorError or DeadlineError; the group has been left then.
        """
        self.start_broadcast(tensor, src, timeout_s).result()

    def start_broadcast(self, tensor: torch.Tensor, src: int, timeout_s: float | None = None) -> Operation[None]:
        """`broadcast`, to be polled. What is sent is `tensor` after all work that this thread has given the device."""
        limit_s = self._timeout_s if timeout_s is None else timeout_s
        what = f"broadcasting {tensor.nbytes} bytes from rank {src} of {self.world_size}"
        broadcast = self._prepare(tensor, src, limit_s)
        before, issued = self._issued, threading.Event()
        self._issued = issued

        def in_turn() -> None:
            with _torchs_errors_as_ours(what):
                try:
                    before.wait(limit_s)
                    broadcast(issued.set)
                finally:
                    issued.set()

        operation = Operation(in_turn, limit_s + _GRACE_S, what, on_failure=self.abort)
        self._pending = [other for other in self._pending if not other.future.done()] + [operation]
        if self._aborted:  # before, or on another thread just now, which may have missed this one
            self.abort()
        return operation

    def abort(self) -> None:
        """End what is pending and leave the group at once, without the others. May be called again."""
        self._aborted = True
        pending, self._pending = self._pending, []
        for operation in pending:
            what = f"{operation.what} was broken off: the group was left"
            operation.cancel(CommunicatorError(what, remedy="sync again with a new group"))
        self.close()

    @abstractmethod
    def close(self) -> None:
        """Leave the group, with nothing pending. May be called again."""

    @abstractmethod
    def _prepare(self, tensor: torch.Tensor, src: int, timeout_s: float) -> Broadcast:
        """The blocking broadcast, for another thread to run. It raises CommunicatorError if the group was left."""


def start_join(
    backend: Backend,
    host: str,
    port: int,
    rank: int,
    world_size: int,
    timeout_s: float,
    device: torch.device | str = "cpu",
    *,
    group: str,
) -> Operation[Communicator]:
    """Meet the other ranks at `host:port` (rank 0 listens there); ends when all have joined. The arguments are the
    fields of `Membership`. Once it was cancelled, rank 0 stops listening within a moment.

    Raises CommunicatorError if the backend can't serve this device. The operation ends in CommunicatorError if the
    address can't be used or a rank fails, in DeadlineError if a rank does not come.
    """
    device = torch.device(device)
    if device.type != {"gloo": "cpu", "nccl": "cuda"}[backend]:
        raise CommunicatorError(
            f"{backend} can't send tensors on {device.type}",
            found=f"{backend} with {device}",
            wanted="gloo with cpu, nccl with cuda",
            remedy="let both sides use the same kind of device",
        )
    member = Membership(
        host=host, port=port, rank=rank, world_size=world_size, timeout_s=timeout_s, device=device, group=group
    )
    what = f"joining {backend} {member}"
    given_up = threading.Event()

    def join() -> Communicator:
        with _torchs_errors_as_ours(what):
            joined = (_Gloo if backend == "gloo" else _Nccl)(member, meet(member, given_up))
        if given_up.is_set():  # nobody is there to close it
            joined.abort()
        return joined

    return Operation(join, timeout_s + _GRACE_S, what, on_failure=given_up.set)


class _Gloo(Communicator):
    def __init__(self, member: Membership, store: dist.Store) -> None:
        super().__init__(member)
        options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._timeout = timedelta(seconds=member.timeout_s)
        options._devices = [dist.ProcessGroupGloo.create_device(hostname=local_address(member))]
        self._group: Any = dist.ProcessGroupGloo(store, member.rank, member.world_size, options)

    def close(self) -> None:
        held, self._group = [self._group], None
        if held != [None]:
            # The thread must hold the last reference: the group's destructor waits for a broadcast that was issued
            # after the abort, up to its timeout, and would make whoever leaves wait.
            _in_background(lambda: held.pop().abort())

    def _prepare(self, tensor: torch.Tensor, src: int, timeout_s: float) -> Broadcast:
        options = dist.BroadcastOptions()
        options.rootRank = src
        options.timeout = timedelta(seconds=timeout_s)

        def broadcast(issued: Callable[[], None]) -> None:
            _joined(self._group).broadcast([tensor], options).wait(options.timeout)

        return broadcast


class _Nccl(Communicator):
    def __init__(self, member: Membership, store: dist.Store) -> None:
        super().__init__(member)
        from vllm.distributed.device_communicators.pynccl import PyNcclCommunicator
        from vllm.distributed.utils import StatelessProcessGroup

        _refuse_shared_gpus(member, store)
        # Older versions have a field for the listening socket, which is the store's here.
        fields = {field.name for field in dataclasses.fields(StatelessProcessGroup)}
        extra: dict[str, Any] = {"socket": None} if "socket" in fields else {}
        group = StatelessProcessGroup(rank=member.rank, world_size=member.world_size, store=store, **extra)
        with torch.cuda.device(member.device):
            self._nccl: Any = PyNcclCommunicator(group, device=member.device)
            self._stream = torch.cuda.Stream(member.device)
        if self._nccl.disabled:
            raise CommunicatorError(
                "NCCL is not available", wanted="libnccl beside torch", remedy="install the CUDA build of torch"
            )

    def close(self) -> None:
        nccl, self._nccl = self._nccl, None
        if nccl is not None:
            # Also ends kernels that wait for a peer. Through ctypes: only new versions of the binding have a method.
            _in_background(lambda: nccl.nccl.lib.ncclCommAbort(nccl.comm))

    def _prepare(self, tensor: torch.Tensor, src: int, timeout_s: float) -> Broadcast:
        device, stream = self.device, self._stream
        ready = torch.cuda.Event()
        ready.record(torch.cuda.current_stream(device))

        def broadcast(issued: Callable[[], None]) -> None:
            with torch.cuda.device(device):
                stream.wait_event(ready)
                _joined(self._nccl).broadcast(tensor, src, stream=stream)
                done = torch.cuda.Event()
                done.record(stream)
                issued()
                done.synchronize()

        return broadcast


def _refuse_shared_gpus(member: Membership, store: dist.Store) -> None:
    """NCCL would say no more than "invalid usage"."""
    store.set(f"gpu/{member.rank}", str(torch.cuda.get_device_properties(member.device).uuid))
    gpus = [store.get(f"gpu/{rank}").decode() for rank in range(member.world_size)]
    for rank, gpu in enumerate(gpus):
        if gpu in gpus[:rank]:
            raise CommunicatorError(
                "learner and rollout server are on one GPU",
                found=f"ranks {gpus.index(gpu)} and {rank} of {member.world_size} on GPU {gpu} (the last rank is the "
                "learner)",
                wanted="a GPU of its own for every worker and for rank 0 of the learner",
                remedy="set CUDA_VISIBLE_DEVICES of both programs to different devices, or use vllm.mode: colocate",
            )


def _joined(group: Any) -> Any:
    """`group`, or CommunicatorError if it was left."""
    if group is None:
        raise CommunicatorError("the group was left before", remedy="join a new one")
    return group


@contextlib.contextmanager
def _torchs_errors_as_ours(what: str) -> Iterator[None]:
    try:
        yield
    except ProjectError:
        raise
    except (RuntimeError, OSError, ValueError) as error:
        said = str(error).strip().split("\n")[0][:300]
        if "timed out" in said.lower() or "timeout" in said.lower():
            raise late(what, said) from error
        raise CommunicatorError(
            f"{what} failed", found=said, wanted="all ranks alive and reachable", remedy="sync again with a new group"
        ) from error


_leaving: list[threading.Thread] = []


def _in_background(call: Callable[[], object]) -> None:
    """Leaving must not wait for a peer either; its errors no longer matter to anyone."""

    def target() -> None:
        with contextlib.suppress(RuntimeError):
            call()

    thread = threading.Thread(target=target, name="leaving a group", daemon=True)
    thread.start()
    _leaving.append(thread)
    _leaving[:] = [other for other in _leaving if other.is_alive()]


@atexit.register
def _let_them_leave() -> None:
    """A thread inside torch or NCCL when the interpreter ends would abort the process (SIGABRT, after a good run)."""
    deadline = time.monotonic() + _LEAVE_PATIENCE_S
    for thread in _leaving:
        thread.join(max(0.0, deadline - time.monotonic()))
