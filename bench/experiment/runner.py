"""Runs of a comparison: separate processes, side by side in slots, within a time limit, and resumed.

In: runs, and a driver's functions that start a run and keep its result. Out: a result file per run, the ends of failed
runs' logs in `failed/`. A run whose result file exists is not done again, so a second command with the same `out`
continues, even on another machine. `work` is scratch: data, run directories (`work/runs`), logs.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, Protocol, TypeVar

from bench.runs import LearnerRun, last_words, say

_POLL_S = 0.2
_CUT_S = 1.0
_LAST_LINES = 60


class Run(Protocol):
    """A run as the runner sees it. A driver has a class of its own."""

    @property
    def folder(self) -> str:
        """The name of its run directory, configuration and log."""

    def result(self, out: Path) -> Path:
        """Return its result file."""


R = TypeVar("R")  # the type of a run; slots use nothing of it
N = TypeVar("N", bound=Run)


@dataclass(kw_only=True)
class Slot(Generic[R]):
    """A place for one run at a time."""

    devices: tuple[int, ...] = ()
    learner: LearnerRun | None = None
    run: R | None = None
    began: float = 0.0


def run_all(
    slots: Sequence[Slot[R]],
    *,
    next_run: Callable[[], R | None],  # None: no run can start now
    start: Callable[[R, Slot[R]], LearnerRun],
    ended: Callable[[R, int | None], None],  # gets the exit code; None if it ran out of time
    deadline: float,
    run_limit_s: float,
) -> None:
    """Run until no run is left or `deadline` (monotonic) has passed. Runs that are still going then are stopped."""
    while time.monotonic() < deadline:
        for slot in slots:
            _look(slot, ended, run_limit_s)
            if slot.run is None and (run := next_run()) is not None:
                slot.learner = start(run, slot)
                slot.run, slot.began = run, time.monotonic()
        if all(slot.run is None for slot in slots):
            return
        time.sleep(_POLL_S)
    going = [slot.learner.process for slot in slots if slot.run is not None and slot.learner is not None]
    for process in going:
        process.popen.terminate()  # all at once: they have one second together
    killed_at = time.monotonic() + _CUT_S
    for process in going:
        process.stop(max(0.0, killed_at - time.monotonic()))


def _look(slot: Slot[R], ended: Callable[[R, int | None], None], run_limit_s: float) -> None:
    """Report a run that has ended, and stop one that must end."""
    if slot.run is None or slot.learner is None:
        return
    code: int | None = slot.learner.process.popen.poll()
    if code is None:
        if time.monotonic() - slot.began < run_limit_s:
            return
        slot.learner.process.stop(2.0)
    run, slot.run, slot.learner = slot.run, None, None
    ended(run, code)


@dataclass(frozen=True, kw_only=True, slots=True)
class Experiment:
    """A comparison: where it keeps its files, and when it ends."""

    out: Path
    work: Path
    deadline: float  # monotonic

    @property
    def runs_dir(self) -> Path:
        return self.work / "runs"

    def run_dir(self, run: Run) -> Path:
        return self.runs_dir / run.folder

    def left_s(self) -> float:
        return self.deadline - time.monotonic()

    def make_folders(self) -> None:
        for made in (self.out / "results", self.out / "failed", self.runs_dir):
            made.mkdir(parents=True, exist_ok=True)

    def unfinished(self, runs: Iterable[N]) -> list[N]:
        """The runs without a result."""
        return [run for run in runs if not run.result(self.out).is_file()]

    def compare(
        self,
        slots: Sequence[Slot[N]],
        runs: Iterable[N],
        *,
        start: Callable[[N, Slot[N]], LearnerRun],
        keep: Callable[[N], None],
        can_start: Callable[[N], bool] = lambda run: True,
        run_limit_s: float | None = None,
    ) -> None:
        """Run every run without a result, several side by side, as far as the time goes.

        `keep` writes the result of a run that has ended well. `can_start` False: the run waits for others.
        """
        left = self.unfinished(runs)
        say(f"{len(left)} runs, {len(slots)} at a time, {self.left_s():.0f} s left")

        def next_run() -> N | None:
            for i, run in enumerate(left):
                if can_start(run):
                    return left.pop(i)
            return None

        def start_clean(run: N, slot: Slot[N]) -> LearnerRun:
            shutil.rmtree(self.run_dir(run), ignore_errors=True)  # removes what an interrupted run left
            return start(run, slot)

        def ended(run: N, code: int | None) -> None:
            if code == 0:
                run.result(self.out).parent.mkdir(parents=True, exist_ok=True)
                keep(run)
                return
            log = self.runs_dir / f"{run.folder}.log"
            (self.out / "failed" / f"{run.folder}.log").write_text(last_words(log, _LAST_LINES))
            say(f"{run.folder}: {'out of time' if code is None else f'exit code {code}'}: {last_words(log)}")

        run_all(
            slots,
            next_run=next_run,
            start=start_clean,
            ended=ended,
            deadline=self.deadline,
            run_limit_s=self.left_s() if run_limit_s is None else run_limit_s,
        )
