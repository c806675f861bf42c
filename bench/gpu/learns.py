"""Whether it learns: rollout matching against continued `sft`, from one converged model: `python -m bench.gpu.learns`.

Hard digit scenes (crowded, overlapping, among shapes that are no digits); stage 1 on them by plain teacher forcing from
the demo's checkpoint; then the arms of `learns_arms.py` from what stage 1 gave, several side by side, each by the
product's own two programs; then a table with intervals over scenes and seeds. With `--annotation-dropout` the arms'
training labels leave objects out.

In `--out`: the stage-1 model (`base/`), a result file per run (`results/`), the ends of failed runs' logs (`failed/`),
`learns.json` and `learns.md`. What is there is not done again, so a second command with the same `--out` goes on, on
another machine too. Every phase has a time limit, and what has ended is reported whatever happens. `--folder` is
scratch: data, run directories, logs. Two GPUs or more; with one, engines are beside the training; with none, one slot
on the CPU.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import torch
import typer

from bench.figures import circumstances
from bench.gpu.learns_arms import (
    ARMS,
    BASE,
    FIRST_SEED,
    REFERENCE,
    SEEDS,
    Run,
    Settings,
    all_runs,
    choose,
    read_arm,
    run_config,
)
from bench.gpu.learns_report import markdown, read_results, step_seconds, summarize, write_result
from bench.gpu.learns_slots import Place, Slot, open_slots, places, run_all, wait_open
from bench.gpu.learns_stage1 import INITIAL, Stage1, last_words, say, train_stage1
from deploy.demo.build_data import Build, build
from deploy.demo.scenes import StyleName
from deploy.launch import Processes, supervised
from learner.run.checkpoint import write_atomically
from shared.errors import ProjectError

_SERVERS_READY_S = 150.0
_REPORT_S = 15.0  # for what still runs to be stopped, and for the report
_MOST_STEPS = 50  # times the others' steps, at equal time
_STEPS_TO_JUDGE_BY = 20
_LAST_LINES = 60


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """What a command asks for. No runs: stage 1 alone."""

    settings: Settings
    stage1: Stage1
    data: Build  # what the arms train and are tested on
    out: Path
    folder: Path
    runs: tuple[Run, ...]
    slots_per_gpu: int
    eager: bool
    deadline: float  # monotonic
    run_limit_s: float

    @property
    def results(self) -> Path:
        return self.out / "results"


@dataclass
class Queue:
    """The runs that are left, in order; those of equal time wait until it is known what they are measured by."""

    runs: list[Run]
    results: Path
    run_dirs: Path
    steps: int

    def next_run(self) -> Run | None:
        for i, run in enumerate(self.runs):
            if self.steps_of(run) is not None:
                return self.runs.pop(i)
        return None

    def steps_of(self, run: Run) -> int | None:
        """None: not known yet."""
        if not run.arm.wall:
            return self.steps
        reference = self._step_seconds(REFERENCE)
        own = self._step_seconds(run.arm.name.removesuffix(", equal time"))
        if reference is None or own is None:
            return None
        return max(1, min(round(self.steps * reference / own), _MOST_STEPS * self.steps))

    def _step_seconds(self, arm: str) -> float | None:
        """A step's median seconds: of the runs that have ended, else of the first that has come some way."""
        ended = [result.medians["step_s"] for result in read_results(self.results) if result.arm == arm]
        if ended:
            return median(ended)
        for seed in range(FIRST_SEED, FIRST_SEED + SEEDS):
            seconds = step_seconds(self.run_dirs / Run(arm=ARMS[arm], seed=seed).name)
            if len(seconds) >= _STEPS_TO_JUDGE_BY:
                return median(seconds)
        return None


