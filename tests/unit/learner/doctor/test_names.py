"""Names in `model` that the model does not have, found without its weights."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from learner.config.sections.model import ModelConfig
from learner.doctor.check import check_machine, run_check
from learner.doctor.model_folder import adapter_on_tied
from learner.doctor.names import names_that_are_wrong
from shared.config.parse import dump_yaml
from tests.tiers import slow
from tests.unit.learner.config.examples import changed, minimal, valid
from tests.unit.learner.data.annotations import FINE, jsonl


def wrong(path: Path, **fields: Any) -> dict[str, str]:
    mistakes = names_that_are_wrong(ModelConfig.model_validate({"path": str(path), **fields}))
    return {mistake.path: f"{mistake.found}; {mistake.wanted}" for mistake in mistakes}


@pytest.mark.parametrize(
    ("freeze", "near"),
    [
        ("visual.", "model.visual."),
        ("model.langage_model.", "model.language_model."),
        ("model.visal.", "model.visual."),
    ],
)
def test_a_prefix_that_names_nothing_is_named_with_near_ones(tiny_vlm: Path, freeze: str, near: str) -> None:
    found = wrong(tiny_vlm, freeze=["model.visual.", freeze])
    assert list(found) == ["model.freeze"]
    assert repr(freeze) in found["model.freeze"]
    assert near in found["model.freeze"].partition("near: ")[2]
    assert "'model.visual.'" not in found["model.freeze"].partition("(near")[0], "this one is right"


def test_a_layer_that_does_not_exist_is_named_though_another_does(tiny_vlm: Path) -> None:
    """peft says nothing as long as one of the names matches."""
    found = wrong(tiny_vlm, lora={"target_modules": ["q_proj", "o_prj"]})
    assert list(found) == ["model.lora.target_modules"]
    assert "'o_prj' (near: o_proj" in found["model.lora.target_modules"]
    assert wrong(tiny_vlm, lora={"target_modules": "no.*such"}).keys() == {"model.lora.target_modules"}


@pytest.mark.parametrize(
    "name", [slow("lm_head"), "embed_tokens", r".*(lm_head|q_proj)", slow("model.language_model.embed_tokens")]
)
def test_an_adapter_on_tied_weights_is_refused(tiny_vlm: Path, name: str) -> None:
    """An export or a sync of what it learned is not possible, so a run does not begin."""
    modules: Any = name if name.startswith(".") else [name, "q_proj"]
    for tied in (True, False):
        content = json.loads((tiny_vlm / "config.json").read_text())
        content["tie_word_embeddings"] = content["text_config"]["tie_word_embeddings"] = tied
        folder = tiny_vlm.parent / f"tied-{tied}-{abs(hash(name))}"
        shutil.copytree(tiny_vlm, folder)
        (folder / "config.json").write_text(json.dumps(content))
        found = wrong(folder, lora={"target_modules": modules})
        assert found.keys() == ({"model.lora.target_modules"} if tied else set())
        config = valid(minimal(), {"model.path": str(folder), "model.lora": {"target_modules": modules}})
        assert [one.path for one in adapter_on_tied(config)] == list(found)


def test_all_that_is_wrong_is_listed(tiny_text: Path) -> None:
    found = wrong(tiny_text, lora={"target_modules": ["x_proj"]}, freeze=["model.visual."], max_pixels=50_000)
    assert set(found) == {"model.lora.target_modules", "model.freeze", "model.max_pixels"}


@pytest.mark.parametrize("limit", ["max_pixels", "min_pixels"])
def test_a_limit_of_pixels_needs_a_model_that_sees(tiny_text: Path, tiny_vlm: Path, limit: str) -> None:
    assert set(wrong(tiny_text, **{limit: 50_000})) == {f"model.{limit}"}
    assert wrong(tiny_vlm, **{limit: 50_000}) == {}


def test_what_is_right_is_right_here_too(tiny_vlm: Path) -> None:
    for lora in (None, {}, {"target_modules": ["q_proj", "mlp.down_proj"]}, {"target_modules": ".*o_proj"}):
        assert wrong(tiny_vlm, lora=lora, freeze=["model.visual."]) == {}


def test_a_folder_that_is_no_model_is_a_mistake(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{")
    assert set(wrong(tmp_path)) == {"model.path"}


def test_check_says_it_with_probe_and_with_machine(
    tiny_text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    changes = {"model.path": str(tiny_text), "model.freeze": ["model.visual."], "custom.trainer_variant": "sft"}
    data = changed(minimal(), changes | {"data.train": str(jsonl(tmp_path, FINE))})
    del data["custom"]["extra"]
    path = str(tmp_path / "run.yaml")
    Path(path).write_text(dump_yaml(data))
    assert run_check(path, probe=True) == 2
    assert "model.freeze" in capsys.readouterr().err
    assert run_check(path) == 0
    capsys.readouterr()
    assert check_machine(path, world_size=1, environment={}) == 2
    assert "wrong: model.freeze: found" in capsys.readouterr().out
