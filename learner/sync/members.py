"""Decides which rollout servers take part in a run's syncs. Rank 0 decides, and all ranks have the same membership.

In: servers that a rank has lost, requests of the user and the cluster, and servers that failed a sync. Out: the next
`Membership` on all ranks, and the changes since the last `agree`. A sync goes to the servers that serve or are ready to
serve. After the sync, only the servers that completed it serve (D15, R40). `ReturnWatch` polls the servers that are
left out, and checks their new processes, in the background, so that no step waits for these checks.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future
from typing import TypeVar

from learner.records import ServerChange
from learner.rollout.client import LAST_LOOK_S, ServerClient
from learner.rollout.control import ServerControl
from learner.rollout.membership import Member, Membership
from learner.rollout.server_backend import ServerBackend
from learner.sync.fitness import CheckServer, is_silent, look, on_rank_0
from learner.sync.source import SyncRanks
from shared.errors import DeadlineError, ProjectError
from shared.waits import awake_s, back_off_s, time_limit
from shared.wire import ServerStatus

T = TypeVar("T")
log = logging.getLogger("learner.sync")
# Wait before a server that failed two syncs is tried again. Each further failure doubles the wait.
BACK_OFF_S = 10.0
MAX_BACK_OFF_S = 600.0


class Members:
    """The servers of a run. `control` has the requests of the user and the cluster to add or remove servers. Methods
    are for rank 0, unless they are collective."""

    def __init__(
        self,
        backend: ServerBackend,
        ranks: SyncRanks,
        *,
        control: ServerControl | None,
        check: CheckServer | None = None,
    ) -> None:
        self._backend, self._ranks, self._control = backend, ranks, control
        self.returning = ReturnWatch(backend, check)
        self._changes: list[ServerChange] = []  # changes that `changes` has not returned yet

    def together(self, work: Callable[[], T]) -> T:
        """Agree on the membership, then run `work()` on rank 0. On every rank return the result, and adopt the
        membership as it is after `work`. Collective. Raises ServerError if too few servers are left."""
        self.agree()
        result, membership = on_rank_0(self._ranks, lambda: (work(), self._backend.membership))
        self._backend.adopt(membership)
        return result

    def changes(self) -> Sequence[ServerChange]:
        """Agree on the membership, and return its changes since the last call. Collective. Raises ServerError if too
        few servers are left."""
        self.agree()
        changes, self._changes = self._changes, []
        return changes

    def agree(self) -> None:
        """Make the membership the same on every rank. Collective. Raises ServerError if too few servers are left."""
        lost = self._backend.lost()
        # Each rank has its own connections, so one rank may have lost a server that still answers other ranks.
        reports = self._ranks.all_gather_object(lost)
        membership = self._decided(reports) if self._ranks.is_main else self._backend.membership
        agreed = self._ranks.broadcast_object(membership)
        self._backend.adopt(agreed, told=lost)
        # The check follows the broadcast, so that all ranks raise, and none waits alone in the next collective.
        if not agreed.enough:
            raise agreed.too_few()

    def change_to(self, membership: Membership) -> None:
        """Adopt the next membership, log its changes, and watch the servers that may return."""
        changes = membership.changes_since(self._backend.membership)
        for change in changes:
            log.warning("server %s %s, %d serve %s", change.base_url, change.what, change.serving, change.because)
        self._changes += changes
        self._backend.adopt(membership)
        self.returning.follow(membership.out)
        if self._control is not None:
            self._control.show(membership)

    def leave_out(self, base_url: str, error: ProjectError) -> None:
        """Take out a server that failed the sync. Raises ServerError if too few are left."""
        membership, now_s = self._backend.membership, time.time()
        member = membership.get(base_url)
        if member is not None and member.state == "out":
            membership = membership.refuse(base_url, str(error), now_s=now_s)
        else:
            membership = membership.leave_out(base_url, str(error), now_s=now_s)
        self.change_to(membership)
        if (member := membership.get(base_url)) is not None:
            self.returning.refused(member)
        if not membership.enough:
            raise membership.too_few() from error

    def to_reach(self) -> list[Member]:
        """Return the servers to which a sync sends weights: those that serve, and those that are ready to serve."""
        membership = self._backend.membership
        ready = self.returning.ready()
        return [*membership.serving, *(member for member in membership.out if member.base_url in ready)]

    def check(self, member: Member, status: ServerStatus) -> None:
        """Check the server's process, unless this process has passed before. Waits long for the check only if the run
        cannot continue without the server. Raises the check's error, or DeadlineError."""
        # A server that the run can go on without must not hold up a step.
        is_needed = member.state == "serving" and not self._backend.membership.is_elastic
        # The first score of a new process took a minute under load, which no step should wait for.
        limit_s = self._backend.timeouts.gone_s if is_needed else LAST_LOOK_S
        self._backend.loop.run(self.returning.check(self._backend.client(member.base_url), status, limit_s))

    def _decided(self, reports: Sequence[Mapping[str, str]]) -> Membership:
        """Adopt and return the membership that follows from the ranks' `reports` and from the requests."""
        membership, now_s = self._backend.membership, time.time()
        # Lost servers are handled first: whether a server may be removed depends on how many others still serve.
        for report in reports:
            for base_url, because in report.items():
                membership = membership.leave_out(base_url, because, now_s=now_s)
        for base_url, because in self.returning.unfit().items():
            membership = membership.explain(base_url, because)
        for request in self._control.take() if self._control is not None else ():
            if request.action == "add":
                membership = membership.add(request.base_url, request.group_port, now_s=now_s)
            else:
                smaller = membership.remove(request.base_url, now_s=now_s)
                # A request to remove a server must not end the run.
                if not smaller.serving or not smaller.enough:
                    log.warning("%s is not removed: too few others serve", request.base_url)
                    continue
                membership = smaller
        self.change_to(membership)
        return membership


