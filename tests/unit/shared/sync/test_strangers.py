"""Processes that do not know the group's secret (R42): they get nothing, change nothing, and hold nobody up."""

from __future__ import annotations

import ast
import os
import pickle
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from shared.addresses import free_port
from shared.errors import CommunicatorError, DeadlineError
from shared.sync import meeting
from shared.sync.buckets import is_sealed, pack, seal, seal_key, spec_of
from shared.sync.calls import Operation
from shared.sync.group import Communicator, _Tcp, start_join
from shared.sync.meeting import HELLO_BYTES, MAX_GUESTS, Seat, num_strangers
from tests.tiers import slow

HOST, RELAY_HOST, SECRET = "127.0.0.1", "127.0.0.2", b"of this group"


def join(port: int, rank: int, secret: bytes = SECRET, timeout_s: float = 20.0) -> Operation[Communicator]:
    return start_join("tcp", HOST, port, rank, 2, timeout_s, secret=secret)


def connect(port: int) -> socket.socket:
    deadline = time.monotonic() + 5
    while True:
        try:
            return socket.create_connection((HOST, port), timeout=5)
        except ConnectionRefusedError:
            assert time.monotonic() < deadline
            time.sleep(0.01)


@contextmanager
def joined(port: int, worker: Operation[Communicator]) -> Iterator[tuple[Communicator, Communicator]]:
    learner = join(port, 1)
    pair = worker.result(), learner.result()
    try:
        yield pair
    finally:
        for one in pair:
            one.close()


def is_closed(link: socket.socket) -> bool:
    """Return whether the other end has closed it, once what is there is read."""
    try:
        while link.recv(1 << 16):
            pass
    except TimeoutError:
        return False
    except ConnectionError:
        return True
    return True


def say_nothing(link: socket.socket) -> None:
    pass


def say_a_little(link: socket.socket) -> None:
    link.sendall(b"x" * (HELLO_BYTES - 1))


def say_too_much(link: socket.socket) -> None:
    try:
        for _ in range(500):
            link.sendall(b"x" * (1 << 20))
    except OSError:
        return
    raise AssertionError("500 MB were taken")


def say_hello_without_the_secret(link: socket.socket) -> None:
    link.sendall(os.urandom(HELLO_BYTES))


def say_what_torch_s_store_says(link: socket.socket) -> None:
    link.sendall(pickle.dumps({"open": b"1" * 200}))


STRANGERS: list[Callable[[socket.socket], None]] = [
    say_nothing,
    say_a_little,
    say_too_much,
    say_hello_without_the_secret,
    say_what_torch_s_store_says,
]


@pytest.mark.parametrize("says", STRANGERS)
def test_a_stranger_is_dropped_and_counted_and_the_group_meets(
    monkeypatch: pytest.MonkeyPatch, says: Callable[[socket.socket], None]
) -> None:
    monkeypatch.setattr(meeting, "HELLO_S", 0.3)
    before, port = num_strangers(), free_port()
    worker = join(port, 0)
    with connect(port) as stranger:
        says(stranger)
        assert is_closed(stranger)
        with joined(port, worker) as (receiver, sender):
            tensor = torch.zeros(100)
            receiving = receiver.start_broadcast(tensor, 1)
            sender.broadcast(torch.ones(100), 1)
            receiving.result()
            assert tensor.eq(1).all()
            with pytest.raises(ConnectionRefusedError):  # nobody listens once all are there
                socket.create_connection((HOST, port), timeout=5).close()
    assert num_strangers() == before + 1


def test_the_store_that_was_open_is_gone() -> None:
    """A process without the secret read, altered and filled it; now it does not even get an answer."""
    port = free_port()
    worker = join(port, 0)
    connect(port).close()
    with pytest.raises((RuntimeError, ValueError)):
        dist.TCPStore(HOST, port, 2, False, timeout=timedelta(seconds=1))
    with joined(port, worker):
        pass


def test_a_crowd_does_not_keep_the_members_out() -> None:
    """Connections that say nothing: the oldest give way."""
    port = free_port()
    worker = join(port, 0)
    crowd = [connect(port) for _ in range(3 * MAX_GUESTS)]
    with joined(port, worker):
        pass
    assert all(is_closed(one) for one in crowd)
    for one in crowd:
        one.close()


def test_as_many_silent_connections_as_are_allowed_stay() -> None:
    """The next one takes the place of the oldest."""
    before, port = num_strangers(), free_port()
    worker = join(port, 0)
    crowd = [connect(port) for _ in range(MAX_GUESTS)]
    for one in crowd:
        assert len(one.recv(32, socket.MSG_WAITALL)) == 32
    assert num_strangers() == before
    with connect(port) as last:
        assert len(last.recv(32, socket.MSG_WAITALL)) == 32
        assert is_closed(crowd[0])
        assert num_strangers() == before + 1
        worker.cancel(CommunicatorError("enough was seen"))
    for one in crowd:
        one.close()


