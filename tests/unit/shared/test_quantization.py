"""`quantization: fp8` is refused, with a way out, where it cannot work (R16)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from learner.config.load import config_of
from learner.config.sections.rollout_matching import RolloutMatchingConfig
from learner.policy.offload import Offload
from learner.policy.parallel import Ranks
from learner.rollout.colocated_engine import ColocatedEngine
from rollout_server.config import ServerConfig, load_server_config
from rollout_server.engine import VllmEngine
from shared.config.model import ConfigErrors
from shared.errors import ConfigError
from shared.families import TESTED
from shared.quantization import check_device, check_model

KEY = "custom.extra.rollout_matching.vllm.quantization"


@pytest.mark.parametrize(("kind", "capability"), [("cpu", None), ("cuda", (8, 0)), ("cuda", (7, 5)), ("xpu", None)])
def test_devices_without_fp8_are_refused(kind: str, capability: tuple[int, int] | None) -> None:
    with pytest.raises(ConfigError, match="fp8") as refused:
        check_device("quantization", kind=kind, capability=capability)
    assert "8.9" in refused.value.wanted
    assert "quantization: none" in refused.value.remedy


@pytest.mark.parametrize("capability", [(8, 9), (9, 0), (10, 0), (12, 0)])
def test_newer_gpus_are_taken(capability: tuple[int, int]) -> None:
    check_device("quantization", kind="cuda", capability=capability)


def test_only_tested_families_are_taken(tmp_path: Path) -> None:
    """It is not known which layers of others vLLM quantises."""
    for family in TESTED:
        (tmp_path / "config.json").write_text(json.dumps({"model_type": family}))
        check_model("quantization", str(tmp_path))
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen3_moe"}))
    with pytest.raises(ConfigError, match="qwen3_moe"):
        check_model("quantization", str(tmp_path))


def server_mistakes(folder: Path, text: str) -> set[str]:
    path = folder / "server.yaml"
    path.write_text(f"model: m\n{text}")
    with pytest.raises(ConfigErrors) as refused:
        load_server_config(path)
    return {mistake.path for mistake in refused.value.mistakes}


def test_the_servers_configuration(tmp_path: Path) -> None:
    path = tmp_path / "server.yaml"
    path.write_text("model: m\nquantization: fp8\n")
    assert load_server_config(path).quantization == "fp8"
    assert ServerConfig(model="m").quantization == "none"
    assert server_mistakes(tmp_path, "quantization: fp9\n") == {"quantization"}
    assert server_mistakes(tmp_path, "quantization: fp8\ntensor_parallel_size: 2\n") == {"quantization"}
    assert server_mistakes(tmp_path, "quantization: fp8\ndtype: float32\n") == {"quantization"}
    args = "engine_args: {quantization: awq, quantization_config: {}}\n"
    assert server_mistakes(tmp_path, args) == {"engine_args.quantization", "engine_args.quantization_config"}


def learner_settings(vllm: dict[str, Any], **training: Any) -> dict[str, Any]:
    rollouts = {"rollout_backend": "vllm", "vllm": {"quantization": "fp8", **vllm}}
    return {
        "custom": {"trainer_variant": "rollout_matching_sft", "extra": {"rollout_matching": rollouts}},
        "model": {"path": "model"},
        "data": {"train": "train.jsonl"},
        "training": {"output_dir": "run", "max_steps": 1, "per_device_train_batch_size": 1, **training},
    }


@pytest.mark.parametrize(
    ("vllm", "training", "world_size", "wanted"),
    [
        ({}, {}, 1, "bfloat16"),
        ({}, {"bf16": True}, 4, "one device"),  # the default of tensor_parallel_size
        ({"tensor_parallel_size": 2}, {"bf16": True}, 2, "one device"),
    ],
)
def test_the_learners_configuration(
    vllm: dict[str, Any], training: dict[str, Any], world_size: int, wanted: str
) -> None:
    with pytest.raises(ConfigErrors) as refused:
        config_of(learner_settings(vllm, **training), world_size=world_size)
    (mistake,) = [mistake for mistake in refused.value.mistakes if mistake.path == KEY]
    assert wanted in mistake.wanted
    assert "quantization: none" in mistake.remedy


def test_what_works_is_taken() -> None:
    config = config_of(learner_settings({}, bf16=True), world_size=1)
    assert config.rollout_matching.vllm.quantization == "fp8"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a model of a tested family, of which nothing else is read before the refusal."""
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen3"}))
    return tmp_path


@pytest.mark.skipif(torch.cuda.is_available(), reason="for machines without a GPU")
def test_engines_without_a_gpu_are_refused_before_they_start(folder: Path) -> None:
    ranks = Ranks()
    config = RolloutMatchingConfig.model_validate({"vllm": {"quantization": "fp8"}})
    with pytest.raises(ConfigError, match="without a GPU") as refused:
        ColocatedEngine(
            config,
            model=str(folder),
            dtype=torch.bfloat16,
            ranks=ranks,
            tensor_parallel_size=1,
            offload=Offload(tuple, ranks.device),
        )
    assert KEY in str(refused.value)
    with pytest.raises(ConfigError, match="without a GPU"):
        VllmEngine(ServerConfig(model=str(folder), quantization="fp8"))
