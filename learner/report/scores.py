"""Computes the outcome of each prediction, F1@0.5 with its interval, scores per class and per IoU, and runs' progress.

Predictions are judged as in an evaluation. A prediction is *correct* if the best one-to-one assignment pairs it with an
object, where a pair needs IoU >= 0.5 and the same description. A prediction is *ignored* if it is not correct and at
least half of it is in an ignore region of its class: it counts neither as right nor as wrong. A prediction has the
*wrong class* if it can be paired, at IoU >= 0.5, with an object that is not paired yet. All other predictions are
*false positives*.

F1 is computed from counts that are summed over scenes, as the detection task does. Intervals are 95% bootstrap
intervals: scenes are resampled with a fixed seed, so the same run gives the same page.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

import numpy as np

from learner.records import DetectionObject
from learner.report.records import EvalPoint, RunRecord, Scene
from learner.tasks.detection.match import Overlaps, assign
from learner.tasks.detection.metrics import (
    COLUMNS,
    THRESHOLDS,
    CountTable,
    Interval,
    bootstrap_difference,
    bootstrap_interval,
)

Outcome = Literal["correct", "ignored", "wrong_class", "false_positive"]
IOU_THRESHOLD = 0.5
F1 = "f1@0.5"
RUN_COLORS = ("after", "other", "target", "data")  # names of the colors of the first, second, ... run
_USED = tuple(
    COLUMNS.index(name) for name in ("tp@0.50", "predictions", "ignored@0.50", "truth")
)  # columns of the counts from which F1@0.5 is computed


@dataclass(frozen=True, kw_only=True, slots=True)
class SceneOutcome:
    """How the predictions of a scene are judged. The first three fields have one entry per prediction."""

    outcomes: tuple[Outcome, ...]
    ious: tuple[float, ...]  # the prediction's largest IoU with an object.
    # Index of the object that the prediction is paired with; None: ignored, or a false positive
    paired: tuple[int | None, ...]
    found: frozenset[int]  # indices of the objects that have a correct prediction
    num_truth: int  # number of labelled objects

    @property
    def num_judged(self) -> int:
        """The number of predictions that are not ignored."""
        return len(self.outcomes) - self.outcomes.count("ignored")

    @property
    def f1(self) -> float:
        """The F1 of this single scene; 1 if it has no objects and no predictions."""
        total = self.num_judged + self.num_truth
        return 2 * len(self.found) / total if total else 1.0


@lru_cache(maxsize=100_000)  # several sections of a page classify the same scene
def classify(scene: Scene) -> SceneOutcome:
    """Return the outcome of each prediction of a scene: correct, ignored, wrong class or false positive."""
    overlaps = Overlaps.of(scene.predictions, scene.truth, scene.ignored)
    iou, (pairs, ignored) = overlaps.iou, overlaps.match(IOU_THRESHOLD)
    correct = {p: t for p, t, _ in pairs}
    left = (iou >= IOU_THRESHOLD) & ~ignored[:, None]
    left[list(correct.keys()), :] = False
    left[:, list(correct.values())] = False
    confused = {p: t for p, t, _ in assign(iou, left)}
    outcomes: list[Outcome] = [
        "correct" if p in correct else "ignored" if ignored[p] else "wrong_class" if p in confused else "false_positive"
        for p in range(len(scene.predictions))
    ]
    return SceneOutcome(
        outcomes=tuple(outcomes),
        ious=tuple(iou.max(axis=1, initial=0.0).tolist()),
        paired=tuple(correct.get(p, confused.get(p)) for p in range(len(scene.predictions))),
        found=frozenset(correct.values()),
        num_truth=len(scene.truth),
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class DetectionCounts:
    """Counts over scenes, from which precision, recall and F1 are computed."""

    correct: int  # correct predictions
    predictions: int  # predictions that are not ignored
    truth: int  # labelled objects

    @property
    def precision(self) -> float:
        return self.correct / self.predictions if self.predictions else math.nan

    @property
    def recall(self) -> float:
        return self.correct / self.truth if self.truth else math.nan

    @property
    def f1(self) -> float:
        total = self.predictions + self.truth
        return 2 * self.correct / total if total else math.nan


def counts_by_class(scenes: Sequence[Scene]) -> dict[str, DetectionCounts]:
    """Return the counts at IoU 0.5 by class (description), the class with most objects first. The counts of all classes
    add up to the counts of all scenes."""
    truth = Counter(item.desc for scene in scenes for item in scene.truth)
    said = Counter(item.desc for scene in scenes for item, _ in _judged(scene))
    correct = Counter(scene.truth[t].desc for scene in scenes for t in classify(scene).found)
    names = sorted(truth.keys() | said.keys(), key=lambda name: (-truth[name], -said[name], name))
    return {name: DetectionCounts(correct=correct[name], predictions=said[name], truth=truth[name]) for name in names}


def counts_by_iou(scenes: Sequence[Scene]) -> dict[float, DetectionCounts]:
    """Return the counts at each IoU threshold of the evaluation. Predictions are paired with objects for each threshold
    separately.

    Precision and recall at these thresholds do not form a precision-recall curve over scores: all boxes of an answer
    count, with any score. The numbers show how well boxes fit.
    """
    correct, said = dict.fromkeys(THRESHOLDS, 0), dict.fromkeys(THRESHOLDS, 0)
    for scene in scenes:
        overlaps = Overlaps.of(scene.predictions, scene.truth, scene.ignored)
        for threshold in THRESHOLDS:
            found = overlaps.match(threshold)
            correct[threshold] += len(found.pairs)
            said[threshold] += found.num_judged
    truth = sum(len(scene.truth) for scene in scenes)
    return {t: DetectionCounts(correct=correct[t], predictions=said[t], truth=truth) for t in THRESHOLDS}


def confusion(scenes: Sequence[Scene]) -> Counter[tuple[str | None, str | None]]:
    """Return how often each pair (an object's name, the model's name for it) occurs, at IoU >= 0.5. (name, None) is a
    missed object, (None, name) a prediction without an object."""
    found: Counter[tuple[str | None, str | None]] = Counter()
    for scene in scenes:
        for item, t in _judged(scene):
            found[None if t is None else scene.truth[t].desc, item.desc] += 1
        paired = classify(scene).paired
        found.update((item.desc, None) for t, item in enumerate(scene.truth) if t not in paired)
    return found


def _judged(scene: Scene) -> Iterator[tuple[DetectionObject, int | None]]:
    """Yield each prediction that is not ignored, with the index of its paired object (None without a pair)."""
    result = classify(scene)
    for item, outcome, t in zip(scene.predictions, result.outcomes, result.paired, strict=True):
        if outcome != "ignored":
            yield item, t


@dataclass(frozen=True, kw_only=True, slots=True)
class F1Estimate:
    """An F1, or a difference of two F1, and its 95% interval. `low` and `high` are None, and `num_scenes` is 0, if
    there are no scenes to resample."""

    value: float
    low: float | None = None
    high: float | None = None
    num_scenes: int = 0


def f1_estimate(scenes: Sequence[Scene]) -> F1Estimate:
    """Return F1@0.5 over the scenes, with its interval. Raises DataError if there are none."""
    return _estimate(bootstrap_interval(_counts(scenes), F1), len(scenes))


def f1_gain(before: Sequence[Scene], after: Sequence[Scene]) -> F1Estimate | None:
    """Return F1@0.5 of `after` minus F1@0.5 of `before`, over the scenes that both have. For the interval, both use the
    same resampled scenes. None if `before` and `after` have no scene in common."""
    earlier = {scene.scene_id: scene for scene in before}
    common = [scene for scene in after if scene.scene_id in earlier]
    if not common:
        return None
    matching = [earlier[scene.scene_id] for scene in common]
    return _estimate(bootstrap_difference(_counts(matching), _counts(common), F1), len(common))


def _counts(scenes: Sequence[Scene]) -> CountTable:
    values = np.zeros((len(scenes), len(COLUMNS)))
    for row, scene in zip(values, scenes, strict=True):
        result = classify(scene)
        row[list(_USED)] = (
            len(result.found), len(result.outcomes), result.outcomes.count("ignored"), result.num_truth
        )  # fmt: skip
    return CountTable(sample_ids=tuple(scene.scene_id for scene in scenes), values=values)


def _estimate(interval: Interval, num_scenes: int) -> F1Estimate:
    return F1Estimate(value=interval.estimate, low=interval.low, high=interval.high, num_scenes=num_scenes)


@dataclass(frozen=True, kw_only=True, slots=True)
class Progress:
    """One run's first and last evaluation, and its F1 by step.

    Runs are compared on the scenes of the main run. If a run was evaluated on other scenes, its score of `data.test` is
    used instead, if that score is on the main run's scenes.
    """

    run: RunRecord
    color: str  # name of the run's color in charts
    before: EvalPoint | None  # the first evaluation
    after: EvalPoint | None  # the last evaluation; None: there is only one evaluation
    f1_before: F1Estimate | None
    f1_after: F1Estimate | None
    gain: F1Estimate | None  # F1@0.5 of `after` minus F1@0.5 of `before`, on the same scenes
    curve: tuple[tuple[EvalPoint, F1Estimate], ...]  # every evaluation with F1@0.5, by step.
    # True: `before` is the main run's first evaluation, because this run began from the same model and has no first
    # evaluation of its own.
    borrowed: bool


def progress_of(runs: Sequence[RunRecord]) -> tuple[Progress, ...]:
    """Return each run's progress, in order; the first run is the main one."""
    shared = runs[0].evals[0] if runs[0].evals and runs[0].evals[0].global_step == 0 else None
    return tuple(_progress(run, RUN_COLORS[i % len(RUN_COLORS)], runs[0], shared) for i, run in enumerate(runs))


