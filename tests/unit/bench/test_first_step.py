"""The arithmetic of `bench.first_step`, without a model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from bench.first_step import PARTS, added, contents, parts_of, table

METRICS = {"step_s": 7.0, "sync_s": 2.0, "rollout_s": 1.0, "learn_s": 4.0}
EVENTS: list[dict[str, Any]] = [
    {"event": "plan", "time": 103.0},
    {"event": "data", "time": 105.0},
    {"event": "begin", "time": 115.0},
    {"event": "sync", "time": 117.0, "parts": {"canary": 1.5}},
    {"event": "step", "time": 122.5, "loss": 0.0, "metrics": METRICS},
    {"event": "step", "time": 124.0, "loss": 0.0, "metrics": {"step_s": 1.5}},
]


def test_parts_add_up_to_the_end_of_the_first_step() -> None:
    found = parts_of(EVENTS, 100.0)
    assert found.pop("total_s") == 22.5
    assert found == {
        "imports_s": 3.0,
        "policy_s": 2.0,
        "engine_s": 10.0,
        "sync_s": 2.0,
        "rollout_s": 1.0,
        "learn_s": 4.0,
        "other_s": pytest.approx(0.5),
    }
    assert set(PARTS) == set(found)


def test_a_run_that_compiles_nothing_adds_no_graphs(tmp_path: Path) -> None:
    """Other files may come: torch writes what it has tuned."""
    graphs = tmp_path / "rollout-learner" / "torch" / "fxgraph" / "ab"
    graphs.mkdir(parents=True)
    assert contents(tmp_path) == {}
    (graphs / "one").write_bytes(b"123")
    cold = contents(tmp_path)
    assert added({}, cold) == cold == {"torch": {"bytes": 3, "files": 1, "fxgraph": 1}}
    (tmp_path / "rollout-learner" / "torch" / "tuned").write_bytes(b"12")
    (tmp_path / "vllm").mkdir()
    (tmp_path / "vllm" / "model").write_bytes(b"1")
    warm = contents(tmp_path)
    assert added(cold, warm) == {
        "torch": {"bytes": 2, "files": 1, "fxgraph": 0},
        "vllm": {"bytes": 1, "files": 1, "fxgraph": 0},
    }
    rows = [
        {"run": name, **parts_of(EVENTS, 100.0), "caches": after, "added": added(before, after)}
        for name, before, after in (("cold", {}, cold), ("warm-1", cold, warm))
    ]
    assert [line.split("|")[-3].strip() for line in table(rows).splitlines()[-2:]] == ["1", "0"]
