"""Annotations as well-known tools export them: read, or named in one line with what to export instead (R41)."""

from __future__ import annotations

import json
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from learner.data.formats.coco import category_ids
from learner.data.formats.folders import splits_in
from learner.records import Sample
from tests.unit.learner.data.annotations import box, coco, jsonl, refusal, samples_of, split_of, voc, voc_object
from tests.unit.learner.data.fakes import draw

BOXES = [[20, 30, 100, 120], [150, 60, 260, 200]]  # of photographs of 320 x 240
NAMES = ["helmet", "vest"]
EXPECTED = (box("helmet", 62, 125, 312, 500), box("vest", 468, 250, 812, 832))
USER = {"role": "user", "content": "<image>Find every object"}


def photographs(folder: Path, *names: str) -> None:
    draw(folder, *names, size=(320, 240))


def coco_file(file: Path, *names: str, size: tuple[Any, Any] = (320, 240), **annotation: Any) -> Path:
    """Write COCO with BOXES on each image, with `annotation` in each of them."""
    images = [{"id": i, "file_name": name, "width": size[0], "height": size[1]} for i, name in enumerate(names)]
    rows = [
        {"id": len(BOXES) * i + k, "image_id": i, "category_id": k, "bbox": [x1, y1, x2 - x1, y2 - y1], **annotation}
        for i in range(len(names))
        for k, (x1, y1, x2, y2) in enumerate(BOXES)
    ]
    file.parent.mkdir(parents=True, exist_ok=True)
    categories = [{"id": k, "name": name} for k, name in enumerate(NAMES)]
    file.write_text(json.dumps({"images": images, "annotations": rows, "categories": categories}))
    return file


# ---- images that are elsewhere -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("written", "there"),
    [
        ("D:\\data\\im0.jpg", "im0.jpg"),
        ("/home/ann/set/im0.jpg", "photos/im0.jpg"),
        (r"..\..\label-studio\media\upload\4\0a1b2c3d-im0.jpg", "images/0a1b2c3d-im0.jpg"),
        ("/data/upload/4/0a1b2c3d-im0.jpg", "images/im0.jpg"),
        ("IM0.JPG", "im0.jpg"),
        ("im0", "images/im0.png"),
        ("im0.bmp", "im0.png"),
        ("file:///home/ann/im0.jpg", "im0.jpg"),
    ],
)
def test_an_image_is_found_by_its_name(tmp_path: Path, written: str, there: str) -> None:
    photographs(tmp_path, there)
    split = split_of(coco_file(tmp_path / "train.json", written))
    assert split.samples[0].images == (str(tmp_path / there),)
    assert split.samples[0].objects == EXPECTED
    assert split.bad.summary() == {"found_by_name": {"keep": 1}}


def test_of_two_images_of_one_name_that_in_the_folder_as_written_is_meant(tmp_path: Path) -> None:
    photographs(tmp_path, "train/a.jpg", "val/a.jpg")
    file = coco_file(tmp_path / "x.json", "/home/ann/train/a.jpg")
    assert samples_of(file)[0].images == (str(tmp_path / "train/a.jpg"),)
    text = refusal(coco_file(tmp_path / "x.json", "/home/ann/a.jpg"))
    assert "/home/ann/a.jpg" in text
    assert "image_root" in text


def test_images_beside_the_folder_of_annotations(tmp_path: Path) -> None:
    photographs(tmp_path, "pictures/day/a.jpg")
    file = coco_file(tmp_path / "annotations/train.json", "C:/x/a.jpg")
    assert samples_of(file)[0].images == (str(tmp_path / "pictures/day/a.jpg"),)


def test_jsonl_too(tmp_path: Path) -> None:
    photographs(tmp_path, "deep/1.jpg")
    file = jsonl(tmp_path, {"desc": "a", "bbox_2d": BOXES[0]}, images=["/mnt/x/1.jpg"], width=320, height=240)
    (tmp_path / "1.png").unlink()
    assert samples_of(file)[0].images == (str(tmp_path / "deep/1.jpg"),)


def test_fiftyone_has_its_images_in_data(tmp_path: Path) -> None:
    photographs(tmp_path, "data/im0.jpg")
    coco_file(tmp_path / "labels.json", "im0.jpg")
    split = split_of(tmp_path)
    assert split.samples[0].objects == EXPECTED
    assert split.bad.summary() == {}


