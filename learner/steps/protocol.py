"""Fence, queue and versions of rollout ahead of learning: one rank's part, as a pure state machine (R24, R25).

No threads, no clock, no weights: positions in the rank's sample stream go in, permissions and drops come out.
`pipeline` drives one `RankProtocol` under a lock; the tests drive several of them through every order of events.

    open --request_fence--> fenced --complete_fence--> open          fail: from open or fenced --> failed
                                                                     stop: from open or fenced --> stopped

A sync over W ranks: every rank requests its fence, waits until it is `quiet` (no call in flight), and only then enters
the collective in which rank 0 moves the weights; each rank leaves it by `complete_fence(ver)`. So while weights move no
rank has a call in flight, and none can start one.

Invariants, after every event:
- Each position that was ever taken from the stream is in exactly one place: waiting to be made again, in the call in
  flight, in a pack of the queue, or learned. A dropped pack's positions wait to be made again, lowest first, before any
  new one, so dropping costs a rollout and never a sample.
- A pack is version-pure: all of it came from one call, and no call spans two versions. Every queued pack is fresh,
  `pack.ver >= ver - version_window`, because the version rises only in `complete_fence`, which drops the others.
- The queue holds at most `keep_at_most` packs, or, where nothing is dropped, fewer than `start_below` plus one call's.
- `failed` and `stopped` are final, keep the first cause, and are seen by whoever asks for anything afterwards.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from learner.config.schema import AsyncActorLearnerConfig
from shared.errors import ConfigError, ProjectError, SyncError

PackDropReason = Literal["oldest", "stale"]


class PipelineStoppedError(ProjectError):
    """Something was asked of a pipeline that has been stopped."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Bounds:
    """How far the producer may run ahead. The same machine serves both modes; only these numbers differ."""

    start_below: int  # a call may start while fewer packs than this are queued
    keep_at_most: int | None  # beyond it the oldest are dropped; None: nothing is dropped, the producer stops instead
    version_window: int  # a pack may be learned while `pack.ver >= ver - version_window`
    max_update_lag: int | None = None  # updates between a rollout's weights and the step that learns it; None: any

    @classmethod
    def in_step(cls, queue_limit: int = 1) -> Bounds:
        """Synchronous Channel-B (R32): while one call runs, `queue_limit` packs may wait; full, the producer pauses."""
        return cls(start_below=queue_limit + 1, keep_at_most=None, version_window=0)

    @classmethod
    def run_ahead(cls, config: AsyncActorLearnerConfig, *, packs_per_step: int) -> Bounds:
        """Asynchronous actor-learner (R25): prefetches what is asked for, and never less than a step takes (R27).

        Raises ConfigError where prefetching would only produce packs to drop.
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
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class StreamState:
    """Where a rank's sample stream stands, for a checkpoint: what a resumed run has still to learn, in order."""

    next_position: int = 0  # the first position never taken
    unlearned: tuple[int, ...] = ()  # taken before it, but not learned; ascending
    next_call: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Call:
    """One permitted generation call."""

    index: int  # counts this rank's calls, also across a resume: no two calls share it
    positions: tuple[int, ...]  # of the sample stream; contiguous where nothing was dropped
    ver: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Pack:
    """One packed row's worth of stream positions, all made by weights `ver`."""

    index: int
    positions: tuple[int, ...]
    ver: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Drop:
    """A pack that will not be learned. Its positions are already waiting to be made again."""

    pack: Pack
    reason: PackDropReason


@dataclass(frozen=True, kw_only=True, slots=True)
class Counts:
    """Totals since the start. Samples are stream positions."""

    packs_made: int = 0
    packs_learned: int = 0
    packs_dropped_oldest: int = 0
    packs_dropped_stale: int = 0
    samples_learned: int = 0
    samples_returned: int = 0  # by drops: each of them costs one more rollout
    age_versions: int = 0  # summed over learned packs: versions between making and learning


