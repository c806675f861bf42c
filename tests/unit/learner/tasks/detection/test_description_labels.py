"""Labels of matched descriptions (`loss.matched_desc_weight`), and the other weights of the prefix."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from learner.config.sections.loss import LossConfig
from learner.records import Assignment, DetectionObject
from learner.tasks.detection.labels import description_labels
from learner.tasks.detection.target import build_target
from learner.tasks.detection.task import DetectionTask
from tests.examples import examples
from tests.unit.learner.tasks.detection.answers import CONTAINERS, COORDINATES
from tests.unit.learner.tasks.fakes import CuttingTokenizer, box, make_rollout, make_task

MERGES = [b'"sev', b"en", b'", ', b"seven", b"six", b"se", b'": "', b'": "s', b'"}', b'six"', b"]}, "]
DESCS = ["seven", "six", "sixteen", "s", "sevenfold", 'a"b', "猫", "猫犬"]


def paired(
    task: DetectionTask, tokenizer: CuttingTokenizer, own: list[str], truth: list[str]
) -> tuple[Assignment, list[int]]:
    """Return an answer whose boxes are right and whose names are `own`."""
    objects = [[box(name, 1, 2 + i, 30, 40 + i) for i, name in enumerate(names)] for names in (own, truth)]
    ids = tokenizer.encode(task.serialize(objects[0], after=None).text)
    pairs = tuple((i, i, 1.0) for i in range(len(own)))
    parsed = task.parse(make_rollout(ids, objects[1]))
    return Assignment(parsed=parsed, pairs=pairs[: len(parsed.objects)], missed=(), spurious=()), ids


@settings(max_examples=examples(300), deadline=None)
@given(
    st.sampled_from(CONTAINERS),
    st.sampled_from(COORDINATES),
    st.sets(st.sampled_from(MERGES)),
    st.lists(st.tuples(st.sampled_from(DESCS), st.sampled_from(DESCS)), min_size=1, max_size=3),
)
def test_labels_spell_the_true_name_in_its_place(
    container: str, coordinates: str, merges: set[bytes], names: list[tuple[str, str]]
) -> None:
    """Up to the token where the two names part, own text with the label put last begins the answer with the truth."""
    task, tokenizer = make_task(container, coordinates, merges)
    assignment, ids = paired(task, tokenizer, [own for own, _ in names], [true for _, true in names])
    labels = dict(description_labels(assignment, task.desc_text, tokenizer))
    pieces = [tokenizer.piece(i) for i in ids]
    starts = np.cumsum([0, *map(len, pieces)])
    data = b"".join(pieces)
    for predicted, (own, true) in zip(assignment.parsed.objects, names, strict=False):
        begin, end = predicted.desc_bytes[0] + 1, predicted.desc_bytes[1] - 1
        assert data[begin:end].decode() == task.desc_text(own)
        tokens = [i for i in labels if starts[i + 1] > begin and starts[i] <= end]
        parting = [i for i in tokens if labels[i] != ids[i]]
        if own == true:
            assert not parting
            continue
        assert len(parting) <= 1
        for i in parting:
            said = data[: starts[i]] + tokenizer.piece(labels[i])
            assert (data[:begin] + task.desc_text(true).encode() + data[end:]).startswith(said)


@pytest.mark.parametrize("container", CONTAINERS)
def test_a_wrong_name_in_the_right_place_is_taught_the_right_one(container: str) -> None:
    task, tokenizer = make_task(container, merges=[b"seven", b"six", b"one"])
    assignment, ids = paired(task, tokenizer, ["seven", "one", "six"], ["six", "one", "seven"])
    labels = dict(description_labels(assignment, task.desc_text, tokenizer))
    found = [(tokenizer.piece(ids[i]).decode(), tokenizer.piece(label).decode()) for i, label in labels.items()]
    assert found == [("seven", "six"), ("one", "one"), ("six", "seven")]


@pytest.mark.parametrize("weight", [0.0, 0.5])
def test_names_have_their_weight_and_nothing_else_changes(weight: float) -> None:
    task, tokenizer = make_task(merges=[b"seven", b"six"])
    assignment, ids = paired(task, tokenizer, ["seven", "six"], ["six", "six"])
    plain = build_target(assignment, task, tokenizer)
    target = build_target(assignment, task, tokenizer, loss=LossConfig(matched_desc_weight=weight))
    changed = np.flatnonzero((plain.labels != target.labels) | (plain.loss_weights != target.loss_weights))
    names = [i for i, token in enumerate(ids) if tokenizer.piece(token) in (b"seven", b"six")]
    assert changed.tolist() == (names if weight else [])
    assert (target.loss_weights[changed] == weight).all()
    assert {tokenizer.piece(int(label)) for label in target.labels[changed]} <= {b"six"}


def test_a_random_order_is_the_samples_own_and_loses_nothing() -> None:
    task, tokenizer = make_task()
    truth: list[DetectionObject] = [box(str(i), i, i, 500, 500) for i in range(8)]
    loss = LossConfig(missed_order="random")

    def appended(sample_id: str) -> list[str]:
        assignment = task.match(task.parse(make_rollout((), truth, sample_id=sample_id)))
        target = build_target(assignment, task, tokenizer, loss=loss)
        return [p.object.desc for p in task.parse(make_rollout(target.token_ids[:-1].tolist())).objects]

    assert appended("a") == appended("a")
    assert appended("a") != appended("b")
    assert sorted(appended("a")) == [o.desc for o in truth]
