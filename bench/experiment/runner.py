"""Training runs of a comparison: separate processes, side by side in slots, within a time limit, and resumed.

In: runs, and a driver's functions that configure a run and keep its result. Out: a result file per run, the ends of
failed runs' logs in `failed/`. A run whose result file exists is not done again, so a second command with the same
`out` continues, even on another machine. `work` is scratch: data, run directories (`work/runs`), logs.

A slot has its own rollout server, which serves one learner after the other. A failed run does not affect its slot. A
slot whose server has ended takes no more runs. Server and learner of a slot are on different GPUs, because NCCL
requires it for weight transfers: with two GPUs every other slot has them swapped. With one GPU there are no servers.
Without a GPU there is one slot on the CPU.
"""

from __future__ import annotations

import fcntl
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Generic, Protocol, TypeVar

from bench.runs import LearnerRun, Server, last_words, say, served_by, small_server, start_learner, start_server
from deploy.launch import Processes
from shared.errors import CheckpointError, DeadlineError, ProjectError
from shared.waits import Deadline

_GRAPH_SIZES = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256)
_POLL_S = 0.2
_LOCK = ".lock"
_EXPORT_S = 120.0
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


# ---- slots ---------------------------------------------------------------------------------------------------------


@dataclass(kw_only=True)
class Slot(Generic[R]):
    """Devices and a server for one run at a time. `has_server` False: the engine is in the learner's process."""

    index: int
    has_server: bool = True
    server_devices: tuple[int, ...] = ()
    learner_devices: tuple[int, ...] = ()
    server: Server | None = None
    learner: LearnerRun | None = None
    run: R | None = None
    began: float = 0.0

    @property
    def lost(self) -> bool:
        return self.server is not None and self.server.has_ended

    def open(self, processes: Processes, folder: Path, model: Path, images: Path, *, eager: bool) -> None:
        """Start the server if the slot has one, and return at once."""
        if self.has_server:
            config = slot_server(model, images, on_gpu=bool(self.server_devices), eager=eager)
            name = f"server-{self.index}"
            self.server = start_server(processes, folder, name, config, devices=self.server_devices)

    def vllm(self) -> dict[str, Any]:
        """Return the learner's `vllm` section."""
        if self.server is not None:
            return served_by(self.server)
        return {"mode": "colocate", "tensor_parallel_size": 1, "gpu_memory_utilization": 0.12, "max_model_len": 1024}


def make_slots(num_gpus: int, slots_per_gpu: int) -> list[Slot[Any]]:
    """Make slots for a machine; their servers are not started."""
    if num_gpus == 0:
        return [Slot(index=0)]
    if num_gpus == 1:
        return [Slot(index=i, has_server=False, learner_devices=(0,)) for i in range(slots_per_gpu)]
    return [
        Slot(index=i, server_devices=(i % num_gpus,), learner_devices=((i + 1) % num_gpus,))
        for i in range(slots_per_gpu * num_gpus)
    ]


def slot_server(model: Path, images: Path, *, on_gpu: bool, eager: bool) -> dict[str, Any]:
    return small_server(
        model,
        images,
        on_gpu=on_gpu,
        max_num_seqs=256 if on_gpu else 64,
        graph_sizes=() if eager else _GRAPH_SIZES,
        gpu_memory_utilization=0.08,
        kv_cache_bytes=2 << 30,
    )


def wait_open(slots: Sequence[Slot[R]], timeout_s: float) -> list[Slot[R]]:
    """Return the slots whose servers became ready in time. Says why for the others."""
    deadline = time.monotonic() + timeout_s
    ready = []
    for slot in slots:
        try:
            if slot.server is not None:
                slot.server.wait_ready(max(1.0, deadline - time.monotonic()))
            ready.append(slot)
        except ProjectError as error:
            say(f"slot {slot.index} is left out: {error}")
    return ready


def run_all(
    slots: Sequence[Slot[R]],
    *,
    next_run: Callable[[], R | None],  # None: no run can start now
    start: Callable[[R, Slot[R]], LearnerRun],
    ended: Callable[[R, int | None], None],  # gets the exit code; None if it ran out of time
    deadline: float,
    run_limit_s: float,
    reports_cut: bool = False,
) -> None:
    """Run until no run is left or `deadline` (monotonic) has passed. Runs that are still going are stopped, and with
    `reports_cut` reported as out of time."""
    while time.monotonic() < deadline:
        for slot in slots:
            _look(slot, ended, run_limit_s)
            if slot.run is None and not slot.lost and (run := next_run()) is not None:
                slot.learner = start(run, slot)
                slot.run, slot.began = run, time.monotonic()
        if all(slot.run is None for slot in slots):
            return
        time.sleep(_POLL_S)
    going = [(slot.run, slot.learner.process) for slot in slots if slot.run is not None and slot.learner is not None]
    for _, process in going:
        process.popen.terminate()  # all at once: they have one second together
    killed_at = time.monotonic() + _CUT_S
    for run, process in going:
        process.stop(max(0.0, killed_at - time.monotonic()))
        if reports_cut:
            ended(run, None)


