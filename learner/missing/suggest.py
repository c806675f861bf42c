"""Suggestions of missing labels: `rollout-learner find-missing suggest`.

In: a model, annotations, and K answers to each image. Out: a folder with `suggestions.json`, the suspected objects with
the most agreement first. The same code completes labels (`learner.tasks.detection.completion`). A folder that has
suggestions is not overwritten.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from learner.config.sections.data import DataConfig
from learner.data.splits import load_samples
from learner.detector.answers import Answers, Asked
from learner.detector.model import ModelFiles, require_boxes
from learner.records import Sample
from learner.run.additions import addition_of
from learner.run.files import write_atomically
from learner.tasks.detection.completion import OVERLAP, Candidate, candidates
from learner.tasks.detection.task import DetectionTask
from shared.errors import DataError, OutputError

SUGGESTIONS, DECISIONS = "suggestions.json", "decisions.json"


@dataclass(frozen=True, kw_only=True, slots=True)
class Suggestion:
    """A suspected object. `box` is x1, y1, x2, y2 in pixels; `names` are what answers call it, the most frequent first;
    `labels` are the annotated boxes of its image, to be shown beside it."""

    sample_id: str
    image: str
    width: int
    height: int
    name: str
    box: tuple[float, float, float, float]
    votes: int
    answers: int
    agreement: float
    names: tuple[str, ...]
    labels: tuple[tuple[str, tuple[float, float, float, float]], ...]


def suggest(
    model: ModelFiles, data: DataConfig, out: Path, asked: Asked, *, tell: Callable[[str], None] = lambda _: None
) -> list[Suggestion]:
    """Write the suggestions into `out`, and return them. Raises OutputError if it has some, and what the model and the
    annotations raise."""
    require_boxes(model)
    if (out / SUGGESTIONS).exists():
        raise OutputError(
            "the folder has suggestions already",
            found=str(out / SUGGESTIONS),
            wanted="a new folder, so that no decision is lost",
            remedy="choose another --out, or review these: rollout-learner find-missing review",
        )
    answers = Answers(model, asked)
    task = DetectionTask(model.settings.task, answers.encoder.tokenizer)
    samples = load_samples(data, data.train, task, geometry=model.settings.task.geometry)
    with answers:
        found = [
            suggestion
            for sample, own in zip(samples, _answers(answers, task, samples, model, tell), strict=True)
            for suggestion in of_sample(sample, candidates(sample, own, overlap=OVERLAP))
        ]
    found.sort(key=lambda one: (-one.agreement, one.sample_id, one.box))
    content = {"data": data.model_dump(mode="json"), "suggestions": [asdict(one) for one in found]}
    write_atomically(out / SUGGESTIONS, json.dumps(content) + "\n")
    return found


def of_sample(sample: Sample, found: Sequence[Candidate]) -> Iterator[Suggestion]:
    """What has no label in a sample."""
    labels = tuple((obj.desc, addition_of(obj, sample).box) for obj in sample.objects)
    for one in found:
        if one.relation == "free":
            new = addition_of(one.object, sample)
            yield Suggestion(
                sample_id=sample.sample_id,
                image=sample.images[0],
                width=sample.width,
                height=sample.height,
                name=new.desc,
                box=new.box,
                votes=new.votes,
                answers=new.answers,
                agreement=round(one.agreement, 4),
                names=tuple(one.names),
                labels=labels,
            )


def _answers(
    answers: Answers, task: DetectionTask, samples: Sequence[Sample], model: ModelFiles, tell: Callable[[str], None]
) -> Iterator[list[list[Any]]]:
    """The objects of each sample's drawn answers. The model is asked as its settings say."""
    size = answers.images_at_once
    for start in range(0, len(samples), size):
        part = samples[start : start + size]
        found = answers.of({start + i: [sample] for i, sample in enumerate(part)})
        for i in range(len(part)):
            (own,) = found[start + i]
            yield [[one.object for one in task.parse(rollout).objects] for rollout in own[1:]]  # the first is greedy
        tell(f"{min(start + size, len(samples))} of {len(samples)} images")


def read_folder(folder: Path) -> tuple[DataConfig, list[dict[str, Any]]]:
    """The annotations' settings, and the suggestions, best first. Raises DataError."""
    path = folder / SUGGESTIONS
    try:
        content = json.loads(path.read_text())
        suggestions: list[dict[str, Any]] = content["suggestions"]
        return DataConfig.model_validate(content["data"]), suggestions
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DataError(
            "no suggestions can be read",
            found=f"{path}: {type(error).__name__}: {error}",
            wanted="a folder that find-missing suggest wrote",
            remedy="correct the folder, or make suggestions: rollout-learner find-missing suggest --help",
        ) from error
