"""The memory estimate: its parameters against real models, and its figures against measured ones."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import (
    Qwen3VLConfig,
    Qwen3VLForConditionalGeneration,
    Qwen3VLMoeConfig,
    Qwen3VLMoeForConditionalGeneration,
)

from bench.tiny_models import build_llama, build_qwen2, build_qwen2_5_vl, build_qwen2_vl
from learner.config import memory
from learner.config.load import config_of
from learner.config.memory import GIB, Use, engine_share, estimate, memory_in_words, memory_report, shape_of
from learner.policy.loss import LOGITS_CHUNK
from tests.unit.learner.config.examples import ROLLOUT, changed, minimal
from tests.unit.learner.config.model_sizes import MEASURED, MODELS, RANK, TEXT_4B

ROOT = Path(__file__).parents[4]
COLOCATED = {f"{ROLLOUT}.vllm": {"mode": "colocate", "gpu_memory_utilization": 0.3}}
USE = Use(row_tokens=4096)


def test_the_estimate_is_near_every_measured_figure() -> None:
    """15%: what FILLED leaves free, and a little more below."""
    assert {one.what: round(one.error, 2) for one in MEASURED if abs(one.error) > 0.15} == {}
    for one in MEASURED:
        assert one.gib <= one.estimated / memory.FILLED, "a run that is said to fit does"


def test_measured_figures_are_those_of_the_results() -> None:
    race = json.loads((ROOT / "bench/results/gpu-race-2026-11-24.json").read_text())
    photographs = json.loads((ROOT / "bench/results/photographs-4B-2026-11-22.json").read_text())
    found = {race["sides"][0]["gpu"]["memory_mib"]}
    found |= {run["gpus"]["1"]["memory_mib"] for run in photographs["runs"]}
    used = {one.gib * 1024 for one in MEASURED if not one.allocated}
    assert used <= found
    learning = json.loads((ROOT / "bench/results/gpu-learning-2026-11-21.json").read_text())
    peaks = {round(f["value"]) for f in learning["figures"] if f["name"].endswith("peak memory")}
    assert {one.gib for one in MEASURED if one.allocated} <= peaks


def test_what_a_run_needs_is_near_what_it_took_on_cards_of_every_size() -> None:
    """bench.cards: used memory of each run that fits, within 10%. The engine had its weights and 2.5 GiB."""
    cards = json.loads((ROOT / "bench/results/gpu-cards-2026-11-28.json").read_text())
    off = {}
    for one in cards["list"]:
        name = f"{one['size']} {one['method']}, {'whole model' if one['whole_model'] else 'LoRA'}"
        name += "" if one["memory"] == "shared" else f", {one['memory']}"
        used = [case["used_gib"] for case in cards["settings"].get(name, {}).values() if case["fits"]]
        if not used:
            continue
        shape = shape_of(MODELS[one["size"]])
        learning = estimate(shape, replace(USE, lora_rank=None if one["whole_model"] else 64))
        settings: dict[str, Any] = {}
        if one["method"] == "grpo":
            share = (learning.weights + 2.5 * GIB) / (139.8 * GIB)
            offload = one["memory"] == "offload"
            settings[f"{ROLLOUT}.vllm"] = {"mode": "colocate", "gpu_memory_utilization": share}
            settings[f"{ROLLOUT}.offload"] = {
                "enabled": offload,
                "offload_model": offload,
                "offload_optimizer": offload,
            }
        needed = memory.needed_bytes(config_of(changed(minimal(), settings)), learning, int(139.8 * GIB)) / GIB
        off[name] = [round(needed / gib - 1, 3) for gib in used]
    assert len(off) >= 9
    assert {name: errors for name, errors in off.items() if max(map(abs, errors)) > 0.1} == {}


def test_parameters_are_those_of_the_model_that_was_measured() -> None:
    """4.44e9 and 4.02e9 by torch's count (bench/README.md)."""
    assert shape_of(MODELS["4B"]).num_parameters == pytest.approx(4.44e9, rel=0.005)
    assert shape_of(TEXT_4B).num_parameters == pytest.approx(4.02e9, rel=0.005)


