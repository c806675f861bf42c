"""Scores of boxes, and their calibration (R43)."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from threadpoolctl import threadpool_info, threadpool_limits

from learner.config.inference import CALIBRATION_NAME
from learner.records import DetectionObject, Rollout, Sample
from learner.tasks.detection import calibrate
from learner.tasks.detection.calibrate import (
    FOLDS,
    Boxes,
    auc,
    best_threshold,
    cross_fitted,
    ece,
    fit_calibration,
    reliability,
)
from learner.tasks.detection.match import Gains, Overlaps, gains
from learner.tasks.detection.scores import (
    FEATURES,
    Calibration,
    CalibrationFile,
    ScoreCandidate,
    candidates,
    read_calibration,
    scored_objects,
    token_scores,
)
from shared.errors import ConfigError, DataError
from tests.unit.learner.tasks import fakes
from tests.unit.learner.tasks.fakes import box

LISTS = st.lists(st.tuples(st.booleans(), st.integers(0, 50).map(lambda n: n / 50)), min_size=1, max_size=60)


TASK, TOKENIZER = fakes.make_task()


def rollout_of(*objects: DetectionObject) -> Rollout:
    return fakes.make_rollout(TOKENIZER.encode(TASK.serialize(objects, after=None).text))


def simulated(num_images: int, seed: int) -> tuple[list[list[ScoreCandidate]], list[Sample]]:
    """Return candidates that are right more often the more answers have them; every image has one object."""
    rng = np.random.default_rng(seed)
    truth = box("a", 100, 100, 200, 200)
    found, samples = [], []
    for i in range(num_images):
        own = []
        for place in range(6):
            share = rng.random()
            is_right = place == 0 and rng.random() < share
            at = truth if is_right else box("a", 400 + 50 * place, 400, 440 + 50 * place, 440)
            features = np.zeros(len(FEATURES))
            features[FEATURES.index("share")] = share if place == 0 else share / 2
            own.append(ScoreCandidate(at, True, 1, features))
        found.append(own)
        samples.append(Sample(sample_id=str(i), messages=(), images=("x",), objects=(truth,), width=9, height=9))
    return found, samples


# ---- candidates ----------------------------------------------------------------------------------------------------


def test_a_greedy_answer_alone_and_with_drawn_ones() -> None:
    greedy = TASK.parse(rollout_of(box("a", 0, 0, 100, 100), box("b", 500, 500, 600, 600)))
    drawn = TASK.parse(rollout_of(box("a", 0, 0, 100, 110), box("c", 800, 800, 900, 900)))
    alone = candidates([greedy], TASK._pieces)
    assert [(c.object.desc, c.in_greedy, c.votes) for c in alone] == [("a", True, None), ("b", True, None)]
    together = {c.object.desc: c for c in candidates([greedy, drawn, drawn], TASK._pieces)}
    assert {name: (c.in_greedy, c.votes) for name, c in together.items()} == {
        "a": (True, 2),
        "b": (True, 0),
        "c": (False, 2),
    }
    assert all(np.isfinite(c.features).all() for c in together.values())
    assert candidates([TASK.parse(rollout_of())], TASK._pieces) == []


def test_token_scores_rank_by_the_probabilities_of_name_and_coordinates() -> None:
    """They order boxes as these probabilities do, and do not read 0.00 for improbable tokens."""
    rollout = rollout_of(box("a", 0, 0, 100, 100), box("b", 500, 500, 600, 600))
    assert token_scores(TASK.parse(rollout), TASK._pieces) == [1.0, 1.0], "nothing is known of the tokens"
    number = len(rollout.response_token_ids)
    spans = TASK.parse(rollout).slots
    logprobs = [-3.0] * number  # structure does not count
    sure = _with_logprobs(rollout, [0.0] * number)
    assert token_scores(TASK.parse(sure), TASK._pieces) == pytest.approx([1.0, 1.0])
    for slot in range(8):  # four coordinates an object
        logprobs[int(spans.start[slot])] = -0.1 if slot < 4 else -0.7
    first, second = token_scores(TASK.parse(_with_logprobs(rollout, logprobs)), TASK._pieces)
    assert (1 / second - 1 / first) * 4 == pytest.approx(0.6), "the difference of their log-probabilities"
    unsure = _with_logprobs(rollout, [-5.0] * number)
    assert min(token_scores(TASK.parse(unsure), TASK._pieces)) > 0.02
    found = scored_objects([TASK.parse(unsure)], TASK._pieces, None)
    assert [one.score for one in found] == pytest.approx(token_scores(TASK.parse(unsure), TASK._pieces))


def _with_logprobs(rollout: Rollout, logprobs: list[float]) -> Rollout:
    return replace(rollout, logprobs=tuple(logprobs))


# ---- what is right -------------------------------------------------------------------------------------------------


def test_the_better_of_two_boxes_is_right_and_ignored_ones_do_not_count() -> None:
    truth, crowd = (
        DetectionObject("a", "bbox_2d", (0, 0, 100, 100)),
        DetectionObject("a", "bbox_2d", (500, 0, 900, 400)),
    )
    sample = Sample(sample_id="1", messages=(), images=(), objects=(truth,), width=9, height=9, ignored=(crowd,))
    objects = [
        truth,
        truth._replace(bins=(0, 0, 100, 95)),
        truth._replace(desc="b"),
        crowd._replace(bins=(600, 9, 700, 99)),
    ]
    found = gains([Overlaps.of(objects, sample.objects, sample.ignored)], np.array([0.5, 0.9, 0.8, 0.7]))
    assert found.right.tolist() == [0, 1, 0, 0]
    assert found.judged.tolist() == [1, 1, 1, 0]


@given(LISTS)
def test_auc_and_threshold_are_what_counting_says(pairs: list[tuple[bool, float]]) -> None:
    right, scores = np.array([float(r) for r, _ in pairs]), np.array([s for _, s in pairs])
    ups, downs = scores[right == 1], scores[right == 0]
    if len(ups) and len(downs):
        wins = sum(float(u > d) + 0.5 * float(u == d) for u in ups for d in downs)
        assert auc(right, scores) == pytest.approx(wins / (len(ups) * len(downs)))
    else:
        assert auc(right, scores) == 0.5

    def f1(threshold: float) -> float:
        kept = right[scores >= threshold]
        return float(2 * kept.sum() / (len(kept) + len(right)))

    found = Gains(right, np.ones(len(right)))
    assert f1(best_threshold(found, scores, len(right))) == pytest.approx(max(f1(s) for s in scores), abs=1e-6)


@given(LISTS)
def test_bins_of_a_reliability_diagram_hold_every_box(pairs: list[tuple[bool, float]]) -> None:
    right, scores = np.array([float(r) for r, _ in pairs]), np.array([s for _, s in pairs])
    bins = reliability(right, scores)
    assert sum(one.number for one in bins) == len(pairs)
    assert sum(one.right * one.number for one in bins) == pytest.approx(right.sum())
    assert 0 <= ece(right, scores) <= 1
    assert ece(right, right) == 0


# ---- the fit -------------------------------------------------------------------------------------------------------


def test_a_fit_is_calibrated_on_images_that_it_has_not_seen(tmp_path: Path) -> None:
    calibration, held_out, boxes = fit_calibration(*simulated(300, seed=1), num_drawn=4)
    found, samples = simulated(300, seed=2)
    new = Boxes.of(found, samples)
    scores = calibration.scores(new.features, new.names)
    outcomes = new.ranked(scores).gains.outcomes(scores)
    assert auc(*outcomes) > 0.8
    assert ece(*outcomes) < 0.05
    assert calibration.measured["auc"] == pytest.approx(auc(*boxes.gains.outcomes(held_out)))
    (tmp_path / CALIBRATION_NAME).write_text(CalibrationFile(calibrations=[calibration]).to_json())
    again = read_calibration(tmp_path, samples=8)
    assert again is not None
    assert again.scores(new.features, new.names).tolist() == scores.tolist()
    assert read_calibration(tmp_path, samples=0) is None, "drawn answers are no greedy ones"


def test_the_threshold_of_a_fit_is_best_for_the_match_that_f1_has() -> None:
    """Two objects overlap. A box on both and a box on the first one alone are two right boxes, one-to-one; a match by
    score gives the first object to the box on both. So the second box must not look wrong."""
    rng, found, samples = np.random.default_rng(7), [], []
    truth = box("a", 100, 0, 200, 100), box("a", 140, 0, 240, 100)
    places = {"both": (115, 0, 215, 100), "first": (70, 0, 170, 100), "nothing": (600, 0, 700, 100)}
    shares = {"both": 0.9, "first": 0.7, "nothing": 0.4}
    for i in range(40):
        own = []
        for name, place in places.items():
            features = np.zeros(len(FEATURES))
            features[FEATURES.index("share")] = shares[name] + rng.uniform(-0.3, 0.1)
            own.append(ScoreCandidate(box("a", *place), True, 1, features))
        found.append(own)
        samples.append(Sample(sample_id=str(i), messages=(), images=("x",), objects=truth, width=9, height=9))
    calibration, scores, boxes = fit_calibration(found, samples, num_drawn=4)

    def f1(threshold: float) -> float:
        kept = [np.flatnonzero(scores[boxes.images == i] >= threshold) for i in range(len(samples))]
        matches = [one.rows(rows).match() for one, rows in zip(boxes.overlaps, kept, strict=True)]
        return 2 * sum(len(one.pairs) for one in matches) / (sum(one.num_judged for one in matches) + boxes.num_truth)

    assert f1(calibration.threshold) == max(f1(score) for score in scores)
    assert f1(calibration.threshold) > 0.85, "both boxes are right"


def test_no_image_is_scored_by_a_fit_that_saw_its_labels() -> None:
    """Of images whose labels are turned over, the own scores stay as they are, and those of other parts change."""
    found, samples = simulated(40, seed=3)
    before = cross_fitted(found, samples)
    turned = [
        replace(sample, objects=(found[i][1].object,)) if i % FOLDS == 2 else sample for i, sample in enumerate(samples)
    ]
    after = cross_fitted(found, turned)
    for i, (old, new) in enumerate(zip(before, after, strict=True)):
        assert (old.tolist() == new.tolist()) == (i % FOLDS == 2), i


def test_cross_fitted_scores_are_those_of_a_slow_reference() -> None:
    """Every image alone: the others of which it is no part are fitted, and each of its boxes is scored by hand."""
    found, samples = simulated(12, seed=4)
    scores = cross_fitted(found, samples)
    for i in (0, 3, 7, 11):
        others = [k for k in range(12) if k % FOLDS != i % FOLDS]
        known, *_ = fit_calibration([found[k] for k in others], [samples[k] for k in others], num_drawn=0)
        for candidate, score in zip(found[i], scores[i], strict=True):
            assert score == pytest.approx(_by_hand(candidate, known))


def _by_hand(candidate: ScoreCandidate, known: Calibration) -> float:
    """Compute a piecewise linear function of each feature, column by column."""
    columns, area = [1.0], 0.0
    for name, value in zip(FEATURES, candidate.features.tolist(), strict=True):
        if name not in known.knots:
            continue
        low, *inner, high = known.knots[name]
        at = (min(max(value, low), high) - low) / (high - low)
        columns += [at, *(max(0.0, at - (knot - low) / (high - low)) for knot in inner)]
        area = at if name == "log_area" else area
    for one in known.names:
        columns += [1.0, area] if one == candidate.object.desc else [0.0, 0.0]
    return 1 / (1 + math.exp(-sum(a * b for a, b in zip(columns, known.weights, strict=True))))


def test_a_fit_does_not_wait_for_threads_of_small_products(monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside busy programs each of thousands of products waited for a thread that had no core."""
    threads: list[int] = []
    regress = calibrate._regress

    def told(*args: Any) -> Any:
        threads.extend(one["num_threads"] for one in threadpool_info() if one["user_api"] == "blas")
        return regress(*args)

    monkeypatch.setattr(calibrate, "_regress", told)
    found, samples = simulated(12, seed=4)
    with threadpool_limits(2, user_api="blas"):
        fit_calibration(found, samples, num_drawn=0)
        cross_fitted(found, samples)
        assert set(threads) == {1}
        after = {one["num_threads"] for one in threadpool_info() if one["user_api"] == "blas"}
    assert after == {2}, "those of others are as they were"


def test_too_little_to_learn_from_and_a_file_that_cannot_be_read(tmp_path: Path) -> None:
    found, samples = simulated(4, seed=1)
    with pytest.raises(DataError) as error:
        fit_calibration(found, samples, num_drawn=4)
    assert error.value.remedy
    (tmp_path / CALIBRATION_NAME).write_text('{"calibrations": [{"samples": "many"}]}')
    with pytest.raises(ConfigError) as unreadable:
        read_calibration(tmp_path, samples=0)
    assert "calibrate" in unreadable.value.remedy
    assert read_calibration(tmp_path / "nowhere", samples=0) is None


def test_scores_are_probabilities_with_and_without_a_calibration() -> None:
    answer = TASK.parse(rollout_of(box("a", 0, 0, 100, 100), box("b", 500, 500, 600, 600)))
    calibration, _, _ = fit_calibration(*simulated(60, seed=1), num_drawn=4)
    for known in (None, calibration):
        for one in scored_objects([answer, answer, answer], TASK._pieces, known):
            assert 0 <= one.score <= 1
            assert one.votes == 2
    assert scored_objects([TASK.parse(rollout_of())], TASK._pieces, calibration) == []
