"""Evaluation counts and metrics, bootstrap over scenes, and COCO AP as a cross-check."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from learner.records import Assignment, DetectionObject
from learner.tasks.detection.geometry import iou_matrix
from learner.tasks.detection.metrics import (
    COLUMNS,
    METRICS,
    CountTable,
    bootstrap_difference,
    bootstrap_interval,
    coco_ap,
    count_objects,
    evaluate_counts,
)
from shared.errors import DataError
from tests.unit.learner.tasks.fakes import box, make_rollout, make_task, poly

TASK, TOKENIZER = make_task(coordinates="digits")
ONE, TWO = box("one", 0, 0, 100, 100), box("two", 300, 300, 400, 400)


def answer(
    predicted: list[DetectionObject],
    truth: list[DetectionObject],
    name: str = "s",
    *,
    cut: int = 0,
    reason: str = "stop",
) -> Assignment:
    text = TASK.serialize(predicted, after=None).text
    ids = TOKENIZER.encode(text[: len(text) - cut])
    return TASK.match(TASK.parse(make_rollout(ids, truth, sample_id=name, finish_reason=reason)))


def test_perfect_answers_score_one() -> None:
    metrics = TASK.evaluate([answer([ONE, TWO], [ONE, TWO]), answer([], [])])
    ones = ("f1@0.5", "f1@miou", "precision@0.5", "recall@0.5", "mean_iou", "f1_any@miou", "parse_rate")
    assert {name: metrics[name] for name in ones} == dict.fromkeys(ones, 1.0)
    assert metrics["duplicate_rate"] == metrics["truncation_rate"] == 0.0
    assert metrics["objects_per_rollout"] == metrics["truth_per_sample"] == 1.0
    assert metrics["coco/ap"] == pytest.approx(1.0)


def test_true_positive_needs_the_description_too() -> None:
    metrics = TASK.evaluate([answer([box("two", 0, 0, 100, 100), TWO], [ONE, TWO])])
    assert metrics["f1@0.5"] == metrics["recall@0.5"] == 0.5
    assert metrics["f1_any@0.5"] == metrics["recall_any@0.5"] == 1.0


def test_missing_labels_lower_fm_by_one_factor_and_turn_the_order_of_f1() -> None:
    """80% of 100 labels missing at random. One model finds all objects, and in a fifth of its boxes nothing; the other
    finds half, and nothing wrong."""

    def metrics(labels: int, predictions: int, right: int) -> dict[str, float]:
        values = np.zeros((1, len(COLUMNS)))
        for name, count in {"truth": labels, "predictions": predictions, "tp@0.50": right * labels / 100}.items():
            values[0, COLUMNS.index(name)] = count
        return evaluate_counts(CountTable(sample_ids=("s",), values=values))

    models = [(125, 100), (50, 50)]
    whole, gaps = ([metrics(labels, *model) for model in models] for labels in (100, 20))
    for complete, incomplete in zip(whole, gaps, strict=True):
        assert complete["fm@0.5"] == pytest.approx((complete["precision@0.5"] * complete["recall@0.5"]) ** 0.5)
        assert incomplete["fm@0.5"] == pytest.approx(complete["fm@0.5"] * 0.2**0.5)
    assert whole[0]["f1@0.5"] > whole[1]["f1@0.5"]
    assert gaps[0]["f1@0.5"] < gaps[1]["f1@0.5"]


def test_f1_over_thresholds_is_their_mean() -> None:
    """IoU 0.72 passes 0.50 to 0.70: five of the ten thresholds."""
    metrics = TASK.evaluate([answer([box("one", 0, 0, 100, 72)], [ONE])])
    assert metrics["f1@0.5"] == 1.0
    assert metrics["f1@miou"] == pytest.approx(0.5)
    assert metrics["mean_iou"] == pytest.approx(0.72)


def test_evaluation_matches_within_descriptions_whatever_the_training_match_was() -> None:
    """The training match pairs the better-placed `two` with ONE; the `one` beside it is the true positive."""
    assignment = answer([box("two", 0, 0, 100, 100), box("one", 0, 0, 100, 90)], [ONE])
    assert assignment.pairs[0][0] == 0
    assert TASK.evaluate([assignment])["recall@0.5"] == 1.0


def test_duplicates_are_repeats_of_an_earlier_prediction_of_the_same_description() -> None:
    again, other = box("one", 0, 0, 100, 95), box("two", 0, 0, 100, 100)
    metrics = TASK.evaluate([answer([ONE, again, ONE, other, TWO], [ONE])])
    assert metrics["duplicate_rate"] == pytest.approx(2 / 5)


def test_answers_are_counted_as_parsed_usable_unclosed_and_truncated() -> None:
    good, cut = answer([ONE], [ONE]), answer([ONE, TWO], [ONE], cut=9, reason="length")
    unusable = TASK.match(TASK.parse(make_rollout(TOKENIZER.encode("no"), [ONE])))
    trailing = TASK.match(TASK.parse(make_rollout(TOKENIZER.encode("{} and so"), [ONE])))
    metrics = TASK.evaluate([good, cut, unusable, trailing])
    names = ("parse_rate", "usable_rate", "unclosed_rate", "truncation_rate", "drop/truncated", "object_parse_rate")
    assert [metrics[name] for name in names] == [0.25, 0.75, 0.5, 0.25, 0.25, pytest.approx(2 / 3)]


def ignoring(assignment: Assignment, *regions: DetectionObject) -> Assignment:
    rollout = assignment.parsed.rollout
    sample = replace(rollout.sample, ignored=regions)
    return replace(assignment, parsed=replace(assignment.parsed, rollout=replace(rollout, sample=sample)))


CROWD = box("one", 500, 500, 900, 900)
IN_CROWD = [box("one", 500 + 50 * i, 500, 540 + 50 * i, 560) for i in range(3)]


def test_a_prediction_in_an_ignore_region_is_neither_hit_nor_false() -> None:
    """R41: as many as there are, at every threshold; COCO's own evaluation agrees."""
    found = ignoring(answer([ONE, *IN_CROWD], [ONE]), CROWD)
    ones = ("f1@0.5", "f1@miou", "precision@0.5", "recall@0.5", "precision_any@0.5", "f1_any@miou", "coco/ap")
    metrics = TASK.evaluate([found])
    assert {name: metrics[name] for name in ones} == pytest.approx(dict.fromkeys(ones, 1.0))
    assert metrics["truth_per_sample"] == 1.0  # the region is no object that could be missed
    assert TASK.evaluate([answer([ONE, *IN_CROWD], [ONE])])["precision@0.5"] == 0.25
    assert TASK.evaluate([ignoring(answer([], [ONE]), CROWD)])["recall@0.5"] == 0.0


