"""Annotations as they are (R41): the formats besides JSONL and COCO boxes, ignore regions, outlines, bad records."""

from __future__ import annotations

import base64
import json
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from pycocotools import mask as coco_mask

from learner.config.sections.data import DataConfig
from learner.data.formats.detect import format_of
from learner.data.splits import Split, load_split
from learner.data.survey import lines_of, survey, warnings_of
from learner.records import DetectionObject, Sample
from learner.tasks.detection.geometry import iou_matrix
from shared.config.parse import dump_yaml
from shared.errors import DataError
from tests.unit.learner.data.annotations import (
    FINE,
    FLAT,
    OUT,
    THIN_OUT,
    box,
    coco,
    jsonl,
    refusal,
    samples_of,
    split_of,
    voc,
    voc_object,
    yolo,
)
from tests.unit.learner.data.fakes import AnyTask, draw

# ---- Pascal VOC ----------------------------------------------------------------------------------------------------


@pytest.fixture
def cells(tmp_path: Path) -> Path:
    voc(tmp_path, "b", voc_object("RBC", "0", 50.0, "20.0", 100, difficult=0, truncated=1))
    voc(tmp_path, "a", voc_object("WBC", 0, 0, 200, 100), voc_object("RBC", 0, 50, 20, 100, difficult=1))
    voc(tmp_path, "c")
    (tmp_path / "ImageSets").mkdir()
    (tmp_path / "ImageSets" / "train.txt").write_text("b\na  1\n\n")
    return tmp_path


def test_voc_files_become_samples(cells: Path) -> None:
    first, second, third = samples_of(cells / "Annotations", prompt="<image>Count.")
    assert first == Sample(
        sample_id="a",
        messages=({"role": "user", "content": "<image>Count."},),
        images=(str(cells / "JPEGImages/a.jpg"),),
        objects=(box("WBC", 0, 0, 999, 999),),
        ignored=(box("RBC", 0, 500, 100, 999),),
        width=200,
        height=100,
    )
    assert second.objects == (box("RBC", 0, 500, 100, 999),)
    assert (third.sample_id, third.objects) == ("c", ())


def test_a_list_names_voc_files_in_its_order(cells: Path) -> None:
    assert [s.sample_id for s in samples_of(cells / "ImageSets/train.txt")] == ["b", "a"]
    (cells / "Annotations").rename(cells / "elsewhere")
    assert "data.annotation_root" in refusal(cells / "ImageSets/train.txt")
    found = samples_of(cells / "ImageSets/train.txt", annotation_root=str(cells / "elsewhere"))
    assert [s.sample_id for s in found] == ["b", "a"]
    (cells / "ImageSets/train.txt").write_text("b\nnone\n")
    assert "none.xml" in refusal(cells / "ImageSets/train.txt", annotation_root=str(cells / "elsewhere"))


def test_names_in_a_voc_list_may_have_spaces(tmp_path: Path) -> None:
    """And flags behind them, whether the name ends with a number or not."""
    for stem in ("cell 3 left", "IMG 0001", "a"):
        voc(tmp_path, stem)
    (tmp_path / "list.txt").write_bytes(b"cell 3 left\r\nIMG 0001\r\na  -1\r\n")
    assert [s.sample_id for s in samples_of(tmp_path / "list.txt")] == ["cell 3 left", "IMG 0001", "a"]
    (tmp_path / "list.txt").write_text("cell 3 left  1\nIMG 0001 1\n")
    assert [s.sample_id for s in samples_of(tmp_path / "list.txt")] == ["cell 3 left", "IMG 0001"]
    (tmp_path / "list.txt").write_text("no such cell\n")
    assert "no such cell.xml" in refusal(tmp_path / "list.txt")


def test_a_voc_image_is_found_without_its_ending_or_under_the_annotations_name(tmp_path: Path) -> None:
    voc(tmp_path, "a", filename="a")
    voc(tmp_path, "b", filename="IMG_0007.png")
    assert [Path(s.images[0]).name for s in samples_of(tmp_path / "Annotations")] == ["a.jpg", "b.jpg"]


def test_voc_names_may_have_the_backslashes_of_windows(tmp_path: Path) -> None:
    """Of images, and in lists."""
    voc(tmp_path, "a", filename=r"sub\IMG_7.png")
    draw(tmp_path, "JPEGImages/sub/IMG_7.png")
    assert [Path(s.images[0]).name for s in samples_of(tmp_path / "Annotations")] == ["IMG_7.png"]
    (tmp_path / "Annotations/monday").mkdir()
    (tmp_path / "Annotations/a.xml").rename(tmp_path / "Annotations/monday/a.xml")
    (tmp_path / "list.txt").write_text("monday\\a\r\n")
    assert [s.sample_id for s in samples_of(tmp_path / "list.txt")] == ["a"]


