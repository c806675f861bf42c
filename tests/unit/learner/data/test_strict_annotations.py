"""Annotations that could be read in a wrong way without a word: each is a bad record, or named in the summary (R12)."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pycocotools import mask as coco_mask

from learner.data.formats.coco import MOST_RUNS, category_ids, mask_of
from learner.records import GeometryKind
from shared.errors import DataError
from tests.unit.learner.data.annotations import (
    FINE,
    coco,
    jsonl,
    refusal,
    samples_of,
    split_of,
    voc,
    voc_object,
    yolo,
)
from tests.unit.learner.data.fakes import draw

OBJECT = voc_object("RBC", 0, 50, 20, 100)


def num_errors(path: Path | str, **data: Any) -> int:
    """Return how many records the refusal counts."""
    text = refusal(path, **data)
    return int(text.split()[0]) if " records of " in text else 1


# ---- YOLO ----------------------------------------------------------------------------------------------------------


def test_a_yolo_split_without_any_label_file_is_refused(tmp_path: Path) -> None:
    """It is refused too with labels in a folder of another name: every scene would be empty."""
    file = yolo(tmp_path, "0 0.5 0.5 1 1")
    (tmp_path / "labels").rename(tmp_path / "label")
    text = refusal(f"{file}:train")
    assert str(tmp_path / "labels/train/a.txt") in text


def test_yolo_images_and_label_files_without_each_other_are_counted(tmp_path: Path) -> None:
    file = yolo(tmp_path, "0 0.5 0.5 1 1")
    (tmp_path / "labels/train/other.txt").write_text("0 0.5 0.5 1 1")
    (tmp_path / "labels/train/classes.txt").write_text("cat\ndog\n")  # tools leave it there
    split = split_of(f"{file}:train")
    assert split.bad.summary() == {"unlabelled": {"keep": 1}, "orphan_label": {"keep": 1}}
    assert "other.txt" in split.bad.examples["orphan_label", "keep"]


@pytest.mark.parametrize("number", ["1.7", "-0.5", "-1", "1e400", "nan", "0x1"])
def test_a_yolo_class_is_a_whole_number(tmp_path: Path, number: str) -> None:
    assert number in refusal(f"{yolo(tmp_path, f'{number} 0.5 0.5 1 1')}:train")


def test_a_yolo_class_may_be_written_with_a_point(tmp_path: Path) -> None:
    """numpy's savetxt writes it so."""
    (obj,) = samples_of(f"{yolo(tmp_path, '1.0 0.5 0.5 1 1')}:train")[0].objects
    assert obj.desc == "dog"


POSE = ["0 0.5 0.5 0.2 0.4 0.45 0.4 0.55 0.4 0.5 0.6", "0 0.3 0.3 0.2 0.2 0.25 0.25 0.35 0.25 0 0"]


def test_yolo_keypoints_are_left_out_where_the_file_says_so(tmp_path: Path) -> None:
    file = yolo(tmp_path, *POSE, content="kpt_shape: [3, 2]\ntrain: images/train\n")
    split = split_of(file)
    assert sorted(obj.bins for obj in split.samples[0].objects) == [(200, 200, 400, 400), (400, 300, 599, 699)]
    assert split.bad.summary()["keypoints"] == {"keep": 2}
    (tmp_path / "labels/train/a.txt").write_text("0 0 0 0.5 0 0.5 1")
    assert "kpt_shape" in refusal(file)


def test_yolo_keypoints_are_not_taken_for_outlines(tmp_path: Path) -> None:
    text = refusal(f"{yolo(tmp_path, *POSE)}:train")
    assert "kpt_shape" in text


SEEN = "1 0.5 0.5 0.4 0.4 0.4 0.4 2 0.6 0.6 1 0.6 0.4 0"  # has visibilities; an even number of values
BESIDE = {
    "a box": "1 0.5 0.5 0.4 0.4",
    "an outline": "1 0.1 0.1 0.2 0.1 0.2 0.3",
    "a pose of another length": "0 0.3 0.3 0.2 0.2 0.25 0.25 0.35 0.25",
}


