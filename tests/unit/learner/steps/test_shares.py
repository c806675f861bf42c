"""Tests of D11, D12 and R25: which share a step learns, and one rank's queue, as pure machines under random orders of
events."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import asdict

import pytest
from hypothesis import given
from hypothesis import strategies as st

from learner.config.schedule import scheduled_channel
from learner.config.sections.stage2_ab import AsyncActorLearnerConfig
from learner.steps.shares import Bounds, PackCounts, PipelineStoppedError, ServedVersion, ShareQueue, Shares
from shared.errors import SyncError

RATIOS = st.sampled_from([0.0, 0.01, 0.1, 0.3, 0.5, 0.75, 1.0])
RANDOM = st.randoms(use_true_random=False)
SAMPLES_PER_PACK, PACKS_PER_STEP = 2, 3


class Epochs:
    """The samples that are left of epoch after epoch."""

    def __init__(self, per_epoch: int) -> None:
        self.per_epoch, self.done = per_epoch, set[int]()

    @property
    def epoch(self) -> int:
        return len(self.done) // self.per_epoch

    def left(self, epoch: int) -> list[int]:
        return [s for s in range(epoch * self.per_epoch, (epoch + 1) * self.per_epoch) if s not in self.done]


@given(b_ratio=RATIOS, per_epoch=st.integers(1, 9), total=st.integers(1, 40), chance=RANDOM)
def test_shares_for_rollouts_and_for_ground_truth_do_not_meet(
    b_ratio: float, per_epoch: int, total: int, chance: random.Random
) -> None:
    """Whatever Channel-B steps are skipped: a scheduled Channel-A step takes nothing that is made for Channel-B, every
    scheduled Channel-B step has a share to learn, and each share is learned once."""
    epochs = Epochs(per_epoch)
    shares = Shares(epochs.left, b_ratio=b_ratio, total_steps=total)
    for step in range(total):
        wanted = shares.of_b(step, epochs.epoch, through=None, most=None)
        assert len(wanted) == sum(scheduled_channel(s, b_ratio) == "B" for s in range(step, total)) == len(set(wanted))
        assert wanted[:2] == shares.of_b(step, epochs.epoch, through=None, most=2)
        near = shares.of_b(step, epochs.epoch, through=step + 3, most=None)
        assert near == wanted[: sum(scheduled_channel(s, b_ratio) == "B" for s in range(step, min(step + 4, total)))]
        truth = shares.of_a(step, epochs.epoch)
        left = epochs.left(epochs.epoch)
        assert truth == next((one for one in left if one not in wanted), left[-1])
        share = truth
        if scheduled_channel(step, b_ratio) == "A":
            assert truth not in wanted
        elif chance.random() < 0.6:
            share = wanted[0]
            assert share in epochs.left(epochs.epoch), "the most urgent share is of this epoch"
        epochs.done.add(share)
    assert len(epochs.done) == total
    assert not any(epochs.left(epoch) for epoch in range(total // per_epoch)), "an epoch was begun before another ended"


@given(b_ratio=RATIOS, step=st.integers(0, 300), total=st.integers(1, 300), behind=st.integers(0, 3))
def test_the_next_channel_b_step(b_ratio: float, step: int, total: int, behind: int) -> None:
    found = Shares(Epochs(1).left, b_ratio=b_ratio, total_steps=total).next_b(step, behind=behind)
    scheduled = [s for s in range(step, total) if scheduled_channel(s, b_ratio) == "B"]
    assert found == (scheduled[behind] if behind < len(scheduled) else None)


@given(
    world_size=st.integers(1, 3),
    window=st.integers(0, 2),
    lag=st.integers(1, 6),
    every=st.integers(1, 3),
    more=st.integers(0, 4),
    call_packs=st.integers(1, 3),
    sizes=st.lists(st.integers(0, SAMPLES_PER_PACK * PACKS_PER_STEP), min_size=3, max_size=3),
    chance=RANDOM,
)
def test_queues_of_several_ranks(
    world_size: int,
    window: int,
    lag: int,
    every: int,
    more: int,
    call_packs: int,
    sizes: list[int],
    chance: random.Random,
) -> None:
    """Every share is learned as rollouts or not at all, each place once; queues are bounded; all ranks come to have one
    share complete, whatever each of them dropped before."""
    bounds = Bounds(
        start_below=PACKS_PER_STEP,
        keep_at_most=PACKS_PER_STEP + more,
        version_window=window,
        max_update_lag=lag,
        sync_every=every,
    )
    queues = [
        ShareQueue(
            bounds,
            served=ServedVersion(ver=1, updates=0),
            size=lambda share, rank=rank: sizes[rank] if share % 3 == 2 else SAMPLES_PER_PACK * PACKS_PER_STEP,  # type: ignore[misc]
            samples_per_pack=SAMPLES_PER_PACK,
            call_size=call_packs * SAMPLES_PER_PACK,
        )
        for rank in range(world_size)
    ]
    served, first = ServedVersion(ver=1, updates=0), 0
    for step in range(12):
        for queue in queues:
            queue.want(range(first, first + 4))
        for _ in range(chance.randrange(12)):
            work(chance.choice(queues))
        for queue in queues:
            queue.expire(step)
            if chance.random() < 0.2 and queue.queue:  # stands for a drop for want of room
                queue._drop(chance.choice(queue.queue), "oldest")
        learns = chance.random() < 0.5
        if chance.random() < 0.3 or (learns and queues[0].taken == every):
            served = ServedVersion(ver=served.ver + 1, updates=step, syncs=served.syncs + (queues[0].taken > 0))
            move(queues, served)
        if step - served.updates >= lag:
            served = ServedVersion(ver=served.ver + 1, updates=step, syncs=served.syncs + (queues[0].taken > 0))
            move(queues, served)
        if learns:
            share = until_ready(queues)
            for queue in queues:
                check_taken(queue, share, step)
            first += share == first
    for queue in queues:
        counts_of = queue.counts
        dropped = counts_of.packs_dropped_oldest + counts_of.packs_dropped_stale + counts_of.packs_dropped_unwanted
        assert counts_of.packs_made == counts_of.packs_learned + dropped + len(queue.queue)


def work(queue: ShareQueue) -> None:
    if queue.in_flight is not None:
        queue.finish_call()
    elif queue.may_start:
        call = queue.start_call()
        assert 1 <= len(call.places) <= queue.call_size
        syncs_before_it_is_learned = (queue.wanted.index(call.share) + queue.taken) // queue.bounds.sync_every
        assert syncs_before_it_is_learned <= queue.bounds.version_window, "made only to be dropped"
    assert len(queue.queue) <= queue.keep_at_most
    places = Counter((pack.share, place) for pack in queue.queue for place in pack.places)
    assert not places or max(places.values()) == 1, "a place is queued twice"


def move(queues: list[ShareQueue], served: ServedVersion) -> None:
    for queue in queues:
        queue.request_fence()
        assert not queue.may_start
        if queue.in_flight is not None:
            assert not queue.quiet
            queue.finish_call()
        assert queue.quiet
    for queue in queues:
        queue.complete_fence(served)


def until_ready(queues: list[ShareQueue]) -> int:
    """Work until all ranks have one share complete: that takes time, and nobody else's doing."""
    for _ in range(100):
        if common := set(queues[0].complete()).intersection(*(queue.complete() for queue in queues[1:])):
            return min(common)
        for queue in queues:
            work(queue)
    raise AssertionError("the ranks wait for each other for ever")


