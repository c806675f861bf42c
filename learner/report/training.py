"""Makes the report's section on a run's training: small charts, and the timeline of one step.

In: a `RunRecord`. Out: `Chart` and `Table` records for `templates/page.html`. Every metric of a step or a sync is
shown: a metric for which no chart is defined here gets a chart with the metric's name as title. If the loss or the
gradient norm rises, a note explains what that means.

The timeline shows what every rank and every server did at what time (R25, R31, R32), in one typical step. The typical
step is the step of median length, among the steps with rollouts if there are any.

Steps whose loss or gradient norm leapt (spikes) are shown with the labels of the samples that were learned in them. The
most frequent cause is a wrong label, and the user can see it in the drawing.
"""

from __future__ import annotations

import itertools
import math
import re
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from learner.records import Activity, DetectionObject
from learner.report.charts import (
    Bar,
    Chart,
    Point,
    Series,
    Table,
    bar_chart,
    line_chart,
    number,
    parted,
    stacked_chart,
    ticks,
)
from learner.report.records import RunRecord, SpikePoint, SpikeSample, StepTimeline
from learner.report.scenes import Picture, image_roots, load_picture, shapes_of_labels

PHASE_COLORS = {"rollout": "rollout", "learn": "learn", "sync": "sync", "wait": "before", "out": "other"} | {
    name: name for name in ("data", "target", "pack", "labels", "eval")
}  # name of an activity -> name of its color; other activities have the color "rest"
SMALLEST_SHARE = 0.01  # a phase with less than this fraction of the step time is drawn as a part of `other`
MAX_CHARTS = 24  # max visible charts of metrics for which no chart is defined here; the others are shown on a click
STAGE2, AHEAD = "stage2_ab/", "stage2_ab/async/"
NamedLine = tuple[str, str, str]  # a line's name, the metric that it shows, its color

# SHOWN and STAGE2_SHOWN: metrics that get no chart of their own, because other charts show them. FOLDED: beginnings of
# the names of metrics whose charts are shown on a click only.
SHOWN = ("reward", "match_rate", "missed", "spurious", "unusable", "tokens_per_s")
STAGE2_SHOWN = (
    *(f"{STAGE2}{name}" for name in ("executed_b_share", "rollout_s")),
    *(f"{AHEAD}{name}" for name in ("queue_depth", "age_versions", "age_updates", "packs_dropped_stale")),
    *(f"{AHEAD}{name}" for name in ("packs_dropped_oldest", "b_step_skipped_due_to_queue")),
)
FOLDED = ("matched", "truncated", "underfilled", "rollout_tokens", "packing_fill", "rollout_buffer/", STAGE2)
TITLES = {  # chart titles by metric; other charts have the metric's name as title
    "learn_tflops": "TFLOP/s while learning",
    "gpu_peak_gib": "Most GPU memory in a step, GiB",
    "pause_s": "Server pause",
    "merge_gap": "Effect of merging (nats a token)",
}
SPIKING = {"loss": "loss", "gradient norm": "grad_norm"}  # name of a chart -> its metric, whose spikes are marked
SYNC_SHOWN = ("time", "ver", "seconds", "num_bytes", "num_tensors", "canary_gap", "canary_gap_max", "global_step")


@dataclass(frozen=True, kw_only=True, slots=True)
class Training:
    """The section on one run's training. `absent`: names of charts that are missing, because the run did not measure
    their metrics. `folded`: charts that are shown on a click. `flat`: table of metrics that never changed."""

    heading: str
    charts: Sequence[Chart]
    folded: Sequence[Chart]
    flat: Table | None
    spikes: Sequence[SpikingStep]
    timeline: TimelineDrawing | None
    absent: Sequence[str]


def training(run: RunRecord, *, heading: str, prefix: str = "") -> Training | None:
    """Return a run's section; None if the run recorded neither a step nor a sync. `prefix`: beginning of the section's
    ids in HTML."""
    if not run.steps and not run.syncs:
        return None
    charts, leapt = named_charts(run), largest(run)
    for name, metric in SPIKING.items():
        charts[name] = marked(charts[name], metric, leapt, prefix=prefix)
    others, lesser = _others(run)
    shown, flat = parted([*charts.values(), *others])
    folded, flat_lesser = parted(lesser)
    rows = [row for table in (flat, flat_lesser) if table for row in table.rows]
    return Training(
        heading=heading,
        charts=shown,
        folded=folded,
        flat=Table(["", "Value"], rows) if rows else None,
        spikes=spikes(run, leapt, prefix=prefix),
        timeline=timeline(run.timelines),
        absent=[name for name, chart in charts.items() if chart is None],
    )