def test_an_ignore_region_is_one_of_its_class_and_of_every_class_where_it_has_none() -> None:
    other = box("two", 500, 500, 540, 560)
    metrics = TASK.evaluate([ignoring(answer([ONE, other], [ONE]), CROWD)])
    assert (metrics["precision@0.5"], metrics["precision_any@0.5"]) == (0.5, 1.0)
    metrics = TASK.evaluate([ignoring(answer([ONE, other], [ONE]), CROWD._replace(desc=""))])
    assert (metrics["precision@0.5"], metrics["coco/ap"]) == (1.0, pytest.approx(1.0))


def test_a_prediction_must_lie_in_the_region_as_far_as_the_threshold_says() -> None:
    """The share is of the prediction itself: six tenths of this one."""
    metrics = TASK.evaluate([ignoring(answer([ONE, box("one", 460, 500, 560, 600)], [ONE]), CROWD)])
    assert metrics["precision@0.5"] == 1.0
    totals = count_objects([ignoring(answer([box("one", 460, 500, 560, 600)], []), CROWD)]).totals()
    assert [totals[f"ignored@{t:.2f}"] for t in (0.5, 0.6, 0.65, 0.95)] == [1, 1, 0, 0]


def test_a_hit_in_an_ignore_region_stays_a_hit() -> None:
    inside = IN_CROWD[0]
    totals = count_objects([ignoring(answer([inside, IN_CROWD[1]], [inside]), CROWD)]).totals()
    assert (totals["tp@0.50"], totals["ignored@0.50"], totals["ignored_any@0.50"]) == (1, 1, 1)
    outline = poly("one", 500, 500, 900, 500, 900, 900, 500, 900)
    totals = count_objects([ignoring(answer([inside, IN_CROWD[1]], [inside]), outline)]).totals()
    assert (totals["tp@0.50"], totals["ignored@0.50"]) == (1, 1)


def test_nothing_to_count_is_zero_everywhere() -> None:
    assert set(TASK.evaluate([]).values()) == {0.0}


@st.composite
def scenes(draw: st.DrawFn) -> tuple[list[DetectionObject], list[DetectionObject]]:
    """Draw truth far apart, and predictions that each lie on one truth at most, shifted."""
    truth, predicted = [], []
    for i in range(draw(st.integers(0, 5))):
        truth.append(box(draw(st.sampled_from(["one", "two"])), 200 * i, 0, 200 * i + 100, 100))
        if draw(st.booleans()):
            shift = draw(st.integers(0, 99))
            predicted.append(box(draw(st.sampled_from(["one", "two"])), 200 * i + shift, 0, 200 * i + 100 + shift, 100))
    return truth, predicted


@settings(deadline=None)
@given(st.lists(scenes(), max_size=4))
def test_counts_equal_a_count_by_hand(cases: list[tuple[list[DetectionObject], list[DetectionObject]]]) -> None:
    table = count_objects([answer(predicted, truth) for truth, predicted in cases])
    totals = table.totals()
    for threshold in (0.5, 0.75, 0.95):
        hits = any_hits = 0
        for truth, predicted in cases:
            iou = iou_matrix(predicted, truth)
            for i, p in enumerate(predicted):
                for j, t in enumerate(truth):
                    any_hits += iou[i, j] >= threshold
                    hits += iou[i, j] >= threshold and p.desc == t.desc
        assert totals[f"tp@{threshold:.2f}"] == hits
        assert totals[f"tp_any@{threshold:.2f}"] == any_hits
    assert totals["truth"] == sum(len(t) for t, _ in cases)
    assert totals["predictions"] == sum(len(p) for _, p in cases)
    metrics = evaluate_counts(table)
    harmonic = metrics["precision@0.5"] + metrics["recall@0.5"]
    expected = 2 * metrics["precision@0.5"] * metrics["recall@0.5"] / harmonic if harmonic else 0.0
    assert metrics["f1@0.5"] == pytest.approx(expected)


