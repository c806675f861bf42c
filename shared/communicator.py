"""One broadcast interface between a learner and the workers of a rollout server: gloo on CPU, PyNCCL on CUDA (R09).

In: tensors that every rank has allocated with the same size. Out: the source's bytes on every rank.

Invariants: ranks 0..n-2 are the server's workers, the last rank is the learner; rank 0 listens, on the address it was
configured with and on no other; the group lies outside every default process group; every operation has a deadline and
ends in a result, a CommunicatorError or a DeadlineError. A communicator that failed once has left its group.

`start_join` and `start_broadcast` give an `Operation` to poll, for callers that must not block; `join` and `broadcast`
wait for it. Called by rank 0 of the learner's sync, and by the server's worker extension.
"""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import errno
import socket
import threading
import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable
from datetime import timedelta
from typing import Any, Literal

import torch
import torch.distributed as dist

from shared.errors import CommunicatorError, DeadlineError, ProjectError
from shared.operation import Operation

Backend = Literal["gloo", "nccl"]

# torch's own timeouts know more about what is missing, so ours comes a little later.
_GRACE_S = 1.0
_POLL_S = 0.01
_LEAVE_PATIENCE_S = 5.0  # at the process's end, for groups that are being left
_ANSWER_S = 2.0  # rank 0 answers within some polls, if it is there
_PORT_PATIENCE_S = 10.0  # a group that was just left, on the same port, takes a moment to go


@dataclasses.dataclass(frozen=True, kw_only=True)
class Place:
    """Where a group meets, and who this process is in it."""

    host: str
    port: int
    rank: int
    world_size: int
    timeout_s: float  # for joining, and the default of every later operation
    device: torch.device

    def __str__(self) -> str:
        return f"group {self.host}:{self.port} as rank {self.rank} of {self.world_size}"


class Communicator(ABC):
    """A group that was joined. One operation at a time; only `abort` may be called from another thread."""

    def __init__(self, place: Place) -> None:
        self.place = place
        self._pending: Operation[None] | None = None

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
        """`broadcast`, to be polled. The one before must have ended: two at once could go in any order."""
        assert self._pending is None or self._pending.ended, f"{self._pending.what} is still under way"
        limit_s = self.place.timeout_s if timeout_s is None else timeout_s
        num_bytes = tensor.numel() * tensor.element_size()
        what = f"broadcasting {num_bytes} bytes from rank {src} of {self.world_size}"
        call = self._broadcast_call(tensor, src, limit_s)
        self._pending = Operation(lambda: _translated(what, call), limit_s + _GRACE_S, what, on_failure=self.abort)
        return self._pending

    def abort(self) -> None:
        """Break off what is pending and leave the group at once, without the others. May be called again."""
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.cancel(CommunicatorError(f"{pending.what} was broken off", remedy="sync again with a new group"))
        self._leave()

    def close(self) -> None:
        """Leave the group, with nothing pending. May be called again."""
        self._leave()

    @abstractmethod
    def _broadcast_call(self, tensor: torch.Tensor, src: int, timeout_s: float) -> Callable[[], None]:
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
) -> Communicator:
    """Meet the other ranks at `host:port` (rank 0 listens there) and return when all have joined.

    `timeout_s` bounds the joining and is the default of every later operation. `device` is where the tensors will be.
    Raises CommunicatorError where the address can't be used or a rank fails, DeadlineError where one does not come.
    """
    return start_join(backend, host, port, rank, world_size, timeout_s, device).result()


