"""Broadcasts from a learner to the workers of rollout servers: TCP on CPU, NCCL between GPUs (R09, R42).

In: tensors that every rank has allocated with the same size. Out: every rank has the bytes of the rank that broadcasts
(the source).

Invariants: ranks 0..n-2 are servers' workers, and the last rank is the learner. All ranks connect to rank 0, and must
know the group's secret (`meeting.py`). No byte from a socket is unpickled. Every operation has a deadline, and ends in
a result, a CommunicatorError or a DeadlineError. After its first failure a communicator has left its group.

`start_join` and `start_broadcast` do not block: they return an `Operation` to poll or to wait for. Several broadcasts
may run at the same time: the group's thread runs them in the order in which they were started. The thread ends when the
group is left.

On CPU the bytes go through the connections that `meeting.py` has made: rank 0 forwards the source's bytes to all other
ranks. Each message starts with its size, and a tensor of another size is refused.

NCCL is called through vLLM's binding. The meeting exchanges NCCL's unique id. Broadcasts run on a separate CUDA stream
per group. NCCL is only called on daemon threads.

Two ranks may share a GPU only with `allow_shared_gpu`. NCCL refuses two ranks with the same host and device, so each
gets a different `NCCL_HOSTID`. NCCL then connects them by sockets, at a few GB/s.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import logging
import os
import socket
import struct
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Literal, TypeVar

import torch

from shared.errors import CommunicatorError, ProjectError
from shared.sync.buckets import seal_key
from shared.sync.calls import Begin, Operation, Sender
from shared.sync.meeting import Seat, late, meet
from shared.waits import Deadline

if TYPE_CHECKING:
    from vllm.distributed.device_communicators.pynccl import PyNcclCommunicator
    from vllm.distributed.utils import StatelessProcessGroup

log = logging.getLogger(__name__)
G = TypeVar("G")
SHARED_GPU_KEY = "custom.extra.rollout_matching.vllm.server.allow_shared_gpu"
Backend = Literal["tcp", "nccl"]

_HOST_ID = "rollout-matching-"  # prefix of the `NCCL_HOSTID` of a process on a shared GPU

# The operation's deadline is this much later than the blocked call's own timeout, whose error says more.
_GRACE_S = 1.0
_LEAVE_PATIENCE_S = 5.0  # longest wait at the process's end for groups that are being left


class Communicator(ABC):
    """A group that this process has joined. Start operations from one thread; `abort` may be called from any thread."""

    def __init__(self, member: Seat) -> None:
        self.rank, self.world_size, self.device = member.rank, member.world_size, member.device
        self.seal_key = seal_key(member.secret)
        self._timeout_s = member.timeout_s
        self._pending: list[Operation[None]] = []
        self._sender = Sender(f"broadcasting, rank {self.rank} of {self.world_size}")
        self._aborted = False

    def broadcast(self, tensor: torch.Tensor, src: int, timeout_s: float | None = None) -> None:
        """Fill `tensor` (contiguous, on `device`) with rank `src`'s tensor; returns when the bytes have arrived.

        Raises CommunicatorError or DeadlineError. After an error the group has been left.
        """
        self.start_broadcast(tensor, src, timeout_s).result()

    def start_broadcast(self, tensor: torch.Tensor, src: int, timeout_s: float | None = None) -> Operation[None]:
        """Start `broadcast` without waiting. Work that this thread queued on the device earlier runs before it."""
        limit_s = self._timeout_s if timeout_s is None else timeout_s
        what = f"broadcasting {tensor.nbytes} bytes from rank {src} of {self.world_size}"
        operation: Operation[None] = Operation(None, limit_s + _GRACE_S, what, on_failure=self.abort)
        self._pending = [other for other in self._pending if not other.future.done()] + [operation]
        if not self._sender.put(operation, _named(self._prepare(tensor, src, limit_s), what)):
            operation.cancel(_left())
        # `abort` may have run on another thread meanwhile, and missed this operation.
        if self._aborted:
            self.abort()
        return operation

    def abort(self) -> None:
        """Cancel pending operations and leave the group at once, without the other ranks. May be called again."""
        self._aborted = True
        pending, self._pending = self._pending, []
        for operation in pending:
            what = f"{operation.what} was broken off: the group was left"
            operation.cancel(CommunicatorError(what, remedy="sync again with a new group"))
        self.close()

    def close(self) -> None:
        """Leave the group; no operation may be pending. May be called again."""
        self._sender.close()
        self._leave()

    @abstractmethod
    def _leave(self) -> None:
        """Close this rank's connections to the others. May be called again."""

    @abstractmethod
    def _prepare(self, tensor: torch.Tensor, src: int, timeout_s: float) -> Begin:
        """Return a function that broadcasts, to be called on the sender's thread. The function raises CommunicatorError
        if the group was left."""


