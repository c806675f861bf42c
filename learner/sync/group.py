"""The learner's end of the weight path: a communicator with all servers that can meet at one address.

In: servers, and what they say of themselves. Out: groups, and futures of what travels through them. Servers of one
machine share a group, so that a bucket leaves the learner's GPU once, however many take it: three copies of 8 GB need
54 ms of its NVLink. Each server joins at its own configured address, so only those that have the same one can meet.

Invariants: a group's ranks are its servers' workers, server by server, and the learner last, which is the source of
every broadcast; no group has a GPU twice; each future ends by its own deadline; every error that leaves this module
names the servers. Called by `fleet.py` and the doctor, from one thread.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any, Protocol, TypeVar

import torch

from learner.sync.link import ServerLink
from learner.sync.waiting import Futures, await_all, cancel, in_thread
from shared.communicator import Backend
from shared.errors import CommunicatorError, ProjectError
from shared.operation import Operation
from shared.wire import ServerStatus

T = TypeVar("T")


class Wire(Protocol):
    """What the sync needs of a `shared.communicator.Communicator`."""

    def start_broadcast(self, tensor: torch.Tensor, src: int) -> Operation[None]: ...

    def abort(self) -> None: ...

    def close(self) -> None: ...


class StartJoin(Protocol):
    """`shared.communicator.start_join`; tests bring their own."""

    def __call__(
        self,
        backend: Backend,
        host: str,
        port: int,
        rank: int,
        world_size: int,
        timeout_s: float,
        device: torch.device | str = ...,
        *,
        group: str,
    ) -> Operation[Any]: ...  # of a `Wire`


class ServerGroup:
    """Meets at the first server's host and group port. `device` is where the weights are."""

    def __init__(
        self, links: Sequence[ServerLink], *, device: torch.device, timeout_s: float, start_join: StartJoin
    ) -> None:
        self.links = tuple(links)
        self._rank = sum(link.world_size for link in links)  # the learner's
        self._device, self._timeout_s, self._start_join = device, timeout_s, start_join
        self._backend: Backend = "nccl" if device.type == "cuda" else "gloo"
        self._joining: Operation[Wire] | None = None
        self._wire: Wire | None = None

    @property
    def name(self) -> str:
        return ", ".join(link.base_url for link in self.links)

    def post_inits(self, incarnation: str) -> Futures:
        """Ask every server to join; done when all have, this side included."""
        posts: dict[ServerLink, Future[None]] = {}
        first_rank = 0
        for link in self.links:
            posts[link] = link.post_init(
                incarnation,
                backend=self._backend,
                port=self.links[0].group_port,
                first_rank=first_rank,
                world_size=self._rank + 1,
                timeout_s=self._timeout_s,
            )
            first_rank += link.world_size
        return posts

    def join(self, incarnation: str) -> Future[Wire]:
        """Join from this side; then `adopt` or `give_up`."""
        host, port = self.links[0].host, self.links[0].group_port
        where = (self._backend, host, port, self._rank, self._rank + 1, self._timeout_s, self._device)
        self._joining = joining = self._named(lambda: self._start_join(*where, group=incarnation))
        return in_thread(f"join {self.name}", lambda: self._named(joining.result))

    def adopt(self) -> None:
        """Use what was joined."""
        self._wire, self._joining = self._pending().result(), None

    def give_up(self, joined: Future[Wire]) -> None:
        """Stop joining, so that the next group finds the port to itself; leave what was joined at the last moment."""
        self._pending().cancel(CommunicatorError(f"joining {self.name} was given up"))
        joined.add_done_callback(_abort_late)

    def broadcast(self, bucket: torch.Tensor) -> Future[None]:
        """Send one packed bucket to all workers of all servers, after those that were given before."""
        operation = self._named(lambda: self._joined().start_broadcast(bucket, self._rank))
        return in_thread(f"broadcast {self.name}", lambda: self._named(operation.result))

    def leave(self, *, abort: bool) -> None:
        """Drop the communicator; `abort` breaks off what is pending. Harmless when there is none."""
        wire, self._wire = self._wire, None
        if wire is not None:
            if abort:
                wire.abort()
            else:
                wire.close()

    def _pending(self) -> Operation[Wire]:
        assert self._joining is not None, "join() comes first"
        return self._joining

    def _joined(self) -> Wire:
        if self._wire is None:
            raise CommunicatorError(
                "the group was left", found="a broadcast", wanted="a joined group", remedy="connect() first"
            )
        return self._wire

    def _named(self, work: Callable[[], T]) -> T:
        try:
            return work()
        except ProjectError as error:
            what = f"{self.name}: {error.what}"
            raise type(error)(what, found=error.found, wanted=error.wanted, remedy=error.remedy) from error


def of_one_machine(links: Sequence[ServerLink], statuses: Sequence[ServerStatus]) -> list[list[ServerLink]]:
    """Which servers can meet: those that the learner finds at one host, that join at one address of their own, and
    that have no GPU in common. In configured order."""
    groups: list[tuple[tuple[str, str], list[ServerLink], set[str]]] = []
    for link, status in zip(links, statuses, strict=True):
        address = (link.host, status.group_host)
        for there, members, gpus in groups:
            if there == address and status.group_host and gpus.isdisjoint(status.gpus):
                members.append(link)
                gpus.update(status.gpus)
                break
        else:
            groups.append((address, [link], set(status.gpus)))
    return [members for _, members, _ in groups]


def open_groups(groups: Sequence[ServerGroup], incarnation: str) -> None:
    """Returns when all groups are joined by all. Raises CommunicatorError, DeadlineError or a server's own error; no
    group is joined then."""
    posts = {link: post for group in groups for link, post in group.post_inits(incarnation).items()}
    joins: dict[ServerGroup, Future[Wire]] = {}
    try:
        for group in groups:
            joins[group] = group.join(incarnation)
        await_all({link: joins[group] for group in groups for link in group.links}, posts)
        await_all(posts, posts)
    except BaseException:
        for group, join in joins.items():
            group.give_up(join)
        cancel(posts)
        raise
    for group in groups:
        group.adopt()


def _abort_late(joined: Future[Wire]) -> None:
    if joined.exception() is None:
        joined.result().abort()
