"""Matches predictions to ground truth one-to-one (Hungarian), by IoU alone.

A pair is allowed if its IoU is at least the threshold. Among all assignments of allowed pairs, one with the most pairs
is chosen, and among those the one with the largest total IoU. Descriptions do not matter.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import linear_sum_assignment

from learner.records import Assignment, ParsedRollout
from learner.tasks.detection.geometry import iou_matrix


def match_objects(parsed: ParsedRollout, iou_threshold: float) -> Assignment:
    """Match `parsed.objects` to the objects of the sample."""
    truth = parsed.rollout.sample.objects
    iou = iou_matrix([p.object for p in parsed.objects], truth)
    pairs = assign(iou, iou >= iou_threshold)
    predictions, truths = {p for p, _, _ in pairs}, {t for _, t, _ in pairs}
    return Assignment(
        parsed=parsed,
        pairs=tuple(pairs),
        missed=tuple([t for t in range(len(truth)) if t not in truths]),
        spurious=tuple([p for p in range(len(parsed.objects)) if p not in predictions]),
    )


def assign(iou: NDArray[np.float64], feasible: NDArray[np.bool_]) -> list[tuple[int, int, float]]:
    """Return the best one-to-one pairs (row, column, IoU) of a [P, G] matrix, sorted by row.

    The value of a feasible pair is its IoU plus a constant above the largest possible sum of IoUs, so one more pair
    always wins. Any other cell has value 0, as if row and column were unmatched. scipy's rectangular solver (Crouse
    2016) maximises the sum.
    """
    if not feasible.any():
        return []
    value = np.where(feasible, iou + (1 + min(iou.shape)), 0.0)
    rows, cols = linear_sum_assignment(value, maximize=True)
    chosen = feasible[rows, cols]
    rows, cols = rows[chosen], cols[chosen]
    return list(zip(rows.tolist(), cols.tolist(), iou[rows, cols].tolist(), strict=True))
