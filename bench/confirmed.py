"""Measure whether a run confirmed its own mistakes: `python -m bench.confirmed --out FILE --run RUN --truth FILE`.

In: runs on completed labels (`labels.complete`), and for each its training samples with all their labels (the same
ids). Out: FILE, a JSON file with an entry per run, and tables on stdout. What is in FILE is not measured again.

The model that a run began with, and the run's best weights, answer the training images greedily. An answer *says* an
object if it has one with the same name and an IoU of at least 0.5, one-to-one. Of each kind of object the share that
is said before and after training:

    annotated     labels of the run's data
    right         completed labels that are removed objects
    wrong         completed labels that are not: what the answers agreed on by mistake
    never         removed objects that no completed label gave back
    invented      boxes that are none of these, per image instead of a share

Wrong labels that are said more often after training are mistakes that the run confirmed. `estimated` and `true`: the
share of right ones among the completed labels, by the run's own estimate (at most) and by the truth.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from bench.figures import circumstances, markdown_table
from bench.runs import say
from learner.config.sections.data import DataConfig
from learner.data.splits import load_samples
from learner.detector.answers import Answers, AnswerSettings, Backend
from learner.detector.model import find_model
from learner.records import DetectionObject, Sample
from learner.run.files import write_atomically
from learner.steps.completing import FOLDER, read_label
from learner.tasks.detection.completion import CompletionEstimate
from learner.tasks.detection.geometry import iou_matrix
from learner.tasks.detection.match import assign
from learner.tasks.detection.task import DetectionTask

SAME_IOU = 0.5
KINDS = ("annotated", "right", "never", "wrong")
INVENTED = "invented"
Objects = Sequence[DetectionObject]


@dataclass(frozen=True, kw_only=True, slots=True)
class Labelled:
    """The objects of an image by kind. `said` of an answer: how many of each kind it has."""

    annotated: Objects
    right: Objects
    wrong: Objects
    never: Objects

    @classmethod
    def of(cls, truth: Objects, annotated: Objects, added: Objects) -> Labelled:
        """`annotated` are some of `truth`, unless they are wrong themselves; `added` are the completed labels."""
        known = {i for _, i in _pairs(annotated, truth)}
        removed = [obj for i, obj in enumerate(truth) if i not in known]
        pairs = _pairs(added, removed)
        right, found = {a for a, _ in pairs}, {i for _, i in pairs}
        return cls(
            annotated=annotated,
            right=[obj for a, obj in enumerate(added) if a in right],
            wrong=[obj for a, obj in enumerate(added) if a not in right],
            never=[obj for i, obj in enumerate(removed) if i not in found],
        )

    def said(self, answer: Objects) -> dict[str, int]:
        """Return how many objects of each kind the answer has. Each of its boxes is one object at most; what is true
        comes before what is wrong."""
        left, found = list(answer), {}
        for kind in KINDS:
            taken = {a for a, _ in _pairs(left, getattr(self, kind))}
            found[kind] = len(taken)
            left = [obj for a, obj in enumerate(left) if a not in taken]
        return found | {INVENTED: len(left)}


def _pairs(objects: Objects, others: Objects) -> list[tuple[int, int]]:
    if not objects or not others:
        return []
    iou = iou_matrix(objects, others)
    same = [[obj.desc == other.desc for other in others] for obj in objects]
    return [(a, b) for a, b, *_ in assign(iou, (iou >= SAME_IOU) & same)]


def main(
    out: Annotated[Path, typer.Option(help="The result file.")],
    run: Annotated[list[Path], typer.Option(help="A run directory; again for each.")],
    truth: Annotated[list[Path], typer.Option(help="JSONL: the run's training samples with all labels, in order.")],
    backend: Annotated[Backend, typer.Option(help="What answers.")] = "vllm",
) -> None:
    """Measure the runs that FILE lacks."""
    if len(run) != len(truth):
        raise typer.BadParameter(f"{len(run)} times --run and {len(truth)} times --truth; wanted: one for each run")
    content = json.loads(out.read_text()) if out.is_file() else {**circumstances(), "runs": {}}
    for one, whole in zip(run, truth, strict=True):
        name = f"{one.parent.name}/{one.name}"
        if name not in content["runs"]:
            content["runs"][name] = measured(one, whole, AnswerSettings(backend=backend))
            write_atomically(out, json.dumps(content, indent=1) + "\n")
        say(f"{name}\n{table(content['runs'][name])}")


def measured(run: Path, whole: Path, asked: AnswerSettings) -> dict[str, Any]:
    """Return what a run's start and its best weights say of the objects that it was trained on."""
    after = find_model(run)
    assert after.run is not None, "a run directory names its run"
    before = find_model(after.run.model.path)
    labels = json.loads(_labels(run).read_text())
    added, least = labels["samples"], labels["min_votes"]
    estimate = CompletionEstimate.of_json(labels["estimate"])
    task = DetectionTask(after.settings.task, Answers(after, asked).encoder.tokenizer)
    samples = _samples(Path(str(after.run.data.train)), task)
    truth = {one.sample_id: one.objects for one in _samples(whole, task)}
    images = []
    for one in samples:
        completed = [read_label(entry) for entry in added.get(one.sample_id, {}).get("objects", ())]
        images.append(Labelled.of(truth[one.sample_id], one.objects, completed))
    number = {kind: sum(len(getattr(one, kind)) for one in images) for kind in KINDS}
    return {
        "step": after.folder.name,
        "min_votes": least,
        "estimated": None if least is None else estimate.free_right(least),
        "true": round(number["right"] / max(1, number["right"] + number["wrong"]), 4),
        "images": len(images),
        "number": number,
        "before": _said(images, _answers(Answers(before, asked), task, samples)),
        "after": _said(images, _answers(Answers(after, asked), task, samples)),
    }


def _samples(path: Path, task: DetectionTask) -> list[Sample]:
    return load_samples(DataConfig(train=str(path)), str(path), task)


def _labels(run: Path) -> Path:
    """Return the newest completion of a run."""
    files = sorted((run / FOLDER).glob("step_*.json"))
    if not files:
        raise typer.BadParameter(f"{run}: no completed labels; wanted: a run with labels.complete")
    return files[-1]


def _said(images: Sequence[Labelled], answers: Sequence[Objects]) -> dict[str, int]:
    counts = [labelled.said(answer) for labelled, answer in zip(images, answers, strict=True)]
    return {kind: sum(one[kind] for one in counts) for kind in (*KINDS, INVENTED)}


def _answers(asking: Answers, task: DetectionTask, samples: Sequence[Sample]) -> list[list[DetectionObject]]:
    found: list[list[DetectionObject]] = []
    with asking:
        size = asking.images_at_once
        for start in range(0, len(samples), size):
            part = asking.of({i: [samples[i]] for i in range(start, min(start + size, len(samples)))})
            found += [[one.object for one in task.parse(rollouts[0]).objects] for (rollouts,) in part.values()]
    return found


def table(found: Mapping[str, Any]) -> str:
    whens = ("before", "after")
    rows = [
        [kind, str(number), *(f"{found[when][kind] / max(1, number):.3f}" for when in whens)]
        for kind, number in found["number"].items()
    ]
    rows.append(["invented, per image", "", *(f"{found[when][INVENTED] / found['images']:.3f}" for when in whens)])
    estimated = "nothing" if found["estimated"] is None else f"{found['estimated']:.2f}"
    told = f"completed labels that are right: estimated {estimated}, true {found['true']:.2f}; {found['step']}"
    return "\n".join([*markdown_table(["objects", "number", "said before", "after"], rows), told])


if __name__ == "__main__":
    typer.run(main)
