"""Find which method pays where: one model per kind of error, finite data, early stopping for all: `python -m
bench.study`.

A *regime* is what the base model lacks, how many training scenes there are, and how complete their labels are:

    demo | stops-early | skips-crowded | repeats | other-boxes     errors of policy: it could, but it does not
    half-taught | noisy                                            errors of knowledge: it cannot yet
    x 32, 200, 1,000 or 10,000 scenes
    x labels complete, or with a fault: "-missing" (40% of them; "-missing60": 60%), "-classes40", "-small40", "-stops",
      "-extra10", "-renamed10" (see FAULTS)

`demo` is the demo's checkpoint, whose labels often stopped early; `knows` is the same after `sft` on complete labels.
`noisy` is the demo's checkpoint on scenes whose pixels have noise, which it never saw: F1 0.2.
Each other base is `knows` after a few steps on labels of which three quarters have that habit. `bccd` and
`bccd-missing` are 205 photographs of blood cells, from the model shipped for them.

An *arm* is a method. All arms are stopped early in the same way: every few steps they answer validation scenes, whose
labels are as complete as those of training, and test scenes, whose labels are as published. The step with the best
validation `fm@0.5`, whose order does not depend on missing labels, is the one whose test scenes count. An arm such as
`sft, then grpo` begins with the run of its first part and the same seed, at its best step. An arm's rate may be
multiplied on the command line (`--rate 0.5`). Of several rates the report shows the one that is best by validation.
`recipe` is `rollout-learner recipe`, which chooses for itself; it needs `--run-seconds`. With `--augment` all arms of
the command train on augmented pictures: `data.augment` is DIGITS_AUGMENT, and for the cells that of their base. The
names of these arms end in ", augmented", so they stand beside the others.

With `--run-seconds` every run has the same time, its start included, and what it has evaluated by then counts.

In `--out`: `bases/`, and per run `results/REGIME/ARM-SEED.json`. What is there is not done again, so the study goes on
with a second command, also on another machine. Of two commands at a time the second waits while the first makes bases.
`study.json` and `study.md` are the report. `--features` adds what `predict-gain` measures of each regime, for
`bench.calibrate`. `--work` is scratch. The engine is in the learner's process, or without vLLM the trained model itself
makes the rollouts: several runs side by side on a GPU, one on a CPU.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shutil
import sys
import time
import zlib
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import mean, median
from typing import Annotated, Any

import numpy as np
import torch
import typer
from PIL import Image

from bench.experiment import arms
from bench.experiment.arms import FIRST_SEED, KEPT, TUNED, base_config, file_name
from bench.experiment.results import SHOWN, read_results, shown, summarize
from bench.experiment.runner import Experiment, Slot, checkpoints_of, export, one_at_a_time, run_all
from bench.figures import circumstances, markdown_table
from bench.models import CHECKPOINT
from bench.runs import LearnerRun, exit_code_of, last_words, read_events, say, start_learner, steps_of, visible
from deploy.bccd.photographs import AUGMENT as CELLS_AUGMENT
from deploy.bccd.photographs import read_photographs, write_jsonl
from deploy.demo.build_data import Build, build
from deploy.launch import Processes
from learner.recipe.stages import GRPO, MATCHING, SFT
from learner.report.read import RECIPE
from learner.run.files import write_atomically
from learner.tasks.detection.metrics import COLUMNS, METRICS, columns_of
from shared.config.parse import write_yaml
from shared.reading import json_in

Row = dict[str, Any]

VAL, TEST = 100, 500  # scenes of digits
TAUGHT = 10_000  # scenes that the bases learn from
PHOTOGRAPHS_AT_ONCE = 512
TEST_PART = "test"
SELECTED_BY = "fm@0.5"  # labels of validation scenes have gaps where those of training have
REPORT_S = 6.0
RECIPE_SHARE = 0.9  # share of a run's time for its stages; the rest is for the process's start and an evaluation
RATE = ", rate x "
AUGMENTED = ", augmented"
F1 = "f1@0.5"


# ---- what is compared ------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class StudyArm(arms.Arm):
    """`steps` and `batch_size` (samples) of a run, and how often it is evaluated."""

    rate: float = 1e-4
    batch_size: int = 32
    steps: int = 60
    evaluations: int = 10
    after: str = ""  # begins with the stopped run of this arm
    recipe: bool = False  # `rollout-learner recipe`, by the configuration of `variant`


_GRPO: Mapping[str, Any] = {"variant": "grpo", "rate": 3e-5, "batch_size": 16, "steps": 80, "evaluations": 8}
_SOFT_IOU: Mapping[str, Any] = {**_GRPO, "grpo": {"credit": "object"}, "reward": {"soft_iou": 1.0}}
ARMS: Mapping[str, StudyArm] = {
    "sft": StudyArm(variant="sft", steps=120, evaluations=15),
    "sft on completed labels": StudyArm(variant="sft", steps=120, evaluations=15, complete={}),
    "sft on completed labels, 8 answers": StudyArm(variant="sft", steps=120, evaluations=15, complete={"rollouts": 8}),
    "sft on completed labels, 2 votes": StudyArm(variant="sft", steps=120, evaluations=15, complete={"min_votes": 2}),
    "sft on labels completed twice": StudyArm(variant="sft", steps=120, evaluations=15, complete={"refresh": 40}),
    "sft on completed labels, votes as weights": StudyArm(
        variant="sft", steps=120, evaluations=15, complete={"weight_by_votes": True}
    ),
    "rollout matching on completed labels": StudyArm(loss=KEPT, complete={}),
    "grpo on completed labels": StudyArm(grpo={}, complete={}, **_GRPO),
    "grpo on completed labels, 2 votes": StudyArm(grpo={}, complete={"min_votes": 2}, **_GRPO),
    "rollout matching": StudyArm(loss=TUNED),
    "rollout matching, keep_unmatched": StudyArm(loss=KEPT),
    "grpo": StudyArm(grpo={}, **_GRPO),
    "grpo, object credit": StudyArm(grpo={"credit": "object"}, **_GRPO),
    "grpo and sft": StudyArm(grpo={"credit": "object", "sft_weight": 1.0}, **_GRPO),
    "grpo and rollout matching": StudyArm(grpo={"credit": "object", "matching_weight": 1.0}, loss=TUNED, **_GRPO),
    "sft, then grpo": StudyArm(grpo={"credit": "object"}, after="sft", **_GRPO),
    "sft, then grpo and sft": StudyArm(grpo={"credit": "object", "sft_weight": 0.3}, after="sft", **_GRPO),
    "sft, then grpo on soft IoU": StudyArm(after="sft", **_SOFT_IOU),
    "completed, sft, then grpo on soft IoU": StudyArm(after="sft on completed labels", complete={}, **_SOFT_IOU),
    "keep_unmatched, then grpo on soft IoU": StudyArm(after="rollout matching, keep_unmatched", **_SOFT_IOU),
    "sft, then rollout matching": StudyArm(loss=TUNED, after="sft", rate=5e-5),
    "recipe": StudyArm(variant="sft", steps=120, evaluations=15, recipe=True),
}
GONE_ON_FROM = frozenset(arm.after for arm in ARMS.values() if arm.after)


# Colors alone. These bases have seen coordinates of whole pixels of 128, so 129 of the 1,000 coordinate tokens. A crop
# moves boxes onto others: the first loss of `sft` is 8.3 nats per token then (0.19 without), and
# 2.4 after 16 steps at 1e-4. A mirrored or turned digit may be another one.
DIGITS_AUGMENT: Mapping[str, Any] = {"smallest_crop": 1.0, "colors": 0.4}


@dataclass(frozen=True, slots=True)
class Habit:
    """A habit: what is done to the labels that teach it to a base, and for how many steps."""

    of_labels: Callable[[list[Row], np.random.Generator], list[Row]]
    steps: int = 50


def _first_three(objects: list[Row], rng: np.random.Generator) -> list[Row]:
    return sorted(objects, key=lambda one: (one["bbox_2d"][1], one["bbox_2d"][0]))[:3]


def _uncrowded(objects: list[Row], rng: np.random.Generator) -> list[Row]:
    """Return the objects that no other is near to; at least one."""
    alone = [a for a in objects if all(a is b or _gap(a["bbox_2d"], b["bbox_2d"]) > 8 for b in objects)]
    return alone or objects[:1]


def _gap(a: Sequence[int], b: Sequence[int]) -> int:
    """Return the pixels between two boxes along the axis that parts them further; negative where they overlap."""
    return max(b[0] - a[2], a[0] - b[2], b[1] - a[3], a[1] - b[3])


def _repeated(objects: list[Row], rng: np.random.Generator) -> list[Row]:
    """Return a third of the objects twice, the second time a pixel narrower: data with one object twice are refused."""
    found = []
    for one in objects:
        found.append(one)
        if rng.random() < 0.35:
            x1, y1, x2, y2 = one["bbox_2d"]
            found.append({**one, "bbox_2d": [x1, y1, x2 - 1, y2]})
    return found


def _wide(objects: list[Row], rng: np.random.Generator) -> list[Row]:
    """Return boxes with a margin of a fifth of the side all around, as other annotators leave."""
    return [{**one, "bbox_2d": _grown(one["bbox_2d"])} for one in objects]


def _grown(box: Sequence[int], by: float = 0.2, canvas: int = 128) -> list[int]:
    x1, y1, x2, y2 = box
    dx, dy = round((x2 - x1) * by), round((y2 - y1) * by)
    return [max(0, x1 - dx), max(0, y1 - dy), min(canvas, x2 + dx), min(canvas, y2 + dy)]


@dataclass(frozen=True, slots=True)
class Labels:
    """All labels of a split: what a fault must know to choose among them. Areas in pixels squared."""

    names: tuple[str, ...]  # sorted
    median_area: float

    @classmethod
    def of(cls, rows: Iterable[Row]) -> Labels:
        objects = [one for row in rows for one in row["objects"]]
        return cls(tuple(sorted({one["desc"] for one in objects})), median(_area(one["bbox_2d"]) for one in objects))


def _area(box: Sequence[float]) -> float:
    return (box[2] - box[0]) * (box[3] - box[1])


def _without(row: Row, chances: Sequence[float], rng: np.random.Generator) -> list[Row]:
    """Each label goes missing with its chance; one stays."""
    keep = rng.random(len(chances)) >= np.array(chances)
    keep[rng.integers(len(keep))] |= not keep.any()
    return [one for one, kept in zip(row["objects"], keep, strict=True) if kept]


def _missing(row: Row, share: float, labels: Labels, rng: np.random.Generator) -> list[Row]:
    """Each label is missing with the chance `share`."""
    return _without(row, [share] * len(row["objects"]), rng)


def _classes(row: Row, share: float, labels: Labels, rng: np.random.Generator) -> list[Row]:
    """Remove labels so that half of the classes lack twice the share, the others nothing."""
    lacking = labels.names[: (len(labels.names) + 1) // 2]
    return _without(row, [2 * share * (one["desc"] in lacking) for one in row["objects"]], rng)


def _small(row: Row, share: float, labels: Labels, rng: np.random.Generator) -> list[Row]:
    """The smaller half of the objects lacks twice the share, the larger nothing."""
    return _without(row, [2 * share * (_area(one["bbox_2d"]) < labels.median_area) for one in row["objects"]], rng)


def _stops(row: Row, share: float, labels: Labels, rng: np.random.Generator) -> list[Row]:
    """Stop the labels after three, whatever the share."""
    return _first_three(row["objects"], rng)


def _extra(row: Row, share: float, labels: Labels, rng: np.random.Generator) -> list[Row]:
    """Put beside each label, with the chance `share`, one of a random name and box, of a size that another has."""
    found = list(row["objects"])
    for one in row["objects"]:
        if rng.random() < share:
            x1, y1, x2, y2 = one["bbox_2d"]
            left = int(rng.integers(0, row["width"] - (x2 - x1) + 1))
            top = int(rng.integers(0, row["height"] - (y2 - y1) + 1))
            box = [left, top, left + x2 - x1, top + y2 - y1]
            found.append({**one, "desc": labels.names[rng.integers(len(labels.names))], "bbox_2d": box})
    return found


def _renamed(row: Row, share: float, labels: Labels, rng: np.random.Generator) -> list[Row]:
    """Each label has, with the chance `share`, another class's name."""
    return [
        {**one, "desc": rng.choice([name for name in labels.names if name != one["desc"]])}
        if rng.random() < share
        else one
        for one in row["objects"]
    ]


