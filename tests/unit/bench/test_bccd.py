"""The photographs as runs read them: labels go missing as asked, a clone is found by its folders."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch
from PIL import Image
from transformers import AutoProcessor, Qwen3VLForConditionalGeneration

from bench import bccd
from bench.experiment.runner import Slot
from bench.runs import Server
from deploy.bccd.photographs import (
    AUGMENT,
    CLASSES,
    Photograph,
    read_photographs,
    without_labels,
    write_jsonl,
)
from deploy.demo.model import SHAPES
from deploy.launch import supervised
from learner.config.load import load_config
from learner.config.sections.augment import AugmentConfig, stays_upright
from learner.tiny import write_model
from shared.config.parse import write_yaml
from shared.errors import DataError

XML = """<annotation><filename>{name}.jpg</filename><size><width>640</width><height>480</height><depth>3</depth></size>
<object><name>RBC</name><difficult>0</difficult>
<bndbox><xmin>100</xmin><ymin>120</ymin><xmax>220</xmax><ymax>300</ymax></bndbox></object>
<object><name>WBC</name><difficult>0</difficult>
<bndbox><xmin>5</xmin><ymin>7</ymin><xmax>5</xmax><ymax>9</ymax></bndbox></object></annotation>"""
BOX = (200, 150, 330, 290)


def test_stage_1_begins_with_a_checkpoint_that_is_there() -> None:
    assert (bccd.TRAINED / "config.json").is_file()


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


@pytest.mark.parametrize("served", [True, False], ids=["served", "in process"])
def test_every_method_is_a_configuration_that_the_learner_takes(served: bool, tmp_path: Path) -> None:
    slot: Slot[bccd.BccdRun] = Slot(index=0, has_server=served)
    experiment = bccd.BccdExperiment(
        data=tmp_path,
        out=tmp_path / "out",
        work=tmp_path / "work",
        deadline=0.0,
        size="small",
        stage1_steps=None,
        stage1_batch=64,
        stage1_limit_s=1.0,
        steps=30,
        batch_size=32,
        learning_rate=1e-4,
        max_new_tokens=512,
        slots=[slot],
    )
    with supervised() as processes:
        if served:
            slot.server = Server(process=processes.start("x", [sys.executable, "-c", ""]), url="http://127.0.0.1:9")
        for name, method in bccd.METHODS.items():
            if served or method.stage2_ab is not bccd.AHEAD:
                one = bccd.BccdRun("missing", name, 17)
                write_yaml(tmp_path / "run.yaml", bccd._run_config(experiment, one, slot), "test")
                config = load_config(str(tmp_path / "run.yaml"), world_size=1)
                assert config.custom.trainer_variant == method.variant
                assert config.training.output_dir == str(experiment.run_dir(one))


def test_the_base_is_trained_on_augmented_photographs() -> None:
    """Cells have no orientation: flips and quarter turns apply to all of them."""
    AugmentConfig(**AUGMENT)
    assert not any(stays_upright(name) for name in CLASSES)


def test_a_report_without_results_writes_nothing(tmp_path: Path) -> None:
    bccd.report(tmp_path)
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