@pytest.mark.parametrize("name", MODELS)
def test_parameters_are_those_that_torch_counts(name: str) -> None:
    """Nothing is allocated on the meta device. Norms, biases and position embeddings are left out: 1%."""
    mixture = "num_experts" in MODELS[name]["text_config"]
    config_class, model_class = (
        (Qwen3VLMoeConfig, Qwen3VLMoeForConditionalGeneration)
        if mixture
        else (Qwen3VLConfig, Qwen3VLForConditionalGeneration)
    )
    config = json.loads(json.dumps(MODELS[name]))
    config["vision_config"]["out_hidden_size"] = config["text_config"]["hidden_size"]
    with torch.device("meta"):
        model = model_class(config_class(**config))
    counted = sum(p.numel() for p in {id(p): p for p in model.parameters()}.values())
    assert shape_of(MODELS[name]).num_parameters == pytest.approx(counted, rel=0.01)
    saved = json.loads(model.config.to_json_string(use_diff=False))
    assert shape_of(saved) == shape_of(MODELS[name])


@pytest.mark.parametrize("build", [build_qwen2, build_llama, build_qwen2_vl, build_qwen2_5_vl])
def test_every_family_has_a_shape(build: Callable[[Path], None], tmp_path: Path) -> None:
    """Biases and patch embeddings are up to a tenth of models this small."""
    build(tmp_path)
    shape = shape_of(json.loads((tmp_path / "config.json").read_text()))
    sizes = [parameters_in(file) for file in tmp_path.glob("*.safetensors")]
    assert shape.num_parameters == pytest.approx(sum(sizes), rel=0.15)


def parameters_in(file: Path) -> int:
    return sum(tensor.numel() for tensor in load_file(file).values())


def test_the_logits_chunk_is_that_of_the_loss() -> None:
    assert memory.LOGITS_CHUNK == LOGITS_CHUNK


@pytest.mark.parametrize("name", MODELS)
def test_what_saves_memory_saves_it(name: str) -> None:
    shape = shape_of(MODELS[name])
    most = estimate(shape, replace(USE, checkpointing=False, weight_bytes=4))
    for change in (
        {"checkpointing": True},
        {"weight_bytes": 2},
        {"lora_rank": RANK},
        {"parts": 8},
        {"row_tokens": 512},
    ):
        assert estimate(shape, replace(USE, **{"checkpointing": False, "weight_bytes": 4, **change})).total < most.total
    frozen = estimate(shape, replace(USE, vision_trained=False))
    assert estimate(shape, USE).moments - frozen.moments == 2 * 2 * shape.vision_parameters


def test_a_run_is_estimated_by_its_configuration(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(MODELS["4B"]))
    local: dict[str, Any] = {"model.path": str(tmp_path), "global_max_length": 16_384, "model.dtype": "bfloat16"}
    local |= {"model.gradient_checkpointing": True, "training.bf16": True}
    whole = memory.of_run(config_of(changed(minimal(), local)), 1)
    assert whole == estimate(shape_of(MODELS["4B"]), Use(row_tokens=16_384))
    lora = memory.of_run(config_of(changed(minimal(), local | {"model.lora": {"r": RANK}})), 1)
    assert lora == estimate(shape_of(MODELS["4B"]), Use(row_tokens=16_384, lora_rank=RANK))
    sharded = memory.of_run(config_of(changed(minimal(), local | {"model.sharding": "fsdp"})), 4)
    assert sharded == estimate(shape_of(MODELS["4B"]), Use(row_tokens=16_384, parts=4, compiled=False))


def test_an_adapter_has_the_shape_of_its_base(tmp_path: Path) -> None:
    base, adapter = tmp_path / "base", tmp_path / "adapter"
    for folder in (base, adapter):
        folder.mkdir()
    (base / "config.json").write_text(json.dumps(MODELS["2B"]))
    (adapter / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": str(base)}))
    both = [memory.of_run(config_of(changed(minimal(), {"model.path": str(path)})), 1) for path in (base, adapter)]
    assert both[0] is not None
    assert both[0] == both[1]


@pytest.mark.parametrize("text", [None, "", "[]", "{}", '{"text_config": 3}', '{"hidden_size": "wide"}'])
def test_a_model_that_is_not_here_has_no_estimate(tmp_path: Path, text: str | None) -> None:
    if text is not None:
        (tmp_path / "config.json").write_text(text)
    config = config_of(changed(minimal(), {"model.path": str(tmp_path)}))
    assert memory_report(config, 1) == {}
    assert "model.path" in memory_in_words({}, 16_384)


def test_the_engine_beside_it_is_named(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(MODELS["2B"]))
    config = config_of(changed(minimal(), {**COLOCATED, "model.path": str(tmp_path)}))
    report = memory_report(config, 1)
    assert (engine_share(config), report["engine_share"]) == (0.3, 0.3)
    assert "30%" in memory_in_words(report, config.global_max_length)
    found = memory.of_run(config, 1)
    assert found is not None
    assert report["memory_gib"]["total"] == pytest.approx(found.total / GIB, abs=0.05)
