"""Whether it learns: rollout matching against continued `sft`, from one converged model: `python -m bench.learns`.

Hard digit scenes (crowded, overlapping, among shapes that are not digits). Stage 1 trains on them by plain teacher
forcing from the demo's checkpoint until it has converged. Then the arms of `learns_arms.py` start from its model,
several side by side, each with the product's own two programs. The result is a table with intervals over scenes and
seeds. With `--annotation-dropout` the arms' training labels leave objects out.

In `--out`: the stage-1 model (`base/`, in bfloat16) with its loss by step (`stage1.json`), a result file per run
(`results/`), the ends of failed runs' logs (`failed/`), `learns.json` and `learns.md`. What is there is not done again,
so a second command with the same `--out` continues, even on another machine. Every phase has a time limit, and what has
ended is always reported. `--folder` is scratch: data, run directories, logs.

Runs are placed in slots. A slot has its own rollout server, which serves one learner after the other. A failed run does
not affect its slot. A slot whose server has ended takes no more runs. Server and learner of a slot are on different
GPUs, because NCCL requires it for weight transfers: with two GPUs every other slot has them swapped. With one GPU there
are no servers: the engine is in the learner's process. Without a GPU there is one slot on the CPU.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Annotated, Any, Generic, TypeVar

import torch
import typer

from bench.figures import circumstances
from bench.learns_arms import (
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
from bench.learns_report import markdown, read_results, summarize, write_result
from bench.models import CHECKPOINT
from bench.runs import (
    LearnerRun,
    Server,
    exit_code_of,
    last_words,
    learner_config,
    read_events,
    say,
    served_by,
    small_server,
    start_learner,
    start_server,
    steps_of,
)
from deploy.demo.build_data import Build, build
from deploy.demo.scenes import StyleName
from deploy.launch import Processes
from learner.run.files import write_atomically
from shared.errors import CheckpointError, ProjectError, ServerError

_SERVERS_READY_S = 150.0
_REPORT_S = 15.0  # to stop what still runs, and to write the report
_MOST_STEPS = 50  # times the others' steps, at equal time
_STEPS_TO_MEASURE = 20  # of an unfinished run: enough to know a step's seconds
_LAST_LINES = 60


@dataclass(frozen=True, kw_only=True, slots=True)
class Stage1:
    scenes: int
    steps: int
    batch_size: int
    learning_rate: float
    limit_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """What the command line asks for. Without runs: stage 1 alone."""

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
    plan = Plan(
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
    return exit_code_of(lambda processes: _carry_out(plan, processes), lambda: _report(plan.out, order))


def _carry_out(plan: Plan, processes: Processes) -> None:
    """All phases. Raises ProjectError if one cannot be carried out."""
    settings, num_gpus, num_cores = plan.settings, torch.cuda.device_count(), os.cpu_count() or 1

    def open_all(*, eager: bool) -> list[Slot[Run]]:
        # The first sync brings the weights, so a server can start with any model of the same shape, before stage 1.
        slots: list[Slot[Run]] = make_slots(num_gpus, plan.slots_per_gpu) if plan.runs else []
        for slot in slots:
            slot.open(processes, settings.runs, CHECKPOINT, settings.data, eager=eager)
        return slots

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
    ready = wait_open(opening, _SERVERS_READY_S)
    if not ready and not plan.eager:
        say("no server with CUDA graphs: once more without")
        ready = wait_open(open_all(eager=True), _SERVERS_READY_S)
    say(f"{len(ready)} slots ready, {plan.deadline - time.monotonic():.0f} s left")
    _compare(plan, processes, ready)


def _compare(plan: Plan, processes: Processes, slots: Sequence[Slot[Run]]) -> None:
    """Every run without a result, as long as there is time."""
    settings, results, failed = plan.settings, plan.results, plan.out / "failed"
    left = [run for run in plan.runs if not (results / f"{run.name}.json").is_file()]
    queue = Queue(runs=left, results=results, run_dirs=settings.runs, steps=settings.steps)

    def start(run: Run, slot: Slot[Run]) -> LearnerRun:
        shutil.rmtree(settings.runs / run.name, ignore_errors=True)  # of an interrupted run
        steps = queue.num_steps(run)
        assert steps is not None, "a run begins when its length is known"
        config = run_config(run, settings, slot.vllm(), steps)
        return start_learner(processes, settings.runs, run.name, config, ranks=None, devices=slot.learner_devices)

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
        slots, next_run=queue.next_run, start=start, ended=ended, deadline=plan.deadline, run_limit_s=plan.run_limit_s
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


# ---- the queue -------------------------------------------------------------------------------------------------------


@dataclass
class Queue:
    """The remaining runs, in order. Runs of equal time wait until a step's seconds are known for both sides."""

    runs: list[Run]
    results: Path
    run_dirs: Path
    steps: int

    def next_run(self) -> Run | None:
        for i, run in enumerate(self.runs):
            if self.num_steps(run) is not None:
                return self.runs.pop(i)
        return None

    def num_steps(self, run: Run) -> int | None:
        """None if it is not known yet."""
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
            run_dir = self.run_dirs / Run(arm=ARMS[arm], seed=seed).name
            seconds = [step["step_s"] for step in steps_of(read_events(run_dir))]
            if len(seconds) >= _STEPS_TO_MEASURE:
                return median(seconds)
        return None