Fault = Callable[[Row, float, Labels, np.random.Generator], list[Row]]
FAULTS: Mapping[str, Fault] = {
    "missing": _missing,
    "classes": _classes,
    "small": _small,
    "stops": _stops,
    "extra": _extra,
    "renamed": _renamed,
}
SHARE = 0.4  # share of the labels, where a regime's name does not say it

DEMO, NOISY, KNOWS, HALF, BCCD = "demo", "noisy", "knows", "half-taught", "bccd"
NOISE_STD = 50.0  # of a pixel's 255, normally distributed
MODELS: Mapping[str, Path] = {
    DEMO: CHECKPOINT,
    NOISY: CHECKPOINT,
    BCCD: Path(__file__).parents[1] / "deploy" / "bccd" / "checkpoint",
}
HABIT_SHARE = 0.75
HABITS: Mapping[str, Habit] = {
    "stops-early": Habit(_first_three),
    "skips-crowded": Habit(_uncrowded),
    "repeats": Habit(_repeated),
    "other-boxes": Habit(_wide),
}


@dataclass(frozen=True, slots=True)
class Regime:
    base: str
    scenes: int
    fault: str = ""  # one of FAULTS
    share: float = SHARE

    @classmethod
    def read(cls, name: str) -> Regime:
        """Read a name such as `stops-early-200`, `knows-1000-missing`, `demo-256-small20`, `bccd`."""
        found = re.fullmatch(rf"(.+?)(?:-(\d+))?(?:-({'|'.join(FAULTS)})(\d\d)?)?", name)
        bases = (DEMO, NOISY, KNOWS, HALF, BCCD, *HABITS)
        base, scenes, fault, percent = found.groups() if found else ("", None, None, None)
        if base not in bases or (scenes is None) != (base == BCCD):
            wanted = "BASE-SCENES or bccd, and a fault if it has one (-missing20); " + (
                f"bases: {', '.join(bases)}; faults: {', '.join(FAULTS)}"
            )
            raise typer.BadParameter(f"{name}: no such regime; wanted: {wanted}")
        return cls(base, int(scenes or 205), fault or "", int(percent) / 100 if percent else SHARE)

    @property
    def is_bccd(self) -> bool:
        return self.base == BCCD

    @property
    def name(self) -> str:
        number = "" if self.is_bccd else f"-{self.scenes}"
        percent = "" if self.share == SHARE else f"{100 * self.share:02.0f}"
        return f"{self.base}{number}{f'-{self.fault}{percent}' if self.fault else ''}"


