"""The meeting of a group's ranks: at one TCP address, within a deadline, only for ranks that know the group's secret.

In: a `Seat`, and this rank's card: a few bytes that all other ranks get. Out: all ranks' cards, and a connection
between rank 0 and every other rank. Rank 0 listens, and each connection to it begins with these messages:

    rank 0 to rank r    32 random bytes
    rank r to rank 0    r, 32 random bytes, its card, and a proof
    rank 0 to rank r    all cards, and a proof, once every rank has come

A proof is an HMAC with the secret over the side (rank 0 or rank r), the port, the group's size, r, both sides' random
bytes and the message. The secret itself comes with the authenticated HTTP call. A relay between two ranks stays
unnoticed, but it can change neither these messages nor a sealed bucket.

Invariants: rank 0 listens only on the configured address, and only until all ranks are there. From a connection without
a proof it reads at most HELLO_BYTES, within HELLO_S, and it holds at most MAX_GUESTS such connections; dropped
connections are counted. Every wait ends at the deadline, or soon after the join was given up, and then the port is
free.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import hmac
import secrets
import selectors
import socket
import struct
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch

from shared.errors import CommunicatorError, DeadlineError
from shared.waits import Deadline, Retry

CARD_BYTES = 256
HELLO_S = 5.0  # longest time from a connection to its proof
MAX_GUESTS = 64  # max connections that have not sent a proof yet
_POLL_S = 0.01
_BACKLOG = 1024  # max connections that the kernel queues until they are accepted
_PORT_PATIENCE_S = 10.0  # longest wait for a port that another process has just left
_RANDOM_BYTES = _PROOF_BYTES = 32
_HELLO = struct.Struct(f"<I{_RANDOM_BYTES}s{CARD_BYTES}s{_PROOF_BYTES}s")
HELLO_BYTES = _HELLO.size
_SERVER = "custom.extra.rollout_matching.vllm.server"
_WITHOUT_PORTS = "or do without a port: vllm.mode: colocate, or rollout_backend: hf"


@dataclass(frozen=True, kw_only=True)
class Seat:
    """The address at which a group meets, and this process's rank in the group."""

    host: str
    port: int
    rank: int
    world_size: int
    timeout_s: float  # deadline for joining, and default deadline of later operations
    device: torch.device  # device of the tensors that this rank sends or receives
    secret: bytes = field(repr=False)  # the group's secret, different for each group

    def __str__(self) -> str:
        return f"group {self.host}:{self.port} as rank {self.rank} of {self.world_size}"


@dataclass(frozen=True, kw_only=True)
class Meeting:
    """All ranks' cards, by rank, and this rank's connections, by the rank on the other side. Rank 0 has a connection to
    each other rank; every other rank has only a connection to rank 0."""

    cards: Sequence[bytes]
    links: Mapping[int, socket.socket]

    def close(self) -> None:
        for link in self.links.values():
            link.close()


_num_strangers = 0


def num_strangers() -> int:
    """Return the number of connections that this process has dropped because they gave no valid proof."""
    return _num_strangers


def meet(member: Seat, card: bytes, given_up: threading.Event) -> Meeting:
    """Join the group's meeting; returns when all ranks are there. `card`: what this rank tells the others, at most
    CARD_BYTES long.

    Raises DeadlineError, CommunicatorError once `given_up` is set, OSError if the address can't be used.
    """
    card = card.ljust(CARD_BYTES, b"\0")
    assert len(card) == CARD_BYTES, "a card of that size does not travel"
    wait = _Wait(member, given_up)
    if member.rank == 0:
        # The port is closed as soon as all ranks have come, or the join fails.
        with contextlib.closing(_Door(member)) as door:
            return door.await_all(card, wait)
    while True:
        meeting = _visit(member, card, wait)
        if meeting is not None:
            return meeting
        # `Retry` is not used here, because this wait must end as soon as the join is given up.
        wait.until_next_try()


class _Wait:
    """The wait of a join: it ends at the deadline, or when the join is given up."""

    def __init__(self, member: Seat, given_up: threading.Event) -> None:
        self.deadline = Deadline(member.timeout_s)
        self._member, self._given_up = member, given_up
        self.seen = "nobody listening"
        self.num_refused = 0  # tries in which one side did not know the group's secret

    def check(self) -> None:
        if self._given_up.is_set():
            raise CommunicatorError(f"joining {self._member} was given up")
        if self.deadline.is_over():
            raise _late_joining(self._member, self._found())

    def _found(self) -> str:
        if self.num_refused == 0:
            return self.seen
        return f"{self.seen}; {self.num_refused} visits met somebody without the group's secret"

    def until_next_try(self) -> None:
        self._given_up.wait(_POLL_S)
        self.check()


# ---- rank-0 ----------------------------------------------------------------------------------------------------------


