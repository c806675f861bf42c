"""How much of an answer is kept as the prefix of Y_train (`loss.prefix_end`).

    last_object   all of it up to its last complete object: Y_train as it is specified
    last_match    up to its last prediction that matched: what matches nothing behind it gives way to the missed objects
                  or the end
    first_miss    up to the last place where it had found exactly the first objects in canonical order: from there on
                  the ground truth goes on, as in plain teacher forcing, but behind the model's own words

The prefix is the rollout's own token ids, whichever it is; every object that it has not found is appended. Where
labels are incomplete, what `first_miss` cuts off holds objects that nobody labelled, and going on without them teaches
to leave them out: with `loss.keep_unmatched` they stay in their places, unlearned.

In: an `Assignment`. Out: the `Assignment` of the shorter answer, and what stood behind it. Pure. Called by `target.py`.

Where an answer goes on although it has found every object, and the token that would have closed it there.

The loss on Y_train has nothing to say against a prediction that matches nothing: its tokens have weight 0, and the
closer is taught behind it, where the answer did end. So answers that over-run stay as they are, and more of them come.
The one token at which such an answer should have closed is a label that the ground truth gives for certain.

In: an `Assignment`. Out: that position and that token. Pure. Called by `target.py` (`loss.overrun_close_weight`).
"""

from __future__ import annotations

from dataclasses import replace

from learner.records import Assignment, DetectionObject, ParsedRollout
from learner.tasks.task import Task, Tokenizer
from learner.tasks.tokens import pieces_of


def up_to_last_match(assignment: Assignment, task: Task) -> Assignment:
    """Without what follows the last matched prediction, malformed objects included."""
    return _cut(assignment, max((index for index, *_ in assignment.pairs), default=-1), task)


def up_to_first_miss(assignment: Assignment, task: Task) -> Assignment:
    """Up to the last matched prediction at which no object was skipped: those found until then are the first ones.

    Predictions that match nothing may stand between them.
    """
    last, furthest = -1, -1
    for count, (index, truth_index, _) in enumerate(sorted(assignment.pairs), start=1):
        furthest = max(furthest, truth_index)
        if furthest < count:
            last = index
    return _cut(assignment, last, task)


def unmatched_behind(whole: Assignment, cut: Assignment, task: Task) -> list[DetectionObject]:
    """What `whole` predicted behind the objects of `cut` and matches nothing: objects, perhaps, that have no label.

    Without second predictions of an object that has one, and without what could not be written as it was said. Of an
    answer that did not close, only those before its last match: what it ran on with says nothing.
    """
    parsed = whole.parsed
    end = len(parsed.objects) if parsed.closed else max((index for index, *_ in whole.pairs), default=0)
    left = [parsed.objects[i] for i in whole.spurious if len(cut.parsed.objects) <= i < end]
    while (again := task.match(replace(parsed, objects=tuple(left)))).pairs:
        left = [left[i] for i in again.spurious]
    return [predicted.object for predicted in left if task.can_be_taught(predicted.object)]


def up_to_object(parsed: ParsedRollout, index: int, task: Task) -> ParsedRollout:
    """The answer as it stood when its valid object `index` had just been closed (-1: before the first).

    It has more objects than that where the object's end is fused with a coordinate behind it.
    """
    rollout = parsed.rollout
    length = int(parsed.slots.end[parsed.objects[index].slots[-1]]) if index >= 0 else 0
    while True:
        begun = task.parse(replace(rollout, response_token_ids=rollout.response_token_ids[:length]))
        if len(begun.objects) > index:
            return begun
        length += 1


def _cut(assignment: Assignment, last: int, task: Task) -> Assignment:
    """The assignment of the answer up to object `last`; as it is where that object's end is no token's end."""
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


def overrun_label(assignment: Assignment, task: Task, tokenizer: Tokenizer) -> tuple[int, int] | None:
    """(position in the prefix, token that closes the answer there).

    None where an object is missed, or where nothing follows the last object that was found: the tail teaches the
    closer then. None, too, where that object's end is no token's end.
    """
    if assignment.missed:
        return None
    parsed = assignment.parsed
    last = max((index for index, *_ in assignment.pairs), default=-1)
    covered = up_to_object(parsed, last, task)
    if len(covered.objects) > last + 1:  # its end is fused with a coordinate, and the next place to close is further on
        return None
    closing = pieces_of(tokenizer).encode(task.serialize((), after=covered).text)
    own = parsed.rollout.response_token_ids[covered.prefix_length : parsed.prefix_length]
    for position, (token, wanted) in enumerate(zip(own, closing, strict=False), start=covered.prefix_length):
        if token != wanted:
            return position, wanted
    return None