def main(
    out: Annotated[Path, typer.Option(help="Results and the stage-1 model; what is there is kept.")],
    folder: Annotated[Path, typer.Option(help="Scratch: data, run directories, logs.")] = Path("runs/learns"),
    only_stage1: Annotated[bool, typer.Option(help="Stop after stage 1.")] = False,
    arm: Annotated[list[str] | None, typer.Option(help="Only these arms, by name; again for each.")] = None,
    add_arm: Annotated[list[str] | None, typer.Option(help="One more arm, as JSON; again for each.")] = None,
    seeds: Annotated[int, typer.Option(min=1, max=SEEDS, help="Of an arm, at most.")] = SEEDS,
    steps: Annotated[int, typer.Option(min=1, help="Optimizer steps of an arm.")] = 160,
    batch_size: Annotated[int, typer.Option(min=1, help="Samples of a step.")] = 64,
    learning_rate: Annotated[float, typer.Option(help="Peak, of the arms.")] = 1e-4,
    train: Annotated[int, typer.Option(min=1, help="Scenes that the arms train on.")] = 40_000,
    test: Annotated[int, typer.Option(min=1, help="Held-out scenes.")] = 500,
    style: Annotated[StyleName, typer.Option(help="How hard the scenes are.")] = "hard",
    annotation_dropout: Annotated[
        float, typer.Option(min=0.0, max=1.0, help="Share of the objects without a label, in what the arms train on.")
    ] = 0.0,
    stage1_scenes: Annotated[int, typer.Option(min=1)] = 20_000,
    stage1_steps: Annotated[int, typer.Option(min=0, help="0: the arms begin with the demo's checkpoint.")] = 1400,
    stage1_batch_size: Annotated[int, typer.Option(min=1)] = 128,
    stage1_learning_rate: Annotated[float, typer.Option()] = 1e-3,
    stage1_limit_s: Annotated[float, typer.Option(help="Stage 1 ends then, with the weights that it has.")] = 240.0,
    slots: Annotated[int, typer.Option(min=1, help="Runs at a time, per GPU.")] = 4,
    limit_s: Annotated[float, typer.Option(help="Everything has ended then.")] = 560.0,
    run_limit_s: Annotated[float, typer.Option(help="A single run is given up then.")] = 420.0,
    eager: Annotated[bool, typer.Option(help="No CUDA graphs in the servers.")] = False,
) -> None:
    """Train, compare, report."""
    arms = {**ARMS, **{one.name: one for one in map(read_arm, add_arm or ())}}
    wanted = choose(arms, arm or (), labels_are_complete=annotation_dropout == 0)
    if torch.cuda.is_available():
        os.environ.setdefault("OMP_NUM_THREADS", "2")  # many processes share the cores
    plan = Plan(
        settings=Settings(
            model=out / "base" if stage1_steps else INITIAL,
            data=folder / "data",
            runs=folder / "runs",
            steps=steps,
            batch_size=batch_size,
            learning_rate=learning_rate,
            max_new_tokens=640 if style == "hard" else 256,
            decode_batch_size=256 if torch.cuda.is_available() else 64,
            eval_scenes=test,
        ),
        stage1=Stage1(
            scenes=stage1_scenes,
            steps=stage1_steps,
            batch_size=stage1_batch_size,
            learning_rate=stage1_learning_rate,
            limit_s=stage1_limit_s,
        ),
        data=Build(train=train, val=0, test=test, style=style, annotation_dropout=annotation_dropout, seed=2),
        out=out,
        folder=folder,
        runs=() if only_stage1 else tuple(all_runs(wanted, seeds)),
        slots_per_gpu=slots,
        eager=eager,
        deadline=time.monotonic() + limit_s - _REPORT_S,
        run_limit_s=run_limit_s,
    )
    sys.exit(_run(plan, [BASE, *arms]))


def _run(plan: Plan, order: Sequence[str]) -> int:
    """All phases, and a report with the arms in `order` whatever happens; the exit code."""
    for made in (plan.results, plan.out / "failed", plan.settings.runs, plan.settings.data):
        made.mkdir(parents=True, exist_ok=True)
    try:
        with supervised() as processes:
            try:
                _carry_out(plan, processes)
            finally:  # before the servers are stopped, which takes its time
                _report(plan.out, order)
    except ProjectError as error:
        say(f"error: {error}")
        return error.exit_code
    except KeyboardInterrupt:
        return 130
    return 0


