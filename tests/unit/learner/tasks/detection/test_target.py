"""Y_train, its labels and weights (SPEC.md "Loss on Y_train")."""

from __future__ import annotations

import dataclasses
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from learner.records import Assignment, DetectionObject, EncodedPrompt, Target
from learner.tasks.detection.target import build_target, ground_truth_target
from learner.tasks.detection.task import DetectionTask
from learner.tasks.supervision import IGNORED, build_segment, check_supervision
from shared.errors import LossError
from tests.examples import examples
from tests.unit.learner.tasks.detection.answers import (
    CONTAINERS,
    COORDINATES,
    OBJECTS,
    answers,
    bboxes,
    corrupted,
    cuts,
)
from tests.unit.learner.tasks.fakes import CuttingTokenizer, box, make_rollout, make_sample, make_task, poly

PROMPT = EncodedPrompt(token_ids=(5, 6, 7), vision=None)


def pair_up(task: DetectionTask, ids: list[int], truth: list[DetectionObject]) -> Assignment:
    """Pair every prediction with the ground truth of its place, whatever their IoU: labels are what is tested here."""
    parsed = task.parse(make_rollout(ids, truth))
    count = min(len(parsed.objects), len(truth))
    return Assignment(
        parsed=parsed,
        pairs=tuple((i, i, 1.0) for i in range(count)),
        missed=tuple(range(count, len(truth))),
        spurious=tuple(range(count, len(parsed.objects))),
    )


def supervised(target: Target, tokenizer: CuttingTokenizer) -> dict[int, str]:
    """Return the text of the label by position, over the prefix and the token after it."""
    return {
        int(at): tokenizer.piece(int(target.labels[at])).decode()
        for at in np.flatnonzero(target.labels[: target.prefix_length + 1] != IGNORED)
    }


def check_invariants(target: Target, assignment: Assignment, task: DetectionTask, tokenizer: CuttingTokenizer) -> None:
    parsed = assignment.parsed
    assert target.prefix_length == parsed.prefix_length
    prefix = parsed.rollout.response_token_ids[: parsed.prefix_length]
    assert tuple(target.token_ids[: len(prefix)]) == prefix
    truth = parsed.rollout.sample.objects
    tail = task.serialize([truth[i] for i in assignment.missed], after=parsed)
    rest = target.token_ids[len(prefix) :].tolist()
    assert rest == [*tokenizer.encode(tail.text), tokenizer.eos_token_id]
    assert ((target.labels == IGNORED) == (target.loss_weights == 0)).all()
    # All of the tail but its first token, which a longer number may claim, is taught as it stands.
    assert (target.labels[len(prefix) + 1 :] == target.token_ids[len(prefix) + 1 :]).all()
    assert (target.loss_weights[len(prefix) :] == 1).all()
    slots = {
        t
        for p, _, _ in assignment.pairs
        for s in parsed.objects[p].slots
        for t in range(parsed.slots.start[s], parsed.slots.end[s] + 1)
    }
    assert set(np.flatnonzero(target.labels[: len(prefix)] != IGNORED)) <= slots


@st.composite
def cases(draw: st.DrawFn) -> tuple[DetectionTask, CuttingTokenizer, Assignment]:
    container, coordinates = draw(st.sampled_from(CONTAINERS)), draw(st.sampled_from(COORDINATES))
    task, tokenizer = make_task(container, coordinates, draw(st.sets(st.sampled_from(MERGES))))
    text = draw(answers(container, coordinates))
    text = draw(corrupted(text)) if draw(st.booleans()) else text
    data = text.encode()
    ids = draw(st.sampled_from([tokenizer.encode(text), tokenizer.split(data, draw(cuts(data)))]))
    return task, tokenizer, pair_up(task, ids, draw(st.lists(OBJECTS, max_size=5)))


MERGES = [b", ", b"]}", b"]}}", b"]}, ", b'"}', b" [", b"1", b"12", b"123", b"0, ", b"99", b"5]", b", 1", b'": [']


