"""Makes the report's parts on a run's result: a sentence, four cards, notes, charts of F1, tables, a confusion matrix.

In: the runs and their `Progress` (first and last evaluation). Out: texts, `Card`, `Chart` and `Table` records for
`templates/page.html`.
"""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from learner.journal.retained import changes
from learner.report.charts import Bar, Chart, Series, Table, interval_chart, line_chart, number
from learner.report.records import EvalPoint, RunRecord, RunSet, Scene
from learner.report.scores import (
    F1,
    DetectionCounts,
    F1Estimate,
    Progress,
    confusion,
    counts_by_class,
    counts_by_iou,
    f1_of,
    gain_between,
)

MAX_CLASSES, MAX_NAMES, MAX_NAME = 30, 12, 32  # max classes in the table, names in the matrix, letters of a name
SHOWN = (  # metrics in the table next to the charts
    "f1@0.5",
    "f1@miou",
    "precision@0.5",
    "recall@0.5",
    "mean_iou",
    "parse_rate",
    "truncation_rate",
    "duplicate_rate",
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Card:
    """A card with one number in large type (`big`), and a text below it (`sub`). `was`: an earlier number, shown in
    pale type before `big`. `tone`: `good`, `bad` or empty, for the color."""

    name: str
    big: str
    sub: str
    tone: str = ""
    was: str = ""


def facts(runs: RunSet) -> str:
    """Return a line of facts about the main run: trainer variant, model, steps, data, time, and how it ended."""
    main = runs.runs[0]
    found = [
        main.setting("custom", "trainer_variant"),
        main.setting("model", "path"),
        f"{len(main.steps)} optimizer steps",
        f"{main.data.num_train:,} training samples" if main.data else None,
        f"{number(sum(s.num_segments for s in main.steps))} learned",
        duration(main.wall_s) if math.isfinite(main.wall_s) and main.wall_s > 0 else None,
        main.status.ended or None,
    ]
    return "  ·  ".join(str(fact) for fact in found if fact)


def verdict(runs: Sequence[Progress]) -> str | None:
    """Return sentences on the main run's result, and on the F1 with which the other runs ended; None if the main run
    was not evaluated."""
    main = runs[0]
    before, after, gain = main.f1_before, main.f1_after, main.gain
    if before is None:
        return None
    split = split_of(main.run)
    scenes = f" on {before.num_scenes} {split} scenes" if before.num_scenes else ""
    if after is None or gain is None:
        return f"F1@0.5{scenes} is {before.value:.3f}.{_tested(main.run)}"
    steps = main.after.global_step if main.after else 0
    text = f"After {steps} optimizer steps, F1@0.5{scenes} went from {before.value:.3f} to {after.value:.3f}; "
    if gain.low is None or gain.high is None:
        text += "without the scenes there is no telling how sure that is."
    elif gain.low > 0:
        text += f"the 95% interval of the gain is {gain.low:.3f} to {gain.high:.3f}."
    elif gain.high < 0:
        text += "a loss that the interval sets apart from zero."
    else:
        text += "the interval of the change includes zero, so no gain is shown."
    text += _tested(main.run)
    for other in runs[1:]:
        lead = gain_between(main.after, other.after)
        if other.after and other.f1_after and lead:
            text += f" For comparison, {other.run.name} ended at {other.f1_after.value:.3f} after "
            text += f"{other.after.global_step} steps"
            # A lead is named only if its interval does not include zero.
            if _tone(lead):
                text += f", {abs(lead.value):.3f} {'ahead' if lead.value > 0 else 'behind'}"
            text += "."
    return text


def split_of(run: RunRecord) -> str:
    """Return the name of the split on which the run is evaluated during training: `validation` or `test`."""
    return "validation" if run.setting("data", "val") else "test"


def _tested(run: RunRecord) -> str:
    """Return a sentence with the score of `data.test`; empty if the run did not score that set separately."""
    found = f1_of(run.test) if run.test else None
    if found is None or run.test is None:
        return ""
    scenes = f"{found.num_scenes} test scenes" if found.num_scenes else "the test set"
    value = f"{found.value:.3f} {interval(found)}".rstrip()
    return f" On {scenes} it is {value}, scored once, at step {run.test.global_step}."


def cards(runs: Sequence[Progress]) -> list[Card]:
    """Return four cards: F1, the gain of F1, the comparison with a second run (without one: the parse rate), and the
    syncs. [] if the main run has no step, evaluation or sync."""
    main = runs[0]
    if not (main.run.steps or main.run.evals or main.run.syncs):
        return []
    third = _comparison_card(main, runs[1]) if len(runs) > 1 else _parse_rate_card(main)
    return [_f1_card(main), _gain_card("Gain", main.gain), third, _sync_card([p.run for p in runs])]


def _f1_card(progress: Progress) -> Card:
    shown = [e for e in (progress.f1_before, progress.f1_after) if e is not None]
    if not shown:
        return Card(name="F1@0.5", big="–", sub="not evaluated")
    return Card(
        name="F1@0.5, before → after" if len(shown) == 2 else "F1@0.5",
        was=f"{shown[0].value:.3f} → " if len(shown) == 2 else "",
        big=f"{shown[-1].value:.3f}",
        sub=" → ".join(filter(None, map(interval, shown))) or "no scenes, no interval",
    )


def _gain_card(name: str, gain: F1Estimate | None) -> Card:
    if gain is None:
        return Card(name=name, big="–", sub="needs two evaluations")
    sub = f"{interval(gain)}, paired" if gain.low is not None else "no interval"
    return Card(name=name, big=signed(gain.value), sub=sub, tone=_tone(gain))


def _comparison_card(main: Progress, other: Progress) -> Card:
    name = f"After, against {other.run.name}"
    lead = gain_between(other.after or other.before, main.after)
    if lead is None and main.after and (other.after or other.before):
        return Card(name=name, big="–", sub="evaluated on other scenes")
    return _gain_card(name, lead)


def _parse_rate_card(progress: Progress) -> Card:
    points = [p.metrics["parse_rate"] for p in (progress.before, progress.after) if p and "parse_rate" in p.metrics]
    if not points:
        return Card(name="Parse rate", big="–", sub="not evaluated")
    sub = f"before {points[0]:.1%}" if len(points) == 2 else "one evaluation"
    return Card(name="Parse rate", big=f"{points[-1]:.1%}", sub=sub)


def _sync_card(runs: Sequence[RunRecord]) -> Card:
    """Return a card with the number of weight syncs of all runs, their median seconds and their largest canary gap.
    Without syncs, return a card with the main run's tokens per second."""
    syncs = [sync.receipt for run in runs for sync in run.syncs]
    if not syncs:
        speeds = [s.metrics["tokens_per_s"] for s in runs[0].steps if "tokens_per_s" in s.metrics]
        big = number(statistics.median(speeds)) if speeds else "–"
        return Card(name="Tokens/s", big=big, sub="median step; no sync recorded")
    gaps = [s.canary_gap for s in syncs if math.isfinite(s.canary_gap)]
    seconds = [s.seconds for s in syncs if math.isfinite(s.seconds)]
    typical = f" × {number(statistics.median(seconds))} s" if seconds else ""
    sub = f"worst canary gap {number(max(gaps))}" if gaps else "no canary gap recorded"
    if len(runs) > 1:
        sub = f"{', '.join(f'{run.name} {len(run.syncs)}' for run in runs)}; {sub}"
    return Card(name="Weight syncs", big=f"{len(syncs)}{typical}", sub=sub)


def notes(runs: Sequence[Progress]) -> list[str]:
    """Return the notes of all runs, one line each: things that the page cannot show, and warnings. If there are several
    runs, a line begins with its run's name."""
    several = len(runs) > 1
    return [
        f"{progress.run.name}: {text}" if several else text
        for progress in runs
        for text in (*progress.run.notes, *_missing(progress, runs[0].run), *_disagreement(progress))
    ]


def _missing(progress: Progress, main: RunRecord) -> list[str]:
    run, said = progress.run, []
    said += _bad_records(run)
    if run.status.ended in ("stopped", "failed") or (run.status.ended and run.status.because):
        when = f"after step {run.steps[-1].global_step}" if run.steps else "before its first step"
        because = f": {run.status.because}" if run.status.because else ""
        said.append(f"The run {run.status.ended}, {when}{because}.")
    if not run.steps:
        said.append("No optimizer step is recorded yet.")
    if not run.evals:
        said.append("No evaluation is recorded yet, so there is no F1 and no gallery.")
    elif progress.after is None:
        said.append(f"Only one evaluation, at step {run.evals[0].global_step}: nothing to compare it with yet.")
    if any(not point.scenes and F1 in point.metrics for point in run.evals):
        said.append("The scenes of an evaluation were not kept; its F1 has no interval.")
    if progress.run is not main and run.test is not None and progress.after is run.test:
        said.append(f"It was validated on other scenes than {main.name}, so its score of data.test is shown.")
    if progress.borrowed:
        said.append(f"“Before” is {main.name}'s evaluation at step 0: both began from the same model.")
    fallbacks = [sync.receipt for sync in run.syncs if sync.receipt.fallback]
    said += [f"From ver {s.ver} on all weights were synced, not the adapter: {s.fallback}" for s in fallbacks]
    return said


def _bad_records(run: RunRecord) -> list[str]:
    """Return sentences that say how many bad records of the data were dropped or clipped, one per split."""
    words = {"drop": "dropped", "clip": "clipped"}
    told = {
        split: [
            f"{number(n)} {kind.replace('_', ' ')} {words.get(act, act)}"
            for kind, acts in kinds.items()
            for act, n in acts.items()
        ]
        for split, kinds in (run.data.bad_records.items() if run.data else ())
    }
    return [
        f"Bad records of the {'training' if split == 'train' else split} data: {', '.join(counts)}."
        for split, counts in told.items()
        if counts
    ]


def _disagreement(progress: Progress) -> list[str]:
    """Return a sentence for each evaluation whose recorded F1 differs from the F1 of its scenes. They differ if files
    of two runs were mixed."""
    return [
        f"At step {point.global_step} the recorded F1@0.5 is {point.metrics[F1]:.3f}, "
        f"the scenes give {computed.value:.3f}."
        for point, computed in progress.curve
        if F1 in point.metrics and abs(point.metrics[F1] - computed.value) > 5e-4
    ]


def f1_charts(runs: Sequence[Progress]) -> list[Chart]:
    """Return two charts: F1 with its interval in each run's first and last evaluation, and F1 by step if a run has
    several evaluations. [] without evaluations."""
    rows: list[Bar] = []
    series: list[Series] = []
    several = len(runs) > 1
    for index, progress in enumerate(runs):
        if index == 0 or not progress.borrowed:
            name = "before" if progress.after else "one evaluation"
            name = name if index == 0 else f"{progress.run.name}, {name}"
            rows += _interval_row(name, "before", progress.f1_before)
        rows += _interval_row(progress.run.name if several else "after", progress.color, progress.f1_after)
        kept = [(float(point.global_step), estimate.value) for point, estimate in progress.curve]
        series.append(Series(progress.run.name if several else "F1@0.5", kept, progress.color))
    drawn = [
        interval_chart("F1@0.5 over scenes", rows, value="95% bootstrap"),
        line_chart("F1@0.5 by step", series, dots=True) if any(len(s.points) > 1 for s in series) else None,
    ]
    return [chart for chart in drawn if chart] if rows else []


def _interval_row(name: str, color: str, estimate: F1Estimate | None) -> list[Bar]:
    return [Bar(name, estimate.value, color, estimate.low, estimate.high)] if estimate else []


def comparison_table(runs: Sequence[Progress]) -> Table | None:
    """Return a table that compares the runs: F1 before and after, gain, and the main run's lead, with intervals. None
    for a single run."""
    if len(runs) < 2:
        return None
    main = runs[0]
    rows = []
    for progress in runs:
        against = None if progress is main else gain_between(progress.after, main.after)
        cells = [_estimate_cell(e) for e in (progress.f1_before, progress.f1_after)]
        cells += [_estimate_cell(e, sign=True) for e in (progress.gain, against)]
        rows.append([progress.run.name, str(len(progress.run.steps)), *cells, duration(progress.run.wall_s)])
    return Table(["Run", "Steps", "F1@0.5 before", "after", "gain", f"{main.run.name} ahead by", "Wall time"], rows)


def retained_table(progress: Progress, *, named: bool = False) -> Table | None:
    """Return a table of the main metric at the first and the last evaluation, on the run's own data and on each set of
    `data.retain`; None without such sets. `named`: the table's head has the run's name."""
    points = [point for point in progress.run.evals if point.metrics]
    found = changes(points[0].metrics, points[-1].metrics) if len(points) > 1 else []
    if not found:
        return None
    head = f"{progress.run.name}: {found[0].metric}" if named else found[0].metric
    rows = [[one.data, f"{one.before:.3f}", f"{one.after:.3f}", f"{one.after - one.before:+.3f}"] for one in found]
    return Table([head, f"Step {points[0].global_step}", f"Step {points[-1].global_step}", "Change"], rows)


def metrics_table(runs: Sequence[Progress], *, only: Sequence[str] = ()) -> Table | None:
    """Return a table of the metrics before and after training: all measured metrics, or only the metrics in `only`.
    None if there are no metrics."""
    several = len(runs) > 1
    columns = [("Before" if runs[0].after else "One evaluation", runs[0].before)]
    columns += [(p.run.name if several else "After", p.after) for p in runs if p.after]
    shown = [(name, point.metrics) for name, point in columns if point and point.metrics]
    names = sorted({key for _, metrics in shown for key in metrics})
    names = [key for key in only if key in names] if only else names
    rows = [[key, *(f"{metrics[key]:.3f}" if key in metrics else "–" for _, metrics in shown)] for key in names]
    return Table(["Metric", *(name for name, _ in shown)], rows) if rows else None


def iou_charts(runs: Sequence[Progress]) -> list[Chart]:
    """Return charts of precision, recall and F1 by IoU threshold; [] without scenes. There is a line for the main run's
    first evaluation, and one for the last evaluation of each run."""
    main = runs[0]
    shown = [("before" if main.after else "one evaluation", "before", main.before)]
    shown += [(p.run.name if len(runs) > 1 else "after", p.color, p.after) for p in runs]
    counted = [(name, color, counts_by_iou(point.scenes)) for name, color, point in shown if point and point.scenes]

    def chart(title: str, read: Callable[[DetectionCounts], float], note: str) -> Chart | None:
        series = [Series(name, [(t, read(c)) for t, c in by_iou.items()], color) for name, color, by_iou in counted]
        return line_chart(title, series, x_label="IoU", y_max=1.0, dots=True, note=note)

    note = (
        "Share of predictions that are right if boxes must fit this well. All boxes of an answer count, whatever their "
        "scores; coco/ap is over scores."
    )
    drawn = [
        chart("Precision by IoU threshold", lambda counts: counts.precision, note),
        chart("Recall by IoU threshold", lambda counts: counts.recall, "Share of objects that are found then."),
        chart("F1 by IoU threshold", lambda counts: counts.f1, "Its mean is f1@miou."),
    ]
    # `value`, shown next to the title, would be the number at the last threshold, which says nothing about the curve.
    return [replace(chart, value="") for chart in drawn if chart]


def class_table(runs: Sequence[Progress]) -> Table | None:
    """Return a table with a row per class (description), most frequent first: counts, precision and recall in the main
    run's last evaluation, and F1 in each evaluation. None if there are fewer than two classes."""
    main = runs[0]
    last = counts_by_class(_scenes(main.after or main.before))
    if len(last) < 2:
        return None
    columns = [("before", counts_by_class(_scenes(main.before)))] if main.after else []
    columns.append(((f"after {main.run.name}" if len(runs) > 1 else "after") if main.after else "", last))
    columns += [(f"after {p.run.name}", counts_by_class(_scenes(p.after))) for p in runs[1:] if p.after]
    which = next(name for name, counts in columns if counts is last)
    rows = []
    for name, counts in list(last.items())[:MAX_CLASSES]:
        f1 = [by_class[name].f1 if name in by_class else math.nan for _, by_class in columns]
        values = [f"{v:.3f}" if math.isfinite(v) else "–" for v in (counts.precision, counts.recall, *f1)]
        rows.append([short(name), str(counts.truth), str(counts.predictions), *values])
    if len(last) > MAX_CLASSES:
        rows.append([f"… and {len(last) - MAX_CLASSES} more", *["" for _ in rows[0][1:]]])
    measured = [(name, which) for name in ("Predicted", "Precision", "Recall")]
    return Table(["Class", "Objects", *measured, *(("F1@0.5", name) for name, _ in columns)], rows)


def last_evaluation(progress: Progress) -> str:
    """Return the run's name and the step of its last evaluation, as a text."""
    point = progress.after or progress.before
    return f"{progress.run.name}, evaluation at step {point.global_step if point else 0}"


@dataclass(frozen=True, kw_only=True, slots=True)
class ConfusionMatrix:
    """How often the model gave each name to objects of each name. A row is the object's true name, a column the model's
    name for it. The last column counts missed objects. The last row counts predictions where there is no object. The
    kind of a cell (`right`, `wrong` or empty) decides its color. `source`: the evaluation that was counted, as a
    text."""

    source: str
    columns: Sequence[str]
    rows: Sequence[tuple[str, int, Sequence[tuple[int, str]]]]  # (true name, sum, (count, kind of cell) per column)


def confusion_matrix(progress: Progress) -> ConfusionMatrix | None:
    """Return the confusion matrix of the run's last evaluation; None for fewer than two names."""
    return matrix_of(_scenes(progress.after or progress.before), last_evaluation(progress))


def matrix_of(scenes: Sequence[Scene], source: str) -> ConfusionMatrix | None:
    """Return the confusion matrix of the MAX_NAMES most frequent names. All rarer names share one row and one column.
    None for fewer than two names."""
    found = confusion(scenes)
    weight: Counter[str] = Counter()
    for pair, count in found.items():
        weight.update({name: count for name in pair if name is not None})
    kept = sorted(name for name, _ in weight.most_common(MAX_NAMES))
    if len(kept) < 2:
        return None
    rare = "other names" if len(weight) > len(kept) else None
    names = [*kept, *((rare,) if rare else ()), None]
    pooled: Counter[tuple[str | None, str | None]] = Counter()
    for (truth, said), count in found.items():
        pooled[(truth if truth in (*kept, None) else rare, said if said in (*kept, None) else rare)] += count
    rows = []
    for truth in names:
        cells = [(pooled[truth, said], _kind(truth, said, rare)) for said in names]
        label = "no object there" if truth is None else short(truth)
        rows.append((label, sum(count for count, _ in cells), cells))
    columns = ["missed" if name is None else short(name) for name in names]
    return ConfusionMatrix(source=source, columns=columns, rows=rows)


def _kind(truth: str | None, said: str | None, rare: str | None) -> str:
    """Return the kind of a confusion matrix's cell, which decides its color: `right`, `wrong` or empty."""
    if truth == said:
        # Rare names share one row and one column, so their common cell may be right or wrong.
        return "" if truth in (None, rare) else "right"
    return "wrong"


def _scenes(point: EvalPoint | None) -> Sequence[Scene]:
    return point.scenes if point else ()


def short(name: str) -> str:
    return name if len(name) <= MAX_NAME else f"{name[: MAX_NAME - 1]}…"


def _estimate_cell(estimate: F1Estimate | None, *, sign: bool = False) -> tuple[str, str] | str:
    if estimate is None:
        return "–"
    return signed(estimate.value) if sign else f"{estimate.value:.3f}", interval(estimate)


def interval(estimate: F1Estimate) -> str:
    """Return the estimate's interval as a text, such as `[0.512, 0.634]`; empty if there is none."""
    if estimate.low is None or estimate.high is None:
        return ""
    return f"[{estimate.low:.3f}, {estimate.high:.3f}]".replace("-", "−")


def signed(value: float) -> str:
    return f"{value:+.3f}".replace("-", "−")


def duration(seconds: float) -> str:
    """Return a duration as a text such as `2 h 5 min` or `3 min 20 s`; an en dash if it is not finite."""
    if not math.isfinite(seconds):
        return "–"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours} h {minutes} min"
    return f"{minutes} min {rest} s" if minutes else f"{rest} s"


def _tone(gain: F1Estimate) -> str:
    """Return `good` if the whole interval is above zero, `bad` if it is all below zero, else empty."""
    return "good" if (gain.low or 0) > 0 else "bad" if (gain.high or 0) < 0 else ""
