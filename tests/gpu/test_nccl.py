"""The broadcast group over NCCL between two GPUs, or two processes on one (R09): right bytes, an end to every wait,
groups side by side."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import signal
import socket
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection
from typing import Any

import pytest
import torch

from shared.addresses import free_port, free_ports
from shared.errors import CommunicatorError, DeadlineError
from shared.sync.buckets import is_sealed, pack, seal, spec_of
from shared.sync.calls import Operation
from shared.sync.group import Communicator, start_join
from shared.sync.meeting import HELLO_BYTES, num_strangers
from tests.gpu.devices import OTHER, SHARED, needs_gpus

pytestmark = [pytest.mark.gpu, needs_gpus(1)]
JOIN_S = 60.0
THERE = f"cuda:{OTHER}"
SECRET = b"of this group"
BYTES = 1 << 28  # more than NCCL's own buffers hold: a smaller one is sent without a receiver


class Peer:
    """A process with rank 0 of each group, on a GPU of its own; `recv` tells what it found."""

    def __init__(self, ports: list[int], device: str, allow_shared_gpu: bool) -> None:
        context = multiprocessing.get_context("spawn")
        self._near, far = context.Pipe()
        self.process = context.Process(target=_serve, args=(ports, device, allow_shared_gpu, far), daemon=True)
        self.process.start()

    def send(self, *command: Any) -> None:
        self._near.send(command)

    def recv(self) -> Any:
        assert self._near.poll(JOIN_S), "the peer says nothing"
        return self._near.recv()


def join(port: int, rank: int, device: str, *, allow_shared_gpu: bool = SHARED) -> Operation[Communicator]:
    place = ("nccl", "127.0.0.1", port, rank, 2, JOIN_S, device)
    return start_join(*place, secret=SECRET, allow_shared_gpu=allow_shared_gpu)  # type: ignore[arg-type]


def _serve(ports: list[int], device: str, allow_shared_gpu: bool, parent: Connection) -> None:
    try:
        groups = [join(port, 0, device, allow_shared_gpu=allow_shared_gpu).result() for port in ports]
    except CommunicatorError as error:
        parent.send(str(error))
        return
    parent.send("joined")
    while True:
        which, number, size = parent.recv()
        buffers = [torch.zeros(size, dtype=torch.uint8, device=device) for _ in range(number)]
        pending = [groups[which].start_broadcast(buffer, src=1) for buffer in buffers]
        for operation in pending:
            operation.result()
        parent.send([is_sealed(buffer, key=b"key", ver=1, index=i) for i, buffer in enumerate(buffers)])


@contextmanager
def peer(
    num_groups: int = 1, device: str = THERE, *, allow_shared_gpu: bool = SHARED
) -> Iterator[tuple[Peer, list[Any]]]:
    ports = free_ports(num_groups)
    other = Peer(ports, device, allow_shared_gpu)
    try:
        yield other, [join(port, 1, "cuda:0", allow_shared_gpu=allow_shared_gpu) for port in ports]
    finally:
        other.process.kill()
        other.process.join(10)


@contextmanager
def joined(num_groups: int = 1) -> Iterator[tuple[Peer, list[Communicator]]]:
    with peer(num_groups) as (other, joining):
        groups = [operation.result() for operation in joining]
        assert other.recv() == "joined"
        yield other, groups
        for group in groups:
            group.abort()


def sealed(index: int) -> torch.Tensor:
    tensor = torch.randn(BYTES // 4, device="cuda:0")
    buffer = pack([spec_of("w", tensor)], {"w": tensor}, "cuda:0")
    seal(buffer, key=b"key", ver=1, index=index)
    return buffer


def test_many_broadcasts_under_way_arrive_whole_and_in_order() -> None:
    """Packed, sealed and sent without a wait in between: the device's own order is enough."""
    with joined() as (other, (group,)):
        other.send(0, 8, BYTES + 16)
        sent = [group.start_broadcast(sealed(i), src=1) for i in range(8)]
        for operation in sent:
            operation.result()
        assert other.recv() == [True] * 8


