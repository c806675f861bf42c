"""The gate: calls and weight updates take turns (R10).

    serving(ver) --begin_update--> draining --drained--> updating --complete--> serving(new ver)
         draining, updating --fail--> poisoned --begin_update(full)--> draining
         serving --poison--> poisoned        updating --complete_base--> poisoned --begin_update(adapter)--> draining

`Gate` is the pure state machine: no clock, no asyncio, no engine. `WaitingGate` adds the waiting: calls wait for
updates, updates wait for calls, both up to a deadline. `WaitingGate` must be used on one event loop only.

Invariants:
- calls are in flight only in `serving` and `draining`, so no call sees two versions;
- `updating` begins with no call in flight;
- versions rise, also over several learners, so two models are never served under one version;
- `poisoned` (calls are refused) ends only with a complete full update, because weights are overwritten in place and
  cannot be restored; the base weights of an adapter are complete only together with the adapter of the same learner;
- only the learner that opened the group can send an update. A learner is known by its `incarnation`, a random id;
- a refused request changes nothing.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Literal

from shared.aio import reason
from shared.errors import DeadlineError, ServerBusyError, ServerPoisonedError, SyncError
from shared.waits import time_limit
from shared.wire import ServedWeights

State = Literal["serving", "draining", "updating", "poisoned"]


@dataclass(frozen=True, kw_only=True)
class Update:
    """The update that is being received or checked."""

    incarnation: str
    ver: int
    mode: Literal["full", "adapter"]


class Gate:
    """The state of the served weights, at first `serving`. Version 0 names the checkpoint's weights, with which the
    server starts; `weights` is their digest."""

    def __init__(self, weights: str = "") -> None:
        self.state: State = "serving"
        self.served = ServedWeights(ver=0, incarnation="", weights=weights)
        self.in_flight = 0
        self.incarnation = ""
        self.poisoned_because = ""
        self.update: Update | None = None
        # True: this learner has sent base weights, and its adapter must follow
        self._awaits_adapter = False
        self._base_ver = 0  # version of the last base weights that were sent for an adapter
        self._unsound = False  # True: the served weights were found to be wrong

    @property
    def ver(self) -> int:
        return self.served.ver

    def try_enter(self) -> bool:
        """Let a call in, or return False if it has to wait for an update. Raises ServerPoisonedError."""
        if self.state == "poisoned":
            raise self._poisoned()
        if self.state != "serving":
            return False
        # The call is counted in the same step in which the state is read, so no update can begin in between.
        self.in_flight += 1
        return True

    def leave(self) -> None:
        """Record that an admitted call has ended, with or without an error."""
        assert self.in_flight > 0, "more calls left than entered"
        self.in_flight -= 1

    def poison(self, because: str) -> None:
        """Record that the served weights are wrong. Serving stops at once, unless an update is running."""
        self._unsound = True
        # The first reason is kept, because later failures follow from the first one.
        self.poisoned_because = self.poisoned_because or because
        if self.state == "serving":
            self.state = "poisoned"

    def check_sound(self) -> None:
        """Raises ServerPoisonedError if the weights were found to be wrong after the call was let in."""
        if self._unsound:
            raise self._poisoned()

    def open_group(self, incarnation: str) -> None:
        """Record that a learner opened a group, which replaces any other group. May not be called during an update."""
        assert self.update is None, "fail the update before its group is replaced"
        self._awaits_adapter = False
        self.incarnation = incarnation

    def close_group(self) -> None:
        """Record that the group is closed. May not be called during an update."""
        assert self.update is None, "fail the update before its group is closed"
        self.incarnation = ""

    def check_update(self, incarnation: str, ver: int, mode: Literal["full", "adapter"]) -> None:
        """Raises SyncError if this update would be refused now. Changes nothing."""
        if self.update is not None:
            raise _refused(f"an update to version {self.update.ver} is under way", "one update at a time")
        if incarnation != self.incarnation or not incarnation:
            raise _refused(
                f"incarnation {incarnation!r}, while the group belongs to {self.incarnation or 'nobody'!r}",
                "the incarnation that opened the group",
            )
        # An update of an adapter's base weights uses up a version number, which is never served.
        last = max(self.ver, self._base_ver) if self._awaits_adapter else self.ver
        # Versions rise even if another learner sends them, so that two models never answer under one version.
        if ver <= last:
            raise _refused(f"version {ver}", f"a version above {last}, the last that this server has seen")
        # An adapter alone cannot repair a poisoned server: it does not replace the base weights, which may be wrong.
        if self.state == "poisoned" and mode != "full" and not self._awaits_adapter:
            raise _refused(f"a sync in mode {mode} of a poisoned server", "a full sync")

    def begin_update(self, incarnation: str, ver: int, mode: Literal["full", "adapter"]) -> None:
        """Begin an update: new calls wait from now on. If the update is not allowed, raises SyncError and changes
        nothing."""
        # Nothing has changed yet, so a refused update does not poison the server.
        self.check_update(incarnation, ver, mode)
        self.update = Update(incarnation=incarnation, ver=ver, mode=mode)
        self.state = "draining"

    def drained(self) -> bool:
        """Return True if all calls in flight have ended. The weights may be overwritten from then on."""
        assert self.update is not None, "no update under way"
        if self.in_flight == 0:
            self.state = "updating"
        return self.state == "updating"

    def complete(self, weights: str = "") -> None:
        """End the update: its weights are checked and served from now on. `weights`: the digest of the update's
        weights."""
        assert self.update is not None, "no update under way"
        assert self.state == "updating", "only drained updates complete"
        self.served = ServedWeights(ver=self.update.ver, incarnation=self.update.incarnation, weights=weights)
        self.state, self.poisoned_because, self.update = "serving", "", None
        self._awaits_adapter = self._unsound = False

    def complete_base(self) -> None:
        """End an update of an adapter's base weights. Nothing is served until this learner's adapter has been loaded,
        too."""
        assert self.update is not None, "no update under way"
        self._base_ver = self.update.ver
        # Base weights alone are not the learner's policy, so they are never served.
        self.fail("the weights below an adapter have come, and the adapter has not")
        self._awaits_adapter = True

    def fail(self, because: str) -> None:
        """End the update as failed. The gate is poisoned (all calls are refused), because the weights may be partly
        overwritten."""
        assert self.update is not None, "no update under way"
        self.state, self.poisoned_because, self.update = "poisoned", because, None
        self._awaits_adapter = False

    def _poisoned(self) -> ServerPoisonedError:
        return ServerPoisonedError(
            "the served weights are not known to be right",
            found=self.poisoned_because,
            wanted="a complete full sync",
            remedy="let the learner sync again, or restart the server",
        )


def _refused(found: str, wanted: str) -> SyncError:
    return SyncError(
        "the weight update was refused", found=found, wanted=wanted, remedy="open the group again with this learner"
    ).as_status(409)


@dataclass
class Outcome:
    """The result of a successful update. The body of `async with WaitingGate.exclusive(...)` fills it in."""

    weights: str = ""  # digest of the new weights


class WaitingGate:
    """A gate with waiting calls and updates. `waiting` counts the waiting calls, `gate.in_flight` the admitted
    calls."""

    def __init__(self, gate: Gate, *, queue_timeout_s: float, drain_timeout_s: float) -> None:
        self.gate = gate
        self.waiting = 0
        self._queue_timeout_s = queue_timeout_s
        self._drain_timeout_s = drain_timeout_s
        self._changed = asyncio.Event()

    @asynccontextmanager
    async def call(self) -> AsyncIterator[int]:
        """Let a call in until the `async with` block ends; yields the version that serves it.

        Raises ServerPoisonedError, or ServerBusyError if the wait for an update took too long.
        """
        if not self.gate.try_enter():
            await self._wait_to_enter()
        try:
            yield self.gate.ver
        finally:
            self.gate.leave()
            self._notify()

    @asynccontextmanager
    async def exclusive(
        self, incarnation: str, ver: int, mode: Literal["full", "adapter"], *, base_of_adapter: bool = False
    ) -> AsyncIterator[Outcome]:
        """Run the body of `async with` for an update, once all calls have ended. If the body returns, the new version
        is served, or waits for its adapter. If the body raises, the server is poisoned. Raises SyncError if the gate
        refuses the update, DeadlineError if calls do not end in time."""
        self.gate.begin_update(incarnation, ver, mode)
        try:
            await self._drain()
            outcome = Outcome()
            yield outcome
        except BaseException as error:
            # A cancelled update poisons the server too: weights may be half overwritten, and they cannot be restored.
            self.gate.fail(reason(error))
            raise
        else:
            self.gate.complete_base() if base_of_adapter else self.gate.complete(outcome.weights)
        finally:
            self._notify()

    async def _wait_to_enter(self) -> None:
        self.waiting += 1
        try:
            async with time_limit(self._queue_timeout_s):
                await self._until(self.gate.try_enter)
        except TimeoutError:
            raise ServerBusyError(
                "a weight update is under way",
                found=f"no end after {self._queue_timeout_s:g} s of waiting",
                wanted="the end of the update",
                remedy="try again later, or raise the server's queue_timeout_s",
            ) from None
        finally:
            self.waiting -= 1

    async def _drain(self) -> None:
        try:
            async with time_limit(self._drain_timeout_s):
                await self._until(self.gate.drained)
        except TimeoutError:
            raise DeadlineError(
                "calls in flight did not end before the update",
                found=f"{self.gate.in_flight} in flight after {self._drain_timeout_s:g} s",
                wanted="no call in flight",
                remedy="raise the server's drain_timeout_s, or lower max_tokens",
            ) from None

    async def _until(self, predicate: Callable[[], bool]) -> None:
        while not predicate():
            await self._changed.wait()

    def _notify(self) -> None:
        # An Event is used instead of a Condition: a cancelled wait for the Condition's lock would lose the
        # notification.
        self._changed.set()
        self._changed = asyncio.Event()