@dataclass(eq=False, slots=True)
class _Guest:
    """A connection that has not sent its proof yet. `challenge`: the random bytes that were sent to it. `until`: the
    deadline for its proof. `said`: the bytes received so far."""

    link: socket.socket
    challenge: bytes
    until: Deadline
    said: bytearray = field(default_factory=bytearray)


@dataclass(frozen=True, slots=True)
class _Member:
    link: socket.socket
    challenge: bytes
    answer: bytes  # random bytes from the rank that connected
    card: bytes


class _Door:
    """Rank 0's listening socket, the connections without a proof, and the ranks that have proved the secret."""

    def __init__(self, member: Seat) -> None:
        self._member = member
        self._selector = selectors.DefaultSelector()
        self._listener = _listen(member)
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._guests: dict[socket.socket, _Guest] = {}  # connections without a proof, in order of arrival
        self._members: dict[int, _Member] = {}

    def await_all(self, card: bytes, wait: _Wait) -> Meeting:
        ranks = range(1, self._member.world_size)
        while missing := [rank for rank in ranks if rank not in self._members]:
            wait.seen = f"no sign of rank {', '.join(map(str, missing))}"
            wait.check()
            for key, _ in self._selector.select(_POLL_S):
                if key.fileobj is self._listener:
                    self._let_in()
                else:
                    self._hear(key.data)
            for guest in [guest for guest in self._guests.values() if guest.until.is_over()]:
                self._drop(guest)
        cards = [card, *(self._members[rank].card for rank in ranks)]
        for rank in ranks:
            # Ranks are answered only when all have connected, because the proof covers all cards.
            self._answer(rank, b"".join(cards), wait)
        links = {rank: self._members.pop(rank).link for rank in ranks}
        return Meeting(cards=cards, links=links)

    def close(self) -> None:
        for link in (*self._guests, *(one.link for one in self._members.values())):
            link.close()
        self._selector.close()
        self._listener.close()

    def _let_in(self) -> None:
        """Accept waiting connections, MAX_GUESTS at most, so that earlier connections are read soon."""
        for _ in range(MAX_GUESTS):
            try:
                link, _ = self._listener.accept()
            except BlockingIOError:
                return
            except OSError:  # the caller has gone, or no descriptor is left.
                # The listener stays readable, so without a pause the loop would spin.
                time.sleep(_POLL_S)
                return
            self._greet(link)

    def _greet(self, link: socket.socket) -> None:
        link.setblocking(False)
        guest = _Guest(link, secrets.token_bytes(_RANDOM_BYTES), Deadline(HELLO_S))
        self._guests[link] = guest
        self._selector.register(link, selectors.EVENT_READ, guest)
        try:
            link.send(guest.challenge)
        except OSError:
            self._drop(guest)
        # The oldest guest (a connection without proof) is dropped. A rank of the group is not among the oldest, because
        # it sends its proof at once.
        if len(self._guests) > MAX_GUESTS:
            self._drop(next(iter(self._guests.values())))

    def _hear(self, guest: _Guest) -> None:
        # A connection may have been dropped because of a later connection in the same round.
        if guest.link not in self._guests:
            return
        try:
            # No byte after the proof is read from a caller that has not proved the secret yet.
            said = guest.link.recv(HELLO_BYTES - len(guest.said))
        except BlockingIOError:
            return
        except OSError:
            said = b""
        guest.said += said
        if not said:
            self._drop(guest)
        elif len(guest.said) == HELLO_BYTES:
            self._judge(guest)

    def _judge(self, guest: _Guest) -> None:
        rank, answer, card, proof = _HELLO.unpack(guest.said)
        wanted = _proof(self._member, b"rank r", rank, guest.challenge, answer, card)
        if not hmac.compare_digest(proof, wanted) or not 0 < rank < self._member.world_size:
            self._drop(guest)
            return
        self._forget(guest)
        # The rank has connected again, so its earlier connection is dead.
        if rank in self._members:
            self._members[rank].link.close()
        self._members[rank] = _Member(guest.link, guest.challenge, answer, card)

    def _answer(self, rank: int, cards: bytes, wait: _Wait) -> None:
        to = self._members[rank]
        to.link.settimeout(max(_POLL_S, wait.deadline.left_s()))
        # Small messages must not wait until earlier messages are acknowledged.
        to.link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        to.link.sendall(cards + _proof(self._member, b"rank 0", rank, to.challenge, to.answer, cards))

    def _drop(self, guest: _Guest) -> None:
        global _num_strangers
        _num_strangers += 1
        self._forget(guest)
        guest.link.close()

    def _forget(self, guest: _Guest) -> None:
        self._selector.unregister(guest.link)
        del self._guests[guest.link]