def random_table(seed: int, hit_rate: float, scenes: int = 60) -> CountTable:
    rng = np.random.default_rng(seed)
    values = np.zeros((scenes, len(COLUMNS)))
    values[:, COLUMNS.index("samples")] = 1
    truth = np.random.default_rng(99).integers(1, 9, scenes)
    values[:, COLUMNS.index("truth")] = values[:, COLUMNS.index("predictions")] = truth
    values[:, COLUMNS.index("tp@0.50")] = rng.binomial(truth, hit_rate)
    return CountTable(sample_ids=tuple(map(str, range(scenes))), values=values)


def test_bootstrap_equals_resampling_scenes_one_by_one() -> None:
    table = random_table(1, 0.6)
    interval = bootstrap_interval(table, "f1@0.5", n=3000, seed=5)
    rng = np.random.default_rng(7)
    draws = []
    for _ in range(3000):
        picked = table.values[rng.integers(0, len(table.values), len(table.values))].sum(axis=0)
        draws.append(2 * picked[COLUMNS.index("tp@0.50")] / (2 * picked[COLUMNS.index("truth")]))
    low, high = np.quantile(draws, [0.025, 0.975])
    assert interval.low == pytest.approx(low, abs=0.01)
    assert interval.high == pytest.approx(high, abs=0.01)
    assert interval.low < interval.estimate < interval.high
    assert interval.estimate == evaluate_counts(table)["f1@0.5"]
    assert bootstrap_interval(table, "f1@0.5", n=3000, seed=5) == interval
    narrow = bootstrap_interval(table, "f1@0.5", n=3000, seed=5, confidence=0.5)
    assert interval.low < narrow.low < narrow.high < interval.high


def test_paired_bootstrap_cancels_what_the_scenes_share() -> None:
    before, after = random_table(1, 0.5), random_table(2, 0.8)
    same = bootstrap_difference(before, before, "f1@0.5")
    assert (same.low, same.estimate, same.high) == (0.0, 0.0, 0.0)
    gain = bootstrap_difference(before, after, "f1@0.5")
    assert 0 < gain.low < gain.estimate < gain.high
    assert gain.estimate == pytest.approx(evaluate_counts(after)["f1@0.5"] - evaluate_counts(before)["f1@0.5"])
    # One scene better: never a loss on any draw.
    values = before.values.copy()
    values[0, COLUMNS.index("tp@0.50")] += 1
    better = CountTable(sample_ids=before.sample_ids, values=values)
    assert bootstrap_difference(before, better, "f1@0.5").low >= 0


def test_interval_holds_every_metric_and_refuses_what_it_can_not_compare() -> None:
    table = random_table(1, 0.5)
    assert all(np.isfinite(bootstrap_interval(table, name, n=20).low) for name in METRICS)
    other = CountTable(sample_ids=tuple(reversed(table.sample_ids)), values=table.values)
    with pytest.raises(DataError, match="scene by scene"):
        bootstrap_difference(table, other, "f1@0.5")
    with pytest.raises(DataError, match="needs scenes"):
        bootstrap_interval(count_objects([]), "f1@0.5")


@settings(max_examples=30, deadline=None)
@given(st.lists(scenes(), min_size=1, max_size=4))
def test_coco_agrees_where_both_are_defined_alike(
    cases: list[tuple[list[DetectionObject], list[DetectionObject]]],
) -> None:
    """One category, objects far apart: COCO's recall at its ten thresholds is ours, and AP is zero with F1."""
    named = [([box("x", *o.bins) for o in truth], [box("x", *o.bins) for o in seen]) for truth, seen in cases]
    assignments = [answer(predicted, truth) for truth, predicted in named]
    totals = count_objects(assignments).totals()
    recall = [float(totals[f"tp@{t:.2f}"] / max(1, totals["truth"])) for t in np.arange(0.5, 1, 0.05)]
    stats = coco_ap(assignments)
    assert stats["coco/ar100"] == pytest.approx(np.mean(recall))
    assert (stats["coco/ap50"] > 0) == (recall[0] > 0)


def test_coco_of_perfect_and_of_empty_answers() -> None:
    perfect = coco_ap([answer([ONE, TWO], [ONE, TWO])])
    assert perfect == pytest.approx(dict.fromkeys(perfect, 1.0))
    assert set(coco_ap([answer([], [ONE])]).values()) == {0.0}
    assert set(coco_ap([answer([box("two", 0, 0, 100, 100)], [ONE])]).values()) == {0.0}