class RankProtocol:
    """One rank's producer, queue and fence. `end` is the stream's length (None: endless), `ver` what is served now."""

    def __init__(
        self, bounds: Bounds, *, ver: int, call_size: int, end: int | None, resume: StreamState | None = None
    ) -> None:
        assert call_size >= 1, call_size
        start = resume or StreamState()
        self.bounds, self.ver, self.call_size, self.end = bounds, ver, call_size, end
        self.phase: Literal["open", "fenced", "failed", "stopped"] = "open"
        self.cause: BaseException | None = None  # of `failed`
        self.in_flight: Call | None = None
        self.queue: deque[Pack] = deque()  # oldest first
        self.waiting: list[int] = list(start.unlearned)  # ascending
        self.next_position, self.next_call, self.next_pack = start.next_position, start.next_call, 0
        self.counts = Counts()

    # ---- the producer's side ---------------------------------------------------------------------------------------

    @property
    def has_work(self) -> bool:
        """Positions are left that no call has taken."""
        return bool(self.waiting) or self.end is None or self.next_position < self.end

    @property
    def may_start(self) -> bool:
        """A call may start: no fence, none in flight, room for what it brings, something to do."""
        return (
            self.phase == "open"
            and self.in_flight is None
            and len(self.queue) < self.bounds.start_below
            and self.has_work
        )

    def start_call(self) -> Call:
        """Take up to `call_size` positions: those that came back first, then new ones."""
        assert self.may_start, f"a call was started in phase {self.phase}"
        again, self.waiting = self.waiting[: self.call_size], self.waiting[self.call_size :]
        stop = self.next_position + self.call_size - len(again)
        stop = stop if self.end is None else min(stop, self.end)
        new = range(self.next_position, stop)
        self.next_position = stop
        self.in_flight = Call(index=self.next_call, positions=(*again, *new), ver=self.ver)
        self.next_call += 1
        return self.in_flight

    def finish_call(self, groups: Sequence[Sequence[int]]) -> tuple[list[Pack], list[Drop]]:
        """The call in flight came back as packs, one per group. Returns the new packs and what was dropped for them.

        In a final phase its result has no taker: the positions go back, and nothing is queued.
        """
        call, self.in_flight = self.in_flight, None
        assert call is not None, "no call is in flight"
        assert sorted(p for group in groups for p in group) == sorted(call.positions), "a call's samples changed"
        if self.ended:
            self._give_back(call.positions)
            return [], []
        packs = [Pack(index=self.next_pack + i, positions=tuple(g), ver=call.ver) for i, g in enumerate(groups)]
        self.next_pack += len(packs)
        self.queue.extend(packs)
        self.counts = replace(self.counts, packs_made=self.counts.packs_made + len(packs))
        limit = self.bounds.keep_at_most
        excess = 0 if limit is None else max(0, len(self.queue) - limit)
        return packs, [self._drop(self.queue[0], "oldest") for _ in range(excess)]

    def abandon_call(self) -> None:
        """The call in flight came back without rows: its positions go back. Whoever says so also says `fail`."""
        call, self.in_flight = self.in_flight, None
        assert call is not None, "no call is in flight"
        self._give_back(call.positions)

    # ---- the consumer's side ---------------------------------------------------------------------------------------

    @property
    def exhausted(self) -> bool:
        """Every position of the stream was learned; the end."""
        return not self.queue and self.in_flight is None and not self.has_work

    @property
    def can_arrive(self) -> bool:
        """A pack is queued, or one can still come without the consumer doing anything but wait."""
        return bool(self.queue) or self.in_flight is not None or self.may_start

    def take(self) -> Pack | None:
        """The oldest pack, learned from now on; None while there is none. Raises what ended the protocol."""
        self.check()
        if not self.queue:
            return None
        pack = self.queue.popleft()
        age = self.ver - pack.ver
        assert 0 <= age <= self.bounds.version_window, f"a pack of ver {pack.ver} was queued at ver {self.ver}"
        self.counts = replace(
            self.counts,
            packs_learned=self.counts.packs_learned + 1,
            samples_learned=self.counts.samples_learned + len(pack.positions),
            age_versions=self.counts.age_versions + age,
        )
        return pack

    def stream_state(self) -> StreamState:
        """For a checkpoint between optimizer steps, when every pack taken has been learned."""
        queued = [p for pack in self.queue for p in pack.positions]
        flying = self.in_flight.positions if self.in_flight else ()
        unlearned = tuple(sorted([*self.waiting, *flying, *queued]))
        return StreamState(next_position=self.next_position, unlearned=unlearned, next_call=self.next_call)

    # ---- the fence -------------------------------------------------------------------------------------------------

    def request_fence(self) -> None:
        """From now on no call starts. A second request changes nothing. Raises what ended the protocol."""
        self.check()
        self.phase = "fenced"

    @property
    def quiet(self) -> bool:
        """Fenced, and no call is in flight: this rank may enter the sync's collective."""
        return self.phase == "fenced" and self.in_flight is None

    def complete_fence(self, ver: int | None) -> list[Drop]:
        """Open again. `ver`: the version that the completed sync made; None: no weights moved. Returns stale packs.

        Raises SyncError, and fails, where the version did not rise.
        """
        self.check()
        assert self.quiet, "the fence was completed before it was quiet"
        if ver is not None and ver <= self.ver:
            error = SyncError(
                "a sync completed without a new version",
                found=f"ver {ver} after ver {self.ver}",
                wanted=f"ver > {self.ver}",
                remedy="is another learner syncing the same servers? restart them and this run",
            )
            self.fail(error)
            raise error
        self.phase = "open"
        self.ver = self.ver if ver is None else ver
        oldest_fresh = self.ver - self.bounds.version_window
        return [self._drop(pack, "stale") for pack in list(self.queue) if pack.ver < oldest_fresh]

    # ---- the end ---------------------------------------------------------------------------------------------------

    @property
    def ended(self) -> bool:
        """Failed or stopped: nothing will be started or taken any more."""
        return self.phase in ("failed", "stopped")

    def fail(self, cause: BaseException) -> bool:
        """End with `cause`. False where the protocol had already ended: the first cause stays."""
        if self.ended:
            return False
        self.phase, self.cause = "failed", cause
        return True

    def stop(self) -> None:
        """End in order: nothing more will be started or taken. After a failure it changes nothing."""
        if self.phase != "failed":
            self.phase = "stopped"

    def check(self) -> None:
        """Raise what ended the protocol: the failure itself, with its type, or PipelineStoppedError."""
        if self.cause is not None:
            raise self.cause
        if self.phase == "stopped":
            raise PipelineStoppedError(
                "the rollout pipeline was used after it was stopped",
                wanted="no packs or fences after stop()",
                remedy="start a new pipeline from the checkpoint's stream state",
            )

    # ---- bookkeeping -----------------------------------------------------------------------------------------------

    def _drop(self, pack: Pack, reason: PackDropReason) -> Drop:
        self.queue.remove(pack)
        self._give_back(pack.positions)
        counts = self.counts
        self.counts = replace(
            counts,
            packs_dropped_oldest=counts.packs_dropped_oldest + (reason == "oldest"),
            packs_dropped_stale=counts.packs_dropped_stale + (reason == "stale"),
            samples_returned=counts.samples_returned + len(pack.positions),
        )
        return Drop(pack=pack, reason=reason)

    def _give_back(self, positions: Sequence[int]) -> None:
        self.waiting = sorted([*self.waiting, *positions])