# ---- COCO that leaves something out --------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [(-1, -1), ("-1", "-1"), (0, 0), (None, None)])
def test_an_unknown_size_is_the_images_own(tmp_path: Path, size: tuple[Any, Any]) -> None:
    photographs(tmp_path, "a.jpg")
    assert samples_of(coco_file(tmp_path / "x.json", "a.jpg", size=size))[0].objects == EXPECTED


def test_annotations_without_id_and_box(tmp_path: Path) -> None:
    ring = [10, 10, 60, 10, 60, 40, 10, 40]
    for change in ({"id": None}, {"bbox": None, "segmentation": [ring]}, {"bbox": [], "segmentation": [ring]}):
        (sample,) = samples_of(coco(tmp_path, {"bbox": [10, 10, 50, 30], **change}, {"bbox": [1, 1, 9, 9]}))
        assert box("cat", 50, 100, 300, 400) in sample.objects
    content = json.loads((tmp_path / "instances.json").read_text())
    for annotation in content["annotations"]:
        del annotation["id"]
    (tmp_path / "instances.json").write_text(json.dumps(content))
    assert len(samples_of(tmp_path / "instances.json")[0].objects) == 2
    (tmp_path / "instances.json").write_text(json.dumps(content | {"annotations": None}))
    assert samples_of(tmp_path / "instances.json")[0].objects == ()
    assert "bbox" in refusal(coco(tmp_path, {"bbox": None}))


# ---- CVAT ----------------------------------------------------------------------------------------------------------


def test_a_turned_rectangle_of_cvat_gives_the_box_around_it(tmp_path: Path) -> None:
    photographs(tmp_path, "a.jpg")
    attributes = {"occluded": False, "rotation": 90.0}
    split = split_of(coco_file(tmp_path / "x.json", "a.jpg", attributes=attributes))
    # 80 x 90 around (60, 75) and 110 x 140 around (205, 130), with width and height exchanged
    assert split.samples[0].objects == (box("helmet", 47, 146, 328, 479), box("vest", 421, 312, 859, 770))
    assert split.bad.summary() == {"rotated": {"keep": 2}}
    split = split_of(coco_file(tmp_path / "x.json", "a.jpg", attributes={"rotation": 45}))
    assert split.samples[0].objects[0] == box("helmet", 0, 62, 375, 562)  # cut at the image's edge
    outline = samples_of(tmp_path / "x.json", "poly")[0].objects[0]
    assert outline.kind == "poly"
    assert len(outline.bins) == 8
    for attributes in ({"rotation": 0.0}, {"rotation": 180}, {"rotation": "?"}, {}, []):  # type: ignore[assignment]
        split = split_of(coco_file(tmp_path / "x.json", "a.jpg", attributes=attributes))
        assert (split.samples[0].objects, split.bad.summary()) == (EXPECTED, {})


ROTATION = "<attributes><attribute><name>rotation</name><value>{}</value></attribute></attributes>"


def test_cvats_pascal_voc_has_attributes(tmp_path: Path) -> None:
    for stem, degrees in (("a", "0.0"), ("b", "90.0")):
        node = voc_object("helmet", 20, 30, 100, 120, difficult=0)
        attributes = ROTATION.format(degrees)
        voc(tmp_path, stem, node.replace("</object>", f"{attributes}</object>"), size=(320, 240))
        photographs(tmp_path, f"JPEGImages/{stem}.jpg")
    (tmp_path / "labelmap.txt").write_text("# label:color_rgb:parts:actions\nhelmet:10,20,30::\n")
    (tmp_path / "ImageSets/Main").mkdir(parents=True)
    (tmp_path / "ImageSets/Main/default.txt").write_text("a\nb\n")
    split = split_of(tmp_path)
    assert [s.objects for s in split.samples] == [(EXPECTED[0],), (box("helmet", 47, 146, 328, 479),)]
    assert split.bad.summary() == {"rotated": {"keep": 1}}


def test_xml_in_another_encoding(tmp_path: Path) -> None:
    voc(tmp_path, "a", voc_object("安全帽", 20, 30, 100, 120), size=(200, 100))
    voc_text = (tmp_path / "Annotations/a.xml").read_text().replace("120", "100")
    for encoding in ("GBK", "gb2312", "Shift_JIS", "utf-16"):
        name = "安全帽" if encoding != "Shift_JIS" else "帽子"
        text = f'<?xml version="1.0" encoding="{encoding}"?>' + voc_text.replace("安全帽", name)
        (tmp_path / "Annotations/a.xml").write_bytes(text.encode(encoding))
        assert samples_of(tmp_path / "Annotations")[0].objects == (box(name, 100, 300, 500, 999),)
    (tmp_path / "Annotations/a.xml").write_bytes(voc_text.encode("gbk"))
    assert "UTF-8" in refusal(tmp_path / "Annotations")