def introduced(port: int, rank: int) -> socket.socket:
    """Return a connection that has proved that it is this rank of three."""
    link = connect(port)
    challenge, answer, card = link.recv(32, socket.MSG_WAITALL), os.urandom(32), bytes(meeting.CARD_BYTES)
    proof = meeting._proof(_seat(HOST, port, world_size=3), b"rank r", rank, challenge, answer, card)
    link.sendall(meeting._HELLO.pack(rank, answer, card, proof))
    return link


def test_a_rank_that_connects_again_takes_its_own_place() -> None:
    port = free_port()
    worker = start_join("tcp", HOST, port, 0, 3, 20.0, secret=SECRET)
    with introduced(port, 1) as first, introduced(port, 1) as second:
        assert is_closed(first)
        second.settimeout(0.3)
        assert not is_closed(second)
        worker.cancel(CommunicatorError("enough was seen"))


@pytest.mark.parametrize("rank", [0, 3])
def test_who_knows_the_secret_can_be_no_rank_that_the_group_does_not_have(rank: int) -> None:
    before, port = num_strangers(), free_port()
    worker = start_join("tcp", HOST, port, 0, 3, 20.0, secret=SECRET)
    with introduced(port, rank) as link:
        assert is_closed(link)
    assert num_strangers() == before + 1
    worker.cancel(CommunicatorError("enough was seen"))


def test_who_is_gone_before_it_is_greeted_is_dropped() -> None:
    before = num_strangers()
    with closing(meeting._Door(_seat(HOST, free_port()))) as door:
        ours, theirs = socket.socketpair()
        theirs.close()
        door._greet(ours)
        assert not door._guests
    assert ours.fileno() == -1, "closed"
    assert num_strangers() == before + 1


def test_where_no_connection_can_be_taken_the_next_look_comes_later(monkeypatch: pytest.MonkeyPatch) -> None:
    """The waiting connection would keep the loop busy if no descriptor is free."""
    monkeypatch.setattr(meeting, "_POLL_S", 0.2)

    class Full:
        def accept(self) -> None:
            raise OSError(24, "too many open files")

    with closing(meeting._Door(_seat(HOST, free_port()))) as door:
        listener, door._listener = door._listener, Full()  # type: ignore[assignment]
        began = time.monotonic()
        door._let_in()
        assert time.monotonic() - began >= 0.19
        door._listener = listener


def test_small_messages_are_sent_at_once() -> None:
    """Nagle's algorithm would let the last bytes of a bucket wait for an acknowledgement: 40 ms."""
    port = free_port()
    with joined(port, join(port, 0)) as pair:
        for one in pair:
            assert isinstance(one, _Tcp)
            (link,) = one._links.values()
            assert link.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


def test_a_rank_that_finds_nobody_pauses_before_it_looks_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(meeting, "_POLL_S", 0.2)
    wait = meeting._Wait(_seat(HOST, 1), threading.Event())
    began = time.monotonic()
    wait.until_next_try()
    assert time.monotonic() - began >= 0.19


@pytest.mark.parametrize("visits", [0, 1, 2])
def test_a_rank_that_comes_too_late_says_how_often_it_met_strangers(visits: int) -> None:
    wait = meeting._Wait(_seat(HOST, 1, timeout_s=0.0), threading.Event())
    wait.num_refused = visits
    with pytest.raises(DeadlineError) as caught:
        wait.check()
    assert "nobody listening" in caught.value.found
    assert ("the group's secret" in caught.value.found) == (visits > 0)
    assert f"{visits} visits" in caught.value.found or visits == 0


def test_a_rank_that_meets_an_impostor_tells_it_nothing_and_goes_on_looking() -> None:
    """Someone else listens there, with a challenge of its own; then the true rank 0 comes."""
    port = free_port()
    with socket.socket() as impostor:
        impostor.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        impostor.bind((HOST, port))
        impostor.listen()
        learner = join(port, 1)
        link, _ = impostor.accept()
        link.sendall(os.urandom(32))
        said = link.recv(HELLO_BYTES, socket.MSG_WAITALL)
        assert SECRET not in said
        link.sendall(os.urandom(2 * 256 + 32))  # cards, and a proof that is none
        link.close()
    worker = join(port, 0)
    for one in (worker.result(), learner.result()):
        one.close()