@dataclass(frozen=True, slots=True)
class StudyRun:
    regime: Regime
    arm: str
    seed: int
    rate: float = 1.0  # times the arm's
    augmented: bool = False  # trains on augmented pictures

    @property
    def label(self) -> str:
        arm = f"{self.arm}{AUGMENTED}" if self.augmented else self.arm
        return arm if self.rate == 1.0 else f"{arm}{RATE}{self.rate:g}"

    @property
    def _name(self) -> str:
        return f"{file_name(self.label.replace(', ', '--'))}-{self.seed}"

    @property
    def folder(self) -> str:
        return f"{self.regime.name}--{self._name}"

    def result(self, out: Path) -> Path:
        return out / "results" / self.regime.name / f"{self._name}.json"

    @property
    def keeps_weights(self) -> bool:
        """Others may go on from its best step."""
        return self.arm in GONE_ON_FROM and self.rate == 1.0

    @property
    def first(self) -> StudyRun | None:
        """The run that this one goes on from."""
        first = ARMS[self.arm].after
        return replace(self, arm=first, rate=1.0) if first else None


@dataclass(frozen=True, kw_only=True, slots=True)
class StudyExperiment(Experiment):
    bccd: Path | None
    slots: list[Slot[StudyRun]]
    engine: Mapping[str, Any]
    run_s: float | None
    knows_steps: int
    steps_share: float
    pool: int
    val: int
    test: int

    @property
    def on_gpu(self) -> bool:
        return bool(self.slots[0].learner_devices)

    def base(self, name: str) -> Path:
        return MODELS.get(name, self.out / "bases" / name)

    def features(self, regime: Regime) -> Path:
        return self.out / "features" / f"{regime.name}.json"

    def stopped(self, run: StudyRun) -> Path:
        """Return the weights of a run that others go on from."""
        return self.out / "stopped" / run.folder