def test_an_unknown_voc_size_is_the_images_own(tmp_path: Path) -> None:
    voc(tmp_path, "a", voc_object("RBC", 0, 50, 20, 100), size=(0, ""))
    assert samples_of(tmp_path / "Annotations")[0].objects == (box("RBC", 0, 500, 100, 999),)


def test_all_bad_voc_records_are_told_with_file_object_and_value(cells: Path) -> None:
    voc(cells, "d", voc_object("RBC", 5, 5, 5, 9), voc_object("WBC", 1, 1, 9, 999), size=("300", 100))
    voc(cells, "e", voc_object("RBC", "", 5, 5, 9))
    (cells / "Annotations" / "f.xml").write_text("<annotation>")
    text = refusal(cells / "Annotations")
    assert "5 records" in text
    for found in (
        r"d.xml, annotation: its image has another size than the annotation says; found 300 x 100",
        r"d.xml, object 1: the object ('RBC') has no area; found xmin 5, ymin 5, xmax 5, ymax 9",
        r"d.xml, object 2: the object ('WBC') lies outside the image; found xmin 1, ymin 1, xmax 9, ymax 999",
        r"e.xml, object 1: not Pascal VOC; found 'RBC': xmin , ymin 5",
        r"f.xml, annotation: not Pascal VOC",
        "data.on_bad_record.outside_image: drop (or clip)",
    ):
        assert found in text


# ---- YOLO ----------------------------------------------------------------------------------------------------------


def test_yolo_labels_become_samples(tmp_path: Path) -> None:
    """Shares of width and height; an image without labels is a sample without objects."""
    file = yolo(tmp_path, "1 0.5 0.5 1 1", "0 0.05 0.75 0.1 0.5", "")
    first, second = samples_of(f"{file}:train")
    assert first.objects == (box("dog", 0, 0, 999, 999), box("cat", 0, 500, 100, 999))
    assert (first.sample_id, first.width, first.height) == ("images/train/a.jpg", 200, 100)
    assert (second.sample_id, second.objects) == ("images/train/sub/b.png", ())
    assert [s.sample_id for s in samples_of(f"{file}:val")] == ["images/val/c.jpg"]


def test_yolo_replaces_the_last_folder_images_on_the_way(tmp_path: Path) -> None:
    """A data set below a folder of that name, as in `images/set/images/train`, has its labels beside its images."""
    (tmp_path / "images").mkdir()
    file = yolo(tmp_path / "images", "1 0.5 0.5 1 1")
    assert samples_of(f"{file}:train")[0].objects == (box("dog", 0, 0, 999, 999),)


def test_yolo_segments_are_polygons_or_their_boxes(tmp_path: Path) -> None:
    file = yolo(tmp_path, "0 0 0 0.5 0 0.5 1")
    (obj,) = samples_of(f"{file}:train", "poly")[0].objects
    assert obj == DetectionObject(desc="cat", kind="poly", bins=(0, 0, 500, 0, 500, 999))
    assert samples_of(f"{file}:train")[0].objects == (box("cat", 0, 0, 500, 999),)


def test_a_yolo_split_is_named(tmp_path: Path) -> None:
    """Otherwise `train` and `val`, which name the same file, would be the same samples."""
    file = yolo(tmp_path)
    assert f"{file}:train" in refusal(file)
    assert "one of train, val" in refusal(f"{file}:test")


@pytest.mark.parametrize("content", ["train: ../train/images\n", "train: list.txt\n", "train: [images/train]\n"])
def test_yolo_images_may_be_listed_in_several_ways(tmp_path: Path, content: str) -> None:
    file = yolo(tmp_path, content=content)
    draw(tmp_path, "train/images/x.jpg")
    (tmp_path / "train/labels").mkdir()
    (tmp_path / "train/labels/x.txt").touch()
    (tmp_path / "list.txt").write_text("./images/train/a.jpg\nimages/train/sub/b.png\n")
    assert [Path(s.images[0]).name for s in samples_of(file)] in (["x.jpg"], ["a.jpg", "b.png"])


@pytest.mark.parametrize("folder", ["", "set/"])
def test_yolo_paths_may_have_the_backslashes_of_windows(tmp_path: Path, folder: str) -> None:
    """In lists and in data.yaml: every image was missing."""
    root = tmp_path / folder
    root.mkdir(exist_ok=True)
    yolo(root, "1 0.5 0.5 1 1")
    (root / "train.txt").write_bytes(b".\\images\\train\\a.jpg\r\nimages\\train\\sub\\b.png\r\n")
    path = "." if not folder else r".\set"
    (tmp_path / "data.yaml").write_text(f"path: {path}\ntrain: .\\train.txt\nval: images\\train\nnames: [cat, dog]\n")
    file = tmp_path / "data.yaml"
    assert [s.sample_id for s in samples_of(f"{file}:train")] == ["images/train/a.jpg", "images/train/sub/b.png"]
    assert [len(s.objects) for s in samples_of(f"{file}:train")] == [1, 0]
    assert len(samples_of(f"{file}:val")) == 2