def start_join(
    backend: Backend,
    host: str,
    port: int,
    rank: int,
    world_size: int,
    timeout_s: float,
    device: torch.device | str = "cpu",
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
    place = Place(host=host, port=port, rank=rank, world_size=world_size, timeout_s=timeout_s, device=device)
    implementation = _Gloo if backend == "gloo" else _Nccl
    what = f"joining {backend} {place}"
    given_up = threading.Event()
    return Operation(
        lambda: _translated(what, lambda: implementation(place, _meet(place, given_up))),
        timeout_s + _GRACE_S,
        what,
        on_failure=given_up.set,
    )


class _Gloo(Communicator):
    def __init__(self, place: Place, store: dist.Store) -> None:
        super().__init__(place)
        options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._timeout = timedelta(seconds=place.timeout_s)
        options._devices = [dist.ProcessGroupGloo.create_device(hostname=_local_address(place))]
        self._group: Any = dist.ProcessGroupGloo(store, place.rank, place.world_size, options)

    def _broadcast_call(self, tensor: torch.Tensor, src: int, timeout_s: float) -> Callable[[], None]:
        group = _joined(self._group)
        options = dist.BroadcastOptions()
        options.rootRank = src
        options.timeout = timedelta(seconds=timeout_s)
        return lambda: group.broadcast([tensor], options).wait(timedelta(seconds=timeout_s))

    def _leave(self) -> None:
        group, self._group = self._group, None
        if group is not None:
            _in_background(group.abort)


class _Nccl(Communicator):
    def __init__(self, place: Place, store: dist.Store) -> None:
        super().__init__(place)
        # vLLM's binding, for it has no watchdog that ends the process when a peer dies, as torch's own group has.
        from vllm.distributed.device_communicators.pynccl import PyNcclCommunicator
        from vllm.distributed.utils import StatelessProcessGroup

        # Older versions have a field for the listening socket, which is the store's here.
        fields = {field.name for field in dataclasses.fields(StatelessProcessGroup)}
        extra: dict[str, Any] = {"socket": None} if "socket" in fields else {}
        group = StatelessProcessGroup(rank=place.rank, world_size=place.world_size, store=store, **extra)
        with torch.cuda.device(place.device):
            self._nccl: Any = PyNcclCommunicator(group, device=place.device)
        if self._nccl.disabled:
            raise CommunicatorError(
                "NCCL is not to be had", wanted="libnccl beside torch", remedy="install the CUDA build of torch"
            )

    def _broadcast_call(self, tensor: torch.Tensor, src: int, timeout_s: float) -> Callable[[], None]:
        nccl, device = _joined(self._nccl), self.device
        stream = torch.cuda.current_stream(device)  # of this thread: the one that runs the call has its own

        def call() -> None:
            with torch.cuda.device(device):
                nccl.broadcast(tensor, src, stream=stream)
                done = torch.cuda.Event()
                done.record(stream)
                done.synchronize()

        return call

    def _leave(self) -> None:
        nccl, self._nccl = self._nccl, None
        if nccl is not None:
            # Also ends kernels that wait for a peer. Through ctypes: the binding has a method for it in new versions.
            _in_background(lambda: nccl.nccl.lib.ncclCommAbort(nccl.comm))


def _joined(group: Any) -> Any:
    if group is None:
        raise CommunicatorError("the group was left before", remedy="join a new one")
    return group


def _meet(place: Place, given_up: threading.Event) -> dist.Store:
    """The group's key-value store, once all ranks are connected to it.

    What lies in it is unpickled by NCCL's binding: `host` must come from a configuration, never from a request.
    """
    deadline = time.monotonic() + place.timeout_s
    while True:
        listening = None
        if place.rank == 0:
            listening = _listen(place)
        else:
            _wait_for_listener(place, given_up)
        store = dist.TCPStore(
            host_name=place.host,
            port=place.port,
            world_size=place.world_size,
            is_master=place.rank == 0,
            timeout=timedelta(seconds=place.timeout_s),
            wait_for_workers=False,  # it would hold the port until the deadline, given up or not
            master_listen_fd=listening,
        )
        outcome = (_gather if place.rank == 0 else _be_seen)(store, place, deadline, given_up)
        if outcome is None:
            return dist.PrefixStore("group", store)
        del store  # a traceback that names it would keep the port
        if isinstance(outcome, ProjectError):
            raise outcome


# A port that was just left may still be answered by the old group's store. So rank 0 answers each rank's own nonce,
# seen/RANK = here/RANK, which nobody does in an old store. A rank that gets no answer connects again.


def _gather(store: dist.Store, place: Place, deadline: float, given_up: threading.Event) -> ProjectError | None:
    """Rank 0: answer the others until all of them have had their answer."""
    missing = list(range(1, place.world_size))
    while missing := [rank for rank in missing if not store.check([f"ready/{rank}"])]:
        for rank in missing:
            if store.check([f"here/{rank}"]):
                store.set(f"seen/{rank}", store.get(f"here/{rank}").decode())
        if given_up.wait(_POLL_S):
            return CommunicatorError(f"joining {place} was given up")
        if time.monotonic() > deadline:
            return _late(f"joining {place}", f"no sign of rank {', '.join(map(str, missing))}")
    store.set("complete", "1")
    return None


def _be_seen(
    store: dist.Store, place: Place, deadline: float, given_up: threading.Event
) -> ProjectError | Literal["connect again"] | None:
    """Another rank: make sure that rank 0 is there, then wait for the rest."""
    nonce, seen = uuid.uuid4().hex, False
    patience = min(deadline, time.monotonic() + _ANSWER_S)
    try:
        store.set(f"here/{place.rank}", nonce)
        while not (seen and store.check(["complete"])):
            if not seen and store.check([f"seen/{place.rank}"]) and store.get(f"seen/{place.rank}").decode() == nonce:
                store.set(f"ready/{place.rank}", "1")
                seen = True
            if given_up.wait(_POLL_S):
                return CommunicatorError(f"joining {place} was given up")
            if time.monotonic() > deadline:
                return _late(f"joining {place}", "rank 0 there, others missing" if seen else "no answer of rank 0")
            if not seen and time.monotonic() > patience:
                return "connect again"
    except RuntimeError:  # the old store went while we were connected to it
        if seen or time.monotonic() > deadline:
            raise
        return "connect again"
    return None


def _listen(place: Place) -> int:
    """A listening socket, which the store closes: one that torch opened would listen on every interface."""
    family = socket.getaddrinfo(place.host, place.port, type=socket.SOCK_STREAM)[0][0]
    patience = time.monotonic() + min(_PORT_PATIENCE_S, place.timeout_s)
    with socket.socket(family, socket.SOCK_STREAM) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        while True:
            try:
                listener.bind((place.host, place.port))
                break
            except OSError as error:
                if error.errno != errno.EADDRINUSE or time.monotonic() > patience:
                    raise
            time.sleep(_POLL_S)
        listener.listen()
        return listener.detach()


def _wait_for_listener(place: Place, given_up: threading.Event) -> None:
    """Here and not in torch, whose wait can't be given up, and aborts a process that ends meanwhile."""
    deadline = time.monotonic() + place.timeout_s
    while not given_up.wait(_POLL_S):
        with contextlib.suppress(ConnectionError, TimeoutError):
            socket.create_connection((place.host, place.port), timeout=1.0).close()
            return
        if time.monotonic() > deadline:
            raise _late(f"joining {place}", "nobody listening")
    raise CommunicatorError(f"joining {place} was given up")


def _local_address(place: Place) -> str:
    """The address of this machine at which the others, who can reach the meeting place, can reach this rank."""
    if place.rank == 0:
        return place.host
    family = socket.getaddrinfo(place.host, place.port, type=socket.SOCK_DGRAM)[0][0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect((place.host, place.port))  # datagram: nothing is sent, the kernel only picks the route
        return str(probe.getsockname()[0])


def _translated(what: str, call: Callable[[], Any]) -> Any:
    """`call()`, with torch's errors as ours."""
    try:
        return call()
    except ProjectError:
        raise
    except (RuntimeError, OSError, ValueError) as error:
        said = str(error).strip().split("\n")[0][:300]
        if "timed out" in said.lower() or "timeout" in said.lower():
            raise _late(what, said) from error
        raise CommunicatorError(
            f"{what} failed", found=said, wanted="all ranks alive and reachable", remedy="sync again with a new group"
        ) from error


def _late(what: str, found: str) -> DeadlineError:
    return DeadlineError(
        f"{what} did not end in time",
        found=found,
        wanted="all ranks there and alive within the deadline",
        remedy="look for a process that died or can't be reached, or raise the timeout",
    )


def _in_background(call: Callable[[], object]) -> None:
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
