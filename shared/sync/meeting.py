"""How the ranks of a group meet: at one TCP address, within a deadline, and with nobody else's group.

In: a `Membership`. Out: the group's key-value store, once all ranks are connected to it. Invariants: rank 0 listens, on
the address that it was given and on no other; every wait ends by the deadline, or soon after it was given up, and then
the port is free.
"""

from __future__ import annotations

import errno
import socket
import threading
import time
from dataclasses import dataclass
from datetime import timedelta
from typing import Literal

import torch
import torch.distributed as dist

from shared.errors import CommunicatorError, DeadlineError, ProjectError

_POLL_S = 0.01
_OPEN_S = 2.0  # rank 0 opens its group at once, if it is there
_PORT_PATIENCE_S = 10.0  # a group that was just left, on the same port, takes a moment to go
_SERVER = "custom.extra.rollout_matching.vllm.server"
_WITHOUT_PORTS = "or do without a port: vllm.mode: colocate, or rollout_backend: hf"


@dataclass(frozen=True, kw_only=True)
class Membership:
    """Where a group meets, and who this process is in it."""

    host: str
    port: int
    rank: int
    world_size: int
    timeout_s: float  # for joining, and the default of every later operation
    device: torch.device  # where the tensors are that this rank sends or receives
    group: str  # a name that no other group at this address has or had; ranks of other groups are not met

    def __str__(self) -> str:
        return f"group {self.host}:{self.port} as rank {self.rank} of {self.world_size}"


def meet(member: Membership, given_up: threading.Event) -> dist.Store:
    """The group's key-value store, once all ranks are connected to it.

    Those who join trust what lies in it: `host` must come from a configuration, never from a request.
    """
    deadline = time.monotonic() + member.timeout_s
    while True:
        listening = None
        if member.rank == 0:
            listening = _listen(member)
        else:
            _wait_for_listener(member, given_up)
        store = dist.TCPStore(
            host_name=member.host,
            port=member.port,
            world_size=member.world_size,
            is_master=member.rank == 0,
            timeout=timedelta(seconds=member.timeout_s),
            wait_for_workers=False,  # it would hold the port until the deadline, given up or not
            master_listen_fd=listening,
        )
        meeting = dist.PrefixStore(f"meeting {member.group}", store)
        outcome = (_open if member.rank == 0 else _attend)(meeting, member, deadline, given_up)
        if outcome is None:
            return dist.PrefixStore("group", store)
        del store, meeting  # a traceback that names them would keep the port
        if isinstance(outcome, ProjectError):
            raise outcome


# A port that was just left may still be answered by the old group's store, in which nobody has opened this group. A
# rank that does not find its group open connects again.


def _open(meeting: dist.Store, member: Membership, deadline: float, given_up: threading.Event) -> ProjectError | None:
    """Rank 0: open the group, and wait for the others."""
    meeting.set("open", "1")
    missing = list(range(1, member.world_size))
    while missing := [rank for rank in missing if not meeting.check([f"here/{rank}"])]:
        if given_up.wait(_POLL_S):
            return _given_up(member)
        if time.monotonic() > deadline:
            return _late_joining(member, f"no sign of rank {', '.join(map(str, missing))}")
    meeting.set("complete", "1")
    return None


def _attend(
    meeting: dist.Store, member: Membership, deadline: float, given_up: threading.Event
) -> ProjectError | Literal["connect again"] | None:
    """Another rank: make sure that this is where the group meets, then wait for the rest."""
    met = False
    patience = min(deadline, time.monotonic() + _OPEN_S)
    try:
        while not (met and meeting.check(["complete"])):
            if not met and meeting.check(["open"]):
                meeting.set(f"here/{member.rank}", "1")
                met = True
            if given_up.wait(_POLL_S):
                return _given_up(member)
            if time.monotonic() > deadline:
                return _late_joining(member, "rank 0 there, others missing" if met else "no sign of rank 0")
            if not met and time.monotonic() > patience:
                return "connect again"
    except RuntimeError:  # the old store went while we were connected to it
        if met or time.monotonic() > deadline:
            raise
        return "connect again"
    return None


def _listen(member: Membership) -> int:
    """A listening socket, which the store closes. One that torch opened would listen on every interface."""
    family = socket.getaddrinfo(member.host, member.port, type=socket.SOCK_STREAM)[0][0]
    patience = time.monotonic() + min(_PORT_PATIENCE_S, member.timeout_s)
    with socket.socket(family, socket.SOCK_STREAM) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        while True:
            try:
                listener.bind((member.host, member.port))
                break
            except OSError as error:
                if error.errno != errno.EADDRINUSE or time.monotonic() > patience:
                    raise _cannot_listen(member, error) from error
            time.sleep(_POLL_S)
        listener.listen()
        return listener.detach()


def _wait_for_listener(member: Membership, given_up: threading.Event) -> None:
    """Wait here and not in torch, whose wait can't be given up and aborts a process that ends meanwhile."""
    deadline = time.monotonic() + member.timeout_s
    while not given_up.wait(_POLL_S):
        try:
            socket.create_connection((member.host, member.port), timeout=1.0).close()
            return
        except socket.gaierror:
            raise
        except OSError as error:  # also no route: a network may come up later than this process
            said = error
        if time.monotonic() > deadline:
            raise _late_joining(member, f"nobody listening: {said}")
    raise _given_up(member)


def local_address(member: Membership) -> str:
    """The address of this machine at which the others, who can reach the meeting place, can reach this rank."""
    if member.rank == 0:
        return member.host
    family = socket.getaddrinfo(member.host, member.port, type=socket.SOCK_DGRAM)[0][0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect((member.host, member.port))  # datagram: nothing is sent, the kernel only picks the route
        return str(probe.getsockname()[0])


def late(what: str, found: str) -> DeadlineError:
    return DeadlineError(
        f"{what} did not end in time",
        found=found,
        wanted="all ranks there and alive within the deadline",
        remedy="look for a process that died or can't be reached, or raise the timeout",
    )


def _late_joining(member: Membership, found: str) -> DeadlineError:
    """A rank of the group is not there: it ended, or it can't reach the port."""
    error = late(f"joining {member}", found)
    error.remedy = (
        f"look for a process that died; open {_SERVER}.servers[i].group_port ({member.port}) in the firewall of "
        f"{member.host}, or choose a port that is open; raise {_SERVER}.timeout_s ({member.timeout_s:g} s here) for a "
        f"slow start; {_WITHOUT_PORTS}"
    )
    return error


def _cannot_listen(member: Membership, error: OSError) -> CommunicatorError:
    in_use = error.errno == errno.EADDRINUSE
    cause = "end the process that holds it, or change" if in_use else "correct the server's group_host, or change"
    return CommunicatorError(
        f"joining {member} failed: {member.host}:{member.port} can't be listened at",
        found=str(error),
        wanted="a free TCP port at an address of the server's machine",
        remedy=f"{cause} {_SERVER}.servers[i].group_port ({member.port}); {_WITHOUT_PORTS}",
    )


def _given_up(member: Membership) -> CommunicatorError:
    return CommunicatorError(f"joining {member} was given up")
