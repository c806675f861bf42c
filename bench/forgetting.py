"""Measure what methods forget of an old task while they learn a new one, at equal new-task F1: `python -m
bench.forgetting`.

A *regime* is a base that knows two tasks on the same scenes of digits, each by its own prompt, and learns more of the
new one. The base is the demo's checkpoint after `sft` on both; of the new task it has seen a quarter as much.

    boxes     old: every digit.     new: the same with a margin around each box
    even      old: every digit.     new: the even ones only
    numerals  old: names in words.  new: names as numerals
    large     old: every digit.     new: the larger half of them

An *arm* is a method, on the same scenes of the new task and for the same time (`--run-seconds`, the start included).
`sft, a tenth of old data` has a tenth more scenes, of the old task. Every few steps an arm answers validation scenes of
the new task and test scenes of both tasks, all in one batch. The arms are compared at equal new-task F1: the *level* is
the best validation F1 of the arm that reaches least, among those that gained at least 0.02 over the base. Of each arm
the first evaluation at that level counts. `kept`: its old-task F1 on the test scenes minus that of `sft` [95% interval
over scenes, the same for both].

In `--out`: `bases/`, `results/REGIME/ARM-SEED.json`, `forgetting.json` and `forgetting.md`. What is there is not done
again, so a second command goes on, also on another machine. Of two commands at a time the second waits while
the first makes bases. `--work` is scratch.
"""

from __future__ import annotations

import importlib.util
import json
import os
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import typer
from numpy.typing import NDArray

from bench import study
from bench.experiment import arms
from bench.experiment.arms import FIRST_SEED, KEPT, TUNED, base_config, file_name
from bench.experiment.runner import Experiment, Slot, checkpoints_of, export, one_at_a_time
from bench.figures import circumstances, markdown_table
from bench.models import CHECKPOINT
from bench.runs import exit_code_of, read_events, say, start_learner, steps_of
from deploy.demo.build_data import Build, build
from deploy.demo.scenes import DIGIT_WORDS
from deploy.launch import Processes
from learner.run.files import write_atomically
from learner.tasks.detection.metrics import COLUMNS, METRICS, columns_of

Row = dict[str, Any]
F1 = "f1@0.5"
COUNTED = ("tp@0.50", "ignored@0.50", "predictions", "truth")  # F1 needs these of a scene
VAL, OLD, NEW = "val", "old", "new"  # the parts of an evaluation: its scenes' ids begin with them
LEAST_GAIN = 0.02
NEW_SHARE = 0.2  # share of the base's scenes
REPORT_S = 6.0
DRAWS = 2000


# ---- what is compared ------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class NewTask:
    """The prompt of the new task, and its labels, made of those of the old one."""

    prompt: str
    objects: Callable[[list[Row]], list[Row]]


def _wide(objects: list[Row]) -> list[Row]:
    return study.HABITS["other-boxes"].of_labels(objects, np.random.default_rng(0))


def _even(objects: list[Row]) -> list[Row]:
    return [one for one in objects if DIGIT_WORDS.index(one["desc"]) % 2 == 0]


def _numerals(objects: list[Row]) -> list[Row]:
    return [{**one, "desc": str(DIGIT_WORDS.index(one["desc"]))} for one in objects]


def _large(objects: list[Row]) -> list[Row]:
    """Half of the digits in the demo's scenes are at least 34 pixels high."""
    return [one for one in objects if one["bbox_2d"][3] - one["bbox_2d"][1] >= 34]