def test_without_the_secret_nobody_joins() -> None:
    port = free_port()
    worker = join(port, 0, timeout_s=2.0)
    with pytest.raises(DeadlineError, match="the group's secret"):
        join(port, 1, b"of another group", timeout_s=1.5).result()
    with pytest.raises(DeadlineError, match="no sign of rank 1"):
        worker.result()


class Relay:
    """Stands between two processes, at the same port of another address, and alters what the learner sends."""

    def __init__(self, port: int, alter: Callable[[int, bytes], bytes]) -> None:
        self._port, self._alter = port, alter
        self._listener = socket.create_server((RELAY_HOST, port))
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        near, _ = self._listener.accept()
        far = connect(self._port)
        threading.Thread(target=self._pump, args=(far, near, lambda at, data: data), daemon=True).start()
        self._pump(near, far, self._alter)

    @staticmethod
    def _pump(source: socket.socket, target: socket.socket, alter: Callable[[int, bytes], bytes]) -> None:
        at = 0
        source.settimeout(None)
        with source, target, suppress(OSError):  # the group was left
            while data := source.recv(1 << 16):
                target.sendall(alter(at, data))
                at += len(data)

    def close(self) -> None:
        self._listener.close()


def flipping(at: int) -> Callable[[int, bytes], bytes]:
    def alter(start: int, data: bytes) -> bytes:
        if not start <= at < start + len(data):
            return data
        changed = bytearray(data)
        changed[at - start] ^= 1
        return bytes(changed)

    return alter


@pytest.mark.parametrize("at", [0, slow(4), slow(HELLO_BYTES - 40), HELLO_BYTES - 1])
def test_who_stands_between_can_change_no_hello(at: int) -> None:
    port = free_port()
    relay = Relay(port, flipping(at))
    worker = join(port, 0, timeout_s=1.0)
    with pytest.raises(DeadlineError):
        start_join("tcp", RELAY_HOST, port, 1, 2, 0.8, secret=SECRET).result()
    with pytest.raises(DeadlineError):
        worker.result()
    relay.close()


def test_who_stands_between_can_change_no_bucket() -> None:
    """It alters a byte, and seals the bucket again with whatever it knows."""
    tensor = torch.randn(3000)
    bucket = pack([spec_of("w", tensor)], {"w": tensor}, "cpu")
    seal(bucket, key=seal_key(SECRET), ver=1, index=0)
    port = free_port()
    for alter, arrives in ((lambda at, data: data, True), (flipping(HELLO_BYTES + 8 + 77), False)):
        relay = Relay(port, alter)
        joining = join(port, 0), start_join("tcp", RELAY_HOST, port, 1, 2, 10.0, secret=SECRET)
        receiver, sender = (one.result() for one in joining)
        received = torch.zeros_like(bucket)
        receiving = receiver.start_broadcast(received, 1)
        sender.broadcast(bucket, 1)
        receiving.result()
        assert torch.equal(received, bucket) == arrives
        assert is_sealed(received, key=receiver.seal_key, ver=1, index=0) == arrives
        for one in (receiver, sender, relay):
            one.close()


def test_altered_bytes_are_refused_however_they_are_sealed() -> None:
    tensor = torch.randn(3000)
    bucket = pack([spec_of("w", tensor)], {"w": tensor}, "cpu")
    seal(bucket, key=seal_key(SECRET), ver=1, index=0)
    bucket[77] ^= 1
    assert not is_sealed(bucket, key=seal_key(SECRET), ver=1, index=0)
    for guess in (b"", SECRET[:-1], seal_key(b"")):
        seal(bucket, key=guess, ver=1, index=0)
        assert not is_sealed(bucket, key=seal_key(SECRET), ver=1, index=0)


@pytest.mark.parametrize("num_bytes", [0, 99, 101, 1 << 20])
def test_another_size_than_agreed_is_an_error_on_this_side_only(num_bytes: int) -> None:
    """gloo ended the process that received more than it had asked for."""
    port = free_port()
    with joined(port, join(port, 0)) as (receiver, sender):
        receiving = receiver.start_broadcast(torch.zeros(100, dtype=torch.uint8), 1, 5.0)
        sending = sender.start_broadcast(torch.ones(num_bytes, dtype=torch.uint8), 1, 5.0)
        with pytest.raises(CommunicatorError, match="another number of bytes") as caught:
            receiving.result()
        assert (caught.value.found, caught.value.wanted) == (f"{num_bytes} bytes", "100 bytes")
        sending.future.exception()


# Calls that make objects of bytes, by their last name, and the files that may make them.
UNPICKLERS = {"Unpickler", "loads", "load", "recv_pyobj", "recv_obj", "broadcast_obj", "read_pickle"}
UNPICKLING_MODULES = {"pickle", "cPickle", "cloudpickle", "dill", "marshal", "shelve", "joblib", "torch", "numpy", "np"}
OWN_BYTES = {"learner/data/encoding.py"}  # reads what it has written in the same call


