"""What several answers to one prompt say together (`best_of.use: union`).

In: the assignments of a sample's rollouts, the best first. Out: Y_train of the best one, and how many boxes without a
label the rollouts agree on.

    found by the best rollout          as `target` teaches it: in the prefix, its coordinates corrected
    found by others only, or by none   appended with loss, as every object that the prefix lacks
    without a label, and agreed on     appended without loss, unless the prefix has it

Agreed means that at least half of the rollouts have the box, and at least two, by the task's own one-to-one matching.
Such a box is probably an object that nobody labelled. Without it the answer would be taught to close, or to go on to
the next object, as if it were not there. A box that one rollout alone has is noise, and is not kept. A rollout counts
once per box, however often it repeats it.

Y_train is never longer than the longest of the rollouts and the whole ground truth together, which `data.lengths`
checks before the run: boxes that would make it longer are left out, those with the fewest votes first. Pure.
"""

from __future__ import annotations

from collections.abc import Sequence

from learner.config.schema import LossConfig
from learner.extensions import UnionTarget
from learner.records import Assignment, DetectionObject
from learner.target.prefix import apart, overlaps, unlabelled
from learner.target.target import build_target, ground_truth_target
from learner.tasks.task import ObjectTask, Tokenizer


def union_target(
    assignments: Sequence[Assignment], task: ObjectTask, tokenizer: Tokenizer, loss: LossConfig
) -> UnionTarget:
    """See above. `assignments`: at least one. Raises LossError as `build_target` does."""
    best, kept = assignments[0], agreed(assignments, task)
    number = len(kept)
    target = build_target(best, task, tokenizer, loss=loss, besides=kept)
    longest = max(len(one.parsed.token_ids) for one in assignments)
    if kept and len(target.token_ids) > longest:
        longest += len(ground_truth_target(best.parsed.rollout.sample, task, tokenizer).token_ids)
        while kept and len(target.token_ids) > longest:
            kept = kept[:-1]
            target = build_target(best, task, tokenizer, loss=loss, besides=kept)
    return UnionTarget(target, number)


def agreed(assignments: Sequence[Assignment], task: ObjectTask) -> list[DetectionObject]:
    """Boxes without a label that at least half of the answers have, and at least two; those with most votes first, each
    as the first answer that has it wrote it."""
    parsed = assignments[0].parsed
    found: list[DetectionObject] = []
    votes: list[int] = []
    for assignment in assignments:
        own = unlabelled(assignment, task)
        for _, place, _ in overlaps(own, found, parsed, task).pairs:
            votes[place] += 1
        for obj in apart(own, found, parsed, task):
            if apart([obj], found, parsed, task):  # it may repeat one of the same answer
                found.append(obj)
                votes.append(1)
    fewest = max(2, len(assignments) / 2)
    order = sorted((place for place, count in enumerate(votes) if count >= fewest), key=lambda place: -votes[place])
    return [found[place] for place in order]