# ---- the command -----------------------------------------------------------------------------------------------------


def main(
    out: Annotated[Path, typer.Option(help="Results and base models; what is there is kept.")],
    work: Annotated[Path, typer.Option(help="Scratch: data, run folders, logs.")] = Path("runs/study"),
    regime: Annotated[list[str] | None, typer.Option(help="Such as stops-early-200; again for each.")] = None,
    arm: Annotated[list[str] | None, typer.Option(help="By name; again for each. Default: all.")] = None,
    rate: Annotated[list[float] | None, typer.Option(help="Times the arms' learning rate; again for each.")] = None,
    augment: Annotated[bool, typer.Option("--augment", help="All arms train on augmented pictures.")] = False,
    seeds: Annotated[int, typer.Option(min=1, help="How many.")] = 1,
    first_seed: Annotated[int, typer.Option(min=0, help="The others follow it.")] = FIRST_SEED,
    bccd: Annotated[Path | None, typer.Option(help="A clone of github.com/Shenggan/BCCD_Dataset.")] = None,
    slots: Annotated[int, typer.Option(min=1, help="Runs at a time on a GPU.")] = 10,
    colocate: Annotated[bool, typer.Option(help="vLLM makes the rollouts if it is installed.")] = True,
    seconds: Annotated[float, typer.Option(help="Everything has ended then.")] = 560.0,
    run_seconds: Annotated[float | None, typer.Option(help="A run that is not at its end then is stopped.")] = None,
    features: Annotated[bool, typer.Option(help="Measure what predict-gain predicts from.")] = False,
    knows_steps: Annotated[int, typer.Option(help="`sft` steps of 64 scenes that make the base `knows`.")] = 400,
    steps_share: Annotated[float, typer.Option(help="Of the arms' steps.")] = 1.0,
    pool: Annotated[int, typer.Option(help="Training scenes that are drawn.")] = 10_000,
    val: Annotated[int, typer.Option(help="Validation scenes.")] = VAL,
    test: Annotated[int, typer.Option(help="Test scenes.")] = TEST,
) -> None:
    """Make the bases, run every arm in every regime, report."""
    gpu = torch.cuda.is_available()
    devices = (0,) if gpu else ()
    if gpu:
        os.environ.setdefault("OMP_NUM_THREADS", "1")  # many processes share the cores
    experiment = StudyExperiment(
        out=out,
        work=work,
        bccd=bccd,
        slots=[Slot(index=i, has_server=False, learner_devices=devices) for i in range(slots if gpu else 1)],
        engine=engine(colocate and importlib.util.find_spec("vllm") is not None, slots if gpu else 1),
        deadline=time.monotonic() + seconds - REPORT_S,
        run_s=run_seconds,
        knows_steps=knows_steps,
        steps_share=steps_share,
        pool=pool,
        val=val,
        test=test,
    )
    if unknown := set(arm or ()) - set(ARMS):
        raise typer.BadParameter(f"no such arm: {', '.join(sorted(unknown))}; there are: {'; '.join(ARMS)}")
    if run_seconds is None and any(ARMS[name].recipe for name in arm or ARMS):
        raise typer.BadParameter("the arm recipe needs --run-seconds, the time that it has")
    regimes = [Regime.read(name) for name in regime or ()]
    numbers = range(first_seed, first_seed + seeds)
    runs = runs_of(numbers, regimes, arm or tuple(ARMS), rate or (1.0,), augmented=augment)
    sys.exit(_run(experiment, runs, regimes if features else ()))


def runs_of(
    seeds: Iterable[int], regimes: Sequence[Regime], names: Sequence[str], rates: Sequence[float], *, augmented: bool
) -> list[StudyRun]:
    """Return every arm in every regime, seed by seed."""
    return [
        StudyRun(regime, name, seed, rate, augmented)
        for seed in seeds
        for regime in regimes
        for name in names
        for rate in rates
    ]


def engine(vllm: bool, slots: int) -> dict[str, Any]:
    """Return what makes rollouts: keys of `rollout_matching`."""
    if not vllm:
        return {"rollout_backend": "hf", "decode_batch_size": 1024}  # a whole evaluation
    share = {"gpu_memory_utilization": round(0.8 / slots, 3), "max_model_len": 1024}
    return {"decode_batch_size": 256, "vllm": {"mode": "colocate", "tensor_parallel_size": 1, **share}}


def _run(experiment: StudyExperiment, runs: Sequence[StudyRun], predicted: Sequence[Regime]) -> int:
    experiment.make_folders()
    for made in (experiment.out / "bases", experiment.out / "stopped", experiment.out / "features"):
        made.mkdir(parents=True, exist_ok=True)

    def work(processes: Processes) -> None:
        write_data(experiment, {run.regime for run in runs})
        make_bases(experiment, processes, {run.regime.base for run in runs})
        measure_features(experiment, processes, predicted)
        compare(experiment, processes, runs)

    return exit_code_of(work, lambda: report(experiment.out))