REGIMES: Mapping[str, NewTask] = {
    "boxes": NewTask("Detect every digit with a margin.", _wide),
    "even": NewTask("Detect every even digit.", _even),
    "numerals": NewTask("Read every digit.", _numerals),
    "large": NewTask("Detect every large digit.", _large),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class ForgettingArm(study.StudyArm):
    """`old_share`: scenes of the old task in training, as a share of those of the new one."""

    old_share: float = 0.0
    lora: bool = False


# Half as long as in bench.study. There the best step of `sft` on digits was mostly 40 or earlier, and an evaluation
# takes longer than 8 steps.
_SFT: Mapping[str, Any] = {"variant": "sft", "steps": 64, "evaluations": 8}
_GRPO: Mapping[str, Any] = {"variant": "grpo", "rate": 3e-5, "batch_size": 16, "steps": 80, "evaluations": 8}
ARMS: Mapping[str, ForgettingArm] = {
    "sft": ForgettingArm(**_SFT),
    "sft, a tenth of old data": ForgettingArm(old_share=0.1, **_SFT),
    "rollout matching": ForgettingArm(loss=TUNED),
    "rollout matching, keep_unmatched": ForgettingArm(loss=KEPT),
    "grpo": ForgettingArm(grpo={"credit": "object"}, **_GRPO),
    "sft, LoRA": ForgettingArm(lora=True, **_SFT),
    "grpo, LoRA and KL": ForgettingArm(grpo={"credit": "object", "kl_weight": 0.02}, lora=True, **_GRPO),
}


@dataclass(frozen=True, slots=True)
class ForgettingRun:
    regime: str
    arm: str
    seed: int

    @property
    def folder(self) -> str:
        return f"{self.regime}--{file_name(self.arm)}-{self.seed}"

    def result(self, out: Path) -> Path:
        return out / "results" / self.regime / f"{file_name(self.arm)}-{self.seed}.json"


@dataclass(frozen=True, kw_only=True, slots=True)
class ForgettingExperiment(Experiment):
    engine: Mapping[str, Any]
    slots: Sequence[Slot[ForgettingRun]]
    run_s: float
    base_steps: int
    scenes: int
    val: int
    test: int

    @property
    def on_gpu(self) -> bool:
        return bool(self.slots[0].learner_devices)

    def base(self, regime: str) -> Path:
        return self.out / "bases" / regime

    def data(self, regime: str, part: str) -> Path:
        return self.work / "data" / f"{regime}.{part}.jsonl"


# ---- the command -----------------------------------------------------------------------------------------------------


class Device(StrEnum):
    auto = "auto"
    cuda = "cuda"
    cpu = "cpu"


def main(
    out: Annotated[Path, typer.Option(help="Results and base models; what is there is kept.")],
    work: Annotated[Path, typer.Option(help="Scratch: data, run folders, logs.")] = Path("runs/forgetting"),
    regime: Annotated[list[str] | None, typer.Option(help="By name; again for each. Default: all.")] = None,
    arm: Annotated[list[str] | None, typer.Option(help="By name; again for each. Default: all.")] = None,
    seeds: Annotated[int, typer.Option(min=1, help="How many.")] = 1,
    first_seed: Annotated[int, typer.Option(min=0, help="The others follow it.")] = FIRST_SEED,
    device: Annotated[Device, typer.Option(help="auto: a GPU if there is one.")] = Device.auto,
    slots: Annotated[int, typer.Option(min=1, help="Runs at a time on a GPU.")] = 7,
    colocate: Annotated[bool, typer.Option(help="vLLM makes the rollouts if it is installed.")] = True,
    seconds: Annotated[float, typer.Option(help="Everything has ended then.")] = 560.0,
    run_seconds: Annotated[float, typer.Option(help="A run that is not at its end then is stopped.")] = 120.0,
    base_steps: Annotated[int, typer.Option(help="`sft` steps of 64 scenes that make a base.")] = 300,
    scenes: Annotated[int, typer.Option(help="Training scenes of the new task.")] = 200,
    val: Annotated[int, typer.Option(help="Validation scenes.")] = 100,
    test: Annotated[int, typer.Option(help="Test scenes of each task.")] = 300,
) -> None:
    """Make the bases, run every arm in every regime, report."""
    for kind, given, known in (("regime", regime, REGIMES), ("arm", arm, ARMS)):
        if unknown := set(given or ()) - set(known):
            raise typer.BadParameter(f"no such {kind}: {', '.join(sorted(unknown))}; there are: {'; '.join(known)}")
    if device == Device.cuda and not torch.cuda.is_available():
        raise typer.BadParameter("--device cuda: torch finds no GPU here; wanted a GPU, or --device cpu")
    gpu = torch.cuda.is_available() and device != Device.cpu
    if gpu:
        os.environ.setdefault("OMP_NUM_THREADS", "1")  # many processes share the cores
    number = slots if gpu else 1
    experiment = ForgettingExperiment(
        out=out,
        work=work,
        deadline=time.monotonic() + seconds - REPORT_S,
        engine=study.engine(colocate and importlib.util.find_spec("vllm") is not None, number),
        slots=[Slot(index=i, has_server=False, learner_devices=(0,) if gpu else ()) for i in range(number)],
        run_s=run_seconds,
        base_steps=base_steps,
        scenes=scenes,
        val=val,
        test=test,
    )
    numbers = range(first_seed, first_seed + seeds)
    chosen = [ForgettingRun(r, a, seed) for seed in numbers for r in regime or REGIMES for a in arm or ARMS]
    chosen.sort(key=lambda run: ARMS[run.arm].grpo is None)  # the longest runs begin first, so that all end together
    sys.exit(exit_code_of(lambda processes: _work(experiment, processes, chosen), lambda: report(experiment.out)))


def _work(experiment: ForgettingExperiment, processes: Processes, runs: Sequence[ForgettingRun]) -> None:
    experiment.make_folders()
    (experiment.out / "bases").mkdir(parents=True, exist_ok=True)
    regimes = list(dict.fromkeys(run.regime for run in runs))
    write_data(experiment, regimes)
    make_bases(experiment, processes, regimes)
    experiment.compare(
        processes,
        experiment.slots,
        runs,
        config=lambda run, slot: run_config(experiment, run),
        keep=lambda run: keep_result(experiment, run),
        run_limit_s=experiment.run_s,
        keeps_stopped=True,
        keeps_cut=True,  # arms are compared where they have the same F1, not after the same time
    )


# ---- data and bases --------------------------------------------------------------------------------------------------


def write_data(experiment: ForgettingExperiment, regimes: Iterable[str]) -> None:
    """Write per regime `train`, `mixed` (with old scenes) and `eval` (validation scenes, and test scenes of the old and
    of the new task); where a base is missing `teaching`, which makes it."""
    folder, workers = experiment.work / "data", os.cpu_count() or 1
    tenth = -(-experiment.scenes // 10)
    drawn = Build(train=experiment.scenes + tenth, val=experiment.val, test=experiment.test, seed=3)
    build(drawn, folder / "scenes", workers=workers)
    train, val, test = (_rows(folder / "scenes", split) for split in ("train", "val", "test"))
    for regime in regimes:
        task = REGIMES[regime]
        mine = of_new_task(train[: experiment.scenes], task)
        asked = {VAL: of_new_task(val, task), OLD: test, NEW: of_new_task(test, task)}
        parts = {
            "train": mine,
            "mixed": mine + train[experiment.scenes :],
            "eval": [{**row, "id": f"{part}-{row['id']}"} for part, rows in asked.items() for row in rows],
        }
        if not experiment.base(regime).is_dir():
            build(Build(train=8 * experiment.scenes, val=0, test=0, seed=4), folder / "teaching", workers=workers)
            known = _rows(folder / "teaching", "train")
            few = round(NEW_SHARE * len(known))
            parts["teaching"] = known[few:] + of_new_task(known[:few], task)
        for part, rows in parts.items():
            study.write_rows(experiment.data(regime, part), rows)


def _rows(folder: Path, split: str) -> list[Row]:
    """Return the rows with the images' paths from the folder above, where the files of the regimes are."""
    rows = study.read_rows(folder / f"{split}.jsonl")
    return [{**row, "images": [f"{folder.name}/{image}" for image in row["images"]]} for row in rows]


def of_new_task(rows: Iterable[Row], task: NewTask) -> list[Row]:
    """Return the same scenes; those without an object of the new task are left out."""
    turn = {"role": "user", "content": f"<image>{task.prompt}"}
    made = [{**row, "messages": [turn], "objects": task.objects(row["objects"])} for row in rows]
    return [row for row in made if row["objects"]]


def make_bases(experiment: ForgettingExperiment, processes: Processes, regimes: Sequence[str]) -> None:
    """Make the bases, side by side on a GPU. Raises CheckpointError if one fails, DeadlineError if another command
    makes bases in the same folder for longer than the time that is left."""
    if not _missing_bases(experiment, regimes):
        return
    with one_at_a_time(experiment.out / "bases", experiment.left_s()):
        _make_missing(experiment, processes, _missing_bases(experiment, regimes))  # another command may have made them


def _missing_bases(experiment: ForgettingExperiment, regimes: Sequence[str]) -> list[str]:
    return [regime for regime in regimes if not experiment.base(regime).is_dir()]


def _make_missing(experiment: ForgettingExperiment, processes: Processes, missing: Sequence[str]) -> None:
    for together in [missing] if experiment.on_gpu else [[regime] for regime in missing]:
        started = {
            regime: start_learner(
                processes,
                experiment.runs_dir,
                f"base-{regime}",
                base_config(
                    CHECKPOINT,
                    experiment.data(regime, "teaching"),
                    experiment.runs_dir / f"base-{regime}",
                    steps=experiment.base_steps,
                    batch_size=min(64, 8 * experiment.scenes),
                    learning_rate=7e-4,
                    global_max_length=16384,
                    data={"num_workers": 2 if experiment.on_gpu else 0},
                    training={"overwrite": True},  # replaces what an interrupted command left
                ),
                ranks=None,
                devices=experiment.slots[0].learner_devices,
            )
            for regime in together
        }
        for regime, learner in started.items():
            export(max(checkpoints_of(learner, experiment.left_s()).items())[1], experiment.base(regime))
            say(f"base {regime}: {experiment.left_s():.0f} s left")


# ---- runs ------------------------------------------------------------------------------------------------------------


def run_config(experiment: ForgettingExperiment, run: ForgettingRun) -> dict[str, Any]:
    arm = ARMS[run.arm]
    batch_size = min(arm.batch_size, experiment.scenes) * arm.group
    config = arms.run_config(
        arm,
        model=experiment.base(run.regime),
        train=experiment.data(run.regime, "mixed" if arm.old_share else "train"),
        test=experiment.data(run.regime, "eval"),
        run_dir=experiment.run_dir(run),
        steps=arm.steps,
        batch_size=batch_size,
        engine=experiment.engine,
        max_new_tokens=192,
        global_max_length=320 * batch_size,
        data_workers=1 if experiment.on_gpu else 0,
        training={
            "seed": run.seed,
            "bf16": experiment.on_gpu,
            "packing_buffer": max(64, batch_size),
            "learning_rate": arm.rate * (5 if arm.lora else 1),
            "lr_scheduler_type": "constant",
            "warmup_steps": max(1, arm.steps // 20),
            "eval_on_start": True,
            "eval_steps": max(1, arm.steps // arm.evaluations),
        },
    )
    if arm.lora:
        config["model"]["lora"] = {"r": 16, "alpha": 32}
    return config


def keep_result(experiment: ForgettingExperiment, run: ForgettingRun) -> None:
    """Keep each whole evaluation: step, seconds of training, validation F1, and the counts of both tests' scenes."""
    run_dir = experiment.run_dir(run)
    events = read_events(run_dir)
    seconds: dict[int, float] = {0: 0.0}
    for step in steps_of(events):
        seconds[step["global_step"]] = seconds[step["global_step"] - 1] + step["step_s"]
    course = []
    for event in events:
        if event["event"] == "eval":
            step = event["global_step"]
            val, old, new = _parts(run_dir / "eval" / f"step_{step:06d}.jsonl")
            course.append({"step": step, "seconds": round(seconds[step], 1), "val": _f1(val), OLD: old, NEW: new})
    if len(course) < 2:
        say(f"{run.folder}: stopped before it was evaluated after a step")
        return
    result = {"arm": run.arm, "seed": run.seed, "course": course, **circumstances()}
    write_atomically(run.result(experiment.out), json.dumps(result) + "\n")
    say(f"{run.folder}: {len(course)} evaluations, new-task F1 {max((one['val'] for one in course), default=0.0):.3f}")


def _parts(path: Path) -> list[dict[str, dict[str, float]]]:
    """Return the counts of the scenes of each part, by id."""
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    counts = {line["id"]: {name: line["counts"].get(name, 0.0) for name in COUNTED} for line in lines}
    return [{i: one for i, one in counts.items() if i.startswith(f"{part}-")} for part in (VAL, OLD, NEW)]


# ---- the report ------------------------------------------------------------------------------------------------------


def level_of(courses: Mapping[str, Sequence[Row]]) -> float | None:
    """Return the new-task F1, on validation, that all arms reach which learn it at all; None if none does."""
    best = [max(one["val"] for one in course) for course in courses.values() if _gain(course) >= LEAST_GAIN]
    return min(best, default=None)


def _gain(course: Sequence[Row]) -> float:
    return max(one["val"] for one in course) - course[0]["val"] if course else 0.0


def at_level(course: Sequence[Row], level: float) -> Row | None:
    """Return the first evaluation with at least that validation F1."""
    return next((one for one in course if one["val"] >= level), None)


def report(out: Path) -> None:
    """Write `forgetting.json` and `forgetting.md` from the results that there are."""
    found: dict[str, Any] = {}
    text = ""
    for folder in sorted((out / "results").glob("*")):
        courses: dict[str, dict[str, list[Row]]] = defaultdict(dict)  # keys are seed and arm
        for path in sorted(folder.glob("*.json")):
            result = json.loads(path.read_text())
            if result["course"]:
                courses[str(result["seed"])][result["arm"]] = result["course"]
        found[folder.name] = {seed: compared(arms_of) for seed, arms_of in sorted(courses.items())}
        for seed, one in found[folder.name].items():
            text += f"\n{folder.name}, seed {seed}: at new-task F1 {one['level']} on validation\n\n{table(one)}\n"
    if found:
        write_atomically(out / "forgetting.json", json.dumps({**circumstances(), "regimes": found}, indent=1) + "\n")
        write_atomically(out / "forgetting.md", text)
        print(text, flush=True)


def compared(courses: Mapping[str, Sequence[Row]]) -> dict[str, Any]:
    """Compare the arms of one regime and seed at equal new-task F1; `curves`: step, seconds, validation, new and old
    test F1."""
    level = level_of(courses)
    chosen = {arm: at_level(course, level) if level is not None else None for arm, course in courses.items()}
    start, sft = next(iter(courses.values()))[0], chosen.get("sft")
    return {
        "level": None if level is None else round(level, 4),
        "base": {name: _f1(start[name]) for name in (OLD, NEW)},
        "arms": {
            arm: {
                "at_level": None
                if one is None
                else {
                    "step": one["step"],
                    "seconds": one["seconds"],
                    **{name: _f1(one[name]) for name in (OLD, NEW)},
                    "kept": None if sft is None or arm == "sft" else _difference(one[OLD], sft[OLD]),
                },
                "curves": [
                    [each["step"], each["seconds"], round(each["val"], 4), _f1(each[NEW]), _f1(each[OLD])]
                    for each in courses[arm]
                ],
            }
            for arm, one in chosen.items()
        },
    }


def _matrix(scenes: Mapping[str, Mapping[str, float]], ids: Iterable[str]) -> NDArray[np.float64]:
    return np.array([[scenes[i].get(column, 0.0) for column in COLUMNS] for i in ids], dtype=np.float64)


def _f1(scenes: Mapping[str, Mapping[str, float]]) -> float:
    return round(float(METRICS[F1](columns_of(_matrix(scenes, scenes).sum(axis=0)))), 4)


def _difference(one: Mapping[str, Mapping[str, float]], other: Mapping[str, Mapping[str, float]]) -> list[float]:
    """Return F1 of `one` minus that of `other`, and its 95% interval: the same scenes of both are drawn."""
    ids = [i for i in one if i in other]
    drawn = np.random.default_rng(0).multinomial(len(ids), np.full(len(ids), 1 / len(ids)), size=DRAWS)
    weights = np.concatenate([np.ones((1, len(ids))), drawn])
    a, b = (METRICS[F1](columns_of(weights @ _matrix(scenes, ids))) for scenes in (one, other))
    return [round(float(value), 4) for value in ((a - b)[0], *np.quantile((a - b)[1:], [0.025, 0.975]))]


def table(one: Mapping[str, Any]) -> str:
    base = one["base"]
    rows = [["base", "0", "", f"{base[NEW]:.3f}", f"{base[OLD]:.3f}", ""]]
    for arm, known in one["arms"].items():
        at = known["at_level"]
        if at is None:
            rows.append([arm, "", "", "not reached", "", ""])
            continue
        kept = at["kept"]
        shown = "" if kept is None else f"{kept[0]:+.3f} [{kept[1]:+.3f}, {kept[2]:+.3f}]"
        rows.append([arm, str(at["step"]), f"{at['seconds']:.0f}", f"{at[NEW]:.3f}", f"{at[OLD]:.3f}", shown])
    head = ["arm", "step", "train s", "new-task F1", "old-task F1", "old-task F1 minus sft"]
    return "\n".join(markdown_table(head, rows))


if __name__ == "__main__":
    typer.run(main)
