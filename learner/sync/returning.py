"""Looks at the servers that are left out, from time to time, so that nobody has to wait to learn which are back."""

from __future__ import annotations

import asyncio
from collections.abc import Collection
from concurrent.futures import Future

from learner.rollout.client import HEALTH_TIMEOUT_S
from learner.rollout.membership import Member
from learner.rollout.server_backend import ServerBackend
from shared.errors import ProjectError
from shared.waits import awake_s, time_limit

BACK_OFF_S = 10.0  # wait after a server could not join; doubled each time
MAX_BACK_OFF_S = 600.0


class ReturnWatch:
    """A server is ready when it has just answered `/status/` with a model that fits. One that was refused is tried
    again later and later."""

    def __init__(self, backend: ServerBackend) -> None:
        self._backend = backend
        self._followed: dict[str, float] = {}  # base_url -> `awake_s` before which it is not tried
        self._ready: frozenset[str] = frozenset()
        self._watching: Future[None] | None = None

    def follow(self, members: Collection[Member]) -> None:
        """Look at these from now on, and at no others."""
        kept = {member.base_url: self._followed.get(member.base_url, 0.0) for member in members}
        self._followed, self._ready = kept, self._ready & kept.keys()
        if kept and (self._watching is None or self._watching.done()):
            self._watching = self._backend.loop.submit(self._watch())

    def refused(self, member: Member) -> None:
        """It failed a sync. The first time it may come back at once."""
        wait_s = min(MAX_BACK_OFF_S, BACK_OFF_S * 2 ** (member.failures - 2)) if member.failures > 1 else 0.0
        self._followed[member.base_url] = awake_s() + wait_s

    def ready(self) -> list[str]:
        """Return the servers that may join the next sync."""
        now, ready = awake_s(), self._ready
        return [base_url for base_url, not_before in self._followed.items() if base_url in ready and now >= not_before]

    async def _watch(self) -> None:
        while followed := tuple(self._followed):
            answered = await asyncio.gather(*(self._is_ready(base_url) for base_url in followed))
            self._ready = frozenset(url for url, ready in zip(followed, answered, strict=True) if ready)
            await asyncio.sleep(self._backend.timeouts.poll_s)

    async def _is_ready(self, base_url: str) -> bool:
        try:
            async with time_limit(HEALTH_TIMEOUT_S):
                await self._backend.look(self._backend.client(base_url), 0.0)
        except (ProjectError, TimeoutError):
            return False
        return True
