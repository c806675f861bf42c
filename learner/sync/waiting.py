"""Waiting on several servers at once, and saying which of several errors was the cause.

In: futures by server, some on the wire (joins, broadcasts), some over HTTP (posts). Servers of one group share what is
on the wire, and where one of them fails, all do. Out: all done, or the first cause. Invariant: adds no wait of its own
beyond CAUSE_GRACE_S; every future ends by its own deadline. Called by `fleet.py`, `group.py` and the doctor.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from typing import Any, TypeVar

from learner.sync.link import ServerLink
from shared.errors import CommunicatorError, DeadlineError, SyncError

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
