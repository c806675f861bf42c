"""The broadcast group (R09): right bytes on every rank, and an end to every wait."""

from __future__ import annotations

import multiprocessing
import os
import signal
import socket
import threading
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
import torch

from shared.addresses import free_port
from shared.errors import CommunicatorError, DeadlineError, ProjectError
from shared.sync.calls import Begin
from shared.sync.group import Communicator, _in_time, start_join
from shared.sync.meeting import Seat
from shared.waits import Deadline
from tests.tiers import slow
from tests.waits import wait_until


def join_all(world_size: int, timeout_s: float = 60.0) -> list[Communicator]:
    port = free_port()
    joined: list[Communicator | None] = [None] * world_size

    def one(rank: int) -> None:
        joined[rank] = start_join("tcp", "127.0.0.1", port, rank, world_size, timeout_s, secret=b"a").result()

    on_threads([lambda rank=rank: one(rank) for rank in range(world_size)])
    return [communicator for communicator in joined if communicator is not None]


def on_threads(calls: list[Callable[[], None]]) -> None:
    threads = [threading.Thread(target=call) for call in calls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)


@pytest.mark.parametrize("world_size", [2, 3])
def test_every_rank_gets_the_sources_bytes(world_size: int) -> None:
    group = join_all(world_size)
    assert len(group) == world_size
    sent = torch.randint(0, 256, (1 << 20,), dtype=torch.uint8)
    got = [sent.clone() if rank == world_size - 1 else torch.zeros_like(sent) for rank in range(world_size)]
    on_threads([lambda c=c, t=t: c.broadcast(t, src=world_size - 1) for c, t in zip(group, got, strict=True)])
    assert all(tensor.equal(sent) for tensor in got)
    for communicator in group:
        communicator.close()
        communicator.close()


def test_broadcasts_under_way_go_in_the_order_in_which_they_were_started() -> None:
    """In any other order one would get the other's bytes. One thread per rank runs them, and ends with the group."""
    group = join_all(2)
    got = [torch.zeros(1 << 12) for _ in range(20)]
    receiving = [group[0].start_broadcast(tensor, src=1) for tensor in got]
    sending = [group[1].start_broadcast(torch.full((1 << 12,), float(i)), src=1) for i in range(20)]
    for operation in [*receiving, *sending]:
        operation.result()
    assert [tensor[0].item() for tensor in got] == list(range(20))
    assert len(senders()) == 2
    for communicator in group:
        communicator.close()
    wait_until(lambda: not senders())


def senders() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("broadcasting")]


def test_an_abort_ends_all_that_are_under_way() -> None:
    first, second = join_all(2, timeout_s=20.0)
    waiting = [first.start_broadcast(torch.zeros(4), src=1) for _ in range(3)]
    first.abort()
    for operation in waiting:
        with pytest.raises(CommunicatorError):
            operation.result()
    second.abort()


class Stuck(Communicator):
    """A group whose broadcasts end only once it is left, as NCCL's without their peer."""

    def _prepare(self, tensor: torch.Tensor, src: int, timeout_s: float) -> Begin:
        return lambda: lambda: self.released.wait(30) and None

    def _leave(self) -> None:
        self.released.set()

    released = threading.Event()


def test_a_broadcast_that_nobody_polls_ends_too() -> None:
    cpu = torch.device("cpu")
    member = Seat(host="", port=0, rank=1, world_size=2, timeout_s=0.2, device=cpu, secret=b"a")
    operation = Stuck(member).start_broadcast(torch.zeros(1), src=0)
    assert Stuck.released.wait(10)
    with pytest.raises(DeadlineError):
        operation.result()


class AbortedMeanwhile(Stuck):
    """A group that another thread aborts while a broadcast is being started, and whose broadcasts do not notice."""

    def _prepare(self, tensor: torch.Tensor, src: int, timeout_s: float) -> Begin:
        self.abort()
        return lambda: lambda: self.over.wait(60) and None

    over = threading.Event()


def test_a_broadcast_that_is_started_during_an_abort_ends_too() -> None:
    cpu = torch.device("cpu")
    member = Seat(host="", port=0, rank=1, world_size=2, timeout_s=30.0, device=cpu, secret=b"a")
    with pytest.raises(CommunicatorError, match="was left"):
        assert AbortedMeanwhile(member).start_broadcast(torch.zeros(1), src=0).done(30.0)
    AbortedMeanwhile.over.set()