def test_a_group_does_not_wait_for_another_one() -> None:
    """Several servers: one that is not there yet holds up nobody, nor the learner's own computing."""
    with joined(num_groups=2) as (other, (first, second)):
        # Made before: fresh memory, or a kernel's first use, may wait for all that the device does.
        one, two = sealed(0), sealed(0)
        for group_index, group in enumerate((first, second)):
            other.send(group_index, 1, BYTES + 16)
            group.broadcast(one, src=1)
            assert other.recv() == [True]
        assert torch.ones(1000, device="cuda:0").sum().item() == 1000
        stuck = first.start_broadcast(one, src=1)
        other.send(1, 1, BYTES + 16)
        second.broadcast(two, src=1, timeout_s=20.0)
        assert other.recv() == [True]
        assert torch.ones(1000, device="cuda:0").sum().item() == 1000
        assert not stuck.future.done()
        other.send(0, 1, BYTES + 16)
        stuck.result()
        assert other.recv() == [True]


@pytest.mark.parametrize("sent", [signal.SIGSTOP, signal.SIGKILL])
def test_a_peer_that_stops_or_dies_ends_the_broadcast(sent: signal.Signals) -> None:
    """A typed error by the deadline; the device goes on, and a new group can be joined from the same process."""
    with joined() as (other, (group,)):
        assert other.process.pid is not None
        os.kill(other.process.pid, sent)
        start = time.monotonic()
        with pytest.raises((DeadlineError, CommunicatorError), match="broadcasting"):
            group.broadcast(sealed(0), src=1, timeout_s=1.0)
        assert time.monotonic() - start < 5
        with pytest.raises(CommunicatorError, match="left"):
            group.broadcast(sealed(0), src=1)
    assert torch.ones(1000, device="cuda:0").sum().item() == 1000
    with joined() as (other, (group,)):
        other.send(0, 1, BYTES + 16)
        group.broadcast(sealed(0), src=1)
        assert other.recv() == [True]


def test_one_gpu_for_both_is_told() -> None:
    with peer(device="cuda:0", allow_shared_gpu=False) as (other, (joining,)):
        with pytest.raises(CommunicatorError, match=r"on one GPU.*CUDA_VISIBLE_DEVICES"):
            joining.result()
        assert "on one GPU" in other.recv()


_unpickled: list[str] = []


def _note(event: str, args: tuple[object, ...]) -> None:
    if event == "pickle.find_class":
        _unpickled.append(f"{args[0]}.{args[1]}")


@needs_gpus(2)  # both ranks are in this process
def test_no_stranger_gets_in_and_nothing_is_unpickled() -> None:
    """R42: what is put where vLLM's own rendezvous would look makes no object, here or in the peer."""
    sys.addaudithook(_note)
    bucket = sealed(0)
    port, before = free_port(), num_strangers()
    hostile = pickle.dumps(os.getcwd)
    receiver = join(port, 0, "cuda:1")
    deadline = time.monotonic() + JOIN_S
    for said in (hostile, hostile * 100, b"x" * (8 << 20)):
        while True:
            try:
                stranger = socket.create_connection(("127.0.0.1", port), timeout=5)
                break
            except ConnectionRefusedError:
                assert time.monotonic() < deadline
                time.sleep(0.05)
        with stranger, suppress(OSError):
            stranger.sendall(said.ljust(HELLO_BYTES, b"."))
            while stranger.recv(1 << 16):
                pass
    _unpickled.clear()  # vLLM's imports, until the first connection was answered
    sender = join(port, 1, "cuda:0")
    both = receiver.result(), sender.result()
    received = torch.zeros_like(bucket, device="cuda:1")
    receiving = both[0].start_broadcast(received, src=1)
    both[1].broadcast(bucket, src=1)
    receiving.result()
    assert _unpickled == []
    assert is_sealed(received, key=b"key", ver=1, index=0)
    assert num_strangers() == before + 3
    for one in both:
        one.abort()
