"""A score near 0 says why (R52): what the answers have in common, and which key to change."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from learner.records import DetectionObject
from tests.unit.learner.tasks.fakes import box, make_rollout, make_task

TRUTH = [box("cat", 100, 100, 300, 300), box("dog", 500, 500, 700, 800)]


def reason(
    answers: Sequence[str], *, cut: bool = False, truth: Sequence[DetectionObject] = TRUTH
) -> tuple[str, str] | None:
    task, tokenizer = make_task(container="array", coordinates="digits")
    assignments = [
        task.match(task.parse(make_rollout(tokenizer.encode(text), truth, finish_reason="length" if cut else "stop")))
        for text in answers
    ]
    return task.reason(assignments, task.evaluate(assignments))


def objects(*boxes: tuple[str, list[int]]) -> str:
    return "[" + ", ".join(f'{{"bbox_2d": {bins}, "label": "{name}"}}' for name, bins in boxes) + "]"


RIGHT = objects(("cat", [100, 100, 300, 300]), ("dog", [500, 500, 700, 800]))


def test_a_good_score_and_nothing_to_find_need_no_reason() -> None:
    assert reason([RIGHT]) is None
    assert reason(["[]"], truth=[]) is None


@pytest.mark.parametrize(
    ("answers", "cut", "says", "remedy"),
    [
        (['[{"bbox_2d": [1, 2, 3'] * 2, True, "2 of 2 answers were cut off", "max_new_tokens"),
        (["I see a cat."] * 2, False, "I see a cat.", "sft first"),
        ([""] * 2, False, "empty", "sft first"),
        (["[]"] * 3, False, "hold no object", "prompt"),
        ([objects(("Katze", [100, 100, 300, 300]))] * 2, False, "'Katze' for 'cat' (2)", "classes"),
        ([objects(("cat", [0, 0, 999, 999]))] * 2, False, "2 of 2 boxes are of the whole image", "prompt"),
        ([objects(("cat", [300, 300, 100, 100]))] * 2, False, "bbox_invalid", "task.coordinates"),
        ([objects(("cat", [800, 10, 900, 90]))] * 2, False, "no box overlaps", "order of their coordinates"),
    ],
)
def test_each_reason_is_told_with_what_to_do(answers: list[str], cut: bool, says: str, remedy: str) -> None:
    found = reason(answers, cut=cut)
    assert found is not None
    assert says in found[0]
    assert remedy in found[1]
    assert "\n" not in found[0]


def test_what_an_answer_writes_cannot_move_the_cursor() -> None:
    found = reason(["\x1b[2J\nno"])
    assert found is not None
    assert "\x1b" not in found[0]