@settings(max_examples=examples(300), deadline=None)
@given(cases())
def test_prefix_is_the_rollouts_own_and_everything_missed_is_appended(
    case: tuple[DetectionTask, CuttingTokenizer, Assignment],
) -> None:
    task, tokenizer, assignment = case
    target = build_target(assignment, task, tokenizer)
    check_invariants(target, assignment, task, tokenizer)
    segment = build_segment(PROMPT, target, sample_id="s")
    assert len(segment) == 3 + len(target.token_ids)
    assert (segment.labels[:3] == IGNORED).all()
    assert segment.prompt_length == 3


def test_coordinate_tokens_are_taught_the_matched_truth_slot_by_slot() -> None:
    task, tokenizer = make_task()
    predicted, truth = [box("one", 1, 2, 30, 40), box("x", 5, 5, 6, 6)], [box("two", 1, 3, 30, 50)]
    ids = tokenizer.encode(task.serialize(predicted, after=None).text)
    target = build_target(pair_up(task, ids, truth), task, tokenizer)
    assert list(supervised(target, tokenizer).values())[:-1] == [f"<|coord_{v}|>" for v in truth[0].bins]
    assert list(target.labels[: target.prefix_length]).count(IGNORED) == target.prefix_length - 4


def spell_out(own: str, wanted: str) -> list[str]:
    """Spell the reference, one character a token: own digits as far as they agree, then the truth's first that
    differs."""
    labels = []
    for mine, theirs in zip(own + "$", wanted + "$", strict=False):
        if mine != theirs:
            return [*labels, "," if theirs == "$" else theirs]
        labels.append(mine)
    return labels[:-1]


@settings(max_examples=examples(200), deadline=None)
@given(bboxes(), bboxes())
def test_digits_are_taught_up_to_where_the_numbers_part(predicted: DetectionObject, truth: DetectionObject) -> None:
    """One character a token: equal digits count, the first different one is the truth's, the rest is masked."""
    task, tokenizer = make_task("array", "digits")
    text = task.serialize([predicted], after=None).text
    target = build_target(pair_up(task, tokenizer.encode(text), [truth]), task, tokenizer)
    wanted: dict[int, str] = {}
    at = text.index("[", 1) + 1
    for own, value in zip(predicted.bins, truth.bins, strict=True):
        labels = spell_out(str(own), str(value))
        wanted |= dict(enumerate(labels, start=at))
        at += len(str(own)) + 2
    last = wanted.get(at - 2 - len(str(predicted.bins[3])) + len(str(truth.bins[3])))
    if last == ",":  # the list ends there
        wanted[at - 2 - len(str(predicted.bins[3])) + len(str(truth.bins[3]))] = "]"
    found = supervised(target, tokenizer)
    del found[target.prefix_length]
    assert found == wanted


@settings(max_examples=examples(300), deadline=None)
@given(cases())
def test_taught_numbers_spell_the_truth_whatever_is_fused(
    case: tuple[DetectionTask, CuttingTokenizer, Assignment],
) -> None:
    """Over any tokenization: what a number's labels spell begins its place in the answer with the truth put in."""
    task, tokenizer, assignment = case
    target = build_target(assignment, task, tokenizer)
    parsed, truth = assignment.parsed, assignment.parsed.rollout.sample.objects
    columns = np.transpose(parsed.slots).tolist()
    claims = Counter(t for p in parsed.objects for s in p.slots for t in range(columns[s][0], columns[s][1] + 1))
    pieces = [tokenizer.piece(int(i)) for i in target.token_ids]
    for p, t, _ in assignment.pairs:
        predicted, wanted = parsed.objects[p], truth[t]
        alike = predicted.object.kind == wanted.kind and len(predicted.object.bins) == len(wanted.bins)
        for slot, value in zip(predicted.slots, wanted.bins, strict=alike):
            start, end, said, lead = columns[slot]
            at = range(start, end + 1)
            labels, own = target.labels[at].tolist(), target.token_ids[at].tolist()
            if any(claims[token] > 1 for token in at):
                continue  # shares a token with a number beside it
            if not alike:
                assert labels[:-1] == [IGNORED] * (len(at) - 1)
                continue
            parts = [
                i for i, (label, token) in enumerate(zip(labels, own, strict=True)) if label not in (IGNORED, token)
            ]
            if said == value:
                assert labels[:-1] == own[:-1]
                assert not parts
                continue
            (part,) = parts
            assert labels[:part] == own[:part]
            assert set(labels[part + 1 : -1]) <= {IGNORED}
            text = b"".join(pieces[start : end + 1])
            behind = text[lead + len(task.coordinate_text(said)) :]
            asked = text[:lead] + task.coordinate_text(value).encode() + behind
            assert asked.startswith(b"".join(map(tokenizer.piece, labels[: part + 1])))


