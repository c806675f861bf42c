"""A disk that is full or read-only (R15, R16): the typed error, no traceback, and what was written before is whole.

(Checkpoints: `test_checkpoint.py`.)
"""

from __future__ import annotations

import json
import logging
import shutil
from pathlib import Path
from typing import Any

import pytest
import typer

from deploy.demo import build_data
from learner.__main__ import _ends, main
from learner.detector.answers import Answers
from learner.journal.log import MetricsLog, log_to_file
from learner.report.page import write_report
from learner.run.checkpoint import verify
from learner.run.files import AppendedLines, write_atomically
from learner.wiring import build
from shared.config.parse import write_yaml
from shared.errors import OutputError
from tests.full_disk import no_file_larger_than
from tests.runs import steps
from tests.unit.learner.config.examples import minimal
from tests.unit.learner.report.fake_run import write_run
from tests.unit.learner.trainer_world import make_config, run

CHECKPOINT = Path(__file__).parents[4] / "deploy" / "demo" / "checkpoint"

# ---- files -----------------------------------------------------------------------------------------------------------


def test_a_line_is_written_whole_or_not_at_all(tmp_path: Path) -> None:
    path = tmp_path / "lines"
    lines = AppendedLines(path)
    lines.append("a" * 60)
    with no_file_larger_than(100), pytest.raises(OutputError) as caught:
        lines.append("b" * 60)
    assert str(path) in caught.value.found
    assert path.read_text() == "a" * 60 + "\n"
    lines.append("c")
    lines.close()
    assert path.read_text().split() == ["a" * 60, "c"]


def test_a_line_that_a_kill_cut_short_spoils_no_other(tmp_path: Path) -> None:
    path = tmp_path / "lines"
    path.write_text('{"a": 1}\n{"b": ')
    lines = AppendedLines(path)
    lines.append('{"c": 3}')
    lines.close()
    assert path.read_text().splitlines() == ['{"a": 1}', '{"b": ', '{"c": 3}']


def test_a_file_that_is_removed_goes_on_in_a_new_one_and_says_so_once(tmp_path: Path) -> None:
    """Its lines went into a file that has no name any more, without a word."""
    said: list[str] = []
    path = tmp_path / "run/lines"
    path.parent.mkdir()
    lines = AppendedLines(path, tell=said.append)
    lines.append("a")
    shutil.rmtree(path.parent)
    lines.append("b")
    lines.append("c")
    assert path.read_text().split() == ["b", "c"]
    assert len(said) == 1
    assert str(path) in said[0]
    shutil.rmtree(path.parent)
    path.parent.write_text("a file where the folder was")
    with pytest.raises(OutputError, match=r"run/lines"):
        lines.append("d")
    lines.close()


def test_a_device_without_space() -> None:
    lines = AppendedLines(Path("/dev/full"))
    with pytest.raises(OutputError, match="No space left"):
        lines.append("a")
    lines.close()


def test_a_file_that_can_t_be_replaced_stays(tmp_path: Path) -> None:
    path = tmp_path / "state.json"
    write_atomically(path, "before")
    with no_file_larger_than(100), pytest.raises(OutputError):
        write_atomically(path, "x" * 200)
    assert [file.name for file in tmp_path.iterdir()] == ["state.json"]
    assert path.read_text() == "before"


def test_a_report_on_a_full_disk_leaves_the_last_one(tmp_path: Path) -> None:
    write_run(tmp_path, steps=3, num_scenes=1)
    (tmp_path / "report.html").write_text("before")
    with no_file_larger_than(1000), pytest.raises(OutputError, match=r"report\.html"):
        write_report(tmp_path)
    assert (tmp_path / "report.html").read_text() == "before"
    assert write_report(tmp_path).stat().st_size > 1000