def named_charts(run: RunRecord) -> dict[str, Chart | None]:
    """Return the charts that are defined here, by name. A chart is None if the run did not measure its metrics."""
    keeps = run.setting("loss", "keep_unmatched")  # true: a prediction without a match is not called a false positive
    missed = ("missed, appended (FN)", "missed", "after")
    spurious = ("without a match" if keeps else "spurious (FP)", "spurious", "other")
    mean, greatest = ("mean", "canary_gap", "sync"), ("greatest", "canary_gap_max", "before")
    return {
        "loss": _loss(run),
        "match rate": _lines(run, "Match rate", ("match rate", "match_rate", "after"), y_max=1.0),
        "FN appended": _lines(run, "Objects per step", missed, spurious),
        "drop reasons": _drops(run),
        "step time": _times(run),
        "gradient norm": _gradient_norm(run),
        "tokens/s": _lines(run, "Tokens learned per second", ("tokens/s", "tokens_per_s", "after")),
        "sync seconds": _sync_lines(run, "Seconds per sync", ("sync", "seconds", "sync"), unit=" s"),
        "canary gap": _sync_lines(run, "Canary gap per sync, nats", mean, greatest),
        **_stage2(run),
    }


def _points(run: RunRecord, key: str, channel: str = "AB") -> list[Point]:
    """Return each step's metric `key`, or its field of that name; NaN if it has neither."""
    steps = [step for step in run.steps if step.channel in channel]
    return [(float(step.global_step), step.metrics.get(key, getattr(step, key, math.nan))) for step in steps]


def _lines(run: RunRecord, title: str, *lines: NamedLine, unit: str = "", y_max: float | None = None) -> Chart | None:
    return line_chart(title, [Series(name, _points(run, key), c) for name, key, c in lines], unit=unit, y_max=y_max)


def _sync_lines(run: RunRecord, title: str, *lines: NamedLine, unit: str = "") -> Chart | None:
    """Return a chart of metrics of syncs over the weights' version `ver`. If `ver` did not always rise, the x axis has
    the syncs' numbers 1, 2, ... instead."""
    versions = [sync.receipt.ver for sync in run.syncs]
    # A resumed run continues from the version in its checkpoint, so versions may fall.
    rising = all(a < b for a, b in itertools.pairwise(versions))
    xs = versions if rising else range(1, len(versions) + 1)
    series = [
        Series(name, [(float(x), s.metrics.get(key, math.nan)) for x, s in zip(xs, run.syncs, strict=True)], color)
        for name, key, color in lines
    ]
    return line_chart(title, series, x_label="ver" if rising else "sync", unit=unit, dots=True)


def _others(run: RunRecord) -> tuple[list[Chart], list[Chart]]:
    """Return charts of the metrics for which no chart is defined here, as two lists: visible charts, and charts that
    are shown on a click."""
    found = {key for step in run.steps for key in step.metrics} - {*SHOWN, *STAGE2_SHOWN}
    is_phase = re.compile(r"\w+_s").fullmatch  # seconds of a phase, which the chart "Seconds per step" shows
    keys = sorted(key for key in found if not key.startswith("drop/") and not is_phase(key))
    sync_keys = sorted({key for sync in run.syncs for key in sync.metrics} - set(SYNC_SHOWN))
    folded = [key for key in keys if key.startswith(FOLDED)]
    charts = [
        _sync_lines(run, f"{_title(key)} per sync", (key, key, "sync"), unit=" s" if key.endswith("_s") else "")
        for key in sync_keys
    ]
    charts += [_lines(run, _title(key), (key, key, "after")) for key in keys if key not in folded]
    more = [_lines(run, key, (key, key, "after")) for key in folded]
    return [c for c in charts[:MAX_CHARTS] if c], [c for c in (*charts[MAX_CHARTS:], *more) if c]


def _title(key: str) -> str:
    return TITLES.get(key, key)


def _loss(run: RunRecord) -> Chart | None:
    """Return the chart of the loss. Channels A and B have a line each."""
    # Each channel has a line of its own, because the two channels learn different tokens.
    rollouts, truth = _points(run, "loss", "B"), _points(run, "loss", "A")
    if rollouts and truth:
        series = [Series("channel B", rollouts, "after"), Series("channel A", truth, "other")]
    else:
        series = [Series("loss", rollouts or truth, "after")]
    return line_chart("Loss", series, note=" ".join(filter(None, (_rollout_loss_note(run), _truth_loss_note(run)))))


