"""Answers token by token: the text is whole, and each token's kind says what became of it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from learner.config.sections.loss import LossConfig
from learner.journal.answers import NAME, AnswersLog, answer
from learner.records import Assignment, DetectionObject, Target
from learner.steps.segments import RolloutSource
from learner.tasks.detection.prefix import without_label
from learner.tasks.rewards import Rewards
from learner.tasks.tokens import pieces_of
from tests.unit.learner.steps.test_segments import SAMPLES, TASK, TOKENIZER, Answers, segments, truth

GOOD = DetectionObject(desc="one", kind="bbox_2d", bins=(2, 50, 60, 700))  # close to the first of each sample
BAD = '"object_2": {"desc": "two", "bbox_2d": [<|coord_9|>, <|coord_9|>, <|coord_3|>, <|coord_4|>]}'


def noted(texts: Sequence[str], loss: LossConfig | None = None) -> list[tuple[Assignment, Target]]:
    found: list[tuple[Assignment, Target]] = []
    source = RolloutSource(
        Answers(texts),
        TASK,
        Rewards(tokenizer=TOKENIZER),
        loss=loss or LossConfig(),
        on_answer=lambda a, t: found.append((a, t)),
    )
    segments(source)
    return found


def told(texts: Sequence[str]) -> list[dict[str, Any]]:
    return [answer(assignment, target, pieces_of(TOKENIZER)) for assignment, target in noted(texts)]


def text_of(one: dict[str, Any], *kinds: str) -> str:
    return "".join(text for text, kind, _ in one["tokens"] if kind in kinds)


def test_every_token_has_the_kind_that_became_of_it() -> None:
    first = TASK.serialize([GOOD], after=None).text
    written = f'{first[:-1]}, {BAD}, "object_3": {{"desc": "thr'
    mixed, complete, silent = told([written, truth(SAMPLES[1]), "no idea"])
    assert text_of(mixed, "kept", "matched", "dropped", "cut") == written
    assert "object_2" in text_of(mixed, "dropped")
    assert "thr" in text_of(mixed, "dropped")
    reasons = [note for note, _ in groupby(note for _, kind, note in mixed["tokens"] if kind == "dropped")]
    assert reasons == ["bbox_invalid", "truncated"]
    taught = [(text, note) for text, kind, note in mixed["tokens"] if kind == "matched"]
    assert taught[0] == ("<|coord_2|>", "<|coord_0|>")
    assert taught[1] == ("<|coord_50|>", ""), "a coordinate that is right has no other label"
    assert [name in text_of(mixed, "appended") for name in ("one", "two", "three")] == [False, True, True]
    assert (mixed["pairs"], mixed["missed"], mixed["drops"]) == (
        [[0, 0, mixed["pairs"][0][2]]],
        [1, 2],
        {"bbox_invalid": 1, "truncated": 1},
    )
    assert text_of(complete, "kept", "matched", "appended") == truth(SAMPLES[1]) + TOKENIZER.eos_token
    assert text_of(silent, "cut") == "no idea"
    assert text_of(silent, "appended") == truth(SAMPLES[2]) + TOKENIZER.eos_token


def test_the_newest_are_written_whole_and_not_at_every_step(tmp_path: Path) -> None:
    log = AnswersLog(tmp_path, TOKENIZER, 2)
    log.write(1)
    assert not (tmp_path / NAME).exists()
    for assignment, target in noted([truth(one) for one in SAMPLES]):
        log.add(assignment, target)
    log.write(2)
    log.write(3)  # comes at once after the last
    found = json.loads((tmp_path / NAME).read_text())
    assert (found["global_step"], [one["id"] for one in found["answers"]]) == (2, ["s2", "s1"])


def test_finds_that_the_loss_keeps_are_named(tmp_path: Path) -> None:
    """`loss.keep_unmatched`: the second stands apart from every label; the third repeats a labelled object."""
    apart = DetectionObject(desc="nine", kind="bbox_2d", bins=(900, 900, 990, 990))
    written = TASK.serialize([GOOD, apart, GOOD], after=None).text
    loss = LossConfig(prefix_end="first_miss", keep_unmatched=True)
    (assignment, target), *_ = noted([written, "no idea", "no idea"], loss)
    log = AnswersLog(tmp_path, TOKENIZER, 1, kept=lambda one: without_label(one, TASK))
    log.add(assignment, target)
    log.write(1)
    (found,) = json.loads((tmp_path / NAME).read_text())["answers"]
    assert [p for p, *_ in found["pairs"]] == [0]
    assert found["kept"] == [1]
    assert "nine" in text_of(found, "unlearned"), "it is written again, without loss"
