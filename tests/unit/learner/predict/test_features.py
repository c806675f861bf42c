"""Features of drawn answers whose quality is known, and the rules."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from learner.predict import recommend as rules
from learner.predict.exposure import KINDS
from learner.predict.features import KIND_NAMES, MEANINGS, FeatureEstimate, Measured, MeasuredSplit, estimates
from learner.predict.recommend import recommend
from learner.records import Assignment, DetectionObject
from learner.tasks.detection.completion import CompletionEstimate
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


def features(found: Measured) -> dict[str, float]:
    return {name: one.value for name, one in estimates(found).items()}


def measured(
    groups: Sequence[Sequence[Assignment]], greedy: Sequence[Assignment], validation: MeasuredSplit | None = None
) -> Measured:
    nats = np.tile([10.0, 100.0], (len(groups), 1))
    exposure = np.tile([3.0, 1.0, 10.0], (len(groups), len(KINDS), 1))
    train = MeasuredSplit(greedy=count_objects(greedy).values, nats=nats)
    sampled = np.stack([count_objects(group).values for group in groups])
    gaps = np.tile([2.0, 4.0, 3.0], (len(groups), 1))
    return Measured(train=train, sampled=sampled, exposure=exposure, validation=validation, gaps=gaps)


# ---- features ------------------------------------------------------------------------------------------------------


def test_headroom_of_answers_of_known_quality() -> None:
    truth = [ONE, TWO]
    groups = [[answer([ONE], truth), answer([TWO, SEVEN], truth)]] * 4
    greedy = [answer([], truth)] * 4
    found = features(measured(groups, greedy))
    assert found["f1_greedy"] == found["recall_greedy"] == 0.0
    assert found["f1_sampled"] == pytest.approx(2 * 2 / (3 + 4))
    assert found["f1_best"] == found["headroom"] == pytest.approx(2 / 3)
    assert found["missing_labels"] == pytest.approx(3 / 5)
    assert found["unlabelled_right"] == pytest.approx(3 / 4)
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
    unknown = features(replace(measured(groups, greedy, validation), gaps=None))
    assert MEANINGS.keys() - unknown.keys() == {"missing_labels", "unlabelled_right"}
    assert set(KIND_NAMES) <= whole.keys()


# ---- rules ---------------------------------------------------------------------------------------------------------

PLAIN = {
    "f1_greedy": 0.7, "recall_places": 0.7, "parse_rate": 1.0, "missing_labels": 0.0, "headroom": 0.0,
    "headroom_places": 0.0, "no_signal": 0.2, "exposure_gap": 0.0, "nats_train": 0.2, "overfit_nats": 0.0,
}  # fmt: skip
KNOWN = CompletionEstimate(
    min_votes=3,
    why="",
    missing=0.3,
    recall=(0.9, 0.8, 0.7),
    precision=(0.2, 0.6, 0.9),
    free=(9, 5, 4),
    source="appearance",
)
UNSURE = replace(KNOWN, min_votes=None, why="at most 30% of what could be completed would be right")
BIASED = "71% of sure finds touch the border"


@pytest.mark.parametrize(
    ("changed", "known", "method"),
    [
        ({}, KNOWN, rules.SFT),
        ({"parse_rate": 0.2, "missing_labels": 0.4}, KNOWN, rules.SFT),
        ({"missing_labels": 0.4, "headroom_places": 0.3}, KNOWN, rules.COMPLETED_GRPO),
        ({"missing_labels": 0.4, "headroom_places": 0.01}, KNOWN, rules.COMPLETED_SFT),
        ({"missing_labels": 0.4, "headroom_places": 0.3, "no_signal": 0.9}, KNOWN, rules.COMPLETED_SFT),
        ({"missing_labels": 0.4, "headroom_places": 0.3}, UNSURE, rules.KEPT),
        ({"missing_labels": 0.4, "recall_places": 0.936}, KNOWN, rules.NOTHING),  # digits: sft on them lost
        ({"missing_labels": 0.4, "recall_places": 0.905}, KNOWN, rules.COMPLETED_SFT),  # the whole interval is asked
        ({"missing_labels": 0.4, "recall_places": 0.936, "headroom_places": 0.3}, KNOWN, rules.COMPLETED_GRPO),
        ({"missing_labels": 0.4, "recall_places": 0.936}, UNSURE, rules.KEPT),
        ({"missing_labels": 0.4}, replace(KNOWN, may_be_complete=True), rules.SFT),
        ({"recall_places": 0.97}, UNSURE, rules.SFT),  # nothing is missing
        ({}, replace(UNSURE, not_random=BIASED, source="votes", missing=None), rules.KEPT),
        ({}, replace(KNOWN, not_random=BIASED), rules.COMPLETED_SFT),
        ({"headroom_places": 0.2, "headroom": 0.2}, KNOWN, rules.GRPO),
        ({"headroom_places": 0.2, "headroom": 0.2, "no_signal": 0.9}, KNOWN, rules.SFT),
        ({"headroom": 0.2}, KNOWN, rules.SFT),
        ({"exposure_gap": 0.1}, KNOWN, rules.ROLLOUT_MATCHING),
        ({"f1_greedy": 0.94, "f1_val": 0.42, "overfit_f1": 0.52, "overfit_nats": 0.5}, KNOWN, rules.BY_HEART),
        ({"f1_greedy": 0.99, "f1_val": 0.93, "overfit_f1": 0.06}, KNOWN, rules.SFT),
        ({"f1_greedy": 0.99, "f1_val": 0.99, "overfit_f1": 0.0}, KNOWN, rules.NOTHING),
        ({"f1_greedy": 0.99}, KNOWN, rules.NOTHING),
        ({"overfit_nats": 0.5}, KNOWN, rules.NOTHING),
        ({"headroom_places": 0.2, "overfit_nats": 0.5}, KNOWN, rules.GRPO),
    ],
)
def test_each_reason_leads_to_its_method(changed: dict[str, float], known: CompletionEstimate, method: str) -> None:
    values = PLAIN | changed
    found = {name: FeatureEstimate(value, value - 0.01, value + 0.01) for name, value in values.items()}
    recommendation = recommend(found, known)
    assert recommendation.method == method
    shown = " ".join(rule.reason for rule in recommendation.rules)
    assert all(f"{values[name]:.3f}" in shown for name in ("missing_labels", "headroom", "exposure_gap", "nats_train"))
    assert known.not_random in shown
    assert known.why in shown


def test_an_interval_that_does_not_clear_the_threshold_recommends_nothing_of_the_kind() -> None:
    found = {name: FeatureEstimate(value, value - 0.01, value + 0.01) for name, value in PLAIN.items()}
    found["missing_labels"] = FeatureEstimate(0.15, 0.05, 0.25)
    found["headroom_places"] = FeatureEstimate(0.05, 0.01, 0.09)
    assert recommend(found, KNOWN).method == rules.SFT
    del found["overfit_nats"]  # a validation file is missing
    assert recommend(found, KNOWN).method == rules.SFT
    del found["missing_labels"]  # nothing is known of the labels
    few = "no number of votes has 20 clusters at labelled places: the answers say too little"
    assert recommend(found, replace(UNSURE, missing=None, why=few)).method == rules.SFT
