"""The distributed sampler: every sample exactly once per epoch (R12), shares as SPEC's D4 and seeds want them."""

from __future__ import annotations

from itertools import groupby

from hypothesis import given
from hypothesis import strategies as st

from learner.data.sampler import DistributedSampler, Share

SIZES = st.integers(1, 60)
RANKS = st.integers(1, 5)
PER_RANK = st.integers(1, 6)


def make(
    num_samples: int, num_ranks: int, per_rank: int, *, seed: int = 3, shuffle: bool = True, repeats: int = 1
) -> list[DistributedSampler]:
    return [
        DistributedSampler(
            num_samples,
            num_ranks=num_ranks,
            rank=rank,
            samples_per_rank=per_rank,
            seed=seed,
            shuffle=shuffle,
            repeats=repeats,
        )
        for rank in range(num_ranks)
    ]


def shares_at(samplers: list[DistributedSampler], position: int) -> list[Share]:
    return [sampler.share(position) for sampler in samplers]


@given(num_samples=SIZES, num_ranks=RANKS, per_rank=PER_RANK, epoch=st.integers(0, 3))
def test_an_epoch_is_the_order_cut_into_shares(num_samples: int, num_ranks: int, per_rank: int, epoch: int) -> None:
    """R12: over micro-batches and ranks, each sample exactly once, and the ranks' shares are contiguous in order."""
    samplers = make(num_samples, num_ranks, per_rank)
    per_epoch = samplers[0].per_epoch
    seen: list[int] = []
    for micro_batch in range(per_epoch):
        shares = shares_at(samplers, epoch * per_epoch + micro_batch)
        assert {(s.epoch, s.micro_batch) for s in shares} == {(epoch, micro_batch)}
        assert {s.ends_epoch for s in shares} == {micro_batch == per_epoch - 1}
        first = 0
        for share in shares:
            assert share.first_req_idx == first
            first += len(share.indices)
            seen.extend(share.indices)
    assert seen == samplers[0].order(epoch).tolist()
    assert sorted(seen) == list(range(num_samples))


@given(num_samples=SIZES, num_ranks=RANKS, per_rank=PER_RANK)
def test_full_micro_batches_give_every_rank_its_n(num_samples: int, num_ranks: int, per_rank: int) -> None:
    """D4: rank r owns the request slots r*n to (r+1)*n; an epoch's last micro-batch may be smaller, and is even."""
    samplers = make(num_samples, num_ranks, per_rank)
    for position in range(samplers[0].per_epoch):
        shares = shares_at(samplers, position)
        sizes = [len(share.indices) for share in shares]
        if sum(sizes) == num_ranks * per_rank:
            assert sizes == [per_rank] * num_ranks
            assert [share.first_req_idx for share in shares] == [rank * per_rank for rank in range(num_ranks)]
        else:
            assert shares[0].ends_epoch
            assert max(sizes) - min(sizes) <= 1
            assert max(sizes) <= per_rank


@given(num_samples=SIZES, num_ranks=RANKS, per_rank=PER_RANK, epoch=st.integers(0, 3))
def test_the_order_does_not_depend_on_the_ranks(num_samples: int, num_ranks: int, per_rank: int, epoch: int) -> None:
    alone = make(num_samples, 1, 1)[0]
    for sampler in make(num_samples, num_ranks, per_rank):
        assert sampler.order(epoch).tolist() == alone.order(epoch).tolist()


@given(num_samples=SIZES, num_ranks=RANKS, per_rank=PER_RANK, positions=st.lists(st.integers(0, 80), max_size=8))
def test_a_share_depends_on_its_position_alone(
    num_samples: int, num_ranks: int, per_rank: int, positions: list[int]
) -> None:
    """A resume at any position goes on as the uninterrupted run would."""
    used = make(num_samples, num_ranks, per_rank)[-1]
    for position in positions:
        assert used.share(position) == make(num_samples, num_ranks, per_rank)[-1].share(position)


def test_epochs_and_seeds_give_other_orders() -> None:
    sampler, other = make(50, 1, 1)[0], make(50, 1, 1, seed=4)[0]
    orders = {tuple(sampler.order(0)), tuple(sampler.order(1)), tuple(other.order(0)), tuple(range(50))}
    assert len(orders) == 4


def test_without_shuffling_the_order_is_that_of_the_file() -> None:
    sampler = make(7, 1, 2, shuffle=False)[0]
    assert [sampler.share(position).indices for position in range(5)] == [(0, 1), (2, 3), (4, 5), (6,), (0, 1)]


def test_the_order_is_pinned() -> None:
    """A checkpoint's position means nothing if a release shuffles otherwise."""
    assert make(10, 1, 1)[0].order(0).tolist() == [9, 6, 0, 2, 1, 4, 7, 5, 3, 8]


# ---- groups --------------------------------------------------------------------------------------------------------


@given(
    num_samples=SIZES,
    num_ranks=st.sampled_from([1, 2, 4]),
    groups=st.integers(1, 3),
    repeats=st.integers(2, 5),
    epoch=st.integers(0, 2),
)
def test_r37_a_group_is_one_sample_in_a_row_on_one_rank(
    num_samples: int, num_ranks: int, groups: int, repeats: int, epoch: int
) -> None:
    """Each sample has `repeats` places in an epoch, all of them in one rank's share of one micro-batch."""
    samplers = make(num_samples, num_ranks, groups * repeats, repeats=repeats)
    per_epoch, met = samplers[0].per_epoch, []
    for micro_batch in range(per_epoch):
        shares = shares_at(samplers, epoch * per_epoch + micro_batch)
        first = 0
        for share in shares:
            runs = [(index, len(list(run))) for index, run in groupby(share.indices)]
            assert {length for _, length in runs} <= {repeats}
            met += [index for index, _ in runs]
            assert share.first_req_idx == first
            first += len(share.indices)
        assert first == samplers[0].global_size(epoch * per_epoch + micro_batch)
        held = [len(share.indices) for share in shares]
        assert max(held) - min(held) <= repeats
        assert {share.ends_epoch for share in shares} == {micro_batch == per_epoch - 1}
    assert sorted(met) == list(range(num_samples))
    assert met == make(num_samples, 1, 1)[0].order(epoch).tolist()  # the order is the same as without groups