@pytest.mark.parametrize("geometry", ["bbox_2d", "poly"])
@pytest.mark.parametrize("beside", BESIDE.values(), ids=BESIDE)
@pytest.mark.parametrize("pose", [POSE[1], f"{SEEN} 0.5 0.55 2"], ids=["points", "points with visibilities"])
def test_a_pose_among_other_labels_is_named_by_its_line(
    tmp_path: Path, pose: str, beside: str, geometry: GeometryKind
) -> None:
    """It was read as an outline, because the labels are not all alike."""
    text = refusal(f"{yolo(tmp_path, beside, pose)}:train", geometry)
    assert "line 2" in text
    assert "kpt_shape" in text


def test_outlines_at_the_images_edges_are_no_keypoints(tmp_path: Path) -> None:
    """Whole numbers where visibilities would stand, and points around their middle."""
    outline = "0 0.1 0.0 0.9 0.0 1.0 0.5 1 0.9 0.1 1"
    assert len(samples_of(f"{yolo(tmp_path, outline, '1 0.5 0.5 1 1')}:train", "poly")[0].objects) == 2


def test_outlines_of_equal_length_are_no_keypoints(tmp_path: Path) -> None:
    corners = ["0 0.4 0.4 0.6 0.4 0.6 0.6 0.4 0.6", "1 0.5 0.5 0.7 0.5 0.7 0.7 0.5 0.7"]
    assert len(samples_of(f"{yolo(tmp_path, *corners)}:train", "poly")[0].objects) == 2


DEEP = b'{"categories": [], "info": ' + b"[" * 100_000 + b"]" * 100_000 + b"}"


@pytest.mark.parametrize(
    "content",
    [DEEP, b"[]", b"", b"\xff", b'{"categories": 3}', b'{"categories": [1, {"id": 1}, {"id": true, "name": "a"}]}'],
)
def test_a_coco_file_that_was_replaced_has_no_ids(tmp_path: Path, content: bytes) -> None:
    """A run and predict ask for them long after they have read the file."""
    (tmp_path / "c.json").write_bytes(content)
    assert category_ids(tmp_path / "c.json") == {}


def test_a_coco_file_that_became_a_pipe_has_no_ids(tmp_path: Path) -> None:
    """Reading it would wait for a writer."""
    os.mkfifo(tmp_path / "c.json")
    assert category_ids(tmp_path / "c.json") == {}


@pytest.mark.parametrize(
    "names",
    [
        "[null]",
        "[cat, [dog]]",
        "{0: cat, 0.7: dog}",
        "{0: cat, '0': dog}",
        "{-1: cat}",
        "['  ']",
        "[yes, no]",
        "{}",
        "7",
    ],
)
def test_yolo_names_are_texts_by_whole_numbers(tmp_path: Path, names: str) -> None:
    file = yolo(tmp_path, "0 0.5 0.5 1 1")
    file.write_text(f"train: images/train\nnames: {names}\n")
    assert "names" in refusal(file)


def test_yolo_names_may_be_digits(tmp_path: Path) -> None:
    file = yolo(tmp_path, "1 0.5 0.5 1 1")
    file.write_text("train: images/train\nnames: [0, 1]\nnc: 2\n")
    assert samples_of(file)[0].objects[0].desc == "1"


@pytest.mark.parametrize("content", ["names: [a]\nnames: [b]", "names: [a]\nnc: 2", "names: [a]\nnames: [a]"])
def test_a_yolo_file_does_not_contradict_itself(tmp_path: Path, content: str) -> None:
    file = yolo(tmp_path, "0 0.5 0.5 1 1")
    file.write_text(f"train: images/train\n{content}\n")
    assert "data.yaml" in refusal(file)


@pytest.mark.parametrize("value", ["!!timestamp x", "!!bool zz", "!!set [a]", "!!python/name:os.system x"])
def test_a_yolo_file_with_a_tag_that_does_not_fit_is_refused(tmp_path: Path, value: str) -> None:
    file = yolo(tmp_path, "0 0.5 0.5 1 1")
    file.write_text(f"train: images/train\nnames: [a]\nextra: {value}\n")
    assert "data.yaml" in refusal(file)