def _gradient_norm(run: RunRecord) -> Chart | None:
    points = _points(run, "grad_norm")
    return line_chart("Gradient norm", [Series("norm", points, "after")], note=_gradient_note(run, points))


@dataclass(frozen=True, kw_only=True, slots=True)
class MeanChange:
    """The rise of a mean. `before`: the mean over an earlier quarter of the steps. `after`: the mean over the last
    quarter."""

    before: float
    after: float
    steps: tuple[int, int]  # first and last step of the earlier quarter

    def __str__(self) -> str:
        first, last = self.steps
        return f"from {number(self.before)} (mean of steps {first} to {last}) to {number(self.after)} (last quarter)"


def rise(points: Sequence[Point]) -> MeanChange | None:
    """Return the rise from the lowest earlier quarter of the points to the last quarter. None if it may be noise (less
    than a tenth, or than three standard errors), or if a quarter has fewer than five points."""
    finite = [(x, y) for x, y in points if math.isfinite(y)]
    size = len(finite) // 4
    if size < 5:
        return None
    *quarters, last = [finite[len(finite) - size * k :][:size] for k in (4, 3, 2, 1)]
    means = [statistics.fmean(y for _, y in quarter) for quarter in quarters]
    lowest = means.index(min(means))
    before, after = means[lowest], statistics.fmean(y for _, y in last)
    spread = sum(statistics.variance(y for _, y in quarter) for quarter in (quarters[lowest], last))
    if after - before < max(0.1 * abs(before), 3 * math.sqrt(spread / size)) or after <= before:
        return None
    return MeanChange(before=before, after=after, steps=(int(quarters[lowest][0][0]), int(quarters[lowest][-1][0])))


def _rollout_loss_note(run: RunRecord) -> str:
    rollouts = _points(run, "loss", "B")
    change = rise(rollouts)
    if change is None:
        return ""
    said = (
        f"The loss on rollouts rose {change}. This alone is no bad sign: which tokens are learned changes with the "
        "model's answers, so the mean is over other tokens than before."
    )
    match = _points(run, "match_rate", "B")
    if rise([(x, -y) for x, y in match]):
        return f"{said} But the match rate fell too, so the answers got worse: try a lower learning rate."
    if rise(match):
        return f"{said} The match rate rose meanwhile, so the answers got better."
    return f"{said} Judge by the match rate and by F1."


def _truth_loss_note(run: RunRecord) -> str:
    change = rise(_points(run, "loss", "A"))
    if change is None:
        return ""
    rate = max((s.learning_rate for s in run.steps if math.isfinite(s.learning_rate)), default=math.nan)
    said = f"The loss on ground truth rose {change}. Its labels do not depend on the model, so this is a bad sign"
    return f"{said}: most often the learning rate is too high (peak {number(rate)} here)."


