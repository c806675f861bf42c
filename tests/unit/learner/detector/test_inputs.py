"""Tests of what `predict` can be given (R43)."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from learner.__main__ import main
from learner.config.inference import InferenceSettings, prompt_messages
from learner.config.sections.task import TaskConfig
from learner.detector.detector import _asks
from learner.detector.inputs import find_inputs
from learner.detector.model import ModelFiles, require_one_image_prompt
from shared.errors import ConfigError, DataError


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    for name in ("b.jpg", "a.PNG", "deep/c.webp"):
        file = tmp_path / "photos" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (40, 30)).save(file)
    (tmp_path / "photos" / "notes.md").write_text("no image")
    return tmp_path / "photos"


def names(*inputs: str) -> list[str]:
    return [image.name for image in find_inputs(inputs).images]


def test_files_folders_and_patterns(photos: Path) -> None:
    assert names(str(photos / "b.jpg")) == ["b.jpg"]
    assert names(str(photos)) == ["a.PNG", "b.jpg", "deep/c.webp"], "files of equal names stay apart"
    assert names(f"{photos}/*.jpg") == ["b.jpg"]
    assert names(f"{photos}/**/*") == ["a.PNG", "b.jpg", "c.webp"]
    assert names(str(photos / "b.jpg"), str(photos)) == ["b.jpg", "a.PNG", "deep/c.webp"]


def test_a_folder_has_the_photographs_behind_links_too(photos: Path) -> None:
    """They were left out without a word. A link that leads back is followed once."""
    elsewhere = photos.parent / "elsewhere"
    (elsewhere / "day").mkdir(parents=True)
    Image.new("RGB", (40, 30)).save(elsewhere / "day/d.jpg")
    (photos / "linked").symlink_to(elsewhere)
    (photos / "loop").symlink_to(photos)
    assert names(str(photos)) == ["a.PNG", "b.jpg", "deep/c.webp", "linked/day/d.jpg"]


def test_other_endings_of_jpeg_are_photographs(photos: Path) -> None:
    """Browsers save .jfif."""
    for ending in ("jfif", "JPE"):
        (photos / f"e.{ending}").write_bytes((photos / "b.jpg").read_bytes())
    assert names(str(photos)) == ["a.PNG", "b.jpg", "deep/c.webp", "e.JPE", "e.jfif"]
    assert names(str(photos / "e.jfif")) == ["e.jfif"]


def test_photographs_of_a_kind_that_cannot_be_read_are_named(photos: Path) -> None:
    """They were left out without a word. A camera's raw file beside its JPEG is no loss, and what macOS writes beside
    files of other systems (`._b.jpg`) is no photograph."""
    for name in ("b.CR2", "phone.HEIC", "deep/d.avif", "._b.jpg"):
        (photos / name).touch()
    found = find_inputs([str(photos)])
    assert [image.name for image in found.images] == ["a.PNG", "b.jpg", "deep/c.webp"]
    assert [Path(line.partition(":")[0]).name for line in found.bad] == ["d.avif", "phone.HEIC"]
    assert "JPEG" in found.bad[0]
    for text in ("phone.HEIC", "*.HEIC"):
        alone = find_inputs([str(photos / text)])
        assert (alone.images, len(alone.bad)) == ([], 1)


def test_pictures_that_predict_drew_are_no_photographs(photos: Path) -> None:
    """With --out inside the folder, the same command refused to go on, and another one asked about drawn boxes."""
    for folder, names_ in (("found", ("request.json", "predictions.jsonl")), ("mine", ())):
        (photos / folder / "pictures").mkdir(parents=True)
        Image.new("RGB", (40, 30)).save(photos / folder / "pictures/00000-b.jpg")
        for name in names_:
            (photos / folder / name).touch()
    assert names(str(photos)) == ["a.PNG", "b.jpg", "deep/c.webp", "mine/pictures/00000-b.jpg"]
    assert names(str(photos / "found/pictures")) == ["00000-b.jpg"], "named as such"


def test_a_name_that_is_not_utf_8_is_skipped(photos: Path) -> None:
    """Results cannot name it: predict ended with a traceback."""
    (photos / "b.jpg").rename(photos / os.fsdecode(b"caf\xe9.jpg"))
    found = find_inputs([str(photos)])
    assert [image.name for image in found.images] == ["a.PNG", "deep/c.webp"]
    assert len(found.bad) == 1
    assert ("UTF-8" in found.bad[0], r"caf\udce9.jpg" in found.bad[0]) == (True, True)


def test_annotations_keep_their_ids_and_photographs_get_other_numbers(photos: Path, tmp_path: Path) -> None:
    coco = {
        "images": [
            {"id": i, "file_name": f"photos/{name}", "width": 40, "height": 30}
            for i, name in ((7, "b.jpg"), (1, "a.PNG"))
        ],
        "annotations": [{"id": 1, "image_id": 7, "category_id": 5, "bbox": [1, 1, 0, 4]}],
        "categories": [{"id": 5, "name": "cell"}],
    }
    file = tmp_path / "instances.json"
    file.write_text(json.dumps(coco))
    found = find_inputs([str(file), str(photos)])
    assert [(image.id, image.name) for image in found.images] == [(7, "b.jpg"), (1, "a.PNG"), (2, "deep/c.webp")]
    assert found.categories == {"cell": 5}
    assert found.bad == [], "a box without area is no matter here"


def test_every_missing_image_of_annotations_is_named(photos: Path, tmp_path: Path) -> None:
    coco = {
        "images": [
            {"id": i, "file_name": f"photos/{name}", "width": 40, "height": 30}
            for i, name in enumerate(("b.jpg", "gone.jpg", "lost.jpg"))
        ],
        "annotations": [],
        "categories": [],
    }
    file = tmp_path / "instances.json"
    file.write_text(json.dumps(coco))
    found = find_inputs([str(file)])
    assert [image.name for image in found.images] == ["b.jpg"]
    assert [name for name in ("gone.jpg", "lost.jpg") if not any(name in line for line in found.bad)] == []


@pytest.mark.parametrize("text", ["nothing.jpg", "photos/*.gif", "empty", "photos/notes.md", "photos/list.txt"])
def test_an_input_that_is_nothing_is_named(photos: Path, monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.chdir(photos.parent)
    (photos.parent / "empty").mkdir()
    (photos / "list.txt").write_text("b.jpg\n")  # lists no names of Pascal VOC files
    with pytest.raises(DataError) as error:
        find_inputs([text])
    assert text in str(error.value)
    assert "photograph" in error.value.wanted
    assert error.value.remedy


def several(folder: Path, images: list[str], objects: list[dict[str, Any]] | None = None) -> Path:
    turn = {"role": "user", "content": "<image>" * len(images) + "Detect."}
    file = folder / "pairs.jsonl"
    file.write_text(json.dumps({"id": "pair", "messages": [turn], "images": images, "objects": objects or []}))
    return file


def test_each_image_of_a_record_has_its_own_results(photos: Path, tmp_path: Path) -> None:
    file = several(tmp_path, [str(photos / "a.PNG"), str(photos / "b.jpg")])
    found = find_inputs([str(file), str(photos / "b.jpg")])
    assert not found.bad
    assert [(one.id, one.name, one.image) for one in found.images] == [
        ("pair#1", "a.PNG", 1),
        ("pair#2", "b.jpg", 2),
        (1, "b.jpg", None),
    ]


def test_a_record_is_asked_as_a_whole_also_after_an_interruption(photos: Path, tmp_path: Path) -> None:
    """Drawn answers depend on the place of its first image, which may be done already."""
    file = several(tmp_path, [str(photos / "a.PNG"), str(photos / "b.jpg")])
    line = dict(enumerate(find_inputs([str(photos / "b.jpg"), str(file)]).images))
    assert _asks(line) == {0: [0], 1: [1, 2]}
    assert _asks({2: line[2]}) == {1: [2]}


@pytest.mark.parametrize("name", [{"image_id": "pair#2"}, {"image_id": 7, "file_name": "b.jpg"}])
def test_results_are_compared_in_the_image_that_they_name(
    photos: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], name: dict[str, Any]
) -> None:
    objects = [{"desc": "cell", "image": image, "bbox_2d": [4, 3, 20, 15]} for image in (1, 2)]
    file = several(tmp_path, [str(photos / "a.PNG"), str(photos / "b.jpg")], objects)
    found = tmp_path / "found.json"
    found.write_text(json.dumps([{**name, "category": "cell", "bbox": [4, 3, 16, 12], "score": 0.9}]))
    assert main(["evaluate", str(file), "--predictions", str(found), "--out", str(tmp_path / "out")]) == 0
    (result,) = json.loads((tmp_path / "out" / "evaluation.json").read_text())
    assert result["intervals"]["precision@0.5"]["estimate"] == 1.0
    assert result["intervals"]["f1@0.5"]["estimate"] == pytest.approx(2 / 3)


def test_a_model_of_pages_is_not_asked_about_one_photograph(tmp_path: Path) -> None:
    """This is known before the model is loaded."""
    turn = {"role": "user", "content": "<image><image>Detect every digit."}
    pages = ModelFiles(folder=tmp_path, settings=InferenceSettings(task=TaskConfig(), messages=[turn]))
    with pytest.raises(ConfigError, match="not for one photograph"):
        require_one_image_prompt(pages)
    one = pages.settings.model_copy(update={"messages": prompt_messages("Detect.")})
    require_one_image_prompt(ModelFiles(folder=tmp_path, settings=one))
