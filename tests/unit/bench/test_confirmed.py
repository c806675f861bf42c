"""Confirmed mistakes: the kinds of labels, and which of them an answer says."""

from __future__ import annotations

from bench.confirmed import Labelled
from learner.records import DetectionObject


def box(name: str, x: int, y: int = 0) -> DetectionObject:
    return DetectionObject(name, "bbox_2d", (x, y, x + 90, y + 90))


ONE, TWO, SIX, SEVEN = (box(name, x) for name, x in (("one", 0), ("two", 200), ("six", 400), ("seven", 600)))
WRONG_NAME, NOWHERE = box("nine", 400), box("four", 800)


def labelled() -> Labelled:
    """Of four objects one is annotated. Completion gave one back, one with a wrong name, and one that is not there."""
    near_two = TWO._replace(bins=(205, 0, 290, 90))
    return Labelled.of([ONE, TWO, SIX, SEVEN], [ONE], [near_two, WRONG_NAME, NOWHERE])


def test_completed_labels_are_right_only_where_the_name_is_that_of_a_removed_object() -> None:
    found = labelled()
    assert [obj.desc for obj in found.right] == ["two"]
    assert list(found.wrong) == [WRONG_NAME, NOWHERE]
    assert list(found.never) == [SIX, SEVEN]


def test_a_label_that_repeats_an_annotated_object_is_wrong() -> None:
    assert list(Labelled.of([ONE, TWO], [ONE], [ONE]).wrong) == [ONE]


def test_an_answer_says_each_object_once() -> None:
    found = labelled().said([ONE, ONE, TWO, WRONG_NAME, box("two", 0, 500)])
    assert found == {"annotated": 1, "right": 1, "never": 0, "wrong": 1, "invented": 2}