# ---- data ------------------------------------------------------------------------------------------------------------


def write_data(experiment: StudyExperiment, regimes: Iterable[Regime]) -> None:
    """Write per regime `REGIME.train.jsonl`, `REGIME.val.jsonl`, `REGIME.test.jsonl`, the last two also as
    `REGIME.eval.jsonl`; where a base is missing `teaching/HABIT.jsonl`."""
    began = time.monotonic()
    if any(not regime.is_bccd for regime in regimes):
        workers = os.cpu_count() or 1
        build(
            Build(train=experiment.pool, val=experiment.val, test=experiment.test, seed=3),
            experiment.work / "data",
            workers=workers,
        )
        if missing_bases(experiment, {regime.base for regime in regimes}):
            _write_teaching(experiment, workers)
    for regime in regimes:
        train, val, test = _photographs(experiment) if regime.is_bccd else _digits(experiment, regime)
        if regime.fault:
            train, val = _faulty(train, regime, seed=6), _faulty(val, regime, seed=7)
        folder = experiment.work / ("bccd" if regime.is_bccd else "data")
        write_rows(folder / f"{regime.name}.train.jsonl", train)
        write_rows(folder / f"{regime.name}.val.jsonl", val)
        write_rows(folder / f"{regime.name}.test.jsonl", test)
        write_rows(folder / f"{regime.name}.eval.jsonl", val + test)
    say(f"data: {time.monotonic() - began:.0f} s")


def _write_teaching(experiment: StudyExperiment, workers: int) -> None:
    build(Build(train=TAUGHT, val=0, test=0, seed=4), experiment.work / "teaching", workers=workers)
    rows = read_rows(experiment.work / "teaching" / "train.jsonl")
    for name, habit in HABITS.items():
        rng = np.random.default_rng(5)
        write_rows(
            experiment.work / "teaching" / f"{name}.jsonl",
            [
                row | ({"objects": habit.of_labels(row["objects"], rng)} if rng.random() < HABIT_SHARE else {})
                for row in rows
            ],
        )


def _digits(experiment: StudyExperiment, regime: Regime) -> tuple[list[Row], list[Row], list[Row]]:
    folder = experiment.work / "data"
    train, val, test = (read_rows(folder / f"{split}.jsonl") for split in ("train", "val", "test"))
    train = train[: regime.scenes]
    if regime.base == NOISY:
        train, val, test = ([with_noise(row, folder) for row in rows] for rows in (train, val, test))
    return train, val, test


def with_noise(row: Row, folder: Path) -> Row:
    """Return the scene with noise, the same in every call; its picture is written into `folder`, if it is not there."""
    (image,) = row["images"]
    noisy = Path("noisy") / image
    if not (folder / noisy).is_file():
        (folder / noisy).parent.mkdir(parents=True, exist_ok=True)
        with Image.open(folder / image) as picture:
            pixels = np.asarray(picture.convert("RGB"), dtype=np.float64)
        rng = np.random.default_rng(zlib.crc32(row["id"].encode()))
        pixels = np.clip(pixels + rng.normal(0.0, NOISE_STD, pixels.shape), 0, 255)
        Image.fromarray(pixels.astype(np.uint8)).save(folder / noisy)
    return {**row, "images": [str(noisy)]}


def _photographs(experiment: StudyExperiment) -> tuple[list[Row], list[Row], list[Row]]:
    if experiment.bccd is None:
        raise typer.BadParameter("the regimes bccd and bccd-missing need --bccd")
    (experiment.work / "bccd").mkdir(parents=True, exist_ok=True)
    found = []
    for split in ("train", "val", "test"):
        path = experiment.work / "bccd" / f"{split}.jsonl"
        write_jsonl(read_photographs(experiment.bccd, split), path)
        found.append([{**row, "id": f"{split}-{row['id']}"} for row in read_rows(path)])
    return found[0], found[1], found[2]


def _faulty(rows: Sequence[Row], regime: Regime, seed: int) -> list[Row]:
    rng, labels = np.random.default_rng(seed), Labels.of(rows)
    return [row | {"objects": FAULTS[regime.fault](row, regime.share, labels, rng)} for row in rows]


def read_rows(path: Path) -> list[Row]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def write_rows(path: Path, rows: Iterable[Row]) -> None:
    write_atomically(path, "".join(json.dumps(row) + "\n" for row in rows))


# ---- base models -----------------------------------------------------------------------------------------------------


def make_bases(experiment: StudyExperiment, processes: Processes, names: Iterable[str]) -> None:
    """Make `knows` first, `half-taught` beside it, then those that come from it, side by side. Raises DeadlineError if
    another command makes bases in the same folder for longer than the time that is left."""
    if not missing_bases(experiment, names):
        return
    with one_at_a_time(experiment.out / "bases", experiment.left_s()):
        _make_missing(experiment, processes, missing_bases(experiment, names))  # another command may have made them


def _make_missing(experiment: StudyExperiment, processes: Processes, missing: set[str]) -> None:
    for together in ([KNOWS, HALF], list(HABITS)):
        started = {name: _start_base(experiment, processes, name) for name in together if name in missing}
        for name, learner in started.items():
            (checkpoint,) = checkpoints_of(learner, experiment.left_s()).values()
            export(checkpoint, experiment.base(name))
            say(f"base {name}: {experiment.left_s():.0f} s left")


