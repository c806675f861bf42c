"""Small annotation files of each format, written into a folder, and what reading them gives."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from learner.config.schema import DataConfig
from learner.data.splits import Split, load_split
from learner.records import DetectionObject, GeometryKind, Sample
from shared.errors import DataError
from tests.unit.learner.data.fakes import AnyTask, draw

FLAT, OUT, FINE = [{"desc": "x", "bbox_2d": b} for b in ([5, 5, 5, 9], [150, 50, 260, 90], [0, 0, 20, 50])]
THIN_OUT = {"desc": "x", "poly": [150, 0, 250, 50, 150, 100]}


def box(desc: str, *bins: int) -> DetectionObject:
    return DetectionObject(desc=desc, kind="bbox_2d", bins=bins)


def split_of(path: Path | str, geometry: GeometryKind = "bbox_2d", **data: Any) -> Split:
    return load_split(DataConfig(train=str(path), **data), str(path), AnyTask(), geometry=geometry)


def samples_of(path: Path | str, geometry: GeometryKind = "bbox_2d", **data: Any) -> list[Sample]:
    return split_of(path, geometry, **data).samples


def refusal(path: Path | str, geometry: GeometryKind = "bbox_2d", **data: Any) -> str:
    with pytest.raises(DataError) as raised:
        split_of(path, geometry, **data)
    return str(raised.value)


def voc_object(name: str, *corners: object, **flags: object) -> str:
    tags = "".join(f"<{key}>{value}</{key}>" for key, value in flags.items())
    bounds = "".join(f"<{c}>{v}</{c}>" for c, v in zip(("xmin", "ymin", "xmax", "ymax"), corners, strict=True))
    return f"<object><name>{name}</name>{tags}<bndbox>{bounds}</bndbox></object>"


def voc(folder: Path, stem: str, *objects: str, size: tuple[object, object] = (200, 100), filename: str = "") -> None:
    (folder / "Annotations").mkdir(exist_ok=True)
    (folder / "Annotations" / f"{stem}.xml").write_text(
        f"<annotation><filename>{filename or stem + '.jpg'}</filename><path>/home/somebody/{stem}.jpg</path>"
        f"<size><width>{size[0]}</width><height>{size[1]}</height><depth>3</depth></size>{''.join(objects)}</annotation>"
    )
    draw(folder, f"JPEGImages/{stem}.jpg")


def yolo(folder: Path, *lines: str, content: str = "path: .\ntrain: images/train\nval: images/val\n") -> Path:
    draw(folder, "images/train/a.jpg", "images/train/sub/b.png", "images/val/c.jpg")
    (folder / "labels/train").mkdir(parents=True)
    (folder / "labels/train/a.txt").write_text("\n".join(lines))
    (folder / "labels/val").mkdir()
    (folder / "labels/val/c.txt").touch()
    (folder / "data.yaml").write_text(f"{content}names:\n  0: cat\n  1: dog\n")
    return folder / "data.yaml"


def coco(folder: Path, *annotations: dict[str, Any]) -> Path:
    draw(folder, "1.png")
    file = folder / "instances.json"
    rows = [{"id": i, "image_id": 1, "category_id": 1, "bbox": [0, 0, 50, 50], **a} for i, a in enumerate(annotations)]
    images = [{"id": "1", "file_name": "1.png", "width": 200, "height": 100}]
    content = {"images": images, "annotations": rows, "categories": [{"id": 1, "name": "cat"}]}
    file.write_text(json.dumps(content, indent=1))
    return file


def jsonl(folder: Path, *objects: dict[str, Any], name: str = "data.jsonl", **fields: Any) -> Path:
    """Write one row per object, on one image of 200 x 100; return the file."""
    draw(folder, "1.png")
    rows = [
        {"id": i, "messages": [{"role": "user", "content": "<image>?"}], "images": ["1.png"], "objects": [obj]}
        | {"width": 200, "height": 100, **fields}
        for i, obj in enumerate(objects)
    ]
    (folder / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder / name
