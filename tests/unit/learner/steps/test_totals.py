"""A step's sums do not depend on how rows and ranks cut it."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from learner.data.batches import Shortfall
from learner.policy.loss import RowLoss
from learner.policy.parallel import Ranks
from learner.records import PackedRow, Segment, StepResult
from learner.steps.totals import StepTotals
from tests.unit.learner.trainer_world import Meeting, ThreadRanks

STATS = ({"matched": 2.0, "missed": 1.0}, {"matched": 0.0, "missed": 3.0, "drop/truncated": 1.0}, {})
LOSSES = (
    RowLoss(loss_sum=6.0, weight_sum=4.0, num_supervised=5),
    RowLoss(loss_sum=2.0, weight_sum=1.0, num_supervised=1),
    RowLoss(loss_sum=0.0, weight_sum=0.0, num_supervised=0),
)


def row(*stats: dict[str, float], length: int = 10) -> PackedRow:
    ids = np.zeros(length, np.int64)
    segments = tuple(
        Segment(sample_id="s", input_ids=ids, labels=ids, loss_weights=ids.astype(np.float32), prompt_length=1, stats=s)
        for s in stats
    )
    return PackedRow(segments=segments, capacity=40)


def result(totals: StepTotals) -> StepResult:
    return totals.result(
        global_step=1,
        channel="B",
        grad_norm=0.5,
        learning_rate=0.1,
        ver=3,
        seconds={"learn_s": 1.0, "step_s": 2.0},
        capacity=40,
    )


def test_loss_is_the_weighted_mean_and_counts_add_up() -> None:
    totals = StepTotals()
    totals.add(row(*STATS[:2]), LOSSES[0])
    totals.add(row(STATS[2]), LOSSES[1])
    totals.add(row(), LOSSES[2])  # a zero-weight pass is not a row (D5)
    found = result(totals)
    assert found.loss == pytest.approx(8 / 5)
    assert (found.num_segments, found.num_rows, found.num_tokens, found.num_supervised) == (3, 2, 30, 6)
    assert found.metrics == {
        "learn_s": 1.0,
        "step_s": 2.0,
        "tokens_per_s": 15.0,
        "packing_fill": 30 / 80,
        "matched": 2.0,
        "missed": 4.0,
        "drop/truncated": 1.0,
        "match_rate": 2 / 6,
    }


def test_rows_that_are_filled_too_little_are_counted() -> None:
    """D6: `packing_min_fill_ratio`. A row of 20 of 40 tokens is full enough at 0.5, one of 10 is not, an empty one is
    no row; without a ratio nothing is reported."""
    totals, uncounted = StepTotals(min_fill=0.5), StepTotals()
    for one in (totals, uncounted):
        for each in (row({}, {}), row({}), row()):
            one.add(each, LOSSES[2])
    assert result(totals).metrics["underfilled"] == 1.0
    assert "underfilled" not in result(uncounted).metrics


def test_a_step_without_supervision_has_no_loss_and_no_match_rate() -> None:
    totals = StepTotals()
    totals.add(row(), LOSSES[2])
    found = result(totals)
    assert found.loss == 0.0
    assert "match_rate" not in found.metrics


def test_ranks_that_saw_different_things_get_the_same_sums() -> None:
    """Ranks may have met different drop reasons, or nothing at all."""
    meeting = Meeting(2)

    def rank_main(rank: int) -> StepTotals:
        mine = StepTotals()
        for stats, loss in zip(STATS, LOSSES, strict=True):
            if rank == 0:
                mine.add(row(stats), loss)
        return mine.reduced(ThreadRanks(rank=rank, world_size=2, meeting=meeting))

    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(rank_main, (0, 1))
    alone = StepTotals()
    for stats, loss in zip(STATS, LOSSES, strict=True):
        alone.add(row(stats), loss)
    assert first.counts == second.counts == alone.reduced(Ranks()).counts
    assert first.weight == 5.0


def test_a_short_last_step_makes_as_much_of_an_update_as_it_has_samples() -> None:
    totals = StepTotals(counts={"segments": 4.0})
    assert totals.share_of(None) == 1.0
    assert totals.share_of(Shortfall(size=4, whole=16)) == 0.25
    assert totals.share_of(Shortfall(size=4, whole=2)) == 1.0
    assert StepTotals(counts={"segments": 6.0}).share_of(Shortfall(size=6, whole=8)) == 0.75
    assert StepTotals().share_of(Shortfall(size=0, whole=8)) == 0.0
