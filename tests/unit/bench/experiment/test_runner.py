"""Runs of a comparison: slots, time limits, results that are there already, base models."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from bench.experiment import runner
from bench.experiment.runner import (
    Experiment,
    Slot,
    checkpoints_of,
    make_slots,
    one_at_a_time,
    run_all,
    slot_server,
)
from bench.runs import LearnerRun, Server
from deploy.launch import Process, Processes, supervised
from rollout_server.config import load_server_config
from shared.config.parse import write_yaml
from shared.errors import CheckpointError, DeadlineError
from tests.tiers import slow


def python(processes: Processes, code: str) -> Process:
    return processes.start("python", [sys.executable, "-c", code])


@pytest.mark.parametrize(("on_gpu", "eager"), [(True, False), (True, True), (False, False)])
def test_a_slots_server_is_a_configuration_that_the_server_takes(on_gpu: bool, eager: bool, tmp_path: Path) -> None:
    path = tmp_path / "server.yaml"
    (tmp_path / "config.json").write_text('{"model_type": "qwen3"}')  # a folder without one is no model
    write_yaml(path, slot_server(tmp_path, tmp_path, on_gpu=on_gpu, eager=eager), "test")
    assert load_server_config(path).enforce_eager is (eager or not on_gpu)


def test_two_gpus_hold_servers_and_learners_crosswise() -> None:
    found = make_slots(2, 2)
    assert [(slot.server_devices, slot.learner_devices) for slot in found] == [((0,), (1,)), ((1,), (0,))] * 2
    assert [slot.has_server for slot in make_slots(1, 3)] == [False] * 3
    assert [slot.has_server for slot in make_slots(0, 3)] == [True]


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
            [Slot(index=i) for i in range(2)],
            next_run=lambda: left.pop(0) if left else None,
            start=lambda job, slot: job.start(processes, tmp_path),
            ended=lambda job, code: ends.update({job.name: code}),
            deadline=began + 30.0,
            run_limit_s=2.0,
        )
    assert ends == {"good": 0, "bad": 3, "slow": None}
    assert time.monotonic() - began < 20.0


@pytest.mark.parametrize("reports_cut", [slow(False), True])
def test_at_the_deadline_what_runs_is_stopped(reports_cut: bool, tmp_path: Path) -> None:
    """All together, however long each takes to end."""
    stubborn = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(60)"
    left, ends = [Job(str(i), stubborn) for i in range(8)], {}
    deadline = time.monotonic() + 1.0
    with supervised() as processes:
        run_all(
            [Slot(index=i) for i in range(8)],
            next_run=lambda: left.pop() if left else None,
            start=lambda job, slot: job.start(processes, tmp_path),
            ended=lambda job, code: ends.update({job.name: code}),
            deadline=deadline,
            run_limit_s=60.0,
            reports_cut=reports_cut,
        )
        assert all(process.popen.poll() is not None for process in processes.started)
    assert time.monotonic() - deadline < 6.0, "a second for all, not for each"
    assert ends == (dict.fromkeys("76543210") if reports_cut else {})


def test_a_slot_whose_server_has_ended_takes_no_more_runs(tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    first = f"import pathlib, time; pathlib.Path({str(runs)!r}).touch(); time.sleep(60)"
    server = f"import pathlib, time\nwhile not pathlib.Path({str(runs)!r}).exists(): time.sleep(0.01)"
    left, ends = [Job("first", first), Job("second", "pass")], {}
    with supervised() as processes:
        slot: Slot[Job] = Slot(index=0, server=Server(process=python(processes, server), url=""))
        run_all(
            [slot],
            next_run=lambda: left.pop(0) if left else None,
            start=lambda job, slot: job.start(processes, tmp_path),
            ended=lambda job, code: ends.update({job.name: code}),
            deadline=time.monotonic() + 60.0,
            run_limit_s=60.0,
        )
    assert ends == {"first": None}
    assert [job.name for job in left] == ["second"]


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


def compare(made: Experiment, runs: Sequence[Named], monkeypatch: pytest.MonkeyPatch, **options: Any) -> list[str]:
    """The folders of the runs that were started, in order; a result holds its run's code."""
    started: list[str] = []

    def start(processes: Processes, folder: Path, name: str, config: Any, **more: Any) -> LearnerRun:
        started.append(name)
        assert not (folder / name).exists(), "what an interrupted run left is removed"
        (folder / name).mkdir()
        log = folder / f"{name}.log"
        process = processes.start("run", [sys.executable, "-c", config["code"]], log=log)
        return LearnerRun(process=process, log=log, run_dir=folder / name)

    def keep(run: Named) -> None:
        run.result(made.out).write_text(run.code)

    monkeypatch.setattr(runner, "start_learner", start)
    slots: list[Slot[Named]] = [Slot(index=i, has_server=False) for i in range(2)]
    with supervised() as processes:
        made.compare(processes, slots, runs, config=lambda run, slot: {"code": run.code}, keep=keep, **options)
    return started


