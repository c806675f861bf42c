"""The photographs' copies: boxes follow the pixels, labels go missing as asked, a clone is found by its folders."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import AutoProcessor, Qwen3VLForConditionalGeneration

from deploy.bccd import photographs
from deploy.bccd.photographs import (
    CLASSES,
    Photograph,
    augment,
    read_photographs,
    without_labels,
    write_augmented,
    write_jsonl,
)
from deploy.bccd.run import report
from deploy.demo.model import SHAPES, write_model
from shared.errors import DataError

XML = """<annotation><filename>{name}.jpg</filename><size><width>640</width><height>480</height><depth>3</depth></size>
<object><name>RBC</name><difficult>0</difficult>
<bndbox><xmin>100</xmin><ymin>120</ymin><xmax>220</xmax><ymax>300</ymax></bndbox></object>
<object><name>WBC</name><difficult>0</difficult>
<bndbox><xmin>5</xmin><ymin>7</ymin><xmax>5</xmax><ymax>9</ymax></bndbox></object></annotation>"""
BOX = (200, 150, 330, 290)


@pytest.fixture
def photograph(tmp_path: Path) -> Photograph:
    """A red rectangle on grey, labelled."""
    pixels = np.full((480, 640, 3), 128, np.uint8)
    x1, y1, x2, y2 = BOX
    pixels[y1:y2, x1:x2] = (255, 0, 0)
    Image.fromarray(pixels).save(tmp_path / "one.png")
    return Photograph("one", str(tmp_path / "one.png"), 640, 480, (("RBC", BOX),))


@pytest.mark.parametrize("seed", range(40))
def test_a_box_follows_its_pixels(photograph: Photograph, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(photographs, "MOSAICS", 0.0)
    image, objects = augment(np.random.default_rng(seed), [photograph])
    assert image.size == (photographs.WIDTH, photographs.HEIGHT)
    pixels = np.asarray(image).astype(int)
    rows, columns = np.nonzero(pixels[:, :, 0] - pixels[:, :, 1] > 60)
    for _, box in objects:
        found = (columns.min(), rows.min(), columns.max() + 1, rows.max() + 1)
        assert np.allclose(box, found, atol=2.0)


def test_boxes_of_a_mosaic_lie_in_the_image(photograph: Photograph) -> None:
    for seed in range(30):
        _, objects = augment(np.random.default_rng(seed), [photograph])
        for _, (x1, y1, x2, y2) in objects:
            assert 0 <= x1 < x2 <= photographs.WIDTH
            assert 0 <= y1 < y2 <= photographs.HEIGHT


def test_augmented_images_depend_on_their_number_alone(photograph: Photograph, tmp_path: Path) -> None:
    for folder, number in ((tmp_path / "a", 3), (tmp_path / "b", 5)):
        write_augmented([photograph], number, folder)
    first, second = ((tmp_path / name / "augmented.jsonl").read_text().splitlines() for name in "ab")
    assert [json.loads(row)["objects"] for row in first] == [json.loads(row)["objects"] for row in second[:3]]


def test_labels_go_missing_as_asked_and_one_stays() -> None:
    full = [Photograph(str(i), "x", 640, 480, (("RBC", BOX),) * 20) for i in range(100)]
    kept = [len(p.objects) for p in without_labels(full, 0.4)]
    assert 0.55 < sum(kept) / 2000 < 0.65
    assert [len(p.objects) for p in without_labels(full, 1.0)] == [1] * 100
    assert [p.objects for p in without_labels(full, 0.4)] == [p.objects for p in without_labels(full, 0.4)]


@pytest.mark.parametrize("layout", ["clone", "copy"])
def test_a_copy_of_the_data_set_is_read_as_published(tmp_path: Path, layout: str) -> None:
    names = (
        ("BCCD/JPEGImages", "BCCD/Annotations", "BCCD/ImageSets/Main")
        if layout == "clone"
        else ("images", "voc", "splits")
    )
    images, annotations, lists = (tmp_path / name for name in names)
    for folder in (images, annotations, lists):
        folder.mkdir(parents=True)
    Image.new("RGB", (640, 480)).save(images / "a.jpg")
    (annotations / "a.xml").write_text(XML.format(name="a"))
    (lists / "train.txt").write_text("a\n")
    (found,) = read_photographs(tmp_path, "train")
    assert found.objects == (("RBC", (100.0, 120.0, 220.0, 300.0)),)
    write_jsonl([found], tmp_path / "train.jsonl")
    assert json.loads((tmp_path / "train.jsonl").read_text())["width"] == 640


def test_a_folder_without_the_data_set_says_where_to_get_it(tmp_path: Path) -> None:
    with pytest.raises(DataError) as caught:
        read_photographs(tmp_path, "train")
    assert "git clone" in caught.value.remedy


def test_a_report_without_results_writes_nothing(tmp_path: Path) -> None:
    report(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_trained_models_weights_are_taken_over_by_token(tmp_path: Path) -> None:
    """The new words move the ids of all tokens after them."""
    write_model(tmp_path / "digits", SHAPES["tiny"], seed=3)
    write_model(tmp_path / "cells", SHAPES["tiny"], words=CLASSES, trained=tmp_path / "digits", seed=4)
    digits, cells = (Qwen3VLForConditionalGeneration.from_pretrained(tmp_path / name) for name in ("digits", "cells"))
    ids = [
        [processor.tokenizer.convert_tokens_to_ids(token) for token in ("<|coord_7|>", "]}", "every")]
        for processor in (AutoProcessor.from_pretrained(tmp_path / name) for name in ("digits", "cells"))
    ]
    assert ids[0] != ids[1]
    logits = [model(torch.tensor([row])).logits[0][:, row] for model, row in zip((digits, cells), ids, strict=True)]
    assert torch.equal(*logits)
