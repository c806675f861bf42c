"""The benchmark's own arithmetic, and that its serverless part runs. Nothing here looks at a clock's verdict."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, get_args

import pytest
from rich.console import Console

from bench import adapters, ahead, first_token, straight_line, training
from bench.figures import Figure, save, show
from learner.records import Channel, SyncReceipt


def test_the_straight_line_is_measured_in_every_format() -> None:
    figures = straight_line.measure(num_rollouts=2, num_objects=3, passes=2)
    assert [len(figure.samples) for figure in figures] == [2, 2, 2, 2]
    assert all(figure.value > 0 for figure in figures)
    for word in ("index_map", "array", "tokens", "digits"):
        assert sum(word in figure.name for figure in figures) == 2


@pytest.mark.parametrize(("value", "at_least", "good"), [(2.0, True, True), (0.5, True, False), (0.5, False, True)])
def test_a_figure_knows_whether_it_is_good(value: float, at_least: bool, good: bool) -> None:
    assert Figure(name="x", value=value, unit="s", wanted=1.0, at_least=at_least).good is good
    assert Figure(name="x", value=value, unit="s").good is None


def test_a_run_is_written_with_its_circumstances_and_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    figure = Figure(name="speed", value=2.0, unit="m/s", wanted=1.0, samples=[1.0, 2.0, 3.0])
    run = json.loads(save("a", [figure], tmp_path).read_text())
    assert run["figures"][0]["good"] is True
    assert {"date", "commit", "hardware", "versions"} < run.keys()
    assert run["hardware"]["cores"] == os.cpu_count()
    monkeypatch.setenv("BENCH_COMMIT", "abc1234")
    assert json.loads(save("a", [figure], tmp_path).read_text())["commit"] == "abc1234"
    console = Console(record=True, width=100)
    show([figure], console)
    assert "1 to 3" in console.export_text()


def test_idle_is_what_is_neither_rollout_nor_computing_nor_sync() -> None:
    step = {"event": "step", "metrics": {"step_s": 2.0, "rollout_s": 1.0, "learn_s": 0.5, "sync_s": 0.3, "data_s": 0.2}}
    sync = {"event": "sync", "seconds": 0.25}
    events: list[Mapping[str, Any]] = [sync, step] * (training.WARM_UP_STEPS + 1)
    found = {figure.name: figure.value for figure in training.figures(events)}
    assert found["sync, all checks included"] == 0.25
    assert found["idle share of a step (not rollout, not computing, not sync)"] == pytest.approx(0.1)
    assert found["sync's share of a step"] == pytest.approx(0.15)


def test_resident_memory_of_this_process_is_there() -> None:
    assert training.resident_bytes(os.getpid()) > 10 << 20


def test_the_three_ways_are_simulated_and_told_apart() -> None:
    """R25, R32: every way learns what it rolls out; nothing here judges how fast."""
    steps = {way: ahead.simulate(way, num_steps=2, each_s=1e-4, sync_s=0.0) for way in get_args(ahead.Way)}
    assert [len(found) for found in steps.values()] == [2, 2, 2]
    assert all(step.channel == "B" and step.rollout_s > 0 < step.learn_s for step in steps["in turn"])


def test_ratios_of_overlap_are_of_the_steps_that_ran_on_rollouts() -> None:
    def step(channel: Channel, wall_s: float) -> ahead.Step:
        return ahead.Step(channel=channel, wall_s=wall_s, learn_s=1.0, rollout_s=1.0, sync_s=0.0)

    runs: dict[ahead.Way, list[ahead.Step]] = {
        "in turn": [step("B", 2.0)],
        "within the step": [step("B", 1.2), step("B", 1.2)],
        "ahead": [step("B", 1.0), step("A", 1.0), step("B", 1.0), step("B", 1.0)],
    }
    found = {figure.name: figure.value for figure in ahead.figures("x", runs)}
    assert found["x: step without its sync against rollout + learning, within the step"] == pytest.approx(0.6)
    assert found["x: learner busy, ahead"] == pytest.approx(1.0)
    assert found["x: Channel-B share, ahead"] == 0.75
    assert found["x: steps/s, ahead against in turn"] == pytest.approx(1.5)


def test_both_kinds_of_sync_stand_side_by_side() -> None:
    """R08: bytes and seconds of each, and what the adapter saves."""

    def receipt(mode: Literal["full", "adapter"], seconds: float, num_bytes: int) -> SyncReceipt:
        sizes = {"num_bytes": num_bytes, "num_tensors": 2}
        return SyncReceipt(ver=1, mode=mode, seconds=seconds, canary_gap=seconds / 10, canary_gap_max=0.1, **sizes)

    full = [receipt("full", s, 40 << 20) for s in (0.3, 0.5, 0.4)]
    adapter = [receipt("adapter", s, 1 << 20) for s in (0.1, 0.3, 0.2)]
    found = {figure.name: figure.value for figure in adapters.figures(full, adapter)}
    assert (found["full sync, merged"], found["adapter sync, rank 16"]) == (0.4, 0.2)
    assert (found["full sync, merged: bytes"], found["adapter sync, rank 16: bytes"]) == (40.0, 1.0)
    assert found["bytes of an adapter sync against a full one"] == pytest.approx(1 / 40)
    assert found["largest canary gap of an adapter sync"] == pytest.approx(0.03)


def test_the_first_token_comes_after_data_sync_and_rollout() -> None:
    """R02: what follows the token is no part of it, nor are the first steps."""
    step = {"event": "step", "metrics": {"step_s": 2.0, "data_s": 0.1, "sync_s": 0.3, "rollout_s": 0.2, "learn_s": 1.0}}
    slow = {"event": "step", "metrics": {"rollout_s": 9.0}}
    events: list[Mapping[str, Any]] = [slow] * first_token.WARM_UP_STEPS + [step, {"event": "sync", "seconds": 5.0}]
    assert first_token.figure("server", events).samples == [pytest.approx(0.6)]
