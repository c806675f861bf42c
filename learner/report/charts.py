"""Small charts and tables as records: lines with bands, stacked bars, horizontal bars, intervals.

In: series of numbers. Out: a `Chart` for the macro of that name in `templates/charts.html`. It draws inline SVG with a
title, a legend and a tooltip for every point. Colors are names of the page's CSS variables (`--c-NAME`), so a
chart follows the light or dark scheme. Points that are not finite are left out. A chart without points is None.

All drawings are `WIDTH` units wide and shown at about one pixel per unit, so text keeps its size.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

WIDTH, HEIGHT = 380.0, 190.0
LEFT, RIGHT, TOP, BOTTOM = 44.0, 10.0, 10.0, 24.0
MAX_COLUMNS = 90  # more points than this are drawn as means of neighbours, with their range
ROUNDING = 1e-12  # relative difference up to which two numbers are equal
MAX_DOTS = 45  # a line with more points than this is drawn without dots
Point = tuple[float, float]


@dataclass(frozen=True, slots=True)
class Series:
    """Points in the order of x. `spread`: each point's distance to the edges of a band around the line; empty: no
    band."""

    name: str
    points: Sequence[Point]
    color: str
    spread: Sequence[float] = ()

    def columns(self) -> list[Column]:
        """Return the points, thinned, as columns. With a spread, a column's range is its mean minus and plus the
        spread."""
        found = thin(self.points)
        if not self.spread:
            return found
        spreads = thin([(x, d if math.isfinite(y) else y) for (x, y), d in zip(self.points, self.spread, strict=True)])
        return [replace(c, low=c.y - d.y, high=c.y + d.y) for c, d in zip(found, spreads, strict=True)]


@dataclass(frozen=True, slots=True)
class Bar:
    """One bar of `bar_chart`, or one row of `interval_chart` if it has bounds."""

    name: str
    value: float
    color: str
    low: float | None = None
    high: float | None = None


@dataclass(frozen=True, slots=True)
class Table:
    """A table. Each cell is a text, or a pair of a text and a text in small type after it."""

    head: Sequence[str | tuple[str, str]]
    rows: Sequence[Sequence[str | tuple[str, str]]]


@dataclass(frozen=True, kw_only=True, slots=True)
class Column:
    """Neighbouring points drawn as one: mean x, mean, least and greatest y, and the first and last x."""

    x: float
    y: float
    low: float
    high: float
    first: float
    last: float


def thin(points: Sequence[Point]) -> list[Column]:
    """Return at most MAX_COLUMNS columns, in order; every finite point is in exactly one."""
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
    """Format a number: three significant digits, thousands as k, millions as M; an en dash if there is no number."""
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
    """Return about `count` + 1 round numbers at equal distances, the first at most `low`, the last at least `high`."""
    if high - low <= ROUNDING * max(abs(low), abs(high)):  # equal, or different only by rounding of floats
        high = low + (abs(low) or 1.0)
    raw = (high - low) / count
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(power * factor for factor in (1, 2, 2.5, 5, 10) if power * factor >= raw * 0.999)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    digits = 12 + max(0, -math.floor(math.log10(step)))  # enough digits also for a loss of 1e-17
    return [round(i * step, digits) for i in range(first, last + 1)]


@dataclass(frozen=True, kw_only=True, slots=True)
class Plane:
    """The area of a chart: maps data coordinates to drawing units, and has the axes."""

    x_low: float
    x_high: float
    y_ticks: Sequence[float]
    x_label: str = "step"
    left: float = LEFT
    right: float = WIDTH - RIGHT
    top: float = TOP
    height: float = HEIGHT
    counted: bool = True  # x counts something, such as steps: it has whole numbers

    def x(self, value: float) -> float:
        span = self.x_high - self.x_low or 1.0
        return self.left + (value - self.x_low) / span * (self.right - self.left)

    def y(self, value: float) -> float:
        low, high = self.y_ticks[0], self.y_ticks[-1]
        return self.height - BOTTOM - (value - low) / (high - low) * (self.height - TOP - BOTTOM)

    def x_ticks(self) -> list[float]:
        """Return ticks of x. If x counts something, only whole numbers are ticks, unless x spans less than 1."""
        marks = [t for t in ticks(self.x_low, self.x_high, 5) if self.x_low <= t <= self.x_high]
        return [t for t in marks if t == int(t) or not self.counted or self.x_high - self.x_low < 1]


@dataclass(frozen=True, kw_only=True, slots=True)
class Chart:
    """One figure: lines or stacked bars on a plane, or one row of `row_height` per bar or interval, or only text."""

    title: str
    value: str = ""  # stands beside the title
    legend: Sequence[tuple[str, str]] = ()  # (name, color)
    plane: Plane | None = None
    lines: Sequence[tuple[str, Sequence[Column], bool]] = ()  # (color, columns, True: each column has a dot too)
    tips: Sequence[tuple[Column, str]] = ()  # tooltips on invisible stripes, so no script is needed
    stacks: Sequence[tuple[Column, str, Sequence[tuple[str, float, float]]]] = ()  # (x, tip, parts (color, low, high))
    stack_width: float = 0.0
    bars: Sequence[Bar] = ()
    intervals: Sequence[Bar] = ()
    row_height: float = 0.0
    text: str = ""
    marks: Sequence[tuple[float, str, str]] = ()  # (x, tooltip, id of the place on the page that says more)
    last: str = ""  # the newest number of each line, in words
    note: str = ""  # an explanation below the drawing

    @property
    def is_flat(self) -> bool:
        """True if no line changes, so that `last` says as much as the drawing."""
        if self.stacks or self.text:
            return len(self.stacks) <= 1
        ys = [{y for c in columns for y in (c.low, c.high)} for _, columns, _ in self.lines]
        return bool(ys) and all(max(y) - min(y) <= 1e-9 * max(map(abs, y)) for y in ys)


def parted(charts: Iterable[Chart | None]) -> tuple[list[Chart], Table | None]:
    """Return the charts of lines that change, and a table of the last values of the other charts."""
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
    """Draw one line per series. The y axis begins at 0, or below. `dots`: each point is a dot, unless there are too
    many."""
    drawn = [(s, columns) for s in series if (columns := s.columns())]
    if not drawn:
        return None
    everything = [c for _, columns in drawn for c in columns]
    low, high = min(0.0, *(c.low for c in everything)), y_max or max(c.high for c in everything)
    xs = [x for c in everything for x in (c.first, c.last)]
    texts: dict[float, tuple[Column, list[str]]] = {}  # by x: its column, and a tooltip line for each series
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
    """Draw a bar at each x, with one part per layer, stacked. All layers have the same x values."""
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
    """Draw horizontal bars, one per name, longest first."""
    if not bars:
        return None
    ordered = sorted(bars, key=lambda bar: (-bar.value, bar.name))
    row = min(26.0, 168 / len(ordered))
    height = TOP + row * len(ordered) + 4
    plane = Plane(x_low=0.0, x_high=ordered[0].value or 1.0, y_ticks=(), left=128.0, right=WIDTH - 52, height=height)
    return Chart(title=title, value=value, plane=plane, bars=ordered, row_height=row)


def interval_chart(title: str, rows: Sequence[Bar], *, value: str = "") -> Chart | None:
    """Draw one row per estimate: a dot at its value and a line over its interval, on one axis."""
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
