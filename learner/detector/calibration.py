"""`rollout-learner calibrate`: fits scores on answers to annotated validation images, and writes `calibration.json`.

The option `samples` lists numbers of sampled answers per image; each number gets its own calibration. The model gives
each image a greedy answer, and as many sampled answers as the largest number. The calibration for a smaller number n
uses only the first n sampled answers. The model must not have been trained on the images: answers to training images
look too good.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from learner.config.inference import CALIBRATION_NAME
from learner.config.sections.data import DataConfig
from learner.data.splits import load_samples
from learner.detector.answers import Answers, AnswerSettings
from learner.detector.command import quiet, reading, tell_warnings
from learner.detector.model import ModelFiles, find_model, require_boxes
from learner.records import ParsedRollout, Sample
from learner.run.files import require_writable, write_atomically
from learner.tasks.detection.calibrate import fit_calibration
from learner.tasks.detection.scores import Calibration, CalibrationFile, ScoreCandidate, candidates
from learner.tasks.detection.task import DetectionTask
from learner.tasks.tokens import pieces_of


def calibrate(
    path: Path, annotations: str, numbers: Sequence[int], *, asked: AnswerSettings, config: str | None, out: Path | None
) -> int:
    """Calibrate the model at `path`, write the file, and return the exit code. `numbers` of sampled answers per image:
    each gets a calibration. `out`: the file to write; None: a file in the folder of the model's weights. Raises
    ConfigError, DataError, RolloutError, OutputError."""
    quiet()
    console = Console(stderr=True, highlight=False, soft_wrap=True, markup=False)
    model = find_model(path, config=config)
    tell_warnings(model, console)
    require_boxes(model)
    out = out or model.folder / CALIBRATION_NAME
    # The folder is checked before the model answers: if the file could not be written, hours of answers would be lost.
    require_writable(out.parent)
    numbers = sorted(set(numbers))
    answers = Answers(model, replace(asked, samples=numbers[-1]))
    task = DetectionTask(model.settings.task, answers.encoder.tokenizer)
    data, reader = reading(model, [annotations], named=config is not None)
    data = data or DataConfig(train=annotations, on_bad_record="drop")
    samples = load_samples(data, annotations, task, geometry=task.config.geometry, reader=reader)
    found: dict[int, list[list[ScoreCandidate]]] = {number: [] for number in numbers}
    pieces = pieces_of(task.tokenizer)
    for parsed in _answered(answers, asked_as(model, samples), task, console):
        for number in numbers:
            found[number].append(candidates(parsed[: 1 + number], pieces))
    fitted = [fit_calibration(found[number], samples, num_drawn=number)[0] for number in numbers]
    console.print(_table(fitted))
    write_atomically(out, CalibrationFile(calibrations=fitted).to_json())
    print(out)
    return 0


def asked_as(model: ModelFiles, samples: Sequence[Sample]) -> list[Sample]:
    """Return the samples with the model's own prompt."""
    return [replace(sample, messages=tuple(model.settings.messages)) for sample in samples]


def _answered(
    answers: Answers, samples: Sequence[Sample], task: DetectionTask, console: Console
) -> Iterator[list[ParsedRollout]]:
    """Yield the parsed answers to each sample, in order."""
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
    with answers, Progress(*columns, console=console) as bar:
        line = bar.add_task("images", total=len(samples))
        for (rollouts,) in answers.each([[sample] for sample in samples]):
            yield [task.parse(rollout) for rollout in rollouts]
            bar.advance(line)


def _table(fitted: Sequence[Calibration]) -> Table:
    shown = Table("drawn answers", "boxes", "AUC", "calibration error", "best threshold", box=None)
    for one in fitted:
        measured = one.measured
        shown.add_row(
            str(one.samples),
            str(one.num_boxes),
            f"{measured['auc']:.3f}",
            f"{measured['ece']:.3f}",
            f"{one.threshold:.2f}",
        )
    return shown
