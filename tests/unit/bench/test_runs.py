"""The harness without vLLM: GPUs that a program hands on, how a run ends, and what is read of one that goes on."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from bench.runs import LearnerRun, read_events, steps_of, visible
from deploy.launch import Processes, supervised
from shared.errors import DeadlineError, ServerError


@pytest.mark.parametrize(
    ("allowed", "found"),
    [("", ["0", "2"]), ("5,6,7", ["5", "7"]), ("3, 1 ,0", ["3", "0"]), ("GPU-1a,GPU-2b,GPU-3c", ["GPU-1a", "GPU-3c"])],
)
def test_indices_are_of_what_is_visible(allowed: str, found: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """A benchmark hands on GPUs that it may use itself."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", allowed)
    assert visible(0, 2) == found


def started(processes: Processes, folder: Path, code: str) -> LearnerRun:
    log = folder / "run.log"
    process = processes.start("learner", [sys.executable, "-c", code], log=log)
    return LearnerRun(process=process, log=log, run_dir=folder / "run")


def test_a_run_that_fails_says_its_last_words(tmp_path: Path) -> None:
    with supervised() as processes:
        with pytest.raises(ServerError, match="exit code 3") as failed:
            started(processes, tmp_path, "print('no such model'); raise SystemExit(3)").events()
        assert "no such model" in failed.value.found


def test_a_run_that_does_not_end_is_stopped(tmp_path: Path) -> None:
    with supervised() as processes:
        run = started(processes, tmp_path, "import time; time.sleep(60)")
        with pytest.raises(DeadlineError):
            run.wait(0.3)
        assert run.process.popen.poll() is not None


def test_a_wait_ends_early_if_it_has_what_it_waited_for(tmp_path: Path) -> None:
    with supervised() as processes:
        run = started(processes, tmp_path, "import time; time.sleep(60)")
        run.wait(20.0, until=lambda: True)
        assert run.process.popen.poll() is None


def test_a_line_that_is_being_written_is_left_out(tmp_path: Path) -> None:
    assert read_events(tmp_path) == []
    step = '{"event": "step", "loss": 0.5, "metrics": {"step_s": 2.0}}\n'
    (tmp_path / "metrics.jsonl").write_text(step + '{"event": "sync", "seconds": 1.0}\n{"event": "st')
    events = read_events(tmp_path)
    assert [event["event"] for event in events] == ["step", "sync"]
    assert [(found["step_s"], found["loss"]) for found in steps_of(events)] == [(2.0, 0.5)]
