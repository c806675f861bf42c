"""`quantization: fp8` and `kv_cache_dtype: fp8` are refused, with a way out, where they cannot work (R16)."""

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
from shared.quantization import check_device, check_model, keys_in_fp8, vllm_arguments

VLLM = "custom.extra.rollout_matching.vllm"
WAYS_OUT = {"quantization": "quantization: none", "kv_cache_dtype": "kv_cache_dtype: auto"}


@pytest.mark.parametrize("key", WAYS_OUT)
@pytest.mark.parametrize(("kind", "capability"), [("cpu", None), ("cuda", (8, 0)), ("cuda", (7, 5)), ("xpu", None)])
def test_devices_without_fp8_are_refused(kind: str, capability: tuple[int, int] | None, key: str) -> None:
    with pytest.raises(ConfigError, match="fp8") as refused:
        check_device(key, kind=kind, capability=capability)
    assert "8.9" in refused.value.wanted
    assert WAYS_OUT[key] in refused.value.remedy


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
    names = {"quantization", "quantization_config", "kv_cache_dtype", "calculate_kv_scales"}
    args = f"engine_args: {{{', '.join(f'{name}: x' for name in names)}}}\n"
    assert server_mistakes(tmp_path, args) == {f"engine_args.{name}" for name in names}


def test_a_server_with_its_kv_cache_in_fp8(tmp_path: Path) -> None:
    """Its weights may be in 16 bits, and rows of weights be split over devices."""
    path = tmp_path / "server.yaml"
    path.write_text("model: m\nkv_cache_dtype: fp8\ntensor_parallel_size: 2\n")
    config = load_server_config(path)
    assert (config.quantization, config.kv_cache_dtype) == ("none", "fp8")
    assert vllm_arguments(config) == {"kv_cache_dtype": "fp8"}
    assert vllm_arguments(ServerConfig(model="m")) == {}
    both = vllm_arguments(ServerConfig(model="m", quantization="fp8", kv_cache_dtype="fp8"))
    assert both == vllm_arguments(ServerConfig(model="m", quantization="fp8")) | {"kv_cache_dtype": "fp8"}
    assert server_mistakes(tmp_path, "kv_cache_dtype: fp8\ndtype: float32\n") == {"kv_cache_dtype"}
    assert server_mistakes(tmp_path, "kv_cache_dtype: fp8_e5m2\n") == {"kv_cache_dtype"}


def learner_settings(vllm: dict[str, Any], **training: Any) -> dict[str, Any]:
    rollouts = {"rollout_backend": "vllm", "vllm": vllm}
    return {
        "custom": {"trainer_variant": "rollout_matching_sft", "extra": {"rollout_matching": rollouts}},
        "model": {"path": "model"},
        "data": {"train": "train.jsonl"},
        "training": {"output_dir": "run", "max_steps": 1, "per_device_train_batch_size": 1, **training},
    }


@pytest.mark.parametrize(
    ("key", "vllm", "training", "world_size", "wanted"),
    [
        ("quantization", {}, {}, 1, "bfloat16"),
        ("kv_cache_dtype", {}, {}, 1, "bfloat16"),
        ("quantization", {}, {"bf16": True}, 4, "one device"),  # the default of tensor_parallel_size
        ("quantization", {"tensor_parallel_size": 2}, {"bf16": True}, 2, "one device"),
    ],
)
def test_the_learners_configuration(
    key: str, vllm: dict[str, Any], training: dict[str, Any], world_size: int, wanted: str
) -> None:
    with pytest.raises(ConfigErrors) as refused:
        config_of(learner_settings({key: "fp8", **vllm}, **training), world_size=world_size)
    (mistake,) = [mistake for mistake in refused.value.mistakes if mistake.path == f"{VLLM}.{key}"]
    assert wanted in mistake.wanted
    assert WAYS_OUT[key] in mistake.remedy


def test_what_works_is_taken() -> None:
    config = config_of(learner_settings({"quantization": "fp8", "kv_cache_dtype": "fp8"}, bf16=True), world_size=1)
    assert keys_in_fp8(config.rollout_matching.vllm) == ["quantization", "kv_cache_dtype"]
    split = learner_settings({"kv_cache_dtype": "fp8", "tensor_parallel_size": 2}, bf16=True)
    assert keys_in_fp8(config_of(split, world_size=2).rollout_matching.vllm) == ["kv_cache_dtype"]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a model of a tested family, of which nothing else is read before the refusal."""
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen3"}))
    return tmp_path


@pytest.mark.skipif(torch.cuda.is_available(), reason="for machines without a GPU")
@pytest.mark.parametrize("key", WAYS_OUT)
def test_engines_without_a_gpu_are_refused_before_they_start(folder: Path, key: str) -> None:
    ranks = Ranks()
    config = RolloutMatchingConfig.model_validate({"vllm": {key: "fp8"}})
    with pytest.raises(ConfigError, match="without a GPU") as refused:
        ColocatedEngine(
            config,
            model=str(folder),
            dtype=torch.bfloat16,
            ranks=ranks,
            tensor_parallel_size=1,
            offload=Offload(tuple, ranks.device),
        )
    assert f"{VLLM}.{key}" in str(refused.value)
    with pytest.raises(ConfigError, match="without a GPU"):
        VllmEngine(ServerConfig.model_validate({"model": str(folder), key: "fp8"}))
