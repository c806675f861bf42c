"""F1@0.5 of the report is the detection task's own."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from learner.detector.evaluation import Scored, assignment_of
from learner.records import Assignment, DetectionObject, Sample
from learner.report.records import Scene
from learner.report.scores import classify, confusion, counts_by_class, counts_by_iou, f1_estimate, f1_gain
from learner.tasks.detection.metrics import count_objects, evaluate_counts
from tests.examples import examples


@st.composite
def boxes(draw: st.DrawFn) -> DetectionObject:
    x, y = draw(st.integers(0, 6)), draw(st.integers(0, 6))
    side = draw(st.integers(2, 4))
    bins = tuple(100 * v for v in (x, y, x + side, y + side))
    return DetectionObject(desc=draw(st.sampled_from(["cat", "dog"])), kind="bbox_2d", bins=bins)


Objects = tuple[DetectionObject, ...]
objects = st.lists(boxes(), max_size=5).map(tuple)
regions = st.lists(
    st.tuples(boxes(), st.booleans()).map(lambda drawn: drawn[0]._replace(desc="") if drawn[1] else drawn[0]),
    max_size=2,
).map(tuple)
scene_parts = st.lists(st.tuples(objects, objects, regions), min_size=1, max_size=6)
Parts = list[tuple[Objects, Objects, Objects]]


def make_scene(index: int, truth: Objects, predictions: Objects, ignored: Objects = ()) -> Scene:
    return Scene(
        scene_id=str(index),
        images=(),
        width=10,
        height=10,
        truth=truth,
        ignored=ignored,
        predictions=predictions,
        num_dropped=0,
        truncated=False,
    )


def make_assignment(scene: Scene) -> Assignment:
    sample = Sample(
        sample_id=scene.scene_id,
        messages=(),
        images=(),
        objects=scene.truth,
        width=scene.width,
        height=scene.height,
        ignored=scene.ignored,
    )
    return assignment_of([Scored(prediction, 1.0) for prediction in scene.predictions], sample)


@settings(max_examples=examples(60), deadline=None)
@given(scene_parts)
def test_f1_equals_the_tasks_own(parts: Parts) -> None:
    scenes = [make_scene(i, *part) for i, part in enumerate(parts)]
    expected = evaluate_counts(count_objects([make_assignment(scene) for scene in scenes]))["f1@0.5"]
    estimate = f1_estimate(scenes)
    assert abs(estimate.value - expected) < 1e-12
    assert estimate.low is not None
    assert estimate.high is not None
    assert estimate.low <= estimate.high


@settings(max_examples=examples(60), deadline=None)
@given(scene_parts)
def test_counts_by_iou_are_the_tasks_own(parts: Parts) -> None:
    scenes = [make_scene(i, *part) for i, part in enumerate(parts)]
    totals = count_objects([make_assignment(scene) for scene in scenes]).totals()
    for threshold, counts in counts_by_iou(scenes).items():
        assert counts.correct == totals[f"tp@{threshold:.2f}"]
        assert counts.predictions == totals["predictions"] - totals[f"ignored@{threshold:.2f}"]
        assert counts.truth == totals["truth"]


@settings(max_examples=examples(60), deadline=None)
@given(scene_parts)
def test_counts_of_a_class_are_those_of_its_objects_alone(parts: Parts) -> None:
    scenes = [make_scene(i, *part) for i, part in enumerate(parts)]
    by_class = counts_by_class(scenes)
    for name, counts in by_class.items():
        alone = [
            make_scene(i, *(tuple(o for o in side if o.desc in (name, "")) for side in part))
            for i, part in enumerate(parts)
        ]
        assert counts.correct == sum(len(classify(scene).found) for scene in alone)
        assert counts.predictions == sum(classify(scene).num_judged for scene in alone)
        assert counts.truth == sum(len(scene.truth) for scene in alone)
    assert [c.truth for c in by_class.values()] == sorted((c.truth for c in by_class.values()), reverse=True)


@settings(max_examples=examples(60), deadline=None)
@given(scene_parts)
def test_confusion_counts_every_object_and_every_prediction_once(parts: Parts) -> None:
    scenes = [make_scene(i, *part) for i, part in enumerate(parts)]
    found = confusion(scenes)
    for name, counts in counts_by_class(scenes).items():
        assert sum(count for (truth, _), count in found.items() if truth == name) == counts.truth
        assert sum(count for (_, said), count in found.items() if said == name) == counts.predictions
        assert found[name, name] == counts.correct
    assert (None, None) not in found


@settings(max_examples=examples(60), deadline=None)
@given(objects, objects, regions)
def test_every_object_is_classified_once(truth: Objects, said: Objects, ignored: Objects) -> None:
    result = classify(make_scene(0, truth, said, ignored))
    assert len(result.outcomes) == len(said)
    assert result.outcomes.count("correct") == len(result.found)
    assert result.outcomes.count("correct") + result.outcomes.count("wrong_class") <= len(truth)
    for outcome, iou in zip(result.outcomes, result.ious, strict=True):
        assert iou >= 0.5 or outcome in ("false_positive", "ignored")


def test_outcomes_of_a_plain_scene() -> None:
    def box(desc: str, x: int) -> DetectionObject:
        return DetectionObject(desc=desc, kind="bbox_2d", bins=(x, 0, x + 100, 100))

    truth = (box("cat", 0), box("dog", 300))
    said = (box("cat", 5), box("cat", 300), box("dog", 700), box("cat", 10))
    result = classify(make_scene(0, truth, said))
    assert result.outcomes == ("correct", "wrong_class", "false_positive", "false_positive")
    assert result.found == {0}
    assert confusion([make_scene(0, truth, said)]) == {
        ("cat", "cat"): 1,
        ("dog", "cat"): 1,
        (None, "dog"): 1,
        (None, "cat"): 1,
    }
    assert confusion([make_scene(0, truth, ())]) == {("cat", None): 1, ("dog", None): 1}


def test_a_prediction_in_an_ignore_region_counts_neither_as_right_nor_as_wrong() -> None:
    def box(desc: str, x: int) -> DetectionObject:
        return DetectionObject(desc=desc, kind="bbox_2d", bins=(x, 0, x + 100, 100))

    truth, said = (box("cat", 0),), (box("cat", 5), box("cat", 300), box("dog", 300), box("dog", 600))
    scene = make_scene(0, truth, said, (box("cat", 290), box("", 590)))
    assert classify(scene).outcomes == ("correct", "ignored", "false_positive", "ignored")
    assert confusion([scene]) == {("cat", "cat"): 1, (None, "dog"): 1}
    assert classify(scene).f1 == 2 / 3


def test_gain_is_paired_by_scene_id() -> None:
    """The same answers in another order are no gain at all, in any draw."""
    box = DetectionObject(desc="cat", kind="bbox_2d", bins=(0, 0, 100, 100))
    before = [make_scene(i, (box,), (box,) if i % 2 else ()) for i in range(20)]
    gain = f1_gain(before, before[::-1])
    assert gain is not None
    assert (gain.value, gain.low, gain.high) == (0.0, 0.0, 0.0)
    better = f1_gain(before, [make_scene(i, (box,), (box,)) for i in range(5, 20)])
    assert better is not None
    assert better.num_scenes == 15
    assert better.low is not None
    assert better.low > 0
    assert f1_gain(before, []) is None
