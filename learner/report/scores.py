"""F1@0.5 over scenes with bootstrap intervals, alone and paired, by the detection task's own metric and bootstrap.

In: scenes. Out: estimates with 95% intervals, scenes being what is resampled. The bootstrap's seed is fixed: the same
run gives the same page.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from learner.report.scenes import Scene, judge
from learner.tasks.detection.metrics import COLUMNS, CountTable, Interval, bootstrap_difference, bootstrap_interval

F1 = "f1@0.5"
_USED = tuple(COLUMNS.index(name) for name in ("tp@0.50", "predictions", "truth"))  # what F1@0.5 is made of


@dataclass(frozen=True, kw_only=True, slots=True)
class Estimate:
    """A value and its interval. `low` and `high` are None where there are no scenes to resample."""

    value: float
    low: float | None = None
    high: float | None = None
    num_scenes: int = 0


def f1_estimate(scenes: Sequence[Scene]) -> Estimate:
    """Micro-averaged F1@0.5 of a set of scenes. Raises DataError where it is empty."""
    return _estimate(bootstrap_interval(_counts(scenes), F1), len(scenes))


def f1_gain(before: Sequence[Scene], after: Sequence[Scene]) -> Estimate | None:
    """F1@0.5 of `after` minus that of `before` over the scenes in both, resampled together; None if there is none."""
    earlier = {scene.scene_id: scene for scene in before}
    common = [scene for scene in after if scene.scene_id in earlier]
    if not common:
        return None
    matching = [earlier[scene.scene_id] for scene in common]
    return _estimate(bootstrap_difference(_counts(matching), _counts(common), F1), len(common))


def _counts(scenes: Sequence[Scene]) -> CountTable:
    values = np.zeros((len(scenes), len(COLUMNS)))
    for row, scene in zip(values, scenes, strict=True):
        row[list(_USED)] = len(judge(scene).found), len(scene.predictions), len(scene.truth)
    return CountTable(sample_ids=tuple(scene.scene_id for scene in scenes), values=values)


def _estimate(interval: Interval, num_scenes: int) -> Estimate:
    return Estimate(value=interval.estimate, low=interval.low, high=interval.high, num_scenes=num_scenes)