def test_a_log_that_is_removed_goes_on_in_a_new_one(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    before = {name: list(logging.getLogger(name).handlers) for name in ("learner", "shared")}
    path = log_to_file(tmp_path / "run", 0)
    shutil.rmtree(tmp_path / "run")
    logging.getLogger("learner").warning("what nobody reads")  # there is no folder for it yet
    (tmp_path / "run").mkdir()
    logging.getLogger("learner").warning("what somebody reads")
    assert [line.rpartition(": ")[2] for line in path.read_text().splitlines()] == ["what somebody reads"]
    assert "Traceback" not in capfd.readouterr().err
    for name, handlers in before.items():
        logging.getLogger(name).handlers[:] = handlers


def test_a_log_that_can_t_be_written_says_nothing(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Python's own handler would print a traceback for each line."""
    before = {name: list(logging.getLogger(name).handlers) for name in ("learner", "shared")}
    path = log_to_file(tmp_path, 0)
    with no_file_larger_than(0):
        for _ in range(3):
            logging.getLogger("learner").warning("what nobody reads")
    assert path.stat().st_size == 0
    assert "Traceback" not in capfd.readouterr().err
    for name, handlers in before.items():
        logging.getLogger(name).handlers[:] = handlers


# ---- a run -----------------------------------------------------------------------------------------------------------


def test_a_disk_that_becomes_full_costs_the_run_no_step(
    tiny_text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The metrics of step 2 find no space: the error says so, step 2 is saved, and the run goes on from there."""
    config = make_config(tiny_text, tmp_path, max_steps=3, num_samples=8)
    run_dir, write = Path(config.training.output_dir), MetricsLog.write

    def on_a_full_disk(self: MetricsLog, event: str, fields: Any, *, step: int | None = None) -> None:
        full = event == "step" and step == 2
        with no_file_larger_than((run_dir / "metrics.jsonl").stat().st_size + 10 if full else 1 << 40):
            write(self, event, fields, step=step)

    with monkeypatch.context() as patch:
        patch.setattr(MetricsLog, "write", on_a_full_disk)
        with pytest.raises(OutputError, match=r"metrics\.jsonl"):
            run(config, monkeypatch)
    assert steps(run_dir) == [1]
    verify(run_dir / "checkpoint-2")
    resumed = make_config(tiny_text, tmp_path, max_steps=3, num_samples=8, resume_from_checkpoint="latest")
    run(resumed, monkeypatch)
    assert steps(run_dir) == [1, 3]
    assert all(json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines())


def test_a_folder_that_is_removed_during_a_run_is_said_once(
    tiny_text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """What is measured later is in a new folder, the log file too, and the checkpoint of the end."""
    config = make_config(tiny_text, tmp_path, max_steps=3, num_samples=8, save_on_end=True)
    run_dir, write = Path(config.training.output_dir), MetricsLog.write

    def with_a_folder_that_goes(self: MetricsLog, event: str, fields: Any, *, step: int | None = None) -> None:
        if event == "step" and step == 2:
            shutil.rmtree(run_dir)
        write(self, event, fields, step=step)

    monkeypatch.setattr(MetricsLog, "write", with_a_folder_that_goes)
    run(config, monkeypatch)
    assert steps(run_dir) == [2, 3]
    verify(run_dir / "checkpoint-3")
    assert capsys.readouterr().out.count("metrics.jsonl was removed") == 1


@pytest.mark.parametrize("where", ["a file", "read-only"])
def test_a_folder_that_can_t_be_written_is_said_before_the_model_is_loaded(
    tiny_text: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    where: str,
) -> None:
    """/sys takes no folder, from root neither."""
    (tmp_path / "a file").write_text("")
    folder = tmp_path / "a file" / "run" if where == "a file" else Path("/sys/rollout-matching/run")
    config = make_config(tiny_text, tmp_path, max_steps=1, output_dir=str(folder))
    monkeypatch.setattr(build, "load_policy", None)
    with pytest.raises(typer.Exit) as caught:
        _ends(lambda: build.train(config, environment={}))()
    said = capsys.readouterr().err
    assert caught.value.exit_code == 2
    assert "training.output_dir: " in said
    assert (str(folder.parent) if where == "a file" else "/sys") in said
    assert "Traceback" not in said


# ---- commands --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def scenes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("scenes")
    build_data.build(build_data.Build(train=0, val=0, test=2), folder)
    return folder


@pytest.mark.parametrize("command", ["calibrate", "evaluate", "find-missing", "recipe"])
def test_a_folder_that_cannot_be_written_is_said_before_a_model_answers(
    scenes: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], command: str
) -> None:
    """Answers to all images were thrown away at the end."""
    (tmp_path / "file").touch()
    monkeypatch.setattr(Answers, "__enter__", None)  # a model that answers would be an error
    some, model, out = str(scenes / "test.jsonl"), ["--model", str(CHECKPOINT)], ["--out", str(tmp_path / "file/out")]
    write_yaml(tmp_path / "run.yaml", {**minimal(), "data": {"train": some}})
    arguments = {
        "calibrate": ["calibrate", some, *model, *out],
        "evaluate": ["evaluate", some, "--model", f"ours={CHECKPOINT}", *out],
        "find-missing": ["find-missing", "suggest", some, *model, *out],
        "recipe": ["recipe", "--only-measure", "--config", str(tmp_path / "run.yaml"), "--json", out[1]],
    }
    assert main(arguments[command]) == 2
    told = capsys.readouterr().err
    assert ("OutputError" in told, str(tmp_path / "file") in told) == (True, True)


def test_a_full_disk_costs_no_table(scenes: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What took hours to measure is at least on the terminal."""
    (tmp_path / "none.json").write_text("[]")
    arguments = ["evaluate", str(scenes / "test.coco.json"), "--predictions", f"a={tmp_path / 'none.json'}"]
    with no_file_larger_than(16):
        assert main([*arguments, "--out", str(tmp_path / "out")]) == 2
    told = capsys.readouterr().err
    assert ("F1@0.5" in told, "OutputError" in told) == (True, True)