class ReturnWatch:
    """Polls servers that are left out. A server is ready if its last `/status/` answer has a model that fits, and its
    process has passed `check`. After each refusal a server is tried again after a longer wait."""

    def __init__(self, backend: ServerBackend, check: CheckServer | None = None) -> None:
        self._backend, self._check = backend, check
        self.fit: set[str] = set()  # ids of the server processes that have passed `check`.
        # Keys are URLs. A value is the reason why the server cannot join; "": no reason is known, so it may become
        # ready.
        self._unfit: dict[str, str] = {}
        self._followed: dict[str, float] = {}  # base_url -> time (`awake_s`) of the next try
        self._ready: frozenset[str] = frozenset()
        self._watching: Future[None] | None = None  # None: no watch runs, or the watch is about to end
        self._lock = threading.Lock()  # guards the fields that the watch changes: it runs on the loop's thread

    def follow(self, members: Collection[Member]) -> None:
        """From now on poll exactly these servers."""
        with self._lock:
            # A server that was polled before keeps the time of its next try.
            kept = {member.base_url: self._followed.get(member.base_url, 0.0) for member in members}
            self._followed, self._ready = kept, self._ready & kept.keys()
            if kept and (self._watching is None or self._watching.done()):
                self._watching = self._backend.loop.submit(self._watch())

    def refused(self, member: Member) -> None:
        """Record that a server failed a sync. After the first failure a server may return at once. After later failures
        it must wait, each time longer."""
        wait_s = back_off_s(member.failures - 1, BACK_OFF_S, MAX_BACK_OFF_S) if member.failures > 1 else 0.0
        with self._lock:
            self._followed[member.base_url] = awake_s() + wait_s

    def ready(self) -> list[str]:
        """Return the servers that may join the next sync."""
        now = awake_s()
        with self._lock:
            return [url for url, not_before in self._followed.items() if url in self._ready and now >= not_before]

    def unfit(self) -> dict[str, str]:
        """Return, by URL, the reason why a server that answers cannot join: a wrong token, another model."""
        with self._lock:
            return {url: because for url, because in self._unfit.items() if because and url in self._followed}

    async def check(self, client: ServerClient, status: ServerStatus, limit_s: float) -> None:
        """Check a server's process, if it has not passed yet. Raises the check's error, or DeadlineError after
        `limit_s` seconds."""
        if status.server_id in self.fit:
            return
        if self._check is not None:
            try:
                async with time_limit(limit_s):
                    await self._check(client, status)
            except TimeoutError:
                raise DeadlineError(
                    f"{client.base_url}: this server's process is new, and its check did not end in time",
                    found=f"no end after {limit_s:g} s",
                    wanted="the log-probabilities of a few prompts",
                    remedy="nothing, if it is only slow: it joins once its check has ended",
                ) from None
        # Each start of a server has a new id, so a restarted server is checked again.
        self.fit.add(status.server_id)

    async def _watch(self) -> None:
        while followed := self._to_look_at():
            answered = await asyncio.gather(*(self._is_ready(base_url) for base_url in followed))
            with self._lock:
                self._ready = frozenset(url for url, ready in zip(followed, answered, strict=True) if ready)
            await asyncio.sleep(self._backend.timeouts.poll_s)

    def _to_look_at(self) -> tuple[str, ...]:
        """Return the servers to poll now. If there are no servers to poll, the watch ends."""
        with self._lock:
            if not self._followed:
                # The watch's future ends a moment later. If `_watching` were not set to None here, `follow` would start
                # no new watch until then.
                self._watching = None
            return tuple(self._followed)

    async def _is_ready(self, base_url: str) -> bool:
        found = await look(self._backend, base_url)
        if isinstance(found, ServerStatus):
            try:
                # In the background the check may take long, because no step waits for it.
                await self.check(self._backend.client(base_url), found, self._backend.timeouts.gone_s)
            except ProjectError as error:
                found = error
        is_unfit = isinstance(found, ProjectError) and not is_silent(found)
        with self._lock:
            self._unfit[base_url] = str(found) if is_unfit else ""
        return isinstance(found, ServerStatus)
