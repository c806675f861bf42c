"""One broadcast interface between a learner and the workers of rollout servers: gloo on CPU, PyNCCL on CUDA (R09).

In: tensors that every rank has allocated with the same size. Out: the source's bytes on every rank.

Invariants: ranks 0..n-2 are servers' workers, the last rank is the learner; rank 0 listens, on the address it was
configured with and on no other; the group lies outside every default process group; every operation has a deadline and
ends in a result, a CommunicatorError or a DeadlineError. A communicator that failed once has left its group.

`start_join` and `start_broadcast` give an `Operation` to poll, for callers that must not block; `join` and `broadcast`
wait for it. Several broadcasts may be under way: they go one after the other, in the order in which they were started.
Called by rank 0 of the learner's sync, and by the server's worker extension.

A group over NCCL, between GPUs, through vLLM's binding (R09).

The binding, for torch's own group has a watchdog that ends the process when a peer dies. Invariants: broadcasts run on
a stream of the group's own, so that several groups of one process send at once and nothing else of the device waits
for a peer; NCCL is only called on threads that can be abandoned; a group never spans two ranks on one GPU. Made by
`communicator.py`.
"""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from datetime import timedelta
from typing import Any, Literal

import torch
import torch.distributed as dist

from shared.errors import CommunicatorError, ProjectError
from shared.sync.calls import Operation
from shared.sync.meeting import Place, late, local_address, meet

Backend = Literal["gloo", "nccl"]
Broadcast = Callable[[Callable[[], None]], None]  # blocking; calls its argument once the next one may begin

# torch's own timeouts know more about what is missing, so ours comes a little later.
_GRACE_S = 1.0
_WATCH_S = 0.25
_LEAVE_PATIENCE_S = 5.0  # at the process's end, for groups that are being left


class Communicator(ABC):
    """A group that was joined. Operations are started from one thread; `abort` may be called from any."""

    def __init__(self, place: Place) -> None:
        self.place = place
        self._pending: list[Operation[None]] = []
        self._issued = threading.Event()  # the last broadcast that was started is in its place in the group's order
        self._issued.set()
        self._left = threading.Event()
        threading.Thread(target=self._watch, name="watching broadcasts", daemon=True).start()

    @property
    def rank(self) -> int:
        return self.place.rank

    @property
    def world_size(self) -> int:
        return self.place.world_size

    @property
    def device(self) -> torch.device:
        return self.place.device

    def broadcast(self, tensor: torch.Tensor, src: int, timeout_s: float | None = None) -> None:
        """Fill `tensor` (contiguous, on `device`) with rank `src`'s; returns when the bytes are there.

        Raises CommunicatorError or DeadlineError; the group has been left then.
        """
        self.start_broadcast(tensor, src, timeout_s).result()

    def start_broadcast(self, tensor: torch.Tensor, src: int, timeout_s: float | None = None) -> Operation[None]:
        """`broadcast`, to be polled. Of `tensor` as the work that this thread has given the device leaves it."""
        limit_s = self.place.timeout_s if timeout_s is None else timeout_s
        num_bytes = tensor.numel() * tensor.element_size()
        what = f"broadcasting {num_bytes} bytes from rank {src} of {self.world_size}"
        call = self._broadcast_call(tensor, src, limit_s)
        before, issued = self._issued, threading.Event()
        self._issued = issued

        def in_turn() -> None:
            try:
                before.wait(limit_s)
                call(issued.set)
            finally:
                issued.set()

        operation = Operation(lambda: _translated(what, in_turn), limit_s + _GRACE_S, what, on_failure=self.abort)
        self._pending = [other for other in self._pending if not other.ended] + [operation]
        return operation

    def abort(self) -> None:
        """Break off what is pending and leave the group at once, without the others. May be called again."""
        pending, self._pending = self._pending, []
        for operation in pending:
            operation.cancel(
                CommunicatorError(f"{operation.what} was broken off", remedy="sync again with a new group")
            )
        self.close()

    def close(self) -> None:
        """Leave the group, with nothing pending. May be called again."""
        self._left.set()
        self._leave()

    def _watch(self) -> None:
        """End what is overdue, also when nobody polls: on CUDA the caller may itself wait for the device (to allocate
        memory, say), which a broadcast without its peer holds up."""
        while not self._left.wait(_WATCH_S):
            overdue = [operation for operation in self._pending if operation.overdue]
            for operation in overdue:
                operation.cancel(operation.late())
            if overdue:
                self.abort()

    @abstractmethod
    def _broadcast_call(self, tensor: torch.Tensor, src: int, timeout_s: float) -> Broadcast:
        """The blocking broadcast, for another thread to run. Raises CommunicatorError where the group was left."""

    @abstractmethod
    def _leave(self) -> None: ...


def join(
    backend: Backend,
    host: str,
    port: int,
    rank: int,
    world_size: int,
    timeout_s: float,
    device: torch.device | str = "cpu",
    *,
    group: str,
) -> Communicator:
    """Meet the other ranks at `host:port` (rank 0 listens there) and return when all have joined.

    `timeout_s` bounds the joining and is the default of every later operation. `device` is where the tensors will be.
    `group`: a name that no other group at this address has, old ones that are being left included.
    Raises CommunicatorError where the address can't be used or a rank fails, DeadlineError where one does not come.
    """
    return start_join(backend, host, port, rank, world_size, timeout_s, device, group=group).result()


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
    """`join`, to be polled. Once it was cancelled, rank 0 stops listening within a moment."""
    device = torch.device(device)
    if device.type != {"gloo": "cpu", "nccl": "cuda"}[backend]:
        raise CommunicatorError(
            f"{backend} can't send tensors on {device.type}",
            found=f"{backend} with {device}",
            wanted="gloo with cpu, nccl with cuda",
            remedy="let both sides use the same kind of device",
        )
    place = Place(
        host=host, port=port, rank=rank, world_size=world_size, timeout_s=timeout_s, device=device, group=group
    )
    implementation = _Gloo if backend == "gloo" else _nccl()
    what = f"joining {backend} {place}"
    given_up = threading.Event()
    return Operation(
        lambda: _translated(what, lambda: implementation(place, meet(place, given_up))),
        timeout_s + _GRACE_S,
        what,
        on_failure=given_up.set,
    )


