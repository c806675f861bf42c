"""The top of the page: what the run was, the result in a sentence and four cards, F1 as charts."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

from learner.report.axes import number
from learner.report.charts import Bar, Series, interval_chart, line_chart
from learner.report.markup import Html, el, join
from learner.report.read import Run, RunSet
from learner.report.scores import Estimate
from learner.report.standings import Standing, gain_between
from learner.report.tables import duration, interval, metrics_table, signed

SHOWN = (
    "f1@0.5",
    "f1@miou",
    "precision@0.5",
    "recall@0.5",
    "mean_iou",
    "parse_rate",
    "truncation_rate",
    "duplicate_rate",
)


def header(runs: RunSet) -> Html:
    """Name and facts of the main run."""
    main = runs.runs[0]
    facts = [
        main.setting("custom", "trainer_variant"),
        main.setting("model", "path"),
        f"{len(main.steps)} optimizer steps",
        f"{number(sum(s.num_segments for s in main.steps))} samples",
        duration(main.wall_s) if math.isfinite(main.wall_s) and main.wall_s > 0 else None,
    ]
    return el(
        "header",
        el("p", "Run report" if len(runs.runs) == 1 else f"Report of {len(runs.runs)} runs", cls="kicker"),
        el("h1", runs.title),
        el("p", "  ·  ".join(str(fact) for fact in facts if fact), cls="facts"),
    )


def verdict(all_standings: Sequence[Standing]) -> Html | None:
    """The main run's result in a sentence, and where the others ended."""
    standing = all_standings[0]
    before, after, gain = standing.f1_before, standing.f1_after, standing.gain
    if before is None:
        return None
    scenes = f" on {before.num_scenes} test scenes" if before.num_scenes else ""
    if after is None or gain is None:
        return el("p", f"F1@0.5{scenes} is {before.value:.3f}.", cls="verdict")
    moved = f"F1@0.5{scenes} went from {before.value:.3f} to {after.value:.3f}"
    steps = standing.after.global_step if standing.after else 0
    text = f"After {steps} optimizer steps, {moved}; "
    if gain.low is None or gain.high is None:
        text += "without the scenes there is no telling how sure that is."
    elif gain.low > 0:
        text += f"the 95% interval of the gain is {gain.low:.3f} to {gain.high:.3f}."
    elif gain.high < 0:
        text += "a loss that the interval sets apart from zero."
    else:
        text += "the interval of the change includes zero, so no gain is shown."
    for other in all_standings[1:]:
        if other.after and other.f1_after:
            ended = f"{other.f1_after.value:.3f} after {other.after.global_step} steps"
            text += f" For comparison, {other.run.name} ended at {ended}."
    return el("p", text, cls="verdict")


def cards(all_standings: Sequence[Standing]) -> Html | None:
    """Four numbers: F1, its gain, the comparison or the parse rate, the syncs or the speed. None for an empty run."""
    main = all_standings[0]
    if not (main.run.steps or main.run.evals or main.run.syncs):
        return None
    third = _against(main, all_standings[1]) if len(all_standings) > 1 else _parse_rate(main)
    return el("div", _f1_card(main), _gain_card("Gain", main.gain), third, _sync_card(main.run), cls="cards")


def _card(name: str, big: Html | str, sub: str, tone: str = "") -> Html:
    return el(
        "div",
        el("div", name, cls="name"),
        el("div", big, cls=f"big {tone}".strip()),
        el("div", sub, cls="sub"),
        cls="card",
    )


def _f1_card(standing: Standing) -> Html:
    shown = [e for e in (standing.f1_before, standing.f1_after) if e is not None]
    if not shown:
        return _card("F1@0.5", "–", "not evaluated")
    last = f"{shown[-1].value:.3f}"
    big = join(el("s", f"{shown[0].value:.3f} → "), last) if len(shown) == 2 else join(last)
    name = "F1@0.5, before → after" if len(shown) == 2 else "F1@0.5"
    return _card(name, big, " → ".join(filter(None, map(interval, shown))) or "no scenes, no interval")


def _gain_card(name: str, gain: Estimate | None) -> Html:
    if gain is None:
        return _card(name, "–", "needs two evaluations")
    tone = "good" if (gain.low or 0) > 0 else "bad" if (gain.high or 0) < 0 else ""
    sub = f"{interval(gain)}, paired" if gain.low is not None else "no interval"
    return _card(name, signed(gain.value), sub, tone)


def _against(main: Standing, other: Standing) -> Html:
    name = f"After, against {other.run.name}"
    return _gain_card(name, gain_between(other.after or other.before, main.after))


def _parse_rate(standing: Standing) -> Html:
    points = [p.metrics["parse_rate"] for p in (standing.before, standing.after) if p and "parse_rate" in p.metrics]
    if not points:
        return _card("Parse rate", "–", "not evaluated")
    sub = f"before {points[0]:.1%}" if len(points) == 2 else "one evaluation"
    return _card("Parse rate", f"{points[-1]:.1%}", sub)


def _sync_card(run: Run) -> Html:
    if not run.syncs:
        speeds = [s.metrics["tokens_per_s"] for s in run.steps if "tokens_per_s" in s.metrics]
        return _card("Tokens/s", number(statistics.median(speeds)) if speeds else "–", "median step; no sync recorded")
    gaps = [s.canary_gap for s in run.syncs if math.isfinite(s.canary_gap)]
    seconds = [s.seconds for s in run.syncs if math.isfinite(s.seconds)]
    worst = f"worst canary gap {number(max(gaps))}" if gaps else "no canary gap recorded"
    typical = f" × {number(statistics.median(seconds))} s" if seconds else ""
    return _card("Weight syncs", f"{len(run.syncs)}{typical}", worst)


def evaluation_charts(all_standings: Sequence[Standing]) -> Html | None:
    """F1 with intervals, one row per evaluation that matters, and F1 over steps."""
    rows, series = [], []
    several = len(all_standings) > 1
    for index, standing in enumerate(all_standings):
        if index == 0 or not standing.borrowed:
            name = "before" if standing.after else "one evaluation"
            name = name if index == 0 else f"{standing.run.name}, {name}"
            rows += _interval_row(name, "before", standing.f1_before)
        rows += _interval_row(standing.run.name if several else "after", standing.tone, standing.f1_after)
        kept = [(float(point.global_step), estimate.value) for point, estimate in standing.curve]
        series.append(Series(standing.run.name if several else "F1@0.5", kept, standing.tone))
    drawn = [
        interval_chart("F1@0.5 over scenes", rows, note="95% bootstrap"),
        line_chart("F1@0.5 by step", series, dots=True) if any(len(s.points) > 1 for s in series) else None,
    ]
    return el("div", *drawn, metrics_table(all_standings, only=SHOWN), cls="charts") if rows else None


def _interval_row(name: str, tone: str, estimate: Estimate | None) -> list[Bar]:
    if estimate is None:
        return []
    return [Bar(name, estimate.value, tone, estimate.low, estimate.high)]
