"""The samples that a step learns, and those that may be rolled out ahead of it (R24, R25, D11, D12). Pure: no threads,
no clock.

An epoch's order is cut into shares, one per optimizer step: what a dataloader batch of a whole step holds. Each share
is learned in one step, as ground truth (Channel-A) or as rollouts (Channel-B), so a sample is learned once per epoch,
whatever is dropped and wherever a run is interrupted. `Shares` says which share that is. It is a function of what was
learned before and of the schedule, so all ranks agree without talking. Of the shares that an epoch has left, the first
ones are for its scheduled Channel-B steps, and the others for Channel-A. A Channel-B step without packs learns one of
the others as ground truth, so packs that are being made stay useful. If there are no others, the last of the first
ones is `given_up`.

`ShareQueue` is one rank's producer, queue and fence. A call rolls out a run of places of one share. Its segments wait
in packs, until a step takes a whole share.

    open --request_fence--> fenced --complete_fence--> open          fail: from open or fenced --> failed
                                                                     stop: from open or fenced --> stopped

A sync over W ranks: every rank requests its fence, waits until it is `quiet` (no call in flight), and only then enters
the collective in which rank 0 moves the weights; each rank leaves it by `complete_fence`. So while weights move no rank
has a call in flight, and none can start one.

Invariants, after every event:
- a place of a share is queued, in flight, or neither, and never twice; what was dropped is made again, or learned as
  ground truth;
- a pack is version-pure: all of it came from one call, and no call spans two versions. Every queued pack is fresh: at
  most `version_window` syncs old (`ServedVersion.syncs`), and `take` gives none that is more than `max_update_lag`
  updates old;
- the queue holds at most `keep_at_most` packs;
- the lowest share that may be made is always completed, so ranks that drop different packs still meet in it;
- `failed` and `stopped` are final, keep the first cause, and are seen by whoever asks for anything afterwards.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from learner.config.schedule import exact_ratio, scheduled_channel
from learner.config.sections.stage2_ab import AsyncActorLearnerConfig
from shared.errors import ConfigError, ProjectError, SyncError

DropReason = Literal["oldest", "stale", "unwanted"]


# ---- which share a step learns -------------------------------------------------------------------------------------


class Shares:
    """`left(epoch)`: the shares of an epoch that are not learned, in order. `total_steps`: the run's length. The step
    that is asked about comes next, and learns a share of `epoch`."""

    def __init__(self, left: Callable[[int], list[int]], *, b_ratio: float, total_steps: int) -> None:
        self._left, self._total_steps = left, total_steps
        self._b_ratio, self._ratio = b_ratio, exact_ratio(b_ratio)

    def of_b(self, step: int, epoch: int, *, through: int | None, most: int | None) -> list[int]:
        """Return the shares to make for the scheduled Channel-B steps from `step` to `through` (None: the run's last),
        lowest first, and at most `most` shares."""
        stop = self._total_steps if through is None else min(through + 1, self._total_steps)
        found: list[int] = []
        while step < stop and (most is None or len(found) < most):
            left = self._left(epoch)
            found += left[: self._num_b(step, min(step + len(left), stop))]
            step, epoch = step + len(left), epoch + 1
        return found[:most]

    def of_a(self, step: int, epoch: int) -> int:
        """Return the share that `step` learns as ground truth: the first one that no scheduled Channel-B step needs,
        else the last."""
        left = self._left(epoch)
        num_b = self._num_b(step, min(step + len(left), self._total_steps))
        return left[min(num_b, len(left) - 1)]

    def given_up(self, step: int, epoch: int) -> int:
        """Return the share that is not learned as rollouts if `step`, a scheduled Channel-B step, learns ground truth:
        the last one that the epoch has for Channel-B."""
        left = self._left(epoch)
        return left[self._num_b(step, min(step + len(left), self._total_steps)) - 1]

    def next_b(self, step: int, *, behind: int = 0) -> int | None:
        """Return the first scheduled Channel-B step from `step` on that has `behind` others before it; None: there is
        none."""
        if self._ratio == 0:
            return None
        found = math.ceil((math.floor(step * self._ratio) + 1 + behind) / self._ratio) - 1
        assert scheduled_channel(found, self._b_ratio) == "B"
        return found if found < self._total_steps else None

    def _num_b(self, start: int, stop: int) -> int:
        return max(0, math.floor(stop * self._ratio) - math.floor(start * self._ratio))


# ---- one rank's queue ----------------------------------------------------------------------------------------------


class PipelineStoppedError(ProjectError):
    """Something was asked of a pipeline that has been stopped."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Bounds:
    """Limits on how far the producer may run ahead."""

    start_below: int  # a call may start while fewer packs than this are queued
    keep_at_most: int  # packs; beyond it the oldest are dropped
    version_window: int  # a pack may be learned while `pack.ver >= ver - version_window`
    max_update_lag: int | None = None  # updates between a rollout's weights and the step that learns it; None: any
    sync_every: int = 1  # shares that are learned as rollouts between two syncs

    @classmethod
    def run_ahead(cls, config: AsyncActorLearnerConfig, *, packs_per_step: int) -> Bounds:
        """Return the bounds of the asynchronous actor-learner (R25): it prefetches what is asked for, and never less
        than a step takes (R27).

        Raises ConfigError if prefetching would only produce packs to drop.
        """
        if config.prefetch_target_packs > config.queue_limit:
            raise ConfigError(
                "stage2_ab.async_actor_learner.prefetch_target_packs exceeds queue_limit",
                found=f"prefetch_target_packs {config.prefetch_target_packs}, queue_limit {config.queue_limit}",
                wanted="prefetch_target_packs <= queue_limit",
                remedy="a producer that may never pause would make rollouts only to drop them; lower the first",
            )
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
    """The weights that the servers have. `updates`: optimizer updates in them. `syncs`: syncs after which Channel-B's
    steps learned; those for an evaluation only do not count."""

    ver: int
    updates: int
    syncs: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Call:
    """One permitted generation call: the places `[start, stop)` of this rank's part of a share."""

    share: int
    start: int
    stop: int
    by: ServedVersion

    @property
    def places(self) -> range:
        return range(self.start, self.stop)


@dataclass(frozen=True, kw_only=True, slots=True)
class Pack:
    """Some of a call's places."""

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
    """Totals since the start."""

    packs_made: int = 0
    packs_learned: int = 0
    packs_dropped_oldest: int = 0
    packs_dropped_stale: int = 0
    packs_dropped_unwanted: int = 0  # packs dropped because their share was learned as ground truth
    samples_returned: int = 0  # drops return them: each of them costs a rollout
    age_versions: int = 0  # summed over learned packs: the window's syncs between making and learning
    age_updates: int = 0  # summed over learned packs: optimizer updates between making and learning


@dataclass(frozen=True, kw_only=True, slots=True)
class Outlook:
    """The shares that one rank has, and the calls that it may still make."""

    complete: Mapping[int, int]  # shares that could be learned as rollouts now; syncs of the oldest of their packs
    is_making: bool  # the most urgent share is not complete, and a call is in flight or may start
    goes_on: bool  # once it is complete, calls for other shares may start although no step has learned it
    stood_still: bool  # since a share was last taken, there was nothing that might be made
    begun: Mapping[int, int]  # shares with rollouts, also in flight; optimizer updates in the oldest weights of each


class ShareQueue:
    """`size(share)`: this rank's samples of a share. `served`: what the servers have now."""

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
        self.cause: BaseException | None = None  # the cause of `failed`
        self.wanted: tuple[int, ...] = ()  # shares that may be made, the most urgent first
        self.in_flight: Call | None = None
        self.queue: list[Pack] = []  # packs in the order in which they were made
        self.taken = 0  # shares taken since the last sync; the next sync comes after `sync_every`
        self._taken_fenced = 0  # shares taken since a fence was requested
        self._stood_still = False  # see `Outlook`
        self.counts = PackCounts()
        self._next_pack = 0

    # ---- the producer's side ---------------------------------------------------------------------------------------

    @property
    def may_start(self) -> bool:
        """A call may start: no fence, none in flight, something to do, and room for what it brings."""
        return self.phase == "open" and self.in_flight is None and self._next_run() is not None

    def start_call(self) -> Call:
        """Start a call: up to `call_size` neighbours of the most urgent share that lacks some."""
        run = self._next_run() if self.in_flight is None else None
        assert run is not None, f"a call was started in phase {self.phase}"
        share, start, stop = run
        self.in_flight = Call(share=share, start=start, stop=stop, by=self.served)
        return self.in_flight

    def finish_call(self) -> tuple[list[Pack], list[Drop]]:
        """The call in flight came back: the new packs, and what was dropped for them. None are made where nobody wants
        the share any more."""
        call, self.in_flight = self.in_flight, None
        assert call is not None, "no call is in flight"
        if self.ended or call.share not in self.wanted:
            self.counts = replace(self.counts, samples_returned=self.counts.samples_returned + len(call.places))
            return [], []
        size = self.samples_per_pack
        groups = [tuple(call.places[i : i + size]) for i in range(0, len(call.places), size)]
        packs = [
            Pack(index=self._next_pack + i, share=call.share, places=group, by=call.by)
            for i, group in enumerate(groups)
        ]
        self._next_pack += len(packs)
        self.queue.extend(packs)
        self.counts = replace(self.counts, packs_made=self.counts.packs_made + len(packs))
        excess = max(0, len(self.queue) - self.keep_at_most)
        return packs, [self._drop(self._least_useful(), "oldest") for _ in range(excess)]

    def abandon_call(self) -> None:
        """The call in flight came back without segments. Whoever says so also says `fail`."""
        assert self.in_flight is not None, "no call is in flight"
        self.in_flight = None

    def _next_run(self) -> tuple[int, int, int] | None:
        """Share, first place and last + 1 of what is to be made next. Beside the most urgent share, only while fewer
        than `start_below` packs wait, and no more than fit the queue, nor what would be too many syncs old by then."""
        for urgency, share in enumerate(self._makeable()):
            missing = self._missing(share)
            if not missing:
                continue
            most = self.call_size
            if urgency:
                if len(self.queue) >= self.bounds.start_below:
                    return None
                most = min(most, (self.keep_at_most - len(self.queue)) * self.samples_per_pack)
            start = missing[0]
            run = next((i for i, p in enumerate(missing) if p != start + i), len(missing))
            return share, start, start + min(run, most)
        return None

    def _makeable(self) -> tuple[int, ...]:
        """The wanted shares that will not be too many syncs old when they are learned."""
        every = self.bounds.sync_every
        return self.wanted[: max(0, every - self.taken) + self.bounds.version_window * every]

    def _missing(self, share: int) -> list[int]:
        there = {place for pack in self.queue if pack.share == share for place in pack.places}
        return [place for place in range(self._size(share)) if place not in there]

    def _least_useful(self) -> Pack:
        """The oldest pack, of shares other than the most urgent one while there are any."""
        return min(self.queue, key=lambda pack: (pack.share == self.wanted[0], pack.by.syncs, -pack.share, pack.index))

    # ---- the consumer's side ---------------------------------------------------------------------------------------

    def want(self, shares: Sequence[int]) -> list[Drop]:
        """Allow these shares to be made from now on, the most urgent first, and no others. Returns packs of others."""
        is_idle = self.phase == "open" and self.in_flight is None and self._next_run() is None
        self._stood_still |= is_idle and self._next_pack > 0
        self.wanted = tuple(shares)
        return [self._drop(pack, "unwanted") for pack in list(self.queue) if pack.share not in self.wanted]

    def expire(self, step: int) -> list[Drop]:
        """Drop what is too many updates old for `step`, which comes next, and so for all later ones."""
        lag = self.bounds.max_update_lag
        oldest = -1 if lag is None else step - lag
        return [self._drop(pack, "stale") for pack in list(self.queue) if pack.by.updates < oldest]

    def complete(self) -> dict[int, int]:
        """Shares that could be learned as rollouts now, and the syncs of the oldest of their packs. A share in which
        this rank has no samples is complete."""
        found = {}
        for share in self.wanted:
            syncs = [pack.by.syncs for pack in self.queue if pack.share == share]
            if sum(len(pack.places) for pack in self.queue if pack.share == share) == self._size(share):
                found[share] = min(syncs, default=self.served.syncs)
        return found

    def outlook(self) -> Outlook:
        """Return what there is, and what to expect. Ask for all of it at once: a call may end at any time."""
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
        """A complete share's packs in the order of their places, learned in `step`. Raises what ended the queue."""
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
            self.counts = replace(
                self.counts,
                packs_learned=self.counts.packs_learned + 1,
                age_versions=self.counts.age_versions + syncs,
                age_updates=self.counts.age_updates + updates,
            )
        self.wanted = tuple(other for other in self.wanted if other != share)
        self.taken, self._stood_still = self.taken + 1, False
        self._taken_fenced += self.phase == "fenced"
        return packs

    # ---- the fence -------------------------------------------------------------------------------------------------

    def request_fence(self) -> None:
        """Let no call start from now on. A second request changes nothing. Raises what ended the queue."""
        self.check()
        self.phase = "fenced"

    @property
    def quiet(self) -> bool:
        """Fenced, and no call is in flight: this rank may enter the sync's collective."""
        return self.phase == "fenced" and self.in_flight is None

    def complete_fence(self, served: ServedVersion | None) -> list[Drop]:
        """Open again. `served`: what the completed sync brought; None: no weights moved. Returns stale packs.

        Raises SyncError, and fails, where the version did not rise.
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
            self.served, self.taken = served, self._taken_fenced
        self._taken_fenced = 0
        oldest_fresh = self.served.syncs - self.bounds.version_window
        return [self._drop(pack, "stale") for pack in list(self.queue) if pack.by.syncs < oldest_fresh]

    # ---- the end ---------------------------------------------------------------------------------------------------

    @property
    def ended(self) -> bool:
        """Failed or stopped: nothing will be started or taken any more."""
        return self.phase in ("failed", "stopped")

    def fail(self, cause: BaseException) -> bool:
        """End with `cause`. False where the queue had already ended: the first cause stays."""
        if self.ended:
            return False
        self.phase, self.cause = "failed", cause
        return True

    def stop(self) -> None:
        """End in order: nothing more will be started or taken. After a failure it changes nothing."""
        if self.phase != "failed":
            self.phase = "stopped"

    def check(self) -> None:
        """Raise what ended the queue: the failure itself, with its type, or PipelineStoppedError."""
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
        counts = self.counts
        self.counts = replace(
            counts,
            packs_dropped_oldest=counts.packs_dropped_oldest + (reason == "oldest"),
            packs_dropped_stale=counts.packs_dropped_stale + (reason == "stale"),
            packs_dropped_unwanted=counts.packs_dropped_unwanted + (reason == "unwanted"),
            samples_returned=counts.samples_returned + len(pack.places),
        )
        return Drop(pack=pack, reason=reason)
