"""The project's JSONL: one record per line.

    {"id": "a-17", "messages": [{"role": "user", "content": "<image>Detect every digit."}], "images": ["images/17.png"],
     "objects": [{"desc": "seven", "bbox_2d": [12, 40, 31, 77]}], "width": 128, "height": 128}

Coordinates are pixels; image paths are relative to the file's folder or `image_root`. An assistant's last turn is
dropped. Blank lines are let through, everything else that is not a record is a DataError with its line.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from pydantic import ValidationError

from learner.data.row import Place, Row, to_sample
from learner.records import Sample


def read_jsonl(file: Path, *, image_root: Path) -> Iterator[tuple[Place, Sample]]:
    """Samples in the order of lines, with their places. Raises DataError for the first line that is wrong."""
    with file.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            place = Place(file, f"line {number}")
            try:
                row = Row.model_validate_json(line.strip())
            except ValidationError as error:
                raise place.invalid(error) from error
            sample_id = str(number) if row.id is None else str(row.id)
            yield place, to_sample(row, sample_id=sample_id, image_root=image_root, place=place)
