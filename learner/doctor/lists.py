"""`rollout-learner split --config run.yaml --out DIR`: lists the photographs that a run trains on and is evaluated on.

In: a configuration, whose splits may be percents of one folder. Out: a list `train.txt`, and `val.txt` and `test.txt`
if there are such splits. Each list has one path per line. For YOLO labels, a `data.yaml` that names these lists is
written too, so that a YOLO trainer learns from the same photographs.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from learner.config.load import load_config
from learner.data.check import check_split, splits
from learner.data.formats.source import name_and_split
from learner.data.formats.yolo import yolo_file
from learner.data.splits import annotations_of
from learner.run.files import write_atomically
from shared.config.model import ConfigErrors
from shared.errors import OutputError
from shared.reading import is_file


def write_lists(path: str, out: Path, overrides: Sequence[str] = ()) -> int:
    """Write the lists into the folder `out`, and return the exit code. Raises ConfigErrors for a wrong configuration or
    wrong annotations, and OutputError."""
    data = load_config(path, overrides=overrides)
    checked = {split: check_split(data, split, named) for split, named in splits(data).items()}
    if mistakes := [mistake for found in checked.values() for mistake in found.mistakes]:
        raise ConfigErrors("annotations cannot be used", mistakes=mistakes)
    written: dict[str, Path] = {}
    for split, found in checked.items():
        samples = found.split.samples if found.split is not None else []
        images = dict.fromkeys(image for sample in samples for image in sample.images)
        files = [image for image in images if is_file(Path(image))]
        _write(out / f"{split}.txt", "".join(f"{file}\n" for file in files))
        written[split] = out / f"{split}.txt"
        others = f"; {len(images) - len(files)} others are no files" if len(images) > len(files) else ""
        print(f"{out / f'{split}.txt'}: {len(files)} photographs{others}")
    annotations = annotations_of(data.data, data.data.train)
    if annotations.format == "yolo":
        names = yolo_file(Path(name_and_split(annotations.path)[0])).classes
        # JSON escapes an emoji as two halves, which YAML does not join.
        quoted = partial(json.dumps, ensure_ascii=False)
        lists = "".join(f"{split}: {quoted(str(file.absolute()))}\n" for split, file in written.items())
        classes = "".join(f"  {number}: {quoted(name)}\n" for number, name in names.items())
        _write(out / "data.yaml", f"{lists}names:\n{classes}")
        print(f"{out / 'data.yaml'}: for YOLO trainers")
    return 0


def _write(file: Path, text: str) -> None:
    """Write the file. Raises OutputError if the file exists with another text."""
    if file.exists() and file.read_text(encoding="utf-8", errors="replace") != text:
        remedy = "give another folder with --out, or move the file away"
        raise OutputError("a file would be replaced", found=str(file), wanted="no such file", remedy=remedy)
    write_atomically(file, text)
