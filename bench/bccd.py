"""Every method of this project on real photographs, from one model: `python -m bench.bccd --data BCCD --out DIR`.

BCCD: 205 training, 87 validation and 72 test photographs of blood cells with published labels (`photographs.py` says
where they come from). Stage 1 trains the demo's small Qwen3-VL by `sft` with `data.augment`; the checkpoint with
the best validation score is the base. From it, every method learns the 205 photographs as they are,
with the labels as published and with 40% of them removed, for as many steps, with several seeds. Scores are those of
greedy answers to the test photographs.

In `--out`: `base/` (in bfloat16) and `stage1.json`, `results/LABELS/ARM-SEED.json` after each run, `bccd.json` and
`bccd.md`. What is there is not done again, so a second command with the same `--out` goes on, on another machine too.
`--work` is scratch: data, run folders, logs. When `--budget-minutes` are over, everything stops and what has ended is
reported.

With two GPUs and vLLM, several runs side by side, each with a rollout server on the other GPU. With one GPU, or without
vLLM, the trained model itself makes the rollouts (`rollout_backend: hf`), and rollouts ahead of learning are left out,
because they need servers. No GPU: `--size tiny` shows that everything works.
"""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Annotated, Any, Literal

import torch
import typer

from bench.experiment import arms
from bench.experiment.arms import FIRST_SEED, GROUP, KEPT, TUNED, Arm, base_config, file_name
from bench.experiment.results import read_results, shown, summarize, write_result
from bench.experiment.runner import Experiment, Slot, checkpoints_of, export, make_slots, wait_open
from bench.figures import circumstances, markdown_table
from bench.runs import LearnerRun, exit_code_of, read_events, say, start_learner, steps_of
from deploy.bccd.photographs import (
    AUGMENT,
    CLASSES,
    HEIGHT,
    WIDTH,
    Folders,
    read_photographs,
    without_labels,
    write_jsonl,
)
from deploy.demo.model import SHAPES
from deploy.launch import Processes
from learner.report.read import read_scene
from learner.report.scores import counts_by_class
from learner.run.files import write_atomically
from learner.tiny import write_model

Size = Literal["small", "tiny"]
Labels = Literal["published", "missing"]

MISSING = 0.4  # share of the training labels that are removed
TRAINED = Path(__file__).parents[1] / "deploy" / "demo" / "checkpoint"
IN_STEP: Mapping[str, Any] = {"schedule": {"b_ratio": 0.5}}
AHEAD: Mapping[str, Any] = {**IN_STEP, "async_actor_learner": {"enabled": True}}
COCO, PER_CLASS = ("coco/ap", "coco/ap50", "coco/ap75"), ("f1", "precision", "recall")
HF: Mapping[str, Any] = {"rollout_backend": "hf", "decode_batch_size": 128}
GRPO_RATE = 0.5  # its learning rate, over that of the other methods
PROBE_STEPS = 60
EVALUATIONS, EVALUATION_S = 4, 10.0  # stage 1's: how many, and what one takes at most
REPORT_S = 8.0  # time to stop what runs, and to write the report

MIRRORED: Mapping[str, Any] = {"horizontal_flip": 0.5}

METHODS: Mapping[str, Arm] = {
    "sft": Arm(variant="sft"),
    "sft, augmented": Arm(variant="sft", augment=AUGMENT),
    "sft, cropped": Arm(variant="sft", augment=MIRRORED),  # the section's defaults besides
    "sft, mirrored": Arm(variant="sft", augment={**MIRRORED, "smallest_crop": 1.0}),
    "rollout_matching_sft": Arm(loss=TUNED),
    "keep_unmatched": Arm(loss=KEPT),
    "stage2_ab_training": Arm(variant="stage2_ab_training", loss=KEPT, stage2_ab=IN_STEP),
    "stage2_ab_training, ahead": Arm(variant="stage2_ab_training", loss=KEPT, stage2_ab=AHEAD),
    "grpo": Arm(variant="grpo", grpo={}),
    "grpo, object credit": Arm(variant="grpo", grpo={"credit": "object"}),
    "grpo and sft": Arm(variant="grpo", grpo={"sft_weight": 1.0}),
    "grpo and rollout matching": Arm(variant="grpo", loss=TUNED, grpo={"matching_weight": 1.0}),
}


