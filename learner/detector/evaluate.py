"""`rollout-learner evaluate ANNOTATIONS --predictions NAME=FILE ... --model NAME=DIR ... --retain NAME=FILE ...`.

Compares detectors on an annotation file: files first, then models, in the order of the command line. Each detector is
compared with all earlier detectors. Prints a table, and writes `evaluation.json` and `index.html`.

The models also answer the images of the annotation files of `--retain`. The results show what each model gained or lost
on these files, compared with the first model.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from learner.config.sections.data import DataConfig
from learner.config.sections.training import ESTIMATED
from learner.data.splits import load_split
from learner.detector.answers import AnswerSettings
from learner.detector.boxes import Prediction
from learner.detector.command import quiet, tell_warnings
from learner.detector.detector import Detector
from learner.detector.evaluation import (
    DetectorResult,
    Found,
    JudgedBoxes,
    Scored,
    evaluate_all,
    without_border,
)
from learner.detector.evaluation_page import page_of
from learner.detector.inputs import Anything, images_of
from learner.detector.model import find_model
from learner.detector.results import REQUEST
from learner.detector.results_in import ReadAs, box_in_sample, classes_of, read_results
from learner.journal.retained import OWN
from learner.records import Assignment, ParsedRollout, Sample
from learner.run.files import require_writable, write_atomically
from learner.tasks.detection.ap_interval import AP, AP50
from learner.tasks.detection.audit import require_verdicts
from learner.tasks.detection.metrics import count_objects, evaluate_counts
from learner.tasks.detection.ranking import GapJudge, RankedModel, drawn_places, has_gaps, rank
from learner.tasks.detection.reasons import reason_of
from shared.errors import ConfigError, OutputError
from shared.images import ImageRules, Images
from shared.reading import json_of

EVALUATION, PAGE = "evaluation.json", "index.html"
_MAIN, _VAL = "main", "val"
TABLE_WIDTH = 110  # min width in characters, so that lines in a log are not broken


@dataclass(frozen=True, kw_only=True)
class EvaluateOptions:
    """The options of `evaluate`. `predictions`: result files, by the detector's name. `models`: model folders, by name.
    `val`: validation annotations, on which thresholds are chosen. `val_predictions`: result files for `val`, by the
    detector's name. `retain`: other annotation files that the models answer too, by name."""

    annotations: str
    predictions: Mapping[str, Path] = field(default_factory=dict)
    models: Mapping[str, Path] = field(default_factory=dict)
    val: str | None = None
    val_predictions: Mapping[str, Path] = field(default_factory=dict)
    retain: Mapping[str, Path] = field(default_factory=dict)
    asked: AnswerSettings = field(default_factory=AnswerSettings)
    image_root: str | None = None
    read_as: ReadAs = field(default_factory=ReadAs)  # how `predictions` and `val_predictions` are read
    audit: Path | None = None  # file of a person's verdicts on boxes without a label
    ignore_border: bool = False
    out: Path
    overwrite: bool = False


def evaluate(options: EvaluateOptions) -> int:
    """Compare the detectors, print the table, write `evaluation.json` and `index.html`, and return the exit code.
    Raises ConfigError, DataError, RolloutError, OutputError."""
    quiet()
    _require_detectors(options)
    if not options.overwrite:
        _require_free(options.out)
    # The folder is checked before the models answer: if the files could not be written, hours of answers would be lost.
    require_writable(options.out)
    console = Console(stderr=True, highlight=False, soft_wrap=True, markup=False)
    samples, found = _found(options, console)
    thresholds = {one.name: JudgedBoxes.of(one, samples[_VAL]).threshold() for one in found.get(_VAL, ())}
    main, detectors = samples[_MAIN], found[_MAIN]
    results = evaluate_all(detectors, main, thresholds)
    compared = _compared(options, found, samples, results, thresholds)
    why = {one.name: f"{one.reason.what}; {one.reason.remedy}" for one in detectors if one.reason is not None}
    # Results are printed before they are written: if the disk is full, hours of computing are not lost.
    console.width = max(console.width, TABLE_WIDTH)
    console.print(_table(results))
    for name, text in why.items():
        console.print(f"warning: the score of {name} is near 0: {text}")
    if compared:
        console.print(_gains(compared))
    kept = {one.name: JudgedBoxes.of(one, main).kept(thresholds.get(one.name)) for one in detectors}
    ranked = _ranked(options, kept, main, console)
    rows = _rows(results, compared, ranked, why)
    write_atomically(options.out / EVALUATION, json.dumps(rows, indent=1) + "\n")
    page = page_of(
        main,
        kept,
        results,
        title=Path(options.annotations).name,
        notes=[f"The score of {name} is near 0: {text}" for name, text in why.items()],
        compared=compared,
        ranked=ranked,
        chosen=f"on {options.val}" if options.val else "on other images of the same file (five parts)",
    )
    write_atomically(options.out / PAGE, page)
    print(options.out / PAGE)
    return 0


