"""Waiting on several servers at once, and saying which of several errors was the cause.

In: futures by server, some on the wire (joins, broadcasts), some over HTTP (posts). Out: all done, or the first cause.
Invariant: adds no wait of its own beyond CAUSE_GRACE_S; every future ends by its own deadline. Called by
`fleet.py`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from typing import Any

from learner.sync.link import ServerLink
from shared.errors import ProjectError, SyncError

CAUSE_GRACE_S = 2.0  # after a failure on the wire, for the server's own account of it
Futures = Mapping[ServerLink, Future[Any]]


def await_all(wanted: Futures, posts: Futures, *, may_reply: bool = True) -> None:
    """Return when all `wanted` are done well; every future keeps a deadline of its own.

    Raises the first error among `wanted` and `posts` (HTTP calls that stay open meanwhile). Where the wire broke, the
    server's own error is the better account, so it gets a moment to arrive. `may_reply`: a post may end well before
    `wanted` does.
    """
    pending = {*wanted.values(), *(post for post in posts.values() if not post.done())}
    while True:
        for link, future in [*posts.items(), *wanted.items()]:
            if future.done() and future.exception() is not None:
                raise _cause(future, posts.get(link))
        if not may_reply and any(post.done() for post in posts.values()):
            raise _early_reply([link.base_url for link, post in posts.items() if post.done()])
        if all(future.done() for future in wanted.values()):
            return
        _, pending = wait(pending, return_when=FIRST_COMPLETED)


def _cause(failed: Future[Any], post: Future[Any] | None) -> BaseException:
    error = failed.exception()
    assert error is not None
    if post is None or post is failed:
        return error
    wait([post], timeout=CAUSE_GRACE_S)
    told = post.exception() if post.done() and not post.cancelled() else None
    return told if isinstance(told, ProjectError) else error


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