# ---- sizes and shapes ----------------------------------------------------------------------------------------------


def test_an_undefined_exif_orientation_turns_nothing(tmp_path: Path) -> None:
    draw(tmp_path, "1.jpg", size=(320, 240), orientation=9)
    file = jsonl(tmp_path, {"desc": "a", "bbox_2d": [20, 30, 200, 220]}, images=["1.jpg"], width=None, height=None)
    (sample,) = samples_of(file)
    assert (sample.width, sample.height) == (320, 240)
    assert sample.objects == (box("a", 62, 125, 624, 916),)


@pytest.mark.parametrize(("orientation", "blamed"), [(1, False), (3, False), (6, True), (9, False)])
def test_swapped_sizes_are_blamed_on_exif_only_with_exif(tmp_path: Path, orientation: int, blamed: bool) -> None:
    draw(tmp_path, "a.jpg", size=(240, 320) if blamed else (320, 240), orientation=orientation)
    text = refusal(coco_file(tmp_path / "x.json", "a.jpg", size=(240, 320)))
    assert ("EXIF" in text) == blamed
    assert ("swap width and height" in text) == (not blamed)


@pytest.mark.parametrize("size", [(1, 5000), (5000, 20), (3, 601)])
def test_images_that_no_processor_takes_are_told_at_once(tmp_path: Path, size: tuple[int, int]) -> None:
    names = [f"{i}.png" for i in range(5)]
    draw(tmp_path, *names[:2], size=size)
    photographs(tmp_path, *names[2:])
    file = coco_file(tmp_path / "x.json", *names, size=(None, None))
    text = refusal(file)
    assert text.count("on_bad_record.image_shape") == 2
    assert f"{size[0]} x {size[1]}" in text
    split = split_of(file, on_bad_record={"image_shape": "drop"})
    assert (len(split.samples), split.bad.summary()) == (3, {"image_shape": {"drop": 2}})


def test_a_longest_image_is_taken(tmp_path: Path) -> None:
    draw(tmp_path, "a.png", size=(5, 1000))
    assert len(samples_of(coco_file(tmp_path / "x.json", "a.png", size=(None, None)), on_bad_record="drop")) == 1


def test_names_cannot_move_the_cursor(tmp_path: Path) -> None:
    photographs(tmp_path, "a.jpg")
    file = coco_file(tmp_path / "x.json", "a.jpg")
    content = json.loads(file.read_text())
    for name, taught in (("\x1b[2Jred", "[2Jred"), ("a\nb\0", "a b"), (" vest\t", "vest"), ("安全帽", "安全帽")):
        content["categories"][0]["name"] = name
        file.write_text(json.dumps(content))
        assert samples_of(file)[0].objects[0].desc == taught
        assert category_ids(file)[taught] == 0


# ---- conversations -------------------------------------------------------------------------------------------------


def chat_file(folder: Path, *rows: dict[str, Any], name: str = "train.jsonl", listed: bool = False) -> list[Sample]:
    photographs(folder, "images/im0.jpg")
    text = json.dumps(list(rows), indent=1) if listed else "\n".join(map(json.dumps, rows))
    (folder / name).write_text(text)
    return samples_of(folder / name)


ANSWERS: dict[str, str] = {
    "qwen2.5": json.dumps([{"bbox_2d": b, "label": n} for b, n in zip(BOXES, NAMES, strict=True)]),
    "fenced": "Here:\n```json\n"
    + json.dumps([{"bbox_2d": b, "label": n} for b, n in zip(BOXES, NAMES, strict=True)], indent=1)
    + "\n```",
    "wrapped": json.dumps({"objects": [{"bbox": b, "category": n} for b, n in zip(BOXES, NAMES, strict=True)]}),
    "qwen2": "".join(
        f"<|object_ref_start|>{n}<|object_ref_end|><|box_start|>({b[0]},{b[1]}),({b[2]},{b[3]})<|box_end|>"
        for b, n in zip([[62, 125, 312, 500], [469, 250, 812, 833]], NAMES, strict=True)
    ),
    "qwen1": "I see <ref>helmet</ref><box>(62,125),(312,500)</box> and <ref>vest</ref><box>(469,250),(812,833)</box>",
    "internvl": "<ref>helmet</ref><box>[[62, 125, 312, 500]]</box><ref>vest</ref><box>[[469, 250, 812, 833]]</box>",
}


