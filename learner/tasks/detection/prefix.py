"""Chooses the part of an answer that becomes the prefix of Y_train (`loss.prefix_end`). Also finds the position at
which an answer should have ended.

    last_object   up to the answer's last complete object: the default Y_train
    last_match    up to the last prediction that matched. Unmatched predictions after it are replaced by the missed
                  objects or the end
    first_miss    up to the last match at which the k labels matched so far are the first k labels in canonical order.
                  Then the ground truth continues, as in plain teacher forcing, but after text that the model wrote

The prefix is always the rollout's own token ids, and every missed object is appended. If labels are incomplete,
`first_miss` cuts off predicted objects that have no label, and the ground truth that follows teaches the model to leave
them out. With `loss.keep_unmatched` these objects stay in the answer, without loss.

`overrun_label` (`loss.overrun_close_weight`) is for answers that continue after they have found every object. The loss
on Y_train does not teach the model to stop there: unmatched predictions have weight 0, and the closing token is taught
only after them. So such answers become more frequent. One label is certain in any case: at the position where the
answer should have ended, the label is the token that closes the answer.

In: an `Assignment`. Out: the `Assignment` of the shorter answer, and the unmatched predictions that were cut off; or
the position where the answer should have ended, and its label. No side effects.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from learner.extensions import Tokenizer
from learner.records import Assignment, DetectionObject, ParsedRollout, PredictedObject
from learner.tasks.task import ObjectTask
from learner.tasks.tokens import pieces_of


def up_to_last_match(assignment: Assignment, task: ObjectTask) -> Assignment:
    """Cut off everything after the last matched prediction, malformed objects included."""
    return _cut(assignment, max((index for index, *_ in assignment.pairs), default=-1), task)


def up_to_first_miss(assignment: Assignment, task: ObjectTask) -> Assignment:
    """Cut after the last match at which the k labels matched so far are the first k labels in canonical order.

    Predictions that match nothing may be between the matched predictions.
    """
    last, furthest = -1, -1
    for count, (index, truth_index, _) in enumerate(sorted(assignment.pairs), start=1):
        furthest = max(furthest, truth_index)
        if furthest < count:
            last = index
    return _cut(assignment, last, task)


def unmatched_behind(whole: Assignment, cut: Assignment, task: ObjectTask) -> list[DetectionObject]:
    """Return the unmatched predictions of `whole` after the objects of `cut`. Such unmatched predictions may be objects
    without a label.

    Predictions that repeat a labelled object, or that cannot be written unchanged, are left out. If the answer is not
    closed, predictions after its last match are left out too.
    """
    first = len(cut.parsed.objects)
    return [whole.parsed.objects[i].object for i in without_label(whole, task) if i >= first]


def without_label(assignment: Assignment, task: ObjectTask) -> list[int]:
    """Return the indices of the unmatched predictions that `loss.keep_unmatched` treats as objects without a label."""
    parsed = assignment.parsed
    end = len(parsed.objects) if parsed.closed else max((index for index, *_ in assignment.pairs), default=0)
    found = {i: parsed.objects[i].object for i in assignment.spurious if i < end}
    left = set(apart(list(found.values()), parsed.rollout.sample.objects, parsed, task))
    return [i for i, obj in found.items() if obj in left and task.can_be_taught(obj)]


def overlaps(
    objects: Sequence[DetectionObject], others: Sequence[DetectionObject], parsed: ParsedRollout, task: ObjectTask
) -> Assignment:
    """Match `objects` to `others`, as predictions to ground truth. Other fields are copied from the answer `parsed`."""
    sample = replace(parsed.rollout.sample, objects=tuple(others))
    predicted = tuple([PredictedObject(obj, range(0)) for obj in objects])
    return task.match(replace(parsed, objects=predicted, rollout=replace(parsed.rollout, sample=sample)))


def apart(
    objects: Sequence[DetectionObject], others: Sequence[DetectionObject], parsed: ParsedRollout, task: ObjectTask
) -> list[DetectionObject]:
    """Return the `objects` that match none of `others`, even if each of `others` could be matched several times."""
    # A matching pairs each item of `others` at most once, so it is repeated until it finds no pair.
    left = list(objects)
    while (again := overlaps(left, others, parsed, task)).pairs:
        left = [left[i] for i in again.spurious]
    return left


def up_to_object(parsed: ParsedRollout, index: int, task: ObjectTask) -> ParsedRollout:
    """Return the answer up to the end of its valid object `index` (-1: before the first object).

    If a token holds both the object's end and coordinates of the next object, the result has more objects.
    """
    rollout = parsed.rollout
    length = int(parsed.slots.end[parsed.objects[index].slots[-1]]) if index >= 0 else 0
    # An object ends some tokens after its last coordinate (at least brackets), so tokens are added until the parser
    # reads the object.
    while True:
        begun = task.parse(replace(rollout, response_token_ids=rollout.response_token_ids[:length]))
        if len(begun.objects) > index:
            return begun
        length += 1


def _cut(assignment: Assignment, last: int, task: ObjectTask) -> Assignment:
    """Return the assignment of the answer up to object `last`. If that object does not end at the end of a token,
    return `assignment` unchanged."""
    begun = up_to_object(assignment.parsed, last, task)
    if len(begun.objects) > last + 1:
        return assignment
    pairs = tuple([pair for pair in assignment.pairs if pair[0] <= last])
    lost = [truth_index for index, truth_index, _ in assignment.pairs if index > last]
    return Assignment(
        parsed=begun,
        pairs=pairs,
        missed=tuple(sorted([*assignment.missed, *lost])),
        spurious=tuple([index for index in assignment.spurious if index < last]),
    )


def overrun_label(assignment: Assignment, task: ObjectTask, tokenizer: Tokenizer) -> tuple[int, int] | None:
    """Find the position at which an answer had found all objects, but did not end. Return (position in the prefix,
    token that would have begun to close the answer there).

    Return None if a labelled object was not found, or if the last matched object does not end at the end of a token.
    Return None also if nothing follows this object: then Y_train itself continues there with the closing tokens.
    """
    if assignment.missed:
        return None
    parsed = assignment.parsed
    last = max((index for index, *_ in assignment.pairs), default=-1)
    covered = up_to_object(parsed, last, task)
    if len(covered.objects) > last + 1:  # a token holds both the object's end and a coordinate of the next object
        return None
    closing = pieces_of(tokenizer).encode(task.serialize((), after=covered).text)
    own = parsed.rollout.response_token_ids[covered.prefix_length : parsed.prefix_length]
    for position, (token, wanted) in enumerate(zip(own, closing, strict=False), start=covered.prefix_length):
        if token != wanted:
            return position, wanted
    return None