def _carry_out(plan: Plan, processes: Processes) -> None:
    """All phases. Raises ProjectError where one can't go on."""
    settings, num_gpus, num_cores = plan.settings, torch.cuda.device_count(), os.cpu_count() or 1
    where = places(num_gpus, plan.slots_per_gpu, data_workers=2 if num_gpus else 0) if plan.runs else []

    def open_all(*, eager: bool) -> list[Slot[Run]]:
        # The first sync brings the weights, so a server can start with any model of the same shape, before stage 1.
        return open_slots(processes, where, model=INITIAL, image_root=settings.data, folder=settings.runs, eager=eager)

    opening = open_all(eager=plan.eager)
    began = time.monotonic()
    build(plan.data, settings.data, workers=num_cores)
    if plan.stage1.steps and not settings.model.is_dir():
        first = Build(train=plan.stage1.scenes, val=0, test=0, style=plan.data.style, seed=1)
        build(first, plan.folder / "stage1_data", workers=num_cores)
        say(f"data: {time.monotonic() - began:.0f} s")
        train_stage1(processes, plan.stage1, plan.folder, settings.model, num_gpus, num_cores)
    if not plan.runs:
        return
    ready = wait_open(opening, _SERVERS_READY_S, say)
    if not ready and not plan.eager:
        say("no server with CUDA graphs: once more without")
        ready = wait_open(open_all(eager=True), _SERVERS_READY_S, say)
    say(f"{len(ready)} slots ready, {plan.deadline - time.monotonic():.0f} s left")
    _compare(plan, processes, ready)


def _compare(plan: Plan, processes: Processes, slots: Sequence[Slot[Run]]) -> None:
    """Every run whose result is not there, as far as the time goes."""
    settings, results, failed = plan.settings, plan.results, plan.out / "failed"
    left = [run for run in plan.runs if not (results / f"{run.name}.json").is_file()]
    queue = Queue(runs=left, results=results, run_dirs=settings.runs, steps=settings.steps)

    def configure(run: Run, place: Place) -> tuple[Mapping[str, Any], Sequence[str]]:
        shutil.rmtree(settings.runs / run.name, ignore_errors=True)  # one that was broken off
        steps = queue.steps_of(run)
        assert steps is not None, "a run begins when its length is known"
        return run_config(run, settings, place, steps), [sys.executable, "-m", "learner", "--config"]

    def ended(run: Run, code: int | None) -> None:
        run_dir, log = settings.runs / run.name, settings.runs / f"{run.name}.log"
        if code != 0:
            (failed / f"{run.name}.log").write_text(last_words(log, _LAST_LINES))
            say(f"{run.name}: {'out of time' if code is None else f'exit code {code}'}: {last_words(log)}")
            return
        if run.evaluates_first:
            write_result(run_dir, BASE, FIRST_SEED, results / f"{BASE}.json", at_start=True)
        write_result(run_dir, run.arm.name, run.seed, results / f"{run.name}.json")
        say(f"{run.name}: {_last_evaluation(run_dir)}")

    run_all(
        processes,
        slots,
        next_run=queue.next_run,
        configure=configure,
        ended=ended,
        folder=settings.runs,
        deadline=plan.deadline,
        run_limit_s=plan.run_limit_s,
    )


def _last_evaluation(run_dir: Path) -> str:
    events = map(json.loads, (run_dir / "metrics.jsonl").read_text().splitlines())
    metrics = [event["metrics"] for event in events if event["event"] == "eval"][-1]
    shown = ("f1@0.5", "recall@0.5", "precision@0.5", "duplicate_rate")
    return "  ".join(f"{name} {metrics[name]:.3f}" for name in shown)


def _report(out: Path, order: Sequence[str]) -> None:
    summary = summarize(read_results(out / "results"))
    write_atomically(out / "learns.json", json.dumps({**circumstances(), **summary}, indent=1) + "\n")
    text = markdown(summary, order)
    write_atomically(out / "learns.md", text)
    print(text, flush=True)


if __name__ == "__main__":
    typer.run(main)