@pytest.mark.parametrize(
    ("merges", "own", "truth", "labels"),
    [
        ([], "12", "13", {0: "1", 1: "3"}),
        ([], "123", "12", {0: "1", 1: "2", 2: "]"}),
        ([], "12", "123", {0: "1", 1: "2", 2: "3"}),
        ([b"12", b"123"], "12", "123", {0: "123"}),
        ([b"]}", b"]}}"], "123", "12", {0: "1", 1: "2", 2: "]}"}),
        ([b"]}", b"]}}"], "12", "12", {0: "1", 1: "2"}),
        ([b"2]}"], "12", "13", {0: "1", 1: "3"}),
    ],
)
def test_last_number_before_the_cut(merges: list[bytes], own: str, truth: str, labels: dict[int, str]) -> None:
    """The cut may fall right after the number; the tail's first token is then what the truth may part at."""
    task, tokenizer = make_task(coordinates="digits", merges=merges)
    head = tokenizer.encode('{"object_1": {"desc": "a", "bbox_2d": [1, 2, 900, ')
    ids = [*head, *tokenizer.encode(f"{own}]}}}}")]
    objects = [box("a", 1, 2, 900, int(truth)), box("b", 1, 2, 3, 4)]
    assignment = pair_up(task, ids, objects)
    target = build_target(assignment, task, tokenizer)
    found = {at - len(head): text for at, text in supervised(target, tokenizer).items() if at >= len(head)}
    if target.prefix_length - len(head) not in labels:
        found.pop(target.prefix_length - len(head))
    if assignment.pairs:
        assert found == labels
    else:
        assert merges == [b"2]}"]  # the closer holds a digit: the object is not kept
        assert target.prefix_length == 0


def test_token_that_two_numbers_share_is_the_first_ones() -> None:
    """`0, 2` ends 10 and begins 20: 15 parts there, so 20 has only what comes after it."""
    task, tokenizer = make_task("array", "digits", [b"[1", b"0, 2", b"5, 2"])
    ids = tokenizer.encode('[{"bbox_2d": [10, 20, 30, 40], "label": "a"}]')
    target = build_target(pair_up(task, ids, [box("a", 15, 20, 30, 40)]), task, tokenizer)
    found = list(supervised(target, tokenizer).values())[:-1]
    assert found == ["[1", "5, 2", "0", "3", "0", "4", "0"]


def test_a_number_within_another_ones_token_is_taught_nothing_of_its_own() -> None:
    """Nor what follows it, which is no number."""
    task, tokenizer = make_task("array", "digits", [b"30, 40"])
    ids = tokenizer.encode('[{"bbox_2d": [10, 20, 30, 40], "label": "a"}]')
    target = build_target(pair_up(task, ids, [box("a", 10, 20, 30, 40)]), task, tokenizer)
    assert list(supervised(target, tokenizer).values())[:-1] == ["1", "0", "2", "0", "30, 40"]