def unpickling(path: Path) -> list[str]:
    """Calls such as `pickle.loads(...)`, `torch.load(...)`, `socket.recv_pyobj()` in a file."""
    found: list[str] = []
    text = path.read_text(encoding="utf-8")
    if not any(name in text for name in UNPICKLERS):
        return found
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.ImportFrom) and node.module in UNPICKLING_MODULES:
            found += [f"{path}:{node.lineno} {alias.name}" for alias in node.names if alias.name in UNPICKLERS]
        if isinstance(node, ast.Attribute) and node.attr in UNPICKLERS:
            owner = node.value.id if isinstance(node.value, ast.Name) else ""
            if owner in UNPICKLING_MODULES or node.attr not in {"load", "loads"}:
                found.append(f"{path}:{node.lineno} {owner}.{node.attr}")
    return found


def test_no_module_of_ours_unpickles() -> None:
    """Torch's object collectives among the learner's ranks aside; see SECURITY.md."""
    root = Path(__file__).parents[4]
    files = [path for name in ("shared", "rollout_server", "learner") for path in (root / name).rglob("*.py")]
    found = {str(path.relative_to(root)): calls for path in files if (calls := unpickling(path))}
    assert found.keys() == OWN_BYTES, found


_unpickled: list[str] = []
_listening = False


def _listen(event: str, args: tuple[object, ...]) -> None:
    if _listening and event == "pickle.find_class":
        _unpickled.append(str(args))


@contextmanager
def nothing_is_unpickled() -> Iterator[None]:
    """Check that no module in this process unpickles anything."""
    global _listening
    sys.addaudithook(_listen)
    _listening = True
    try:
        pickle.loads(pickle.dumps(os.getcwd))
        assert _unpickled, "the hook sees nothing"
        _unpickled.clear()
        yield
    finally:
        _listening = False
    assert _unpickled == []


def test_nothing_is_unpickled_from_join_to_leave() -> None:
    """R42: whatever a peer sends, no module of ours, of torch or of vLLM makes an object of it."""
    port = free_port()
    with nothing_is_unpickled(), joined(port, join(port, 0)) as (receiver, sender):
        hostile = pickle.dumps(os.getcwd).ljust(1 << 16, b".")
        tensor = torch.zeros(1 << 16, dtype=torch.uint8)
        receiving = receiver.start_broadcast(tensor, 1)
        sender.broadcast(torch.frombuffer(bytearray(hostile), dtype=torch.uint8), 1)
        receiving.result()
        assert not is_sealed(tensor, key=receiver.seal_key, ver=1, index=0)


def _seat(host: str, port: int, *, world_size: int = 2, timeout_s: float = 5.0) -> Seat:
    device = torch.device("cpu")
    return Seat(host=host, port=port, rank=0, world_size=world_size, timeout_s=timeout_s, device=device, secret=SECRET)


def test_a_port_that_is_still_taken_is_waited_for_and_other_errors_are_not(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another process may just be leaving it."""
    monkeypatch.setattr(meeting, "_POLL_S", 0.4)
    taken = socket.create_server((HOST, 0))
    port = taken.getsockname()[1]
    threading.Timer(0.3, taken.close).start()
    began = time.monotonic()
    meeting._listen(_seat(HOST, port)).close()
    assert time.monotonic() - began >= 0.38, "it looks, pauses, and looks again"
    began = time.monotonic()
    with pytest.raises(CommunicatorError, match=r"192\.0\.2\.1"):  # an address that no machine has
        meeting._listen(_seat("192.0.2.1", port))
    assert time.monotonic() - began < 2.0


def test_a_port_that_stays_taken_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[socket.socket] = []

    class Noted(socket.socket):
        def __init__(self, *args: int) -> None:
            super().__init__(*args)
            tried.append(self)

    with socket.create_server((HOST, 0)) as taken:
        monkeypatch.setattr(socket, "socket", Noted)
        port = taken.getsockname()[1]
        with pytest.raises(CommunicatorError, match=f"{HOST}:{port} can't be listened at") as raised:
            meeting._listen(_seat(HOST, port, timeout_s=0.1))
    assert "end the process that holds it" in raised.value.remedy
    assert [one.fileno() for one in tried] == [-1], "a socket was left open"


def test_a_meeting_that_is_closed_closes_its_connections() -> None:
    ours, theirs = socket.socketpair()
    with theirs:
        meeting.Meeting(cards=[], links={1: ours}).close()
        theirs.settimeout(5)
        assert theirs.recv(1) == b""
