"""`training.keep_best` names a metric that evaluations have (D17): known before the run starts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from learner.doctor.model_folder import images_without_eyes, limits_of_images
from learner.records import Sample
from learner.run.best import check_kept_metric
from learner.tasks.detection.metrics import METRICS
from shared.config.model import ConfigErrors
from tests.unit.learner.config.examples import minimal, valid

EVALUATED = {"data.val": "val.jsonl", "training.eval_steps": 5}
KEY_VALUE = {"task.type": "key_value"}
REWARDED = {"reward.functions": ["mine:own"], "reward.weights": {"soft_iou": 1.0}}


@pytest.mark.parametrize(
    ("name", "keys"),
    [
        ("f1", {}),
        ("F1@0.5", {}),
        ("f1@0.75", {}),
        ("eval/f1@0.5", {}),
        (" f1@0.5", {}),
        ("drop/REASON", {}),
        ("loss", {}),
        ("reward", {}),
        ("reward/NAME", REWARDED),
        ("reward/f1", REWARDED),
        ("retain/old/f1@0.5", {}),
        ("f1@0.5", KEY_VALUE),
        ("drop/truncated", KEY_VALUE),
    ],
)
def test_a_name_that_no_evaluation_has_is_refused(name: str, keys: dict[str, Any]) -> None:
    with pytest.raises(ConfigErrors) as raised:
        check_kept_metric(valid(minimal(), {**EVALUATED, **keys, "training.keep_best": name}))
    (mistake,) = raised.value.mistakes
    assert (mistake.path, name in mistake.found) == ("training.keep_best", True)
    assert "REASON" not in mistake.wanted


@pytest.mark.parametrize(
    ("name", "keys"),
    [
        ("auto", {}),
        ("auto", KEY_VALUE),
        ("f1", KEY_VALUE),
        ("drop/blank", KEY_VALUE),
        ("coco/ap50", {}),
        ("drop/truncated", {}),
        ("reward", REWARDED),
        ("reward/own", REWARDED),
        ("reward/soft_iou", REWARDED),
        ("whatever", {"task.type": "my_tasks:Mine"}),
        *((metric, {}) for metric in METRICS),
    ],
)
def test_a_name_that_evaluations_have_is_taken(name: str, keys: dict[str, Any]) -> None:
    check_kept_metric(valid(minimal(), {**EVALUATED, **keys, "training.keep_best": name}))


@pytest.mark.parametrize("is_adapter", [False, True])
@pytest.mark.parametrize(
    ("about", "sees"),
    [
        ({"model_type": "qwen3"}, False),
        ({"model_type": "llama", "image_size": 3}, False),
        ({"model_type": "phi"}, False),
        ({"model_type": "qwen3_vl", "vision_config": {}}, True),
        ({"model_type": "qwen2_vl"}, True),
        ({"model_type": "own", "vision_tower": "clip"}, True),
    ],
)
def test_a_model_of_text_gets_no_images(about: dict[str, Any], sees: bool, is_adapter: bool, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(about))
    folder = tmp_path
    if is_adapter:
        folder = tmp_path / "adapter"
        folder.mkdir()
        (folder / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": str(tmp_path)}))
    config = valid(minimal(), {"model.path": str(folder), "model.max_pixels": 4096, "model.min_pixels": 1024})
    text = Sample(sample_id="a", messages=(), images=(), objects=(), width=0, height=0)
    image = Sample(sample_id="b", messages=(), images=("b.png",), objects=(), width=8, height=8)
    wrong = [one.path for one in (*limits_of_images(config), *images_without_eyes(config, {"data.val": [text, image]}))]
    assert wrong == ([] if sees else ["model.min_pixels", "model.max_pixels", "data.val"])
    assert images_without_eyes(config, {"data.train": [text]}) == []
    assert limits_of_images(valid(minimal(), {"model.max_pixels": 4096})) == [], "it is not on this machine"
