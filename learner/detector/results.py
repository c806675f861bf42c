"""Writes the files of `predict`, and lets a second command continue an interrupted one.

    predictions.jsonl   one line per image, written when it is answered; a resume reads them and `request.json`
    predictions.json    COCO results: image_id, category_id, bbox, score, with the names of class and file
    predictions.csv     one line per box
    pictures/           each photograph with its boxes
    index.html          all pictures on a page

Invariant: a line is written whole, after its picture. The next command with the same request answers the remaining
images. A command with another request is refused.
"""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from learner.detector.boxes import Prediction, ScoredBox
from learner.run.files import AppendedLines, write_atomically, writing
from learner.tasks.detection.coco_results import FoundBox, coco_rows, coco_text
from shared.errors import ConfigError, OutputError
from shared.reading import json_in, lines_in

LINES, REQUEST = "predictions.jsonl", "request.json"
COCO_NAME, CSV_NAME, PAGE_NAME, PICTURES = "predictions.json", "predictions.csv", "index.html", "pictures"
_FORMULA = tuple("=+-@\uff1d\uff0b\uff0d\uff20")  # a cell with such a first character is a formula in spreadsheets
_COLUMNS = ("file", "image_id", "width", "height", "class", "score", "x1", "y1", "x2", "y2")


@dataclass
class Store:
    """The predictions in one folder. `done`: the predictions so far, by the index of their image. `lines`: the file
    `predictions.jsonl`, which has a line for each prediction."""

    done: dict[int, Prediction]
    lines: AppendedLines

    @classmethod
    def open(cls, out: Path, request: Mapping[str, object], *, overwrite: bool = False) -> Store:
        """Open the folder of a request. Raises ConfigError if the folder has the results of another request. Raises
        OutputError if the folder cannot be written, or has a file that would be replaced and `predict` did not
        write."""
        with writing(out):
            out.mkdir(parents=True, exist_ok=True)
            written, lines, wanted = out / REQUEST, out / LINES, json.dumps(request, indent=1, sort_keys=True)
            if overwrite:
                lines.unlink(missing_ok=True)
            elif not written.is_file():
                _require_free(out)
            # A command that failed before its first answer wrote no line, so its files may be replaced.
            elif lines.is_file() and lines.stat().st_size and (found := _read_request(written)) != json.loads(wanted):
                raise _another_request(out, found, request)
            write_atomically(written, wanted)
            return cls(dict(_read(lines)), AppendedLines(lines))

    def add(self, place: int, prediction: Prediction) -> None:
        """Append a prediction. Raises OutputError."""
        self.done[place] = prediction
        self.lines.append(json.dumps({"place": place, **asdict(prediction)}))

    def close(self) -> None:
        self.lines.close()

    def predictions(self) -> list[Prediction]:
        """Return the predictions in the order of the images."""
        return [self.done[place] for place in sorted(self.done)]


class _Line(BaseModel):
    """A line of `predictions.jsonl`."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)

    place: int = Field(ge=0)
    id: int | str
    name: str
    source: str
    width: int = Field(ge=1)
    height: int = Field(ge=1)
    boxes: tuple[ScoredBox, ...]
    truncated: bool = False


def _read(file: Path) -> Iterable[tuple[int, Prediction]]:
    """Yield (index of the image, prediction) for each answered image. A damaged line is left out, so that its image is
    done again."""
    if not file.is_file():
        return
    for _, text in lines_in(file):
        try:
            line = _Line.model_validate_json(text)
        # A killed command may leave half a line, and a disk or a person may damage any line.
        except ValidationError:
            continue
        values = {name: getattr(line, name) for name in _Line.model_fields if name != "place"}
        yield line.place, Prediction(**values)


def _read_request(file: Path) -> dict[str, object]:
    """Return the content of `request.json`. Raises OutputError."""
    try:
        found = json_in(file)
        if isinstance(found, dict):
            return found
        why = f"a {type(found).__name__}"
    except ValueError as error:
        why = str(error)[:200]
    raise OutputError(
        f"{file} cannot be read, so nothing says what the folder's predictions are of",
        found=why,
        wanted="the file that predict wrote",
        remedy="choose another --out, or give --overwrite to have them replaced",
    )


def _require_free(out: Path) -> None:
    there = [name for name in (LINES, COCO_NAME, CSV_NAME, PAGE_NAME, PICTURES) if (out / name).exists()]
    if there:
        raise OutputError(
            f"{out} has files that predict would replace",
            found=f"{', '.join(there)}, and no {REQUEST} of an earlier predict",
            wanted="a new folder, or one that predict wrote",
            remedy="choose another --out, or give --overwrite to have them replaced",
        )


def _another_request(out: Path, found: Mapping[str, object], wanted: Mapping[str, object]) -> ConfigError:
    there, now = _flat(found), _flat(wanted)
    differing = [key for key in now if there.get(key) != now[key]]
    shown = "; ".join(f"{key}: {there.get(key)!s:.80} there, {now[key]!s:.80} now" for key in differing[:3])
    return ConfigError(
        f"{out} has the predictions of another command",
        found=shown or "other options",
        wanted="the same model, inputs and options, to go on where it stopped",
        remedy="choose another --out, or give --overwrite",
    )


def _flat(request: Mapping[str, object]) -> dict[str, object]:
    """Return the options of a request in one mapping, without nested ones."""
    flat: dict[str, object] = {}
    for key, value in request.items():
        # Some names of the model's settings, such as `classes`, are names of options too.
        prefix = "the model's " if key == "settings" else ""
        flat.update({prefix + name: one for name, one in value.items()} if isinstance(value, dict) else {key: value})
    return flat


# ---- files ---------------------------------------------------------------------------------------------------------


def write_results(out: Path, predictions: Sequence[Prediction], categories: Mapping[str, int], conf: float) -> None:
    """Write the COCO results of all boxes, and a CSV of boxes with a score of at least `conf`. Raises OutputError."""
    found = [
        FoundBox(one.id, one.name, box.name, box.score, box.box, box.outline)
        for one in predictions
        for box in one.boxes
    ]
    write_atomically(out / COCO_NAME, coco_text(coco_rows(found, categories)))
    write_atomically(out / CSV_NAME, _csv(predictions, conf))


def _csv(predictions: Sequence[Prediction], conf: float) -> str:
    file = io.StringIO()
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow(_COLUMNS)
    for one in predictions:
        for box in one.boxes:
            if box.score >= conf:
                shown = (_cell(one.name), _cell(one.id), one.width, one.height, _cell(box.name))
                writer.writerow([*shown, f"{box.score:.4f}", *box.box])
    return file.getvalue()


def _cell(value: str | int) -> str | int:
    """Return a name as a table's cell, with an apostrophe before a name that a spreadsheet takes for a formula."""
    return f"'{value}" if isinstance(value, str) and value.lstrip()[:1] in _FORMULA else value
