"""Manages the groups in which the learner broadcasts weights: decides which servers share a group, joins the groups,
sends, and leaves them.

In: servers and their statuses. Out: joined groups, and futures of the broadcasts. Servers of one machine share a group,
so a bucket leaves the learner's GPU once for all of them: sending 8 GB three times would take 54 ms of its NVLink. Each
server joins at its configured address, so only servers with the same address can share a group.

Invariants: a group's first ranks are the workers of its servers, server by server. The last rank is the learner, which
sends every broadcast. No group has a GPU twice. Every future ends by its own deadline, and this module waits at most
CAUSE_GRACE_S longer. Every error that leaves this module names the servers. Only one thread may use a group.
"""

from __future__ import annotations

import secrets
import uuid
from collections.abc import Callable, Collection, Coroutine, Iterable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from learner.rollout.client import Patience, ServerClient
from shared.aio import LoopThread
from shared.errors import CommunicatorError, DeadlineError, ProjectError, SyncError
from shared.sync.buckets import seal_key
from shared.sync.calls import Operation
from shared.sync.group import Backend, Communicator, start_join
from shared.waits import Deadline
from shared.wire import CloseCommunicatorCall, InitCommunicatorCall, ServerStatus

T = TypeVar("T")
StartJoin = Callable[..., Operation[Communicator]]  # type of `shared.sync.group.start_join`, which tests replace
CAUSE_GRACE_S = 2.0  # max seconds to wait, after a connection broke, for the error of the server that broke it


@dataclass(frozen=True, eq=False, slots=True)
class ServerLink:
    """One server's client, the client's event loop, the server's group port, the number of its workers, and how long
    its `/health/` may be silent (None: as long as a call may take)."""

    client: ServerClient
    loop: LoopThread
    group_port: int
    world_size: int
    patience: Patience | None = None

    @property
    def base_url(self) -> str:
        return self.client.base_url

    def post(self, call: Coroutine[object, None, T]) -> Future[T]:
        """Start a call of the client on its loop, without waiting."""
        return self.loop.submit(call)


class ServerGroup:
    """A group of servers that receive the same broadcasts of weights. The group's ranks connect at the host and the
    group port of its first server."""

    communicator: Communicator  # this rank's connection to the group; set once the group is joined

    def __init__(self, links: Sequence[ServerLink], *, allow_shared_gpu: bool = False) -> None:
        self.links, self.allow_shared_gpu = tuple(links), allow_shared_gpu
        self.rank = sum(link.world_size for link in links)  # the learner is the last rank of the group
        self.name = ", ".join(link.base_url for link in links)

    def join(
        self, secret: str, start_join: StartJoin, device: torch.device, timeout_s: float
    ) -> Operation[Communicator]:
        """Start to join the group as the learner's rank, and return the operation."""
        host, port, backend = self.links[0].client.host, self.links[0].group_port, _backend(device)
        place = (backend, host, port, self.rank, self.rank + 1, timeout_s, device)
        return start_join(*place, secret=bytes.fromhex(secret), allow_shared_gpu=self.allow_shared_gpu)

    def post_inits(self, incarnation: str, secret: str, device: torch.device, timeout_s: float) -> Posts:
        """Ask every server to join. The calls end when all ranks, with the learner's, have joined."""
        posts: list[tuple[ServerLink, Future[None]]] = []
        first_rank = 0
        for link in self.links:
            call = InitCommunicatorCall(
                incarnation=incarnation,
                secret=secret,
                # Only rank 0, a worker of the first server, listens, so all members need its port.
                group_port=self.links[0].group_port,
                first_rank=first_rank,
                world_size=self.rank + 1,
                backend=_backend(device),
                timeout_s=timeout_s,
                allow_shared_gpu=self.allow_shared_gpu,
            )
            posts.append((link, link.post(link.client.init_communicator(call, link.patience))))
            first_rank += link.world_size
        return posts


Post = tuple[ServerLink, Future[Any]]
# HTTP calls to servers. Each call has the future of its answer.
Posts = Sequence[Post]
# Operations that may be unfinished (joining a group, or a broadcast), each with its group.
Sent = Sequence[tuple[ServerGroup, Future[Any]]]


class ServerGroups:
    """The groups that a learner has joined. `incarnation`: a random id, chosen each time the learner joins; servers
    recognize the learner by it. `open_groups` returns one."""

    def __init__(self, groups: Sequence[ServerGroup], incarnation: str, key: bytes) -> None:
        self.groups, self.incarnation, self.seal_key = tuple(groups), incarnation, key

    @property
    def links(self) -> list[ServerLink]:
        return [link for group in self.groups for link in group.links]

    def broadcast(self, bucket: torch.Tensor) -> Sent:
        """Start to send a packed bucket to all workers of all servers. Buckets are sent in the order of these calls."""
        return [(group, group.communicator.start_broadcast(bucket, group.rank).future) for group in self.groups]

    def leave(self, *, abort: bool, gone: Collection[str] = ()) -> Posts:
        """Leave every group, and send a call to all servers that are not in `gone`. `abort` ends pending broadcasts."""
        for group in self.groups:
            if abort:
                group.communicator.abort()
            else:
                group.communicator.close()
        call = CloseCommunicatorCall(incarnation=self.incarnation)
        # A server in `gone` gets no call, because it will not answer.
        here = [link for link in self.links if link.base_url not in gone]
        return [(link, link.post(link.client.close_communicator(call))) for link in here]


