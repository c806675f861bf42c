"""The middle of the page: what one run measured while it trained, as small charts, and the same as tables."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable

from learner.records import StepResult, SyncReceipt
from learner.report.axes import Point, number
from learner.report.charts import Bar, Series, bar_chart, line_chart, stacked_chart
from learner.report.markup import Html, el
from learner.report.read import Run
from learner.report.stage2 import stage2_charts
from learner.report.tables import table
from learner.report.timeline import timeline

PHASES = (
    ("rollout", "rollout_s", "rollout"),
    ("learn", "learn_s", "learn"),
    ("sync", "sync_s", "sync"),
    ("wait", "wait_s", "before"),
    ("data", "data_s", "data"),
    ("target", "target_s", "target"),
    ("pack", "pack_s", "pack"),
)
MAX_ROWS = 400
SMALLEST_SHARE = 0.01  # of the step time


def training_section(run: Run, *, heading: str) -> Html | None:
    """All charts of a run. What it did not measure is named once below them."""
    if not run.steps and not run.syncs:
        return None
    charts = {
        "loss": _loss(run),
        "match rate": line_chart("Match rate", [_metric(run, "match rate", "match_rate", "after")], y_max=1.0),
        "FN appended": _objects(run),
        "drop reasons": _drops(run),
        "step time": _times(run),
        "gradient norm": line_chart("Gradient norm", [Series("norm", _gradient(run), "after")]),
        "tokens/s": line_chart("Tokens learned per second", [_metric(run, "tokens/s", "tokens_per_s", "after")]),
        "sync seconds": _sync_seconds(run),
        "canary gap": _canary(run),
        **stage2_charts(run),
    }
    absent = [name for name, chart in charts.items() if chart is None]
    return el(
        "section",
        el("h2", heading),
        el("div", *charts.values(), cls="charts"),
        timeline(run.timelines),
        el("p", f"Not in this run: {', '.join(absent)}.", cls="lead absent-note") if absent else None,
    )


def _metric(run: Run, name: str, key: str, tone: str) -> Series:
    return Series(name, [(float(s.global_step), s.metrics.get(key, math.nan)) for s in run.steps], tone)


def _loss(run: Run) -> Html | None:
    """One line per channel: their losses are over different tokens, so they do not continue each other."""

    def of(channel: str) -> list[Point]:
        return [(float(s.global_step), s.loss) for s in run.steps if s.channel == channel]

    rollouts, truth = of("B"), of("A")
    if rollouts and truth:
        return line_chart("Loss", [Series("channel B", rollouts, "after"), Series("channel A", truth, "other")])
    return line_chart("Loss", [Series("loss", rollouts or truth, "after")])


def _objects(run: Run) -> Html | None:
    series = [
        _metric(run, "missed, appended (FN)", "missed", "after"),
        _metric(run, "spurious (FP)", "spurious", "other"),
    ]
    return line_chart("Objects per step", series)


def _drops(run: Run) -> Html | None:
    total: Counter[str] = Counter()
    for step in run.steps:
        total.update({k.removeprefix("drop/"): v for k, v in step.metrics.items() if k.startswith("drop/") and v})
        total.update({k: v for k, v in (("(answer unusable)", step.metrics.get("unusable", 0.0)),) if v})
    if not total and any("matched" in step.metrics for step in run.steps):
        return el("figure", el("figcaption", el("b", "Objects dropped")), el("p", "None.", cls="lead"), cls="chart")
    bars = [Bar(name, value, "other") for name, value in total.items()]
    return bar_chart("Objects dropped, by reason", bars, value=f"{number(sum(total.values()))} in all")


def _times(run: Run) -> Html | None:
    """Phases stacked; those too small to be seen are part of `other`."""
    timed = [s for s in run.steps if "step_s" in s.metrics]
    whole = sum(s.metrics["step_s"] for s in timed)
    shown = [p for p in PHASES if sum(s.metrics.get(p[1], 0.0) for s in timed) >= SMALLEST_SHARE * whole]
    layers = [Series(name, [_seconds(s, key) for s in timed], tone) for name, key, tone in shown]
    named = [key for _, key, _ in shown]
    rest = [(float(s.global_step), s.metrics["step_s"] - sum(s.metrics.get(k, 0.0) for k in named)) for s in timed]
    layers.append(Series("other", [(x, max(0.0, y)) for x, y in rest], "rest"))
    return stacked_chart("Seconds per step", layers, unit=" s")


def _seconds(step: StepResult, key: str) -> Point:
    return float(step.global_step), step.metrics.get(key, 0.0)


def _gradient(run: Run) -> list[Point]:
    return [(float(s.global_step), s.grad_norm) for s in run.steps]


def _sync_points(run: Run, read: Callable[[SyncReceipt], float]) -> tuple[list[Point], str]:
    """Against `ver`; against a running number where a resumed run counted `ver` anew."""
    versions = [sync.ver for sync in run.syncs]
    rising = all(a < b for a, b in itertools.pairwise(versions))
    xs = versions if rising else list(range(1, len(versions) + 1))
    return [(float(x), read(sync)) for x, sync in zip(xs, run.syncs, strict=True)], "ver" if rising else "sync"


def _sync_seconds(run: Run) -> Html | None:
    points, label = _sync_points(run, lambda sync: sync.seconds)
    return line_chart(
        "Seconds per sync", [Series("sync", points, "sync")], x_label=label, unit=" s", dots=len(points) <= 45
    )


def _canary(run: Run) -> Html | None:
    mean, label = _sync_points(run, lambda sync: sync.canary_gap)
    most, _ = _sync_points(run, lambda sync: sync.canary_gap_max)
    series = [Series("mean", mean, "sync"), Series("greatest", most, "before")]
    return line_chart("Canary gap per sync, nats", series, x_label=label, dots=len(mean) <= 45)


def steps_table(run: Run) -> Html:
    """The charts' numbers; every n-th step of a long run, and always the last."""
    stride = -(-len(run.steps) // MAX_ROWS) or 1
    head = [
        "Step",
        "Ch.",
        "Loss",
        "Match",
        "FN",
        "FP",
        "Rollout s",
        "Learn s",
        "Sync s",
        "Step s",
        "Tokens/s",
        "Fill",
        "Grad",
        "LR",
    ]
    kept = [s for i, s in enumerate(reversed(run.steps)) if i % stride == 0][::-1]
    return table(head, [_step_row(step) for step in kept])


def _step_row(step: StepResult) -> list[str]:
    names = (
        "match_rate",
        "missed",
        "spurious",
        "rollout_s",
        "learn_s",
        "sync_s",
        "step_s",
        "tokens_per_s",
        "packing_fill",
    )
    values = [step.loss, *(step.metrics.get(name, math.nan) for name in names), step.grad_norm, step.learning_rate]
    return [str(step.global_step), step.channel, *map(number, values)]


def sync_table(run: Run) -> Html:
    """One row per weight sync."""
    head = ["Ver", "Mode", "Seconds", "Megabytes", "Tensors", "Canary gap", "Greatest gap"]
    return table(
        head,
        [
            [str(s.ver), s.mode, number(s.seconds), number(s.num_bytes / 1e6), str(s.num_tensors), number(s.canary_gap),
             number(s.canary_gap_max)]
            for s in run.syncs
        ],
    )  # fmt: skip