def start_join(
    backend: Backend,
    host: str,
    port: int,
    rank: int,
    world_size: int,
    timeout_s: float,
    device: torch.device | str = "cpu",
    *,
    secret: bytes,
    allow_shared_gpu: bool = False,
) -> Operation[Communicator]:
    """Start to join a group at `host:port`, where rank 0 listens; the operation ends when all ranks have joined. The
    arguments are the fields of `Seat`. After `cancel` rank 0 soon stops listening.

    Raises CommunicatorError if the backend can't serve this device. The operation ends in CommunicatorError if the
    address can't be used or a rank fails, in DeadlineError if a rank does not come.
    """
    device = torch.device(device)
    if device.type != {"tcp": "cpu", "nccl": "cuda"}[backend]:
        raise CommunicatorError(
            f"{backend} can't send tensors on {device.type}",
            found=f"{backend} with {device}",
            wanted="tcp with cpu, nccl with cuda",
            remedy="let both sides use the same kind of device",
        )
    member = Seat(
        host=host, port=port, rank=rank, world_size=world_size, timeout_s=timeout_s, device=device, secret=secret
    )
    what = f"joining {backend} {member}"
    # A thread cannot be ended from outside, so the joining thread checks this event.
    given_up = threading.Event()

    def join() -> Communicator:
        with _errors_as_ours(what):
            joined = _Tcp(member, given_up) if backend == "tcp" else _Nccl(member, given_up, allow_shared_gpu)
        # The caller no longer waits, so this thread must leave the group.
        if given_up.is_set():
            joined.abort()
        return joined

    return Operation(join, timeout_s + _GRACE_S, what, on_failure=given_up.set)


class _Tcp(Communicator):
    def __init__(self, member: Seat, given_up: threading.Event) -> None:
        super().__init__(member)
        self._links = dict(meet(member, b"", given_up).links)
        self._running = threading.Lock()  # a broadcast holds this lock while it uses the connections

    def _leave(self) -> None:
        links, self._links = self._links, {}
        for link in links.values():
            with contextlib.suppress(OSError):  # the other side has closed the connection.
                # `shutdown` ends the waits for this connection on all threads.
                link.shutdown(socket.SHUT_RDWR)
        # The connections are closed only after the running broadcast. A broadcast that still runs could use the number
        # of a closed descriptor, which another connection may have got.
        with self._running:
            for link in links.values():
                link.close()

    def _prepare(self, tensor: torch.Tensor, src: int, timeout_s: float) -> Begin:
        # mypy does not know that numpy arrays are buffers.
        content = memoryview(tensor.view(-1).view(torch.uint8).numpy())  # type: ignore[arg-type]

        def broadcast() -> None:
            deadline = Deadline(timeout_s)
            with self._running:
                links = _joined(self._links)
                source = None if self.rank == src else links[src if self.rank == 0 else 0]
                targets = links.values() if self.rank in (0, src) else ()
                _pass_on(content, source, [link for link in targets if link is not source], deadline)

        return lambda: broadcast


_SIZE = struct.Struct("<Q")
# Bytes are sent in parts, so that rank 0 forwards the first parts before the last parts arrive.
_PART_BYTES = 1 << 20