def open_groups(
    links: Sequence[ServerLink],
    statuses: Sequence[ServerStatus],
    *,
    device: torch.device,
    timeout_s: float,
    allow_shared_gpu: bool = False,
    start_join: StartJoin = start_join,
    asked: list[Post] | None = None,
) -> ServerGroups:
    """Return the groups when all servers and the learner have joined them. `device`: the device of the weights. Every
    call to a server is appended to `asked`, so that the caller can see which servers failed.

    Raises CommunicatorError, DeadlineError or a server's own error; no group is joined then.
    """
    # All groups share one secret, so that a bucket is sealed once for all groups.
    incarnation, secret = uuid.uuid4().hex, secrets.token_hex(32)
    groups = [ServerGroup(members, allow_shared_gpu=allow_shared_gpu) for members in of_one_machine(links, statuses)]
    posts = [post for group in groups for post in group.post_inits(incarnation, secret, device, timeout_s)]
    if asked is not None:
        # The calls are given to the caller before any wait, so that it can tell which server failed even if joining
        # raises.
        asked += posts
    joins: list[tuple[ServerGroup, Operation[Communicator]]] = []
    try:
        for group in groups:
            joins.append((group, group.join(secret, start_join, device, timeout_s)))
        await_all([(group, join.future) for group, join in joins], posts)
    except BaseException:
        cancel(posts)
        for group, join in joins:
            join.cancel(CommunicatorError(f"joining {group.name} was given up"))  # frees the port for the next group.
            # If the group was joined before the join could be cancelled, leave the group.
            if join.future.exception() is None:
                join.result().abort()
        raise
    for group, join in joins:
        group.communicator = join.result()
    return ServerGroups(groups, incarnation, seal_key(bytes.fromhex(secret)))


def of_one_machine(links: Sequence[ServerLink], statuses: Sequence[ServerStatus]) -> list[list[ServerLink]]:
    """Return the servers as lists, one per group, in configured order. The servers of a group have the same host in
    their URLs, join at the same address, and have no GPU in common."""
    groups: list[tuple[tuple[str, str], list[ServerLink], set[str]]] = []
    for link, status in zip(links, statuses, strict=True):
        address = (link.client.host, status.group_host)
        for there, members, gpus in groups:
            # NCCL refuses two ranks of a group on one GPU.
            if there == address and status.group_host and gpus.isdisjoint(status.gpus):
                members.append(link)
                gpus.update(status.gpus)
                break
        else:
            groups.append((address, [link], set(status.gpus)))
    return [members for _, members, _ in groups]


def await_all(sent: Sent, posts: Posts, *, replies: bool = True) -> None:
    """Wait until all operations of `sent` have ended. With `replies`, also wait until every post is answered.

    Raises the first cause of a failure. Without `replies`, an answer to a post is a failure.
    """
    while True:
        _raise_cause(sent, posts)
        pending = {future for _, future in sent if not future.done()}
        open_posts = {post for _, post in posts if not post.done()}
        # A server answers only after the last bucket, so an earlier answer means that it is in error.
        if not replies and len(open_posts) < len(posts):
            raise _early_reply([link.base_url for link, post in posts if post.done()])
        if not pending and not (replies and open_posts):
            return
        wait(pending | open_posts, return_when=FIRST_COMPLETED)


def cancel(posts: Posts) -> None:
    """Stop waiting for these posts. The servers may still carry out these calls."""
    for _, post in posts:
        post.cancel()


def _raise_cause(sent: Sent, posts: Posts) -> None:
    """Raise the error that made `sent` or `posts` fail, if any failed. If a connection broke, all ranks report only
    that it broke. So this function waits up to CAUSE_GRACE_S for the error of the server that broke it."""
    deadline = Deadline(CAUSE_GRACE_S)
    while errors := [*_errors(post for _, post in posts), *_errors_on_the_wire(sent)]:
        causes = [error for error in errors if not isinstance(error, CommunicatorError | DeadlineError)]
        open_posts = [post for _, post in posts if not post.done()]
        if causes or not open_posts or not wait(open_posts, deadline.left_s(), FIRST_COMPLETED).done:
            raise (causes or errors)[0]


def accused(posts: Posts) -> dict[str, ProjectError]:
    """Return, by URL, the error of each server that failed by itself. A server that only reports a lost connection or a
    missed deadline is left out, because another rank may be the cause."""
    found = {}
    for link, post in posts:
        error = post.exception() if post.done() and not post.cancelled() else None
        if isinstance(error, ProjectError) and not isinstance(error, CommunicatorError | DeadlineError):
            found[link.base_url] = error
    return found


def _errors(futures: Iterable[Future[T]]) -> list[BaseException]:
    ended = (future.exception() for future in futures if future.done() and not future.cancelled())
    return [error for error in ended if error is not None]


def _errors_on_the_wire(sent: Sent) -> list[BaseException]:
    return [
        error.named(group.name) if isinstance(error, ProjectError) else error
        for group, future in sent
        for error in _errors([future])
    ]


def _early_reply(base_urls: Sequence[str]) -> SyncError:
    return SyncError(
        f"{', '.join(base_urls)}: the server answered before it had all buckets",
        found="a reply to /update_weights/",
        wanted="a reply after the last bucket",
        remedy="run the same version of this project on both sides",
    )


def _backend(device: torch.device) -> Backend:
    return "nccl" if device.type == "cuda" else "tcp"