# ---- Pascal VOC ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("annotation>", "annotations>"),
        ("annotation>", "Annotation>"),
        ("<annotation>", "<annotation xmlns='http://x.org/voc'>"),
        ("object>", "Object>"),
        ("bndbox>", "BndBox>"),
        ("difficult>", "Difficult>"),
        ("<object>", "<objects><object>"),
        ("<bndbox>", "<bndbox/><bndbox>"),
        ("<xmin>", "<xmin>1</xmin><xmin>"),
        ("<name>", "<name>x</name><name>"),
        ("<xmin>0<", "<xmin>nan<"),
        ("<xmin>0<", "<xmin>1e400<"),
        ("<width>200<", "<width>inf<"),
        ("<width>200<", "<width>200.5<"),
        ("<width>200<", "<width>1e400<"),
        ("<width>200<", "<width>-200<"),
        ("<width>200<", "<width>wide<"),
    ],
)
def test_xml_that_is_not_voc_is_no_empty_scene(tmp_path: Path, old: str, new: str) -> None:
    voc(tmp_path, "a", voc_object("RBC", 0, 50, 20, 100, difficult=0))
    file = tmp_path / "Annotations/a.xml"
    text = file.read_text().replace(old, new)
    if new == "<objects><object>":
        text = text.replace("</object>", "</object></objects>")
    assert text != file.read_text()
    file.write_text(text)
    assert "a.xml" in refusal(tmp_path / "Annotations")


@pytest.mark.parametrize("text", ["<html/>", "<annotation/>", "<annotation><box/></annotation>"])
def test_other_xml_is_refused(tmp_path: Path, text: str) -> None:
    voc(tmp_path, "a", OBJECT)
    (tmp_path / "Annotations/a.xml").write_text(text)
    assert "a.xml" in refusal(tmp_path / "Annotations")


def test_parts_of_a_voc_object_are_no_objects(tmp_path: Path) -> None:
    """VOC 2012 has boxes of heads, hands and feet inside those of persons."""
    part = "<part><name>hand</name><bndbox><xmin>1</xmin><ymin>1</ymin><xmax>9</xmax><ymax>9</ymax></bndbox></part>"
    voc(tmp_path, "a", OBJECT.replace("</object>", f"{part}</object>"))
    assert [obj.desc for obj in samples_of(tmp_path / "Annotations")[0].objects] == ["RBC"]


@pytest.mark.parametrize("flag", ["0", "no", "None", "0.0", "false", "Unspecified", ""])
def test_a_voc_flag_that_says_no(tmp_path: Path, flag: str) -> None:
    voc(tmp_path, "a", voc_object("RBC", 0, 50, 20, 100, difficult=flag))
    (sample,) = samples_of(tmp_path / "Annotations")
    assert (len(sample.objects), len(sample.ignored)) == (1, 0)


@pytest.mark.parametrize("flag", ["1", "yes", "True", "1.0"])
def test_a_voc_flag_that_says_yes(tmp_path: Path, flag: str) -> None:
    voc(tmp_path, "a", voc_object("RBC", 0, 50, 20, 100, difficult=flag))
    (sample,) = samples_of(tmp_path / "Annotations")
    assert (len(sample.objects), len(sample.ignored)) == (0, 1)


@pytest.mark.parametrize("flag", ["2", "maybe", "nope", "0.5"])
def test_a_voc_flag_that_says_neither_is_refused(tmp_path: Path, flag: str) -> None:
    voc(tmp_path, "a", voc_object("RBC", 0, 50, 20, 100, difficult=flag))
    assert f"difficult {flag!r}" in refusal(tmp_path / "Annotations")


# ---- COCO ----------------------------------------------------------------------------------------------------------


def rewritten(file: Path, **sections: Any) -> Path:
    file.write_text(json.dumps({**json.loads(file.read_text()), **sections}))
    return file


def test_two_coco_categories_of_one_id_are_refused(tmp_path: Path) -> None:
    file = rewritten(coco(tmp_path, {}), categories=[{"id": 1, "name": "cat"}, {"id": "1", "name": "dog"}])
    text = refusal(file)
    assert "category 1" in text
    assert "'dog'" in text
    assert samples_of(rewritten(file, categories=[{"id": 1, "name": "cat"}, {"id": 1, "name": "cat"}]))