# ---- stage 1 -------------------------------------------------------------------------------------------------------

_DATA_WORKERS = 8
_EXPORT_S = 60.0
_STOP_S = 40.0


def train_stage1(processes: Processes, first: Stage1, folder: Path, model: Path, num_gpus: int, num_cores: int) -> None:
    """Plain teacher forcing on all GPUs by torchrun, and the weights as a model in bfloat16."""
    ranks = max(1, num_gpus)
    config = stage1_config(first, folder / "stage1_data", folder / "stage1", ranks, num_cores // ranks - 2)
    began = time.monotonic()
    learner = start_learner(processes, folder, "stage1", config, ranks=ranks, devices=range(num_gpus))
    try:
        learner.process.popen.wait(first.limit_s)
    except subprocess.TimeoutExpired:
        say(f"stage 1 is stopped after {first.limit_s:g} s")
        learner.process.stop(_STOP_S)  # it saves what it has
    checkpoints = sorted(learner.run_dir.glob("checkpoint-*"), key=lambda p: int(p.name.rpartition("-")[2]))
    if not checkpoints:
        raise ServerError("stage 1 has failed", found=last_words(learner.log), wanted="a checkpoint")
    export(checkpoints[-1], model)
    steps = steps_of(read_events(learner.run_dir))
    chosen = steps[:: max(1, len(steps) // 8)] + steps[-1:]
    losses = {step["global_step"]: round(step["loss"], 3) for step in chosen}
    say(f"stage 1: {checkpoints[-1].name} in {time.monotonic() - began:.0f} s, loss by step {losses}")
    written = {"checkpoint": checkpoints[-1].name, "loss": losses}
    write_atomically(model.parent / "stage1.json", json.dumps(written) + "\n")


def stage1_config(first: Stage1, data: Path, run_dir: Path, ranks: int, workers: int) -> dict[str, Any]:
    return learner_config(
        CHECKPOINT,
        data / "train.jsonl",
        run_dir,
        steps=first.steps,
        batch_size=first.batch_size,
        per_device=first.batch_size // ranks,
        variant="sft",
        model={"dtype": "float32"},
        data={"num_workers": max(0, min(_DATA_WORKERS, workers))},
        training={
            "seed": 1,
            "learning_rate": first.learning_rate,
            "lr_scheduler_type": "cosine",
            "warmup_steps": first.steps // 12,
            "weight_decay": 0.01,
            "save_on_end": True,
        },
        logging={"trackers": [], "progress_bar": False},
        global_max_length=65536,
    )


def export(checkpoint: Path, model: Path) -> None:
    unfinished = model.with_name(f"{model.name}.unfinished")  # so that a folder with the final name is complete
    argv = [sys.executable, "-m", "learner", "export", "--checkpoint", str(checkpoint), "--out", str(unfinished)]
    try:
        subprocess.run(argv, timeout=_EXPORT_S, capture_output=True, text=True, check=True)
    except subprocess.SubprocessError as error:
        said = getattr(error, "stderr", None) or str(error)
        raise CheckpointError("stage 1 could not be exported", found=str(said)[-500:], wanted=f"{model}") from error
    unfinished.rename(model)


# ---- slots ---------------------------------------------------------------------------------------------------------

_GRAPH_SIZES = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256)
_POLL_S = 0.2


R = TypeVar("R")  # the type of a run; nothing here uses its content


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
        """The learner's `vllm` section."""
        if self.server is not None:
            return served_by(self.server)
        return {"mode": "colocate", "tensor_parallel_size": 1, "gpu_memory_utilization": 0.12, "max_model_len": 1024}


def make_slots(num_gpus: int, slots_per_gpu: int) -> list[Slot[Any]]:
    """Slots for a machine; their servers are not started."""
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
    """The slots whose servers became ready in time. Says why for the others."""
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
    ended: Callable[[R, int | None], None],  # with the exit code; None if it ran out of time
    deadline: float,
    run_limit_s: float,
) -> None:
    """Run until no run is left or `deadline` (monotonic) has passed. Runs that are still going are stopped and not
    reported."""
    while time.monotonic() < deadline:
        for slot in slots:
            _look(slot, ended, run_limit_s)
            if slot.run is None and not slot.lost and (run := next_run()) is not None:
                slot.learner = start(run, slot)
                slot.run, slot.began = run, time.monotonic()
        if all(slot.run is None for slot in slots):
            return
        time.sleep(_POLL_S)
    for slot in slots:
        if slot.learner is not None and slot.run is not None:
            slot.learner.process.stop(1.0)


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


if __name__ == "__main__":
    typer.run(main)
