"""Find which method pays where labels have gaps: `python -m bench.study real --data DIR --out DIR`.

A *regime* is a base model, photographs, and labels with gaps beside all labels:

    real            blood cells: BCCD's published labels against those that others drew anew (`--data`: a folder with
                    `bccd/` and `bccd_redone/`); 124 photographs to learn from, 57 to score by
    cells-KIND      the same photographs, and the new labels with gaps of a kind
    digits-KIND     256 of the demo's scenes with gaps of a kind, 200 to score by

A KIND is one of `bench.experiment.gaps`, such as `missing`, `missing60`, `small`, `border`.

An *arm* is a method. It learns labels with gaps; `sft, all labels` shows what labels without gaps are worth. All arms
begin with the same model, and have the same batch, schedule and steps. At the start and after each third of the steps
they answer the photographs to score by, once. These answers are scored by the labels with gaps, which may choose a
step, and by all labels. In `completed twice` the model that learned completed labels completes the first labels anew,
and the start learns those. `find-missing` is not trained: it lists the objects that nobody labelled, as the command of
that name does, by the start and by the model that learned completed labels.

In `--out`: `results/REGIME/ARM-SEED.json`, the answers in `answers/`, the labels that a better model made in `labels/`;
`study.json` and `study.md` are the report. What is there is not done again, so the study goes on with a second command,
on another machine too. When `--minutes` are over, everything has ended and is reported. `--work` is scratch.
`--only-rank` reads the answers, and says whether F1 that is estimated by labels with gaps ranks models as all labels do
(`ranked.json`). `--only-estimate` trains nothing: the start answers the digits to learn from, and the cells to score
by, eight times. What a run would estimate of labels with gaps is compared with all labels (`estimated.json`,
`estimated.md`). With `--draws` also: how many draws of random gaps are called not random (`alarms-*.jsonl`).
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
import typer

from bench.experiment import arms, estimated
from bench.experiment.arms import FIRST_SEED, KEPT, Arm, file_name
from bench.experiment.gaps import KINDS, Row, read_kind, with_gaps
from bench.experiment.ranked import rank_answers
from bench.experiment.results import (
    BEST,
    REFERENCE,
    audit_of,
    found_of,
    objects_of,
    read_results,
    right_of,
    scored,
    summarize,
    table,
)
from bench.experiment.runner import Experiment, Slot
from bench.figures import circumstances, markdown_table
from bench.models import CHECKPOINT
from bench.runs import LearnerRun, exit_code_of, say, start_learner, visible
from deploy.launch import Processes
from learner.records import DetectionObject
from learner.run.files import write_atomically

ROLLOUTS = 8
REPORT_S = 10.0  # to stop what runs, and to write the report
EVALUATIONS = 3  # of a run, besides the one at its start

COMPLETED, BETTER = "completed, 3 votes", "labels of the better model"


def _complete(**settings: Any) -> Mapping[str, Any]:
    return {"rollouts": ROLLOUTS, **settings}


# Those that others wait for come first, then those that take longest.
ARMS: Mapping[str, Arm] = {
    "find-missing": Arm(does="finds"),
    "find-missing, tiles": Arm(does="finds", tiles=(400, 300)),
    COMPLETED: Arm(complete=_complete(min_votes=3)),
    "grpo on completed labels": Arm(variant="grpo", grpo={}, complete=_complete(min_votes=3)),
    "keep_unmatched": Arm(variant="rollout_matching_sft", loss=KEPT),
    "completed, auto": Arm(complete=_complete()),
    "completed, 2 votes": Arm(complete=_complete(min_votes=2)),
    "completed, 4 votes": Arm(complete=_complete(min_votes=4)),
    "completed, by probability": Arm(complete=_complete(accept="probability")),
    "completed, 60 verdicts": Arm(complete=_complete(accept="probability"), after="find-missing", verdicts=60),
    "completed, 150 verdicts": Arm(complete=_complete(accept="probability"), after="find-missing", verdicts=150),
    BETTER: Arm(complete=_complete(min_votes=3), does="relabels", after=COMPLETED),
    "completed twice": Arm(after=BETTER),
    REFERENCE: Arm(),
    BEST: Arm(learns="all"),
    "find-missing, better model": Arm(does="finds", after=COMPLETED),
}
LENDS_WEIGHTS = frozenset(arm.after for arm in ARMS.values() if arm.after and ARMS[arm.after].does == "train")


@dataclass(frozen=True, kw_only=True, slots=True)
class Setting:
    """The settings that all runs on one kind of photographs share."""

    base: Path
    batch_size: int
    steps: int
    rate: float  # at its peak; `grpo` has half
    max_new_tokens: int
    sample_tokens: int


CELLS, DIGITS, REAL = "cells", "digits", "real"
SETTINGS: Mapping[str, Setting] = {
    CELLS: Setting(
        base=Path(__file__).parents[1] / "deploy/bccd/checkpoint",
        batch_size=32,
        steps=30,
        rate=1e-4,
        max_new_tokens=512,
        sample_tokens=900,
    ),
    DIGITS: Setting(base=CHECKPOINT, batch_size=16, steps=24, rate=5e-5, max_new_tokens=192, sample_tokens=320),
}


@dataclass(frozen=True, slots=True)
class Regime:
    name: str

    @classmethod
    def read(cls, name: str) -> Regime:
        photographs, _, kind = name.partition("-")
        if name != REAL and (photographs not in SETTINGS or read_kind(kind) is None):
            raise typer.BadParameter(
                f"{name}: no such regime; wanted: real, or cells- or digits-, and {', '.join(KINDS)}"
            )
        return cls(name)

    @property
    def setting(self) -> Setting:
        return SETTINGS[DIGITS if self.name.startswith(DIGITS) else CELLS]

    def gaps(self, rows: Sequence[Row], seed: int) -> list[Row]:
        kind = read_kind(self.name.partition("-")[2])
        assert kind is not None, "real gaps are in the data"
        return with_gaps(rows, *kind, seed)


@dataclass(frozen=True, slots=True)
class StudyRun:
    regime: Regime
    arm: str
    seed: int

    @property
    def method(self) -> Arm:
        return ARMS[self.arm]

    @property
    def folder(self) -> str:
        return f"{self.regime.name}--{file_name(self.arm.replace(', ', '--'))}-{self.seed}"

    def result(self, out: Path) -> Path:
        kind = {"train": "results", "relabels": "labels", "finds": "found"}[self.method.does]
        ending = "jsonl" if self.method.does == "relabels" else "json"
        return out / kind / self.regime.name / f"{self.folder.partition('--')[2]}.{ending}"

    @property
    def first(self) -> StudyRun | None:
        """The run whose weights or labels this one needs."""
        seed = FIRST_SEED if self.method.verdicts else self.seed  # the start answers once
        return replace(self, arm=self.method.after, seed=seed) if self.method.after else None


@dataclass(frozen=True, kw_only=True, slots=True)
class Study(Experiment):
    data: Path | None
    on_gpu: bool
    photographs: int | None  # of each split; None: all
    steps: int | None
    batch_size: int | None
    max_new_tokens: int | None

    def rows(self, regime: Regime, split: Literal["train", "score"], labels: Literal["gaps", "all"]) -> Path:
        return self.work / "data" / regime.name / f"{split}-{labels}.jsonl"

    def weights(self, run: StudyRun) -> Path:
        return self.work / "weights" / run.folder


# ---- the command -----------------------------------------------------------------------------------------------------


def main(
    regime: Annotated[list[str], typer.Argument(help="real, cells-KIND, digits-KIND; several are done in turn.")],
    out: Annotated[Path, typer.Option(help="Results; what is there is kept.")],
    data: Annotated[Path | None, typer.Option(help="A folder with bccd/ and bccd_redone/, for cells.")] = None,
    work: Annotated[Path, typer.Option(help="Scratch: data, weights, run folders, logs.")] = Path("runs/study"),
    arm: Annotated[list[str] | None, typer.Option(help="By name; again for each. Default: all.")] = None,
    seeds: Annotated[int, typer.Option(min=1, help="How many.")] = 3,
    minutes: Annotated[float, typer.Option(help="Everything has ended then.")] = 9.0,
    device: Annotated[Literal["cpu", "cuda"] | None, typer.Option(help="Default: what the machine has.")] = None,
    jobs: Annotated[int | None, typer.Option(min=1, help="Runs at a time; default: 8 on a GPU, else 1.")] = None,
    photographs: Annotated[int | None, typer.Option(min=2, help="Of each split, to try it out.")] = None,
    steps: Annotated[int | None, typer.Option(min=1, help="Of each run, to try it out.")] = None,
    batch_size: Annotated[int | None, typer.Option(min=1, help="To try it out.")] = None,
    max_new_tokens: Annotated[int | None, typer.Option(min=1, help="Of an answer, to try it out.")] = None,
    only_rank: Annotated[
        bool, typer.Option("--only-rank", help="Run nothing: rank the answers that are there.")
    ] = False,
    only_estimate: Annotated[
        bool, typer.Option("--only-estimate", help="Train nothing: compare the estimate of labels with gaps.")
    ] = False,
    draws: Annotated[int, typer.Option(min=0, help="Of random gaps, with --only-estimate.")] = 0,
) -> None:
    """Run every arm in every regime, score, report."""
    on_gpu = torch.cuda.is_available() if device is None else device == "cuda"
    number = jobs or (8 if on_gpu else 1)
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // number)))
    study = Study(
        out=out,
        work=work,
        deadline=time.monotonic() + minutes * 60 - REPORT_S,
        data=data,
        on_gpu=on_gpu,
        photographs=photographs,
        steps=steps,
        batch_size=batch_size,
        max_new_tokens=max_new_tokens,
    )
    if unknown := set(arm or ()) - set(ARMS):
        raise typer.BadParameter(f"no such arm: {', '.join(sorted(unknown))}; there are: {'; '.join(ARMS)}")
    regimes = [Regime.read(name) for name in regime]
    if data is None and any(one.setting is SETTINGS[CELLS] for one in regimes):
        raise typer.BadParameter("photographs of cells need --data")
    if only_rank:
        rank_regimes(study, regimes)
        return
    if only_estimate:
        estimate_regimes(study, regimes, draws)
        return
    runs = runs_of(regimes, arm or tuple(ARMS), range(FIRST_SEED, FIRST_SEED + seeds))
    study.make_folders()
    sys.exit(exit_code_of(partial(compare_arms, study, regimes, runs, number), lambda: report(out)))


def compare_arms(
    study: Study, regimes: Sequence[Regime], runs: Sequence[StudyRun], number: int, processes: Processes
) -> None:
    """Write the data of all regimes, and run the arms, at most `number` at a time."""
    for regime in regimes:
        write_data(study, regime)
    with_weights(study, runs)
    study.compare(
        [Slot[StudyRun](devices=(0,) if study.on_gpu else ()) for _ in range(number)],
        runs,
        start=lambda run, slot: start(study, processes, run, slot),
        keep=lambda run: keep(study, run),
        can_start=lambda run: run.first is None or _is_there(study, run.first),
    )


def rank_regimes(study: Study, regimes: Sequence[Regime]) -> None:
    """Say of each regime whether F1 that is estimated by labels with gaps ranks as F1 by all labels does."""
    for regime in regimes:
        write_data(study, regime)
        given, everything = (read_rows(study.rows(regime, "score", labels)) for labels in ("gaps", "all"))
        found = rank_answers(sorted((study.out / "answers" / regime.name).glob("*.json")), given, everything, study.out)
        print(json.dumps({key: found[key] for key in found if key != "checkpoints"}, indent=1), flush=True)


def estimate_regimes(study: Study, regimes: Sequence[Regime], draws: int) -> None:
    """Compare the estimate with all labels in each regime, until the time is over; report. Then draw random gaps."""
    path = study.out / "estimated.json"
    found: dict[str, Any] = json.loads(path.read_text())["regimes"] if path.is_file() else {}
    for regime in regimes:
        write_data(study, regime)
        photographs = DIGITS if regime.name.startswith(DIGITS) else CELLS
        split: Literal["train", "score"] = "train" if photographs == DIGITS else "score"
        rows = study.rows(regime, split, "all")
        given, everything = read_rows(study.rows(regime, split, "gaps")), read_rows(rows)
        drawn = estimated.drawn_answers(regime.setting.base, rows, study.out / "answers" / f"{photographs}.jsonl")
        if regime.name not in found and time.monotonic() < study.deadline:
            found[regime.name] = estimated.estimated(given, everything, drawn)
            write_atomically(path, json.dumps({**circumstances(), "regimes": found}, indent=1) + "\n")
            write_atomically(path.with_suffix(".md"), estimated.report(found) + "\n")
            say(f"{regime.name}: right {found[regime.name]['right']}, estimated {found[regime.name]['estimated']}")
        alarms = study.out / f"alarms-{photographs}.jsonl"
        for number in range(len(read_rows(alarms)) if alarms.is_file() else 0, draws):
            if time.monotonic() > study.deadline:
                break
            with alarms.open("a") as file:
                file.write(json.dumps(estimated.alarm(everything, drawn, number)) + "\n")
    print(estimated.report(found), flush=True)


def runs_of(regimes: Sequence[Regime], names: Sequence[str], seeds: Iterable[int]) -> list[StudyRun]:
    """Return every arm in every regime, seed by seed, with the runs that these need, in the order of ARMS."""
    wanted = set(names)
    while more := {ARMS[name].after for name in wanted} - wanted - {""}:
        wanted |= more
    return [
        StudyRun(regime, name, seed)
        for i, seed in enumerate(seeds)
        for regime in regimes
        for name in ARMS
        if name in wanted and (i == 0 or ARMS[name].does != "finds" or ARMS[name].after)  # the start is one model
    ]


def with_weights(study: Study, runs: Sequence[StudyRun]) -> None:
    """Let runs be done again whose weights others still need, and another machine had."""
    for run in study.unfinished(runs):
        first = run.first
        if first is not None and first.arm in LENDS_WEIGHTS and not study.weights(first).is_dir():
            first.result(study.out).unlink(missing_ok=True)


def _is_there(study: Study, run: StudyRun) -> bool:
    return study.weights(run).is_dir() if run.arm in LENDS_WEIGHTS else run.result(study.out).is_file()


# ---- data ------------------------------------------------------------------------------------------------------------


def write_data(study: Study, regime: Regime) -> None:
    """Write what the runs of a regime learn, and what they are scored by, with gaps and with all labels."""
    for split, seed in (("train", 6), ("score", 7)):
        if regime.name.startswith(DIGITS):
            everything = _digits(study)[split]
        else:
            everything = _cells(study, "train" if split == "train" else "val", "redone")
        if regime.name == REAL:
            given = _cells(study, "train" if split == "train" else "val", "published")
        else:
            given = regime.gaps(everything, seed)
        for labels, rows in (("gaps", given), ("all", everything)):
            path = study.rows(regime, split, labels)  # type: ignore[arg-type]
            path.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(path, "".join(json.dumps(row) + "\n" for row in rows[: study.photographs]))


def _cells(study: Study, split: str, labels: str) -> list[Row]:
    """Return the photographs of a split, with the published labels or with those that were drawn anew."""
    assert study.data is not None, "refused by main"
    coco = json.loads((study.data / "bccd_redone" / f"{split}_{labels}.json").read_text())
    names = {one["id"]: one["name"] for one in coco["categories"]}
    objects: dict[int, list[Row]] = {one["id"]: [] for one in coco["images"]}
    for one in coco["annotations"]:
        x, y, width, height = one["bbox"]
        box = [round(value, 2) for value in (x, y, x + width, y + height)]
        objects[one["image_id"]].append({"desc": names[one["category_id"]], "bbox_2d": box})
    images = (study.data / "bccd" / "images").resolve()
    return [
        {
            "id": Path(one["file_name"]).stem,
            "messages": [{"role": "user", "content": "<image>Detect every cell."}],
            "images": [str(images / one["file_name"])],
            "objects": objects[one["id"]],
            "width": one["width"],
            "height": one["height"],
        }
        for one in sorted(coco["images"], key=lambda one: str(one["file_name"]))
    ]


def _digits(study: Study) -> dict[str, list[Row]]:
    from deploy.demo.build_data import Build, build  # needs scikit-learn, which a machine for cells may lack

    folder = study.work / "digits"
    build(Build(train=256, val=0, test=200, seed=3), folder, workers=os.cpu_count() or 1)
    found = {}
    for split, name in (("train", "train"), ("score", "test")):
        rows = read_rows(folder / f"{name}.jsonl")
        found[split] = [{**row, "images": [str((folder / image).resolve()) for image in row["images"]]} for row in rows]
    return found


def read_rows(path: Path) -> list[Row]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def objects_by_scene(path: Path) -> dict[str, list[DetectionObject]]:
    return {row["id"]: objects_of(row) for row in read_rows(path)}


# ---- the runs --------------------------------------------------------------------------------------------------------


def start(study: Study, processes: Processes, run: StudyRun, slot: Slot[StudyRun]) -> LearnerRun:
    if run.method.does == "finds":
        return _start_finding(study, processes, run, slot)
    config = run_config(study, run)
    return start_learner(processes, study.runs_dir, run.folder, config, ranks=None, devices=slot.devices)


def _start_finding(study: Study, processes: Processes, run: StudyRun, slot: Slot[StudyRun]) -> LearnerRun:
    log, folder = study.runs_dir / f"{run.folder}.log", study.run_dir(run)
    argv = [sys.executable, "-m", "learner", "find-missing", "suggest", str(study.rows(run.regime, "train", "gaps"))]
    argv += ["--model", str(_model(study, run)), "--out", str(folder), "--samples", str(ROLLOUTS), "--backend", "hf"]
    argv += [part for side in run.method.tiles for part in ("--tile", str(side))]
    process = processes.start(run.folder, argv, devices=visible(*slot.devices), log=log)
    return LearnerRun(process=process, log=log, run_dir=folder)


def _model(study: Study, run: StudyRun) -> Path:
    first = run.first
    return study.weights(first) if first is not None and first.arm in LENDS_WEIGHTS else run.regime.setting.base


def run_config(study: Study, run: StudyRun) -> dict[str, Any]:
    method, setting = run.method, run.regime.setting
    steps = study.steps or setting.steps
    relabels = method.does == "relabels"
    train = study.rows(run.regime, "train", method.learns)
    if run.first is not None and run.first.method.does == "relabels":
        train = run.first.result(study.out)
    batch_size = min(study.batch_size or setting.batch_size, len(read_rows(train)))
    if method.grpo is not None:
        batch_size = max(1, batch_size // 2)
    config = arms.run_config(
        method,
        model=_model(study, run),
        train=train.resolve(),
        val=study.rows(run.regime, "score", "gaps"),
        run_dir=study.run_dir(run),
        steps=1 if relabels else steps,
        batch_size=batch_size,
        max_new_tokens=study.max_new_tokens or setting.max_new_tokens,
        sample_tokens=setting.sample_tokens,
        on_gpu=study.on_gpu,
        training={
            "seed": run.seed,
            "learning_rate": setting.rate * (1.0 if method.grpo is None else 0.5),
            "eval_on_start": not relabels,
            "eval_steps": None if relabels else max(1, steps // EVALUATIONS),
            "eval_on_end": not relabels,
            "save_on_end": run.arm in LENDS_WEIGHTS,
        },
    )
    if relabels:
        config["labels"]["complete"]["write"] = str(_written(study, run))
    if method.verdicts and run.first is not None:
        finds = json.loads(run.first.result(study.out).read_text())["finds"]
        audit = study.runs_dir / f"{run.folder}.audit.json"
        write_atomically(audit, json.dumps(audit_of(finds, method.verdicts, run.seed)) + "\n")
        config["labels"]["complete"]["audit"] = str(audit)
    return config


def _written(study: Study, run: StudyRun) -> Path:
    return study.runs_dir / f"{run.folder}.jsonl"


# ---- results ---------------------------------------------------------------------------------------------------------


def keep(study: Study, run: StudyRun) -> None:
    """Write the result of a run that has ended."""
    truth = objects_by_scene(study.rows(run.regime, "train", "all"))
    given = objects_by_scene(study.rows(run.regime, "train", "gaps"))
    path = run.result(study.out)
    if run.method.does == "finds":
        suggestions = json.loads((study.run_dir(run) / "suggestions.json").read_text())["suggestions"]
        found = found_of(suggestions, given, truth)
        write_atomically(path, json.dumps({"arm": run.arm, "seed": run.seed, **found}) + "\n")
        say(f"{run.folder}: {found['recall_at_precision_0.9']} of what is missing at a precision of 0.9")
        return
    if run.method.does == "relabels":
        shutil.copyfile(_written(study, run), path)
        return
    keep_training(study, run, path, given, truth)


def keep_training(
    study: Study,
    run: StudyRun,
    path: Path,
    given: Mapping[str, Sequence[DetectionObject]],
    truth: Mapping[str, Sequence[DetectionObject]],
) -> None:
    run_dir = study.run_dir(run)
    evaluations, answers = scored(run_dir, objects_by_scene(study.rows(run.regime, "score", "all")))
    added = _added(study, run, given)
    right, number = right_of(added, given, truth) if added is not None else (0, 0)
    labels = {"given": sum(map(len, given.values())), "added": number, "right": right}
    completions = [json.loads(file.read_text()) for file in sorted((run_dir / "labels").glob("step_*.json"))]
    result = {
        "arm": run.arm,
        "seed": run.seed,
        "seconds": round(_seconds(run_dir), 1),
        "evaluations": evaluations,
        "labels": labels if added is not None else None,
        "completions": [{name: one[name] for name in one if name != "samples"} for one in completions],
        **circumstances(),
    }
    beside = study.out / "answers" / run.regime.name / path.name
    beside.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(beside, json.dumps(answers, separators=(",", ":")) + "\n")
    if run.arm in LENDS_WEIGHTS:
        _keep_weights(run_dir, study.weights(run))
    write_atomically(path, json.dumps(result) + "\n")
    for checkpoint in run_dir.glob("checkpoint-*"):
        shutil.rmtree(checkpoint)
    course = " / ".join(f"{one['all']['f1']:.3f}" for one in evaluations)
    say(f"{run.folder}: {course}, {labels['added']} labels added, {labels['right']} right")


def _keep_weights(run_dir: Path, model: Path) -> None:
    """Keep the last checkpoint as a model, without the optimizer's state."""
    last = max(run_dir.glob("checkpoint-*"), key=lambda one: int(one.name.rpartition("-")[2]))
    unfinished = model.with_name(f"{model.name}.unfinished")  # a folder with the final name is complete
    shutil.rmtree(unfinished, ignore_errors=True)
    shutil.copytree(last, unfinished, ignore=shutil.ignore_patterns("training_state"))
    shutil.rmtree(model, ignore_errors=True)
    unfinished.rename(model)


