"""Tests of which families of models are taken (R16): by `rollout-learner check`, when a learner loads its model, and by
a server before its engine starts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from bench.tiny_models import FAMILIES, MORE_FAMILIES
from learner.config.sections.model import ModelConfig
from learner.policy.load import load_policy
from rollout_server.config import ServerConfig, load_server_config
from rollout_server.engine import VllmEngine
from shared.config.model import ConfigErrors
from shared.errors import ConfigError
from shared.families import KNOWN_NOT_TO_WORK, TESTED, check_family, check_folder


def checkpoint(folder: Path, family: str) -> str:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps({"model_type": family}))
    return str(folder)


def test_every_tested_family_can_be_built_and_tested_again() -> None:
    assert set(TESTED) <= {*FAMILIES, *MORE_FAMILIES}
    assert not set(TESTED) & set(KNOWN_NOT_TO_WORK)


def test_the_results_are_there() -> None:
    """`bench.families` said so; the families of the integration tests are tested there."""
    (results,) = (Path(__file__).parents[3] / "bench/results").glob("families-*.json")
    families = json.loads(results.read_text())["families"]
    assert {name for name, entry in families.items() if entry["agrees"]} >= set(TESTED) - set(FAMILIES)


def test_an_untested_family_needs_permission_and_a_wrong_one_has_none() -> None:
    for name in TESTED:
        check_family({"model_type": name}, key="model", allow_untested=False)
    check_family({"model_type": "qwen3_moe"}, key="model", allow_untested=True)
    with pytest.raises(ConfigError, match="allow_untested_family"):
        check_family({"model_type": "qwen3_moe"}, key="model", allow_untested=False)
    for allowed in (True, False):
        with pytest.raises(ConfigError, match=r"llava.*image_grid_thw") as wrong:
            check_family({"model_type": "llava"}, key="model.path", allow_untested=allowed)
        assert "allow_untested_family" not in wrong.value.remedy


def test_an_adapter_has_the_family_of_its_base(tmp_path: Path) -> None:
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    base = checkpoint(tmp_path / "base", "llava")
    (adapter / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": base}))
    with pytest.raises(ConfigError, match="llava"):
        check_folder(str(adapter), key="model.path", allow_untested=False)
    check_folder("some/name-on-the-hub", key="model.path", allow_untested=False)


@pytest.mark.parametrize("path", ["/no/model", "./model", "../model", "~/model", "a/b/c"])
def test_a_model_that_is_not_there_is_not_looked_for_on_the_hub(path: str) -> None:
    with pytest.raises(ConfigError) as checked:
        check_folder(path, key="model", allow_untested=False)
    assert path in checked.value.found
    assert checked.value.remedy
    with pytest.raises(ConfigError) as loaded:
        load_policy(ModelConfig(path=path), device=torch.device("cpu"))
    assert loaded.value.what.startswith("model.path: ")


@pytest.mark.parametrize("there", ["", "checkpoint-7/config.json", "checkpoint-7/adapter_config.json"])
def test_a_folder_without_a_model_is_none(tmp_path: Path, there: str) -> None:
    """A run's folder names its checkpoints."""
    if there:
        (tmp_path / there).parent.mkdir()
        (tmp_path / there).write_text("{}")
    with pytest.raises(ConfigError) as caught:
        check_folder(str(tmp_path), key="model.path", allow_untested=False)
    assert caught.value.what.startswith("model.path: ")
    assert "config.json" in caught.value.found
    assert ("checkpoint-7" in caught.value.remedy) is bool(there)


def test_both_programs_refuse_it_before_they_load_anything(tmp_path: Path) -> None:
    path = checkpoint(tmp_path, "llava")
    with pytest.raises(ConfigError, match="llava"):
        load_policy(ModelConfig(path=path), device=torch.device("cpu"))
    with pytest.raises(ConfigError, match="llava"):
        VllmEngine(ServerConfig(model=path))
    file = tmp_path / "server.yaml"
    file.write_text(f"model: {path}\n")
    with pytest.raises(ConfigErrors, match="llava"):
        load_server_config(file)