@pytest.mark.parametrize("name", [r"C:\sets\cats", "c:/sets/cats", r"\\nas\cats"])
@pytest.mark.parametrize("where", ["path", "train", "list"])
def test_yolo_paths_of_another_windows_machine_say_what_to_do(tmp_path: Path, where: str, name: str) -> None:
    """Lists said of every image that it was missing, below a folder of this machine."""
    file = yolo(tmp_path)
    keys: dict[str, Any] = {"path": ".", "train": "train", "names": ["cat", "dog"]}
    if where == "list":
        (tmp_path / "train.txt").write_text(f"images/train/a.jpg\n{name}\\b.jpg\n")
        keys["train"] = "train.txt"
    else:
        keys[where] = name
    Path(file).write_text(dump_yaml(keys))
    text = refusal(f"{file}:train")
    assert name in text
    assert "Windows" in text
    assert "relative" in text
    assert ("train.txt" in text, "line 2" in text) == (where == "list", where == "list")


def test_a_yolo_name_that_has_a_backslash_keeps_it(tmp_path: Path) -> None:
    file = yolo(tmp_path, content="train: train.txt\n")
    draw(tmp_path, r"images/train/x\y.jpg")
    (tmp_path / r"labels/train/x\y.txt").write_text("1 0.5 0.5 1 1")
    (tmp_path / "train.txt").write_text(r"images/train/x\y.jpg")
    assert [Path(s.images[0]).name for s in samples_of(f"{file}:train")] == [r"x\y.jpg"]


def test_yolo_images_may_be_behind_links(tmp_path: Path) -> None:
    """Photographs of a day in a folder elsewhere were left out without a word."""
    file = yolo(tmp_path)
    draw(tmp_path, "elsewhere/d.jpg", "elsewhere/._d.jpg")
    (tmp_path / "elsewhere/d.jpg").rename(tmp_path / "elsewhere/d.jfif")
    (tmp_path / "images/train/day").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "labels/train/day").mkdir()
    (tmp_path / "labels/train/day/d.txt").write_text("1 0.5 0.5 1 1")
    found = samples_of(f"{file}:train")
    assert [(s.sample_id, len(s.objects)) for s in found if "day" in s.sample_id] == [("images/train/day/d.jfif", 1)]


def test_a_name_that_is_not_utf_8_is_told_before_a_run(tmp_path: Path) -> None:
    """A run ended with a traceback after its model was loaded: neither its files nor its servers can name it."""
    file, name = yolo(tmp_path), os.fsdecode(b"caf\xe9")
    draw(tmp_path, f"images/train/{name}.jpg")
    (tmp_path / f"labels/train/{name}.txt").write_text("1 0.5 0.5 1 1")
    text = refusal(f"{file}:train")
    assert ("UTF-8" in text, r"caf\udce9.jpg" in text, "rename" in text) == (True, True, True)
    assert text.encode()
    assert len(samples_of(f"{file}:train", on_bad_record="drop")) == 2
    (tmp_path / "voc").mkdir()
    voc(tmp_path / "voc", "a")
    (tmp_path / "voc/Annotations/a.xml").rename(tmp_path / f"voc/Annotations/{name}.xml")
    text = refusal(tmp_path / "voc/Annotations")
    assert ("UTF-8" in text, r"caf\udce9.xml" in text) == (True, True)


def test_bad_yolo_lines_are_told_as_they_are(tmp_path: Path) -> None:
    file = yolo(tmp_path, "2 0.5 0.5 1 1", "0 0.5 0.5 0 1", "0 0.9 0.5 0.5 1", "0 0.5 0.5 1", "cat 0.5 0.5 1 1")
    text = refusal(f"{file}:train")
    for number, found in enumerate(
        ("has an unknown class; found 2 0.5 0.5 1 1", "no area; found 0 0.5", "outside the image; found 0 0.9"), 1
    ):
        assert f"a.txt, line {number}: " in text
        assert found in text
    assert "line 4: not a YOLO label; found 0 0.5 0.5 1" in text
    assert "line 5: not a YOLO label; found cat" in text
    (tmp_path / "data.yaml").write_text("train: images/train\n")
    assert "no `names`" in refusal(file)


# ---- COCO outlines -------------------------------------------------------------------------------------------------

