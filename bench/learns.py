"""Check that it learns: rollout matching against continued `sft`, from one converged model: `python -m bench.learns`.

Hard digit scenes (crowded, overlapping, among shapes that are not digits). Stage 1 trains on them by plain teacher
forcing from the demo's checkpoint until it has converged. Then the arms of `learns_arms.py` start from its model,
several side by side, each with the product's own two programs. The result is a table with intervals over scenes and
seeds. With `--annotation-dropout` the arms' training labels leave objects out.

In `--out`: the stage-1 model (`base/`, in bfloat16) with its loss by step (`stage1.json`), a result file per run
(`results/`), the ends of failed runs' logs (`failed/`), `learns.json` and `learns.md`. Every phase has a time limit,
and what has ended is always reported. `--folder` is scratch. How runs are placed and resumed: `experiment.runner`.
With one GPU the engine is in the learner's process.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import torch
import typer

from bench.experiment.arms import FIRST_SEED, base_config
from bench.experiment.results import markdown, read_results, summarize, write_result
from bench.experiment.runner import Experiment, Slot, checkpoints_of, export, make_slots, wait_open
from bench.figures import circumstances
from bench.learns_arms import (
    ARMS,
    BASE,
    REFERENCE,
    SEEDS,
    LearnsRun,
    Settings,
    all_runs,
    choose,
    read_arm,
    run_config,
)
from bench.models import CHECKPOINT
from bench.runs import exit_code_of, read_events, say, start_learner, steps_of
from deploy.demo.build_data import Build, build
from deploy.demo.scenes import StyleName
from deploy.launch import Processes
from learner.run.files import write_atomically

_SERVERS_READY_S = 150.0
_REPORT_S = 15.0  # time to stop what still runs, and to write the report
_MOST_STEPS = 50  # times the others' steps, at equal time
_STEPS_TO_MEASURE = 20  # an unfinished run's: enough to know a step's seconds


@dataclass(frozen=True, kw_only=True, slots=True)
class Stage1:
    scenes: int
    steps: int
    batch_size: int
    learning_rate: float
    limit_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class LearnsExperiment(Experiment):
    """The experiment that the command line asks for. Without runs: stage 1 alone."""

    settings: Settings
    stage1: Stage1
    data: Build  # the arms train and are tested on it
    runs: tuple[LearnsRun, ...]
    slots_per_gpu: int
    eager: bool
    run_limit_s: float


def main(
    out: Annotated[Path, typer.Option(help="Results and the stage-1 model; existing ones are kept.")],
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
    stage1_limit_s: Annotated[float, typer.Option(help="Stage 1 stops then and keeps its weights.")] = 240.0,
    slots: Annotated[int, typer.Option(min=1, help="Runs at a time, per GPU.")] = 4,
    limit_s: Annotated[float, typer.Option(help="Time for everything.")] = 560.0,
    run_limit_s: Annotated[float, typer.Option(help="Time for a single run.")] = 420.0,
    eager: Annotated[bool, typer.Option(help="No CUDA graphs in the servers.")] = False,
) -> None:
    """Train, compare, report."""
    arms = {**ARMS, **{one.name: one for one in map(read_arm, add_arm or ())}}
    wanted = choose(arms, arm or (), labels_are_complete=annotation_dropout == 0)
    if torch.cuda.is_available():
        os.environ.setdefault("OMP_NUM_THREADS", "2")  # many processes share the cores
    experiment = LearnsExperiment(
        settings=Settings(
            model=out / "base" if stage1_steps else CHECKPOINT,
            data=folder / "data",
            runs=folder / "runs",
            steps=steps,
            batch_size=batch_size,
            learning_rate=learning_rate,
            max_new_tokens=640 if style == "hard" else 256,
            decode_batch_size=256 if torch.cuda.is_available() else 64,
            eval_scenes=test,
            data_workers=2 if torch.cuda.is_available() else 0,
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
        work=folder,
        runs=() if only_stage1 else tuple(all_runs(wanted, seeds)),
        slots_per_gpu=slots,
        eager=eager,
        deadline=time.monotonic() + limit_s - _REPORT_S,
        run_limit_s=run_limit_s,
    )
    sys.exit(_run(experiment, [BASE, *arms]))


def _run(experiment: LearnsExperiment, order: Sequence[str]) -> int:
    """All phases, and a report with the arms in `order` whatever happens; the exit code."""
    experiment.make_folders()
    experiment.settings.data.mkdir(parents=True, exist_ok=True)
    return exit_code_of(lambda processes: _carry_out(experiment, processes), lambda: _report(experiment.out, order))


def _carry_out(experiment: LearnsExperiment, processes: Processes) -> None:
    """Carry out all phases. Raises ProjectError if one cannot be carried out."""
    settings, num_gpus, num_cores = experiment.settings, torch.cuda.device_count(), os.cpu_count() or 1

    def open_all(*, eager: bool) -> list[Slot[LearnsRun]]:
        # The first sync brings the weights, so a server can start with any model of the same shape, before stage 1.
        slots: list[Slot[LearnsRun]] = make_slots(num_gpus, experiment.slots_per_gpu) if experiment.runs else []
        for slot in slots:
            slot.open(processes, settings.runs, CHECKPOINT, settings.data, eager=eager)
        return slots

    opening = open_all(eager=experiment.eager)
    began = time.monotonic()
    build(experiment.data, settings.data, workers=num_cores)
    if experiment.stage1.steps and not settings.model.is_dir():
        first = Build(train=experiment.stage1.scenes, val=0, test=0, style=experiment.data.style, seed=1)
        build(first, experiment.work / "stage1_data", workers=num_cores)
        say(f"data: {time.monotonic() - began:.0f} s")
        train_stage1(processes, experiment.stage1, experiment.work, settings.model, num_gpus, num_cores)
    if not experiment.runs:
        return
    ready = wait_open(opening, _SERVERS_READY_S)
    if not ready and not experiment.eager:
        say("no server with CUDA graphs: once more without")
        ready = wait_open(open_all(eager=True), _SERVERS_READY_S)
    _compare(experiment, processes, ready)


def _compare(experiment: LearnsExperiment, processes: Processes, slots: Sequence[Slot[LearnsRun]]) -> None:
    settings = experiment.settings
    lengths = Lengths(results=experiment.out / "results", run_dirs=experiment.runs_dir, steps=settings.steps)

    def config(run: LearnsRun, slot: Slot[LearnsRun]) -> dict[str, Any]:
        steps = lengths.num_steps(run)
        assert steps is not None, "a run begins when its length is known"
        return run_config(run, settings, slot.vllm(), steps)

    def keep(run: LearnsRun) -> None:
        run_dir = experiment.run_dir(run)
        if run.evaluates_first:
            write_result(run_dir, BASE, FIRST_SEED, experiment.out / "results" / f"{BASE}.json", at_start=True)
        write_result(run_dir, run.arm.name, run.seed, run.result(experiment.out))
        say(f"{run.folder}: {_last_evaluation(run_dir)}")

    experiment.compare(
        processes,
        slots,
        experiment.runs,
        config=config,
        keep=keep,
        can_start=lambda run: lengths.num_steps(run) is not None,
        run_limit_s=experiment.run_limit_s,
    )


def _last_evaluation(run_dir: Path) -> str:
    metrics = [event["metrics"] for event in read_events(run_dir) if event["event"] == "eval"][-1]
    shown = ("f1@0.5", "recall@0.5", "precision@0.5", "duplicate_rate")
    return "  ".join(f"{name} {metrics[name]:.3f}" for name in shown)


def _report(out: Path, order: Sequence[str]) -> None:
    summary = summarize(read_results(out / "results"))
    write_atomically(out / "learns.json", json.dumps({**circumstances(), **summary}, indent=1) + "\n")
    text = markdown(summary, order)
    write_atomically(out / "learns.md", text)
    print(text, flush=True)


# ---- equal time ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class Lengths:
    """Optimizer steps of runs. Runs of equal time wait until a step's seconds are known for both sides."""

    results: Path
    run_dirs: Path
    steps: int

    def num_steps(self, run: LearnsRun) -> int | None:
        """Return the number of steps; None if it is not known yet."""
        if not run.arm.wall:
            return self.steps
        reference = self._step_seconds(REFERENCE)
        own = self._step_seconds(run.arm.name.removesuffix(", equal time"))
        if reference is None or own is None:
            return None
        return max(1, min(round(self.steps * reference / own), _MOST_STEPS * self.steps))

    def _step_seconds(self, arm: str) -> float | None:
        """A step's median seconds, from finished runs, else from the first run with enough steps."""
        ended = [result.medians["step_s"] for result in read_results(self.results) if result.arm == arm]
        if ended:
            return median(ended)
        for seed in range(FIRST_SEED, FIRST_SEED + SEEDS):
            run_dir = self.run_dirs / LearnsRun(arm=ARMS[arm], seed=seed).folder
            seconds = [step["step_s"] for step in steps_of(read_events(run_dir))]
            if len(seconds) >= _STEPS_TO_MEASURE:
                return median(seconds)
        return None