def check_taken(queue: ShareQueue, share: int, step: int) -> None:
    packs = queue.take(share, step)
    assert [place for pack in packs for place in pack.places] == list(range(queue._size(share)))
    for pack in packs:
        assert queue.served.syncs - pack.by.syncs <= queue.bounds.version_window
    assert share not in queue.complete()


def one_queue() -> ShareQueue:
    bounds = Bounds(start_below=2, keep_at_most=4, version_window=1, max_update_lag=3)
    made = ShareQueue(bounds, served=ServedVersion(ver=5, updates=0), size=lambda _: 4, samples_per_pack=2, call_size=4)
    made.want([0, 1])
    return made


@pytest.mark.parametrize(("rollout_time", "least_b"), [(32, 1.0), (36, 0.65), (44, 0.65), (60, 0.5)])
def test_rollouts_a_little_slower_than_learning_cost_little(rollout_time: int, least_b: float) -> None:
    """Learning a share takes 32 ticks, rolling it out `rollout_time`, in eight calls. A step finds a share complete, or
    runs Channel-A; the weights are synced after each Channel-B step. With a window of one sync, Channel-B can't run
    three times in a row where rollouts are slower: whatever it learns was made in the last two steps."""
    bounds = Bounds(start_below=16, keep_at_most=24, version_window=1)
    queue = ShareQueue(
        bounds, served=ServedVersion(ver=0, updates=0), size=lambda _: 8, samples_per_pack=1, call_size=1
    )
    channels, first, left = [], 0, 0.0  # ticks until the call in flight ends
    for step in range(60):
        queue.want(range(first, first + 3))
        if queue.taken:
            queue.request_fence()
            if queue.in_flight is not None:
                queue.finish_call()
            queue.complete_fence(ServedVersion(ver=queue.served.ver + 1, updates=step, syncs=queue.served.syncs + 1))
            left = 0.0
        complete = sorted(queue.complete())
        channels.append("B" if complete else "A")
        if complete:
            queue.take(complete[0], step)
            first = complete[0] + 1
            queue.want(range(first, first + 3))
        for _ in range(32):
            if queue.in_flight is None and queue.may_start:
                queue.start_call()
                left += rollout_time / 8
            left = max(0.0, left - 1)
            if queue.in_flight is not None and left < 1e-9:
                queue.finish_call()
    assert channels[10:].count("B") / len(channels[10:]) >= least_b, "".join(channels)


def test_a_sync_without_a_new_version_is_an_error() -> None:
    """R25."""
    queue = one_queue()
    queue.request_fence()
    with pytest.raises(SyncError, match="ver 5 after ver 5"):
        queue.complete_fence(ServedVersion(ver=5, updates=1, syncs=1))
    with pytest.raises(SyncError):
        queue.check()