BLOB = np.zeros((100, 200), np.uint8)
BLOB[20:70, 30:120] = 1
BLOB[40:90, 100:160] = 1
BLOB[5:8, 190:193] = 1  # a crumb


def test_coco_polygons_are_read_where_asked_for(tmp_path: Path) -> None:
    """An object in several parts gives the largest."""
    parts = [[0, 0, 10, 0, 10, 10], [0, 0, 100, 0, 100, 100, 0, 100.0]]
    file = coco(tmp_path, {"segmentation": parts}, {"segmentation": [], "bbox": [0, 0, 50, 40]})
    outline = DetectionObject(desc="cat", kind="poly", bins=(0, 0, 500, 0, 500, 999, 0, 999))
    assert samples_of(file, "poly")[0].objects == (outline, box("cat", 0, 0, 250, 400))
    assert [obj.kind for obj in samples_of(file)[0].objects] == ["bbox_2d", "bbox_2d"]


@pytest.mark.parametrize("form", ["list", "text"])
def test_coco_run_lengths_become_polygons(tmp_path: Path, form: str) -> None:
    text = coco_mask.encode(np.asfortranarray(BLOB))
    pixels = BLOB.T.ravel()  # column by column, zeros first
    runs = np.diff(np.flatnonzero(np.diff(pixels)) + 1, prepend=0, append=len(pixels)).tolist()
    counts = runs if form == "list" else text["counts"].decode()
    file = coco(tmp_path, {"segmentation": {"size": [100, 200], "counts": counts}})
    (obj,) = samples_of(file, "poly")[0].objects
    by_hand = (150, 200, 600, 200, 600, 400, 799, 400, 799, 899, 500, 899, 500, 699, 150, 699)
    expected = DetectionObject(desc="cat", kind="poly", bins=by_hand)
    assert iou_matrix([obj], [expected])[0, 0] > 0.98
    assert len(obj.bins) <= 20  # corners, not pixels


def test_wrong_outlines_are_told(tmp_path: Path) -> None:
    wrong: list[Any] = [[[1, 2, 3, 4]], {"size": [10, 10], "counts": [100]}, {"size": [100, 200], "counts": [7]}, "x"]
    file = coco(tmp_path, *({"segmentation": one, "bbox": [i, 0, 50, 50]} for i, one in enumerate(wrong)))
    text = refusal(file, "poly")
    assert "4 records" in text
    assert all(f"annotation {i}: its segmentation is wrong" in text for i in range(4))
    assert len(samples_of(file)[0].objects) == 4  # boxes do not need them


def test_a_byte_order_mark_is_no_mistake(tmp_path: Path) -> None:
    file = coco(tmp_path, {})
    file.write_bytes(b"\xef\xbb\xbf" + file.read_bytes().replace(b"\n", b"\r\n"))
    assert samples_of(file)[0].objects == (box("cat", 0, 0, 250, 500),)


@pytest.mark.parametrize("place", ["", "images/"])
def test_names_of_images_may_have_the_backslashes_of_windows(tmp_path: Path, place: str) -> None:
    file = coco(tmp_path, {})
    draw(tmp_path, f"{place}sub/1.png")
    file.write_text(file.read_text().replace('"1.png"', r'"sub\\1.png"'))
    assert [Path(s.images[0]) for s in samples_of(file)] == [tmp_path / f"{place}sub/1.png"]
    if not place:
        rows = jsonl(tmp_path, FINE, images=[r"sub\1.png"])
        assert [Path(s.images[0]) for s in samples_of(rows)] == [tmp_path / "sub/1.png"]
    draw(tmp_path, f"{place}" + r"sub\1.png")
    assert [Path(s.images[0]).name for s in samples_of(file)] == [r"sub\1.png"], "a name that is really so"


@pytest.mark.parametrize("size", [{}, {"width": None, "height": None}, {"width": 0, "height": 0}])
def test_an_unknown_coco_size_is_the_images_own(tmp_path: Path, size: dict[str, Any]) -> None:
    """The header says it, of an upright image: it was refused."""
    file = sized(coco(tmp_path, {}), **size)
    (sample,) = samples_of(file)
    assert (sample.width, sample.height, sample.objects) == (200, 100, (box("cat", 0, 0, 250, 500),))
    Image.new("RGB", (100, 200)).save(tmp_path / "1.png", exif=turned_exif())
    (sample,) = samples_of(file)
    assert (sample.width, sample.height) == (200, 100)


