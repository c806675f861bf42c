"""The configurations of the recipe's stages are those of ordinary runs (R49)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from learner.config.load import config_of, load_config
from learner.config.plan import resolve
from learner.config.schema import RunConfig
from learner.recipe.stages import check_recipe, grpo_stage, matching_stage, sft_stage
from shared.config.model import ConfigErrors
from shared.config.parse import write_yaml

FILES = {"train": "train.jsonl", "val": "val.jsonl", "test": "test.jsonl"}


def config(world_size: int = 1, **sections: Any) -> RunConfig:
    """Return the configuration as the command reads it."""
    values: dict[str, Any] = {
        "model": {"path": "model"},
        "data": FILES,
        "training": {"output_dir": "out", "max_steps": 9, "learning_rate": 1e-4, "effective_batch_size": 12},
        "custom": {"trainer_variant": "sft"},
    }
    for name, value in sections.items():
        values[name] = {**values.get(name, {}), **value}
    values["training"]["eval_on_start"] = True
    extra = values["custom"].get("extra", {"rollout_matching": {}})["rollout_matching"]
    values["custom"]["extra"] = {"rollout_matching": {"rollout_backend": "hf", **extra}}
    return config_of(values, world_size=world_size)


def written(folder: Path, values: dict[str, Any], world_size: int = 1) -> RunConfig:
    """Return the configuration as the recipe reads it: through the file. Rules that it breaks would be raised here."""
    path = folder / "stage.yaml"
    write_yaml(path, values, "test")
    return load_config(path, world_size=world_size)


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_run_of_sft_gives_both_stages(tmp_path: Path, world_size: int) -> None:
    user = config(world_size)
    sft = written(tmp_path, sft_stage(user, world_size=world_size, minutes=3.0), world_size)
    grpo = written(
        tmp_path, grpo_stage(user, world_size=world_size, minutes=2.0, model=tmp_path, completes=True), world_size
    )
    assert (sft.custom.trainer_variant, grpo.custom.trainer_variant) == ("sft", "grpo")
    assert (sft.training.output_dir, grpo.training.output_dir) == ("out/sft", "out/grpo")
    assert (sft.training.max_minutes, grpo.training.max_minutes) == (3.0, 2.0)
    assert (sft.model.path, grpo.model.path) == ("model", str(tmp_path))
    assert (sft.labels.complete, grpo.labels.complete) == (grpo.labels.complete, sft.labels.complete)
    assert sft.labels.complete is not None
    assert sft.training.keep_best == grpo.training.keep_best == "auto"
    assert sft.data.test is grpo.data.test is None, "nothing is chosen by the test split"
    assert (sft.training.learning_rate, grpo.training.learning_rate) == (1e-4, pytest.approx(3e-5))
    assert resolve(sft, world_size).effective_batch_size == 12
    assert resolve(grpo, world_size).effective_batch_size == 6 * 8, "half of the samples, 8 rollouts of each"
    assert grpo.grpo.credit == "object"
    assert grpo.rollout_matching.decoding.temperature == 1.0


def test_a_run_of_grpo_keeps_its_own_settings(tmp_path: Path) -> None:
    training = {"per_device_train_batch_size": 8, "effective_batch_size": 32, "learning_rate": 3e-5, "eval_steps": 3}
    training |= {"early_stop_patience": 7, "save_steps": 2, "keep_best": "f1@miou"}
    user = config(
        2,
        training=training,
        grpo={"num_generations": 4, "credit": "sequence", "kl_weight": 0.0},
        custom={"trainer_variant": "grpo", "extra": {"rollout_matching": {"decoding": {"temperature": 1.0}}}},
        labels={"complete": {"rollouts": 6, "write": "completed.jsonl"}},
    )
    sft = written(tmp_path, sft_stage(user, world_size=2, minutes=1.0), 2)
    grpo = written(tmp_path, grpo_stage(user, world_size=2, minutes=1.0, model=None, completes=True), 2)
    assert resolve(sft, 2).effective_batch_size == 8
    assert sft.training.learning_rate == pytest.approx(1e-4)
    assert (grpo.grpo, grpo.training.effective_batch_size) == (user.grpo, 32)
    assert grpo.training.learning_rate == 3e-5
    assert grpo.model.path == "model"
    assert sft.labels.complete == user.labels.complete
    assert grpo.labels.complete is not None
    assert (grpo.labels.complete.rollouts, grpo.labels.complete.write) == (6, None), "the file is written once"
    for stage in (sft.training, grpo.training):
        assert (stage.eval_steps, stage.early_stop_patience, stage.keep_best) == (3, 7, "f1@miou")
        assert (stage.save_steps, stage.save_minutes) == (2, None)


def test_labels_are_completed_again_only_where_it_was_safe(tmp_path: Path) -> None:
    values = grpo_stage(config(), world_size=1, minutes=1.0, model=None, completes=False)
    assert written(tmp_path, values).labels.complete is None


def test_what_only_other_variants_take_is_left_out(tmp_path: Path) -> None:
    buffer = {"rollout_buffer": {"enabled": True, "m_steps": 2}, "decoding": {"temperature": 0.7, "top_p": 0.9}}
    user = config(
        custom={"trainer_variant": "rollout_matching_sft", "extra": {"rollout_matching": buffer}},
        loss={"keep_unmatched": True, "prefix_end": "first_miss"},
    )
    for values in (
        sft_stage(user, world_size=1, minutes=1.0),
        grpo_stage(user, world_size=1, minutes=1.0, model=None, completes=False),
    ):
        assert written(tmp_path, values).rollout_matching.rollout_buffer is None


@pytest.mark.parametrize("variant", ["sft", "grpo"])
def test_rollout_matching_has_the_samples_and_the_rate_of_sft(tmp_path: Path, variant: str) -> None:
    """It learns the annotated labels, and keeps what it finds beside them, whatever the user's loss is."""
    user = config(labels={"complete": {}}, data={"augment": {}})
    if variant == "grpo":
        decoding = {"rollout_matching": {"decoding": {"temperature": 1.0}}}
        sizes = {"effective_batch_size": 48, "per_device_train_batch_size": 8}
        user = config(custom={"trainer_variant": variant, "extra": decoding}, training=sizes)
    sft = written(tmp_path, sft_stage(user, world_size=1, minutes=1.0))
    matching = written(tmp_path, matching_stage(user, world_size=1, minutes=2.0))
    assert matching.custom.trainer_variant == "rollout_matching_sft"
    assert matching.training.learning_rate == sft.training.learning_rate
    assert resolve(matching, 1).effective_batch_size == resolve(sft, 1).effective_batch_size
    assert matching.loss.keep_unmatched
    assert matching.labels.complete is matching.data.augment is None
    assert matching.model.path == "model"