@dataclass(frozen=True, slots=True)
class BccdRun:
    """One method on one kind of labels with one seed. `base`: no step; the model is scored as it is."""

    labels: Labels
    method: str
    seed: int

    @property
    def folder(self) -> str:
        return f"{self.labels}-{file_name(self.method)}-{self.seed}"

    def result(self, out: Path) -> Path:
        return out / "results" / self.labels / f"{self.folder}.json"


@dataclass(frozen=True, kw_only=True, slots=True)
class BccdExperiment(Experiment):
    """The experiment that a command asks for."""

    data: Path
    size: Size
    stage1_steps: int | None  # None: as many as fit
    stage1_batch: int
    stage1_limit_s: float
    steps: int
    batch_size: int
    learning_rate: float
    max_new_tokens: int
    slots: list[Slot[BccdRun]]

    @property
    def base(self) -> Path:
        return self.out / "base"

    @property
    def init(self) -> Path:
        return self.work / "init"


def main(
    data: Annotated[Path, typer.Option(help="A clone of github.com/Shenggan/BCCD_Dataset.")],
    out: Annotated[Path, typer.Option(help="Results and the base model; what is there is kept.")],
    work: Annotated[Path | None, typer.Option(help="Scratch; default: OUT/work.")] = None,
    budget_minutes: Annotated[float, typer.Option(help="Everything has ended then.")] = 60.0,
    seeds: Annotated[int, typer.Option(min=1, help="Of each method.")] = 3,
    methods: Annotated[str, typer.Option(help=f"Some of: {'; '.join(METHODS)}; separated by semicolons.")] = "",
    labels: Annotated[str, typer.Option(help="published, missing, or both.")] = "both",
    only_stage1: Annotated[bool, typer.Option(help="Stop when the base model is there.")] = False,
    stage1_steps: Annotated[int | None, typer.Option(min=1, help="Default: as many as fit the minutes.")] = None,
    stage1_batch: Annotated[int, typer.Option(min=1, help="69: three steps are an epoch.")] = 69,
    stage1_minutes: Annotated[float, typer.Option(help="Stage 1 ends then, with the best that it has.")] = 6.0,
    steps: Annotated[int, typer.Option(min=1, help="Optimizer steps of a method.")] = 30,
    batch_size: Annotated[int, typer.Option(min=1, help="Photographs of a step.")] = 32,
    learning_rate: Annotated[float, typer.Option(help="Peak, of the methods.")] = 1e-4,
    servers: Annotated[bool, typer.Option(help="Rollout servers, if there are two GPUs and vLLM.")] = True,
    slots: Annotated[
        int | None, typer.Option(min=1, help="Runs at a time; default: 4 per GPU, 12 without servers.")
    ] = None,
    size: Annotated[Size, typer.Option(help="tiny: a few steps of a tiny model, to see that it works.")] = "small",
) -> None:
    """Train the base model, run every method from it, report."""
    on_gpu, tiny = torch.cuda.is_available(), size == "tiny"
    if on_gpu:
        os.environ.setdefault("OMP_NUM_THREADS", "2")  # many processes share the cores
    serve = servers and torch.cuda.device_count() > 1 and importlib.util.find_spec("vllm") is not None
    experiment = BccdExperiment(
        data=data,
        out=out,
        work=work or out / "work",
        size=size,
        stage1_steps=4 if tiny else stage1_steps,
        stage1_batch=4 if tiny else stage1_batch,
        stage1_limit_s=stage1_minutes * 60,
        steps=2 if tiny else steps,
        batch_size=4 if tiny else batch_size,
        learning_rate=learning_rate,
        max_new_tokens=24 if tiny else 512,
        slots=_slots(serve, slots),
        deadline=time.monotonic() + budget_minutes * 60 - REPORT_S,
    )
    wanted = [name.strip() for name in methods.split(";") if name.strip()] or list(METHODS)
    if unknown := set(wanted) - set(METHODS):
        raise typer.BadParameter(f"no such method: {', '.join(sorted(unknown))}; there are: {'; '.join(METHODS)}")
    kinds: list[Labels] = ["missing", "published"] if labels == "both" else [labels]  # type: ignore[list-item]
    runs = [BccdRun(kind, name, FIRST_SEED + i) for i in range(seeds) for kind in kinds for name in wanted]
    sys.exit(_run(experiment, [] if only_stage1 else runs))