def test_an_unknown_coco_size_is_that_of_its_run_lengths(tmp_path: Path) -> None:
    """They have one, which must be the image's all the same, and each other's."""
    mask: Any = {"size": [100, 200], "counts": [0, 20000]}
    file = sized(coco(tmp_path, {}, {"segmentation": mask}))
    assert [obj.kind for obj in samples_of(file, "poly")[0].objects] == ["bbox_2d", "poly"]
    other = {"segmentation": {"size": [10, 20], "counts": [0, 200]}}
    assert "annotation 1: its segmentation is wrong" in refusal(
        sized(coco(tmp_path, {"segmentation": mask}, other)), "poly"
    )
    assert "another size" in refusal(sized(coco(tmp_path, other)), "poly")


@pytest.mark.parametrize(
    ("size", "name", "said"),
    [
        ({}, "http://photographs.test/1.png", "image 1: the size of its image is not known"),
        ({}, "2.png", "2.png"),
        ({"width": 200}, "1.png", "image 1: height is missing"),
    ],
)
def test_a_coco_size_that_nobody_tells_is_an_error(tmp_path: Path, size: dict[str, Any], name: str, said: str) -> None:
    file = sized(coco(tmp_path, {}), **size)
    file.write_text(file.read_text().replace("1.png", name))
    assert said in refusal(file, allowed_image_hosts=["photographs.test"])


def test_an_unknown_jsonl_size_is_the_images_own(tmp_path: Path) -> None:
    """One image needed both, several needed none, and of the other formats none did."""
    box = {"desc": "cat", "bbox_2d": [0, 0, 100, 100]}
    known, unknown = jsonl(tmp_path, box), jsonl(tmp_path, box, name="unsized.jsonl", width=None, height=None)
    assert samples_of(unknown) == samples_of(known)
    assert (samples_of(unknown)[0].width, samples_of(unknown)[0].height) == (200, 100)
    elsewhere = jsonl(tmp_path, box, width=None, height=None, images=["http://photographs.test/1.png"])
    assert "size of its image is not known" in refusal(elsewhere, allowed_image_hosts=["photographs.test"])
    assert "height is missing" in refusal(jsonl(tmp_path, box, height=None))
    assert "width is missing" in refusal(jsonl(tmp_path, box, width=None, height=None, images=[]))


def sized(file: Path, **size: Any) -> Path:
    """Give the image of a COCO file this size, or none."""
    content = json.loads(file.read_text())
    for image in content["images"]:
        del image["width"], image["height"]
        image |= size
    file.write_text(json.dumps(content))
    return file


def turned_exif() -> Image.Exif:
    exif = Image.Exif()
    exif[0x0112] = 6
    return exif


def test_an_id_may_be_a_number_here_and_a_string_there(tmp_path: Path) -> None:
    file = coco(tmp_path, {"image_id": "1", "category_id": "1", "bbox": ["0", 0.0, "20.0", 50], "iscrowd": 0})
    assert samples_of(file)[0].objects == (box("cat", 0, 0, 100, 500),)


# ---- ignore regions ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("flag", [{"ignore": True}, {"iscrowd": 1}, {"difficult": "1"}])
def test_flags_make_ignore_regions(tmp_path: Path, flag: dict[str, Any]) -> None:
    """They may reach out of the image, and may have no class."""
    file = jsonl(tmp_path, {"bbox_2d": [-50, 0, 100, 500], **flag}, {"bbox_2d": [0, 0, 0, 0], "desc": "x", **flag})
    first, second = samples_of(file)
    assert (first.objects, first.ignored) == ((), (box("", 0, 0, 500, 999),))
    assert (second.objects, second.ignored) == ((), ())
    assert [s.ignored for s in samples_of(coco(tmp_path, {"ignore": 1, "bbox": [0, 0, 200, 100]}))] == [
        (box("cat", 0, 0, 999, 999),)
    ]


# ---- bad records ---------------------------------------------------------------------------------------------------


def test_every_error_is_listed_and_above_fifty_counted(tmp_path: Path) -> None:
    text = refusal(jsonl(tmp_path, *[FLAT] * 30, FINE, *[OUT] * 40))
    assert text.count("line ") == 50
    assert "70 records" in text
    assert "20 more" in text
    assert "object 1 ('x') has no area; found bbox_2d [5.0, 5.0, 5.0, 9.0]" in text