def test_names_are_read_without_spaces_around(tmp_path: Path) -> None:
    file = rewritten(
        coco(tmp_path, {}, {"category_id": 2, "bbox": [0, 0, 9, 9]}),
        categories=[{"id": 1, "name": "cat"}, {"id": 2, "name": " cat "}],
    )
    split = split_of(file)
    assert {obj.desc for obj in split.samples[0].objects} == {"cat"}
    assert split.bad.summary() == {"padded_name": {"keep": 1}}
    (tmp_path / "lines").mkdir()
    split = split_of(jsonl(tmp_path / "lines", {**FINE, "desc": " x"}))
    assert [obj.desc for obj in split.samples[0].objects] == ["x"]


@pytest.mark.parametrize("name", [None, "", "  ", 7, True, ["cat"]])
def test_a_coco_name_is_a_text(tmp_path: Path, name: Any) -> None:
    assert "name" in refusal(rewritten(coco(tmp_path, {}), categories=[{"id": 1, "name": name}]))


def test_an_object_that_stands_twice_is_a_bad_record(tmp_path: Path) -> None:
    """This holds in every format, since all go the same way."""
    file = coco(tmp_path, {}, {}, {"bbox": [1, 0, 50, 50]})
    assert "annotation 1" in refusal(file)
    split = split_of(file, on_bad_record="drop")
    assert len(split.samples[0].objects) == 2
    assert split.bad.summary() == {"duplicate": {"drop": 1}}
    labels = yolo(tmp_path, "1 0.5 0.5 1 1", "1 0.5 0.5 1.0 1")
    assert len(samples_of(f"{labels}:train", on_bad_record="drop")[0].objects) == 1


@pytest.mark.parametrize(
    "counts",
    [
        [100.5, 19899.5],
        [-50, 20050],
        [100, True, 19899],
        ["100", "19900", None],
        "Qc0",
        "\x00\x01",
        "é",
        "",
        {"0": 1},
        [float("nan")],
        [1e999],
        [10**30],
    ],
)
def test_run_lengths_are_whole_numbers_of_all_pixels(tmp_path: Path, counts: Any) -> None:
    file = coco(tmp_path, {"segmentation": {"size": [100, 200], "counts": counts}})
    assert "annotation 0: its segmentation is wrong" in refusal(file, "poly")


@pytest.mark.parametrize("size", [[100.5, 200], [100], ["inf", 200], None, [100, 200, 1], [float("inf"), 200], "ab"])
def test_a_mask_has_the_images_size(tmp_path: Path, size: Any) -> None:
    file = coco(tmp_path, {"segmentation": {"size": size, "counts": [20000]}})
    assert "annotation 0: its segmentation is wrong" in refusal(file, "poly")


def test_run_lengths_as_text_are_those_of_the_reference() -> None:
    """pycocotools writes them; a mask of noise has long and short runs, and differences of both signs."""
    random = np.random.default_rng(0)
    for _ in range(200):
        mask = (random.random((random.integers(1, 90), random.integers(1, 90))) < random.random() ** 3).astype(np.uint8)
        mask[: random.integers(90), : random.integers(90)] = 1
        rle = coco_mask.encode(np.asfortranarray(mask))
        read = mask_of({"size": list(mask.shape), "counts": rle["counts"].decode()}, mask.shape[1], mask.shape[0], 8100)
        assert np.array_equal(read, mask)


@pytest.mark.parametrize("counts", [[1] * (MOST_RUNS + 1), "1" * (MOST_RUNS + 1), "1" * (8 * MOST_RUNS)])
def test_a_mask_of_too_many_runs_is_refused_before_it_is_drawn(counts: Any) -> None:
    """Each costs 33 us."""
    with pytest.raises(ValueError, match="runs"):
        mask_of({"size": [1, MOST_RUNS + 1], "counts": counts}, MOST_RUNS + 1, 1, 1 << 30)


@pytest.mark.parametrize("value", [float("nan"), 1e999, -1e999, 1e300, "12", None, True, []])
def test_a_polygon_is_of_numbers(tmp_path: Path, value: Any) -> None:
    """A text would be a polygon of its digits."""
    segmentation = ["123456"] if value == "12" else [[0, 0, 10, 0, 10, value]]
    assert "annotation 0: its segmentation is wrong" in refusal(coco(tmp_path, {"segmentation": segmentation}), "poly")


