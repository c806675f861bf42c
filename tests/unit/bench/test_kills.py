"""Tests of which fault `bench.kills` makes next, and of what it says of those that it made."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench.kills import Row, choose, in_time, left, rows_before, spread
from shared.errors import DataError


def test_two_servers_are_hit_in_turn_and_never_both() -> None:
    assert choose(left([], 2, 2), num_serving=2, num_away=0) == "kill"
    assert choose(left([{"kind": "kill"}], 2, 2), num_serving=2, num_away=0) == "freeze"
    assert choose(["kill"], num_serving=1, num_away=1) is None
    assert choose([], num_serving=5, num_away=0) is None


def test_killed_servers_start_beside_the_next_faults() -> None:
    """Five servers, of which a killed one is away for seven faults: freezes fill the time, and nothing is left."""
    rows: list[Row] = []
    away: list[int] = []  # each that starts is back then
    clock, waited = 0, 0
    while kinds := left(rows, 10, 10):
        away = [back for back in away if back > clock]
        kind = choose(kinds, num_serving=5 - len(away), num_away=len(away))
        clock += 1
        if kind is None:
            waited += 1
            continue
        rows.append({"kind": kind})
        if kind == "kill":
            away.append(clock + 7)
        assert len(away) <= 4, "one server serves"
    assert [row["kind"] for row in rows].count("kill") == 10
    assert len(rows) == 20
    assert [row["kind"] for row in rows[:4]] == ["kill", "kill", "kill", "freeze"]
    assert waited <= 7, "only the last kills have no freeze beside their starts"


def test_faults_of_other_options_are_not_gone_on_with(tmp_path: Path) -> None:
    out = tmp_path / "kills.json"
    options = {"servers": 2, "infer_timeout_s": 8.0, "gpu": False}
    assert rows_before(out, options) == []
    out.write_text(json.dumps({**options, "by_fault": {}, "rows": [{"kind": "kill"}]}))
    assert rows_before(out, options) == [{"kind": "kill"}]
    with pytest.raises(DataError) as refused:
        rows_before(out, {**options, "servers": 5})
    assert (refused.value.found, refused.value.wanted) == ("servers 2", "servers 5")


def test_figures_per_kind_with_median_and_largest() -> None:
    rows: list[Row] = [
        {"kind": "kill", "away": 0, "whole_step_s": 1.0, "start_s": 30.0, "joined_s": 4.0},
        {"kind": "kill", "away": 2, "whole_step_s": 6.0, "start_s": 20.0, "joined_s": 3.0},
        {"kind": "freeze", "away": 0, "whole_step_s": 9.0, "joined_s": 1.0},
    ]
    found = spread(rows)
    assert found["kill"]["number"] == 2
    assert found["kill"]["start_s"] == {"median": 25.0, "largest": 30.0}
    assert "start_s" not in found["freeze"]
    assert "away" not in found["kill"]
    assert "1 of 2" in in_time(rows, "kill", 5.0)
    assert "1 of 1" in in_time(rows, "freeze", 9.0)