def _pass_on(
    content: memoryview, source: socket.socket | None, targets: Sequence[socket.socket], deadline: Deadline
) -> None:
    """Fill `content` from `source`, if it is given, and send the bytes to all targets, part by part."""
    size = bytearray(_SIZE.pack(len(content)))
    if source is not None:
        # The size comes first, so that two different versions of this project get an error instead of wrong bytes.
        _fill(memoryview(size), source, deadline)
        if _SIZE.unpack(size)[0] != len(content):
            raise CommunicatorError(
                "the source sends another number of bytes than was agreed",
                found=f"{_SIZE.unpack(size)[0]} bytes",
                wanted=f"{len(content)} bytes",
                remedy="run the same version of this project on both sides",
            )
    _send(size, targets, deadline)
    for start in range(0, len(content), _PART_BYTES):
        part = content[start : start + _PART_BYTES]
        if source is not None:
            _fill(part, source, deadline)
        _send(part, targets, deadline)


def _fill(part: memoryview, source: socket.socket, deadline: Deadline) -> None:
    while part:
        num_bytes = _in_time(source.recv_into, part, source, deadline)
        if not num_bytes:
            raise ConnectionResetError("the other side closed the connection")
        part = part[num_bytes:]


def _send(part: memoryview | bytearray, targets: Iterable[socket.socket], deadline: Deadline) -> None:
    for target in targets:
        left = memoryview(part)
        while left:
            left = left[_in_time(target.send, left, target, deadline) :]


def _in_time(transfer: Callable[[memoryview], int], part: memoryview, link: socket.socket, deadline: Deadline) -> int:
    """Return the number of bytes moved. Raises TimeoutError at `deadline`, which, unlike a socket's timeout, does not
    count pauses of this process."""
    while True:
        # With a timeout of 0 the socket would not block at all.
        link.settimeout(max(0.001, deadline.left_s()))
        try:
            return transfer(part)
        except TimeoutError:
            if deadline.is_over():
                raise


class _Nccl(Communicator):
    def __init__(self, member: Seat, given_up: threading.Event, allow_shared_gpu: bool) -> None:
        super().__init__(member)
        # torch's own group is not used: its watchdog ends the process when a peer dies.
        from vllm.distributed.device_communicators.pynccl import PyNcclCommunicator

        with torch.cuda.device(member.device):
            self._nccl: PyNcclCommunicator | None = PyNcclCommunicator(
                _introduction(member, given_up, allow_shared_gpu), device=member.device
            )
            # Each group has its own stream, so that several groups send at once, and no other work on the device waits
            # for a peer.
            self._stream = torch.cuda.Stream(member.device)
        if self._nccl.disabled:
            raise CommunicatorError(
                "NCCL is not available", wanted="libnccl beside torch", remedy="install the CUDA build of torch"
            )

    def _leave(self) -> None:
        nccl, self._nccl = self._nccl, None
        if nccl is not None:
            # ncclCommAbort also ends kernels that wait for a peer. Only new versions of the binding have a method for
            # it, so it is called through ctypes.
            _in_background(lambda: nccl.nccl.lib.ncclCommAbort(nccl.comm))

    def _prepare(self, tensor: torch.Tensor, src: int, timeout_s: float) -> Begin:
        device, stream = self.device, self._stream
        ready = torch.cuda.Event()
        # The event is recorded on the caller's thread: work that is queued on its stream now, such as writing the
        # bucket, must run first.
        ready.record(torch.cuda.current_stream(device))

        def issue() -> Callable[[], None]:
            with torch.cuda.device(device):
                stream.wait_event(ready)
                _joined(self._nccl).broadcast(tensor, src, stream=stream)
                done = torch.cuda.Event()
                done.record(stream)
            return lambda: _wait_with(tensor, done)

        return issue


def _wait_with(tensor: torch.Tensor, done: torch.cuda.Event) -> None:
    """Wait for the broadcast of `tensor`, and keep a reference to it until then."""
    # The allocator does not know that another stream still reads the tensor. Without the reference, the allocator gave
    # a bucket's memory to the next bucket during the broadcast, and syncs ended in DigestErrors.
    done.synchronize()


_UUID_BYTES, _NCCL_ID_BYTES = 64, 128