def test_rank_0_listens_on_its_own_address_only() -> None:
    port = free_port()
    joining = start_join("tcp", "127.0.0.1", port, 0, 2, 10.0, secret=b"a")
    wait_until(lambda: _listening_on(port))
    assert _listening_on(port) == {"0100007F"}  # 127.0.0.1 as /proc/net/tcp writes it
    joining.cancel(CommunicatorError("a new learner came"))
    with pytest.raises(CommunicatorError, match="a new learner came"):
        joining.result()
    wait_until(lambda: not _listening_on(port))


def _listening_on(port: int) -> set[str]:
    found = set()
    for table in (Path("/proc/net/tcp"), Path("/proc/net/tcp6")):
        rows = [line.split() for line in table.read_text().splitlines()[1:]]
        found |= {row[1].split(":")[0] for row in rows if row[3] == "0A" and int(row[1].split(":")[1], 16) == port}
    return found


def test_a_cancelled_join_leaves_no_thread_behind() -> None:
    """A process that ends while torch waits for a connection is aborted."""
    joining = start_join("tcp", "127.0.0.1", free_port(), 1, 2, 20.0, secret=b"a")
    joining.cancel(CommunicatorError("the server refused"))
    with pytest.raises(CommunicatorError, match="refused"):
        joining.result()
    wait_until(lambda: not _joining_threads())


def _joining_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("joining")]


@pytest.mark.parametrize("rank", [0, 1])
def test_joining_alone_ends_at_the_deadline(rank: int) -> None:
    port = free_port()
    with pytest.raises(DeadlineError, match=r"joining .*group") as raised:
        start_join("tcp", "127.0.0.1", port, rank, 2, 0.3, secret=b"a").result()
    assert_names_the_way_out(raised.value, port, "vllm.server.timeout_s", "firewall")


def test_a_port_that_is_taken_is_named() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(CommunicatorError, match=rf"127.0.0.1:{port}.*in use") as raised:
            start_join("tcp", "127.0.0.1", port, 0, 2, 1.0, secret=b"a").result()
    assert_names_the_way_out(raised.value, port)


def test_an_address_that_is_not_this_machine_s_is_named() -> None:
    """R16: the server listens at `group_host`; TEST-NET-1 is nobody's address."""
    port = free_port()
    with pytest.raises(CommunicatorError, match=rf"192.0.2.1:{port}") as raised:
        start_join("tcp", "192.0.2.1", port, 0, 2, 1.0, secret=b"a").result()
    assert_names_the_way_out(raised.value, port, "group_host")


def test_a_host_without_a_route_is_named() -> None:
    """R16: the learner's side, where the kernel itself says that nothing is there (255.255.255.255 takes no TCP)."""
    port = free_port()
    with pytest.raises((CommunicatorError, DeadlineError), match=rf"255.255.255.255:{port}") as raised:
        start_join("tcp", "255.255.255.255", port, 1, 2, 1.0, secret=b"a").result()
    assert_names_the_way_out(raised.value, port, "firewall")


def assert_names_the_way_out(error: ProjectError, port: int, *also: str) -> None:
    """Check R16: the error names the key and its value, and what to use where no port can be opened."""
    for part in (f"servers[i].group_port ({port})", "vllm.mode: colocate", "rollout_backend: hf", *also):
        assert part in error.remedy, error


def test_backend_and_device_must_fit() -> None:
    with pytest.raises(CommunicatorError, match="nccl can't send tensors on cpu"):
        start_join("nccl", "127.0.0.1", free_port(), 0, 2, 1.0, "cpu", secret=b"a").result()


def _peer(port: int, ready: Connection) -> None:
    communicator = start_join("tcp", "127.0.0.1", port, 1, 2, 30.0, secret=b"a").result()
    ready.send("joined")
    ready.recv()
    communicator.close()


