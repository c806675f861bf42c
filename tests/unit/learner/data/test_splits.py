"""Annotation files: what is read, and that every broken record is refused with file, line and reason (R12)."""

from __future__ import annotations

import base64
import json
import math
from pathlib import Path
from typing import Any

import pytest

from learner.config.sections.data import DataConfig
from learner.data.splits import load_samples, read_split
from learner.records import DetectionObject, Sample
from shared.errors import DataError
from tests.unit.learner.data.annotations import box
from tests.unit.learner.data.fakes import AnyTask, draw

ROW: dict[str, Any] = {
    "id": "a",
    "messages": [{"role": "user", "content": "<image>Detect."}],
    "images": ["images/1.png"],
    "objects": [{"desc": "low", "bbox_2d": [10, 50, 20, 90]}, {"desc": "high", "bbox_2d": [0, 0, 200, 100]}],
    "width": 200,
    "height": 100,
}


def load(folder: Path, *rows: Any, **data: Any) -> list[Sample]:
    """The rows, written as JSONL (a string as it is) beside an image `images/1.png`, and read."""
    draw(folder, "images/1.png")
    file = folder / "data.jsonl"
    file.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return load_samples(DataConfig(train=str(file), **data), str(file), AnyTask())


def without(key: str) -> dict[str, Any]:
    return {name: value for name, value in ROW.items() if name != key}


def with_object(**fields: Any) -> dict[str, Any]:
    return {**ROW, "objects": [fields]}


# ---- JSONL ---------------------------------------------------------------------------------------------------------


def test_a_row_becomes_a_sample(tmp_path: Path) -> None:
    """Pixels become bins, objects canonical order (R35), paths absolute; fields that are not ours are let through."""
    (sample,) = load(tmp_path, {**ROW, "licence": "CC0"})
    assert sample == Sample(
        sample_id="a",
        messages=({"role": "user", "content": "<image>Detect."},),
        images=(str(tmp_path / "images/1.png"),),
        objects=(box("high", 0, 0, 999, 999), box("low", 50, 500, 100, 899)),
        width=200,
        height=100,
    )


def test_the_assistants_last_turn_is_dropped(tmp_path: Path) -> None:
    turns = [
        {"role": "system", "content": "You detect."},
        {"role": "user", "content": "<image>One?"},
        {"role": "assistant", "content": "{}"},
        {"role": "user", "content": [{"type": "text", "text": "All?"}]},
        {"role": "assistant", "content": "{}"},
    ]
    (sample,) = load(tmp_path, {**ROW, "messages": turns})
    assert list(sample.messages) == turns[:-1]


def test_polygons(tmp_path: Path) -> None:
    (sample,) = load(tmp_path, with_object(desc="roof", poly=[0, 0, 100, 0, 100, 100.0]))
    assert sample.objects == (DetectionObject(desc="roof", kind="poly", bins=(0, 0, 500, 0, 500, 999)),)


def test_a_row_without_id_is_called_by_its_line(tmp_path: Path) -> None:
    assert [sample.sample_id for sample in load(tmp_path, without("id"), "", without("id"))] == ["1", "3"]


def test_images_may_be_inline_and_stay_as_they_are(tmp_path: Path) -> None:
    draw(tmp_path, "images/1.png")
    body = base64.b64encode((tmp_path / "images/1.png").read_bytes()).decode()
    assert len(body) < 1024  # inline images may be of any length
    images = ["http://host/a.png", f"data:image/png;base64,{body}", body]
    row = {**ROW, "images": images, "messages": [{"role": "user", "content": "Detect."}], "objects": []}
    (sample,) = load(tmp_path, row, allowed_image_hosts=["host"])
    assert list(sample.images) == images
    with pytest.raises(DataError, match=r"line 1: .*http://host/a\.png.*data\.allowed_image_hosts"):
        load(tmp_path, row)


def test_image_root_moves_relative_paths_only(tmp_path: Path) -> None:
    draw(tmp_path, "root/images/1.png", "else.png")
    rows = [ROW, {**ROW, "id": "b", "images": [str(tmp_path / "else.png")]}]
    samples = load(tmp_path, *rows, image_root=str(tmp_path / "root"))
    assert [s.images[0] for s in samples] == [str(tmp_path / "root/images/1.png"), str(tmp_path / "else.png")]