def _added(
    study: Study, run: StudyRun, given: Mapping[str, Sequence[DetectionObject]]
) -> Mapping[str, Sequence[DetectionObject]] | None:
    """Return the labels that the run learned beside those that it was given; None where none could be added."""
    if run.first is not None and run.first.method.does == "relabels":
        learned = objects_by_scene(run.first.result(study.out))
    elif run.method.complete is not None:
        (*_, newest) = sorted((study.run_dir(run) / "labels").glob("step_*.json"))
        samples = json.loads(newest.read_text())["samples"]
        return {
            name: [DetectionObject(desc, kind, tuple(bins)) for desc, kind, bins, *_ in one.get("objects", ())]
            for name, one in samples.items()
        }
    else:
        return None
    return {name: [one for one in objects if one not in given[name]] for name, objects in learned.items()}


def _seconds(run_dir: Path) -> float:
    """Return the time from the run's first event to its last."""
    times = [json.loads(line)["time"] for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return float(max(times) - min(times))


def report(out: Path) -> None:
    """Write `study.json` and `study.md` from the results that there are."""
    found: dict[str, Any] = {}
    text = ""
    for folder in sorted((out / "results").glob("*")):
        found[folder.name] = summarize(read_results(folder))
        text += f"\n{folder.name}\n\n{table(found[folder.name])}\n"
        if missing := read_results(out / "found" / folder.name):
            found[folder.name]["found"] = [{key: one[key] for key in one if key != "finds"} for one in missing]
            keys = [key for key in missing[0] if key not in ("arm", "seed", "finds")]
            rows = [[one["arm"], str(one["seed"]), *(str(one[key]) for key in keys)] for one in missing]
            text += "\n" + "\n".join(markdown_table(["", "seed", *keys], rows)) + "\n"
    if found:
        write_atomically(out / "study.json", json.dumps({**circumstances(), "regimes": found}, indent=1) + "\n")
        write_atomically(out / "study.md", text)
        print(text, flush=True)


if __name__ == "__main__":
    typer.run(main)
