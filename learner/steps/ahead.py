"""Runs steps of Channel-B (which learn rollouts) with rollouts made before the step: the asynchronous actor-learner
(R25, R27, D11, D12).

A share is the samples that one step learns, on all ranks (see the module `shares`). On each rank a producer (a thread,
see the module `producer`) makes rollouts of coming shares while the learner learns. A pack is the rollouts of a few
samples. A Channel-B step takes a share whose rollouts are ready on all ranks. The step packs the segments of these
rollouts into as few rows as possible; all rollouts of a row come from one version of the weights. A step of Channel-A
learns the ground truth of a share. So both channels use one stream of samples, and each sample is learned once per
epoch, also across a resume, on any number of ranks. A sample's seed depends only on its share and its index in that
share, not on how calls and ranks divide the share.

Weights are synced after `sync_every` executed Channel-B steps. A sync comes earlier if rollouts with the served weights
would be more than `max_update_lag` updates old at the next Channel-B step. With `version_window: 0` only packs made
since the last sync are learned. A sync for an evaluation does not count in a pack's age. Before a sync each rank starts
no new call, and waits for its call in flight. If a step still has samples to learn, it goes on meanwhile: the sync then
runs between two of its rows, as soon as no rank has a call in flight, or after its last row. Such a sync sends the
weights from before the step, because weights change only at the step's end.

A scheduled Channel-B step may find no share that is ready on all ranks. A Channel-B step without rollouts runs
Channel-A if two conditions hold: a later step can still learn the unfinished rollouts, and the producers can make
rollouts of other shares meanwhile. If a condition fails, the step waits for the unfinished rollouts, because later
steps would find no rollouts either. The run ends after `max_starved_steps` scheduled Channel-B steps in a row that ran
Channel-A. With `b_ratio: 1` every step waits.

Invariants: the invariants of the module `shares` hold; every rank enters a fence (a block in which its producer makes
no call), or no rank does; all ranks learn the same share. The producer's thread has its own encoder, so the two threads
have no data in common.
"""

from __future__ import annotations

import logging
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any

from learner.config.schedule import ChannelDecision, decide_channel, scheduled_channel
from learner.data.batches import MicroBatch, ShareReader, Shortfall
from learner.journal.log import PhaseClock
from learner.records import PackedRow, Segment
from learner.rollout.backend import AHEAD_OF_STEPS, MicroStep
from learner.steps.producer import CallStages, Producer
from learner.steps.shares import Bounds, Call, Outlook, PackCounts, ServedVersion, ShareQueue, Shares
from learner.steps.source import Fence
from learner.steps.stage2 import (
    CALLS_PER_STEP,
    CLOSE_S,
    DEADLINE_KEY,
    CallTotals,
    RankMetrics,
    Stage2Parts,
    Stage2Steps,
    call_metrics,
)
from shared.errors import DeadlineError

ASYNC = "stage2_ab.async_actor_learner"
# Fields of `PackCounts` that are metrics of a step, summed over ranks.
SUMMED_COUNTS = (
    "packs_made",
    "packs_learned",
    "packs_dropped_oldest",
    "packs_dropped_stale",
    "packs_dropped_unwanted",
    "samples_returned",
)
LOOK_AHEAD = 4  # max shares (samples of one step) that are encoded before Channel-A learns them

log = logging.getLogger("learner.stage2")


class StarvedError(DeadlineError):
    """Too many scheduled Channel-B steps in a row found no packs."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Sizes:
    """The number of samples in a pack, and in a generation call, of one rank."""

    samples_per_pack: int
    call_size: int

    @classmethod
    def of(cls, *, samples_per_pack: int, packs_per_step: int, capacity: int) -> Sizes:
        """Return the sizes. A call has as many whole packs as the servers decode at once (`capacity` samples), or a
        quarter of a step's packs if that is more. A call has at most one step's packs, because a sync waits for the
        call in flight. The calls of a step have about equally many samples. If the queue has less room, `ShareQueue`
        makes a call shorter."""
        # When each call made only one pack, servers decoded 8 samples at once instead of 64, and 12 of 16 steps found
        # no rollouts.
        packs = max(1, min(max(capacity // samples_per_pack, packs_per_step // CALLS_PER_STEP), packs_per_step))
        calls = -(-packs_per_step // packs)
        return cls(
            samples_per_pack=samples_per_pack,
            call_size=-(-packs_per_step // calls) * samples_per_pack,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class StepChoice:
    """Rank 0's decision for a step: its channel, and the share (the samples) that all ranks learn in it."""

    decision: ChannelDecision
    share: int


NOTHING = Outlook(complete={}, is_making=False, goes_on=False, stood_still=False, begun={})


