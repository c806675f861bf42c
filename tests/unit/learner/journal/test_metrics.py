"""`tools.metrics` declares what runs write, each number with its unit and meaning."""

from __future__ import annotations

import ast
import dataclasses
import json
from collections.abc import Iterable
from pathlib import Path

import pytest

import learner
from learner.records import StepResult, SyncReceipt
from learner.tasks.detection.metrics import METRICS, coco_ap
from learner.tasks.detection.task import EVALUATED
from learner.tasks.key_value import KeyValueTask
from tests.unit.learner.steps.test_ahead import Servers, ahead_config, patient, servers
from tests.unit.learner.steps.test_stage2 import stage2_config
from tests.unit.learner.trainer_world import make_config, run
from tools.metrics import (
    BUFFER,
    DETECTION,
    EVENTS,
    GROUPS,
    KEY_VALUE,
    LEARNING,
    ROLLOUTS,
    SECONDS,
    STAGE2,
    STEP_FIELDS,
    SYNC,
)

__all__ = ["patient", "servers"]  # fixtures


def names(*groups: Iterable[object]) -> set[str]:
    return {metric.name for group in groups for metric in group}  # type: ignore[attr-defined]


def test_every_event_is_explained() -> None:
    """Read from the source: what is given to `MetricsLog.write`."""
    root = Path(learner.__file__).parent
    written = {
        call.args[0].value
        for path in root.rglob("*.py")
        for call in ast.walk(ast.parse(path.read_text()))
        if isinstance(call, ast.Call) and ast.unparse(call.func) in ("log.write", "self.log.write", "self.write")
        if isinstance(call.args[0], ast.Constant)
    }
    assert {"step", "sync", "trackers"} < written
    assert written == set(EVENTS)


@pytest.mark.slow
def test_steps_of_every_source(
    servers: Servers, patient: None, tiny_text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stage 2 in both modes and both channels, with a short step, an evaluation and a checkpoint; then buffered
    rollouts. `patient` and `servers` stand in for what is slow."""
    settings = {"b_ratio": 0.5, "num_samples": 17, "max_steps": 4, "eval_steps": 2, "save_steps": 2}
    run(ahead_config(tiny_text, tmp_path / "ahead", **settings), monkeypatch)
    run(stage2_config(tiny_text, tmp_path / "within", **settings), monkeypatch)
    run(stage2_config(tiny_text, tmp_path / "unpacked", **settings, packing=False), monkeypatch)
    (tmp_path / "buffered").mkdir()
    run(
        make_config(tiny_text, tmp_path / "buffered", variant="rollout_matching_sft", max_steps=2, m_steps=2),
        monkeypatch,
    )
    written: dict[str, set[str]] = {"step": set(), "eval": set()}
    for path in tmp_path.glob("*/run/metrics.jsonl"):
        for line in map(json.loads, path.read_text().splitlines()):
            if line["event"] in written:
                written[line["event"]] |= {"drop/REASON" if m.startswith("drop/") else m for m in line["metrics"]}
    declared = names(SECONDS, LEARNING, ROLLOUTS, BUFFER, STAGE2)
    assert written["step"] - declared == set(), "not declared in tools/metrics.py"
    assert names(STAGE2, BUFFER, LEARNING) - written["step"] == set(), "declared, and nobody writes it"
    assert written["eval"] - names(DETECTION) == set()


def test_evaluations_of_pairs() -> None:
    computed = KeyValueTask.__new__(KeyValueTask).evaluate([])
    assert names(KEY_VALUE) == {"drop/REASON" if name.startswith("drop/") else name for name in computed}


def test_evaluations() -> None:
    assert names(DETECTION) == {"drop/REASON" if name.startswith("drop/") else name for name in EVALUATED}
    assert set(EVALUATED) > {*METRICS, *coco_ap([])}


def test_fields_of_steps_and_syncs() -> None:
    for record, declared in ((StepResult, STEP_FIELDS), (SyncReceipt, SYNC)):
        assert names(declared) == {field.name for field in dataclasses.fields(record)} - {"metrics"}


def test_each_metric_is_declared_once_with_a_meaning() -> None:
    for title, _, group in GROUPS:
        assert len(names(group)) == len(group), title
        assert all(metric.meaning for metric in group)
