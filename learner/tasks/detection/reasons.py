"""Explains a score near 0 in one line: a fault that most answers have, and the remedy.

In: matched answers to an evaluation's samples, and their metrics. Out: (what, remedy); None if the score is not near 0,
or if the samples have no objects. No side effects.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from learner.records import Assignment
from learner.tasks.detection.bins import bounding_box
from learner.tasks.detection.geometry import iou_matrix
from learner.tasks.detection.grammar import NUM_BINS

NEAR_ZERO = 0.02  # an F1@0.5 below this counts as near 0
_MOST = 0.5  # min fraction of the answers, or of the boxes, that a reason must explain
_WHOLE = 0.8  # a box with at least this fraction of its image's area counts as the whole image
_SHOWN = 160  # max characters that are shown of an answer


class Reason(NamedTuple):
    what: str
    remedy: str


def reason_of(
    assignments: Sequence[Assignment], metrics: Mapping[str, float], decode: Callable[[Sequence[int]], str]
) -> Reason | None:
    """Return why F1 is near 0: the first known reason that applies to the answers. None if F1 is not near 0, or if
    there are no objects. `decode` gives the text of token ids."""
    num_objects = sum(len(one.parsed.rollout.sample.objects) for one in assignments)
    if not num_objects or metrics.get("f1@0.5", 1.0) >= NEAR_ZERO:
        return None
    looks = (_cut_off, _not_read, _malformed, _nothing_found, _other_names, _whole_images)
    found = next((reason for look in looks if (reason := look(assignments, decode)) is not None), None)
    return found or Reason(
        "no box overlaps an object by half",
        "compare boxes and labels in the report's pictures: their unit, and the order of their coordinates",
    )


def _cut_off(answers: Sequence[Assignment], decode: Callable[[Sequence[int]], str]) -> Reason | None:
    cut = [one.parsed.rollout for one in answers if one.parsed.rollout.finish_reason == "length"]
    if len(cut) < _MOST * len(answers) or not cut:
        return None
    longest = max(len(rollout.response_token_ids) for rollout in cut)
    end = _shown(decode(cut[0].response_token_ids)[-_SHOWN:])
    return Reason(
        f"{len(cut)} of {len(answers)} answers were cut off at max_new_tokens ({longest}), one at: {end}",
        "raise custom.extra.rollout_matching.decoding.max_new_tokens (--max-new-tokens of commands), or train with "
        "trainer_variant: sft first if answers repeat themselves",
    )


def _not_read(answers: Sequence[Assignment], decode: Callable[[Sequence[int]], str]) -> Reason | None:
    unread = [one.parsed for one in answers if not one.parsed.usable]
    if len(unread) < _MOST * len(answers) or not unread:
        return None
    example = _shown(decode(unread[0].rollout.response_token_ids)[:_SHOWN])
    return Reason(
        f"{len(unread)} of {len(answers)} answers are not as task.container and task.coordinates want them, one is: "
        f"{example or 'empty'}",
        "set these keys to the form that the model answers in, ask for it in the prompt, or train with "
        "trainer_variant: sft first",
    )


def _malformed(answers: Sequence[Assignment], decode: Callable[[Sequence[int]], str]) -> Reason | None:
    drops: Counter[str] = Counter()
    for one in answers:
        drops.update({reason: int(number) for reason, number in one.parsed.drops.items()})
    kept = sum(len(one.parsed.objects) for one in answers)
    if not drops or kept >= drops.total():
        return None
    example = next(one.parsed.rollout for one in answers if one.parsed.drops)
    why, number = drops.most_common(1)[0]
    return Reason(
        f"{drops.total()} of {kept + drops.total()} objects in the answers are malformed, mostly {why} ({number}), one "
        f"answer is: {_shown(decode(example.response_token_ids)[:_SHOWN])}",
        "compare it with task.container and task.coordinates (0 to 999)",
    )


def _nothing_found(answers: Sequence[Assignment], decode: Callable[[Sequence[int]], str]) -> Reason | None:
    if any(one.parsed.objects for one in answers):
        return None
    return Reason(
        f"the answers to {len(answers)} photographs hold no object",
        "name the classes in the prompt, see that photographs are large enough for the model (model.max_pixels), or "
        "train with trainer_variant: sft first",
    )


def _other_names(answers: Sequence[Assignment], decode: Callable[[Sequence[int]], str]) -> Reason | None:
    """Return a reason if boxes lie on objects of other names."""
    pairs: Counter[tuple[str, str]] = Counter()
    for one in answers:
        truth, found = one.parsed.rollout.sample.objects, [predicted.object for predicted in one.parsed.objects]
        overlaps = iou_matrix(found, truth)
        for obj, row in zip(found, overlaps, strict=True):
            if len(row) and row.max() >= _MOST and truth[row.argmax()].desc != obj.desc:
                pairs[obj.desc, truth[row.argmax()].desc] += 1
    if not pairs or pairs.total() < 0.1 * sum(len(one.parsed.objects) for one in answers):
        return None
    shown = ", ".join(f"{mine!r} for {label!r} ({number})" for (mine, label), number in pairs.most_common(3))
    return Reason(
        f"{pairs.total()} boxes lie on an object of another name, such as {shown}"[:300],
        "name the labels' classes in the prompt, or write the labels as the model does",
    )


def _whole_images(answers: Sequence[Assignment], decode: Callable[[Sequence[int]], str]) -> Reason | None:
    boxes = [bounding_box(predicted.object) for one in answers for predicted in one.parsed.objects]
    whole = sum((x2 - x1) * (y2 - y1) >= _WHOLE * (NUM_BINS - 1) ** 2 for x1, y1, x2, y2 in boxes)
    if whole < _MOST * len(boxes):
        return None
    return Reason(
        f"{whole} of {len(boxes)} boxes are of the whole image",
        "look at the prompt (boxes have to be asked for), and at the unit of the labels; or train with sft first",
    )


def _shown(text: str) -> str:
    return " ".join("".join(c if c.isprintable() else " " for c in text).split())