def common(ready: Sequence[Outlook]) -> set[int]:
    """Return the numbers of the shares whose rollouts are complete on all ranks."""
    return set(ready[0].complete).intersection(*(one.complete for one in ready[1:]))


class Stage2Ahead(Stage2Steps):
    """The steps of stage 2 whose rollouts are made ahead of learning. `reader` reads samples for the producer.
    `capacity`: number of samples that the servers decode at once for this rank. `deadline_s`: longest wait for a call
    in flight. `deadline_s` is shorter than the time that ranks wait for each other."""

    def __init__(
        self,
        parts: Stage2Parts,
        reader: ShareReader,
        *,
        bounds: Bounds,
        samples_per_pack: int,
        capacity: int,
        total_steps: int,
        max_starved_steps: int,
        deadline_s: float,
    ) -> None:
        super().__init__(parts)
        self._reader, self._bounds, self._deadline_s = reader, bounds, deadline_s
        # `_starved` counts the Channel-B steps in a row that found no packs.
        self._max_starved_steps, self._starved = max_starved_steps, 0
        packs = parts.packs_per_step
        self._sizes = Sizes.of(samples_per_pack=samples_per_pack, packs_per_step=packs, capacity=capacity)
        self._shares = Shares(parts.batches.left, b_ratio=parts.b_ratio, total_steps=total_steps)
        self._producer: Producer | None = None  # this rank's producer; None: before the first sync
        self._synced_at = 0  # number of optimizer updates in the weights of the servers
        self._next_step = 0
        self._share_of_step = 0
        # Number of Channel-B steps. The count begins at the limit, so that a sync is due before the first step.
        self._learned_since_sync = bounds.sync_every
        self._learned_meanwhile = 0  # number of Channel-B steps learned while a sync was postponed
        self._is_postponed = False  # True: the sync that this step wants was postponed
        self._depth = 0  # number of queued packs when the step's channel was chosen
        self._reported = (PackCounts(), CallTotals())  # totals after the last step; metrics are the increase since then
        log.info("rollouts run ahead: %s, %s", bounds, self._sizes)

    def wants_sync(self, global_step: int) -> bool:
        """Return True if a sync is due: `sync_every` Channel-B steps have passed, or rollouts by the served weights
        would be too old in the next Channel-B step. Return False if a sync would not help, because rollouts by the
        present weights would be too old too."""
        next_b = self._shares.next_b(global_step)
        if next_b is None or self._too_far(next_b, global_step):
            return False
        return self._learned_since_sync >= self._bounds.sync_every or self._too_far(next_b, self._synced_at)

    def postpones_sync(self, global_step: int) -> bool:
        """Return True if the sync has to wait for a call in flight, and the step has samples that it can learn
        meanwhile. The sync then runs between two rows of the step, or after the last row. Such a sync sends the weights
        from before the step, because weights change only at the step's end."""
        if self._producer is None or self.is_quiet():
            return False
        # `is_quiet` has requested the fence, so no rank starts a new call. `is_quiet` is called again between two rows.
        # Without postponing, steps of 4 to 6 s waited 0.5 to 3 s for the call.
        if scheduled_channel(global_step, self._parts.b_ratio) == "A":
            self._is_postponed = True
        else:
            self._is_postponed = bool(common(self._ranks.all_succeed(lambda: self._ready(global_step))))
        return self._is_postponed

    def is_quiet(self) -> bool:
        producer = self._producer
        assert producer is not None, "a sync was postponed before the first one"
        return all(self._ranks.all_succeed(producer.request_fence))

    @contextmanager
    def fence(self) -> Iterator[Fence]:
        """Enclose work during which no rank has a call in flight. Collective. The producer starts after the first fence
        in which the weights were synced."""
        # A step that is learned while this sync waits counts for the next sync, because this sync does not send the
        # step's update.
        producer, counts = self._producer, self._learned_since_sync > self._learned_meanwhile
        with ExitStack() as stack:
            fences = [Fence()]  # this fence is used before the first sync, when no producer exists
            if producer is not None:
                with self._clock.phase("wait"):
                    enter = producer.fence(self._deadline_s, counts=counts)
                    # If one rank's calls do not end in time, all ranks raise: no rank may wait alone in the sync's
                    # collective.
                    self._ranks.all_succeed(lambda: fences.append(stack.enter_context(enter)))
            fence = fences[-1]
            yield fence
        self._is_postponed = False
        if fence.ver is None:
            return
        self._learned_since_sync, self._learned_meanwhile = self._learned_meanwhile, 0
        self._synced_at = fence.updates
        if producer is None:
            self._producer = self._make_producer(ServedVersion(ver=fence.ver, updates=fence.updates))
        self._want(max(fence.updates, self._next_step))

    def shortfall(self) -> Shortfall | None:
        batches = self._parts.batches
        return self._in_segments(batches.shortfall_of(batches.size(self._share_of_step), 1))

    def restore(self, state: Mapping[str, Any]) -> None:
        assert self._producer is None, "restored after the producer had started"
        super().restore(state)

    def stop(self) -> None:
        if self._producer is not None:
            self._producer.stop()

    def close(self) -> None:
        """See `StepSource`. Raises DeadlineError if the producer does not end."""
        try:
            if self._producer is not None:
                self._producer.close()
        finally:
            self._reader.close()

    # ---- choice ----------------------------------------------------------------------------------------------------

    @property
    def _epoch(self) -> int:
        """The epoch, counted from 0, whose samples the next step learns."""
        return self._parts.batches.num_taken // self._parts.batches.per_epoch

    def _too_far(self, step: int, updates: int) -> bool:
        """Return True if a rollout by weights after `updates` optimizer updates would be too old in `step`."""
        lag = self._bounds.max_update_lag
        return lag is not None and step - updates > lag

    def _decide(self, global_step: int) -> ChannelDecision:
        choice: StepChoice | None = None
        while choice is None:
            ready = self._ranks.all_succeed(lambda: self._ready(global_step))
            chosen = self._choose(global_step, ready) if self._ranks.is_main else None
            # `broadcast_object` does not accept None, so the choice is put into a tuple. `chosen` is None as long as
            # rank 0 cannot choose.
            (choice,) = self._ranks.broadcast_object((chosen,))
            if choice is None:
                with self._clock.phase("wait"):
                    self._ranks.all_succeed(self._await_call)
        self._share_of_step, self._next_step = choice.share, global_step + 1
        if choice.decision.wanted == "B":
            self._starved = self._starved + 1 if choice.decision.skipped_due_to_queue else 0
        if self._starved >= self._max_starved_steps:
            self._raise_starved()
        return choice.decision

    def _ready(self, global_step: int) -> Outlook:
        """Return the state of this rank's rollouts (`Outlook`). Complete shares of other epochs are left out."""
        if self._producer is None:
            return NOTHING
        self._want(global_step)
        outlook = self._producer.outlook(global_step)
        self._depth = self._producer.stats().queued
        left = set(self._parts.batches.left(self._epoch))
        return replace(outlook, complete={share: syncs for share, syncs in outlook.complete.items() if share in left})

    def _await_call(self) -> None:
        assert self._producer is not None, "a wait before the first sync"
        self._producer.await_call(self._deadline_s)

    def _choose(self, global_step: int, ready: Sequence[Outlook]) -> StepChoice | None:
        """Return the channel and the share of the step. If shares have rollouts on all ranks, Channel-B learns the
        share with the oldest rollouts. If no share is ready, Channel-A learns the ground truth of a share. Return None
        if the step must wait for rollouts instead."""
        shares = common(ready)
        decision = decide_channel(global_step, self._parts.b_ratio, feasible=bool(shares))
        if decision.channel == "B":
            share = min(shares, key=lambda share: (min(one.complete[share] for one in ready), share))
            return StepChoice(decision=decision, share=share)
        if decision.skipped_due_to_queue and self._waits(global_step, ready):
            return None
        return StepChoice(decision=decision, share=self._shares.of_a(global_step, self._epoch))

    def _waits(self, global_step: int, ready: Sequence[Outlook]) -> bool:
        """Return True if a Channel-B step without ready rollouts waits for the rollouts of the most urgent share. The
        step waits in three cases: `b_ratio` is 1; the producers were idle or soon would be; Channel-A would make
        rollouts useless."""
        if not any(one.is_making for one in ready):
            return False
        # All producers were idle for a time, so they began this share's rollouts late. If the step does not wait, they
        # will begin every later share late too.
        if all(one.stood_still for one in ready):
            return True
        bounds = self._bounds
        # With `version_window: 0` producers make only the rollouts of steps before the next sync. Until that sync they
        # have nothing else to do, so waiting for them loses nothing.
        if self._parts.b_ratio == 1 or bounds.version_window == 0 or not all(one.goes_on for one in ready):
            return True
        # If this step ran Channel-A, the labels of the share `given_up` would be learned, and its rollouts, already
        # begun, would be dropped.
        if any(self._shares.given_up(global_step, self._epoch) in one.begun for one in ready):
            return True
        # Until the next sync all rollouts come from the weights that are served now, or from older weights.
        behind = max(1, bounds.sync_every - self._learned_since_sync - 1)
        last = self._shares.next_b(global_step + 1, behind=behind)
        made_at = min((updates for one in ready for updates in one.begun.values()), default=self._synced_at)
        return last is None or self._too_far(last, made_at)

    def _want(self, step: int) -> None:
        """Tell the producer which shares to roll out: the shares of the Channel-B steps from `step` (the next step)
        on."""
        assert self._producer is not None
        bounds = self._bounds
        through = None if bounds.max_update_lag is None else self._synced_at + bounds.max_update_lag
        self._producer.want(self._shares.of_b(step, self._epoch, through=through, most=bounds.keep_at_most))

    def _raise_starved(self) -> None:
        # All ranks describe their queues, because a single slow rank can starve all others.
        found = self._ranks.all_gather_object(self._producer.describe() if self._producer else "no sync yet")
        raise StarvedError(
            f"{self._starved} Channel-B steps in a row found no packs",
            found="; ".join(f"rank {rank}: {text}" for rank, text in enumerate(found)),
            wanted=f"packs within {ASYNC}.max_starved_steps ({self._max_starved_steps}) of them",
            remedy="look at the rollout servers' /status/ and logs; if rollouts are only slow, make them faster "
            "(servers, decode_batch_size, shorter answers), or lower stage2_ab.schedule.b_ratio; to wait for them, "
            f"lower {ASYNC}.prefetch_target_packs to {self._parts.packs_per_step}, or raise {ASYNC}.max_starved_steps",
        )

    # ---- rows ------------------------------------------------------------------------------------------------------

    def _next_batch(self) -> MicroBatch:
        """Return the samples that Channel-A learns in this step. Start to encode also the samples that Channel-A will
        probably learn next."""
        share, batches = self._share_of_step, self._parts.batches
        behind = [other for other in batches.left(self._epoch) if other > share][:LOOK_AHEAD]
        batch = batches.take(share, then=behind)
        if self._producer is not None:
            self._want(self._next_step)
        return batch

    def _channel_b(self) -> Generator[PackedRow]:
        """Yield the rows of the step's rollouts. The rollouts are ready, so the clock's phase `wait` is short."""
        producer = self._producer
        assert producer is not None, "Channel-B before the first sync"
        with self._clock.phase("wait"):
            packs = producer.take(self._share_of_step, self._global_step)
        self._parts.batches.skip(self._share_of_step)
        self._learned_since_sync += 1
        self._learned_meanwhile += self._is_postponed
        self._want(self._next_step)
        with self._clock.phase("pack"):
            rows = self._rows(packs)
        yield from rows

    def _rows(self, packs: Sequence[Sequence[Segment]]) -> list[PackedRow]:
        """Return as few rows as the packs of each version need. All rollouts of a row have the same version (R25)."""
        by_ver = sorted(packs, key=lambda pack: pack[0].ver or 0)
        versions = groupby(by_ver, key=lambda pack: pack[0].ver)
        return [row for _, group in versions for row in self._parts.row_maker.rows([s for pack in group for s in pack])]

    def _rank_metrics(self) -> RankMetrics:
        """Return this rank's metrics of the step: the length of the queue, the age of the learned packs, the dropped
        packs, and the seconds of the calls."""
        learned_share = {"stage2_ab/async/share": float(self._share_of_step)}
        if self._producer is None:
            return RankMetrics(means=learned_share)
        stats, (counts, calls) = self._producer.stats(), self._reported
        self._reported = (stats.counts, stats.calls)

        def since(name: str) -> float:
            """Return the increase of a count since the last step."""
            return float(getattr(stats.counts, name) - getattr(counts, name))

        means = {
            **learned_share,
            "stage2_ab/async/queue_depth": float(self._depth),
            "stage2_ab/async/starved_steps": float(self._starved),
            **call_metrics(stats.calls, calls),
        }
        if learned := since("packs_learned"):
            for name in ("age_versions", "age_updates"):
                means[f"stage2_ab/async/{name}"] = since(name) / learned
        return RankMetrics(means=means, sums={f"stage2_ab/async/{name}": since(name) for name in SUMMED_COUNTS})

    # ---- producer --------------------------------------------------------------------------------------------------

    def _make_producer(self, served: ServedVersion) -> Producer:
        queue = ShareQueue(
            self._bounds,
            served=served,
            size=self._reader.size,
            samples_per_pack=self._sizes.samples_per_pack,
            call_size=self._sizes.call_size,
        )
        stages = CallStages(read=self._reader.read, roll_out=self._roll_out)
        return Producer(queue, stages, deadline_key=DEADLINE_KEY, close_s=CLOSE_S)

    def _roll_out(self, call: Call, part: MicroBatch) -> list[Segment]:
        """Return the segments of a call. A sample's seed depends on the number of its share, and on its index among all
        ranks' samples of that share."""
        step = MicroStep(samples=part.samples, micro_step_idx=AHEAD_OF_STEPS, first_req_idx=part.first_req_idx)
        clock = PhaseClock()  # the trainer's clock belongs to the thread that learns
        return self._parts.rollouts.segments(step, part.prompts, global_step=call.share, clock=clock)
