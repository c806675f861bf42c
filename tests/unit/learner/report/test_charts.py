"""Axes and charts: nothing is lost in thinning, ticks are round and hold the data."""

from __future__ import annotations

import itertools
import math
import xml.etree.ElementTree as ET

import pytest
from hypothesis import given
from hypothesis import strategies as st

from learner.report.charts import (
    MAX_COLUMNS,
    Bar,
    Series,
    bar_chart,
    interval_chart,
    line_chart,
    number,
    parted,
    stacked_chart,
    thin,
    ticks,
)
from learner.report.page import TEMPLATES

values = st.floats(-1e6, 1e6) | st.just(math.nan)


@given(st.lists(values, max_size=500))
def test_thinning_keeps_every_finite_point(ys: list[float]) -> None:
    points = [(float(x), y) for x, y in enumerate(ys)]
    finite = [y for y in ys if math.isfinite(y)]
    columns = thin(points)
    assert len(columns) <= MAX_COLUMNS
    assert [c.first for c in columns] == sorted(c.first for c in columns)
    if finite:
        assert min(c.low for c in columns) == min(finite)
        assert max(c.high for c in columns) == max(finite)
    if len(finite) <= MAX_COLUMNS:
        assert [c.y for c in columns] == finite


@pytest.mark.parametrize(("last", "marks"), [(1, [0, 1]), (4, [0, 1, 2, 3, 4]), (1000, [0, 200, 400, 600, 800, 1000])])
@pytest.mark.parametrize("name", ["step", "reward"])
def test_the_last_step_has_its_number_whatever_the_axis_is_called(last: int, marks: list[int], name: str) -> None:
    chart = line_chart("t", [Series("s", [(0, 1.0), (last, 2.0)], "a")], x_label=name)
    assert chart is not None
    assert chart.plane is not None
    assert chart.plane.x_ticks() == marks
    svg = ET.fromstring(str(TEMPLATES.get_template("charts.html").module.chart(chart))).find("svg")
    assert svg is not None
    numbers = {text.text: float(text.attrib["x"]) for text in svg.iter("text") if text.attrib["class"] == "tick mid"}
    (label,) = (text for text in svg.iter("text") if text.text == name)
    assert label.attrib["class"] == "tick end"
    assert float(label.attrib["x"]) < min(numbers.values()), "it ends before the first number"
    assert f"{last:,}" in numbers


@given(st.floats(-1e5, 1e5), st.floats(1e-6, 1e5))
def test_ticks_hold_the_range_at_even_steps(low: float, span: float) -> None:
    high = low + span
    marks = ticks(low, high)
    slack = 1e-6 * max(abs(low), abs(high), 1e-6)
    assert marks[0] <= low + slack
    assert marks[-1] >= high - slack
    assert 2 <= len(marks) <= 8
    steps = [b - a for a, b in itertools.pairwise(marks)]
    assert max(steps) == pytest.approx(min(steps), rel=1e-3)


@pytest.mark.parametrize(("low", "high"), [(-2e-18, 3e-17), (0.0, 1e-13), (1.0, 1.0 + 2e-16), (-3.0, -3.0 + 5e-16)])
def test_ticks_of_float_noise_are_apart(low: float, high: float) -> None:
    """A `grpo` run whose answers are all worth the same has a loss of about 1e-17. Its report failed."""
    marks = ticks(low, high)
    assert marks[0] <= low + 1e-9 * abs(low)
    assert marks[-1] >= high - 1e-9 * abs(high)
    assert 2 <= len(marks) <= 8
    assert len(set(marks)) == len(marks)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.0, "0"),
        (0.21253, "0.213"),
        (1.5, "1.5"),
        (12.345, "12.3"),
        (2127.4, "2,127"),
        (51_234.0, "51.2k"),
        (8.04e9, "8.04G"),
        (0.00052, "5.2e-4"),
        (-3.0, "-3"),
        (math.nan, "–"),
    ],
)
def test_numbers_have_three_digits(value: float, text: str) -> None:
    assert number(value) == text


def test_charts_are_well_formed_and_named() -> None:
    points = [(float(x), x * 0.1) for x in range(300)]
    for chart in (
        line_chart("A < B", [Series("a", points, "after"), Series("b", points[:5], "other")]),
        line_chart("A < B", [Series("one", [(3.0, 7.0)], "after")]),
        stacked_chart("A < B", [Series("a", points, "learn"), Series("b", points, "sync")]),
        bar_chart("A < B", [Bar("x & y", 3, "other")]),
        interval_chart("A < B", [Bar("before", 0.4, "before", 0.3, 0.5), Bar("after", 0.4, "after")]),
    ):
        assert chart is not None
        drawing = ET.fromstring(TEMPLATES.get_template("charts.html").module.chart(chart)).find("svg")
        assert drawing is not None
        assert drawing.get("aria-label") == "A < B"
        assert drawing.get("role") == "img"


def test_without_points_there_is_no_chart() -> None:
    assert line_chart("x", [Series("a", [(1.0, math.nan)], "after")]) is None
    assert stacked_chart("x", [Series("a", [(1.0, 0.0)], "learn")]) is None
    assert bar_chart("x", []) is None
    assert interval_chart("x", []) is None


def test_a_spread_is_a_band_around_the_line() -> None:
    """This holds too where points are merged, and where some are not numbers."""
    points = [(float(x), math.nan if x == 3 else x / 10) for x in range(200)]
    columns = Series("reward", points, "after", spread=[0.25] * 200).columns()
    assert len(columns) <= MAX_COLUMNS
    for column in columns:
        assert (column.y - column.low, column.high - column.y) == (pytest.approx(0.25), pytest.approx(0.25))
    plain = Series("reward", points[:3], "after").columns()
    assert all(column.low == column.y == column.high for column in plain)


def test_charts_that_show_one_value_are_flat() -> None:
    rising = line_chart("rising", [Series("a", [(0.0, 1.0), (1.0, 2.0)], "after")])
    constant = line_chart("constant", [Series("a", [(0.0, 0.1), (1.0, 0.1)], "after")], unit=" s")
    dot = line_chart("dot", [Series("a", [(0.0, 1.0)], "after"), Series("b", [(0.0, 2.0)], "other")])
    mixed = line_chart("mixed", [Series("a", [(0.0, 1.0)], "after"), Series("b", [(0.0, 1.0), (1.0, 3.0)], "other")])
    one = stacked_chart("stack", [Series("a", [(1.0, 2.0)], "after")], unit=" s")
    bars = bar_chart("bars", [Bar("a", 1.0, "after")])
    shown, flat = parted([rising, None, constant, dot, mixed, one, bars])
    assert [chart.title for chart in shown] == ["rising", "mixed", "bars"]
    assert flat is not None
    assert flat.rows == [["constant", "0.1 s"], ["dot", "a 1, b 2"], ["stack", "2 s (a 2 s)"]]
    assert parted([rising])[1] is None
