"""Small charts as inline SVG: lines with bands, stacked bars, horizontal bars, intervals.

In: series of numbers. Out: `<figure>` elements that carry their own title, legend and, for every point, a tooltip.
Colours are the page's CSS variables (`--c-NAME`), so that a chart follows the light or dark scheme. Points that are not
finite are left out; a chart without points is None, and the page says so once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from learner.report.axes import LEFT, RIGHT, TOP, WIDTH, Column, Plane, Point, number, plane, thin
from learner.report.markup import Html, el, join


@dataclass(frozen=True, slots=True)
class Series:
    """Points in the order of x. `tone` names a colour of the page."""

    name: str
    points: Sequence[Point]
    tone: str


@dataclass(frozen=True, slots=True)
class Bar:
    """One bar of `bar_chart`, or one row of `interval_chart` when it has bounds."""

    name: str
    value: float
    tone: str
    low: float | None = None
    high: float | None = None


def line_chart(
    title: str,
    series: Sequence[Series],
    *,
    x_label: str = "step",
    unit: str = "",
    from_zero: bool = True,
    y_max: float | None = None,
    dots: bool = False,
) -> Html | None:
    """One line per series; where neighbours were merged, a band shows their range."""
    drawn = [(s, columns) for s in series if (columns := thin(s.points))]
    if not drawn:
        return None
    everything = [c for _, columns in drawn for c in columns]
    low = min(0.0 if from_zero else c.low for c in everything)
    low, high = min(low, *(c.low for c in everything)), y_max or max(c.high for c in everything)
    frame = plane([x for c in everything for x in (c.first, c.last)], low, high)
    marks = [_line(s, columns, frame, dots=dots or len(columns) == 1) for s, columns in drawn]
    hovers = [_hover(c, frame, f"{s.name} {number(c.y)}{unit}", x_label) for s, columns in drawn[:1] for c in columns]
    if len(drawn) > 1:
        hovers = _shared_hovers(drawn, frame, unit, x_label)
    return figure(
        title,
        svg(title, join(frame.frame(x_label), *marks, *hovers)),
        legend=[(s.name, s.tone) for s, _ in drawn] if len(drawn) > 1 else [],
        value=f"{number(_last(drawn[0][0]))}{unit} last" if len(drawn) == 1 else "",
    )


def stacked_chart(title: str, layers: Sequence[Series], *, unit: str = "") -> Html | None:
    """Bars over steps, layers on top of each other; all of the same x values. Neighbours are merged to means."""
    drawn = [(layer, thin(layer.points)) for layer in layers if any(y > 0 for _, y in layer.points)]
    if not drawn:
        return None
    columns = list(zip(*(columns for _, columns in drawn), strict=True))
    totals = [sum(c.y for c in column) for column in columns]
    spacing = (columns[-1][0].x - columns[0][0].x) / (len(columns) - 1) if len(columns) > 1 else 1.0
    frame = plane([c[0].x for c in columns], 0.0, max(totals), pad=spacing / 2)
    width = max(0.6, (frame.x(spacing) - frame.x(0)) * 0.82)
    bars = []
    for column, total in zip(columns, totals, strict=True):
        x, base = frame.x(column[0].x) - width / 2, 0.0
        rects = []
        for (layer, _), cell in zip(drawn, column, strict=True):
            top, bottom = frame.y(base + cell.y), frame.y(base)
            rects.append(el("rect", cls=f"f-{layer.tone}", x=x, width=width, y=top, height=max(0.0, bottom - top)))
            base += cell.y
        parts = ", ".join(f"{layer.name} {number(c.y)}{unit}" for (layer, _), c in zip(drawn, column, strict=True))
        tip = f"{_where(column[0], 'step')}: {number(total)}{unit} ({parts})"
        bars.append(el("g", el("title", tip), *rects))
    return figure(
        title,
        svg(title, join(frame.frame("step"), *bars)),
        legend=[(layer.name, layer.tone) for layer, _ in drawn],
        value=f"{number(sum(totals) / len(totals))}{unit} mean",
    )


def bar_chart(title: str, bars: Sequence[Bar], *, value: str = "") -> Html | None:
    """Horizontal bars, one per name, longest first."""
    if not bars:
        return None
    ordered = sorted(bars, key=lambda bar: (-bar.value, bar.name))
    longest = max(bar.value for bar in ordered) or 1.0
    room, row = WIDTH - 128 - 52, min(26.0, 168 / len(ordered))
    rows = []
    for index, bar in enumerate(ordered):
        y, length = TOP + index * row, room * bar.value / longest
        rows.append(el("text", bar.name, cls="label", x=0, y=y + row * 0.62))
        rows.append(el("rect", cls=f"f-{bar.tone}", x=128, y=y + row * 0.2, width=length, height=row * 0.56, rx=1.5))
        rows.append(el("text", number(bar.value), cls="tick", x=128 + length + 7, y=y + row * 0.62))
    return figure(title, svg(title, join(*rows), height=TOP + row * len(ordered) + 4), value=value)


def interval_chart(title: str, rows: Sequence[Bar], *, note: str = "") -> Html | None:
    """One row per estimate: a dot at its value and a line over its interval, on one axis."""
    if not rows:
        return None
    ends = [v for r in rows for v in (r.value, r.low, r.high) if v is not None]
    slack = max(0.02, (max(ends) - min(ends)) * 0.08)
    row, label = 34.0, 104.0
    frame = plane([0.0, 1.0], max(0.0, min(ends) - slack), min(1.0, max(ends) + slack))
    low, high = frame.y_ticks[0], frame.y_ticks[-1]
    height = TOP + row * len(rows) + 26

    def place(value: float) -> float:
        return label + 10 + (value - low) / (high - low) * (WIDTH - label - 24 - RIGHT)

    parts = [
        join(
            el("line", cls="grid", x1=place(t), x2=place(t), y1=TOP, y2=height - 22),
            el("text", number(t), cls="tick mid", x=place(t), y=height - 6),
        )
        for t in frame.y_ticks
    ]
    for index, bar in enumerate(rows):
        y = TOP + row * (index + 0.5)
        parts.append(el("text", bar.name, cls="label", x=0, y=y + 4))
        if bar.low is not None and bar.high is not None:
            parts.append(el("line", cls=f"whisker s-{bar.tone}", x1=place(bar.low), x2=place(bar.high), y1=y, y2=y))
        parts.append(el("circle", el("title", _spoken(bar)), cls=f"f-{bar.tone}", cx=place(bar.value), cy=y, r=5))
    return figure(title, svg(title, join(*parts), height=height), value=note)


def figure(title: str, drawing: Html, *, legend: Sequence[tuple[str, str]] = (), value: str = "") -> Html:
    """A chart with its heading, the value that matters most, and a legend."""
    keys = [el("span", el("i", cls=f"b-{tone}"), name, cls="key") for name, tone in legend]
    return el(
        "figure",
        el("figcaption", el("b", title), el("span", value, cls="value") if value else None),
        drawing,
        el("div", *keys, cls="legend") if keys else None,
        cls="chart",
    )


def svg(title: str, content: Html, *, height: float = 190.0) -> Html:
    """A drawing with an accessible name."""
    box = f"0 0 {WIDTH:.0f} {height:.0f}"
    return el("svg", el("title", title), content, viewBox=box, role="img", aria_label=title)


def _line(series: Series, columns: Sequence[Column], frame: Plane, *, dots: bool) -> Html:
    path = " ".join(f"{'L' if i else 'M'}{frame.x(c.x):.1f} {frame.y(c.y):.1f}" for i, c in enumerate(columns))
    band = None
    if any(c.first != c.last for c in columns):
        upper = [f"{frame.x(c.x):.1f},{frame.y(c.high):.1f}" for c in columns]
        lower = [f"{frame.x(c.x):.1f},{frame.y(c.low):.1f}" for c in reversed(columns)]
        band = el("polygon", cls=f"band f-{series.tone}", points=" ".join(upper + lower))
    circles = [el("circle", cls=f"f-{series.tone}", cx=frame.x(c.x), cy=frame.y(c.y), r=3) for c in columns if dots]
    return join(band, el("path", cls=f"line s-{series.tone}", d=path), *circles)


def _shared_hovers(
    drawn: Sequence[tuple[Series, Sequence[Column]]], frame: Plane, unit: str, x_label: str
) -> list[Html]:
    """One tooltip per x with every series' value there."""
    at: dict[float, tuple[Column, list[str]]] = {}
    for series, columns in drawn:
        for column in columns:
            at.setdefault(column.x, (column, []))[1].append(f"{series.name} {number(column.y)}{unit}")
    return [_hover(column, frame, ", ".join(texts), x_label) for column, texts in at.values()]


def _hover(column: Column, frame: Plane, text: str, x_label: str) -> Html:
    """An invisible stripe with a tooltip, so that no script is needed."""
    width = max(4.0, (WIDTH - LEFT - RIGHT) / 60)
    tip = el("title", f"{_where(column, x_label)}: {text}")
    dot = el("circle", cls="dot", cx=frame.x(column.x), cy=frame.y(column.y), r=3.5)
    stripe = el("rect", cls="hit", x=frame.x(column.x) - width / 2, y=TOP, width=width, height=frame.height - TOP)
    return el("g", tip, stripe, dot, cls="hover")


def _where(column: Column, x_label: str) -> str:
    if column.first == column.last:
        return f"{x_label} {number(column.first)}"
    return f"{x_label}s {number(column.first)}–{number(column.last)}, mean"


def _last(series: Series) -> float:
    return next(y for _, y in reversed(series.points) if y == y)


def _spoken(bar: Bar) -> str:
    interval = "" if bar.low is None or bar.high is None else f" [{bar.low:.3f}, {bar.high:.3f}]"
    return f"{bar.name}: {bar.value:.3f}{interval}"