def _look(slot: Slot[R], ended: Callable[[R, int | None], None], run_limit_s: float) -> None:
    """Report a run that has ended, and stop one that must end."""
    if slot.run is None or slot.learner is None:
        return
    code: int | None = slot.learner.process.popen.poll()
    if code is None:
        if time.monotonic() - slot.began < run_limit_s and not slot.lost:
            return
        slot.learner.process.stop(2.0)
    run, slot.run, slot.learner = slot.run, None, None
    ended(run, code)


# ---- a comparison --------------------------------------------------------------------------------------------------


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
        processes: Processes,
        slots: Sequence[Slot[N]],
        runs: Iterable[N],
        *,
        config: Callable[[N, Slot[N]], dict[str, Any]],
        keep: Callable[[N], None],
        command: Callable[[N], Sequence[str]] = lambda run: (),
        can_start: Callable[[N], bool] = lambda run: True,
        run_limit_s: float | None = None,
        keeps_stopped: bool = False,
        keeps_cut: bool = False,
    ) -> None:
        """Run every run without a result, several side by side, as far as the time goes.

        `keep` writes the result of a run that has ended well; with `keeps_stopped` also of one that `run_limit_s` has
        stopped, with `keeps_cut` too of one that the experiment's deadline has. `command`: of the learner, with its
        options; none: `train`. `can_start` False: the run waits for others.
        """
        left = self.unfinished(runs)
        say(f"{len(left)} runs, {len(slots)} at a time, {self.left_s():.0f} s left")

        def next_run() -> N | None:
            for i, run in enumerate(left):
                if can_start(run):
                    return left.pop(i)
            return None

        def start(run: N, slot: Slot[N]) -> LearnerRun:
            shutil.rmtree(self.run_dir(run), ignore_errors=True)  # removes what an interrupted run left
            return start_learner(
                processes,
                self.runs_dir,
                run.folder,
                config(run, slot),
                ranks=None,
                devices=slot.learner_devices,
                command=command(run),
            )

        def ended(run: N, code: int | None) -> None:
            if code == 0 or (code is None and keeps_stopped):
                run.result(self.out).parent.mkdir(parents=True, exist_ok=True)
                keep(run)
                return
            log = self.runs_dir / f"{run.folder}.log"
            (self.out / "failed" / f"{run.folder}.log").write_text(last_words(log, _LAST_LINES))
            say(f"{run.folder}: {'out of time' if code is None else f'exit code {code}'}: {last_words(log)}")

        limit_s = self.left_s() if run_limit_s is None else run_limit_s
        run_all(
            slots,
            next_run=next_run,
            start=start,
            ended=ended,
            deadline=self.deadline,
            run_limit_s=limit_s,
            reports_cut=keeps_cut,
        )


# ---- base models ---------------------------------------------------------------------------------------------------


@contextmanager
def one_at_a_time(folder: Path, limit_s: float) -> Iterator[None]:
    """Hold back the other commands that would fill the same folder, until the body ends or this process does.

    Raises DeadlineError if another command has held this one back for `limit_s`.
    """
    path = folder / _LOCK
    with path.open("a") as file:
        deadline, waits = Deadline(limit_s), False
        while not _locked(file):
            if not waits:
                say(f"another command fills {folder}: this one waits for it")
                waits = True
            if deadline.is_over():
                raise DeadlineError(
                    f"another command fills {folder}",
                    found=f"{path} locked for {limit_s:.0f} s",
                    wanted="the other command's end",
                    remedy="wait until it has ended, or give this one more --seconds",
                )
            time.sleep(_POLL_S)
        yield


def _locked(file: IO[str]) -> bool:
    """Lock the file until it is closed. Return False if another process, or another open file of this one, has it."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def checkpoints_of(learner: LearnerRun, limit_s: float, stop_s: float = 40.0) -> dict[int, Path]:
    """Return the checkpoints by step of a run that makes a base model, which is stopped after `limit_s` and saves what
    it has.

    Raises CheckpointError if it failed, or there is none.
    """
    code = 0
    try:
        code = learner.process.popen.wait(max(1.0, limit_s))
    except subprocess.TimeoutExpired:
        say(f"{learner.run_dir.name} is stopped after {limit_s:.0f} s")
        learner.process.stop(stop_s)
    found = {int(path.name.rpartition("-")[2]): path for path in learner.run_dir.glob("checkpoint-*")}
    if code or not found:
        raise CheckpointError(
            f"{learner.run_dir.name} has failed",
            found=f"exit code {code}: {last_words(learner.log, 30)}",
            wanted="a checkpoint",
            remedy=f"see {learner.log}",
        )
    return found


def export(checkpoint: Path, model: Path) -> None:
    """Export the weights as a model. Raises CheckpointError."""
    unfinished = model.with_name(f"{model.name}.unfinished")  # a folder with the final name is complete
    shutil.rmtree(unfinished, ignore_errors=True)
    argv = [sys.executable, "-m", "learner", "export", "--model", str(checkpoint), "--out", str(unfinished)]
    try:
        subprocess.run(argv, timeout=_EXPORT_S, capture_output=True, text=True, check=True)
    except subprocess.SubprocessError as error:
        said = getattr(error, "stderr", None) or str(error)
        raise CheckpointError(
            "the checkpoint could not be exported", found=str(said)[-500:], wanted=f"a model in {model}"
        ) from error
    unfinished.rename(model)
