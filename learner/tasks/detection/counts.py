"""What the metrics add up: one row of counts per sample, so that a bootstrap can resample scenes.

In: assignments. Out: a `CountTable`. Every metric is a ratio of column sums (micro average), so rows of several ranks
or runs can be put together. The matching made for training ignores descriptions and is not used here: each IoU
threshold has an assignment of its own, among pairs of the same description (`tp`) and among all (`tp_any`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import get_args

import numpy as np
from numpy.typing import NDArray

from learner.records import Assignment, DropReason, ParsedRollout
from learner.tasks.detection.geometry import iou_matrix
from learner.tasks.detection.match import assign

THRESHOLDS = tuple(t / 100 for t in range(50, 100, 5))  # IoU, 0.50 to 0.95
DUPLICATE_IOU = 0.9
DROP_REASONS: tuple[DropReason, ...] = get_args(DropReason)
COLUMNS = (
    "samples",
    "truth",  # ground-truth objects
    "predictions",  # valid ones
    *(f"tp@{t:.2f}" for t in THRESHOLDS),
    *(f"tp_any@{t:.2f}" for t in THRESHOLDS),  # descriptions ignored
    "iou_sum",  # over the true positives at 0.50
    "duplicates",  # predictions like an earlier one: same description, IoU >= DUPLICATE_IOU
    "parsed",  # answers that are one closed container without a dropped object
    "usable",  # answers whose container was opened
    "unclosed",  # answers whose container was not closed
    "length_stopped",  # answers that met the token limit
    *(f"drop/{reason}" for reason in DROP_REASONS),
)
_COLUMN = {name: i for i, name in enumerate(COLUMNS)}


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class CountTable:
    """Row i counts sample `sample_ids[i]`; columns are `COLUMNS`."""

    sample_ids: tuple[str, ...]
    values: NDArray[np.float64]  # [samples, len(COLUMNS)]

    def totals(self) -> dict[str, NDArray[np.float64]]:
        """Column sums by name, as arrays of shape []."""
        return columns_of(self.values.sum(axis=0))


def columns_of(values: NDArray[np.float64]) -> dict[str, NDArray[np.float64]]:
    """`values` [..., len(COLUMNS)] by column name, each [...]."""
    return {name: values[..., i] for name, i in _COLUMN.items()}


def count_objects(assignments: Sequence[Assignment]) -> CountTable:
    """The counts of each assignment, in order."""
    values = np.zeros((len(assignments), len(COLUMNS)))
    for row, assignment in zip(values, assignments, strict=True):
        _count_answer(row, assignment.parsed)
        _count_matches(row, assignment.parsed)
    ids = tuple(a.parsed.rollout.sample.sample_id for a in assignments)
    return CountTable(sample_ids=ids, values=values)


def _count_answer(row: NDArray[np.float64], parsed: ParsedRollout) -> None:
    row[_COLUMN["samples"]] = 1
    row[_COLUMN["truth"]] = len(parsed.rollout.sample.objects)
    row[_COLUMN["predictions"]] = len(parsed.objects)
    row[_COLUMN["parsed"]] = parsed.usable and parsed.closed and not parsed.truncated and not any(parsed.drops.values())
    row[_COLUMN["usable"]] = parsed.usable
    row[_COLUMN["unclosed"]] = parsed.truncated
    row[_COLUMN["length_stopped"]] = parsed.rollout.finish_reason == "length"
    for reason, count in parsed.drops.items():
        row[_COLUMN[f"drop/{reason}"]] = count


def _count_matches(row: NDArray[np.float64], parsed: ParsedRollout) -> None:
    predictions = [p.object for p in parsed.objects]
    truth = parsed.rollout.sample.objects
    descs = np.array([o.desc for o in predictions], dtype=object)
    iou = iou_matrix(predictions, truth)
    same_desc = descs[:, None] == np.array([o.desc for o in truth], dtype=object)[None, :]
    for threshold in THRESHOLDS:
        pairs = assign(iou, (iou >= threshold) & same_desc)
        row[_COLUMN[f"tp@{threshold:.2f}"]] = len(pairs)
        row[_COLUMN[f"tp_any@{threshold:.2f}"]] = len(assign(iou, iou >= threshold))
        if threshold == THRESHOLDS[0]:
            row[_COLUMN["iou_sum"]] = sum(pair_iou for _, _, pair_iou in pairs)
    alike = (iou_matrix(predictions, predictions) >= DUPLICATE_IOU) & (descs[:, None] == descs[None, :])
    row[_COLUMN["duplicates"]] = np.count_nonzero(np.tril(alike, k=-1).any(axis=1))