def test_a_limit_takes_the_first_samples(tmp_path: Path) -> None:
    load(tmp_path, *({**ROW, "id": i} for i in range(5)))
    file = str(tmp_path / "data.jsonl")
    found = read_split(DataConfig(train=file), file, AnyTask(), limit=2)
    assert [sample.sample_id for sample in found.samples] == ["0", "1"]


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ("{", "EOF"),
        ("[]", "the record is wrong"),
        (without("messages"), "messages is missing; found only id, images.*wanted a value"),
        (without("objects"), "objects is missing"),
        (without("width"), "width is missing"),
        ({**ROW, "height": 0}, "height is wrong.*found 0"),
        ({**ROW, "width": "wide"}, "width is wrong"),
        ({**ROW, "width": 200.5}, r"width is wrong.*200\.5"),
        ({**ROW, "messages": []}, "messages is wrong"),
        ({**ROW, "messages": [{"role": "bot", "content": "x"}]}, r"messages\.0\.role is wrong.*bot"),
        ({**ROW, "messages": [{"role": "assistant", "content": "x"}]}, "messages ask nothing"),
        (
            {**ROW, "messages": [{"role": "user", "content": [{"type": "image", "image": "x"}]}]},
            "messages hold an image",
        ),
        ({**ROW, "images": []}, "placeholders and images differ"),
        ({**ROW, "images": ["images/2.png"]}, r"image 'images/2\.png' can't be used.*data\.image_root"),
        (with_object(bbox_2d=[0, 0, 1, 1]), r"objects\.0 is wrong.*wanted a desc"),
        (with_object(desc="", bbox_2d=[0, 0, 1, 1]), r"objects\.0 is wrong.*wanted a desc"),
        (with_object(desc="x"), "exactly one of bbox_2d and poly"),
        (with_object(desc="x", bbox_2d=[0, 0, 1, 1], poly=[0, 0, 1, 0, 1, 1]), "exactly one of bbox_2d and poly"),
        (with_object(desc="x", bbox_2d=[0, 0, 1]), r"objects\.0\.bbox_2d is wrong"),
        (with_object(desc="x", bbox_2d=[5, 0, 5, 1]), r"object 1 \('x'\) has no area.*\[5\.0, 0\.0, 5\.0, 1\.0\]"),
        (with_object(desc="x", bbox_2d=[5, 0, 5.01, 1]), r"has no area.*5\.01.*rounding"),
        (with_object(desc="x", poly=[0, 0, 50, 50, 100, 100]), "has no area"),
        (with_object(desc="x", bbox_2d=[0, 0, 1, None]), r"objects\.0\.bbox_2d\.3 is wrong"),
        (with_object(desc="x", bbox_2d=[0, 0, math.nan, 1]), r"objects\.0\.bbox_2d\.2 is wrong"),
        (with_object(desc="x", poly=[0, 0, 1, 0, 1, 1, 2]), "even number"),
        (with_object(desc="x", bbox_2d=[0, 0, 202, 50]), r"object 1 \('x'\) lies outside the image.*200 x 100"),
        (with_object(desc="bad", bbox_2d=[0, 0, 20, 50]), "the task can't use it"),
    ],
)
def test_a_broken_row_is_refused_with_file_line_and_reason(tmp_path: Path, row: Any, reason: str) -> None:
    """R12: never skipped in silence."""
    with pytest.raises(DataError, match=rf"data\.jsonl, line 2: .*{reason}") as caught:
        load(tmp_path, {**ROW, "id": "fine"}, row)
    assert caught.value.wanted
    assert caught.value.exit_code == 2


def test_coordinates_on_the_edge_are_let_through(tmp_path: Path) -> None:
    """Annotation tools round: a pixel beyond the edge is clamped."""
    (sample,) = load(tmp_path, with_object(desc="x", bbox_2d=[-0.4, 0, 200.6, 100]))
    assert sample.objects[0].bins == (0, 0, 999, 999)


def test_rows_with_messages_need_no_prompt(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"data\.prompt"):
        load(tmp_path, ROW, prompt="<image>Look")


def test_numbers_may_be_written_in_several_ways(tmp_path: Path) -> None:
    """Tools and spreadsheets export them so (R41)."""
    (sample,) = load(tmp_path, {**with_object(desc="x", bbox_2d=["0", 0, "20.0", 50]), "width": "200", "height": 100.0})
    assert (sample.width, sample.height, sample.objects) == (200, 100, (box("x", 0, 0, 100, 500),))


def test_an_id_that_comes_twice_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"line 3: its id is taken.*'a', also at line 1"):
        load(tmp_path, ROW, {**ROW, "id": "b"}, ROW)


def test_a_missing_and_an_empty_file_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"annotation file is missing.*nowhere"):
        load_samples(DataConfig(train="nowhere.jsonl"), "nowhere.jsonl", AnyTask())
    with pytest.raises(DataError, match="no samples"):
        load(tmp_path)


