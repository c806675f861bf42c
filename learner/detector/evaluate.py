"""`rollout-learner evaluate ANNOTATIONS --predictions NAME=FILE ... --model NAME=DIR ...`.

Compares detectors on an annotation file, files first, then models, in the order of the command line: the first one is
what the others are compared with. Prints a table, and writes `evaluation.json` and `index.html`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from rich.console import Console
from rich.table import Table

from learner.config.sections.data import DataConfig
from learner.data.splits import load_split
from learner.detector.answers import Asked
from learner.detector.boxes import Prediction
from learner.detector.command import quiet
from learner.detector.detector import Detector
from learner.detector.evaluation import Found, Result, Scored, evaluate_all, threshold_of
from learner.detector.inputs import Anything, InputImage, coco_categories
from learner.detector.pictures import TEMPLATES
from learner.detector.results_in import box_in_sample, read_results
from learner.records import Sample
from learner.run.files import write_atomically
from learner.tasks.detection.ap_interval import AP, AP50
from shared.errors import ConfigError

EVALUATION, PAGE = "evaluation.json", "index.html"
TABLE_WIDTH = 110  # characters: where nobody looks, as in a log, lines are not broken


@dataclass(frozen=True, kw_only=True)
class EvaluateOptions:
    """`predictions`, `val_predictions` and `models` by name. `val`: annotations that thresholds are chosen on."""

    annotations: str
    predictions: Mapping[str, Path] = field(default_factory=dict)
    models: Mapping[str, Path] = field(default_factory=dict)
    val: str | None = None
    val_predictions: Mapping[str, Path] = field(default_factory=dict)
    asked: Asked = field(default_factory=Asked)
    image_root: str | None = None
    out: Path


def evaluate(options: EvaluateOptions) -> int:
    """Returns the exit code. Raises ConfigError, DataError, RolloutError, OutputError."""
    quiet()
    if not options.predictions and not options.models:
        raise ConfigError(
            "evaluate: nothing to evaluate",
            found="neither --predictions nor --model",
            wanted="COCO results, or a model that answers the images",
            remedy="name one: --predictions yolo=predictions.json, --model ours=runs/cells",
        )
    console = Console(stderr=True, highlight=False, soft_wrap=True, markup=False)
    samples = _samples(options, options.annotations)
    found = _found(options, options.annotations, samples, options.predictions)
    thresholds: dict[str, float] = {}
    if options.val is not None:
        held_out = _samples(options, options.val)
        for one in _found(options, options.val, held_out, options.val_predictions):
            thresholds[one.name] = threshold_of([list(one.boxes.get(s.sample_id, ())) for s in held_out], held_out)
    results = evaluate_all(found, samples, thresholds)
    write_atomically(options.out / EVALUATION, json.dumps([asdict(one) for one in results], indent=1) + "\n")
    page = TEMPLATES.get_template("evaluation.html").render(
        title=Path(options.annotations).name,
        facts=f"{len(samples)} images, {sum(len(s.objects) for s in samples)} objects",
        results=results,
        classes=sorted({name for one in results for name in one.classes}),
        chosen=f"on {options.val}" if options.val else "on other images of the same file (five parts)",
    )
    write_atomically(options.out / PAGE, page)
    console.width = max(console.width, TABLE_WIDTH)
    console.print(_table(results))
    print(options.out / PAGE)
    return 0


def _samples(options: EvaluateOptions, path: str) -> list[Sample]:
    data = DataConfig(train=path, on_bad_record="drop", image_root=options.image_root)
    return load_split(data, path, Anything()).samples


def _found(
    options: EvaluateOptions, annotations: str, samples: Sequence[Sample], predictions: Mapping[str, Path]
) -> list[Found]:
    categories = coco_categories([annotations])
    read = [read_results(path, name, samples, categories) for name, path in predictions.items()]
    return read + [_by_model(path, name, samples, options.asked) for name, path in options.models.items()]


def _by_model(path: Path, name: str, samples: Sequence[Sample], asked: Asked) -> Found:
    line = {i: InputImage(id=sample.sample_id, source=sample.images[0], name="") for i, sample in enumerate(samples)}
    boxes: dict[str, list[Scored]] = {}
    with Detector(path, asked=asked) as detector:
        for place, one in detector.predictions(line):
            if not isinstance(one, Prediction):
                raise one
            sample = samples[place]
            boxes[sample.sample_id] = [Scored(box_in_sample(b.box, b.name, sample), b.score) for b in one.boxes]
    return Found(name=name, boxes=boxes)


def _table(results: Sequence[Result]) -> Table:
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
