"""How the ranks of a group meet: at one TCP address, within a deadline, and with nobody else's group.

In: a `Place`. Out: the group's key-value store, once all ranks are connected to it. Invariants: rank 0 listens, on the
address that it was given and on no other; whoever waits ends by the deadline, or soon after it was given up, and leaves
the port free. Called by `communicator.py`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import socket
import threading
import time
from datetime import timedelta
from typing import Literal

import torch
import torch.distributed as dist

from shared.errors import CommunicatorError, DeadlineError, ProjectError

_POLL_S = 0.01
_OPEN_S = 2.0  # rank 0 opens its group at once, if it is there
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
    group: str  # a name that no other group at this address has or had; who says another is not met

    def __str__(self) -> str:
        return f"group {self.host}:{self.port} as rank {self.rank} of {self.world_size}"


def meet(place: Place, given_up: threading.Event) -> dist.Store:
    """The group's key-value store, once all ranks are connected to it.

    What lies in it is trusted by those who join: `host` must come from a configuration, never from a request.
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
        own = dist.PrefixStore(f"meeting {place.group}", store)
        outcome = (_gather if place.rank == 0 else _come)(own, place, deadline, given_up)
        if outcome is None:
            return dist.PrefixStore("group", store)
        del store, own  # a traceback that names them would keep the port
        if isinstance(outcome, ProjectError):
            raise outcome


# A port that was just left may still be answered by the old group's store, in which nobody has opened this group. A
# rank that does not find it open connects again.


def _gather(store: dist.Store, place: Place, deadline: float, given_up: threading.Event) -> ProjectError | None:
    """Rank 0: open the group, and wait for the others."""
    store.set("open", "1")
    missing = list(range(1, place.world_size))
    while missing := [rank for rank in missing if not store.check([f"here/{rank}"])]:
        if given_up.wait(_POLL_S):
            return CommunicatorError(f"joining {place} was given up")
        if time.monotonic() > deadline:
            return late(f"joining {place}", f"no sign of rank {', '.join(map(str, missing))}")
    store.set("complete", "1")
    return None


def _come(
    store: dist.Store, place: Place, deadline: float, given_up: threading.Event
) -> ProjectError | Literal["connect again"] | None:
    """Another rank: make sure that this is where the group meets, then wait for the rest."""
    met = False
    patience = min(deadline, time.monotonic() + _OPEN_S)
    try:
        while not (met and store.check(["complete"])):
            if not met and store.check(["open"]):
                store.set(f"here/{place.rank}", "1")
                met = True
            if given_up.wait(_POLL_S):
                return CommunicatorError(f"joining {place} was given up")
            if time.monotonic() > deadline:
                return late(f"joining {place}", "rank 0 there, others missing" if met else "no sign of rank 0")
            if not met and time.monotonic() > patience:
                return "connect again"
    except RuntimeError:  # the old store went while we were connected to it
        if met or time.monotonic() > deadline:
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
            raise late(f"joining {place}", "nobody listening")
    raise CommunicatorError(f"joining {place} was given up")


def local_address(place: Place) -> str:
    """The address of this machine at which the others, who can reach the meeting place, can reach this rank."""
    if place.rank == 0:
        return place.host
    family = socket.getaddrinfo(place.host, place.port, type=socket.SOCK_DGRAM)[0][0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect((place.host, place.port))  # datagram: nothing is sent, the kernel only picks the route
        return str(probe.getsockname()[0])


def late(what: str, found: str) -> DeadlineError:
    return DeadlineError(
        f"{what} did not end in time",
        found=found,
        wanted="all ranks there and alive within the deadline",
        remedy="look for a process that died or can't be reached, or raise the timeout",
    )
