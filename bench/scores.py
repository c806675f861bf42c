"""Measure how good the scores of the shipped checkpoints are, and what they cost: `python -m bench.scores --out FILE`.

In: scenes of the demo with all their labels, and with `--bccd` the 87 validation and 72 test photographs of BCCD as
published. Each image is answered greedily and by 8 draws at temperature 1, as `predict --samples 8` asks. Scores for
K = 0, 4, 8 are fitted on the validation answers alone, to the first K draws (`rollout-learner calibrate`), and judged
on the test answers (`rollout-learner evaluate`): AP and AP50, F1 at the threshold that was best on validation, AUC of
right against wrong boxes, expected calibration error. `all 1.0`: the greedy answer's boxes with equal scores.

Seconds are those of the answers to the first 16 test images, for each K on its own, one after the other in one engine:
on the clock, and of the processors (all threads together). Other programs change the second less, and least with one
thread: OMP_NUM_THREADS=1. `--cost-only` measures these alone: two minutes for both on two quiet cores.

Out: one JSON file. It is written after each part. A rerun goes on: results that are in the file stay, and answers that
are in `--work` are not made again. Delete both to measure anew.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from bench.figures import circumstances
from bench.runs import say
from bench.study import BCCD, MODELS
from deploy.bccd.photographs import read_photographs, write_jsonl
from deploy.demo.build_data import Build, build
from learner.config.sections.data import DataConfig
from learner.data.splits import load_samples
from learner.detector.answers import Answers, AnswerSettings, Backend
from learner.detector.calibration import asked_as
from learner.detector.evaluation import Found, Scored, evaluate_all
from learner.detector.model import find_model
from learner.records import ParsedRollout, Rollout, Sample
from learner.run.files import AppendedLines, write_atomically
from learner.tasks.detection.ap_interval import AP, AP50
from learner.tasks.detection.calibrate import fit_calibration
from learner.tasks.detection.scores import Calibration, ScoreCandidate, candidates, scores_of
from learner.tasks.detection.task import DetectionTask
from learner.tasks.tokens import pieces_of

DIGITS = "digits"
FOLDERS = {DIGITS: MODELS["demo"], BCCD: MODELS[BCCD]}
DRAWN = (0, 4, 8)
SCENES = 200  # scenes of digits, in each split
SEED = 3
TIMED = 16
F1 = "f1@0.5"


def main(
    out: Annotated[Path, typer.Option(help="The JSON file.")],
    work: Annotated[Path, typer.Option(help="Scenes and answers.")] = Path("runs/scores"),
    bccd: Annotated[Path | None, typer.Option(help="A clone of github.com/Shenggan/BCCD_Dataset.")] = None,
    backend: Annotated[str, typer.Option(help="vllm or hf.")] = "vllm",
    only: Annotated[list[str] | None, typer.Option(help=f"{DIGITS} or {BCCD}.")] = None,
    cost_only: Annotated[bool, typer.Option("--cost-only", help="Only the seconds; no scores.")] = False,
) -> None:
    """Measure what is not in the file yet."""
    result = json.loads(out.read_text()) if out.is_file() else {**circumstances(), "backend": backend, "data": {}}
    for name in only or (DIGITS, *([BCCD] if bccd else ())):
        own = result["data"].setdefault(name, {})
        if "seconds" in own and (cost_only or "scores" in own):
            continue
        data = MeasuredCheckpoint(name, work / name, backend="hf" if backend == "hf" else "vllm", bccd=bccd)
        with data.answers:
            for part, measure in (("scores", data.scores), ("seconds", data.seconds)):
                if part not in own and not (cost_only and part == "scores"):
                    own[part] = {**measure(), "load": [round(one, 1) for one in os.getloadavg()]}
                    write_atomically(out, json.dumps(result, indent=1) + "\n")
                    say(f"{name}: {part}: {own[part]}")


class MeasuredCheckpoint:
    """One checkpoint with its validation and its test images."""

    def __init__(self, name: str, folder: Path, *, backend: Backend, bccd: Path | None) -> None:
        model = find_model(FOLDERS[name])
        self.folder = folder
        self.answers = Answers(model, AnswerSettings(backend=backend, dtype="float32", samples=max(DRAWN)))
        self.task = DetectionTask(model.settings.task, self.answers.encoder.tokenizer)
        files = _annotations(name, folder, bccd)
        self.samples = {
            split: asked_as(model, load_samples(DataConfig(train=str(file)), str(file), self.task))
            for split, file in files.items()
        }

    def seconds(self) -> dict[str, Any]:
        """Return the seconds per image, by K."""
        samples = dict(enumerate(self.samples["test"][:TIMED]))
        self.answers.of({TIMED: [samples[0]]})  # does what is done once, such as compiling, so that it is not counted
        found = {}
        for number in DRAWN:
            began, worked = time.monotonic(), time.process_time()
            for _ in self._answered(samples, drawn=number):
                pass
            spent = (time.monotonic() - began, time.process_time() - worked)
            found[f"K={number}"] = {
                name: round(value / len(samples), 3) for name, value in zip(("clock", "processors"), spent, strict=True)
            }
        return {**found, "images": len(samples), "threads": torch.get_num_threads()}

    def _answered(self, samples: Mapping[int, Sample], *, drawn: int) -> Iterator[dict[int, list[Rollout]]]:
        """The answers to each sample by its place in the split, on which draws depend; some samples at a time, as
        `predict --samples` makes them."""
        self.answers.asked = replace(self.answers.asked, samples=drawn)
        places, size = list(samples), self.answers.images_at_once
        for start in range(0, len(places), size):
            found = self.answers.of({place: [samples[place]] for place in places[start : start + size]})
            yield {place: rollouts for place, (rollouts,) in found.items()}

    def scores(self) -> dict[str, Any]:
        """Return for each K what was measured on validation images that the fit did not have, and on the test
        images."""
        val, test = self._parsed("val"), self._parsed("test")
        fitted = {number: self._fit(val, number) for number in DRAWN}
        greedy = self._candidates(test, 0)
        found = [self._found("all 1.0", greedy, None)]
        found += [self._found(f"K={n}", self._candidates(test, n), fitted[n]) for n in DRAWN]
        thresholds = {"all 1.0": 0.0} | {f"K={number}": one.threshold for number, one in fitted.items()}
        results = evaluate_all(found, self.samples["test"], thresholds)
        return {
            "images": {split: len(samples) for split, samples in self.samples.items()},
            "objects": sum(len(sample.objects) for sample in self.samples["test"]),
            "validation": {f"K={n}": {**one.measured, "threshold": one.threshold} for n, one in fitted.items()},
            "test": {
                one.name: {
                    **{metric: _interval(one.intervals[metric]) for metric in (AP, AP50, F1)},
                    "auc": round(one.auc, 4),
                    "ece": round(one.ece, 4),
                    "boxes": one.num_boxes,
                }
                for one in results
            },
        }

    def _fit(self, val: Sequence[Sequence[ParsedRollout]], number: int) -> Calibration:
        return fit_calibration(self._candidates(val, number), self.samples["val"], num_drawn=number)[0]

    def _candidates(self, parsed: Sequence[Sequence[ParsedRollout]], number: int) -> list[list[ScoreCandidate]]:
        pieces = pieces_of(self.task.tokenizer)
        return [candidates(own[: 1 + number], pieces) for own in parsed]

    def _found(self, name: str, found: Sequence[Sequence[ScoreCandidate]], calibration: Calibration | None) -> Found:
        boxes = {}
        for sample, own in zip(self.samples["test"], found, strict=True):
            scores = scores_of(own, calibration) if own and calibration else [1.0] * len(own)
            boxes[sample.sample_id] = [Scored(one.object, float(score)) for one, score in zip(own, scores, strict=True)]
        return Found(name=name, boxes=boxes)

    # ---- answers ----------------------------------------------------------------------------------------------------

    def _parsed(self, split: str) -> list[list[ParsedRollout]]:
        """The answers to each image of a split, the greedy one first. Those that were made before are read."""
        samples, file = self.samples[split], self.folder / f"{split}-answers.jsonl"
        known = _read(file)
        todo = {place: sample for place, sample in enumerate(samples) if sample.sample_id not in known}
        lines = AppendedLines(file)
        try:
            for some in self._answered(todo, drawn=max(DRAWN)):
                for place, rollouts in some.items():
                    name = samples[place].sample_id
                    known[name] = [_to_json(one) for one in rollouts]
                    lines.append(json.dumps({"id": name, "answers": known[name]}))
                say(f"{self.folder.name}, {split}: {len(known)} of {len(samples)} images answered")
        finally:
            lines.close()
        return [[self.task.parse(_rollout(answer, sample)) for answer in known[sample.sample_id]] for sample in samples]


def _interval(interval: Any) -> list[float]:
    """Return the estimate, and its 95% interval."""
    return [round(value, 4) for value in (interval.estimate, interval.low, interval.high)]


def _annotations(name: str, folder: Path, bccd: Path | None) -> dict[str, Path]:
    """The annotation files of both splits, with all labels."""
    folder.mkdir(parents=True, exist_ok=True)
    files = {split: folder / f"{split}.jsonl" for split in ("val", "test")}
    if name == DIGITS:
        build(Build(train=0, val=SCENES, test=SCENES, seed=SEED), folder)
    else:
        assert bccd is not None, "--bccd names the photographs"
        for split, file in files.items():
            write_jsonl(read_photographs(bccd, split), file)
    return files


def _read(file: Path) -> dict[str, list[dict[str, Any]]]:
    """The answers by sample id. The last line of a run that was killed may be cut."""
    found = {}
    for line in file.read_text().splitlines() if file.is_file() else ():
        try:
            row = json.loads(line)
        except ValueError:
            continue
        found[row["id"]] = row["answers"]
    return found


def _to_json(rollout: Rollout) -> dict[str, Any]:
    return {
        "tokens": rollout.response_token_ids,
        "finish": rollout.finish_reason,
        "stop": rollout.stop_token_id,
        "logprobs": [round(value, 4) for value in rollout.logprobs or ()],
    }


def _rollout(answer: dict[str, Any], sample: Sample) -> Rollout:
    return Rollout(
        sample=sample,
        prompt_token_ids=(),
        response_token_ids=tuple(answer["tokens"]),
        finish_reason=answer["finish"],
        ver=0,
        seed=None,
        stop_token_id=answer["stop"],
        logprobs=tuple(answer["logprobs"]),
    )


if __name__ == "__main__":
    typer.run(main)
