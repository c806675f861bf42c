"""Whole runs with `rollout_backend: hf`: everything of the learner is real, and there is no server (R02, R10, R11)."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from learner.__main__ import main
from learner.config.load import config_of
from learner.config.schema import RunConfig
from learner.policy.parallel import Ranks
from learner.rollout.hf import HfBackend
from tests.tiers import slow
from tests.unit.learner.trainer_world import Seen, make_config, run, trainer

ROLLOUTS = "rollout_matching_sft"


def hf_config(
    model: Path, folder: Path, *, variant: str = ROLLOUTS, b_ratio: float | None = None, **training: Any
) -> RunConfig:
    folder.mkdir()
    settings = make_config(model, folder, variant="sft", **training).model_dump()
    settings["custom"]["trainer_variant"] = variant
    settings["custom"]["extra"]["rollout_matching"] = {
        "rollout_backend": "hf",
        "decode_batch_size": 3,
        "decoding": {"temperature": 1.0, "max_new_tokens": 16},
    }
    if b_ratio is not None:
        settings["stage2_ab"] = {"schedule": {"b_ratio": b_ratio}}
    return config_of(settings)


def events(config: RunConfig, event: str) -> list[dict[str, Any]]:
    lines = Path(config.training.output_dir, "metrics.jsonl").read_text().splitlines()
    return [record for record in map(json.loads, lines) if record["event"] == event]


def test_rollouts_are_made_by_the_present_weights(
    tiny_text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """R10: without a sync; each step's and each evaluation's version is the number of updates behind the weights."""
    config = hf_config(
        tiny_text, tmp_path / "a", max_steps=3, effective_batch_size=2, eval_on_start=True, eval_on_end=True
    )
    with trainer(config, Ranks(), monkeypatch, seen := Seen()) as made:
        assert isinstance(made.evaluations.backend, HfBackend)
        assert not made.syncs.waits
        made.run()
    assert len(seen.learned) == 6
    steps, calls = events(config, "step"), events(config, "rollout_call")
    assert [(step["global_step"], step["ver"]) for step in steps] == [(1, 0), (2, 1), (3, 2)]
    assert [call["ver"] for call in calls] == [0, 0, 1, 2, 3]
    assert [call["num_micro_steps"] for call in calls[1:-1]] == [2, 2, 2], "a step's rollouts are made at once"
    scenes = Path(config.training.output_dir, "eval", "step_000003.jsonl").read_text().splitlines()
    assert {json.loads(scene)["ver"] for scene in scenes} == {3}
    assert not events(config, "sync")


@pytest.mark.slow
def test_two_ranks_generate_what_one_would(tiny_text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """R11 R24: each rank generates for its own samples; rollouts, and so gradients, do not depend on the ranks."""
    options = {"max_steps": 1, "effective_batch_size": 4}
    one, two = (
        hf_config(tiny_text, tmp_path / name, per_device_train_batch_size=size, **options)
        for name, size in (("1", 4), ("2", 2))
    )
    (alone,) = run(one, monkeypatch)
    ranks = run(two, monkeypatch, world_size=2)
    assert sorted(alone.learned) == sorted(ranks[0].learned + ranks[1].learned)
    for name, gradient in alone.gradients[0].items():
        for rank in ranks:
            torch.testing.assert_close(rank.gradients[0][name], gradient, atol=1e-5, rtol=1e-3)


def test_scheduled_channels_without_a_server(tiny_text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """R26 R31: `stage2_ab_training` runs too, where rows are not packed (nothing to overlap)."""
    config = hf_config(
        tiny_text,
        tmp_path / "ab",
        variant="stage2_ab_training",
        b_ratio=0.5,
        max_steps=2,
        effective_batch_size=4,
        packing=False,
    )
    (seen,) = run(config, monkeypatch)
    assert Counter(step["channel"] for step in events(config, "step")) == {"A": 1, "B": 1}
    assert len(seen.learned) == 8


def pages(folder: Path) -> Path:
    """Two records of two images each: the box is in the red one, which is the first of one record and the second of the
    other."""
    for color in ("red", "blue"):
        Image.new("RGB", (64, 64), color).save(folder / f"{color}.png")
    rows = [
        {
            "id": "-".join(colors),
            "messages": [{"role": "user", "content": "<image><image>Detect every digit."}],
            "images": [f"{color}.png" for color in colors],
            "objects": [{"desc": "seven", "image": colors.index("red") + 1, "bbox_2d": [8, 8, 40, 56]}],
        }
        for colors in (("red", "blue"), ("blue", "red"))
    ]
    (folder / "pages.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder / "pages.jsonl"


@pytest.mark.parametrize("variant", [slow("sft"), ROLLOUTS])
def test_records_of_several_images_are_learned(
    tiny_vlm: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, variant: str
) -> None:
    """After some steps of `sft` the answers name the image in which the box is, also those that `predict` asks for."""
    steps = 30 if variant == "sft" else 2
    options: dict[str, Any] = {"max_steps": steps, "effective_batch_size": 2, "learning_rate": 5e-3}
    options["save_on_end"] = variant == "sft"
    settings = hf_config(tiny_vlm, tmp_path / "run", variant=variant, eval_on_end=True, **options).model_dump()
    settings["data"] |= {name: str(pages(tmp_path)) for name in ("train", "test")}
    settings["custom"]["extra"]["rollout_matching"]["decoding"]["max_new_tokens"] = 64
    config = config_of(settings)
    (seen,) = run(config, monkeypatch)
    assert len(seen.learned) == 2 * steps
    lines = Path(config.training.output_dir, "eval", f"step_{steps:06d}.jsonl").read_text().splitlines()
    scenes = [json.loads(line) for line in lines]
    assert [[one["image"] for one in scene["truth"]] for scene in scenes] == [[1], [2]]
    assert all(scene["sizes"] == [[64, 64], [64, 64]] for scene in scenes)
    if variant == "sft":
        assert [[one["image"] for one in scene["predictions"]] for scene in scenes] == [[1], [2]]
        assert events(config, "eval")[-1]["metrics"]["f1@0.5"] == 1.0
        out, model = tmp_path / "out", config.training.output_dir
        asked = [str(tmp_path / "pages.jsonl"), "--backend", "hf", "--conf", "0"]
        assert main(["predict", "--model", str(model), "--out", str(out), *asked]) == 0
        rows = json.loads((out / "predictions.json").read_text())
        assert [(row["image_id"], row["file_name"]) for row in rows] == [
            ("red-blue#1", "red.png"),
            ("blue-red#2", "red.png"),
        ]
        assert all(abs(a - b) < 3 for row in rows for a, b in zip(row["bbox"], [8, 8, 32, 48], strict=True))
        assert len(list((out / "pictures").iterdir())) == 4
