"""Runs of a comparison: slots, time limits, results that are there already."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from bench.experiment.runner import Experiment, Slot, run_all
from bench.runs import LearnerRun
from deploy.launch import Process, Processes, supervised


def python(processes: Processes, code: str) -> Process:
    return processes.start("python", [sys.executable, "-c", code])


@dataclass(frozen=True)
class Job:
    name: str
    code: str

    def start(self, processes: Processes, folder: Path) -> LearnerRun:
        return LearnerRun(process=python(processes, self.code), log=folder / "log", run_dir=folder)


def test_slots_run_everything_side_by_side_and_report_how_it_ended(tmp_path: Path) -> None:
    jobs = [Job("good", "pass"), Job("bad", "raise SystemExit(3)"), Job("slow", "import time; time.sleep(60)")]
    ends: dict[str, int | None] = {}
    left = list(jobs)
    began = time.monotonic()
    with supervised() as processes:
        run_all(
            [Slot(), Slot()],
            next_run=lambda: left.pop(0) if left else None,
            start=lambda job, slot: job.start(processes, tmp_path),
            ended=lambda job, code: ends.update({job.name: code}),
            deadline=began + 30.0,
            run_limit_s=2.0,
        )
    assert ends == {"good": 0, "bad": 3, "slow": None}
    assert time.monotonic() - began < 20.0


@pytest.mark.slow
def test_at_the_deadline_what_runs_is_stopped(tmp_path: Path) -> None:
    """All together, however long each takes to end."""
    stubborn = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(60)"
    left, ends = [Job(str(i), stubborn) for i in range(8)], list[str]()
    deadline = time.monotonic() + 1.0
    with supervised() as processes:
        run_all(
            [Slot() for _ in range(8)],
            next_run=lambda: left.pop() if left else None,
            start=lambda job, slot: job.start(processes, tmp_path),
            ended=lambda job, code: ends.append(job.name),
            deadline=deadline,
            run_limit_s=60.0,
        )
        assert all(process.popen.poll() is not None for process in processes.started)
    assert time.monotonic() - deadline < 6.0, "a second for all, not for each"
    assert ends == []


@dataclass(frozen=True)
class Named:
    folder: str
    code: str
    first: str = ""

    def result(self, out: Path) -> Path:
        return out / "results" / "kind" / f"{self.folder}.json"


def experiment(folder: Path, seconds: float = 30.0) -> Experiment:
    made = Experiment(out=folder / "out", work=folder / "work", deadline=time.monotonic() + seconds)
    made.make_folders()
    return made


def compare(made: Experiment, runs: Sequence[Named], **options: Any) -> list[str]:
    """The folders of the runs that were started, in order; a result holds its run's code."""
    started: list[str] = []
    with supervised() as processes:

        def start(run: Named, slot: Slot[Named]) -> LearnerRun:
            started.append(run.folder)
            folder, log = made.run_dir(run), made.runs_dir / f"{run.folder}.log"
            assert not folder.exists(), "what an interrupted run left is removed"
            folder.mkdir()
            process = processes.start("run", [sys.executable, "-c", run.code], log=log)
            return LearnerRun(process=process, log=log, run_dir=folder)

        def keep(run: Named) -> None:
            run.result(made.out).write_text(run.code)

        made.compare([Slot[Named](), Slot[Named]()], runs, start=start, keep=keep, **options)
    return started


def test_what_has_a_result_is_not_done_again_and_a_failure_keeps_its_last_words(tmp_path: Path) -> None:
    made = experiment(tmp_path)
    runs = [Named("good", "pass"), Named("bad", "raise SystemExit('no such thing')")]
    assert compare(made, runs) == ["good", "bad"]
    assert runs[0].result(made.out).is_file()
    assert not runs[1].result(made.out).exists()
    assert "no such thing" in (made.out / "failed" / "bad.log").read_text()
    assert compare(made, runs) == ["bad"]
    assert made.unfinished(runs) == [runs[1]]


def test_a_run_waits_for_the_one_that_it_goes_on_from(tmp_path: Path) -> None:
    made = experiment(tmp_path)
    first = Named("first", "pass")
    runs = [Named("second", "pass", first="first"), first]
    started = compare(made, runs, can_start=lambda run: not run.first or first.result(made.out).is_file())
    assert started == ["first", "second"]


def test_a_run_at_its_time_limit_has_no_result(tmp_path: Path) -> None:
    made = experiment(tmp_path)
    slow = Named("slow", "import time; time.sleep(60)")
    compare(made, [slow], run_limit_s=0.5)
    assert not slow.result(made.out).exists()
    assert (made.out / "failed" / "slow.log").exists()
