"""Rewards of answers: against the evaluation's metrics, brute force, and answers that end earlier (R37)."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from learner.config.sections.reward import DETECTION_REWARDS
from learner.records import Assignment, DetectionObject
from learner.tasks.detection.geometry import covered_share, iou_matrix
from learner.tasks.detection.metrics import count_objects, evaluate_counts
from learner.tasks.detection.rewards import BY_OBJECT, answer_rewards
from learner.tasks.detection.task import DetectionTask
from tests.examples import examples
from tests.unit.learner.tasks.fakes import CuttingTokenizer, box, make_rollout, make_task, poly

INDEXED, ARRAY = make_task(coordinates="digits"), make_task("array", "digits", [b'"}', b'", "', b"seven"])
ONE, TWO, SEVEN = box("one", 0, 0, 100, 100), box("two", 300, 300, 400, 400), box("seven", 600, 600, 700, 700)


@st.composite
def boxes(draw: st.DrawFn) -> DetectionObject:
    """Few places, sizes and names, so that overlaps, duplicates and wrong names are common."""
    x, y = draw(st.integers(0, 3)) * 30, draw(st.sampled_from([0, 10, 200]))
    width, height = draw(st.sampled_from([80, 100])), draw(st.sampled_from([60, 100]))
    return box(draw(st.sampled_from(["one", "two", "seven"])), x, y, x + width, y + height)


SCENES = st.tuples(
    st.lists(boxes(), max_size=5),
    st.lists(boxes(), max_size=4),
    st.lists(
        st.builds(lambda region, any_class: region._replace(desc="") if any_class else region, boxes(), st.booleans()),
        max_size=2,
    ),
)
Scene = tuple[list[DetectionObject], list[DetectionObject], list[DetectionObject]]


def answer(
    predicted: Sequence[DetectionObject],
    truth: Sequence[DetectionObject],
    ignored: Sequence[DetectionObject] = (),
    *,
    made: tuple[DetectionTask, CuttingTokenizer] = INDEXED,
    count: int | None = None,
) -> Assignment:
    """Match an answer. `count`: the answer's text ends behind so many objects, without the container's end."""
    task, tokenizer = made
    written = task.serialize(predicted, after=None)
    end = len(written.text) if count is None else written.object_spans[count - 1][1] if count else 1
    rollout = make_rollout(tokenizer.encode(written.text[:end]), truth)
    return task.match(task.parse(replace(rollout, sample=replace(rollout.sample, ignored=tuple(ignored)))))


def rewards(assignment: Assignment) -> dict[str, float]:
    return answer_rewards(assignment.parsed, DETECTION_REWARDS)


def scores(*scene: Any) -> dict[str, float]:
    return rewards(answer(*scene))


# ---- each reward ---------------------------------------------------------------------------------------------------


@given(scene=SCENES)
@settings(max_examples=examples(120), deadline=None)
def test_f1_is_the_evaluation_s_of_that_sample(scene: Scene) -> None:
    """The sample has ignore regions, duplicates and wrong names. An empty answer to an empty scene is right, though."""
    found = answer(*scene)
    metrics, own = evaluate_counts(count_objects([found])), rewards(found)
    counted = count_objects([found]).totals()
    for name, metric in (("f1", "f1@0.5"), ("f1_miou", "f1@miou")):
        if counted["truth"]:
            assert own[name] == pytest.approx(metrics[metric])
    if not counted["truth"]:
        assert own["f1"] == float(counted["predictions"] == counted["ignored@0.50"])


@given(scene=SCENES)
@settings(max_examples=examples(80), deadline=None)
def test_soft_iou_is_the_best_of_all_pairings(scene: Scene) -> None:
    predicted, truth, _ = scene
    iou = np.asarray(iou_matrix(predicted, truth)).reshape(len(predicted), len(truth))
    value = np.array([[iou[p, t] * (a.desc == b.desc) for t, b in enumerate(truth)] for p, a in enumerate(predicted)])
    value = value.reshape(iou.shape)
    if len(predicted) < len(truth):
        value = value.T
    best = max(
        sum(value[row, column] for column, row in enumerate(rows))
        for rows in itertools.permutations(range(value.shape[0]), value.shape[1])
    )
    wanted = 2 * best / (len(predicted) + len(truth)) if predicted or truth else 1.0
    assert scores(predicted, truth)["soft_iou"] == pytest.approx(wanted)


@given(scene=SCENES)
@settings(max_examples=examples(80), deadline=None)
def test_every_reward_is_a_share(scene: Scene) -> None:
    found = scores(*scene)
    assert found.keys() == set(DETECTION_REWARDS)
    assert all(0.0 <= value <= 1.0 for value in found.values())


@given(scene=SCENES, region=boxes(), size=st.integers(1, 3))
@settings(max_examples=examples(60), deadline=None)
def test_a_prediction_in_an_ignore_region_changes_no_reward(scene: Scene, region: DetectionObject, size: int) -> None:
    """R41: wherever it touches no true object, as many as there are."""
    predicted, truth, _ = scene
    far = region._replace(bins=tuple(v + 500 for v in region.bins))
    more = scores([*predicted, *[far] * size], truth, [far])
    assert more == pytest.approx(scores(predicted, truth, [far]))
    assert float(covered_share([far], [far])) == 1.0


def test_a_duplicate_costs() -> None:
    right, again = scores([ONE, TWO], [ONE, TWO]), scores([ONE, TWO, ONE], [ONE, TWO])
    for name in BY_OBJECT:
        assert again[name] < right[name] == 1.0
    assert (again["f1"], again["count"]) == (pytest.approx(0.8), pytest.approx(2 / 3))


def test_a_name_costs_where_names_count() -> None:
    found = scores([ONE._replace(desc="two")], [ONE])
    assert found == {"f1": 0.0, "f1_miou": 0.0, "soft_iou": 0.0, "count": 1.0, "class_only": 0.0, "format": 1.0}


def test_a_place_costs_where_places_count() -> None:
    found = scores([ONE._replace(bins=TWO.bins)], [ONE])
    assert found == {"f1": 0.0, "f1_miou": 0.0, "soft_iou": 0.0, "count": 1.0, "class_only": 1.0, "format": 1.0}


def test_a_half_right_place_is_worth_something() -> None:
    found = scores([box("one", 0, 0, 100, 72)], [ONE])
    assert (found["f1"], found["f1_miou"], found["soft_iou"]) == (1.0, 0.5, pytest.approx(0.72))


@pytest.mark.parametrize(
    ("predicted", "truth", "count", "class_only"),
    [
        ([], [], 1.0, 1.0),
        ([], [ONE], 0.0, 0.0),
        ([ONE], [], 0.0, 0.0),
        ([ONE, ONE, ONE, TWO], [ONE, TWO], 0.5, 4 / 6),
        ([TWO], [ONE, TWO, SEVEN, ONE], 0.25, 2 / 5),
    ],
)
def test_counts_and_names(
    predicted: list[DetectionObject], truth: list[DetectionObject], count: float, class_only: float
) -> None:
    found = scores(predicted, truth)
    assert (found["count"], found["class_only"]) == (pytest.approx(count), pytest.approx(class_only))


@pytest.mark.parametrize(
    ("text", "is_whole"),
    [
        ('{"object_1": {"desc": "one", "bbox_2d": [0, 0, 100, 100]}}', True),
        ("{}", True),
        ('{"object_1": {"desc": "one", "bbox_2d": [0, 0, 100, 100]}', False),  # the container is not closed
        ('{"object_1": {"desc": "one", "bbox_2d": [0, 0, 100]}}', False),  # dropped
        ('{"object_1": {"desc": "one", "bbox_2d": [0, 0, 100, 100]}} so', False),  # text behind it
        ("no idea", False),
    ],
)
def test_format_is_one_closed_container_without_a_dropped_object(text: str, is_whole: bool) -> None:
    task, tokenizer = INDEXED
    parsed = task.parse(make_rollout(tokenizer.encode(text), [ONE]))
    assert answer_rewards(parsed, ["format"]) == {"format": float(is_whole)}


def test_only_what_is_named_is_computed() -> None:
    task, _ = INDEXED
    assert task.rewards(answer([ONE], [ONE]), ["f1", "my_own"]) == {"f1": 1.0}


# ---- object by object ----------------------------------------------------------------------------------------------

WEIGHTS = {"f1": 1.0, "f1_miou": 0.3, "soft_iou": 0.5, "count": 0.2, "class_only": 0.25, "format": 7.0, "my_own": 9.0}


def by_object(assignment: Assignment) -> float:
    return sum(WEIGHTS[name] * value for name, value in rewards(assignment).items() if name in BY_OBJECT)


@pytest.mark.parametrize("made", [INDEXED, ARRAY], ids=["index_map", "array"])
@given(scene=SCENES)
@settings(max_examples=examples(40), deadline=None)
def test_after_each_object_an_answer_has_earned_what_it_would_earn_if_it_ended_there(
    made: tuple[DetectionTask, CuttingTokenizer], scene: Scene
) -> None:
    predicted = scene[0]
    whole = answer(*scene, made=made)
    found = made[0].prefix_rewards(whole, WEIGHTS)
    shorter = [by_object(answer(*scene, made=made, count=count)) for count in range(len(predicted) + 1)]
    assert found.values.tolist() == pytest.approx(shorter)
    assert found.values[-1] == pytest.approx(by_object(whole))


@pytest.mark.parametrize("made", [INDEXED, ARRAY], ids=["index_map", "array"])
@given(predicted=st.lists(st.one_of(boxes(), st.just(poly("seven", 0, 0, 50, 9, 20, 70))), max_size=5))
@settings(max_examples=examples(40), deadline=None)
def test_an_object_s_tokens_hold_its_name_and_its_place(
    made: tuple[DetectionTask, CuttingTokenizer], predicted: list[DetectionObject]
) -> None:
    """Either of the two may be written last. What is left until the next object, or the end, is punctuation."""
    task, tokenizer = made
    whole = answer(predicted, [ONE], made=made)
    ends, ids = task.prefix_rewards(whole, WEIGHTS).ends.tolist(), whole.parsed.rollout.response_token_ids
    assert len(ends) == len(predicted)
    assert all(a < b for a, b in itertools.pairwise([0, *ends, len(ids) + 1]))
    for begin, end, obj in zip([0, *ends], ends, predicted, strict=False):
        text = tokenizer.decode(ids[begin:end])
        assert f'"{obj.desc}"' in text
        assert ", ".join(map(str, obj.bins)) in text
    behind = tokenizer.decode(ids[ends[-1] if ends else 0 :])
    assert set(behind) <= set('{[]}" ')


def test_an_object_that_was_dropped_earns_nothing_and_the_next_one_counts_on() -> None:
    task, tokenizer = INDEXED
    text = '{"object_1": {"desc": "one", "bbox_2d": [0, 0]}, "object_2": {"desc": "two", "bbox_2d": [1, 2, 3, 4]}}'
    found = task.prefix_rewards(
        task.match(task.parse(make_rollout(tokenizer.encode(text), [box("two", 1, 2, 3, 4)]))), {"f1": 1.0}
    )
    assert found.values.tolist() == [0.0, 1.0]
    assert found.ends.tolist() == [len(text) - len("]}}")]