def _found(options: EvaluateOptions, console: Console) -> tuple[dict[str, list[Sample]], dict[str, list[Found]]]:
    """Return the samples of each annotation file, and what each detector finds in them. For the main file and `val`,
    the detectors are result files and models; for the files of `retain`, they are the models only."""
    paths = {_MAIN: options.annotations} | ({_VAL: options.val} if options.val is not None else {})
    paths |= {_retained(name): str(path) for name, path in options.retain.items()}
    samples = {key: _samples(options, path) for key, path in paths.items()}
    given = {_MAIN: options.predictions, _VAL: options.val_predictions}
    found = {key: _read(paths[key], own, given.get(key, {}), options.read_as, console) for key, own in samples.items()}
    for name, folder in options.models.items():
        model = find_model(folder)
        tell_warnings(model, console)
        console.print(f"{name} answers {sum(map(len, samples.values()))} images: loading {model.folder}")
        with Detector(model, asked=options.asked) as detector:
            for key, own in samples.items():
                found[key].append(_answered(detector, name, own))
    if options.ignore_border:
        for key in found:
            found[key], samples[key] = without_border(found[key], samples[key])
        console.print("boxes that touch the border of their image are left out")
    return samples, found


# Pairs of an annotation file's name and the models' results on it: the main file, then each of `retain`.
Compared = list[tuple[str, list[DetectorResult]]]


def _compared(
    options: EvaluateOptions,
    found: Mapping[str, Sequence[Found]],
    samples: Mapping[str, Sequence[Sample]],
    results: list[DetectorResult],
    thresholds: Mapping[str, float],
) -> Compared:
    """Return the models' results on the main file and on each file of `retain`; [] without `retain`. A result's
    differences are from the first model."""
    if not options.retain:
        return []
    # The differences in `results` are from the first result file. The differences shown here must be from the first
    # model.
    if options.predictions:
        models = found[_MAIN][len(options.predictions) :]
        results = evaluate_all(models, samples[_MAIN], thresholds)
    others = [(name, _retained(name)) for name in options.retain]
    return [(OWN, results), *((name, evaluate_all(found[key], samples[key])) for name, key in others)]


def _require_detectors(options: EvaluateOptions) -> None:
    """Raises ConfigError if there is no detector, no model to answer the images of `retain`, or one name for two
    detectors."""
    if not options.predictions and not options.models:
        raise ConfigError(
            "evaluate: nothing to evaluate",
            found="neither --predictions nor --model",
            wanted="COCO results, or a model that answers the images",
            remedy="name one: --predictions yolo=predictions.json, --model ours=runs/cells",
        )
    if options.retain and not options.models:
        raise ConfigError(
            "evaluate: --retain needs a model",
            found="--predictions alone, which have no boxes for other annotations",
            wanted="a model that answers the other images too",
            remedy="name one, or several to compare: --model before=base --model after=runs/cells",
        )
    if twice := sorted(options.predictions.keys() & options.models.keys()):
        raise ConfigError(
            "evaluate: two detectors have one name",
            found=", ".join(twice),
            wanted="a name for each of --predictions and --model",
            remedy="name them: --predictions file=found.json --model ours=runs/cells",
        )


def _require_free(out: Path) -> None:
    """Raises OutputError if `out` has a file that `evaluate` would replace and did not write."""
    own = _is_evaluation(out / EVALUATION) and not (out / REQUEST).is_file()
    if there := [name for name in (EVALUATION, PAGE) if (out / name).exists() and not own]:
        raise OutputError(
            f"{out} has files that evaluate would replace",
            found=f"{', '.join(there)}, which an evaluate did not write",
            wanted="a new folder, or one that evaluate wrote",
            remedy="choose another --out, or give --overwrite to have them replaced",
        )