def _introduction(member: Seat, given_up: threading.Event, allow_shared_gpu: bool) -> StatelessProcessGroup:
    """Return a group, for vLLM's binding, that exchanges NCCL's unique id as plain bytes at the meeting. vLLM's own
    group would unpickle the id from a store that anybody can write to."""
    from vllm.distributed.utils import StatelessProcessGroup

    class Introduction(StatelessProcessGroup):
        def __init__(self) -> None:
            self.rank, self.world_size = member.rank, member.world_size

        def broadcast_obj(self, obj: ctypes.Structure, src: int) -> ctypes.Structure:
            """Return NCCL's unique id as rank 0 has it. `obj` is the id, a C structure; it is empty on other ranks than
            0."""
            assert src == 0
            assert ctypes.sizeof(obj) == _NCCL_ID_BYTES
            gpu = str(torch.cuda.get_device_properties(member.device).uuid).encode()
            meeting = meet(member, gpu.ljust(_UUID_BYTES, b"\0") + bytes(obj), given_up)
            # NCCL makes its own connections; the meeting only transfers NCCL's id.
            meeting.close()
            gpus = [card[:_UUID_BYTES].rstrip(b"\0") for card in meeting.cards]
            if not allow_shared_gpu:
                _refuse_shared_gpus(gpus)
            elif gpus.count(gpu) > 1:
                _tell_apart()
            return type(obj).from_buffer_copy(meeting.cards[0], _UUID_BYTES)

    return Introduction()


def _refuse_shared_gpus(gpus: Sequence[bytes]) -> None:
    """Raises CommunicatorError if two ranks share a GPU. NCCL's own error would only be "invalid usage"."""
    for rank, gpu in enumerate(gpus):
        if gpu in gpus[:rank]:
            raise CommunicatorError(
                "learner and rollout server are on one GPU",
                found=f"ranks {gpus.index(gpu)} and {rank} of {len(gpus)} on GPU {gpu.decode()} (the last rank is the "
                "learner)",
                wanted="a GPU of its own for every worker and for rank 0 of the learner",
                remedy="set CUDA_VISIBLE_DEVICES of both programs to different devices, use vllm.mode: colocate, or "
                f"set {SHARED_GPU_KEY}: true (slow)",
            )


def _tell_apart() -> None:
    """Set NCCL_HOSTID, which NCCL reads for each communicator, so that this process seems to be on another host. The
    value of a parent process that called this is replaced; a user's value stays."""
    mine = f"{_HOST_ID}{socket.gethostname()}-{os.getpid()}"
    if os.environ.get("NCCL_HOSTID", _HOST_ID).startswith(_HOST_ID) and os.environ.get("NCCL_HOSTID") != mine:
        os.environ["NCCL_HOSTID"] = mine
        log.warning("learner and rollout server share a GPU: weights travel through sockets, at a few GB/s")


def _joined(group: G | None) -> G:
    """Return `group`. Raises CommunicatorError if the group was left."""
    if not group:
        raise _left()
    return group


def _left() -> CommunicatorError:
    return CommunicatorError("the group was left before", remedy="join a new one")


def _named(begin: Begin, what: str) -> Begin:
    """Return `begin` with its errors turned into this project's errors, whose texts begin with `what`."""

    def begin_named() -> Callable[[], None]:
        with _errors_as_ours(what):
            finish = begin()

        def finish_named() -> None:
            with _errors_as_ours(what):
                finish()

        return finish_named

    return begin_named


@contextlib.contextmanager
def _errors_as_ours(what: str) -> Iterator[None]:
    try:
        yield
    except ProjectError:
        raise
    except (RuntimeError, OSError, ValueError) as error:
        said = str(error).strip().split("\n")[0][:300]
        if isinstance(error, TimeoutError):
            raise late(what, said) from error
        raise CommunicatorError(
            f"{what} failed", found=said, wanted="all ranks alive and reachable", remedy="sync again with a new group"
        ) from error


_leaving: list[threading.Thread] = []


def _in_background(call: Callable[[], object]) -> None:
    """Run `call` on a daemon thread and ignore its errors, because leaving must not wait for a peer."""

    def target() -> None:
        with contextlib.suppress(RuntimeError):
            call()

    thread = threading.Thread(target=target, name="leaving a group", daemon=True)
    thread.start()
    _leaving.append(thread)
    _leaving[:] = [other for other in _leaving if other.is_alive()]


@atexit.register
def _let_them_leave() -> None:
    """Wait for the groups that are being left. A thread that is inside NCCL when the interpreter ends would abort the
    process (SIGABRT), even after a successful run."""
    deadline = Deadline(_LEAVE_PATIENCE_S)
    for thread in _leaving:
        thread.join(deadline.left_s())
