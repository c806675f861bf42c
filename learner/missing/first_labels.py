"""`rollout-learner init FOLDER --label-with MODEL --classes a,b`: makes first labels (R50).

In: a folder of photographs without labels, and a vision-language model. Out: `labels/photographs.json`, COCO without
annotations, and `labels/suggestions/`, the model's boxes for `find-missing review`. The boxes that a person accepts
become the first labels.
"""

from __future__ import annotations

import json
import os
import shlex
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from learner.config.sections.data import DataConfig
from learner.data.formats.source import photographs_below
from learner.detector.answers import AnswerSettings
from learner.detector.boxes import Prediction
from learner.detector.command import quiet
from learner.detector.detector import Detector
from learner.detector.inputs import InputImage
from learner.detector.model import ModelFiles, find_model
from learner.missing.suggest import SUGGESTIONS, Suggestion
from learner.run.files import write_atomically
from shared.errors import ConfigError, DataError, OutputError

PHOTOGRAPHS, FOLDER = "photographs.json", "labels"


def label(folder: Path, out: Path, model: Path, classes: Sequence[str], asked: AnswerSettings) -> int:
    """Write the photographs and their suggested labels below `out`, and return the exit code. Raises ConfigError,
    DataError, OutputError, and the model's errors."""
    if not classes:
        remedy = "name them: --classes raccoon,dog"
        raise ConfigError("--label-with needs classes", found="no --classes", wanted="names to look for", remedy=remedy)
    photographs = photographs_below(folder) if folder.is_dir() else []
    if not photographs:
        wanted = "a folder of photographs"
        raise DataError(f"{folder}: no photographs", found="none", wanted=wanted, remedy="correct the path")
    images, suggestions = out / FOLDER / PHOTOGRAPHS, out / FOLDER / "suggestions" / SUGGESTIONS
    if there := next((file for file in (images, suggestions) if file.exists()), None):
        remedy = f"review these, or give another --out: rollout-learner find-missing review {suggestions.parent}"
        raise OutputError("a file would be replaced", found=str(there), wanted="no such file", remedy=remedy)
    quiet()
    found = _predicted(find_model(model, classes=classes), photographs, folder, classes, asked)
    write_atomically(images, _coco(found, classes, images.parent))
    data = DataConfig(train=str(images), on_bad_record="clip")
    ranked = sorted((one for _, rows in found for one in rows), key=lambda one: -one.agreement)
    content = {"data": data.model_dump(mode="json"), "key": "train", "suggestions": [asdict(one) for one in ranked]}
    write_atomically(suggestions, json.dumps(content) + "\n")
    review, labels = shlex.quote(str(suggestions.parent)), shlex.quote(str(out / FOLDER / "train.json"))
    print(
        f"{len(ranked)} boxes in {len(found)} photographs. They are suggestions: accept, reject and rename them. Next:"
    )
    print(
        f"  rollout-learner find-missing review {review}\n  rollout-learner find-missing write {review} --out {labels}"
    )
    print(f"  rollout-learner init {shlex.quote(str(out / FOLDER))}")
    return 0


def _predicted(
    model: ModelFiles, photographs: Sequence[Path], folder: Path, classes: Sequence[str], asked: AnswerSettings
) -> list[tuple[Prediction, list[Suggestion]]]:
    """Return, for each readable photograph, the model's prediction and the same boxes as suggestions."""
    line = {
        place: InputImage(id=place + 1, source=str(file.absolute()), name=str(file.relative_to(folder)))
        for place, file in enumerate(photographs)
    }
    found: list[tuple[Prediction, list[Suggestion]]] = []
    with Detector(model, asked=asked, classes=classes) as detector:
        for _, one in detector.predictions(line):
            if not isinstance(one, Prediction):
                print(f"skipped: {one}", file=sys.stderr)
                continue
            found.append((one, _suggestions(one)))
            print(f"{len(found)} of {len(line)} photographs", file=sys.stderr)
    return found


def _suggestions(one: Prediction) -> list[Suggestion]:
    """Return the photograph's boxes as suggestions. `agreement` is the box's score."""
    return [
        Suggestion(
            sample_id=str(one.id),
            image=one.source,
            width=one.width,
            height=one.height,
            name=box.name,
            box=box.box,
            votes=1,
            answers=1,
            # With a single answer there is no agreement between answers, so the score is used instead.
            agreement=round(box.score, 4),
            names=(box.name,),
            labels=(),
        )
        for box in one.boxes
    ]


def _coco(found: Sequence[tuple[Prediction, object]], classes: Sequence[str], beside: Path) -> str:
    """Return the photographs as COCO without annotations. The photographs' names are relative to the folder
    `beside`."""
    images = [
        {
            "id": one.id,
            "file_name": os.path.relpath(one.source, beside.absolute()),
            "width": one.width,
            "height": one.height,
        }
        for one, _ in found
    ]
    categories = [{"id": number, "name": name} for number, name in enumerate(classes, start=1)]
    return json.dumps({"images": images, "annotations": [], "categories": categories}, indent=1) + "\n"
