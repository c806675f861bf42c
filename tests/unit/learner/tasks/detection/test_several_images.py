"""Samples with several images: everything is what the images alone would give, one after the other."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from learner.config.sections.loss import LossConfig
from learner.records import Assignment, DetectionObject
from learner.tasks.detection.agreement import cluster_objects
from learner.tasks.detection.ap_interval import ApDraws, ap_of
from learner.tasks.detection.bins import canonical_order
from learner.tasks.detection.metrics import coco_ap, count_objects
from learner.tasks.detection.task import DetectionTask
from learner.tasks.supervision import IGNORED
from shared.errors import DataError
from tests.examples import examples
from tests.unit.learner.tasks.detection.answers import CONTAINERS, COORDINATES, OBJECTS
from tests.unit.learner.tasks.fakes import box, make_rollout, make_task

MANY = 3
IMAGES = range(1, MANY + 1)
KINDS = st.tuples(st.sampled_from(CONTAINERS), st.sampled_from(COORDINATES))
Scene = tuple[list[DetectionObject], list[DetectionObject]]


@st.composite
def boxes(draw: st.DrawFn) -> DetectionObject:
    """Few places and names, so that many boxes overlap, also those of different images."""
    x, y = draw(st.integers(0, 6)) * 40, draw(st.integers(0, 6)) * 40
    name = draw(st.sampled_from(["one", "two"]))
    return box(name, x, y, x + 200, y + 200)._replace(image=draw(st.sampled_from(IMAGES)))


@st.composite
def scenes(draw: st.DrawFn) -> Scene:
    """Draw truth and predictions."""
    truth = canonical_order(draw(st.lists(boxes(), max_size=6)))
    return list(truth), draw(st.lists(boxes(), max_size=6))


def matched(task: DetectionTask, truth: Sequence[DetectionObject], said: Sequence[DetectionObject]) -> Assignment:
    text = task.serialize(said, after=None).text
    return task.match(task.parse(make_rollout(task.tokenizer.encode(text), truth, num_images=MANY)))


def alone(task: DetectionTask, truth: Sequence[DetectionObject], said: Sequence[DetectionObject]) -> list[Assignment]:
    """Match the same, each image as a sample of its own."""
    found = []
    for k in IMAGES:
        own_truth, own_said = ([obj._replace(image=None) for obj in those if obj.image == k] for those in (truth, said))
        text = task.serialize(own_said, after=None).text
        found.append(task.match(task.parse(make_rollout(task.tokenizer.encode(text), own_truth, sample_id=str(k)))))
    return found


@settings(max_examples=examples(150), deadline=None)
@given(KINDS, st.lists(st.tuples(OBJECTS, st.sampled_from(IMAGES)), max_size=5))
def test_what_is_written_reads_back_with_its_images(
    kind: tuple[str, str], chosen: list[tuple[DetectionObject, int]]
) -> None:
    task, tokenizer = make_task(*kind)
    objects = [obj._replace(image=k) for obj, k in chosen]
    text = task.serialize(objects, after=None).text
    parsed = task.parse(make_rollout(tokenizer.encode(text), num_images=MANY))
    assert [one.object for one in parsed.objects] == objects
    assert not parsed.drops
    assert all(f'"image": {obj.image}, "{obj.kind}": [' in text for obj in objects)


def test_only_samples_with_several_images_name_them() -> None:
    """An answer to one image is spelled as before, and a field `image` in it is one too many."""
    task, tokenizer = make_task(coordinates="digits")
    assert "image" not in task.serialize([box("one", 1, 2, 3, 4)], after=None).text
    text = '{"object_1": {"desc": "one", "image": 1, "bbox_2d": [1, 2, 3, 4]}}'
    assert task.parse(make_rollout(tokenizer.encode(text))).drops == {"unknown_geom": 1}
    (one,) = task.parse(make_rollout(tokenizer.encode(text), num_images=2)).objects
    assert one.object.image == 1


@settings(max_examples=examples(150), deadline=None)
@given(scenes())
def test_matching_is_that_of_each_image_alone(scene: Scene) -> None:
    task, _ = make_task(coordinates="digits")
    truth, said = scene
    whole, parts = matched(task, truth, said), alone(task, truth, said)
    assert all(said[p].image == truth[t].image for p, t, _ in whole.pairs)
    assert len(whole.pairs) == sum(len(part.pairs) for part in parts)
    overlap = sum(iou for part in parts for *_, iou in part.pairs)
    assert sum(iou for *_, iou in whole.pairs) == pytest.approx(overlap)


@settings(max_examples=examples(100), deadline=None)
@given(scenes())
def test_counts_and_rewards_are_sums_over_the_images(scene: Scene) -> None:
    task, _ = make_task(coordinates="digits")
    truth, said = scene
    whole, parts = matched(task, truth, said), alone(task, truth, said)
    total, apart = count_objects([whole]).totals(), count_objects(parts).totals()
    for name, value in total.items():
        if name.startswith(("tp", "truth", "predictions", "duplicates", "iou_sum", "drop")):
            assert value == pytest.approx(apart[name]), name
    rewards = task.rewards(whole, ["f1", "soft_iou", "count", "class_only"])
    number = len(truth) + len(said)
    same = sum((Counter(o.desc for o in said if o.image == k) & Counter(o.desc for o in truth if o.image == k)).total()
               for k in IMAGES)  # fmt: skip
    hits, soft = apart["tp@0.50"], sum(_soft_iou(part) for part in parts)
    for name, twice in (("f1", hits), ("soft_iou", soft), ("class_only", same)):
        assert rewards[name] == pytest.approx(2 * twice / number if number else 1.0), name


def _soft_iou(part: Assignment) -> float:
    """The largest sum of IoUs with equal names, by the reward of the image alone."""
    task, _ = make_task(coordinates="digits")
    number = len(part.parsed.objects) + len(part.parsed.rollout.sample.objects)
    return task.rewards(part, ["soft_iou"])["soft_iou"] * number / 2 if number else 0.0


@settings(max_examples=examples(30), deadline=None)
@given(st.lists(scenes(), min_size=1, max_size=3), st.randoms(use_true_random=False))
def test_average_precision_is_that_of_all_images(several: list[Scene], random: object) -> None:
    task, _ = make_task(coordinates="digits")
    wholes = [matched(task, *scene) for scene in several]
    scores = [[0.05 * (1 + (7 * i + 3 * p) % 19) for p in range(len(said))] for i, (_, said) in enumerate(several)]
    parts = [part for scene in several for part in alone(task, *scene)]
    by_image = [
        [score for score, obj in zip(own, said, strict=True) if obj.image == k]
        for own, (_, said) in zip(scores, several, strict=True)
        for k in IMAGES
    ]
    assert coco_ap(wholes, scores) == pytest.approx(coco_ap(parts, by_image))
    whole = ap_of(ApDraws.of(wholes, scores).classes, np.ones((1, len(wholes))))
    apart = ap_of(ApDraws.of(parts, by_image).classes, np.ones((1, len(parts))))
    assert {name: values[0] for name, values in whole.items()} == pytest.approx(
        {name: values[0] for name, values in apart.items()}
    )


@settings(max_examples=examples(100), deadline=None)
@given(scenes(), st.sampled_from(["last_object", "last_match", "first_miss"]))
def test_targets_lead_to_the_truth_of_the_same_image(scene: Scene, prefix_end: str) -> None:
    """With its labels in place of its tokens, Y_train holds every true object, in the image where it is."""
    task, tokenizer = make_task(coordinates="tokens")
    truth, said = scene
    assignment = matched(task, truth, said)
    loss = LossConfig.model_validate({"prefix_end": prefix_end, "matched_desc_weight": 1.0})
    target = task.target(assignment, loss)
    assert target.token_ids[-1] == tokenizer.eos_token_id
    taught = np.where(target.labels == IGNORED, target.token_ids, target.labels)[:-1]
    found = task.parse(replace(assignment.parsed.rollout, response_token_ids=tuple(taught.tolist())))
    assert not found.drops
    places = Counter((one.object.image, one.object.bins) for one in found.objects)
    assert not Counter((obj.image, obj.bins) for obj in truth) - places


@settings(max_examples=examples(100), deadline=None)
@given(st.lists(boxes(), max_size=6))
def test_ground_truth_is_written_image_after_image(objects: list[DetectionObject]) -> None:
    task, tokenizer = make_task()
    truth = canonical_order(objects)
    rollout = make_rollout((), truth, num_images=MANY)
    task.validate(rollout.sample)
    target = task.ground_truth(rollout.sample, LossConfig())
    parsed = task.parse(replace(rollout, response_token_ids=tuple(target.token_ids[:-1].tolist())))
    assert [one.object for one in parsed.objects] == list(truth)
    assert [obj.image for obj in truth] == sorted(obj.image or 0 for obj in truth)
    assert tokenizer.eos_token_id == target.token_ids[-1]


@settings(max_examples=examples(60), deadline=None)
@given(st.lists(st.lists(boxes(), max_size=4), min_size=1, max_size=3))
def test_answers_agree_within_an_image_only(answers: list[list[DetectionObject]]) -> None:
    clusters = cluster_objects(answers)
    for cluster in clusters:
        assert {member.object.image for member in cluster.members} == {cluster.object.image}
    by_image = [cluster_objects([[o for o in own if o.image == k] for own in answers]) for k in IMAGES]
    assert sorted(one.object for one in clusters) == sorted(one.object for own in by_image for one in own)


def test_an_ignore_region_holds_in_its_image_only() -> None:
    task, tokenizer = make_task(coordinates="digits")
    said = [box("one", 0, 0, 100, 100)._replace(image=k) for k in (1, 2)]
    rollout = make_rollout(tokenizer.encode(task.serialize(said, after=None).text), num_images=2)
    region = box("", 0, 0, 500, 500)._replace(image=2)
    rollout = replace(rollout, sample=replace(rollout.sample, ignored=(region,)))
    counts = count_objects([task.match(task.parse(rollout))]).totals()
    assert counts["ignored@0.50"] == 1


@pytest.mark.parametrize(
    ("image", "sizes", "found"),
    [(None, True, "no image"), (3, True, "image 3"), (0, True, "image 0"), (1, False, "2 images, 0 sizes")],
)
def test_ground_truth_names_one_of_its_images(image: int | None, sizes: bool, found: str) -> None:
    task, _ = make_task()
    sample = make_rollout((), [box("one", 0, 0, 9, 9)._replace(image=image)], num_images=2).sample
    with pytest.raises(DataError) as raised:
        task.validate(sample if sizes else replace(sample, sizes=()))
    assert raised.value.found == found


def test_ground_truth_of_one_image_names_none() -> None:
    task, _ = make_task()
    with pytest.raises(DataError) as raised:
        task.validate(make_rollout((), [box("one", 0, 0, 9, 9)._replace(image=1)]).sample)
    assert raised.value.found == "image 1"


def test_ground_truth_is_in_the_order_of_its_images() -> None:
    task, _ = make_task()
    objects = [box("one", 0, 0, 9, 9)._replace(image=2), box("one", 5, 5, 9, 9)._replace(image=1)]
    with pytest.raises(DataError, match="canonical order"):
        task.validate(make_rollout((), objects, num_images=2).sample)
