"""Tables of results, and how an estimate and a duration are written. Called by the page's sections."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from learner.report.markup import Html, el, join
from learner.report.scores import Estimate
from learner.report.standings import Standing, gain_between


def comparison_table(all_standings: Sequence[Standing]) -> Html | None:
    """One row per run with intervals; None for a single run."""
    if len(all_standings) < 2:
        return None
    main = all_standings[0]
    rows = []
    for standing in all_standings:
        against = None if standing is main else gain_between(standing.after, main.after)
        cells = [_estimate_cell(e) for e in (standing.f1_before, standing.f1_after)]
        cells += [_estimate_cell(e, sign=True) for e in (standing.gain, against)]
        rows.append([standing.run.name, str(len(standing.run.steps)), *cells, duration(standing.run.wall_s)])
    head = ["Run", "Steps", "F1@0.5 before", "after", "gain", f"{main.run.name} ahead by", "Wall time"]
    return table(head, rows)


def metrics_table(all_standings: Sequence[Standing], *, only: Sequence[str] = ()) -> Html | None:
    """The task's metrics, before and after: all by name, or those of `only` that there are."""
    several = len(all_standings) > 1
    columns = [("Before", all_standings[0].before)]
    columns += [(s.run.name if several else "After", s.after) for s in all_standings if s.after]
    shown = [(name, point.metrics) for name, point in columns if point and point.metrics]
    names = sorted({key for _, metrics in shown for key in metrics})
    names = [key for key in only if key in names] if only else names
    rows = [[key, *(f"{metrics[key]:.3f}" if key in metrics else "–" for _, metrics in shown)] for key in names]
    return table(["Metric", *(name for name, _ in shown)], rows) if rows else None


def table(head: Iterable[str], rows: Iterable[Iterable[str | Html]]) -> Html:
    """A table that scrolls sideways where there is no room."""
    top = el("tr", *(el("th", name, scope="col") for name in head))
    body = [el("tr", *(el("td", cell) for cell in row)) for row in rows]
    return el("div", el("table", el("thead", top), el("tbody", *body)), cls="table")


def _estimate_cell(estimate: Estimate | None, *, sign: bool = False) -> Html:
    if estimate is None:
        return join("–")
    value = signed(estimate.value) if sign else f"{estimate.value:.3f}"
    return join(value, el("small", interval(estimate)) if estimate.low is not None else None)


def interval(estimate: Estimate) -> str:
    """`[low, high]`, or nothing."""
    if estimate.low is None or estimate.high is None:
        return ""
    return f"[{estimate.low:.3f}, {estimate.high:.3f}]".replace("-", "−")


def signed(value: float) -> str:
    return f"{value:+.3f}".replace("-", "−")


def duration(seconds: float) -> str:
    """Hours, minutes and seconds in words."""
    if not math.isfinite(seconds):
        return "–"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours} h {minutes} min"
    return f"{minutes} min {rest} s" if minutes else f"{rest} s"
