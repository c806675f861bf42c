"""Features of drawn answers whose quality is known, missing labels on labels that were removed, and the rules."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from learner.predict import recommend as rules
from learner.predict.agreement import agreed, drawn_of, findings, labelled_and_unlabelled
from learner.predict.exposure import KINDS
from learner.predict.features import KIND_NAMES, MEANINGS, FeatureEstimate, Measured, MeasuredSplit, estimates, features
from learner.predict.recommend import recommend
from learner.records import Assignment, DetectionObject, Sample
from learner.tasks.detection.bins import canonical_order
from learner.tasks.detection.metrics import count_objects
from tests.unit.learner.tasks.fakes import box, make_rollout, make_task

TASK, TOKENIZER = make_task(coordinates="digits")
ONE, TWO, SEVEN = box("one", 0, 0, 100, 100), box("two", 300, 300, 400, 400), box("seven", 600, 600, 700, 700)
SHIFTED = box("one", 5, 5, 105, 105)
LAST_FOUR = {"f1_val", "nats_val", "overfit_nats", "overfit_f1"}


def answer(
    predicted: Sequence[DetectionObject], truth: Sequence[DetectionObject], ignored: Sequence[DetectionObject] = ()
) -> Assignment:
    rollout = make_rollout(TOKENIZER.encode(TASK.serialize(predicted, after=None).text), truth)
    return TASK.match(TASK.parse(replace(rollout, sample=replace(rollout.sample, ignored=tuple(ignored)))))


def sample_with(truth: Sequence[DetectionObject], ignored: Sequence[DetectionObject] = ()) -> Sample:
    return answer((), truth, ignored).parsed.rollout.sample


def measured(
    groups: Sequence[Sequence[Assignment]], greedy: Sequence[Assignment], validation: MeasuredSplit | None = None
) -> Measured:
    nats = np.tile([10.0, 100.0], (len(groups), 1))
    exposure = np.tile([3.0, 1.0, 10.0], (len(groups), len(KINDS), 1))
    train = MeasuredSplit(greedy=count_objects(greedy).values, nats=nats)
    return Measured(train=train, drawn=drawn_of(groups), exposure=exposure, validation=validation)


# ---- agreement -----------------------------------------------------------------------------------------------------


def test_what_answers_say_is_counted_once_per_answer() -> None:
    answers = [[ONE, SHIFTED, TWO], [SHIFTED], [TWO, ONE._replace(desc="two")], []]
    found = findings(answers)
    assert [(one.object, one.votes) for one in found] == [(ONE, 2), (TWO, 2), (ONE._replace(desc="two"), 1)]
    assert agreed(found, 4, 0.5) == [ONE, TWO]
    assert agreed(found, 4, 0.75) == []


def test_a_label_that_says_something_else_is_no_missing_label() -> None:
    seen = [ONE, TWO._replace(desc="nine"), box("seven", 630, 600, 730, 700), box("three", 800, 800, 900, 900)]
    sample = sample_with([ONE, TWO, SEVEN])
    assert labelled_and_unlabelled(seen, sample) == (2, 1)  # ONE, SEVEN by IoU 0.54; three is new; nine is left out
    crowd = sample_with([ONE, TWO, SEVEN], [box("", 750, 750, 950, 950)])
    assert labelled_and_unlabelled(seen, crowd) == (2, 0)


@pytest.mark.parametrize("removed", [0.0, 0.4])
@pytest.mark.parametrize("recall", [0.95, 0.8])
def test_labels_removed_on_purpose_are_estimated(removed: float, recall: float) -> None:
    """Answers find each object with probability `recall`, a little off, and invent something now and then."""
    groups, lost, total = _with_gaps(removed, recall)
    share = drawn_of(groups).agreed.sum(axis=0)
    assert share[1] / share.sum() == pytest.approx(lost / total, abs=0.03)


@pytest.mark.parametrize("invented", [0.1, 0.3])
def test_the_right_share_of_what_has_no_label_is_estimated(invented: float) -> None:
    """Nearly every removed object is found by some answer, and inventions seldom coincide. Neighbouring numbers of
    votes are put together, so the estimate is a little low."""
    groups, lost, _ = _with_gaps(0.4, 0.8, invented)
    found = features(measured(groups, [group[0] for group in groups]))
    assert found["unlabelled_right"] == pytest.approx(lost / (lost + 8 * invented * len(groups)), abs=0.12)


def _with_gaps(removed: float, recall: float, invented: float = 0.3) -> tuple[list[list[Assignment]], int, int]:
    """8 answers to each of 80 scenes; how many labels were removed, and of how many objects."""
    drawn = random.Random(1)
    groups, lost, total = [], 0, 0
    places = [(x, y) for x in range(0, 900, 150) for y in range(0, 900, 150)]
    for _ in range(80):
        scene = [box(drawn.choice(["one", "two"]), x, y, x + 100, y + 100) for x, y in drawn.sample(places, 6)]
        labels = [item for item in scene if drawn.random() >= removed]
        lost, total = lost + len(scene) - len(labels), total + len(scene)
        groups.append([answer(_seen(scene, recall, invented, drawn), canonical_order(labels)) for _ in range(8)])
    return groups, lost, total


def _seen(
    scene: Sequence[DetectionObject], recall: float, invented: float, drawn: random.Random
) -> tuple[DetectionObject, ...]:
    seen = []
    for item in scene:
        if drawn.random() < recall:
            dx, dy = drawn.randint(-8, 8), drawn.randint(-8, 8)
            x1, y1, x2, y2 = item.bins
            seen.append(box(item.desc, max(0, x1 + dx), max(0, y1 + dy), x2 + dx, y2 + dy))
    if drawn.random() < invented:
        x, y = drawn.randint(0, 800), drawn.randint(0, 800)
        seen.append(box("nine", x, y, x + 60, y + 60))
    return canonical_order(seen)


# ---- features ------------------------------------------------------------------------------------------------------


def test_headroom_of_answers_of_known_quality() -> None:
    truth = [ONE, TWO]
    groups = [[answer([ONE], truth), answer([TWO, SEVEN], truth)]] * 4
    greedy = [answer([], truth)] * 4
    found = features(measured(groups, greedy))
    assert found["f1_greedy"] == found["recall_greedy"] == 0.0
    assert found["f1_sampled"] == pytest.approx(2 * 2 / (3 + 4))
    assert found["f1_best"] == found["headroom"] == pytest.approx(2 / 3)
    assert found["recall_union"] == 1.0
    assert found["f1_union"] == pytest.approx(4 / 5)
    assert found["f1_majority"] == pytest.approx(4 / 5)  # one of two answers is half
    assert found["no_signal"] == 0.0
    assert found["reward_std"] == pytest.approx(np.std([2 / 3, 2 / 4]))
    assert found["exposure_gap"] == pytest.approx(0.2)
    assert found["nats_train"] == pytest.approx(0.1)


def test_wrong_names_are_no_headroom_in_places() -> None:
    truth, wrong = [ONE, TWO], [ONE._replace(desc="nine"), TWO]
    found = features(measured([[answer(truth, truth), answer(wrong, truth)]] * 3, [answer(wrong, truth)] * 3))
    assert found["headroom"] == pytest.approx(0.5)
    assert found["headroom_places"] == 0.0
    assert found["name_errors"] == pytest.approx(0.5)


def test_a_scene_without_objects_is_best_answered_with_none() -> None:
    found = features(measured([[answer([ONE], []), answer([], [])], [answer([ONE], [ONE])] * 2], [answer([], [])] * 2))
    assert found["f1_best"] == 1.0
    assert found["no_signal"] == 0.5


def test_features_are_those_that_are_explained_and_intervals_hold_them() -> None:
    truth = [ONE, TWO]
    said = [[ONE], [TWO, ONE], [], [SEVEN], [ONE, SEVEN]]
    greedy = [answer(one, truth) for one in said]
    groups = [[one, greedy[0]] for one in greedy]
    validation = MeasuredSplit(
        greedy=count_objects([answer(truth, truth)] * 3).values, nats=np.tile([30.0, 100.0], (3, 1))
    )
    whole = estimates(measured(groups, greedy, validation))
    assert list(whole) == list(MEANINGS)
    assert all(one.low - 1e-9 <= one.value <= one.high + 1e-9 for one in whole.values())
    assert whole["overfit_nats"].value == pytest.approx(0.2)
    assert whole["overfit_f1"].value == pytest.approx(whole["f1_greedy"].value - 1.0)
    assert whole["f1_greedy"].low < whole["f1_greedy"].high
    assert MEANINGS.keys() - features(measured(groups, greedy)).keys() == LAST_FOUR
    assert set(KIND_NAMES) <= whole.keys()


# ---- rules ---------------------------------------------------------------------------------------------------------

PLAIN = {
    "f1_greedy": 0.7, "recall_places": 0.7, "parse_rate": 1.0, "missing_labels": 0.0, "headroom": 0.0,
    "headroom_places": 0.0, "no_signal": 0.2, "unlabelled_right": 0.7, "exposure_gap": 0.0, "nats_train": 0.2,
    "overfit_nats": 0.0,
}  # fmt: skip


@pytest.mark.parametrize(
    ("changed", "method"),
    [
        ({}, rules.SFT),
        ({"parse_rate": 0.2, "missing_labels": 0.4}, rules.SFT),
        ({"missing_labels": 0.4, "headroom_places": 0.3}, rules.COMPLETED_GRPO),
        ({"missing_labels": 0.4, "headroom_places": 0.01}, rules.COMPLETED_SFT),
        ({"missing_labels": 0.4, "headroom_places": 0.3, "no_signal": 0.9}, rules.COMPLETED_SFT),
        ({"missing_labels": 0.4, "headroom_places": 0.3, "unlabelled_right": 0.2}, rules.KEPT),
        ({"missing_labels": 0.4, "recall_places": 0.936}, rules.NOTHING),  # digits: nothing gained, sft on them lost
        ({"missing_labels": 0.4, "recall_places": 0.905}, rules.COMPLETED_SFT),  # the whole interval must be above
        ({"missing_labels": 0.4, "recall_places": 0.936, "headroom_places": 0.3}, rules.COMPLETED_GRPO),
        ({"missing_labels": 0.4, "recall_places": 0.936, "unlabelled_right": 0.2}, rules.KEPT),
        ({"recall_places": 0.97}, rules.SFT),  # nothing is missing
        ({"missing_labels": 0.4, "unlabelled_right": 0.395}, rules.COMPLETED_SFT),  # the whole interval must be below
        ({"unlabelled_right": 0.1}, rules.SFT),  # nothing is missing
        ({"headroom_places": 0.2, "headroom": 0.2}, rules.GRPO),
        ({"headroom_places": 0.2, "headroom": 0.2, "no_signal": 0.9}, rules.SFT),
        ({"headroom": 0.2}, rules.SFT),
        ({"exposure_gap": 0.1}, rules.ROLLOUT_MATCHING),
        ({"f1_greedy": 0.94, "f1_val": 0.42, "overfit_f1": 0.52, "overfit_nats": 0.5}, rules.BY_HEART),
        ({"f1_greedy": 0.99, "f1_val": 0.93, "overfit_f1": 0.06}, rules.SFT),
        ({"f1_greedy": 0.99, "f1_val": 0.99, "overfit_f1": 0.0}, rules.NOTHING),
        ({"f1_greedy": 0.99}, rules.NOTHING),
        ({"overfit_nats": 0.5}, rules.NOTHING),
        ({"headroom_places": 0.2, "overfit_nats": 0.5}, rules.GRPO),
    ],
)
def test_each_reason_leads_to_its_method(changed: dict[str, float], method: str) -> None:
    values = PLAIN | changed
    found = {name: FeatureEstimate(value, value - 0.01, value + 0.01) for name, value in values.items()}
    recommendation = recommend(found)
    assert recommendation.method == method
    shown = " ".join(rule.reason for rule in recommendation.rules)
    assert all(f"{values[name]:.3f}" in shown for name in ("missing_labels", "headroom", "exposure_gap", "nats_train"))


def test_an_interval_that_does_not_clear_the_threshold_recommends_nothing_of_the_kind() -> None:
    found = {name: FeatureEstimate(value, value - 0.01, value + 0.01) for name, value in PLAIN.items()}
    found["missing_labels"] = FeatureEstimate(0.15, 0.05, 0.25)
    found["headroom_places"] = FeatureEstimate(0.05, 0.01, 0.09)
    assert recommend(found).method == rules.SFT
    del found["overfit_nats"]  # a validation file is missing
    assert recommend(found).method == rules.SFT
