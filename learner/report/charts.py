"""Makes records of small charts and tables: lines with bands, stacked bars, horizontal bars, intervals.

In: series of numbers. Out: a `Chart`, which the macro in `templates/charts.html` draws as inline SVG, with a title, a
legend and a tooltip for every point. Colors are names of the page's CSS variables (`--c-NAME`), which differ between
the light and the dark scheme. Points that are not finite are left out. Without points there is no chart (None).

All drawings are WIDTH units wide and shown at about one pixel per unit, so the text of all charts has the same size.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

WIDTH, HEIGHT = 380.0, 190.0  # size of a drawing, in drawing units
LEFT, RIGHT, TOP, BOTTOM = 44.0, 10.0, 10.0, 24.0  # margins around the plane, in drawing units
MAX_COLUMNS = 90  # if there are more points, neighbouring points are drawn as their mean, with their range
ROUNDING = 1e-12  # numbers with a smaller relative difference count as equal
MAX_DOTS = 45  # a line with more points than this is drawn without dots
Point = tuple[float, float]  # (x, y)


@dataclass(frozen=True, slots=True)
class Series:
    """The points of a line, in the order of x. `spread`: half the height of a band around the line, for each point;
    empty: no band."""

    name: str
    points: Sequence[Point]
    color: str
    spread: Sequence[float] = ()

    def columns(self) -> list[Column]:
        """Return the points as at most MAX_COLUMNS columns. With a `spread`, a column's range is its mean minus and
        plus the spread's mean."""
        found = thin(self.points)
        if not self.spread:
            return found
        # A point that the line leaves out is left out here too, so both have the same columns.
        spreads = thin([(x, d if math.isfinite(y) else y) for (x, y), d in zip(self.points, self.spread, strict=True)])
        return [replace(c, low=c.y - d.y, high=c.y + d.y) for c, d in zip(found, spreads, strict=True)]


@dataclass(frozen=True, slots=True)
class Bar:
    """One bar of a `bar_chart`, or one row of an `interval_chart`; `low` and `high` are the row's interval."""

    name: str
    value: float
    color: str
    low: float | None = None
    high: float | None = None


@dataclass(frozen=True, slots=True)
class Table:
    """A table. Each cell is one text, or two texts; the second is shown in small type."""

    head: Sequence[str | tuple[str, str]]
    rows: Sequence[Sequence[str | tuple[str, str]]]


@dataclass(frozen=True, kw_only=True, slots=True)
class Column:
    """Neighbouring points of a line, drawn as one point."""

    x: float  # mean x
    y: float  # mean y
    low: float  # smallest y, or the lower edge of a band
    high: float  # largest y, or the upper edge of a band
    first: float  # x of the column's first point
    last: float  # x of the column's last point


