"""Folders as data (R41): every layout that tools export, a split of each, and parts of a split."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from learner.config.schema import DataConfig
from learner.data.formats.folders import splits_in
from learner.data.formats.parts import part_of
from learner.data.splits import annotations_of, load_split
from shared.errors import DataError
from tests.unit.learner.data.annotations import FINE, box, coco, jsonl, voc, voc_object, yolo
from tests.unit.learner.data.fakes import AnyTask, draw

OBJECT = voc_object("RBC", 0, 50, 20, 100)


def ids(path: str, **data: str) -> list[str]:
    return [s.sample_id for s in load_split(DataConfig(**{"train": path, **data}), path, AnyTask()).samples]


def roboflow(folder: Path, *splits: str) -> Path:
    for split in splits:
        file = coco(folder / split, {})
        file.rename(file.parent / "_annotations.coco.json")
    return folder


def test_yolo_folders_have_the_splits_of_their_file(tmp_path: Path) -> None:
    yolo(tmp_path, "1 0.5 0.5 1 1", content="train: images/train\nvalid: images/val\n")
    assert list(splits_in(tmp_path)) == ["train", "val"]
    assert ids(str(tmp_path)) == ["images/train/a.jpg", "images/train/sub/b.png"]
    for name in ("val", "valid"):
        assert ids(f"{tmp_path}:{name}") == ["images/val/c.jpg"]


@pytest.mark.parametrize("place", ["classes.txt", "labels/classes.txt", "obj.names"])
@pytest.mark.parametrize("split", ["", "train/"])
def test_class_names_in_a_file_of_their_own_are_yolo(tmp_path: Path, place: str, split: str) -> None:
    """Labelling tools write it like this, without a data.yaml."""
    draw(tmp_path, f"images/{split}a.jpg", f"images/{split}b.jpg")
    (tmp_path / "labels" / split).mkdir(parents=True)
    (tmp_path / f"labels/{split}a.txt").write_text("1 0.5 0.5 1 1\n")
    (tmp_path / place).write_text("cat\nbrown dog\n\n")
    assert list(splits_in(tmp_path)) == [split.rstrip("/")]
    for path in (str(tmp_path), str(tmp_path / place)):
        found = load_split(DataConfig(train=path), path, AnyTask())
        assert [sample.sample_id for sample in found.samples] == [f"images/{split}a.jpg", f"images/{split}b.jpg"]
        assert [obj.desc for sample in found.samples for obj in sample.objects] == ["brown dog"]
        assert found.bad.summary() == {"unlabelled": {"keep": 1}}, "the names are no labels"


@pytest.mark.parametrize("split", ["", "train/"])
def test_class_names_are_found_from_the_folder_above(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, split: str
) -> None:
    draw(tmp_path / "yolo", f"images/{split}a.jpg")
    (tmp_path / f"yolo/labels/{split}").mkdir(parents=True)
    (tmp_path / f"yolo/labels/{split}a.txt").write_text("0 0.5 0.5 1 1\n")
    (tmp_path / "yolo/classes.txt").write_text("cat\n")
    monkeypatch.chdir(tmp_path)
    assert list(splits_in(Path("yolo"))) == [split.rstrip("/")]
    assert ids("yolo") == [f"images/{split}a.jpg"]


@pytest.mark.parametrize(("names", "found"), [("", "empty"), ("cat\n\ndog", "cat")])
def test_a_list_of_class_names_that_is_none(tmp_path: Path, names: str, found: str) -> None:
    (tmp_path / "classes.txt").write_text(names)
    with pytest.raises(DataError, match="class names") as error:
        ids(str(tmp_path / "classes.txt"))
    assert found in error.value.found


def test_a_list_of_names_without_labels_is_not_yolo(tmp_path: Path) -> None:
    draw(tmp_path, "images/a.jpg")
    (tmp_path / "classes.txt").write_text("cat\n")
    assert splits_in(tmp_path) == {}


def test_photographs_alone_are_said_to_have_no_annotations(tmp_path: Path) -> None:
    draw(tmp_path, "a.jpg", "more/b.png")
    with pytest.raises(DataError, match="format") as error:
        ids(str(tmp_path))
    assert "2 photographs and no annotations" in error.value.found


def test_files_that_name_no_split_are_named(tmp_path: Path) -> None:
    """Nobody can say which of them is meant."""
    for name in ("a.json", "b.json"):
        (tmp_path / name).write_text("{}")
    with pytest.raises(DataError) as caught:
        annotations_of(DataConfig(train=str(tmp_path)), str(tmp_path))
    assert "a.json, b.json" in caught.value.found


@pytest.mark.parametrize("part", ["[:90]", "[90:]", "[:0.9]"])
def test_a_part_is_in_percent(part: str) -> None:
    with pytest.raises(DataError) as caught:
        part_of(f"data:train{part}")
    assert part in caught.value.found
    assert "data:train[:90%]" in caught.value.remedy


def test_a_folder_per_split(tmp_path: Path) -> None:
    for split in ("train", "valid", "test"):
        (tmp_path / split).mkdir()
    roboflow(tmp_path, "train", "valid", "test")
    assert {split: found.format for split, found in splits_in(tmp_path).items()} == dict.fromkeys(
        ("train", "val", "test"), "coco"
    )
    assert ids(f"{tmp_path}:val") == ["1"]
    with pytest.raises(DataError, match=f"{tmp_path}:train"):
        ids(f"{tmp_path}:other")


def test_the_key_says_the_split_unless_two_keys_share_a_path(tmp_path: Path) -> None:
    (tmp_path / "train").mkdir()
    (tmp_path / "valid").mkdir()
    roboflow(tmp_path, "train", "valid")
    folder = str(tmp_path)
    assert ids(folder, train="other", val=folder) == ["1"]
    with pytest.raises(DataError, match="which split"):
        ids(folder, train=folder, val=folder)


def test_splits_may_have_formats_of_their_own(tmp_path: Path) -> None:
    (tmp_path / "train").mkdir()
    roboflow(tmp_path, "train")
    voc(tmp_path, "a", OBJECT)
    (tmp_path / "Annotations").rename(tmp_path / "valid")
    draw(tmp_path, "valid/a.jpg")
    assert {split: found.format for split, found in splits_in(tmp_path).items()} == {"train": "coco", "val": "voc"}
    assert (ids(f"{tmp_path}:train"), ids(f"{tmp_path}:val")) == (["1"], ["a"])


def test_coco_images_are_found_beside_the_annotations(tmp_path: Path) -> None:
    (tmp_path / "annotations").mkdir()
    file = coco(tmp_path, {})
    file.rename(tmp_path / "annotations" / "instances_train2017.json")
    (tmp_path / "annotations" / "captions_train2017.json").write_text("{}")
    (tmp_path / "train2017").mkdir()
    (tmp_path / "1.png").rename(tmp_path / "train2017" / "1.png")
    assert list(splits_in(tmp_path)) == ["train"]
    (sample,) = load_split(DataConfig(train=str(tmp_path)), str(tmp_path), AnyTask()).samples
    assert sample.images == (str(tmp_path / "train2017/1.png"),)


def test_voc_folders_with_and_without_lists(tmp_path: Path) -> None:
    voc(tmp_path, "a", OBJECT)
    voc(tmp_path, "b", OBJECT)
    assert ids(str(tmp_path)) == ["a", "b"]
    (tmp_path / "ImageSets/Main").mkdir(parents=True)
    (tmp_path / "ImageSets/Main/train.txt").write_text("b\n")
    (tmp_path / "ImageSets/Main/val.txt").write_text("a\n")
    assert (ids(str(tmp_path)), ids(f"{tmp_path}:val")) == (["b"], ["a"])


def test_photographs_and_xml_in_one_folder(tmp_path: Path) -> None:
    voc(tmp_path, "a", OBJECT)
    (tmp_path / "Annotations/a.xml").rename(tmp_path / "JPEGImages/a.xml")
    (sample,) = load_split(
        DataConfig(train=str(tmp_path / "JPEGImages")), str(tmp_path / "JPEGImages"), AnyTask()
    ).samples
    assert sample.objects == (box("RBC", 0, 500, 100, 999),)


def sub_folders(folder: Path, place: str, *names: str) -> None:
    """VOC files in sub-folders: `place` is where each photograph is, of a sub-folder and a stem."""
    for name in names:
        voc(folder, Path(name).name, OBJECT)
        file, image = folder / f"Annotations/{name}.xml", folder / place.format(*name.split("/"))
        for one in (file, image):
            one.parent.mkdir(parents=True, exist_ok=True)
        (folder / f"Annotations/{Path(name).name}.xml").rename(file)
        (folder / f"JPEGImages/{Path(name).name}.jpg").rename(image)


@pytest.mark.parametrize(
    "place", ["JPEGImages/{0}/{1}.jpg", "JPEGImages/{1}.jpg", "images/{0}/{1}.jpg", "Annotations/{0}/{1}.jpg"]
)
def test_voc_files_in_sub_folders_are_read(tmp_path: Path, place: str) -> None:
    """One folder per class or per day, as some tools export them: they were left out without a word."""
    sub_folders(tmp_path, place, "cats/a", "dogs/b")
    for path in (tmp_path, tmp_path / "Annotations"):
        found = load_split(DataConfig(train=str(path)), str(path), AnyTask()).samples
        images = [str(tmp_path / place.format(*name.split("/"))) for name in ("cats/a", "dogs/b")]
        assert [(s.sample_id, os.path.normpath(s.images[0])) for s in found] == [*zip("ab", images, strict=True)]


def test_voc_files_beside_sub_folders_are_read_with_those_in_them(tmp_path: Path) -> None:
    sub_folders(tmp_path, "JPEGImages/{0}/{1}.jpg", "cats/b")
    voc(tmp_path, "a", OBJECT)
    (tmp_path / "Annotations/.hidden").mkdir()
    (tmp_path / "Annotations/.hidden/c.xml").write_text("<editor/>")
    assert ids(str(tmp_path)) == ["a", "b"]


def test_a_folder_of_whole_voc_folders_is_read(tmp_path: Path) -> None:
    """Or one of folders with photographs and XML files."""
    for day in ("monday", "tuesday"):
        (tmp_path / "days" / day).mkdir(parents=True)
        voc(tmp_path / "days" / day, day, OBJECT)
        (tmp_path / "flat" / day).mkdir(parents=True)
        (tmp_path / f"flat/{day}/{day}.xml").write_text((tmp_path / f"days/{day}/Annotations/{day}.xml").read_text())
        draw(tmp_path, f"flat/{day}/{day}.jpg")
    for folder in ("days", "flat"):
        assert ids(str(tmp_path / folder)) == ["monday", "tuesday"]


def test_sub_folders_that_are_called_as_splits_are_splits(tmp_path: Path) -> None:
    sub_folders(tmp_path, "JPEGImages/{1}.jpg", "train/a", "val/b")
    assert (ids(f"{tmp_path}:train"), ids(f"{tmp_path}:val")) == (["a"], ["b"])


def test_a_list_names_voc_files_in_sub_folders(tmp_path: Path) -> None:
    """By their names alone, or with the folder; a name that two have is refused."""
    sub_folders(tmp_path, "JPEGImages/{0}/{1}.jpg", "cats/a", "dogs/b", "dogs/c")
    (tmp_path / "ImageSets").mkdir()
    (tmp_path / "ImageSets/train.txt").write_text("b\ndogs/c\na  1\n")
    assert ids(f"{tmp_path}:train") == ["b", "c", "a"]
    (tmp_path / "Annotations/cats/b.xml").write_text("<annotation/>")
    with pytest.raises(DataError) as caught:
        ids(f"{tmp_path}:train")
    assert ("cats/b.xml" in str(caught.value), "dogs/b.xml" in str(caught.value)) == (True, True)
    (tmp_path / "ImageSets/train.txt").write_text("cats/c\n")
    with pytest.raises(DataError, match=r"cats/c\.xml"):
        ids(f"{tmp_path}:train")


def test_two_voc_files_of_one_name_are_both_named(tmp_path: Path) -> None:
    sub_folders(tmp_path, "JPEGImages/{0}/{1}.jpg", "cats/1", "dogs/1")
    with pytest.raises(DataError) as caught:
        ids(str(tmp_path))
    assert "dogs/1.xml" in str(caught.value)
    assert "cats/1.xml" in str(caught.value)


def test_jsonl_files_and_a_folder_around_them(tmp_path: Path) -> None:
    (tmp_path / "inside").mkdir()
    for name in ("train", "val"):
        jsonl(tmp_path / "inside", FINE, name=f"{name}.jsonl")
    assert list(splits_in(tmp_path)) == ["train", "val"]
    assert ids(str(tmp_path)) == ["0"]


def test_a_folder_with_nothing_known_is_refused(tmp_path: Path) -> None:
    assert splits_in(tmp_path) == {}
    with pytest.raises(DataError, match=r"data\.format"):
        ids(str(tmp_path))


def test_parts_share_nothing_and_leave_nothing_out(tmp_path: Path) -> None:
    file = jsonl(tmp_path, *[FINE] * 200)
    first, second = ids(f"{file}[:80%]"), ids(f"{file}[80%:]")
    assert sorted(map(int, first + second)) == list(range(200))
    assert 20 <= len(second) <= 60
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    file.write_text("".join(json.dumps(row) + "\n" for row in reversed(rows)))
    assert sorted(ids(f"{file}[80%:]")) == sorted(second)  # the order does not matter
    assert part_of("a[1].json")[0] == "a[1].json"
    for wrong in ("[90%:10%]", "[100%:]", "[:0%]", "[:200%]"):
        with pytest.raises(DataError, match="part"):
            part_of(f"a{wrong}")