def test_drop_leaves_objects_out_and_counts_them(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    split = split_of(jsonl(tmp_path, FLAT, OUT, FINE), on_bad_record="drop")
    assert [len(s.objects) for s in split.samples] == [0, 0, 1]
    assert split.bad.summary() == {"no_area": {"drop": 1}, "outside_image": {"drop": 1}}
    assert "line 2" in caplog.text


def test_clip_cuts_at_the_border(tmp_path: Path) -> None:
    beyond = {"desc": "x", "bbox_2d": [300, 0, 400, 50]}
    split = split_of(jsonl(tmp_path, OUT, THIN_OUT, beyond, FLAT), on_bad_record="clip")
    out, thin, gone, flat = (s.objects for s in split.samples)
    assert (out, gone, flat) == ((box("x", 749, 500, 999, 899),), (), ())
    assert thin[0].kind == "poly"
    assert set(zip(thin[0].bins[::2], thin[0].bins[1::2], strict=True)) == {
        (749, 0), (999, 250), (999, 749), (749, 999)
    }  # fmt: skip
    assert split.bad.summary() == {"no_area": {"drop": 1}, "outside_image": {"clip": 2, "drop": 1}}
    cut, left_out = (line for line in warnings_of(survey(split)) if "outside_image" in line)
    assert ("260" in cut, "400" in left_out) == (True, True), "each with an example of its own"


def test_a_photograph_in_two_records_is_told_where_their_objects_differ(tmp_path: Path) -> None:
    """A file with a record for each object teaches one box of each photograph."""
    left, right = ({"desc": "x", "bbox_2d": [x, 0, x + 50, 50]} for x in (0, 100))
    told = [
        line for line in warnings_of(survey(split_of(jsonl(tmp_path, left, right)))) if "with other objects" in line
    ]
    assert len(told) == 1
    assert "1 record of a photograph" in told[0]
    twice = survey(split_of(jsonl(tmp_path, left, left)))
    assert twice.asked_again == [], "the same record again is no contradiction"


def test_each_kind_has_a_policy_of_its_own(tmp_path: Path) -> None:
    file = jsonl(tmp_path, FLAT, OUT)
    text = refusal(file, on_bad_record={"outside_image": "clip"})
    assert "line 1" in text
    assert "line 2" not in text
    assert split_of(file, on_bad_record={"no_area": "drop", "outside_image": "clip"}).bad.summary()


@pytest.mark.parametrize("content", [None, b"", b"no image"])
def test_an_image_that_is_missing_or_unreadable(tmp_path: Path, content: bytes | None) -> None:
    file = jsonl(tmp_path, FINE, images=["2.png"])
    if content is not None:
        (tmp_path / "2.png").write_bytes(content)
    assert "line 1: image '" in refusal(file)
    assert "2.png" in refusal(file)
    with file.open("a") as lines:
        lines.write(json.dumps({**json.loads(file.read_text()), "id": "b", "images": ["1.png"]}) + "\n")
    split = split_of(file, on_bad_record="drop")
    assert [s.sample_id for s in split.samples] == ["b"]
    assert split.bad.summary() == {"image_missing": {"drop": 1}}


def test_an_image_of_another_size_than_the_annotation(tmp_path: Path) -> None:
    file = jsonl(tmp_path, FINE, width=100, height=200)
    assert "found 100 x 200 in the annotation, 200 x 100 of the image" in refusal(file)
    assert "only bad records" in refusal(file, on_bad_record="drop")
    body = base64.b64encode((tmp_path / "1.png").read_bytes()).decode()
    for inline in (body, f"data:image/png;base64,{body}"):
        assert "another size" in refusal(jsonl(tmp_path, FINE, width=100, images=[inline]))


def test_sizes_are_those_of_the_upright_image(tmp_path: Path) -> None:
    """Annotated lying, as the pixels are stored: every box would be somewhere else."""
    file = jsonl(tmp_path, FINE)
    draw(tmp_path, "1.png", orientation=6)
    assert "EXIF" in refusal(file)
    jsonl(tmp_path, FINE, width=100, height=200)
    draw(tmp_path, "1.png", orientation=6)
    assert samples_of(file)[0].objects == (box("x", 0, 0, 200, 250),)


TURN = [{"role": "user", "content": "<image><image>?"}]
SEVERAL: dict[str, Any] = {"images": ["2.png", "1.png"], "messages": TURN, "width": None, "height": None}


def on(image: object, *corners: float) -> dict[str, Any]:
    return {"desc": "x", "image": image, "bbox_2d": list(corners)}


@pytest.mark.parametrize("said", [{}, {"sizes": [[50, 80], [200, 100]]}])
def test_each_object_is_in_bins_of_its_own_image(tmp_path: Path, said: dict[str, Any]) -> None:
    """The second image is 200 x 100 pixels. Canonical order: image after image, whatever the places."""
    draw(tmp_path, "2.png", size=(50, 80))
    objects = [on(2, 0, 0, 100, 50), on(1, 25, 40, 50, 80), {**on(2, 0, 0, 200, 100), "desc": "", "ignore": True}]
    (sample,) = samples_of(jsonl(tmp_path, FINE, **{**SEVERAL, **said, "objects": objects}))
    assert [(o.image, o.bins) for o in sample.objects] == [(1, (500, 500, 999, 999)), (2, (0, 0, 500, 500))]
    assert [(o.image, o.bins) for o in sample.ignored] == [(2, (0, 0, 999, 999))]
    assert sample.sizes == ((50, 80), (200, 100))
    assert (sample.width, sample.height) == (50, 80)


def test_a_survey_counts_records_and_images_and_measures_boxes_in_their_own(tmp_path: Path) -> None:
    draw(tmp_path, "2.png", size=(50, 80))
    found = survey(split_of(jsonl(tmp_path, on(2, 0, 0, 100, 50), **SEVERAL)))
    assert (found.num_samples, found.num_images, found.num_boxes) == (1, 2, 1)
    assert found.sizes[0] == (50, 80)
    assert found.sizes[2] == (200, 100)
    assert found.smallest_side_px == pytest.approx(50, abs=0.2)
    assert lines_of(found)[0].startswith("1 record of 2 photographs, 1 boxes (1 to 1 a record")


def test_width_and_height_are_those_of_every_image(tmp_path: Path) -> None:
    two = {"images": ["1.png", "1.png"], "messages": TURN}
    (sample,) = samples_of(jsonl(tmp_path, on(2, 0, 0, 100, 50), **two))
    assert sample.sizes == ((200, 100), (200, 100))
    draw(tmp_path, "2.png", size=(7, 7))
    assert "its image 2 has another size" in refusal(
        jsonl(tmp_path, on(1, 0, 0, 9, 9), **{**two, "images": ["1.png", "2.png"]})
    )


@pytest.mark.parametrize(
    ("fields", "obj", "reason"),
    [
        ({}, FINE, "wanted `image`: which of the 2 images it is in"),
        ({}, on(3, 0, 0, 9, 9), "found image 3"),
        ({}, on(0, 0, 0, 9, 9), "objects.0.image is wrong"),
        ({}, on("1.png", 0, 0, 9, 9), "objects.0.image is wrong"),
        ({}, on(1, 0, 0, 90, 9), "pixels within 50 x 80"),
        ({"sizes": [[50, 80]]}, on(1, 0, 0, 9, 9), "1 sizes, 2 images"),
        ({"sizes": [[200, 100], [50, 80]]}, on(1, 0, 0, 9, 9), "its image 1 has another size"),
        ({"width": 50}, on(1, 0, 0, 9, 9), "height is missing"),
        ({"images": ["2.png", "http://host/a.png"]}, on(1, 0, 0, 9, 9), "the size of its image 2 is not known"),
        ({"images": ["2.png", "3.png"]}, on(1, 0, 0, 9, 9), "3.png"),
        ({"images": ["1.png"], "messages": [{"role": "user", "content": "<image>?"}], "width": 200, "height": 100},
         on(2, 0, 0, 9, 9), "wanted image 1, or no `image`"),
    ],
)  # fmt: skip
def test_what_is_wrong_with_several_images_is_told(
    tmp_path: Path, fields: dict[str, Any], obj: dict[str, Any], reason: str
) -> None:
    draw(tmp_path, "2.png", size=(50, 80))
    file = jsonl(tmp_path, obj, **{**SEVERAL, **fields})
    found = refusal(file, allowed_image_hosts=["host"])
    assert "line 1: " in found
    assert reason in found


def test_an_object_may_name_the_only_image(tmp_path: Path) -> None:
    plain, named = (samples_of(jsonl(tmp_path, {**FINE, **more})) for more in ({}, {"image": 1}))
    assert plain == named


def test_a_record_is_left_out_if_one_of_its_images_has_another_size(tmp_path: Path) -> None:
    draw(tmp_path, "2.png", size=(50, 80))
    file = jsonl(tmp_path, on(1, 0, 0, 9, 9), **{**SEVERAL, "sizes": [[50, 80], [7, 7]]})
    assert "only bad records: 1 left out (image_size)" in refusal(file, on_bad_record="drop")


def test_malformed_records_are_errors_whatever_the_policy(tmp_path: Path) -> None:
    assert "bbox_2d is wrong" in refusal(jsonl(tmp_path, FINE, {"desc": "x", "bbox_2d": [1]}), on_bad_record="drop")


def test_what_is_too_long_is_told_or_dropped(tmp_path: Path) -> None:
    file = jsonl(tmp_path, FINE, FINE)

    def load(**data: Any) -> Split:
        data_config = DataConfig(train=str(file), **data)
        return load_split(
            data_config, str(file), AnyTask(), too_long=lambda s: "999 tokens" if s.sample_id == "1" else None
        )

    with pytest.raises(DataError, match=r"line 2: too long.*999 tokens.*global_max_length"):
        load()
    split = load(on_bad_record="drop")
    assert [s.sample_id for s in split.samples] == ["0"]
    assert split.bad.summary() == {"too_long": {"drop": 1}}


# ---- which format --------------------------------------------------------------------------------------------------


def test_the_format_is_found_out(tmp_path: Path, cells: Path) -> None:
    yolo_file = yolo(tmp_path)
    detected = {
        jsonl(tmp_path, FINE): "jsonl",
        jsonl(tmp_path, FINE, name="rows.json"): "jsonl",
        coco(tmp_path): "coco",
        cells / "Annotations": "voc",
        cells / "ImageSets/train.txt": "voc",
        yolo_file: "yolo",
        f"{yolo_file}:train": "yolo",
    }
    for path, name in detected.items():
        assert format_of(DataConfig(train="x"), str(path)) == name
    (tmp_path / "one-line.json").write_text(json.dumps(json.loads(coco(tmp_path).read_text())))
    assert format_of(DataConfig(train="x"), str(tmp_path / "one-line.json")) == "coco"
    for path in (tmp_path / "labels", tmp_path / "1.png"):
        with pytest.raises(DataError, match=r"data\.format"):
            format_of(DataConfig(train="x"), str(path))
    with pytest.raises(DataError, match="datasets"):
        format_of(DataConfig(train="x"), "somebody/cells")


# ---- Hugging Face datasets -----------------------------------------------------------------------------------------


def test_without_the_package_its_install_line_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    assert "pip install" in refusal("somebody/cells:train", format="datasets")


def cells_as_dataset(folder: Path, *, embedded: bool) -> Any:
    datasets = pytest.importorskip("datasets")
    draw(folder, "a.png", "b.png")
    features = datasets.Features(
        {
            "image_id": datasets.Value("int64"),
            "image": datasets.Image() if embedded else datasets.Value("string"),
            "width": datasets.Value("int32"),
            "height": datasets.Value("int32"),
            "objects": datasets.Sequence(
                {
                    "bbox": datasets.Sequence(datasets.Value("float32"), length=4),
                    "category": datasets.ClassLabel(names=["RBC", "WBC"]),
                    "iscrowd": datasets.Value("bool"),
                }
            ),
        }
    )
    objects = {"bbox": [[0, 50, 20, 50], [0, 0, 200, 100]], "category": [0, 1], "iscrowd": [False, True]}

    rows = {
        "image_id": [7, 8],
        "image": [str(folder / "a.png"), str(folder / "b.png")],
        "width": [200, 200],
        "height": [100, 100],
        "objects": [objects, {"bbox": [], "category": [], "iscrowd": []}],
    }
    return datasets.Dataset.from_dict(rows, features=features)


@pytest.mark.parametrize("embedded", [True, False])
def test_a_saved_data_set_becomes_samples(tmp_path: Path, embedded: bool) -> None:
    datasets = pytest.importorskip("datasets")
    rows = cells_as_dataset(tmp_path, embedded=embedded)
    datasets.DatasetDict({"train": rows, "test": rows}).save_to_disk(str(tmp_path / "saved"))
    first, second = samples_of(f"{tmp_path}/saved:train")
    assert (first.sample_id, first.objects) == ("7", (box("RBC", 0, 500, 100, 999),))
    assert first.ignored == (box("WBC", 0, 0, 999, 999),)
    assert (second.sample_id, second.objects) == ("8", ())
    assert first.images[0].endswith("a.png") is not embedded
    assert "one of test, train" in refusal(f"{tmp_path}/saved")
    (corners, _) = samples_of(f"{tmp_path}/saved:train", box_format="xyxy", on_bad_record="drop")
    assert corners.objects == ()  # [0, 50, 20, 50] as corners has no area


@pytest.mark.parametrize("several", [False, True])
def test_a_parquet_folder_with_the_columns_of_the_jsonl(tmp_path: Path, several: bool) -> None:
    datasets = pytest.importorskip("datasets")
    draw(tmp_path, "2.png", size=(50, 80))
    objects = (
        [on(2, 0, 0, 99, 50), on(1, 0, 0, 9, 9)] if several else [FINE, {**THIN_OUT, "poly": [0, 0, 50, 0, 50, 50]}]
    )
    file = jsonl(tmp_path, *objects, **{**SEVERAL, "sizes": [[50, 80], [200, 100]]} if several else {})
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    (tmp_path / "set").mkdir()
    datasets.Dataset.from_list(rows).to_parquet(tmp_path / "set" / "train-00000.parquet")
    found = samples_of(f"{tmp_path}/set:train", image_root=str(tmp_path))
    assert [s.objects for s in found] == [s.objects for s in samples_of(file)]


def test_a_data_set_without_objects_is_told(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    datasets.Dataset.from_dict({"text": ["a"]}).save_to_disk(str(tmp_path / "saved"))
    assert "['text']" in refusal(tmp_path / "saved")
    assert "can't be loaded" in refusal(tmp_path / "nothing-here", format="datasets")