def _nccl() -> Callable[[Place, dist.Store], Communicator]:

    return NcclCommunicator


class _Gloo(Communicator):
    def __init__(self, place: Place, store: dist.Store) -> None:
        super().__init__(place)
        options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._timeout = timedelta(seconds=place.timeout_s)
        options._devices = [dist.ProcessGroupGloo.create_device(hostname=local_address(place))]
        self._group: Any = dist.ProcessGroupGloo(store, place.rank, place.world_size, options)

    def _broadcast_call(self, tensor: torch.Tensor, src: int, timeout_s: float) -> Broadcast:
        options = dist.BroadcastOptions()
        options.rootRank = src
        options.timeout = timedelta(seconds=timeout_s)

        def call(issued: Callable[[], None]) -> None:
            joined(self._group).broadcast([tensor], options).wait(timedelta(seconds=timeout_s))

        return call

    def _leave(self) -> None:
        group, self._group = self._group, None
        if group is not None:
            in_background(group.abort)


def joined(group: Any) -> Any:
    """`group`, or CommunicatorError where it was left."""
    if group is None:
        raise CommunicatorError("the group was left before", remedy="join a new one")
    return group


def _translated(what: str, call: Callable[[], Any]) -> Any:
    """`call()`, with torch's errors as ours."""
    try:
        return call()
    except ProjectError:
        raise
    except (RuntimeError, OSError, ValueError) as error:
        said = str(error).strip().split("\n")[0][:300]
        if "timed out" in said.lower() or "timeout" in said.lower():
            raise late(what, said) from error
        raise CommunicatorError(
            f"{what} failed", found=said, wanted="all ranks alive and reachable", remedy="sync again with a new group"
        ) from error


def in_background(call: Callable[[], object]) -> None:
    """Leaving must not wait for a peer either; what it says no longer matters to anyone."""

    def target() -> None:
        with contextlib.suppress(RuntimeError):
            call()

    thread = threading.Thread(target=target, name="leaving a group", daemon=True)
    thread.start()
    _leaving.append(thread)
    _leaving[:] = [other for other in _leaving if other.is_alive()]


_leaving: list[threading.Thread] = []


@atexit.register
def _let_them_leave() -> None:
    """A thread inside torch or NCCL when the interpreter goes would abort the process (SIGABRT, after a good run)."""
    deadline = time.monotonic() + _LEAVE_PATIENCE_S
    for thread in _leaving:
        thread.join(max(0.0, deadline - time.monotonic()))


class NcclCommunicator(Communicator):
    def __init__(self, place: Place, store: dist.Store) -> None:
        super().__init__(place)
        from vllm.distributed.device_communicators.pynccl import PyNcclCommunicator
        from vllm.distributed.utils import StatelessProcessGroup

        _refuse_shared_gpus(place, store)
        # Older versions have a field for the listening socket, which is the store's here.
        fields = {field.name for field in dataclasses.fields(StatelessProcessGroup)}
        extra: dict[str, Any] = {"socket": None} if "socket" in fields else {}
        group = StatelessProcessGroup(rank=place.rank, world_size=place.world_size, store=store, **extra)
        with torch.cuda.device(place.device):
            self._nccl: Any = PyNcclCommunicator(group, device=place.device)
            self._stream = torch.cuda.Stream(place.device)
        if self._nccl.disabled:
            raise CommunicatorError(
                "NCCL is not to be had", wanted="libnccl beside torch", remedy="install the CUDA build of torch"
            )

    def _broadcast_call(self, tensor: torch.Tensor, src: int, timeout_s: float) -> Broadcast:
        joined(self._nccl)
        device, stream = self.device, self._stream
        ready = torch.cuda.Event()
        ready.record(torch.cuda.current_stream(device))

        def call(issued: Callable[[], None]) -> None:
            with torch.cuda.device(device):
                stream.wait_event(ready)
                joined(self._nccl).broadcast(tensor, src, stream=stream)
                done = torch.cuda.Event()
                done.record(stream)
                issued()
                done.synchronize()

        return call

    def _leave(self) -> None:
        nccl, self._nccl = self._nccl, None
        if nccl is not None:
            # Also ends kernels that wait for a peer. Through ctypes: the binding has a method for it in new versions.
            in_background(lambda: nccl.nccl.lib.ncclCommAbort(nccl.comm))


def _refuse_shared_gpus(place: Place, store: dist.Store) -> None:
    """NCCL would say no more than "invalid usage"."""
    store.set(f"gpu/{place.rank}", str(torch.cuda.get_device_properties(place.device).uuid))
    gpus = [store.get(f"gpu/{rank}").decode() for rank in range(place.world_size)]
    for rank, gpu in enumerate(gpus):
        if gpu in gpus[:rank]:
            raise CommunicatorError(
                "learner and rollout server are on one GPU",
                found=f"ranks {gpus.index(gpu)} and {rank} of {place.world_size} on GPU {gpu} (the last rank is the "
                "learner)",
                wanted="a GPU of its own for every worker and for rank 0 of the learner",
                remedy="set CUDA_VISIBLE_DEVICES of both programs to different devices, or use vllm.mode: colocate",
            )
