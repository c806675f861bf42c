"""Where an answer goes on although it has found every object, and the token that would have closed it there.

The loss on Y_train has nothing to say against a prediction that matches nothing: its tokens have weight 0, and the
closer is taught behind it, where the answer did end. So answers that over-run stay as they are, and more of them come.
The one token at which such an answer should have closed is a label that the ground truth gives for certain.

In: an `Assignment`. Out: that position and that token. Pure. Called by `target.py` (`loss.overrun_close_weight`).
"""

from __future__ import annotations

from learner.prefix_end import up_to_object
from learner.records import Assignment
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
    covered = up_to_object(parsed, last, task)
    if len(covered.objects) > last + 1:  # its end is fused with a coordinate, and the next place to close is further on
        return None
    closing = pieces_of(tokenizer).encode(task.serialize((), after=covered).text)
    own = parsed.rollout.response_token_ids[covered.prefix_length : parsed.prefix_length]
    for position, (token, wanted) in enumerate(zip(own, closing, strict=False), start=covered.prefix_length):
        if token != wanted:
            return position, wanted
    return None