def test_an_end_is_seen_by_whoever_asks() -> None:
    """The first cause stays."""
    queue = one_queue()
    queue.start_call()
    queue.stop()
    assert queue.finish_call() == ([], [])
    assert not queue.may_start
    with pytest.raises(PipelineStoppedError):
        queue.request_fence()
    other, cause = one_queue(), ZeroDivisionError()
    assert other.fail(cause)
    assert not other.fail(RuntimeError())
    other.stop()
    with pytest.raises(ZeroDivisionError):
        other.check()


def test_a_call_under_way_for_a_share_that_nobody_wants_is_not_queued() -> None:
    """D11: the share is learned as ground truth meanwhile."""
    queue = one_queue()
    queue.start_call()
    queue.want([1])
    assert queue.finish_call() == ([], [])
    assert queue.counts.samples_returned == 4
    assert queue.complete() == {}


def queue_of(*, keep: int, size: int, call_size: int, start_below: int = 4) -> ShareQueue:
    """Packs hold two samples."""
    bounds = Bounds(start_below=start_below, keep_at_most=keep, version_window=2)
    return ShareQueue(
        bounds, served=ServedVersion(ver=5, updates=0), size=lambda _: size, samples_per_pack=2, call_size=call_size
    )


def made(queue: ShareQueue, *wanted: int) -> list[tuple[int, str]]:
    """One call for these shares; the shares of packs that were dropped for it, and why."""
    queue.want(wanted)
    queue.start_call()
    return [(drop.pack.share, drop.reason) for drop in queue.finish_call()[1]]


def test_beside_the_most_urgent_share_no_more_is_made_than_fits() -> None:
    """A pack that is made only to be dropped costs a rollout."""
    queue = queue_of(keep=4, size=6, call_size=6)
    assert made(queue, 0, 1) == []
    assert len(queue.queue) == 3
    assert queue.may_start
    call = queue.start_call()
    assert (call.share, call.places) == (1, range(2))
    assert queue.finish_call()[1] == []
    assert not queue.may_start, "as many wait as may"
    short = queue_of(keep=9, size=6, call_size=6, start_below=3)
    made(short, 0, 1)
    assert not short.may_start, "three wait, and a call starts below three"


def test_what_is_needed_last_gives_way_to_the_most_urgent_share() -> None:
    queue = queue_of(keep=3, size=4, call_size=4)
    assert made(queue, 2) == []
    assert made(queue, 1, 2) == [(2, "oldest")]
    assert made(queue, 0, 1, 2) == [(2, "oldest"), (1, "oldest")]
    assert sorted((pack.share, pack.places) for pack in queue.queue) == [(0, (0, 1)), (0, (2, 3)), (1, (2, 3))]
    assert queue.counts.packs_dropped_oldest == 3
    assert queue.counts.samples_returned == 6


def test_of_other_shares_the_oldest_weights_give_way_first() -> None:
    queue = queue_of(keep=4, size=4, call_size=4)
    made(queue, 1)
    queue.request_fence()
    queue.complete_fence(ServedVersion(ver=6, updates=1, syncs=1))
    assert made(queue, 2, 1) == []
    assert made(queue, 0, 1, 2) == [(1, "oldest"), (1, "oldest")]


def test_a_share_is_as_old_as_the_oldest_of_its_packs() -> None:
    queue = queue_of(keep=8, size=4, call_size=2)
    made(queue, 0)
    assert queue.complete() == {}
    queue.request_fence()
    queue.complete_fence(ServedVersion(ver=6, updates=1, syncs=1))
    made(queue, 0)
    assert [pack.by.syncs for pack in queue.queue] == [0, 1]
    assert queue.complete() == {0: 0}


def test_counts_add_up_over_shares() -> None:
    """Ages are summed: what a share's packs were old when they were learned."""
    queue = queue_of(keep=8, size=4, call_size=4)
    assert queue.counts == PackCounts()
    assert set(asdict(queue.counts).values()) == {0}
    for share, (syncs, step) in enumerate([(1, 3), (2, 7)]):
        made(queue, share)
        queue.request_fence()
        queue.complete_fence(ServedVersion(ver=5 + syncs, updates=step - 1, syncs=syncs))
        assert queue.taken == 0
        queue.take(share, step)
        assert queue.taken == 1, "the servers lack what is learned from it"
    counts = queue.counts
    assert (counts.packs_made, counts.packs_learned) == (4, 4)
    assert (counts.age_versions, counts.age_updates) == (2 * 1 + 2 * 1, 2 * 3 + 2 * (7 - 2))


def test_as_many_packs_may_be_prefetched_as_the_queue_holds() -> None:
    config = AsyncActorLearnerConfig(prefetch_target_packs=4, queue_limit=4)
    assert Bounds.run_ahead(config, packs_per_step=1).start_below == 4
    assert Bounds.run_ahead(config, packs_per_step=4).keep_at_most == 4
