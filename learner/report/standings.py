"""Where each run began and where it ended, in F1@0.5.

A run that was not evaluated before its first step, but started from the same model as the main run, takes the main
run's first evaluation as its own beginning; `borrowed` says so.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from learner.report.read import EvalPoint, Run
from learner.report.scores import F1, Estimate, f1_estimate, f1_gain

TONES = ("after", "other", "target", "data")


@dataclass(frozen=True, kw_only=True, slots=True)
class Standing:
    """One run's evaluations that matter. `after` is None while there is only one; `gain` is paired over scenes; `curve`
    is F1@0.5 at every evaluation that has it, by step."""

    run: Run
    tone: str
    before: EvalPoint | None
    after: EvalPoint | None
    f1_before: Estimate | None
    f1_after: Estimate | None
    gain: Estimate | None
    curve: tuple[tuple[EvalPoint, Estimate], ...]
    borrowed: bool


def standings(runs: Sequence[Run]) -> tuple[Standing, ...]:
    """One per run, in order; the first run is the main one."""
    shared = runs[0].evals[0] if runs[0].evals and runs[0].evals[0].global_step == 0 else None
    return tuple(_standing(run, TONES[i % len(TONES)], runs[0], shared) for i, run in enumerate(runs))


def _standing(run: Run, tone: str, main: Run, shared: EvalPoint | None) -> Standing:
    evals = run.evals
    began_alike = run is not main and run.setting("model", "path") == main.setting("model", "path")
    borrowed = bool(shared and evals and evals[0].global_step > 0 and began_alike)
    points = (shared, *evals) if borrowed and shared else evals
    estimates = [f1_of(point) for point in points]
    before = points[0] if points else None
    after = points[-1] if len(points) > 1 else None
    return Standing(
        run=run,
        tone=tone,
        before=before,
        after=after,
        f1_before=estimates[0] if points else None,
        f1_after=estimates[-1] if after else None,
        gain=gain_between(before, after),
        curve=tuple((point, value) for point, value in zip(points, estimates, strict=True) if value),
        borrowed=borrowed,
    )


def f1_of(point: EvalPoint) -> Estimate | None:
    """F1@0.5 with its interval; without one where only the metric was kept; None where neither was."""
    if point.scenes:
        return f1_estimate(point.scenes)
    return Estimate(value=point.metrics[F1]) if F1 in point.metrics else None


def gain_between(before: EvalPoint | None, after: EvalPoint | None) -> Estimate | None:
    """The paired gain; the difference of the metrics, without an interval, where scenes are missing."""
    if before is None or after is None:
        return None
    paired = f1_gain(before.scenes, after.scenes)
    if paired is not None:
        return paired
    value = after.metrics.get(F1, math.nan) - before.metrics.get(F1, math.nan)
    return Estimate(value=value) if math.isfinite(value) else None
