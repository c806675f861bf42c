"""Decides which samples a step learns, and which samples may be rolled out ahead of their step (R24, R25, D11, D12).
Pure: no threads, no clock.

A share is the samples of one optimizer step, on all ranks. An epoch's samples are cut, in order, into shares. A step
learns its share from ground-truth answers (Channel-A) or from rollouts (Channel-B). So a sample is learned once per
epoch, even if its rollouts are dropped or the run is interrupted. `Shares` says which share a step learns. The choice
of a step's share depends only on the schedule and on the shares learned before, so all ranks agree without
communication. An epoch has a list of shares that are not learned yet. The first shares of this list are for the
scheduled Channel-B steps, the others for Channel-A. If a Channel-B step finds no rollouts, it learns one of the shares
for Channel-A, and a later step learns the unfinished rollouts. As a replacement, the labels of the last share for
Channel-B (`given_up`) are learned instead of rollouts.

`ShareQueue` is one rank's queue of rollouts. The queue says which generation call may start. Around a weight sync no
call may start; this is called a fence. A call rolls out consecutive samples of one share. A place is the number of a
sample within this rank's part of the share. A pack is a few rollouts of one call. Packs wait in the queue until a step
takes the whole share.

    open --request_fence--> fenced --complete_fence--> open          fail: from open or fenced --> failed
                                                                     stop: from open or fenced --> stopped

In a sync every rank calls `request_fence`, and waits until its queue is `quiet` (no call in flight). Only then the rank
enters the collective in which rank 0 sends the weights. Afterwards each rank calls `complete_fence`. So while weights
are sent, no rank has a call in flight or starts one.

Invariants, after every event:
- no sample of a share has two rollouts, queued or in flight. If a sample's rollout is dropped, the sample is rolled out
  again, or its labels are learned;
- all rollouts of a pack come from one version of the weights, because no call spans two versions. Every queued pack is
  at most `version_window` syncs old (`ServedVersion.syncs`), and `take` returns no pack that is more than
  `max_update_lag` updates old;
- the queue holds at most `keep_at_most` packs;
- every rank completes the most urgent share, even if it drops other packs. So this share becomes ready on all ranks;
- `failed` and `stopped` are final, keep the first cause, and make every later request raise it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from learner.config.schedule import exact_ratio, scheduled_channel
from learner.config.sections.stage2_ab import AsyncActorLearnerConfig
from shared.errors import ProjectError, SyncError

DropReason = Literal["oldest", "stale", "unwanted"]


# ---- schedule ------------------------------------------------------------------------------------------------------


class Shares:
    """Says which share a step learns. `left(epoch)` returns the shares of an epoch that are not learned yet, in order.
    `total_steps`: number of steps of the run. In all methods `step` is the next step, and learns a share of `epoch`."""

    def __init__(self, left: Callable[[int], list[int]], *, b_ratio: float, total_steps: int) -> None:
        self._left, self._total_steps = left, total_steps
        self._b_ratio, self._ratio = b_ratio, exact_ratio(b_ratio)

    def of_b(self, step: int, epoch: int, *, through: int | None, most: int | None) -> list[int]:
        """Return the shares whose rollouts the scheduled Channel-B steps from `step` to `through` (None: the run's
        last) will learn: in ascending order, at most `most` shares."""
        stop = self._total_steps if through is None else min(through + 1, self._total_steps)
        found: list[int] = []
        while step < stop and (most is None or len(found) < most):
            left = self._left(epoch)
            found += left[: self._num_b(step, min(len(left), stop - step))]
            step, epoch = step + len(left), epoch + 1
        return found[:most]

    def of_a(self, step: int, epoch: int) -> int:
        """Return the share whose labels `step` learns. Each remaining scheduled Channel-B step needs one of the
        remaining shares; return the first share after these, or the last share if there is none."""
        left = self._left(epoch)
        return left[min(self._num_b(step, len(left)), len(left) - 1)]

    def given_up(self, step: int, epoch: int) -> int:
        """Return the last of the epoch's shares for Channel-B. If `step`, a scheduled Channel-B step, finds no
        rollouts, the labels of this share are learned instead of its rollouts."""
        left = self._left(epoch)
        return left[self._num_b(step, len(left)) - 1]

    def next_b(self, step: int, *, behind: int = 0) -> int | None:
        """Return the first scheduled Channel-B step from `step` on, after skipping `behind` such steps; None if the run
        ends before."""
        if self._ratio == 0:
            return None
        found = math.ceil((math.floor(step * self._ratio) + 1 + behind) / self._ratio) - 1
        assert scheduled_channel(found, self._b_ratio) == "B"
        return found if found < self._total_steps else None

    def _num_b(self, step: int, num_steps: int) -> int:
        """Return how many of the `num_steps` steps from `step` on are scheduled Channel-B steps."""
        stop = min(step + num_steps, self._total_steps)
        return max(0, math.floor(stop * self._ratio) - math.floor(step * self._ratio))


# ---- queue ---------------------------------------------------------------------------------------------------------


class PipelineStoppedError(ProjectError):
    """The queue was used after its end: a caller wanted packs, or a fence (a time in which no call may start)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Bounds:
    """Limits on how far the producer may run ahead."""

    # Calls for shares other than the most urgent one start only while fewer packs than this are queued.
    start_below: int
    keep_at_most: int  # max queued packs; the oldest packs above this number are dropped
    version_window: int  # max syncs between the rollouts of a pack and its learning; older packs are dropped.
    # Max updates from a rollout's weights to the step that learns the rollout; None: no limit.
    max_update_lag: int | None = None
    sync_every: int = 1  # number of shares that are learned as rollouts between two syncs

    @classmethod
    def run_ahead(cls, config: AsyncActorLearnerConfig, *, packs_per_step: int) -> Bounds:
        """Return the bounds of the asynchronous actor-learner (R25). The producer makes `prefetch_target_packs` packs
        ahead, but at least the packs of one step (R27)."""
        # Otherwise the producer would never pause, and would make rollouts only to drop them.
        assert config.prefetch_target_packs <= config.queue_limit, "refused by learner/config/sections/stage2_ab.py"
        assert packs_per_step <= config.queue_limit, "refused by learner/config/plan.py"
        return cls(
            start_below=max(config.prefetch_target_packs, packs_per_step),
            keep_at_most=config.queue_limit,
            version_window=config.version_window,
            max_update_lag=config.max_update_lag,
            sync_every=config.sync_every,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class ServedVersion:
    """The weights on the servers. `updates`: number of optimizer updates in these weights. `syncs`: number of syncs so
    far, without those that only served an evaluation."""

    ver: int
    updates: int
    syncs: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Call:
    """One permitted generation call: neighbouring samples of this rank's part of a share."""

    share: int
    places: range
    by: ServedVersion


@dataclass(frozen=True, kw_only=True, slots=True)
class Pack:
    """The rollouts of some of a call's samples. `index`: the pack's number, counted from 0 on this rank."""

    index: int
    share: int
    places: tuple[int, ...]
    by: ServedVersion


@dataclass(frozen=True, kw_only=True, slots=True)
class Drop:
    """A pack that will not be learned."""

    pack: Pack
    reason: DropReason


@dataclass(frozen=True, kw_only=True, slots=True)
class PackCounts:
    """Counts since the start of the run: how many packs were made, learned and dropped, and how old the learned packs
    were."""

    packs_made: int = 0
    packs_learned: int = 0
    packs_dropped_oldest: int = 0
    packs_dropped_stale: int = 0
    packs_dropped_unwanted: int = 0  # packs dropped because a step learned their samples from labels
    samples_returned: int = 0  # samples that will be rolled out again, because their rollouts were dropped
    age_versions: int = 0  # number of syncs between rollout and learning, summed over the learned packs
    age_updates: int = 0  # number of updates between rollout and learning, summed over the learned packs


@dataclass(frozen=True, kw_only=True, slots=True)
class Outlook:
    """The state of one rank's rollouts, of its own part of each share: finished, begun, and possible."""

    # Keys are the shares of which all samples have rollouts. A value is `ServedVersion.syncs` of the share's oldest
    # pack.
    complete: Mapping[int, int]
    is_making: bool  # True: the most urgent share lacks rollouts, and a call is in flight or may start
    goes_on: bool  # True: calls for other shares may start while the most urgent share waits
    stood_still: bool  # True: at some time since the last `take`, no call was in flight and none was permitted.
    # Keys are the shares with packs or a call in flight. A value is the number of updates in the oldest weights that
    # made rollouts of the share.
    begun: Mapping[int, int]


class ShareQueue:
    """One rank's queue of rollouts, by share (see the module). `size(share)` returns the number of this rank's samples
    of a share. `served`: the weights that the servers have now."""

    def __init__(
        self,
        bounds: Bounds,
        *,
        served: ServedVersion,
        size: Callable[[int], int],
        samples_per_pack: int,
        call_size: int,
    ) -> None:
        assert samples_per_pack >= 1, samples_per_pack
        assert call_size >= 1, call_size
        self.bounds, self.served, self._size = bounds, served, size
        self.samples_per_pack, self.call_size, self.keep_at_most = samples_per_pack, call_size, bounds.keep_at_most
        self.phase: Literal["open", "fenced", "failed", "stopped"] = "open"
        self.cause: BaseException | None = None  # the error that ended the queue (phase `failed`)
        self.wanted: tuple[int, ...] = ()  # shares that may be rolled out, the most urgent first
        self.in_flight: Call | None = None
        self.queue: list[Pack] = []  # packs in the order in which they were made
        self.taken = 0  # number of shares taken since the last sync; the next sync comes after `sync_every` shares
        self._taken_fenced = 0  # number of shares taken since the last request of a fence
        self._stood_still = False  # see `Outlook`
        self.counts = PackCounts()
        self._next_pack = 0

    # ---- producer --------------------------------------------------------------------------------------------------

    @property
    def may_start(self) -> bool:
        """True if a generation call may start: no sync waits for calls to end (fence), no call is in flight, a share
        has samples without rollouts, and the queue has room."""
        return self.phase == "open" and self.in_flight is None and self._next_call() is not None

    def start_call(self) -> Call:
        """Start a call for the most urgent share that has samples without rollouts: up to `call_size` consecutive
        samples."""
        call = self._next_call() if self.in_flight is None else None
        assert call is not None, f"a call was started in phase {self.phase}"
        self.in_flight = call
        return call

    def finish_call(self) -> tuple[list[Pack], list[Drop]]:
        """End the call in flight. Return the call's packs, and the packs that were dropped to make room for them. Both
        lists are empty if the call's share is no longer wanted, or if the queue has ended."""
        call, self.in_flight = self.in_flight, None
        assert call is not None, "no call is in flight"
        if self.ended or call.share not in self.wanted:
            self._count(samples_returned=len(call.places))
            return [], []
        size = self.samples_per_pack
        packs = [
            Pack(index=self._next_pack + i, share=call.share, places=tuple(call.places[at : at + size]), by=call.by)
            for i, at in enumerate(range(0, len(call.places), size))
        ]
        self._next_pack += len(packs)
        self.queue.extend(packs)
        self._count(packs_made=len(packs))
        excess = max(0, len(self.queue) - self.keep_at_most)
        return packs, [self._drop(self._least_useful(), "oldest") for _ in range(excess)]

    def abandon_call(self) -> None:
        """End the call in flight without segments. The caller also calls `fail`."""
        assert self.in_flight is not None, "no call is in flight"
        self.in_flight = None

    def _next_call(self) -> Call | None:
        """Return the next call; None: no call may start. A call for a less urgent share makes at most as many packs as
        fit into the queue."""
        for urgency, share in enumerate(self._makeable()):
            missing = self._missing(share)
            if not missing:
                continue
            most = self.call_size
            # The most urgent share has no such limits, because every rank must complete its rollouts, even if this rank
            # has dropped some.
            if urgency:
                if len(self.queue) >= self.bounds.start_below:
                    return None
                most = min(most, (self.keep_at_most - len(self.queue)) * self.samples_per_pack)
            start = missing[0]
            run = next((i for i, p in enumerate(missing) if p != start + i), len(missing))
            return Call(share=share, places=range(start, start + min(run, most)), by=self.served)
        return None

    def _makeable(self) -> tuple[int, ...]:
        """Return the wanted shares that may be rolled out now, the most urgent first: those that will be learned at
        most `version_window` syncs from now."""
        every = self.bounds.sync_every
        # Packs of later shares would be too old when they are learned. In a run that made them, every second Channel-B
        # step found no usable pack.
        return self.wanted[: max(0, every - self.taken) + self.bounds.version_window * every]

    def _missing(self, share: int) -> list[int]:
        there = {place for pack in self.queue if pack.share == share for place in pack.places}
        return [place for place in range(self._size(share)) if place not in there]

    def _least_useful(self) -> Pack:
        """Return the oldest pack of the shares other than the most urgent one. If there is no such pack, return the
        oldest pack."""
        # Among equally old packs, the pack of the latest share is dropped, because that share is learned last.
        return min(self.queue, key=lambda pack: (pack.share == self.wanted[0], pack.by.syncs, -pack.share, pack.index))

    # ---- consumer --------------------------------------------------------------------------------------------------

    def want(self, shares: Sequence[int]) -> list[Drop]:
        """From now on roll out only `shares`, the most urgent first. Drop and return the packs of other shares."""
        is_idle = self.phase == "open" and self.in_flight is None and self._next_call() is None
        self._stood_still |= is_idle and self._next_pack > 0
        self.wanted = tuple(shares)
        # The queue is copied, because `_drop` removes packs from it.
        return [self._drop(pack, "unwanted") for pack in list(self.queue) if pack.share not in self.wanted]

    def expire(self, step: int) -> list[Drop]:
        """Drop and return the packs that are more than `max_update_lag` updates old at `step`, the next step."""
        lag = self.bounds.max_update_lag
        oldest = -1 if lag is None else step - lag
        return [self._drop(pack, "stale") for pack in list(self.queue) if pack.by.updates < oldest]

    def complete(self) -> dict[int, int]:
        """Return the complete shares, each with `ServedVersion.syncs` of its oldest pack. A share in which this rank
        has no samples is complete."""
        found = {}
        for share in self.wanted:
            syncs = [pack.by.syncs for pack in self.queue if pack.share == share]
            if sum(len(pack.places) for pack in self.queue if pack.share == share) == self._size(share):
                found[share] = min(syncs, default=self.served.syncs)
        return found

    def outlook(self) -> Outlook:
        """Return which shares this rank has rolled out, and what it can still roll out (`Outlook`). One method returns
        all fields, because a call may end between two method calls."""
        urgent, rest = self.wanted[:1], self._makeable()[1:]
        made = [(one.share, one.by.updates) for one in (*self.queue, self.in_flight) if one is not None]
        waiting = sum(pack.share not in urgent for pack in self.queue)
        waiting += sum(-(-self._size(share) // self.samples_per_pack) for share in urgent)
        return Outlook(
            complete=self.complete(),
            is_making=(self.in_flight is not None or self.may_start) and any(map(self._missing, urgent)),
            goes_on=waiting < min(self.bounds.start_below, self.keep_at_most) and any(map(self._missing, rest)),
            stood_still=self._stood_still,
            begun={share: min(updates for other, updates in made if other == share) for share, _ in made},
        )

    def take(self, share: int, step: int) -> list[Pack]:
        """Return a complete share's packs, in the order of their samples, to be learned in `step`. Raises the error
        that ended the queue."""
        self.check()
        packs = sorted((pack for pack in self.queue if pack.share == share), key=lambda pack: pack.places)
        assert share in self.complete(), f"share {share} is not complete"
        for pack in packs:
            syncs, updates = self.served.syncs - pack.by.syncs, step - pack.by.updates
            assert 0 <= syncs <= self.bounds.version_window, f"a pack {syncs} syncs old was queued"
            lag = self.bounds.max_update_lag
            assert updates >= 0, "a pack of later weights"
            assert lag is None or updates <= lag, f"a pack {updates} updates old was queued"
            self.queue.remove(pack)
            self._count(packs_learned=1, age_versions=syncs, age_updates=updates)
        self.wanted = tuple(other for other in self.wanted if other != share)
        self.taken, self._stood_still = self.taken + 1, False
        self._taken_fenced += self.phase == "fenced"
        return packs

    # ---- fence -----------------------------------------------------------------------------------------------------

    def request_fence(self) -> None:
        """Let no call start until `complete_fence`. A second request changes nothing. Raises the error that ended the
        queue."""
        self.check()
        self.phase = "fenced"

    @property
    def quiet(self) -> bool:
        """True if the fence is requested and no call is in flight: this rank may enter the sync's collective."""
        return self.phase == "fenced" and self.in_flight is None

    def complete_fence(self, served: ServedVersion | None) -> list[Drop]:
        """Let calls start again. `served`: the weights that the servers have after the sync; None: there was no sync.
        Drop and return the packs that are too old now.

        Raises SyncError if the version did not rise. The queue has then failed.
        """
        self.check()
        assert self.quiet, "the fence was completed before it was quiet"
        if served is not None and served.ver <= self.served.ver:
            error = SyncError(
                "a sync completed without a new version",
                found=f"ver {served.ver} after ver {self.served.ver}",
                wanted=f"ver > {self.served.ver}",
                remedy="is another learner syncing the same servers? restart them and this run",
            )
            self.fail(error)
            raise error
        self.phase = "open"
        if served is not None:
            # A share that a step took while this sync waited counts for the next sync, because this sync does not send
            # that step's update.
            self.served, self.taken = served, self._taken_fenced
        self._taken_fenced = 0
        oldest_fresh = self.served.syncs - self.bounds.version_window
        return [self._drop(pack, "stale") for pack in list(self.queue) if pack.by.syncs < oldest_fresh]

    # ---- end -------------------------------------------------------------------------------------------------------

    @property
    def ended(self) -> bool:
        """True if the queue has failed or was stopped. After its end no call starts, and no step can take a share."""
        return self.phase in ("failed", "stopped")

    def fail(self, cause: BaseException) -> bool:
        """End the queue with the error `cause`. If the queue has already ended, keep the first cause and return
        False."""
        if self.ended:
            return False
        self.phase, self.cause = "failed", cause
        return True

    def stop(self) -> None:
        """End the queue without an error. After a failure this changes nothing."""
        if self.phase != "failed":
            self.phase = "stopped"

    def check(self) -> None:
        """Raise the error that ended the queue, or PipelineStoppedError if the queue was stopped."""
        if self.cause is not None:
            raise self.cause
        if self.phase == "stopped":
            raise PipelineStoppedError(
                "the rollout pipeline was used after it was stopped",
                found="a call after stop()",
                wanted="no packs or fences any more",
                remedy="look for the error that came first; resume from the checkpoint",
            )

    def _drop(self, pack: Pack, reason: DropReason) -> Drop:
        self.queue.remove(pack)
        self._count(**{f"packs_dropped_{reason}": 1}, samples_returned=len(pack.places))
        return Drop(pack=pack, reason=reason)

    def _count(self, **more: int) -> None:
        self.counts = replace(self.counts, **{name: getattr(self.counts, name) + n for name, n in more.items()})