def test_a_pipe_is_not_waited_for(tmp_path: Path) -> None:
    file = coco(tmp_path, {})
    file.unlink()
    os.mkfifo(file)
    assert "not a file" in refusal(file, format="coco")


def test_one_nan_does_not_hide_other_mistakes(tmp_path: Path) -> None:
    """Nor do a category without a name and a missing section."""
    bad = [{"bbox": [float("nan"), 0, 9, 9]}, {"image_id": 7}, {"bbox": [0, 0, 0, 9]}, {"category_id": 9}]
    file = coco(tmp_path, *bad)
    assert num_errors(file) == 4
    text = refusal(file)
    for number in (1, 2, 3):
        assert f"annotation {number}" in text
    assert "annotations.0.bbox.0" in text
    content = json.loads(file.read_text())
    images = [*content["images"], {"id": 2, "file_name": "2.png", "width": 9, "height": 9}, {"id": 3}]
    text = refusal(rewritten(file, images=images))
    assert "2.png" in text
    assert "images.2.file_name" in text


# ---- JSONL ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "fields", [{"bbox_2d": [0, 0, True, 50]}, {"bbox_2d": [0, 0, 1e12, 50]}, {"ignore": "perhaps"}, {"desc": "a\ud800"}]
)
def test_a_row_is_of_numbers_and_flags(tmp_path: Path, fields: dict[str, Any]) -> None:
    assert "line 1" in refusal(jsonl(tmp_path, {**FINE, **fields}))


@pytest.mark.parametrize("fields", [{"width": True}, {"height": 1e12}, {"id": 1.5}, {"id": True}])
def test_a_rows_size_and_id_are_whole(tmp_path: Path, fields: dict[str, Any]) -> None:
    file = jsonl(tmp_path, FINE)
    file.write_text(json.dumps({**json.loads(file.read_text()), **fields}))
    assert "line 1" in refusal(file)


# ---- Hugging Face datasets -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("objects", "fault"),
    [
        ({"bbox": [[0, 50, 20, 50]], "category": [" cat "], "iscrowd": ["perhaps"]}, "iscrowd"),
        ({"bbox": [[0, 50, 20]], "category": ["cat"]}, "four numbers"),
        ({"bbox": [[0, 50, 20, 50], [0, 0, 9, 9]], "category": ["cat"]}, "row 0"),
        ({"bbox": [[0, 50, 20, float("nan")]], "category": ["cat"]}, "row 0"),
        ({"bbox": ["0123"], "category": ["cat"]}, "four numbers"),
    ],
)
def test_a_data_sets_row_is_read_strictly(tmp_path: Path, objects: dict[str, Any], fault: str) -> None:
    datasets = pytest.importorskip("datasets")
    draw(tmp_path, "a.png")
    rows = {"image": [str(tmp_path / "a.png")], "objects": [objects]}
    datasets.Dataset.from_dict(rows).save_to_disk(str(tmp_path / "saved"))
    with pytest.raises(DataError, match=fault):
        samples_of(tmp_path / "saved")


def test_flags_as_texts_say_what_they_say(tmp_path: Path) -> None:
    """`bool("0")` is true."""
    datasets = pytest.importorskip("datasets")
    draw(tmp_path, "a.png")
    objects = {"bbox": [[0, 50, 20, 50]], "category": ["cat"], "iscrowd": ["0"]}
    datasets.Dataset.from_dict({"image": [str(tmp_path / "a.png")], "objects": [objects]}).save_to_disk(
        str(tmp_path / "saved")
    )
    assert len(samples_of(tmp_path / "saved")[0].objects) == 1


def test_a_data_sets_class_is_a_whole_number(tmp_path: Path) -> None:
    """A row read from memory: a `ClassLabel` column cannot hold 1.7, other columns can."""
    from learner.data.formats.hf_datasets import name_of_label

    assert name_of_label(1.0, ["a", "b"]) == "b"
    with pytest.raises(ValueError, match="whole"):
        name_of_label(1.7, ["a", "b"])