def _is_evaluation(file: Path) -> bool:
    """Return True if `evaluate` wrote the file. In this case the page next to the file is from `evaluate` too."""
    try:
        rows = json_of(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return isinstance(rows, list) and all(isinstance(row, dict) and {"name", "intervals"} <= row.keys() for row in rows)


def _retained(name: str) -> str:
    """Return the key of the results on an annotation file of `retain`. The key's prefix keeps it apart from the keys of
    the other files."""
    return f"retain {name}"


def _samples(options: EvaluateOptions, path: str) -> list[Sample]:
    data = DataConfig(train=path, on_bad_record="drop", image_root=options.image_root)
    split = load_split(data, path, Anything())
    if hint := split.bad.reach.hint():
        print(f"warning: {path}: {hint}", file=sys.stderr)
    return split.samples


def _read(
    annotations: str, samples: Sequence[Sample], predictions: Mapping[str, Path], read_as: ReadAs, console: Console
) -> list[Found]:
    """Read results. Print how the results were read, and what may be wrong with them."""
    classes, found = classes_of(annotations), []
    for name, path in predictions.items():
        read = read_results(path, name, samples, classes, read_as)
        for note in read.notes:
            console.print(f"{path}: {note}")
        for warning in read.warnings:
            console.print(f"warning: {path}: {warning}")
        if not read.found.boxes:
            console.print(f"warning: {path} has no boxes: every object counts as missed")
        found.append(read.found)
    return found


def _answered(detector: Detector, name: str, samples: Sequence[Sample]) -> Found:
    images = [(sample, image) for sample in samples for image in images_of(sample)]
    boxes: dict[str, list[Scored]] = {}
    answers: list[ParsedRollout] = []  # greedy answer to each image, parsed
    detector.heard = answers.append
    for place, one in detector.predictions({place: image for place, (_, image) in enumerate(images)}):
        if not isinstance(one, Prediction):
            raise one
        sample, image = images[place]
        found = [Scored(box_in_sample(b.box, b.name, sample, image.image), b.score) for b in one.boxes]
        boxes.setdefault(sample.sample_id, []).extend(found)
    matched = [
        Assignment(
            parsed=replace(answer, rollout=replace(answer.rollout, sample=sample)), pairs=(), missed=(), spurious=()
        )
        for (sample, image), answer in zip(images, answers, strict=True)
        # All images of a record share one answer, which counts once.
        if image.number == 1
    ]
    metrics = evaluate_counts(count_objects(matched))
    reason = reason_of(matched, metrics, detector.answers.encoder.tokenizer.decode)
    return Found(name=name, boxes=boxes, reason=reason)


def _ranked(
    options: EvaluateOptions, kept: Mapping[str, list[list[Scored]]], samples: Sequence[Sample], console: Console
) -> list[RankedModel]:
    """Return and print the detectors' F1, estimated for labels with gaps; [] if the labels have no gaps, or cannot rank
    detectors."""
    audited = require_verdicts(options.audit) if options.audit is not None else []
    places = drawn_places(len(samples))
    judge = GapJudge([samples[i] for i in places], Images(ImageRules()).load, audited)
    boxes = [[[box.object for box in line[i]] for i in places] for line in kept.values()]
    scores = [score for own in boxes if (score := judge.score(own)) is not None]
    if len(scores) < len(boxes):
        console.print(f"note: if these labels have gaps, they cannot rank models: {judge.why}")
        return []
    if not any(has_gaps(score, judge.num_labels) for score in scores):
        return []
    least, most = judge.objects(scores, boxes)
    ranked = rank(list(kept), scores, (least, most))
    console.print(
        f"These labels have gaps: F1 by them favors models that learned the gaps. {ESTIMATED} is from the photographs"
        f"{' and the audit' if audited else ''}, "
        f"for {least:.0f} to {most:.0f} objects; {judge.num_labels} have labels"
    )
    shown = Table("detector", ESTIMATED, "range", "precision", "not decided from", box=None, padding=(0, 2, 0, 0))
    for one in ranked:
        f1 = one.f1
        interval, ends = f"{f1.estimate:.3f} [{f1.low:.3f}, {f1.high:.3f}]", f"{one.low:.3f} to {one.high:.3f}"
        shown.add_row(one.name, interval, ends, f"{one.precision:.3f}", ", ".join(one.undecided))
    console.print(shown)
    return ranked


def _rows(
    results: Sequence[DetectorResult], compared: Compared, ranked: Sequence[RankedModel], why: Mapping[str, str]
) -> list[dict[str, Any]]:
    """Return one row per detector. A model's row has its results on the annotations of `retain`, as `retained`. A row
    has `with_gaps` if the labels have gaps, and `reason` if F1 is near 0."""
    rows = {one.name: asdict(one) for one in results}
    for model in ranked:
        rows[model.name]["with_gaps"] = asdict(model)
    for data, own in compared[1:]:
        for one in own:
            rows[one.name].setdefault("retained", {})[data] = asdict(one)
    for name, text in why.items():
        rows[name]["reason"] = text
    return list(rows.values())


def _table(results: Sequence[DetectorResult]) -> Table:
    shown = Table(
        "detector", "F1@0.5", "F1@mIoU", "AP", "AP50", "AUC", "calibration error", box=None, padding=(0, 2, 0, 0)
    )
    for one in results:
        f1, precision = one.intervals["f1@0.5"], one.intervals[AP]
        shown.add_row(
            one.name,
            f"{f1.estimate:.3f} [{f1.low:.3f}, {f1.high:.3f}]",
            f"{one.intervals['f1@miou'].estimate:.3f}",
            f"{precision.estimate:.3f} [{precision.low:.3f}, {precision.high:.3f}]",
            f"{one.intervals[AP50].estimate:.3f}",
            f"{one.auc:.3f}",
            f"{one.ece:.3f}",
        )
    return shown


def _gains(compared: Compared) -> Table:
    """Return F1@0.5 of each model on each set, and the difference from the first model."""
    _, first = compared[0]
    shown = Table("F1@0.5 on", *(one.name for one in first), box=None, padding=(0, 2, 0, 0))
    for data, results in compared:
        shown.add_row(data, *(_gain(one) for one in results))
    return shown


def _gain(one: DetectorResult) -> str:
    text, gained = f"{one.intervals['f1@0.5'].estimate:.3f}", one.differences.get("f1@0.5")
    return text if gained is None else f"{text} {gained.estimate:+.3f} [{gained.low:+.3f}, {gained.high:+.3f}]"