def test_pairs_without_corresponding_slots_are_not_supervised() -> None:
    task, tokenizer = make_task(coordinates="digits")
    ids = tokenizer.encode(task.serialize([box("a", 1, 2, 3, 4), poly("b", 1, 2, 3, 4, 5, 9)], after=None).text)
    truth = [poly("a", 1, 2, 3, 2, 3, 4), poly("b", 1, 2, 3, 4, 5, 9, 1, 9)]
    target = build_target(pair_up(task, ids, truth), task, tokenizer)
    assert (target.labels[: target.prefix_length] == IGNORED).all()


@pytest.mark.parametrize("weight", [0.0, 0.25, 1.0])
def test_description_text_has_its_own_weight(weight: float) -> None:
    task, tokenizer = make_task(merges=[b'"sev', b"en", b'", '])
    target = ground_truth_target(make_sample([box("seven猫", 1, 2, 3, 4)]), task, tokenizer, desc_weight=weight)
    spelled = [tokenizer.piece(int(i)) for i in target.token_ids]
    desc = {i for i, piece in enumerate(spelled) if piece in (b'"sev', b"en") or piece[0] >= 0x80}
    assert len(desc) == 2 + 3  # a fused quote counts as description; the last character is torn into three bytes
    assert {i for i, w in enumerate(target.loss_weights) if w != 1} == (desc if weight != 1 else set())
    assert all(target.loss_weights[i] == np.float32(weight) for i in desc)
    assert ((target.labels == IGNORED) == (target.loss_weights == 0)).all()


@pytest.mark.parametrize("container", CONTAINERS)
def test_plain_teacher_forcing_is_the_whole_answer(container: str) -> None:
    """R01 `sft`, R35 Channel-A: no rollout, canonical order, EOS."""
    task, tokenizer = make_task(container)
    sample = make_sample([box("one", 1, 2, 3, 4), box("two", 5, 6, 7, 8)])
    target = ground_truth_target(sample, task, tokenizer)
    assert target.token_ids[-1] == target.labels[-1] == tokenizer.eos_token_id
    assert (target.labels == target.token_ids).all()
    assert [p.object for p in task.parse(make_rollout(target.token_ids[:-1].tolist())).objects] == list(sample.objects)


def test_unusable_rollout_gets_all_ground_truth() -> None:
    task, tokenizer = make_task()
    truth = [box("one", 1, 2, 3, 4), box("two", 5, 6, 7, 8)]
    assignment = task.match(task.parse(make_rollout(tokenizer.encode("well..."), truth)))
    target = build_target(assignment, task, tokenizer)
    plain = ground_truth_target(make_sample(truth), task, tokenizer)
    assert target.token_ids.tolist() == plain.token_ids.tolist()
    assert target.labels.tolist() == plain.labels.tolist()


def test_supervision_outside_the_assistant_span_raises() -> None:
    task, tokenizer = make_task()
    target = ground_truth_target(make_sample(), task, tokenizer)
    segment = build_segment(PROMPT, target, sample_id="s7", ver=3, stats={"missed": 0.0})
    assert (segment.ver, segment.stats["missed"]) == (3, 0.0)
    for changes in ({"labels": 4}, {"loss_weights": 1.0}):
        broken = {name: getattr(segment, name).copy() for name in changes}
        for name, value in changes.items():
            broken[name][1] = value
        with pytest.raises(LossError, match="s7"):
            check_supervision(dataclasses.replace(segment, **broken))
    with pytest.raises(LossError, match="s7"):
        build_segment(EncodedPrompt(token_ids=(), vision=None), target, sample_id="s7")


def test_matched_slot_behind_the_prefix_raises() -> None:
    task, tokenizer = make_task()
    ids = tokenizer.encode(task.serialize([box("one", 1, 2, 3, 4)], after=None).text)
    assignment = pair_up(task, ids, [box("one", 1, 2, 3, 4)])
    short = dataclasses.replace(assignment, parsed=dataclasses.replace(assignment.parsed, prefix_length=3))
    with pytest.raises(LossError, match="prefix"):
        build_target(short, task, tokenizer)