def _gradient_note(run: RunRecord, points: Sequence[Point]) -> str:
    change = rise(points)
    if change is None:
        return ""
    said = f"The gradient norm rose {change}."
    limit = run.setting("training", "max_grad_norm")
    if isinstance(limit, int | float):
        late = [y for _, y in points[-(len(points) // 4) :]]
        clipped = sum(y > limit for y in late) / len(late)
        said += f" It is measured before clipping to {number(limit)}; {clipped:.0%} of the last quarter were clipped."
    tokens = rise([(x, -y) for x, y in _points(run, "num_supervised")])
    if tokens is not None:
        fewer = f"{number(-tokens.before)} to {number(-tokens.after)}"
        said += f" A step learns fewer tokens than before ({fewer}), and a mean over fewer tokens has more noise."
    if any(rise(_points(run, "loss", channel)) for channel in "AB"):
        return f"{said} If F1 falls as well, lower the learning rate."
    return f"{said} The loss does not rise with it, so this is no bad sign."


def _drops(run: RunRecord) -> Chart | None:
    total: Counter[str] = Counter()
    for step in run.steps:
        total.update({k.removeprefix("drop/"): v for k, v in step.metrics.items() if k.startswith("drop/") and v})
        if unusable := step.metrics.get("unusable"):
            total.update({"(answer unusable)": unusable})
    if not total and any("matched" in step.metrics for step in run.steps):
        return Chart(title="Objects dropped", text="None.")
    bars = [Bar(name, value, "other") for name, value in total.items()]
    return bar_chart("Objects dropped, by reason", bars, value=f"{number(sum(total.values()))} in all")


def _times(run: RunRecord) -> Chart | None:
    """Return the chart of the seconds per step, with the phases stacked. Phases that are too small to be seen are drawn
    as a part of `other`."""
    timed = [(float(s.global_step), s.metrics) for s in run.steps if "step_s" in s.metrics]
    whole = sum(m["step_s"] for _, m in timed)
    shown = [p for p in PHASE_COLORS if sum(m.get(f"{p}_s", 0.0) for _, m in timed) >= SMALLEST_SHARE * whole]
    layers = [Series(p, [(x, m.get(f"{p}_s", 0.0)) for x, m in timed], PHASE_COLORS[p]) for p in shown]
    rest = [(x, max(0.0, m["step_s"] - sum(m.get(f"{p}_s", 0.0) for p in shown))) for x, m in timed]
    return stacked_chart("Seconds per step", [*layers, Series("other", rest, "rest")], unit=" s")


def _stage2(run: RunRecord) -> dict[str, Chart | None]:
    """Return the charts of `stage2_ab_training` by name: the number of steps that learned rollouts, and the duration of
    rollouts made ahead of learning (R25 R27). {} for another trainer variant. If the asynchronous actor-learner ran,
    there are charts of its queue too."""
    measured = {key for step in run.steps for key in step.metrics}
    if f"{STAGE2}executed_b_share" not in measured:
        return {}
    share = ("share", f"{STAGE2}executed_b_share", "after")
    rollouts = ("rollouts", f"{STAGE2}rollout_s", "rollout")
    charts = {
        "share of Channel-B": _lines(run, "Share of steps that ran Channel-B", share, y_max=1.0),
        "rollouts beside learning": _lines(run, "Seconds of rollouts beside learning", rollouts, unit=" s"),
    }
    if f"{AHEAD}queue_depth" in measured:
        lost = (
            ("stale", f"{AHEAD}packs_dropped_stale", "other"),
            ("oldest", f"{AHEAD}packs_dropped_oldest", "before"),
            ("steps", f"{AHEAD}b_step_skipped_due_to_queue", "after"),
        )
        ages = ("versions", f"{AHEAD}age_versions", "after"), ("updates", f"{AHEAD}age_updates", "other")
        timed = [s for s in run.steps if s.metrics.get("step_s", 0.0) > 0]
        busy = [(float(s.global_step), s.metrics.get("learn_s", math.nan) / s.metrics["step_s"]) for s in timed]
        charts |= {
            "queue": _lines(run, "Packs waiting, per rank", ("packs", f"{AHEAD}queue_depth", "after")),
            "age": _lines(run, "Age of learned packs", *ages),
            "not learned": _lines(run, "Packs dropped, and Channel-B steps without packs", *lost),
            "busy": line_chart("Share of the step spent learning", [Series("learning", busy, "learn")], y_max=1.0),
        }
    return charts


# ---- spikes --------------------------------------------------------------------------------------------------------

MAX_SPIKES = 6  # max steps with a spike that are shown
NAMES = {"loss": "loss", "grad_norm": "gradient norm"}  # metric -> its name on the page


@dataclass(frozen=True, kw_only=True, slots=True)
class SpikeCard:
    """A sample of a step with a spike. `shapes`: its labels to draw, as (color, tooltip, object)."""

    sample: SpikeSample
    picture: Picture | None
    shapes: Sequence[tuple[str, str, DetectionObject]]


@dataclass(frozen=True, kw_only=True, slots=True)
class SpikingStep:
    """A step with a spike, as the page shows it. `ident`: HTML id of its part of the page."""

    ident: str
    heading: str
    cards: Sequence[SpikeCard]


def largest(run: RunRecord) -> dict[int, list[SpikePoint]]:
    """Return the spikes of at most MAX_SPIKES steps, by step: the spikes whose values are the largest multiples of the
    usual value."""
    by_step: dict[int, list[SpikePoint]] = {}
    for point in sorted(run.spikes, key=lambda point: -point.value / max(point.usual, 1e-12)):
        if len(by_step) < MAX_SPIKES or point.global_step in by_step:
            by_step.setdefault(point.global_step, []).append(point)
    return {step: by_step[step] for step in sorted(by_step)}


def spikes(run: RunRecord, found: Mapping[int, Sequence[SpikePoint]], *, prefix: str) -> list[SpikingStep]:
    """Return the steps of `found` as the page shows them. `prefix`: beginning of their ids in HTML."""
    roots = image_roots(run)
    return [
        SpikingStep(
            ident=f"{prefix}spike-{step}",
            heading=f"Step {step}: {'; '.join(map(_said, points))}",
            cards=[_card(sample, roots) for sample in points[0].samples],
        )
        for step, points in found.items()
    ]


def marked(chart: Chart | None, metric: str, found: Mapping[int, Sequence[SpikePoint]], *, prefix: str) -> Chart | None:
    """Return the chart with a mark at each spike of `metric` that is in `found`. A mark is a link to the step's
    samples."""
    if chart is None:
        return None
    points = [point for points in found.values() for point in points if point.metric == metric]
    return replace(
        chart,
        marks=[
            (float(p.global_step), f"step {p.global_step}: {_said(p)}", f"{prefix}spike-{p.global_step}")
            for p in points
        ],
    )


def _said(point: SpikePoint) -> str:
    return f"{NAMES.get(point.metric, point.metric)} {number(point.value)}, usually {number(point.usual)}"


def _card(sample: SpikeSample, roots: Sequence[Path]) -> SpikeCard:
    scene = sample.scene
    picture = load_picture(scene.images, roots, scene.sheet) if scene else None
    return SpikeCard(sample=sample, picture=picture, shapes=shapes_of_labels(scene) if scene else [])


# ---- timeline ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class TimelineDrawing:
    """The timeline of one step, ready to be drawn."""

    step: StepTimeline
    lanes: Sequence[str]  # names of the lanes, from top to bottom
    activities: Sequence[Activity]  # cut to the step's begin and end
    marks_s: Sequence[float]  # marks of the time axis, in seconds from the step's begin

    def color(self, name: str) -> str:
        return PHASE_COLORS.get(name, "rest")

    def legend(self) -> list[tuple[str, str]]:
        names = dict.fromkeys(a.name if a.name in PHASE_COLORS else "other" for a in self.activities)
        return [(name, self.color(name)) for name in names]


def timeline(steps: Sequence[StepTimeline]) -> TimelineDrawing | None:
    """Return the timeline of a typical step; None if no step can be drawn."""
    index = typical(steps)
    if index is None:
        return None
    step, found = steps[index], activities_of(steps, index)
    seconds = step.end_s - step.begin_s
    lanes = list(dict.fromkeys(a.lane for a in found))
    marks_s = [t for t in ticks(0.0, seconds, 8) if t <= seconds]
    return TimelineDrawing(step=step, lanes=lanes, activities=found, marks_s=marks_s)


def typical(steps: Sequence[StepTimeline]) -> int | None:
    """Return the index of a step of median length, among the steps with rollouts if there are any; None without steps.
    The first step is left out. Steps with an evaluation or a completion of labels are left out too. A rule that would
    leave no step is not applied."""
    usable = [i for i, step in enumerate(steps) if step.activities and step.end_s > step.begin_s]
    # The first step is left out, because the run warms up in it.
    usable = usable[1:] or usable
    usable = [i for i in usable if not any(a.name in ("eval", "labels") for a in steps[i].activities)] or usable
    rolled = [i for i in usable if any(a.name == "rollout" for a in steps[i].activities)]
    ordered = sorted(rolled or usable, key=lambda i: steps[i].end_s - steps[i].begin_s)
    return ordered[len(ordered) // 2] if ordered else None


def activities_of(steps: Sequence[StepTimeline], index: int) -> list[Activity]:
    """Return the activities that overlap with the step, cut to its begin and end. Activities that end after the step
    are recorded with a later step. Rank 0's syncs are added to the lane of every server."""
    begin_s, end_s = steps[index].begin_s, steps[index].end_s
    found = [a for later in steps[index:] for a in later.activities if a.begin_s < end_s and a.end_s > begin_s]
    servers = {a.lane for a in found if not a.lane.startswith("rank ")}
    # No server generates during a sync.
    syncs = [a for a in found if (a.lane, a.name) == ("rank 0", "sync")]
    found += [Activity(server, "sync", sync.begin_s, sync.end_s) for server in servers for sync in syncs]
    return [
        Activity(a.lane, a.name, max(a.begin_s, begin_s), min(a.end_s, end_s))
        for a in sorted(found, key=lambda a: (*_order(a.lane), a.begin_s))
    ]


def _order(lane: str) -> tuple[bool, int, str]:
    """Return the sort key of a lane. Ranks come first, by number, each followed by its rollouts; then servers."""
    words = lane.split()
    is_rank = words[0] == "rank" and len(words) > 1 and words[1].isdigit()
    return not is_rank, int(words[1]) if is_rank else 0, lane
