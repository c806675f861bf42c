"""AP of a draw is pycocotools' AP over copies of its images (R43)."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from learner.detector.evaluation import Scored, assignment_of
from learner.records import DetectionObject, Sample
from learner.tasks.detection.ap_interval import AP, AP50, ApDraws, ap_of
from learner.tasks.detection.metrics import coco_ap

NAMES = ("red", "white", "rare")


def scene(number: int) -> tuple[Sample, list[Scored]]:
    """Draw some objects, boxes near them and elsewhere, each with its own score; now and then a crowd."""
    rng = np.random.default_rng(number)

    def box(name: str, near: tuple[int, ...] | None = None) -> DetectionObject:
        x, y = rng.integers(0, 800, 2) if near is None else np.array(near[:2]) + rng.integers(-12, 13, 2)
        return DetectionObject(name, "bbox_2d", (int(x), int(y), int(x) + 120, int(y) + 90))

    objects = tuple(box(NAMES[rng.integers(0, 2 + (number == 0))]) for _ in range(rng.integers(0, 5)))
    found = [Scored(box(obj.desc, obj.bins), float(rng.random())) for obj in objects if rng.random() < 0.8]
    found += [Scored(box(NAMES[rng.integers(0, 2)]), float(rng.random())) for _ in range(3)]
    ignored = (DetectionObject("red", "bbox_2d", (0, 0, 999, 400)),) if number % 4 == 1 else ()
    sample = Sample(
        sample_id=str(number), messages=(), images=(), objects=objects, width=999, height=999, ignored=ignored
    )
    return sample, found


SCENES = [scene(number) for number in range(9)]


def assigned(scenes: list[tuple[Sample, list[Scored]]]) -> tuple[list, list]:
    named = [(replace(sample, sample_id=f"{i}"), boxes) for i, (sample, boxes) in enumerate(scenes)]
    return [assignment_of(boxes, sample) for sample, boxes in named], [[b.score for b in boxes] for _, boxes in named]


@pytest.mark.parametrize("draw", [[1] * 9, [3, 0, 0, 2, 1, 0, 3, 0, 0], [0, 0, 4, 0, 5, 0, 0, 0, 0]])
def test_a_draw_counts_as_copies_of_its_images(draw: list[int]) -> None:
    copies = [one for one, times in zip(SCENES, draw, strict=True) for _ in range(times)]
    wanted = coco_ap(*assigned(copies))
    found = ap_of(ApDraws.of(*assigned(SCENES)).classes, np.array([draw], dtype=float))
    assert {name: values[0] for name, values in found.items()} == pytest.approx({n: wanted[n] for n in (AP, AP50)})
    assert 0 < found[AP][0] < 1


def test_differences_are_on_the_same_draws() -> None:
    """The better detector's gain is narrower than either interval."""
    better = [(sample, boxes[:-3]) for sample, boxes in SCENES]
    one, other = (ApDraws.of(*assigned(scenes)) for scenes in (SCENES, better))
    gain, own = other.minus(one, AP), one.interval(AP)
    assert one.minus(one, AP).high == 0.0
    assert gain.estimate == pytest.approx(other.whole[AP] - one.whole[AP])
    assert gain.high - gain.low < own.high - own.low
    assert own.low < own.estimate < own.high


def test_without_truth_or_boxes_it_is_0() -> None:
    empty = [(sample, []) for sample, _ in SCENES]
    assert ApDraws.of(*assigned(empty)).interval(AP50).high == 0.0


def test_the_draws_of_every_sample_once_are_the_whole() -> None:
    drawn = ApDraws.of(*assigned(SCENES))
    once = ap_of(drawn.classes, np.ones((1, len(SCENES))))
    assert {name: values[0] for name, values in once.items()} == pytest.approx({n: drawn.whole[n] for n in (AP, AP50)})
