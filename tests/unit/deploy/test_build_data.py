"""The demo's files: complete, deterministic, JSONL and COCO saying the same."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from pycocotools.coco import COCO

from deploy.demo.build_data import Build, build
from deploy.demo.scenes import SPLITS

REQUEST = Build(train=6, val=2, test=3, seed=5)


def read_rows(folder: Path, split: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / f"{split}.jsonl").read_text().splitlines()]


def contents(folder: Path) -> dict[str, bytes]:
    return {str(file.relative_to(folder)): file.read_bytes() for file in folder.rglob("*") if file.is_file()}


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("demo-data")
    assert build(REQUEST, folder)
    return folder


def test_rows_name_images_that_are_there(built: Path) -> None:
    for split in SPLITS:
        rows = read_rows(built, split)
        assert len(rows) == REQUEST.num_scenes(split)
        for row in rows:
            with Image.open(built / row["images"][0]) as image:
                assert image.size == (row["width"], row["height"])
            assert row["messages"][0]["content"].startswith("<image>")


def test_coco_says_what_the_jsonl_says(built: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """pycocotools reads the COCO file; its boxes and names are those of the JSONL."""
    coco = COCO(str(built / "train.coco.json"))
    for row, image_id in zip(read_rows(built, "train"), coco.getImgIds(), strict=True):
        assert coco.loadImgs(image_id)[0]["file_name"] == row["images"][0]
        seen = []
        for item in coco.loadAnns(coco.getAnnIds(image_id)):
            x, y, width, height = item["bbox"]
            name = coco.loadCats(item["category_id"])[0]["name"]
            seen.append({"desc": name, "bbox_2d": [x, y, x + width, y + height]})
        assert seen == row["objects"]


@pytest.mark.slow
def test_the_number_of_workers_changes_nothing(tmp_path: Path) -> None:
    request = Build(train=130, val=1, test=1)
    build(request, tmp_path / "one", workers=1)
    build(request, tmp_path / "two", workers=2)
    assert contents(tmp_path / "one") == contents(tmp_path / "two")


def test_an_equal_build_is_not_repeated_and_another_is(built: Path, tmp_path: Path) -> None:
    build(REQUEST, tmp_path)
    before = contents(tmp_path)
    assert before == contents(built)
    assert not build(REQUEST, tmp_path)
    assert build(replace(REQUEST, seed=6), tmp_path)
    assert contents(tmp_path) != before


def test_an_interrupted_build_is_done_again(tmp_path: Path) -> None:
    build(REQUEST, tmp_path)
    before = contents(tmp_path)
    (tmp_path / "build.json").unlink()
    (tmp_path / "train.jsonl").write_text("")
    assert build(REQUEST, tmp_path)
    assert contents(tmp_path) == before


def test_dropout_takes_training_labels_and_no_pixels(built: Path, tmp_path: Path) -> None:
    build(replace(REQUEST, annotation_dropout=0.5), tmp_path)
    for split in SPLITS:
        full, sparse = read_rows(built, split), read_rows(tmp_path, split)
        for before, after in zip(full, sparse, strict=True):
            assert (built / before["images"][0]).read_bytes() == (tmp_path / after["images"][0]).read_bytes()
            assert all(item in before["objects"] for item in after["objects"])
            assert after["objects"]
        if split != "train":
            assert sparse == full
    kept = sum(len(row["objects"]) for row in read_rows(tmp_path, "train"))
    assert kept < sum(len(row["objects"]) for row in read_rows(built, "train"))


def test_cap_keeps_the_first_objects_in_reading_order(built: Path, tmp_path: Path) -> None:
    build(replace(REQUEST, annotation_cap=2), tmp_path)
    for whole, capped in zip(read_rows(built, "train"), read_rows(tmp_path, "train"), strict=True):
        ordered = sorted(whole["objects"], key=lambda o: (o["bbox_2d"][1], o["bbox_2d"][0]))
        assert capped["objects"] == ordered[:2]
    assert (tmp_path / "test.jsonl").read_text() == (built / "test.jsonl").read_text()


def test_a_cap_share_leaves_the_other_scenes_whole(built: Path, tmp_path: Path) -> None:
    build(replace(REQUEST, annotation_cap=1, annotation_cap_share=0.5), tmp_path)
    pairs = list(zip(read_rows(built, "train"), read_rows(tmp_path, "train"), strict=True))
    assert all(len(capped["objects"]) in (1, len(whole["objects"])) for whole, capped in pairs)
    whole_scenes = sum(len(capped["objects"]) > 1 for _, capped in pairs)
    assert 0 < whole_scenes < len(pairs)


def test_full_dropout_keeps_one_label(built: Path, tmp_path: Path) -> None:
    build(replace(REQUEST, annotation_dropout=1.0), tmp_path)
    assert [len(row["objects"]) for row in read_rows(tmp_path, "train")] == [1] * REQUEST.train


@pytest.mark.slow
def test_dropout_comes_at_its_rate(tmp_path: Path) -> None:
    build(Build(train=200, val=0, test=0), tmp_path / "full")
    build(Build(train=200, val=0, test=0, annotation_dropout=0.3), tmp_path / "sparse")
    counts = [sum(len(row["objects"]) for row in read_rows(tmp_path / name, "train")) for name in ("full", "sparse")]
    assert np.isclose(counts[1] / counts[0], 0.7, atol=0.06)