def test_what_has_a_result_is_not_done_again_and_a_failure_keeps_its_last_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = experiment(tmp_path)
    runs = [Named("good", "pass"), Named("bad", "raise SystemExit('no such thing')")]
    assert compare(made, runs, monkeypatch) == ["good", "bad"]
    assert runs[0].result(made.out).is_file()
    assert not runs[1].result(made.out).exists()
    assert "no such thing" in (made.out / "failed" / "bad.log").read_text()
    assert compare(made, runs, monkeypatch) == ["bad"]
    assert made.unfinished(runs) == [runs[1]]


def test_a_run_waits_for_the_one_that_it_goes_on_from(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = experiment(tmp_path)
    first = Named("first", "pass")
    runs = [Named("second", "pass", first="first"), first]
    started = compare(made, runs, monkeypatch, can_start=lambda run: not run.first or first.result(made.out).is_file())
    assert started == ["first", "second"]


@pytest.mark.parametrize("keeps_stopped", [False, True])
def test_a_run_at_its_time_limit(keeps_stopped: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = experiment(tmp_path)
    slow = Named("slow", "import time; time.sleep(60)")
    compare(made, [slow], monkeypatch, run_limit_s=0.5, keeps_stopped=keeps_stopped)
    assert slow.result(made.out).exists() is keeps_stopped
    assert (made.out / "failed" / "slow.log").exists() is not keeps_stopped


def base_run(processes: Processes, folder: Path, code: str, steps: Sequence[int] = ()) -> LearnerRun:
    for step in steps:
        (folder / "base" / f"checkpoint-{step}").mkdir(parents=True)
    log = folder / "log"
    return LearnerRun(
        process=processes.start("base", [sys.executable, "-c", code], log=log), log=log, run_dir=folder / "base"
    )


def test_a_base_model_is_one_of_the_checkpoints_of_its_run(tmp_path: Path) -> None:
    with supervised() as processes:
        ended = base_run(processes, tmp_path / "a", "pass", (9, 10))
        assert {step: path.name for step, path in checkpoints_of(ended, 30.0).items()} == {
            9: "checkpoint-9",
            10: "checkpoint-10",
        }
        stopped = base_run(processes, tmp_path / "b", "import time; time.sleep(60)", (4,))
        assert list(checkpoints_of(stopped, 0.1, stop_s=1.0)) == [4]


@pytest.mark.parametrize(("code", "steps"), [("pass", ()), ("raise SystemExit('broken')", (4,))])
def test_a_base_run_that_failed_says_where_to_look(code: str, steps: Sequence[int], tmp_path: Path) -> None:
    with supervised() as processes, pytest.raises(CheckpointError) as caught:
        checkpoints_of(base_run(processes, tmp_path, code, steps), 30.0)
    assert str(tmp_path / "log") in caught.value.remedy


def test_a_command_that_is_killed_holds_nobody_back(tmp_path: Path) -> None:
    code = (
        "import sys, time; from pathlib import Path; from bench.experiment.runner import one_at_a_time\n"
        "with one_at_a_time(Path(sys.argv[1]), 1.0): print('has it', flush=True); time.sleep(60)"
    )
    with subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "has it\n"
        with pytest.raises(DeadlineError), one_at_a_time(tmp_path, 0.3):
            pass
        other.kill()
        with one_at_a_time(tmp_path, 20.0):
            assert other.wait(20.0) != 0
