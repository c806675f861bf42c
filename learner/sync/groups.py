"""The learner's end of the weight path: a communicator with all servers that can meet at one address.

In: servers, and what they say of themselves. Out: groups, and futures of what travels through them. Servers of one
machine share a group, so that a bucket leaves the learner's GPU once, however many take it: three copies of 8 GB need
54 ms of its NVLink. Each server joins at its own configured address, so only those that have the same one can meet.

Invariants: a group's ranks are its servers' workers, server by server, and the learner last, which is the source of
every broadcast; no group has a GPU twice; each future ends by its own deadline; every error that leaves this module
names the servers. Called by `fleet.py` and the doctor, from one thread.

The learner's end of one server's control path: the sync's HTTP calls.

In: a client, the server's group port and number of workers. Out: futures; nothing here blocks. Invariants: each future
ends by its own deadline; every error that leaves this module names the server. The bytes go another way, by `group.py`.
Called by `fleet.py`, `group.py` and the doctor, from one thread.

Waiting on several servers at once, and saying which of several errors was the cause.

In: futures by server, some on the wire (joins, broadcasts), some over HTTP (posts). Servers of one group share what is
on the wire, and where one of them fails, all do. Out: all done, or the first cause. Invariant: adds no wait of its own
beyond CAUSE_GRACE_S; every future ends by its own deadline. Called by `fleet.py`, `group.py` and the doctor.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from typing import Any, Protocol, TypeVar

import torch

from learner.rollout.client import ServerClient
from learner.rollout.servers import LoopThread
from shared.errors import CommunicatorError, DeadlineError, ProjectError, SyncError
from shared.sync.calls import Operation
from shared.sync.group import Backend
from shared.wire import CloseCommunicatorCall, InitCommunicatorCall, ServerStatus, UpdateWeightsCall, UpdateWeightsReply


class ServerLink:
    """`world_size`: the server's workers. `group_port`: its own; a group meets at that of its first server."""

    def __init__(self, client: ServerClient, *, loop: LoopThread, group_port: int, world_size: int) -> None:
        self.base_url, self.host = client.base_url, client.host
        self.group_port, self.world_size = group_port, world_size
        self._client, self._loop = client, loop

    def post_init(
        self, incarnation: str, *, backend: Backend, port: int, first_rank: int, world_size: int, timeout_s: float
    ) -> Future[None]:
        """Ask the server to take ranks `first_rank`.. of the group of `world_size` that meets at `port` of its host;
        done when all have joined, this side included."""
        call = InitCommunicatorCall(
            incarnation=incarnation,
            group_port=port,
            first_rank=first_rank,
            world_size=world_size,
            backend=backend,
            timeout_s=timeout_s,
        )
        return self._loop.submit(self._client.init_communicator(call))

    def post_update(self, call: UpdateWeightsCall) -> Future[UpdateWeightsReply]:
        """Announce the buckets; done when the server serves and has checked them."""
        return self._loop.submit(self._client.update_weights(call))

    def post_close(self, incarnation: str) -> Future[None]:
        """Tell the server that this learner leaves the group."""
        return self._loop.submit(self._client.close_communicator(CloseCommunicatorCall(incarnation=incarnation)))


T = TypeVar("T")
CAUSE_GRACE_S = 2.0  # after a failure on the wire, for the account of whoever broke it
Futures = Mapping[ServerLink, Future[Any]]


def await_all(wanted: Futures, posts: Futures, *, may_reply: bool = True) -> None:
    """Return when all `wanted` are done well; every future keeps a deadline of its own.

    Raises the first cause among `wanted` and `posts` (HTTP calls that stay open meanwhile). `may_reply`: a post may end
    well before `wanted` does.
    """
    pending = {*wanted.values(), *(post for post in posts.values() if not post.done())}
    while True:
        for link, future in [*posts.items(), *wanted.items()]:
            if _error_of(future) is not None:
                own = [posts[other] for other in posts if wanted.get(other) is wanted.get(link)]
                raise _cause(future, own, list(posts.values()))
        if not may_reply and any(post.done() for post in posts.values()):
            raise _early_reply([link.base_url for link, post in posts.items() if post.done()])
        if all(future.done() for future in wanted.values()):
            return
        _, pending = wait(pending, return_when=FIRST_COMPLETED)


def _cause(failed: Future[Any], own: Sequence[Future[Any]], posts: Sequence[Future[Any]]) -> BaseException:
    """What made `failed` fail. `own`: the posts of those that share it.

    Where a wire broke, everyone on it says so; the one that broke it may have more to say, so it gets a moment.
    """
    error = _error_of(failed)
    assert error is not None
    deadline = time.monotonic() + CAUSE_GRACE_S
    while _is_of_the_wire(error):
        told = [said for post in posts if (said := _error_of(post)) is not None and not _is_of_the_wire(said)]
        if told:
            return told[0]
        pending = [post for post in posts if not post.done()]
        if not pending or not wait(pending, deadline - time.monotonic(), FIRST_COMPLETED).done:
            return next((said for post in own if (said := _error_of(post)) is not None), error)
    return error


def _error_of(future: Future[Any]) -> BaseException | None:
    return future.exception() if future.done() and not future.cancelled() else None


def _is_of_the_wire(error: BaseException) -> bool:
    return isinstance(error, CommunicatorError | DeadlineError)


def _early_reply(base_urls: Sequence[str]) -> SyncError:
    return SyncError(
        f"{', '.join(base_urls)}: the server answered before it had all buckets",
        found="a reply to /update_weights/",
        wanted="a reply after the last bucket",
        remedy="run the same version of this project on both sides",
    )


def cancel(futures: Futures) -> None:
    """Stop waiting for these; what they asked of a server may still happen there."""
    for future in futures.values():
        future.cancel()


def in_thread(name: str, work: Callable[[], T]) -> Future[T]:
    """Run `work` in a daemon thread: unlike an executor's, it can't keep a failing program from ending."""
    future: Future[T] = Future()

    def run() -> None:
        future.set_running_or_notify_cancel()
        try:
            future.set_result(work())
        except BaseException as error:  # handed to whoever waits for the future
            future.set_exception(error)

    threading.Thread(target=run, name=name, daemon=True).start()
    return future


class Wire(Protocol):
    """What the sync needs of a `shared.sync.group.Communicator`."""

    def start_broadcast(self, tensor: torch.Tensor, src: int) -> Operation[None]: ...

    def abort(self) -> None: ...

    def close(self) -> None: ...


class StartJoin(Protocol):
    """`shared.sync.group.start_join`; tests bring their own."""

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