def _run(experiment: BccdExperiment, runs: Sequence[BccdRun]) -> int:
    """Everything, and a report whatever happens; the exit code."""
    experiment.make_folders()

    def work(processes: Processes) -> None:
        prepare(experiment)
        write_init(experiment)
        for slot in experiment.slots if runs else ():  # the first sync brings the base model's weights
            images = Folders.of(experiment.data).images.resolve()
            slot.open(processes, experiment.runs_dir, experiment.init, images, eager=False)
        train_base(experiment, processes)
        _compare(experiment, processes, runs)

    return exit_code_of(work, lambda: report(experiment.out))


def _slots(serve: bool, number: int | None) -> list[Slot[BccdRun]]:
    """Places for runs. With servers, those of a slot and its learner are on different GPUs, because NCCL wants it."""
    num_gpus = torch.cuda.device_count()
    if serve:
        return make_slots(num_gpus, number or 4)
    if not num_gpus:
        return [Slot(index=0, has_server=False)]
    return [Slot(index=i, has_server=False, learner_devices=(i % num_gpus,)) for i in range(number or 12)]


def write_init(experiment: BccdExperiment) -> None:
    """Write the model before stage 1: the demo's checkpoint, which finds digits; three new words are tokens of it."""
    shape, trained = (SHAPES["tiny"], None) if experiment.size == "tiny" else (SHAPES["demo"], TRAINED)
    write_model(experiment.init, shape, words=CLASSES, max_pixels=WIDTH * HEIGHT, trained=trained)


def prepare(experiment: BccdExperiment) -> None:
    """The splits as JSONL."""
    splits = {split: read_photographs(experiment.data, split) for split in ("train", "val", "test")}
    if experiment.size == "tiny":
        splits = {split: photographs[:4] for split, photographs in splits.items()}
    for split, photographs in splits.items():
        write_jsonl(photographs, experiment.work / f"{split}.jsonl")
    write_jsonl(without_labels(splits["train"], MISSING), experiment.work / "train_missing.jsonl")


# ---- the base model --------------------------------------------------------------------------------------------------


