"""The part of an answer that is kept as the prefix of Y_train (`loss.prefix_end`), and the place where an answer should
have ended.

    last_object   up to its last complete object: the default Y_train
    last_match    up to its last prediction that matched. Unmatched predictions after it are replaced by the missed
                  objects or the end
    first_miss    up to the last place where it had found exactly the first objects in canonical order. From there the
                  ground truth continues, as in plain teacher forcing, but after the model's own words

The prefix is the rollout's own token ids in each case, and every object that it did not find is appended. If labels
are incomplete, `first_miss` cuts off objects that nobody labelled, and continuing without them teaches the model to
leave them out. With `loss.keep_unmatched` they stay in their places, without loss.

`overrun_label` (`loss.overrun_close_weight`) is for answers that continue after they have found every object. The loss
on Y_train does not teach them to stop: predictions that match nothing have weight 0, and the closer is taught after
them, where the answer did end. So such answers stay as they are, and become more frequent. The ground truth gives one
certain label: the token that would have closed the answer at the place where it should have ended.

In: an `Assignment`. Out: the `Assignment` of the shorter answer, and what was cut off; or that position and that token.
Pure.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from learner.extensions import Tokenizer
from learner.records import Assignment, DetectionObject, ParsedRollout, PredictedObject
from learner.tasks.task import ObjectTask
from learner.tasks.tokens import pieces_of


def up_to_last_match(assignment: Assignment, task: ObjectTask) -> Assignment:
    """Cut what follows the last matched prediction, malformed objects included."""
    return _cut(assignment, max((index for index, *_ in assignment.pairs), default=-1), task)


def up_to_first_miss(assignment: Assignment, task: ObjectTask) -> Assignment:
    """Cut after the last matched prediction at which no object was skipped: those found until then are the first ones.

    Predictions that match nothing may stand between them.
    """
    last, furthest = -1, -1
    for count, (index, truth_index, _) in enumerate(sorted(assignment.pairs), start=1):
        furthest = max(furthest, truth_index)
        if furthest < count:
            last = index
    return _cut(assignment, last, task)


def unmatched_behind(whole: Assignment, cut: Assignment, task: ObjectTask) -> list[DetectionObject]:
    """Return the unmatched predictions of `whole` after the objects of `cut`. They may be objects without a label.

    Left out are repeated predictions of a labelled object, and predictions that cannot be written as they were. Of an
    answer that did not close, only those before its last match count: the rest means nothing.
    """
    first = len(cut.parsed.objects)
    return [whole.parsed.objects[i].object for i in without_label(whole, task) if i >= first]


def without_label(assignment: Assignment, task: ObjectTask) -> list[int]:
    """Indices of the unmatched predictions that `loss.keep_unmatched` takes for objects without a label."""
    parsed = assignment.parsed
    end = len(parsed.objects) if parsed.closed else max((index for index, *_ in assignment.pairs), default=0)
    found = {i: parsed.objects[i].object for i in assignment.spurious if i < end}
    left = set(apart(list(found.values()), parsed.rollout.sample.objects, parsed, task))
    return [i for i, obj in found.items() if obj in left and task.can_be_taught(obj)]


def overlaps(
    objects: Sequence[DetectionObject], others: Sequence[DetectionObject], parsed: ParsedRollout, task: ObjectTask
) -> Assignment:
    """Match `objects` to `others`, as predictions to ground truth. `parsed`: any answer, for its other fields."""
    sample = replace(parsed.rollout.sample, objects=tuple(others))
    predicted = tuple([PredictedObject(obj, range(0)) for obj in objects])
    return task.match(replace(parsed, objects=predicted, rollout=replace(parsed.rollout, sample=sample)))


def apart(
    objects: Sequence[DetectionObject], others: Sequence[DetectionObject], parsed: ParsedRollout, task: ObjectTask
) -> list[DetectionObject]:
    """Those of `objects` that match none of `others`, nor would if there were more of them."""
    left = list(objects)
    while (again := overlaps(left, others, parsed, task)).pairs:
        left = [left[i] for i in again.spurious]
    return left


def up_to_object(parsed: ParsedRollout, index: int, task: ObjectTask) -> ParsedRollout:
    """Return the answer up to the end of its valid object `index` (-1: before the first object).

    It has more objects if that object's end is fused with a coordinate after it.
    """
    rollout = parsed.rollout
    length = int(parsed.slots.end[parsed.objects[index].slots[-1]]) if index >= 0 else 0
    while True:
        begun = task.parse(replace(rollout, response_token_ids=rollout.response_token_ids[:length]))
        if len(begun.objects) > index:
            return begun
        length += 1


def _cut(assignment: Assignment, last: int, task: ObjectTask) -> Assignment:
    """Return the assignment of the answer up to object `last`. It is unchanged if the object does not end at a token's
    end."""
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
    """Return (position in the prefix, token that closes the answer there).

    None if an object is missed, or if nothing follows the last object that was found: then the tail teaches the
    closer. None also if that object does not end at a token's end.
    """
    if assignment.missed:
        return None
    parsed = assignment.parsed
    last = max((index for index, *_ in assignment.pairs), default=-1)
    covered = up_to_object(parsed, last, task)
    if len(covered.objects) > last + 1:  # its end is fused with a coordinate
        return None
    closing = pieces_of(tokenizer).encode(task.serialize((), after=covered).text)
    own = parsed.rollout.response_token_ids[covered.prefix_length : parsed.prefix_length]
    for position, (token, wanted) in enumerate(zip(own, closing, strict=False), start=covered.prefix_length):
        if token != wanted:
            return position, wanted
    return None
