"""Where an answer goes on although it finds nothing more, and what it should have done there.

The loss on Y_train has nothing to say against a prediction that matches nothing: its tokens have weight 0, and the
closer is taught behind it, where the answer did end. So answers that over-run stay as they are, and more of them come.
Two cures, both of the configuration's choice. `overrun_label`: where every object was found, the one token at which
the answer should have closed is a label that the ground truth gives for certain (`loss.overrun_close_weight`).
`without_unmatched_end`: the answer is cut after its last prediction that matched, so that Y_train says there what is
right: the missed objects, or the end (`loss.cut_unmatched_end`).

In: an `Assignment`. Out: that label's position and token; that shorter `Assignment`. Pure. Called by `target.py`.
"""

from __future__ import annotations

from dataclasses import replace

from learner.records import Assignment, ParsedRollout
from learner.tasks.pieces import pieces_of
from learner.tasks.task import Task, Tokenizer


def overrun_label(assignment: Assignment, task: Task, tokenizer: Tokenizer) -> tuple[int, int] | None:
    """(position in the prefix, token that closes the answer there).

    None where an object is missed, or where nothing follows the last object that was found: the tail teaches the
    closer then. None, too, where that object's end is no token's end.
    """
    if assignment.missed:
        return None
    parsed = assignment.parsed
    last = max((index for index, *_ in assignment.pairs), default=-1)
    covered = _up_to_object(parsed, last, task)
    if len(covered.objects) > last + 1:  # its end is fused with a coordinate, and the next place to close is further on
        return None
    closing = pieces_of(tokenizer).encode(task.serialize((), after=covered).text)
    own = parsed.rollout.response_token_ids[covered.prefix_length : parsed.prefix_length]
    for position, (token, wanted) in enumerate(zip(own, closing, strict=False), start=covered.prefix_length):
        if token != wanted:
            return position, wanted
    return None


def without_unmatched_end(assignment: Assignment, task: Task) -> Assignment:
    """The assignment without what follows its last matched prediction, malformed objects included.

    As it is where nothing follows, and where that prediction's end is fused with a coordinate behind it.
    """
    last = max((index for index, *_ in assignment.pairs), default=-1)
    begun = _up_to_object(assignment.parsed, last, task)
    if len(begun.objects) > last + 1:
        return assignment
    return replace(assignment, parsed=begun, spurious=tuple([index for index in assignment.spurious if index < last]))


def _up_to_object(parsed: ParsedRollout, index: int, task: Task) -> ParsedRollout:
    """The answer as it stood when its valid object `index` had just been closed (-1: before the first)."""
    rollout = parsed.rollout
    length = int(parsed.slots.end[parsed.objects[index].slots[-1]]) if index >= 0 else 0
    while True:
        begun = task.parse(replace(rollout, response_token_ids=rollout.response_token_ids[:length]))
        if len(begun.objects) > index:
            return begun
        length += 1