def _listen(member: Seat) -> socket.socket:
    family = socket.getaddrinfo(member.host, member.port, type=socket.SOCK_STREAM)[0][0]
    retry = Retry(min(_PORT_PATIENCE_S, member.timeout_s), _POLL_S)
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        # Connections of the last group may linger in TIME_WAIT at this port.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        while True:
            try:
                listener.bind((member.host, member.port))
                break
            except OSError as error:
                # The last group may still be leaving the port. Waiting does not help against other errors.
                if error.errno != errno.EADDRINUSE or not retry.wait():
                    raise _cannot_listen(member, error) from error
        listener.listen(_BACKLOG)
        listener.setblocking(False)
    except BaseException:
        listener.close()
        raise
    return listener


# ---- others ----------------------------------------------------------------------------------------------------------


def _visit(member: Seat, card: bytes, wait: _Wait) -> Meeting | None:
    """Connect to rank 0 once. Return None if no listener knows the secret: another group may still use the address."""
    try:
        # Each try is short, because a join that was given up is noticed only between two tries.
        link = socket.create_connection((member.host, member.port), timeout=1.0)
    except socket.gaierror:
        raise
    except OSError as error:  # raised also without a route: a network may come up later than this process
        wait.seen = f"nobody listening: {error}"
        return None
    try:
        link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        cards = _introduce(link, member, card, wait)
    except BaseException:
        link.close()
        raise
    if cards is None:
        wait.seen = "a connection that was closed"
        wait.num_refused += 1
        link.close()
        return None
    return Meeting(cards=cards, links={0: link})


def _introduce(link: socket.socket, member: Seat, card: bytes, wait: _Wait) -> list[bytes] | None:
    """Prove the secret to rank 0 and return all cards; None if rank 0 does not prove that it knows the secret."""
    challenge = _receive(link, _RANDOM_BYTES, wait, patience_s=HELLO_S)
    if challenge is None:
        return None
    answer = secrets.token_bytes(_RANDOM_BYTES)
    proof = _proof(member, b"rank r", member.rank, challenge, answer, card)
    try:
        link.sendall(_HELLO.pack(member.rank, answer, card, proof))
    except OSError:
        return None
    wait.seen = "a connection, but not every rank has come"
    num_bytes = member.world_size * CARD_BYTES
    said = _receive(link, num_bytes + _PROOF_BYTES, wait)
    if said is None:
        return None
    cards, proof = said[:num_bytes], said[num_bytes:]
    if not hmac.compare_digest(proof, _proof(member, b"rank 0", member.rank, challenge, answer, cards)):
        return None
    return [cards[i : i + CARD_BYTES] for i in range(0, num_bytes, CARD_BYTES)]


def _receive(link: socket.socket, num_bytes: int, wait: _Wait, patience_s: float | None = None) -> bytes | None:
    """Return `num_bytes` bytes; None if the other side closes the connection, or takes longer than `patience_s`."""
    said = bytearray()
    patience = None if patience_s is None else Deadline(patience_s)
    while len(said) < num_bytes:
        wait.check()
        if patience is not None and patience.is_over():
            return None
        link.settimeout(_POLL_S)
        try:
            new = link.recv(num_bytes - len(said))
        except TimeoutError:
            continue
        except OSError:
            return None
        if not new:
            return None
        said += new
    return bytes(said)


def _proof(member: Seat, side: bytes, rank: int, challenge: bytes, answer: bytes, content: bytes) -> bytes:
    # Side, port and rank are part of the proof, so that it is worthless for another side, port or rank.
    place = struct.pack("<III", member.port, member.world_size, rank)
    return hmac.digest(member.secret, side + place + challenge + answer + content, hashlib.sha256)


def late(what: str, found: str) -> DeadlineError:
    return DeadlineError(
        f"{what} did not end in time",
        found=found,
        wanted="all ranks there and alive within the deadline",
        remedy="look for a process that died or can't be reached, or raise the timeout",
    )


def _late_joining(member: Seat, found: str) -> DeadlineError:
    """Return the error for a rank that did not come: it has ended, or cannot reach the port."""
    error = late(f"joining {member}", found)
    error.remedy = (
        f"look for a process that died; open {_SERVER}.servers[i].group_port ({member.port}) in the firewall of "
        f"{member.host}, or choose a port that is open; raise {_SERVER}.timeout_s ({member.timeout_s:g} s here) for a "
        f"slow start; {_WITHOUT_PORTS}"
    )
    return error


def _cannot_listen(member: Seat, error: OSError) -> CommunicatorError:
    in_use = error.errno == errno.EADDRINUSE
    cause = "end the process that holds it, or change" if in_use else "correct the server's group_host, or change"
    return CommunicatorError(
        f"joining {member} failed: {member.host}:{member.port} can't be listened at",
        found=str(error),
        wanted="a free TCP port at an address of the server's machine",
        remedy=f"{cause} {_SERVER}.servers[i].group_port ({member.port}); {_WITHOUT_PORTS}",
    )