@pytest.mark.parametrize("answer", ANSWERS.values(), ids=ANSWERS)
@pytest.mark.parametrize("listed", [False, True])
def test_boxes_in_an_assistants_answer(tmp_path: Path, answer: str, listed: bool) -> None:
    openai = {"messages": [USER, {"role": "assistant", "content": answer}], "images": ["images/im0.jpg"]}
    llava = {
        "id": "x7",
        "image": "images/im0.jpg",
        "conversations": [{"from": "human", "value": USER["content"]}, {"from": "gpt", "value": answer}],
    }
    for row in (openai, llava):
        (sample,) = chat_file(tmp_path, row, name="train.json" if listed else "train.jsonl", listed=listed)
        assert list(sample.messages) == [USER]
        for found, expected in zip(sample.objects, EXPECTED, strict=True):
            assert found.desc == expected.desc
            assert found.bins == pytest.approx(expected.bins, abs=1)


def test_images_inside_a_turn(tmp_path: Path) -> None:
    answer = {"role": "assistant", "content": [{"type": "text", "text": ANSWERS["qwen2.5"]}]}
    parts = [{"type": "image", "image": "images/im0.jpg"}, {"type": "text", "text": "Find every object"}]
    qwen1 = "Picture 1: <img>images/im0.jpg</img>\nFind every object"
    for content in (parts, qwen1, [{"type": "image_url", "image_url": {"url": "images/im0.jpg"}}, parts[1]]):
        (sample,) = chat_file(tmp_path, {"messages": [{"role": "user", "content": content}, answer]})
        assert list(sample.messages) == [USER]
        assert sample.objects == EXPECTED


def test_an_empty_list_is_a_scene_without_objects_and_prose_is_a_mistake(tmp_path: Path) -> None:
    (sample,) = chat_file(
        tmp_path, {"messages": [USER, {"role": "assistant", "content": "[]"}], "images": ["images/im0.jpg"]}
    )
    assert sample.objects == ()
    row = {"messages": [USER, {"role": "assistant", "content": "A cat on a mat."}], "images": ["images/im0.jpg"]}
    (tmp_path / "train.jsonl").write_text(json.dumps(row))
    text = refusal(tmp_path / "train.jsonl")
    assert "line 1" in text
    assert "A cat on a mat" in text


SWIFT: dict[str, tuple[str, str, dict[str, Any]]] = {
    "one name each": ("Find <ref-object>", "<bbox><bbox>", {"ref": NAMES, "bbox": BOXES}),
    "real": ("Find", "<ref-object><bbox> <ref-object><bbox>", {"ref": NAMES, "bbox": BOXES, "bbox_type": "real"}),
    "norm1": (
        "Find",
        "<ref-object><bbox>",
        {
            "ref": NAMES,
            "bbox": [[v / (320, 240)[i % 2] for i, v in enumerate(b)] for b in BOXES],
            "bbox_type": "norm1",
        },
    ),
    "names in the text": (
        "Find",
        '[{"bbox_2d": <bbox>, "label": "helmet"}, {"bbox_2d": <bbox>, "label": "vest"}]',
        {"ref": [], "bbox": BOXES},
    ),
}


@pytest.mark.parametrize(("asked", "answer", "objects"), SWIFT.values(), ids=SWIFT)
def test_ms_swifts_objects(tmp_path: Path, asked: str, answer: str, objects: dict[str, Any]) -> None:
    turns = [{"role": "user", "content": f"<image>{asked}"}, {"role": "assistant", "content": answer}]
    (sample,) = chat_file(tmp_path, {"messages": turns, "images": ["images/im0.jpg"], "objects": objects})
    assert sample.objects == EXPECTED
    assert "<ref-object>" not in str(sample.messages)