def thin(points: Sequence[Point]) -> list[Column]:
    """Return the points as at most MAX_COLUMNS columns of neighbouring points, in order. Points that are not finite are
    left out."""
    finite = [(x, y) for x, y in points if math.isfinite(y)]
    size = -(-len(finite) // MAX_COLUMNS) or 1
    columns = []
    for start in range(0, len(finite), size):
        xs, ys = zip(*finite[start : start + size], strict=True)
        columns.append(
            Column(x=sum(xs) / len(xs), y=sum(ys) / len(ys), low=min(ys), high=max(ys), first=xs[0], last=xs[-1])
        )
    return columns


def number(value: float) -> str:
    """Return a number as a text with three significant digits: from 10,000 on with k, M or G. An en dash if it is not
    finite."""
    if not math.isfinite(value):
        return "–"
    size = abs(value)
    for unit, name in ((1e9, "G"), (1e6, "M"), (1e4, "k")):
        if size >= unit:
            scale = 1e3 if name == "k" else unit
            return f"{_digits(value / scale)}{name}"
    if 0 < size < 1e-3:
        mantissa, _, exponent = f"{value:.1e}".partition("e")
        return f"{mantissa.removesuffix('.0')}e{int(exponent)}"
    return _digits(value)


def _digits(value: float) -> str:
    if value == int(value):
        return f"{int(value):,}"
    decimals = max(0, 2 - math.floor(math.log10(abs(value))))
    text = f"{value:,.{decimals}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


def ticks(low: float, high: float, count: int = 4) -> list[float]:
    """Return about `count` + 1 round numbers for the marks of an axis, at equal distances. The first mark is at most
    `low`, the last mark at least `high`."""
    # `low` and `high` may be equal, or differ only by rounding of floats. An axis needs a length.
    if high - low <= ROUNDING * max(abs(low), abs(high)):
        high = low + (abs(low) or 1.0)
    raw = (high - low) / count
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(power * factor for factor in (1, 2, 2.5, 5, 10) if power * factor >= raw * 0.999)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    # A loss may be as small as 1e-17, so the number of digits depends on the step.
    digits = 12 + max(0, -math.floor(math.log10(step)))
    return [round(i * step, digits) for i in range(first, last + 1)]


@dataclass(frozen=True, kw_only=True, slots=True)
class Plane:
    """The area of a chart between its axes. The methods map data to drawing units."""

    x_low: float  # data value at the left edge
    x_high: float  # data value at the right edge
    y_ticks: Sequence[float]  # marks of the y axis; the first is at the lower edge, the last at the upper edge
    x_label: str = "step"
    left: float = LEFT  # left edge of the plane, in drawing units
    right: float = WIDTH - RIGHT
    top: float = TOP
    height: float = HEIGHT  # height of the whole drawing, in drawing units
    counted: bool = True  # True: x is a count, such as steps, so its marks are whole numbers

    def x(self, value: float) -> float:
        span = self.x_high - self.x_low or 1.0
        return self.left + (value - self.x_low) / span * (self.right - self.left)

    def y(self, value: float) -> float:
        low, high = self.y_ticks[0], self.y_ticks[-1]
        return self.height - BOTTOM - (value - low) / (high - low) * (self.height - TOP - BOTTOM)

    def x_ticks(self) -> list[float]:
        """Return the marks of the x axis. If x is a count, only whole numbers are marked, unless the axis is shorter
        than 1."""
        marks = [t for t in ticks(self.x_low, self.x_high, 5) if self.x_low <= t <= self.x_high]
        return [t for t in marks if t == int(t) or not self.counted or self.x_high - self.x_low < 1]


@dataclass(frozen=True, kw_only=True, slots=True)
class Chart:
    """One figure: lines or stacked bars on a plane, or a row per horizontal bar or interval, or only a text."""

    title: str
    value: str = ""  # text next to the chart's title
    legend: Sequence[tuple[str, str]] = ()  # (name, color)
    plane: Plane | None = None
    lines: Sequence[tuple[str, Sequence[Column], bool]] = ()  # (color, columns, True: each column has a dot too)
    tips: Sequence[tuple[Column, str]] = ()  # (where, tooltip); invisible stripes have the tooltips, without a script.
    # Stacked bars: (where, tooltip, parts), from bottom to top; a part is (color, lower y, upper y).
    stacks: Sequence[tuple[Column, str, Sequence[tuple[str, float, float]]]] = ()
    stack_width: float = 0.0  # width of a stacked bar, in drawing units
    bars: Sequence[Bar] = ()  # horizontal bars
    intervals: Sequence[Bar] = ()
    row_height: float = 0.0  # height of the row of a bar or interval, in drawing units
    text: str = ""  # text shown instead of a chart
    marks: Sequence[tuple[float, str, str]] = ()  # (x, tooltip, HTML id of the part of the page with details)
    last: str = ""  # the last number of each line, as a text
    note: str = ""  # explanation below the chart

    @property
    def is_flat(self) -> bool:
        """True if the chart shows only one value, because no line changes. A text is then as informative as the
        chart."""
        if self.stacks or self.text:
            return len(self.stacks) <= 1
        ys = [{y for c in columns for y in (c.low, c.high)} for _, columns, _ in self.lines]
        return bool(ys) and all(max(y) - min(y) <= 1e-9 * max(map(abs, y)) for y in ys)


def parted(charts: Iterable[Chart | None]) -> tuple[list[Chart], Table | None]:
    """Return the charts to draw, and a table with the values of the flat charts (None if no chart is flat)."""
    found = [chart for chart in charts if chart]
    rows = [[chart.title, chart.last or chart.text] for chart in found if chart.is_flat]
    return [chart for chart in found if not chart.is_flat], Table(["", "Value"], rows) if rows else None


def line_chart(
    title: str,
    series: Sequence[Series],
    *,
    x_label: str = "step",
    unit: str = "",
    y_max: float | None = None,
    dots: bool = False,
    note: str = "",
) -> Chart | None:
    """Return a chart with a line per series; None without points. The y axis begins at 0, or at the smallest value if
    that is negative. `dots`: points are drawn as dots, unless a line has more than MAX_DOTS."""
    drawn = [(s, columns) for s in series if (columns := s.columns())]
    if not drawn:
        return None
    everything = [c for _, columns in drawn for c in columns]
    low, high = min(0.0, *(c.low for c in everything)), y_max or max(c.high for c in everything)
    xs = [x for c in everything for x in (c.first, c.last)]
    texts: dict[float, tuple[Column, list[str]]] = {}  # x -> its column, and the tooltip's text for each series
    for s, columns in drawn:
        for column in columns:
            texts.setdefault(column.x, (column, []))[1].append(f"{s.name} {number(column.y)}{unit}")
    newest = [(s.name, next(y for _, y in reversed(s.points) if math.isfinite(y))) for s, _ in drawn]
    words = [f"{number(y)}{unit}" if len(newest) == 1 else f"{name} {number(y)}{unit}" for name, y in newest]
    return Chart(
        title=title,
        value=f"{words[0]} last" if len(drawn) == 1 else "",
        last=", ".join(words),
        legend=[(s.name, s.color) for s, _ in drawn] if len(drawn) > 1 else (),
        plane=Plane(x_low=min(xs), x_high=max(xs), y_ticks=ticks(low, high), x_label=x_label),
        lines=[(s.color, columns, (dots and len(columns) <= MAX_DOTS) or len(columns) == 1) for s, columns in drawn],
        tips=[(column, f"{_where(column, x_label)}: {', '.join(said)}") for column, said in texts.values()],
        note=note,
    )


def stacked_chart(title: str, layers: Sequence[Series], *, unit: str = "") -> Chart | None:
    """Return a chart with a bar at each x; the bar's parts are the layers, stacked. All layers must have the same x
    values. None if no value is above 0."""
    drawn = [(layer, thin(layer.points)) for layer in layers if any(y > 0 for _, y in layer.points)]
    if not drawn:
        return None
    columns = list(zip(*(columns for _, columns in drawn), strict=True))
    totals = [sum(c.y for c in column) for column in columns]
    spacing = (columns[-1][0].x - columns[0][0].x) / (len(columns) - 1) if len(columns) > 1 else 1.0
    low, high = columns[0][0].x - spacing / 2, columns[-1][0].x + spacing / 2
    plane = Plane(x_low=low, x_high=high, y_ticks=ticks(0.0, max(totals)))
    stacks = []
    for column, total in zip(columns, totals, strict=True):
        tops = list(itertools.accumulate(c.y for c in column))
        parts = [(s.color, top - c.y, top) for (s, _), c, top in zip(drawn, column, tops, strict=True)]
        told = ", ".join(f"{s.name} {number(c.y)}{unit}" for (s, _), c in zip(drawn, column, strict=True))
        stacks.append((column[0], f"{_where(column[0], 'step')}: {number(total)}{unit} ({told})", parts))
    return Chart(
        title=title,
        value=f"{number(sum(totals) / len(totals))}{unit} mean",
        last=f"{number(totals[-1])}{unit} ({told})",
        legend=[(s.name, s.color) for s, _ in drawn],
        plane=plane,
        stacks=stacks,
        stack_width=max(0.6, (plane.x(spacing) - plane.x(0)) * 0.82),
    )


def bar_chart(title: str, bars: Sequence[Bar], *, value: str = "") -> Chart | None:
    """Return a chart of horizontal bars, the longest first; None without bars."""
    if not bars:
        return None
    ordered = sorted(bars, key=lambda bar: (-bar.value, bar.name))
    row = min(26.0, 168 / len(ordered))
    height = TOP + row * len(ordered) + 4
    plane = Plane(x_low=0.0, x_high=ordered[0].value or 1.0, y_ticks=(), left=128.0, right=WIDTH - 52, height=height)
    return Chart(title=title, value=value, plane=plane, bars=ordered, row_height=row)


def interval_chart(title: str, rows: Sequence[Bar], *, value: str = "") -> Chart | None:
    """Return a chart with a row per estimate: a dot at its value, and a line over its interval. None without rows."""
    if not rows:
        return None
    ends = [v for r in rows for v in (r.value, r.low, r.high) if v is not None]
    slack, row = max(0.02, (max(ends) - min(ends)) * 0.08), 34.0
    marks = ticks(max(0.0, min(ends) - slack), min(1.0, max(ends) + slack))
    height = TOP + row * len(rows) + 26
    plane = Plane(x_low=marks[0], x_high=marks[-1], y_ticks=marks, left=114.0, right=WIDTH - 24, height=height)
    return Chart(title=title, value=value, plane=plane, intervals=rows, row_height=row)


def _where(column: Column, x_label: str) -> str:
    if column.first == column.last:
        return f"{x_label} {number(column.first)}"
    return f"{x_label}s {number(column.first)}–{number(column.last)}, mean"