@pytest.mark.parametrize("rollouts", [False, True])
def test_what_grpo_does_not_take_is_left_out_of_its_stage(tmp_path: Path, rollouts: bool) -> None:
    """With `rollouts: false`, rollouts see photographs as they are."""
    user = config(data={"augment": {"rollouts": rollouts}})
    sft = written(tmp_path, sft_stage(user, world_size=1, minutes=1.0))
    assert sft.data.augment == user.data.augment
    grpo = written(tmp_path, grpo_stage(user, world_size=1, minutes=1.0, model=None, completes=False))
    assert grpo.data.augment == (user.data.augment if rollouts else None)


def test_an_adapter_goes_on_being_trained(tmp_path: Path) -> None:
    """LoRA: the best weights of `sft` are an adapter's folder, which brings its base along."""
    (tmp_path / "adapter_config.json").write_text("{}")
    values = grpo_stage(
        config(model={"path": "model", "lora": {"r": 4}}), world_size=1, minutes=1.0, model=tmp_path, completes=False
    )
    assert written(tmp_path, values).model.lora is None


@pytest.mark.parametrize(
    ("sections", "path"),
    [
        ({"data": {"val": None}}, "data.val"),
        ({"task": {"type": "key_value"}}, "task.type"),
        ({"training": {"resume_from_checkpoint": "latest"}}, "training.resume_from_checkpoint"),
    ],
)
def test_what_does_not_suit_a_recipe_is_refused(sections: dict[str, Any], path: str) -> None:
    with pytest.raises(ConfigErrors) as caught:
        check_recipe(config(**sections))
    (mistake,) = caught.value.mistakes
    assert mistake.path == path
    assert mistake.wanted
    assert mistake.remedy
