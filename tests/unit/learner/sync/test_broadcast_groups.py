"""Tests of which servers meet in one group, and of which error is told when they lose each other (R09)."""

from __future__ import annotations

import threading
from concurrent.futures import Future
from typing import Any, cast

import pytest

from learner.rollout.client import ServerClient
from learner.sync import broadcast_groups as module
from learner.sync.broadcast_groups import ServerGroup, ServerLink, await_all, of_one_machine
from shared.aio import LoopThread
from shared.errors import CommunicatorError, CoverageError, DeadlineError, ProjectError, ServerError, SyncError
from shared.wire import ServerStatus
from tests.unit.learner.rollout import fakes


class Client:
    def __init__(self, host: str) -> None:
        self.base_url, self.host = f"http://{host}", host


def link(host: str) -> ServerLink:
    client, loop = cast(ServerClient, Client(host)), cast(LoopThread, None)
    return ServerLink(client, loop, 1, 1)


def groups(*servers: tuple[str, str, list[str]]) -> list[list[int]]:
    """Return the groups of servers, each a (host in the URL, group_host, gpus), as indices."""
    links = [link(host) for host, _, _ in servers]
    statuses = [ServerStatus(**fakes.status(group_host=address, gpus=gpus)) for _, address, gpus in servers]
    return [[links.index(member) for member in members] for members in of_one_machine(links, statuses)]


@pytest.mark.parametrize(
    ("servers", "wanted"),
    [
        ([("h", "1.2.3.4", ["A"]), ("h", "1.2.3.4", ["B", "C"]), ("h", "1.2.3.4", ["D"])], [[0, 1, 2]]),
        ([("h", "1.2.3.4", []), ("h", "1.2.3.4", [])], [[0, 1]]),  # both on CPU
        ([("h", "1.2.3.4", ["A"]), ("i", "1.2.3.5", ["B"]), ("h", "1.2.3.4", ["C"])], [[0, 2], [1]]),
        ([("h", "127.0.0.1", ["A"]), ("i", "127.0.0.1", ["B"])], [[0], [1]]),  # another machine's own loopback
        ([("h", "10.0.0.1", ["A"]), ("h", "10.0.0.2", ["B"])], [[0], [1]]),  # containers behind one address
        ([("h", "1.2.3.4", ["A", "B"]), ("h", "1.2.3.4", ["B"]), ("h", "1.2.3.4", ["C"])], [[0, 2], [1]]),
        ([("h", "", ["A"]), ("h", "", ["B"])], [[0], [1]]),  # addresses are not told
    ],
)
def test_who_meets(servers: list[tuple[str, str, list[str]]], wanted: list[list[int]]) -> None:
    """One machine, one address, and no GPU twice: NCCL refuses that."""
    assert groups(*servers) == wanted


def future(outcome: object = None) -> Future[Any]:
    made: Future[Any] = Future()
    if isinstance(outcome, BaseException):
        made.set_exception(outcome)
    elif outcome is not None:
        made.set_result(outcome)
    return made


LOST = CommunicatorError("connection closed by peer")
CAUSE = CoverageError("layer.bias was not written")


@pytest.mark.parametrize(
    ("wire", "posts", "told"),
    [
        (LOST, (LOST, CAUSE), "layer.bias"),
        (LOST, (None, CAUSE), "layer.bias"),
        (None, (LOST, CAUSE), "layer.bias"),
        ("sent", (CAUSE, None), "layer.bias"),
        (DeadlineError("late"), (LOST, ServerError("the engine died")), "the engine died"),
        (LOST, (None, CommunicatorError("port in use")), "port in use"),
        (LOST, (None, None), "closed by peer"),
    ],
)
def test_the_cause_is_told_not_what_came_of_it(
    monkeypatch: pytest.MonkeyPatch, wire: Any, posts: tuple[Any, Any], told: str
) -> None:
    monkeypatch.setattr(module, "CAUSE_GRACE_S", 0.05)
    group = ServerGroup([link("a"), link("b")])
    with pytest.raises(ProjectError, match=told):
        await_all([(group, future(wire))], list(zip(group.links, map(future, posts), strict=True)))


def test_what_the_wire_says_names_the_servers_on_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "CAUSE_GRACE_S", 0.05)
    with pytest.raises(CommunicatorError, match="http://a, http://b: connection closed"):
        await_all([(ServerGroup([link("a"), link("b")]), future(LOST))], [])


def test_a_reply_before_the_last_bucket_is_an_error() -> None:
    """It can't be about all of them; after the last bucket it is what everybody waits for."""
    group = ServerGroup([link("a")])
    sent, posts = [(group, future("sent"))], [(group.links[0], future("reply"))]
    await_all(sent, posts)
    with pytest.raises(SyncError, match=r"http://a: .* before it had all buckets"):
        await_all(sent, posts, replies=False)


def test_the_cause_may_come_last(monkeypatch: pytest.MonkeyPatch) -> None:
    """It may come after the last bucket too, when nothing but the replies is waited for."""
    monkeypatch.setattr(module, "CAUSE_GRACE_S", 5.0)
    posts = [(link("a"), future(LOST)), (link("b"), future())]
    threading.Timer(0.05, lambda: posts[1][1].set_exception(CAUSE)).start()
    with pytest.raises(CoverageError, match="was not written"):
        await_all([], posts)