def test_ms_swifts_one_name_for_all_boxes_and_several_images(tmp_path: Path) -> None:
    turns = [{"role": "user", "content": "<image>Find <ref-object>"}, {"role": "assistant", "content": "<bbox><bbox>"}]
    row = {"messages": turns, "images": ["images/im0.jpg"], "objects": {"ref": ["sheep"], "bbox": BOXES}}
    (sample,) = chat_file(tmp_path, row)
    assert [obj.desc for obj in sample.objects] == ["sheep", "sheep"]
    assert sample.messages[0]["content"] == "<image>Find sheep"
    turns[0]["content"] = "<image><image>Find"
    row = {
        "messages": turns,
        "images": ["images/im0.jpg"] * 2,
        "objects": {"ref": NAMES, "bbox": BOXES, "image_id": [0, 1]},
    }
    (sample,) = chat_file(tmp_path, row)
    assert [(obj.desc, obj.image) for obj in sample.objects] == [("helmet", 1), ("vest", 2)]
    (tmp_path / "train.jsonl").write_text(json.dumps({**row, "objects": {"ref": NAMES, "bbox": [[1, 2]]}}))
    assert "bbox" in refusal(tmp_path / "train.jsonl")


# ---- imagefolder, Labelme ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("column", ["categories", "category", "label"])
def test_an_imagefolders_metadata(tmp_path: Path, column: str) -> None:
    widths = [[x1, y1, x2 - x1, y2 - y1] for x1, y1, x2, y2 in BOXES]
    for split in ("train", "validation"):
        photographs(tmp_path, f"{split}/im0.jpg")
        row = {"file_name": "im0.jpg", "image_id": 3, "objects": {"bbox": widths, column: NAMES}}
        (tmp_path / split / "metadata.jsonl").write_text(json.dumps(row))
    assert list(splits_in(tmp_path)) == ["train", "val"]
    (sample,) = samples_of(f"{tmp_path}:train", prompt="<image>Find.")
    assert sample.objects == EXPECTED
    assert sample.messages[0]["content"] == "<image>Find."
    (tmp_path / "train/metadata.jsonl").write_text(json.dumps({**row, "objects": {"bbox": widths, column: [0, 1]}}))
    assert samples_of(f"{tmp_path}:train", names=NAMES)[0].objects == EXPECTED
    assert "data.names" in refusal(f"{tmp_path}:train")


def labelme(file: Path, *shapes: dict[str, Any], image: str = "", **fields: Any) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    known = {"version": "5.2.1", "flags": {}, "imageData": None, "imageHeight": 240, "imageWidth": 320}
    file.write_text(json.dumps({**known, "shapes": list(shapes), "imagePath": image or f"{file.stem}.jpg", **fields}))


def shape(label: str, *points: list[float], kind: str = "rectangle", **fields: Any) -> dict[str, Any]:
    return {"label": label, "points": list(points), "group_id": None, "shape_type": kind, "flags": {}, **fields}


RECTANGLES = [shape("helmet", [100, 120], [20, 30]), shape("vest", [150, 200], [260, 60])]


def test_labelme(tmp_path: Path) -> None:
    """Corners come in any order."""
    photographs(tmp_path, "im0.jpg", "im1.jpg")
    labelme(tmp_path / "im0.json", *RECTANGLES)
    labelme(tmp_path / "im1.json")
    assert [(s.sample_id, s.objects) for s in samples_of(tmp_path)] == [("im0", EXPECTED), ("im1", ())]
    assert samples_of(tmp_path / "im0.json")[0].objects == EXPECTED


def test_labelmes_splits_folders_and_images(tmp_path: Path) -> None:
    photographs(tmp_path, "train/im0.jpg", "val/im1.jpg")
    labelme(tmp_path / "train/im0.json", *RECTANGLES)
    labelme(tmp_path / "val/im1.json", *RECTANGLES)
    assert list(splits_in(tmp_path)) == ["train", "val"]
    other = tmp_path / "other"
    photographs(other, "images/im0.jpg")
    labelme(other / "labels/im0.json", *RECTANGLES, image="..\\images\\im0.jpg")
    assert samples_of(other)[0].images == (str(other / "labels/../images/im0.jpg"),)
    labelme(other / "labels/im0.json", *RECTANGLES, image="C:\\x\\im0.jpg")
    assert samples_of(other)[0].objects == EXPECTED