# ---- stage 1 -------------------------------------------------------------------------------------------------------

_DATA_WORKERS = 8


def train_stage1(processes: Processes, first: Stage1, folder: Path, model: Path, num_gpus: int, num_cores: int) -> None:
    """Train by plain teacher forcing on all GPUs with torchrun, and write the weights as a model in bfloat16."""
    ranks = max(1, num_gpus)
    config = stage1_config(first, folder / "stage1_data", folder / "stage1", ranks, num_cores // ranks - 2)
    began = time.monotonic()
    learner = start_learner(processes, folder, "stage1", config, ranks=ranks, devices=range(num_gpus))
    checkpoints = checkpoints_of(learner, first.limit_s)
    last = max(checkpoints)
    export(checkpoints[last], model)
    steps = steps_of(read_events(learner.run_dir))
    chosen = steps[:: max(1, len(steps) // 8)] + steps[-1:]
    losses = {step["global_step"]: round(step["loss"], 3) for step in chosen}
    say(f"stage 1: checkpoint-{last} in {time.monotonic() - began:.0f} s, loss by step {losses}")
    written = {"checkpoint": f"checkpoint-{last}", "loss": losses}
    write_atomically(model.parent / "stage1.json", json.dumps(written) + "\n")


def stage1_config(first: Stage1, data: Path, run_dir: Path, ranks: int, workers: int) -> dict[str, Any]:
    return base_config(
        CHECKPOINT,
        data / "train.jsonl",
        run_dir,
        steps=first.steps,
        batch_size=first.batch_size,
        per_device=first.batch_size // ranks,
        learning_rate=first.learning_rate,
        global_max_length=65536,
        data={"num_workers": max(0, min(_DATA_WORKERS, workers))},
        training={"weight_decay": 0.01},
    )


if __name__ == "__main__":
    typer.run(main)
