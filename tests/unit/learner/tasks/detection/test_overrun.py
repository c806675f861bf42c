"""The closer that an answer went past (`loss.overrun_close_weight`)."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from learner.config.sections.loss import LossConfig
from learner.records import Assignment, DetectionObject
from learner.tasks.detection.prefix import overrun_label
from learner.tasks.detection.target import build_target
from learner.tasks.detection.task import DetectionTask
from learner.tasks.supervision import IGNORED
from tests.unit.learner.tasks.detection.answers import CONTAINERS, COORDINATES
from tests.unit.learner.tasks.fakes import CuttingTokenizer, box, make_rollout, make_task

FOUND = [box("one", 1, 20, 300, 400), box("two", 30, 20, 310, 999)]
EXTRA = [box("three", 500, 20, 700, 400), box("four", 510, 30, 720, 980)]
MERGES = [b"]}", b"]}}", b"]}, ", b'"}', b'"}]', b'"}, ', b"}}", b"}, ", b"0]}, ", b", "]


def overran(
    task: DetectionTask, tokenizer: CuttingTokenizer, found: list[DetectionObject], extra: list[DetectionObject]
) -> Assignment:
    """Return an answer with all that is there, and then more."""
    ids = tokenizer.encode(task.serialize([*found, *extra], after=None).text)
    return Assignment(
        parsed=task.parse(make_rollout(ids, found)),
        pairs=tuple((i, i, 1.0) for i in range(len(found))),
        missed=(),
        spurious=tuple(range(len(found), len(found) + len(extra))),
    )


@pytest.mark.parametrize("container", CONTAINERS)
@pytest.mark.parametrize("coordinates", COORDINATES)
@pytest.mark.parametrize("num_found", [0, 1, 2])
@pytest.mark.parametrize("num_extra", [1, 2])
def test_the_closer_is_wanted_where_the_answer_went_on(
    container: str, coordinates: str, num_found: int, num_extra: int
) -> None:
    task, tokenizer = make_task(container, coordinates)
    assignment = overran(task, tokenizer, FOUND[:num_found], EXTRA[:num_extra])
    label = overrun_label(assignment, task, tokenizer)
    assert label is not None
    position, token = label
    ids = assignment.parsed.rollout.response_token_ids
    right = tokenizer.encode(task.serialize(FOUND[:num_found], after=None).text)
    assert (*ids[:position], token) == tuple(right[: position + 1])
    assert ids[position] != token


@given(st.sampled_from(CONTAINERS), st.sampled_from(COORDINATES), st.sets(st.sampled_from(MERGES)), st.integers(0, 2))
def test_with_fused_tokens_what_is_taught_closes_a_right_answer(
    container: str, coordinates: str, merges: set[bytes], num_found: int
) -> None:
    task, tokenizer = make_task(container, coordinates, merges)
    found = FOUND[:num_found]
    assignment = overran(task, tokenizer, found, EXTRA)
    label = overrun_label(assignment, task, tokenizer)
    if label is None:
        assert any(b"0" in merge for merge in merges), "only a coordinate fused with the end may hide it"
        return
    position, token = label
    begun = b"".join(tokenizer.piece(i) for i in (*assignment.parsed.rollout.response_token_ids[:position], token))
    whole = task.serialize(found, after=None).text.encode()
    assert whole.startswith(begun.rstrip())


@pytest.mark.parametrize("container", CONTAINERS)
def test_no_closer_is_taught_where_one_token_goes_on_to_the_next_object(container: str) -> None:
    """The answer has no place where it could have been closed."""
    task, _ = make_task(container, "digits")
    text = task.serialize([*FOUND, *EXTRA], after=None).text
    begin = text.index("999")
    fused = text[begin : text.index("400]", begin) + len('400], "label": "three"}')]
    task, tokenizer = make_task(container, "digits", [fused.encode()])
    assignment = overran(task, tokenizer, FOUND, EXTRA)
    assert len(assignment.parsed.objects) == len(FOUND) + len(EXTRA)
    assert overrun_label(assignment, task, tokenizer) is None


@pytest.mark.parametrize("num_extra", [0, 1])
def test_no_closer_is_taught_while_objects_are_missed_or_where_the_answer_ended(num_extra: int) -> None:
    task, tokenizer = make_task()
    assignment = overran(task, tokenizer, FOUND, EXTRA[:num_extra])
    if num_extra:
        missing = Assignment(parsed=assignment.parsed, pairs=assignment.pairs[:1], missed=(1,), spurious=(1, 2))
        assert overrun_label(missing, task, tokenizer) is None
    else:
        assert overrun_label(assignment, task, tokenizer) is None


@pytest.mark.parametrize("weight", [0.0, 0.5])
def test_the_target_has_one_more_label_of_that_weight(weight: float) -> None:
    """Weight 0, the default, is the loss on Y_train of the specification, unchanged."""
    task, tokenizer = make_task()
    assignment = overran(task, tokenizer, FOUND, EXTRA)
    plain = build_target(assignment, task, tokenizer)
    target = build_target(assignment, task, tokenizer, loss=LossConfig(overrun_close_weight=weight))
    changed = np.flatnonzero((plain.labels != target.labels) | (plain.loss_weights != target.loss_weights))
    label = overrun_label(assignment, task, tokenizer)
    assert label is not None
    if weight == 0.0:
        assert not changed.size
        return
    assert changed.tolist() == [label[0]]
    assert plain.labels[label[0]] == IGNORED
    assert (target.labels[label[0]], target.loss_weights[label[0]]) == (label[1], weight)