def test_labelmes_other_shapes(tmp_path: Path) -> None:
    photographs(tmp_path, "a.jpg")
    labelme(
        tmp_path / "a.json",
        shape("helmet", [20, 30], [100, 30], [100, 120], kind="polygon"),
        shape("vest", [160, 120], [160, 90], kind="circle"),
        shape("dot", [5, 5], kind="point"),
        shape("crowd", [0, 0], [50, 50], flags={"difficult": True}),
    )
    split = split_of(tmp_path)
    assert split.samples[0].objects == (EXPECTED[0], box("vest", 406, 375, 593, 624))
    assert len(split.samples[0].ignored) == 1
    assert split.bad.summary() == {"other_shape": {"keep": 1}}
    assert samples_of(tmp_path, "poly")[0].objects[0].kind == "poly"
    labelme(tmp_path / "a.json", shape("helmet", [20, 30]))
    text = refusal(tmp_path)
    assert "a.json" in text
    assert "helmet" in text


# ---- named, not read -----------------------------------------------------------------------------------------------

STUDIO_BOX = {"x": 6.25, "y": 12.5, "width": 25.0, "height": 37.5, "rotation": 0, "rectanglelabels": ["helmet"]}
OTHERS: dict[str, tuple[str, Any]] = {
    "Label Studio's JSON-MIN": (
        "p.json",
        [{"image": "/data/upload/1/im0.jpg", "id": 1, "label": [{**STUDIO_BOX, "original_width": 320}]}],
    ),
    "Label Studio's JSON": (
        "p.json",
        [{"id": 1, "annotations": [{"result": [{"original_width": 320, "from_name": "label", "value": STUDIO_BOX}]}]}],
    ),
    "PaliGemma": ("_annotations.train.jsonl", {"image": "a.jpg", "prefix": "detect x", "suffix": "<loc0128> x"}),
    "Florence-2": ("_annotations.train.jsonl", {"image": "a.jpg", "prefix": "<OD>", "suffix": "x<loc_1><loc_2>"}),
    "Ultralytics' NDJSON": ("ppe.ndjson", {"type": "dataset", "task": "detect", "class_names": {"0": "helmet"}}),
    "VIA": ("via.json", {"_via_settings": {}, "_via_img_metadata": {"a.jpg1": {"filename": "a.jpg", "regions": []}}}),
    "CreateML": (
        "_annotations.createml.json",
        [{"image": "a.jpg", "annotations": [{"label": "x", "coordinates": {"x": 1, "y": 2, "width": 3, "height": 4}}]}],
    ),
    "BDD100K": ("bdd.json", [{"name": "a.jpg", "labels": [{"category": "car", "box2d": {"x1": 1}}]}]),
    "COCO results": ("pred.json", [{"image_id": 1, "category_id": 1, "bbox": [1, 2, 3, 4], "score": 0.5}]),
    "Supervisely": ("a.jpg.json", {"objects": [{"classTitle": "x", "points": {"exterior": [[1, 2]]}}]}),
    "CVAT's own XML": (
        "annotations.xml",
        '<annotations><version>1.1</version><image id="0" name="a.jpg"></image></annotations>',
    ),
    "VisDrone": ("a.txt", "20,30,80,90,1,4,0,0\n"),
    "KITTI": ("a.txt", "Car 0.00 0 -1.57 614.24 181.78 727.31 284.77 1.57 1.73 4.15 1.00 1.75 13.22 -1.62\n"),
    "DOTA": ("a.txt", "imagesource:GoogleEarth\ngsd:0.1\n"),
    "TFRecords": ("train.tfrecord", "x"),
}


@pytest.mark.parametrize("name", OTHERS)
@pytest.mark.parametrize("of_folder", [True, False])
def test_annotations_that_are_not_read_are_named_in_one_line(tmp_path: Path, name: str, of_folder: bool) -> None:
    photographs(tmp_path, "a.jpg", "b.jpg")
    file_name, content = OTHERS[name]
    file = tmp_path / file_name
    file.write_text(content if isinstance(content, str) else json.dumps(content))
    text = refusal(tmp_path if of_folder else file)
    assert name in text
    assert "\n" not in text
    assert "correct the record" not in text


@pytest.mark.parametrize("pack", [lambda path: path, lambda path: path.parent], ids=["file", "folder"])
def test_an_archive_is_to_be_unpacked(tmp_path: Path, pack: Callable[[Path], Path]) -> None:
    with zipfile.ZipFile(tmp_path / "task_7.zip", "w") as archive:
        archive.writestr("annotations/instances_default.json", "{}")
    assert f"unzip {tmp_path / 'task_7.zip'}" in refusal(pack(tmp_path / "task_7.zip"))
