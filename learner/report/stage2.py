"""Charts of `stage2_ab_training`: how many steps ran on rollouts, and what running ahead of them costs (R25 R27)."""

from __future__ import annotations

import math

from learner.report.charts import Series, line_chart
from learner.report.markup import Html
from learner.report.read import Run

ASYNC = "stage2_ab/async/"


def stage2_charts(run: Run) -> dict[str, Html | None]:
    """By name; none for a run of another kind, and those of the asynchronous actor-learner only where it ran."""
    if not any("stage2_ab/executed_b_share" in step.metrics for step in run.steps):
        return {}
    charts = {
        "share of Channel-B": line_chart(
            "Share of steps that ran Channel-B",
            [_metric(run, "share", "stage2_ab/executed_b_share", "after")],
            y_max=1.0,
        ),
        "rollouts beside learning": line_chart(
            "Seconds of rollouts beside learning",
            [_metric(run, "rollouts", "stage2_ab/rollout_s", "rollout")],
            unit=" s",
        ),
    }
    if any(f"{ASYNC}queue_depth" in step.metrics for step in run.steps):
        charts |= {
            "queue": line_chart("Packs waiting, per rank", [_metric(run, "packs", f"{ASYNC}queue_depth", "after")]),
            "age": line_chart("Age of learned packs, versions", [_metric(run, "age", f"{ASYNC}age_versions", "after")]),
            "not learned": line_chart(
                "Packs dropped, and Channel-B steps without packs",
                [
                    _metric(run, "stale", f"{ASYNC}packs_dropped_stale", "other"),
                    _metric(run, "oldest", f"{ASYNC}packs_dropped_oldest", "before"),
                    _metric(run, "steps", f"{ASYNC}b_step_skipped_due_to_queue", "after"),
                ],
            ),
            "busy": line_chart("Share of the step spent learning", [_busy(run)], y_max=1.0),
        }
    return charts


def _metric(run: Run, name: str, key: str, tone: str) -> Series:
    return Series(name, [(float(s.global_step), s.metrics.get(key, math.nan)) for s in run.steps], tone)


def _busy(run: Run) -> Series:
    timed = [step for step in run.steps if step.metrics.get("step_s", 0.0) > 0]
    points = [(float(s.global_step), s.metrics.get("learn_s", math.nan) / s.metrics["step_s"]) for s in timed]
    return Series("learning", points, "learn")
