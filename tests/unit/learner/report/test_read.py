"""Run directories, whole, partial and damaged."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from learner.report.page import render
from learner.report.read import read_run, read_runs
from learner.report.scores import gain_between, progress_of
from shared.errors import DataError
from tests.unit.learner.report.fake_run import write_run


def test_reads_what_the_learner_wrote(tmp_path: Path) -> None:
    run = read_run(write_run(tmp_path / "run", steps=6, quality=((0, 0.4), (6, 0.9)), num_scenes=5))
    assert [step.global_step for step in run.steps] == [1, 2, 3, 4, 5, 6]
    assert [sync.receipt.ver for sync in run.syncs] == [1, 2, 3, 4, 5, 6]
    assert [(point.global_step, len(point.scenes)) for point in run.evals] == [(0, 5), (6, 5)]
    assert run.setting("custom", "trainer_variant") == "rollout_matching_sft"
    assert run.notes == ()


def test_a_cut_last_line_is_said_and_left_out(tmp_path: Path) -> None:
    path = write_run(tmp_path / "run", steps=4, quality=((0, 0.4),), num_scenes=3)
    metrics = path / "metrics.jsonl"
    metrics.write_text(metrics.read_text()[:-40])
    scenes = path / "eval" / "step_000000.jsonl"
    scenes.write_text(scenes.read_text() + '{"id": "x", "truth": [{"desc": "cat"}]}\n[1]\n{"id')
    run = read_run(path)
    assert len(run.steps) == 3
    assert len(run.evals[0].scenes) == 3
    assert run.notes == (
        "metrics.jsonl: 1 damaged line left out.",
        "eval/step_000000.jsonl: 3 damaged lines left out.",
    )


def test_a_repeated_step_counts_once_and_the_last_wins(tmp_path: Path) -> None:
    path = write_run(tmp_path / "run", steps=3, quality=(), num_scenes=1)
    again = {"event": "step", "global_step": 2, "loss": 42.0, "channel": "B", "metrics": {}}
    with (path / "metrics.jsonl").open("a") as file:
        file.write(json.dumps(again) + "\n")
    run = read_run(path)
    assert [step.global_step for step in run.steps] == [1, 2, 3]
    assert run.steps[1].loss == 42.0


@pytest.mark.parametrize("name", ["absent", "empty", "file"])
def test_no_run_is_a_typed_error(tmp_path: Path, name: str) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError) as caught:
        read_runs(tmp_path / name)
    assert str(tmp_path / name) in str(caught.value)
    assert caught.value.exit_code == 2


def test_a_directory_of_runs_shows_the_baseline_last(tmp_path: Path) -> None:
    for name in ("sft", "stage2", "another"):
        write_run(tmp_path / name, steps=1, quality=(), num_scenes=1)
    (tmp_path / "latest").symlink_to(tmp_path / "stage2")
    runs = read_runs(tmp_path)
    assert [run.name for run in runs.runs] == ["stage2", "another", "sft"]


def test_a_baseline_without_a_start_takes_the_main_runs(tmp_path: Path) -> None:
    write_run(tmp_path / "stage2", steps=2, quality=((0, 0.3), (2, 0.9)), num_scenes=8, images=tmp_path / "images")
    write_run(tmp_path / "sft", steps=2, quality=((2, 0.5),), num_scenes=8, images=tmp_path / "images")
    main, sft = progress_of(read_runs(tmp_path).runs)
    assert sft.borrowed
    assert sft.f1_before == main.f1_before
    assert sft.gain is not None
    assert not main.borrowed


def write_two_runs(folder: Path, *, with_test: bool) -> Path:
    """`ours` is evaluated on test scenes. `sft` is on validation scenes of other names, and on the test scenes once, as
    far as `with_test` says."""
    write_run(folder / "ours", steps=2, quality=((0, 0.3), (2, 0.9)), num_scenes=8, images=folder / "images")
    sft = write_run(folder / "sft", steps=2, quality=((0, 0.3), (2, 0.5)), num_scenes=8, images=folder / "images")
    with (sft / "config.yaml").open("a") as config:
        config.write("data: {val: val.jsonl, test: test.jsonl}\n")
    if with_test:
        (sft / "eval/test.jsonl").write_text((sft / "eval/step_000002.jsonl").read_text())
        with (sft / "metrics.jsonl").open("a") as events:
            events.write(json.dumps({"event": "test", "global_step": 2, "metrics": {"f1@0.5": 0.5}}) + "\n")
    for file in (sft / "eval").glob("step_*.jsonl"):
        file.write_text(file.read_text().replace('"id": "test-', '"id": "val-'))
    return folder


def test_runs_are_compared_on_the_same_scenes(tmp_path: Path) -> None:
    """A run that validates on scenes of its own is compared by its score of `data.test`."""
    main, sft = progress_of(read_runs(write_two_runs(tmp_path, with_test=True)).runs)
    assert sft.run.test is not None
    assert (sft.before, sft.after) == (main.before, sft.run.test)
    assert sft.run.test.metrics == {"f1@0.5": 0.5}
    lead = gain_between(sft.after, main.after)
    assert lead is not None
    assert lead.low is not None
    assert lead.num_scenes == 8


def test_runs_on_other_scenes_are_not_compared(tmp_path: Path) -> None:
    runs = read_runs(write_two_runs(tmp_path, with_test=False))
    main, sft = progress_of(runs.runs)
    assert gain_between(sft.after, main.after) is None
    page = render(runs)
    assert "evaluated on other scenes" in page
    assert "For comparison" not in page


def test_the_score_of_the_test_set_is_shown(tmp_path: Path) -> None:
    folder = write_two_runs(tmp_path, with_test=True)
    page = render(read_runs(folder / "sft"))
    assert "8 validation scenes" in page
    assert re.search(r"On 8 test scenes it is 0\.\d{3} \[", page)


@pytest.mark.parametrize(
    "line",
    [
        '{"event": "step"}',
        '{"event": "step", "global_step": 1, "loss": null, "metrics": {"missed": null, "drop/x": 2}}',
        '{"event": "step", "global_step": "one", "metrics": 3}',
        '{"event": "sync", "ver": 1}',
        '{"event": "eval", "global_step": 0, "metrics": {"f1@0.5": 0.5}}',
        '{"event": "rollout_call", "seeds": [1, 2]}',
        '{"event": ["step"]}',
        '{"event": "step", "global_step": 1, "loss": 1e308, "grad_norm": NaN, "metrics": {"step_s": Infinity}}',
        "null",
    ],
)
def test_strange_lines_still_give_a_page(tmp_path: Path, line: str) -> None:
    (tmp_path / "metrics.jsonl").write_text(line + "\n")
    assert "<main>" in render(read_runs(tmp_path))