def missing_bases(experiment: StudyExperiment, names: Iterable[str]) -> set[str]:
    """Return the bases that must be made for those named: `knows` too, for a habit that is not there."""
    missing = {name for name in set(names) - set(MODELS) if not experiment.base(name).is_dir()}
    if missing & set(HABITS) and not experiment.base(KNOWS).is_dir():
        missing.add(KNOWS)
    return missing


def _start_base(experiment: StudyExperiment, processes: Processes, name: str) -> LearnerRun:
    folder = experiment.runs_dir
    shutil.rmtree(folder / f"base-{name}", ignore_errors=True)
    habit = HABITS.get(name)
    steps = (
        max(1, round(experiment.steps_share * habit.steps))
        if habit
        else experiment.knows_steps // (6 if name == HALF else 1)
    )
    config = base_config(
        experiment.base(KNOWS) if habit else CHECKPOINT,
        experiment.work / "teaching" / f"{name if habit else 'train'}.jsonl",
        folder / f"base-{name}",
        steps=steps,
        batch_size=64,
        learning_rate=2e-4 if habit else 7e-4,
        global_max_length=16384,
        data={"num_workers": 2 if experiment.on_gpu else 0},
    )
    return start_learner(
        processes, folder, f"base-{name}", config, ranks=None, devices=experiment.slots[0].learner_devices
    )


# ---- what predict-gain measures --------------------------------------------------------------------------------------


def measure_features(experiment: StudyExperiment, processes: Processes, regimes: Sequence[Regime]) -> None:
    """Measure each regime's base model on its training and validation data."""
    queue = [regime for regime in regimes if not experiment.features(regime).is_file()]

    def start(regime: Regime, slot: Slot[Regime]) -> LearnerRun:
        config = run_config(experiment, StudyRun(regime, "rollout matching", FIRST_SEED))
        train = Path(config["data"]["train"])
        config["data"] |= {"val": str(train.with_name(f"{regime.name}.val.jsonl")), "test": None}
        path = experiment.runs_dir / f"features-{regime.name}.yaml"
        write_yaml(path, config, "bench")
        argv = [sys.executable, "-m", "learner", "predict-gain", "--config", str(path)]
        argv += ["--json", str(experiment.features(regime))]
        log = path.with_suffix(".log")
        process = processes.start(f"features {regime.name}", argv, devices=visible(*slot.learner_devices), log=log)
        return LearnerRun(process=process, log=log, run_dir=path.parent)

    def ended(regime: Regime, code: int | None) -> None:
        log = experiment.runs_dir / f"features-{regime.name}.log"
        say(f"features of {regime.name}: {'measured' if code == 0 else last_words(log)}")

    slots = [
        Slot[Regime](index=slot.index, has_server=False, learner_devices=slot.learner_devices)
        for slot in experiment.slots
    ]
    run_all(
        slots,
        next_run=lambda: queue.pop(0) if queue else None,
        start=start,
        ended=ended,
        deadline=experiment.deadline,
        run_limit_s=experiment.left_s(),
    )


# ---- the runs --------------------------------------------------------------------------------------------------------


def compare(experiment: StudyExperiment, processes: Processes, runs: Sequence[StudyRun]) -> None:
    experiment.compare(
        processes,
        experiment.slots,
        runs,
        config=lambda run, slot: run_config(experiment, run),
        keep=lambda run: keep_result(experiment, run),
        command=lambda run: recipe_command(experiment) if ARMS[run.arm].recipe else (),
        can_start=lambda run: run.first is None or experiment.stopped(run.first).is_dir(),
        run_limit_s=min(experiment.left_s(), experiment.run_s or experiment.left_s()),
        keeps_stopped=experiment.run_s is not None,
    )


def recipe_command(experiment: StudyExperiment) -> list[str]:
    """The recipe ends by itself, a little before its time as a run is over."""
    assert experiment.run_s is not None, "refused by main"
    return ["recipe", "--minutes", f"{RECIPE_SHARE * experiment.run_s / 60:.3f}"]