# ---- COCO ----------------------------------------------------------------------------------------------------------

COCO: dict[str, Any] = {
    "info": {"year": 2017},
    "images": [
        {"id": 4, "file_name": "images/1.png", "width": 200, "height": 100, "license": 1},
        {"id": 9, "file_name": "images/2.png", "width": "100", "height": 100.0},
    ],
    "annotations": [
        {"id": 1, "image_id": 4, "category_id": 2, "bbox": [10, 50, 10, 40], "iscrowd": 0, "segmentation": [[1, 2]]},
        {"id": 2, "image_id": 4, "category_id": 1, "bbox": [0, 0, 200, 100.0]},
        {"id": 3, "image_id": 9, "category_id": 1, "bbox": [0, 0, 50, 50], "iscrowd": True},
    ],
    "categories": [{"id": 1, "name": "sky"}, {"id": 2, "name": "dog", "supercategory": "animal"}],
}


def load_coco(folder: Path, coco: Any, **data: Any) -> list[Sample]:
    draw(folder, "images/1.png")
    draw(folder, "images/2.png", size=(100, 100))
    file = folder / "instances.json"
    file.write_text(json.dumps(coco))
    return load_samples(DataConfig(train=str(file), format="coco", **data), str(file), AnyTask())


def changed(section: str, index: int, **fields: Any) -> dict[str, Any]:
    items = [dict(item) for item in COCO[section]]
    items[index].update(fields)
    return {**COCO, section: items}


def test_coco_images_become_samples(tmp_path: Path) -> None:
    """xywh becomes x1 y1 x2 y2, categories descriptions; crowds are ignore regions; an image without objects is kept
    (R12, R41)."""
    first, second = load_coco(tmp_path, COCO, prompt="<image>Find all.")
    assert first == Sample(
        sample_id="4",
        messages=({"role": "user", "content": "<image>Find all."},),
        images=(str(tmp_path / "images/1.png"),),
        objects=(box("sky", 0, 0, 999, 999), box("dog", 50, 500, 100, 899)),
        width=200,
        height=100,
    )
    assert (second.sample_id, second.objects) == ("9", ())
    assert second.ignored == (box("sky", 0, 0, 500, 500),)


@pytest.mark.parametrize(
    ("coco", "reason"),
    [
        ({"images": []}, "COCO JSON: annotations is missing"),
        (changed("images", 0, width=0), "image 4: width is missing; found height 100"),
        (changed("images", 0, width=-1), "image 4: width is missing; found height 100"),
        (changed("images", 0, width=-2), r"COCO JSON: images\.0\.width is wrong"),
        ({**COCO, "images": [*COCO["images"], COCO["images"][0]]}, "image 4: its id is taken"),
        (changed("images", 1, file_name="3.png"), r"image 9: image '3\.png' can't be used"),
        (changed("annotations", 0, image_id=5), "annotation 1: its image is not there; found image_id 5"),
        (changed("annotations", 0, category_id=5), "annotation 1: .* unknown class; found category_id 5"),
        (
            changed("annotations", 0, bbox=[10, 50, 0, 40]),
            r"annotation 1: .* has no area.*\[10\.0, 50\.0, 0\.0, 40\.0\]",
        ),
        (changed("annotations", 0, bbox=[10, 50, 10, 80]), "annotation 1: .* lies outside the image"),
        (changed("images", 0, width=201), "image 4: its image has another size.*201 x 100.*200 x 100"),
        (changed("categories", 0, name="bad"), "image 4: the task can't use it"),
    ],
)
def test_a_broken_coco_file_is_refused_with_id_and_reason(tmp_path: Path, coco: Any, reason: str) -> None:
    with pytest.raises(DataError, match=rf"instances\.json, {reason}"):
        load_coco(tmp_path, coco)


def test_the_demo_reads_alike_from_both_files(tmp_path: Path) -> None:
    """The demo's JSONL and COCO files give the same objects for the same images, through the real task."""
    from bench.tiny import build_tokenizer
    from deploy.demo.build_data import Build, build
    from learner.config.sections.task import TaskConfig
    from learner.tasks.detection.task import DetectionTask

    build(Build(train=20, val=0, test=0), tmp_path)
    task = DetectionTask(TaskConfig(), build_tokenizer())
    rows = load_samples(DataConfig(train="x"), str(tmp_path / "train.jsonl"), task)
    coco = load_samples(DataConfig(train="x", format="coco"), str(tmp_path / "train.coco.json"), task)
    assert [(s.images, s.objects) for s in rows] == [(s.images, s.objects) for s in coco]
