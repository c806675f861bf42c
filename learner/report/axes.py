"""The frame of a chart: number formats, round ticks, thinning, and the plane that maps data to the drawing.

All drawings are `WIDTH` units wide and shown at about one pixel per unit, so that text keeps its size.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from learner.report.markup import Html, el, join

WIDTH, HEIGHT = 380.0, 190.0
LEFT, RIGHT, TOP, BOTTOM = 44.0, 10.0, 10.0, 24.0
MAX_COLUMNS = 90  # more points than this are drawn as means of neighbours, with their range
Point = tuple[float, float]


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
    """At most MAX_COLUMNS columns, in order; every finite point is in exactly one."""
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
    """Three significant digits, thousands as k, millions as M; an en dash where there is no number."""
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
    decimals = max(0, 2 - math.floor(math.log10(abs(value)))) if abs(value) >= 1 else 3
    text = f"{value:,.{decimals}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


def ticks(low: float, high: float, count: int = 4) -> list[float]:
    """Round numbers from at or below `low` to at or above `high`, about `count` steps apart."""
    if high <= low:
        high = low + (abs(low) or 1.0)
    raw = (high - low) / count
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(power * factor for factor in (1, 2, 2.5, 5, 10) if power * factor >= raw * 0.999)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [round(i * step, 12) for i in range(first, last + 1)]


@dataclass(frozen=True, kw_only=True, slots=True)
class Plane:
    """Data coordinates to drawing units."""

    x_low: float
    x_high: float
    y_ticks: tuple[float, ...]
    height: float = HEIGHT

    def x(self, value: float) -> float:
        span = self.x_high - self.x_low or 1.0
        return LEFT + (value - self.x_low) / span * (WIDTH - LEFT - RIGHT)

    def y(self, value: float) -> float:
        low, high = self.y_ticks[0], self.y_ticks[-1]
        return self.height - BOTTOM - (value - low) / (high - low) * (self.height - TOP - BOTTOM)

    def frame(self, x_label: str) -> Html:
        """Grid lines, tick labels and the name of the x axis. Whole numbers on x: steps and versions are counted."""
        parts = [
            join(
                el("line", cls="grid", x1=LEFT, x2=WIDTH - RIGHT, y1=self.y(tick), y2=self.y(tick)),
                el("text", number(tick), cls="tick end", x=LEFT - 8, y=self.y(tick) + 3.5),
            )
            for tick in self.y_ticks
        ]
        base = self.height - 6
        whole = [t for t in ticks(self.x_low, self.x_high, 5) if self.x_low <= t <= self.x_high and t == int(t)]
        room = [t for t in whole if self.x(t) < WIDTH - RIGHT - 8 * len(x_label)]
        parts += [el("text", number(tick), cls="tick mid", x=self.x(tick), y=base) for tick in room]
        parts.append(el("text", x_label, cls="tick end", x=WIDTH - RIGHT, y=base))
        return join(*parts)


def plane(xs: Sequence[float], low: float, high: float, *, pad: float = 0.0) -> Plane:
    """The plane that holds `xs` and [low, high]; `pad` is added on both ends of x, for bars."""
    return Plane(x_low=min(xs) - pad, x_high=max(xs) + pad, y_ticks=tuple(ticks(low, high)))