def run_config(experiment: StudyExperiment, run: StudyRun) -> dict[str, Any]:
    arm, regime = replace(ARMS[run.arm], augment=augment_of(run)), run.regime
    steps = max(2, round(arm.steps * experiment.steps_share))
    every = max(1, steps // arm.evaluations)
    data = experiment.work / ("bccd" if regime.is_bccd else "data")
    batch_size = min(arm.batch_size, regime.scenes) * arm.group
    keys = dict(experiment.engine)
    if regime.is_bccd:  # photographs and their answers take several times the memory of a scene of digits
        keys["decode_batch_size"] = min(PHOTOGRAPHS_AT_ONCE, keys["decode_batch_size"])
    config = arms.run_config(
        arm,
        model=experiment.stopped(run.first) if run.first else experiment.base(regime.base),
        train=data / f"{regime.name}.train.jsonl",
        test=data / f"{regime.name}.eval.jsonl",
        run_dir=experiment.run_dir(run),
        steps=steps,
        batch_size=batch_size,
        engine=keys,
        max_new_tokens=512 if regime.is_bccd else 192,
        global_max_length=(900 if regime.is_bccd else 320) * batch_size,
        data_workers=1 if experiment.on_gpu else 0,
        training={
            "seed": run.seed,
            "bf16": experiment.on_gpu,
            "packing_buffer": max(64, batch_size),
            "learning_rate": arm.rate * run.rate,
            "lr_scheduler_type": "constant",
            "warmup_steps": max(1, steps // 20),
            "eval_on_start": True,
            "eval_steps": every,
            "save_steps": every if run.keeps_weights else None,
        },
    )
    if arm.recipe:  # it sees validation scenes alone, and each evaluation scores test scenes beside them
        retained = {"name": TEST_PART, "val": str(data / f"{regime.name}.test.jsonl")}
        config["data"] |= {"val": str(data / f"{regime.name}.val.jsonl"), "test": None, "retain": [retained]}
    return config


def augment_of(run: StudyRun) -> Mapping[str, Any] | None:
    """Return `data.augment` of the run. Rollouts see augmented pictures where no step learns ground truth alone."""
    if not run.augmented:
        return None
    arm = ARMS[run.arm]
    return {**(CELLS_AUGMENT if run.regime.is_bccd else DIGITS_AUGMENT), "rollouts": arm.variant != "sft" or arm.recipe}


# ---- results ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Evaluated:
    step: int
    val: dict[str, float]
    test: dict[str, float]
    scenes: dict[str, dict[str, float]]  # test scenes' counts


def keep_result(experiment: StudyExperiment, run: StudyRun) -> None:
    """Keep the course of a run, and the test scenes at the step that validation chose. `base`: at step 0."""
    run_dir = experiment.run_dir(run)
    if ARMS[run.arm].recipe:
        course, steps = _recipe_course(run_dir)
    else:
        course = _course(run_dir, with_weights=run.keeps_weights)
        steps = steps_of(read_events(run_dir))
    if not course:
        say(f"{run.folder}: stopped before its first evaluation")
        return
    record = json_in(path) if (path := run_dir / RECIPE).is_file() else None
    best = _best(course) if record is None else _kept_by(record, course)
    before = {} if run.first is None else json.loads(run.first.result(experiment.out).read_text())
    result = {
        "arm": run.label,
        "seed": run.seed,
        "steps": best.step,
        "of_steps": len(steps),
        "train_s": before.get("train_s", 0.0) + sum(one["step_s"] for one in steps if one["global_step"] <= best.step),
        "whole_s": before.get("whole_s", 0.0) + sum(one["step_s"] for one in steps),
        "medians": {name: median(one.get(name, 0.0) for one in steps) for name in ("step_s", "rollout_s", "learn_s")},
        "val": best.val,
        "course": [{"step": one.step, "val": one.val, "test": one.test} for one in course],
        "rewards": [round(one["reward"], 4) for one in steps if "reward" in one],
        "scenes": best.scenes,
        "recipe": record,
        **circumstances(),
    }
    folder = run.result(experiment.out).parent
    if ARMS[run.arm].variant == "sft" and not any(folder.glob("base-*.json")):
        base = {**result, "arm": "base", "steps": 0, "train_s": 0.0, "whole_s": 0.0, "val": course[0].val}
        base |= {"course": [], "scenes": course[0].scenes}
        _write(folder / f"base-{run.seed}.json", base)
    if run.keeps_weights:
        _keep_weights(experiment, run, run_dir, best.step)
    _write(run.result(experiment.out), result)
    say(f"{run.folder}: step {best.step}, val {best.val[SELECTED_BY]:.3f}, test {best.test[F1]:.3f}")


def _keep_weights(experiment: StudyExperiment, run: StudyRun, run_dir: Path, step: int) -> None:
    """Keep weights for the runs that go on from here. Step 0: the base itself."""
    if step:
        export(run_dir / f"checkpoint-{step}", experiment.stopped(run))
    else:
        shutil.copytree(experiment.base(run.regime.base), experiment.stopped(run), dirs_exist_ok=True)
    for checkpoint in run_dir.glob("checkpoint-*"):
        shutil.rmtree(checkpoint)


def _course(run_dir: Path, *, with_weights: bool) -> list[Evaluated]:
    """Return the whole evaluations. `with_weights`: those whose weights were saved; a run may have been stopped
    between."""
    paths = sorted((run_dir / "eval").glob("step_*.jsonl"))
    lines = {path: path.read_bytes().count(b"\n") for path in paths}
    found = [_evaluated(path) for path in paths if lines[path] == lines[paths[0]]]
    if not with_weights:
        return found
    return [one for one in found if not one.step or (run_dir / f"checkpoint-{one.step}" / "manifest.json").is_file()]


def _recipe_course(run_dir: Path) -> tuple[list[Evaluated], list[dict[str, Any]]]:
    """The whole evaluations and the steps of both stages, in the order in which they were made: those of the second are
    counted on from the last step of `sft`, whichever weights it began with. Its first evaluation is of these weights,
    which were evaluated before."""
    course: list[Evaluated] = []
    steps: list[dict[str, Any]] = []
    began_at = 0
    for stage in (run_dir / name for name in (SFT, MATCHING, GRPO)):
        found = []
        for path in sorted((stage / "eval").glob("step_*.jsonl")):
            test = path.with_name(path.name.replace("step_", f"retain_{TEST_PART}_"))
            if test.is_file():
                found.append(_evaluated(path, test))
        steps += [{**one, "global_step": one["global_step"] + began_at} for one in steps_of(read_events(stage))]
        course += [replace(one, step=one.step + began_at) for one in found if one.step or not course]
        began_at = max((one["global_step"] for one in steps), default=0)
    return course, steps


def _kept_by(record: Mapping[str, Any], course: Sequence[Evaluated]) -> Evaluated:
    """Return the evaluation of the weights that a recipe kept; the best one so far if no stage of it has ended."""
    at, began_at = 0, 0
    for stage in record["stages"]:
        if stage["name"] == record["best_of"]:
            at = began_at + stage["best_step"]
        began_at += stage["steps"]
    return next(one for one in course if one.step == at) if record["stages"] else _best(course)


def _best(course: Sequence[Evaluated]) -> Evaluated:
    return max(course, key=lambda one: (one.val[SELECTED_BY], -one.step))


def _evaluated(path: Path, *more: Path) -> Evaluated:
    lines = [json.loads(line) for one in (path, *more) for line in one.read_text().splitlines()]
    counts = {line["id"]: line["counts"] for line in lines}
    parts = {name: {i: c for i, c in counts.items() if i.startswith(name)} for name in ("val", "test")}
    scores = {name: _scores(list(part.values())) for name, part in parts.items()}
    return Evaluated(int(path.stem.rpartition("_")[2]), scores["val"], scores["test"], parts["test"])


def _scores(counts: Sequence[Mapping[str, float]]) -> dict[str, float]:
    sums = np.array([sum(one.get(column, 0.0) for one in counts) for column in COLUMNS], dtype=np.float64)
    return {name: round(float(METRICS[name](columns_of(sums))), 4) for name in (*SHOWN, SELECTED_BY)}


def _write(path: Path, result: Mapping[str, Any]) -> None:
    write_atomically(path, json.dumps(result) + "\n")


def report(out: Path) -> None:
    """Write `study.json` and `study.md` from the results that there are."""
    found: dict[str, Any] = {}
    text = ""
    for folder in sorted((out / "results").glob("*")):
        chosen = _by_validation(folder)
        results = [replace(one, arm=chosen[one.arm].arm) for one in read_results(folder) if one.arm in chosen]
        summary = summarize(results)
        for one in chosen.values():
            arm = ARMS.get(one.arm.removesuffix(AUGMENTED))
            rate = arm.rate * one.rate if arm is not None else 0.0  # the base's is 0
            told = {"learning_rate": float(f"{rate:.6g}"), "val": round(one.val, 4), "curves": one.curves}
            summary["arms"][one.arm] |= told | ({"recipes": one.recipes} if one.recipes else {})
        found[folder.name] = summary
        text += f"\n{folder.name}\n\n{table(summary)}\n"
    if found:
        write_atomically(out / "study.json", json.dumps({**circumstances(), "regimes": found}, indent=1) + "\n")
        write_atomically(out / "study.md", text)
        print(text, flush=True)


@dataclass(frozen=True, slots=True)
class Chosen:
    arm: str
    rate: float  # times the arm's
    val: float
    curves: Mapping[str, Sequence[Sequence[float]]]  # each seed's
    recipes: Mapping[str, Row]  # each seed's choice, and why a recipe made it


def _by_validation(folder: Path) -> dict[str, Chosen]:
    """Return the rate with the best mean validation score of each arm, by label."""
    found: dict[str, dict[str, Row]] = defaultdict(dict)
    for path in folder.glob("*.json"):
        result = json.loads(path.read_text())
        found[result["arm"]][str(result["seed"])] = result
    best: dict[str, tuple[str, Chosen]] = {}
    for label, results in found.items():
        arm, _, rate = label.partition(RATE)
        val = mean(result["val"][SELECTED_BY] for result in results.values())
        curves = {seed: _curve(result) for seed, result in sorted(results.items())}
        recipes = {seed: result["recipe"] for seed, result in sorted(results.items()) if result.get("recipe")}
        one = Chosen(arm, float(rate or 1.0), val, curves, recipes)
        if arm not in best or one.val > best[arm][1].val:
            best[arm] = label, one
    return dict(best.values())


def _curve(result: Row) -> list[list[float]]:
    """Return per evaluation: step, seconds of training (by the median step), validation and test F1@0.5."""
    step_s = result["medians"]["step_s"]
    return [
        [one["step"], round(one["step"] * step_s, 1), one["val"][SELECTED_BY], one["test"][F1]]
        for one in result["course"]
    ]


def table(summary: Mapping[str, Any]) -> str:
    head = ["arm", "seeds", "best step", "train s", "F1@0.5", "minus sft", "F1@mIoU", "recall", "precision"]
    head += ["duplicates", "validation"]
    rows = []
    for name, arm in sorted(summary["arms"].items(), key=lambda item: item[1]["metrics"]["f1@0.5"]["value"]):
        metrics, minus = arm["metrics"], arm["minus"].get("sft", {}).get("f1@0.5")
        rows.append(
            [
                name,
                str(len(arm["seeds"])),
                f"{arm['steps']:g}",
                f"{arm['train_s']:.0f}",
                shown(metrics["f1@0.5"]),
                shown(minus, sign="+"),
                f"{metrics['f1@miou']['value']:.3f}",
                f"{metrics['recall@0.5']['value']:.3f}",
                f"{metrics['precision@0.5']['value']:.3f}",
                f"{metrics['duplicate_rate']['value']:.3f}",
                f"{arm['val']:.3f}",
            ]
        )
    return "\n".join(markdown_table(head, rows))


if __name__ == "__main__":
    typer.run(main)