def _progress(run: RunRecord, color: str, main: RunRecord, shared: EvalPoint | None) -> Progress:
    evals = run.evals
    # Scores on different scenes do not say which run is better. So if only this run's test has scenes in common with
    # the main run's evaluations, the score of its test set is compared.
    if run.test and _apart(run.evals, main.evals) and not _apart((run.test,), main.evals):
        evals = (run.test,)
    began_alike = run is not main and run.setting("model", "path") == main.setting("model", "path")
    borrowed = bool(shared and evals and evals[0].global_step > 0 and began_alike)
    points = (shared, *evals) if borrowed and shared else evals
    estimates = [f1_of(point) for point in points]
    before = points[0] if points else None
    after = points[-1] if len(points) > 1 else None
    return Progress(
        run=run,
        color=color,
        before=before,
        after=after,
        f1_before=estimates[0] if points else None,
        f1_after=estimates[-1] if after else None,
        gain=gain_between(before, after),
        curve=tuple((point, value) for point, value in zip(points, estimates, strict=True) if value),
        borrowed=borrowed,
    )


def _apart(points: Sequence[EvalPoint], others: Sequence[EvalPoint]) -> bool:
    """Return True if `points` and `others` both have scenes, but no scene in common."""
    mine, theirs = ({scene.scene_id for point in some for scene in point.scenes} for some in (points, others))
    return bool(mine and theirs) and not mine & theirs


def f1_of(point: EvalPoint) -> F1Estimate | None:
    """Return the evaluation's F1@0.5, with an interval if its scenes are known. None if the scenes and the metric are
    unknown."""
    if point.scenes:
        return f1_estimate(point.scenes)
    return F1Estimate(value=point.metrics[F1]) if F1 in point.metrics else None


def gain_between(before: EvalPoint | None, after: EvalPoint | None) -> F1Estimate | None:
    """Return the gain of F1@0.5 from one evaluation to another, over the scenes that both have. If scenes are not
    known, return the difference of the metrics, without an interval. None if an evaluation or its metric is missing, or
    if the two evaluations have different scenes."""
    if before is None or after is None or _apart((before,), (after,)):
        return None
    paired = f1_gain(before.scenes, after.scenes)
    if paired is not None:
        return paired
    value = after.metrics.get(F1, math.nan) - before.metrics.get(F1, math.nan)
    return F1Estimate(value=value) if math.isfinite(value) else None