@pytest.mark.parametrize("sent", [slow(signal.SIGSTOP), signal.SIGKILL])
def test_a_peer_that_stops_or_dies_ends_the_broadcast(sent: signal.Signals) -> None:
    port = free_port()
    context = multiprocessing.get_context("spawn")
    ready, far_end = context.Pipe()
    peer = context.Process(target=_peer, args=(port, far_end), daemon=True)
    peer.start()
    try:
        communicator = start_join("tcp", "127.0.0.1", port, 0, 2, 30.0, secret=b"a").result()
        assert ready.poll(30)
        assert peer.pid is not None
        os.kill(peer.pid, sent)
        start = time.monotonic()
        with pytest.raises((DeadlineError, CommunicatorError), match="broadcasting 1048576 bytes from rank 1 of 2"):
            communicator.broadcast(torch.zeros(1 << 20, dtype=torch.uint8), src=1, timeout_s=0.5)
        assert time.monotonic() - start < 30.0  # the group's own
        with pytest.raises(CommunicatorError, match="left"):
            communicator.broadcast(torch.zeros(1), src=1)
    finally:
        peer.kill()
        peer.join(10)


def test_a_pause_of_this_process_ends_no_transfer() -> None:
    """A socket counts a pause, the deadline does not; at the deadline a transfer ends."""
    ours, theirs = socket.socketpair()
    refusals = [TimeoutError("the machine stood still")]

    def transfer(part: memoryview) -> int:
        if refusals:
            raise refusals.pop()
        return len(part)

    def late(part: memoryview) -> int:
        refusals.append(TimeoutError("late"))
        assert len(refusals) < 100, "the deadline was over"
        raise refusals[-1]

    with ours, theirs:
        assert _in_time(transfer, memoryview(bytes(5)), ours, Deadline(60.0)) == 5
        with pytest.raises(TimeoutError, match="late"):
            _in_time(late, memoryview(bytes(5)), ours, Deadline(0.0))


def test_abort_from_another_thread_ends_a_broadcast() -> None:
    first, _second = join_all(2, timeout_s=60.0)
    timer = threading.Timer(0.3, first.abort)
    timer.start()
    start = time.monotonic()
    with pytest.raises((DeadlineError, CommunicatorError)):
        first.broadcast(torch.zeros(1 << 20), src=1)
    assert time.monotonic() - start < 60.0
    let_threads_end()


def let_threads_end() -> None:
    """None may be left when the process ends."""
    wait_until(lambda: not any(one.name.startswith(("broadcasting", "leaving")) for one in threading.enumerate()))


@pytest.mark.parametrize("delay_s", [0.0, 0.0005, 0.001, 0.002, 0.005, 0.01])
def test_abort_beside_the_start_of_a_broadcast_does_not_wait(delay_s: float) -> None:
    """A broadcast that is issued after the abort lasts up to its timeout; whoever aborts or waits must not."""
    first, _second = join_all(2, timeout_s=60.0)
    threading.Timer(delay_s, first.abort).start()
    start = time.monotonic()
    with pytest.raises((DeadlineError, CommunicatorError)):
        first.broadcast(torch.zeros(1 << 20), src=1)
    assert time.monotonic() - start < 60.0
    let_threads_end()


def test_the_port_is_free_again_after_close() -> None:
    """A learner that comes back may ask for the same port."""
    port = free_port()
    for group in (b"one", b"two"):
        joining = [start_join("tcp", "127.0.0.1", port, rank, 2, 10.0, secret=group) for rank in (0, 1)]
        for operation in joining:
            operation.result().close()
        del joining, operation


def test_a_rank_of_another_group_is_not_met() -> None:
    """One that was not told yet that its group was given up, and finds the next group's rank 0 at the same port."""
    port = free_port()
    late = start_join("tcp", "127.0.0.1", port, 1, 2, 30.0, secret=b"old")
    ranks = [start_join("tcp", "127.0.0.1", port, rank, 2, 30.0, secret=b"new") for rank in range(2)]
    receiver, sender = [operation.result() for operation in ranks]
    assert not late.done(0.1)
    late.cancel(CommunicatorError("given up"))
    with pytest.raises(CommunicatorError, match="given up"):
        late.result()
    sent, received = torch.arange(8), torch.zeros(8, dtype=torch.int64)
    receiving = receiver.start_broadcast(received, 1)
    sender.broadcast(sent, 1)
    receiving.result()
    assert torch.equal(sent, received)
    for one in (receiver, sender):
        one.close()