def train_base(experiment: BccdExperiment, processes: Processes) -> None:
    """Stage 1: `sft` on photographs, augmented; the checkpoint that is best on `val` is the base."""
    if experiment.base.is_dir():
        return
    began = time.monotonic()
    limit_s = min(experiment.stage1_limit_s, experiment.left_s())
    steps = experiment.stage1_steps or _steps_that_fit(experiment, processes, limit_s)
    learner = _start_stage1(experiment, processes, "stage1", steps)
    checkpoints = checkpoints_of(learner, limit_s - (time.monotonic() - began))
    events = read_events(learner.run_dir)
    scores = {e["global_step"]: e["metrics"]["f1@0.5"] for e in events if e["event"] == "eval"}
    best = max(checkpoints, key=lambda step: (scores.get(step, -1.0), step))
    export(checkpoints[best], experiment.base)
    losses = [[e["global_step"], round(e["loss"], 3)] for e in events if e["event"] == "step"]
    told = {
        "seconds": round(time.monotonic() - began, 1),
        "steps": losses[-1][0],
        "batch_size": experiment.stage1_batch,
        "best_step": best,
        "val": {e["global_step"]: e["metrics"] for e in events if e["event"] == "eval"},
        "loss": losses[:: max(1, len(losses) // 40)],
        **circumstances(),
    }
    write_atomically(experiment.out / "stage1.json", json.dumps(told, indent=1) + "\n")
    shown = ", ".join(f"{step}: {score:.3f}" for step, score in scores.items())
    say(f"stage 1: {told['steps']} steps in {told['seconds']} s; F1@0.5 on val by step {shown}; best {best}")


def _steps_that_fit(experiment: BccdExperiment, processes: Processes, limit_s: float) -> int:
    """A short run says what a start and a step take, so that the schedule of the learning rate ends with the time."""
    began = time.monotonic()
    learner = _start_stage1(experiment, processes, "probe", PROBE_STEPS)
    learner.wait(limit_s)
    step_s = median(step["step_s"] for step in steps_of(read_events(learner.run_dir))[PROBE_STEPS // 2 :])
    probe_s = time.monotonic() - began
    start_s = probe_s - PROBE_STEPS * step_s
    steps = int((limit_s - probe_s - start_s - EVALUATIONS * EVALUATION_S) * 0.95 / step_s)
    say(f"stage 1: a step takes {step_s:.3f} s, a start {start_s:.0f} s: {steps} steps")
    return max(EVALUATIONS, steps)


def _start_stage1(experiment: BccdExperiment, processes: Processes, name: str, steps: int) -> LearnerRun:
    folder = experiment.runs_dir
    shutil.rmtree(folder / name, ignore_errors=True)
    every = None if name == "probe" else max(1, steps // EVALUATIONS)
    config = base_config(
        experiment.init,
        experiment.work / "train.jsonl",
        folder / name,
        steps=steps,
        batch_size=experiment.stage1_batch,
        learning_rate=7e-4,
        global_max_length=max(4096, 800 * experiment.stage1_batch),
        matching={**HF, "decoding": {"temperature": 0.0, "max_new_tokens": experiment.max_new_tokens}},
        data={
            "val": str(experiment.work / "val.jsonl"),
            "num_workers": _workers(all_cores=True),
            "augment": dict(AUGMENT),
        },
        training={
            "weight_decay": 0.05,
            "eval_steps": every,
            "save_steps": every,
            "save_on_end": every is not None,
            "eval_on_end": every is not None,
        },
    )
    return start_learner(processes, folder, name, config, ranks=None, devices=_gpu())


# ---- the methods -----------------------------------------------------------------------------------------------------


def _compare(experiment: BccdExperiment, processes: Processes, runs: Sequence[BccdRun]) -> None:
    left = experiment.unfinished(runs)
    if any(_is_ahead(run) for run in left) and not experiment.slots[0].has_server:
        say("rollouts ahead of learning need servers, so two GPUs and vLLM: left out")
        left = [run for run in left if not _is_ahead(run)]
    if not left:
        return
    experiment.compare(
        processes,
        wait_open(experiment.slots, 150.0),
        left,
        config=lambda run, slot: _run_config(experiment, run, slot),
        keep=lambda run: _keep_result(experiment, run),
    )


def _run_config(experiment: BccdExperiment, run: BccdRun, slot: Slot[BccdRun]) -> dict[str, Any]:
    method = METHODS[run.method]
    is_grpo = method.grpo is not None
    return arms.run_config(
        method,
        model=experiment.base,
        train=experiment.work / ("train.jsonl" if run.labels == "published" else "train_missing.jsonl"),
        test=experiment.work / "test.jsonl",
        run_dir=experiment.run_dir(run),
        steps=experiment.steps,
        # A batch of grpo counts rollouts: half as many photographs, with a group of each.
        batch_size=experiment.batch_size // 2 * GROUP if is_grpo else experiment.batch_size,
        engine={"decode_batch_size": 128, "vllm": slot.vllm()} if slot.server else HF,
        max_new_tokens=experiment.max_new_tokens,
        global_max_length=900 * experiment.batch_size,  # a whole batch fits one row without groups
        data_workers=_workers(all_cores=False),
        training={
            "seed": run.seed,
            "packing_buffer": max(64, experiment.batch_size),
            "learning_rate": experiment.learning_rate * (GRPO_RATE if is_grpo else 1.0),
            "lr_scheduler_type": "cosine",
            "warmup_steps": experiment.steps // 10,
            # Packed Channel-B learns while it rolls out, which needs a server.
            "packing": method.stage2_ab is None or slot.server is not None,
            "eval_on_start": _scores_base(run),
        },
    )


def _scores_base(run: BccdRun) -> bool:
    """One run of each kind of labels scores the model that all begin with."""
    return run.method == "sft" and run.seed == FIRST_SEED


def _is_ahead(run: BccdRun) -> bool:
    return METHODS[run.method].stage2_ab is AHEAD


def _gpu() -> tuple[int, ...]:
    return (0,) if torch.cuda.is_available() else ()


def _workers(*, all_cores: bool) -> int:
    if not torch.cuda.is_available():
        return 0
    return max(1, (os.cpu_count() or 4) - 2) if all_cores else 1


# ---- results ---------------------------------------------------------------------------------------------------------


def _keep_result(experiment: BccdExperiment, run: BccdRun) -> None:
    """Keep what the report needs of a run that has ended."""
    target, run_dir = run.result(experiment.out), experiment.run_dir(run)
    if _scores_base(run):
        base = BccdRun(run.labels, "base", FIRST_SEED).result(experiment.out)
        write_result(run_dir, "base", FIRST_SEED, base, at_start=True)
        _add(base, run_dir, which=0)
    write_result(run_dir, run.method, run.seed, target)
    _add(target, run_dir, which=-1)
    say(f"{run.folder}: F1@0.5 {json.loads(target.read_text())['metrics']['f1@0.5']:.3f}")


def _add(result: Path, run_dir: Path, *, which: int) -> None:
    """Add the metrics as evaluated (COCO's AP among them), and per class, of the first or the last evaluation."""
    evaluations = [e["metrics"] for e in read_events(run_dir) if e["event"] == "eval"]
    lines = sorted((run_dir / "eval").glob("step_*.jsonl"))[which].read_text().splitlines()
    scenes = [scene for line in lines if (scene := read_scene(json.loads(line))) is not None]
    classes = {
        name: {"f1": counts.f1, "precision": counts.precision, "recall": counts.recall, "objects": counts.truth}
        for name, counts in counts_by_class(scenes).items()
    }
    kept = json.loads(result.read_text())
    text = json.dumps({**kept, "metrics": evaluations[which], "classes": classes})
    write_atomically(result, text.replace("NaN", "null") + "\n")


def report(out: Path) -> None:
    """Write `bccd.json` and `bccd.md` from the results that there are."""
    found: dict[str, Any] = {}
    text = ""
    for labels in ("published", "missing"):
        folder = out / "results" / labels
        if not any(folder.glob("*.json")):
            continue
        summary = summarize(read_results(folder))
        more = [json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))]
        for arm, figures in summary["arms"].items():
            figures.update(_more_figures([result for result in more if result["arm"] == arm]))
        found[labels] = summary
        text += f"\nLabels: {labels if labels == 'published' else f'{MISSING:.0%} removed'}\n\n{_table(summary)}\n"
    if found:
        write_atomically(out / "bccd.json", json.dumps({**circumstances(), **found}, indent=1) + "\n")
        write_atomically(out / "bccd.md", text)
        print(text, flush=True)


def _more_figures(results: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Means over seeds of what has no interval here."""
    classes = {
        name: {figure: _mean(r["classes"].get(name, {}).get(figure) for r in results) for figure in PER_CLASS}
        for name in CLASSES
    }
    return {"coco": {name: _mean(r["metrics"].get(name) for r in results) for name in COCO}, "classes": classes}


def _mean(values: Iterable[float | None]) -> float | None:
    numbers = [value for value in values if value is not None]
    return round(sum(numbers) / len(numbers), 4) if numbers else None


def _table(summary: Mapping[str, Any]) -> str:
    head = [
        "arm",
        "seeds",
        "F1@0.5",
        "minus sft",
        "F1@mIoU",
        "AP",
        "recall",
        "precision",
        *(f"F1 {c}" for c in CLASSES),
    ]
    rows = []
    for name in ("base", *METHODS):
        if name not in summary["arms"]:
            continue
        arm = summary["arms"][name]
        metrics, minus = arm["metrics"], arm["minus"].get("sft", {}).get("f1@0.5")
        rows.append(
            [
                name,
                str(len(arm["seeds"])),
                shown(metrics["f1@0.5"]),
                shown(minus, sign="+"),
                f"{metrics['f1@miou']['value']:.3f}",
                _number(arm["coco"]["coco/ap"]),
                f"{metrics['recall@0.5']['value']:.3f}",
                f"{metrics['precision@0.5']['value']:.3f}",
                *(_number(arm["classes"][c]["f1"]) for c in CLASSES),
            ]
        )
    return "\n".join(markdown_table(head, rows))


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.3f}"


if __name__ == "__main__":
    typer.run(main)
