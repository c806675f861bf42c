"""Tests of what an adapter must be before it replaces the served one (R08, R09); without vLLM, whose layers only have
names."""

from __future__ import annotations

import contextlib
import sys
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from shared.errors import CoverageError, ProjectError, SyncError
from shared.sync.adapter_loading import AdapterLoad, BaseWeightLoad, adapt_linear_layers_only, adapter_request
from shared.sync.loading import CopyMemory


class Untouched:
    """vLLM's manager of a model with one fused and one plain layer; it fails where anything is replaced."""

    model = SimpleNamespace()
    modules = {"layer.qkv_proj": None, "layer.o_proj": None}
    packed_modules = {"layer.qkv_proj": ["layer.q_proj", "layer.k_proj", "layer.v_proj"]}

    def remove_adapter(self, number: int) -> None:
        raise AssertionError("the served adapter was taken away")


def load_of(**tensors: torch.Tensor) -> AdapterLoad:
    settings = SimpleNamespace(lora_dtype=torch.bfloat16, max_lora_rank=8)
    load = AdapterLoad(SimpleNamespace(_adapter_manager=Untouched(), lora_config=settings))
    load.add(tensors.items())
    return load


def pair(module: str, rank: int = 2) -> dict[str, torch.Tensor]:
    return {f"{module}.lora_A.weight": torch.ones(rank, 3), f"{module}.lora_B.weight": torch.ones(4, rank)}


REFUSED: list[tuple[dict[str, Any], type[ProjectError], str]] = [
    (pair("layer.q_proj") | pair("visual.qkv"), CoverageError, "1 adapted layers that the engine can't adapt: visual"),
    (pair("layer.qkv_proj"), CoverageError, "layer.qkv_proj"),
    ({"layer.o_proj.lora_A.weight": torch.ones(2, 3)}, CoverageError, "layer.o_proj.lora_B.weight"),
    (pair("layer.o_proj") | {"layer.o_proj.bias": torch.ones(3)}, CoverageError, "layer.o_proj.bias"),
    (pair("layer.o_proj", rank=9), SyncError, "rank 9"),
]


@pytest.mark.parametrize(("tensors", "error", "word"), REFUSED)
def test_an_adapter_that_does_not_fit_replaces_nothing(
    tensors: dict[str, torch.Tensor], error: type[ProjectError], word: str
) -> None:
    with pytest.raises(error) as caught:
        load_of(**tensors).finish()
    assert word in caught.value.found


def test_every_tensor_finds_its_layer_in_the_served_type() -> None:
    """Parts of a fused layer too; copies, for the bucket that they came in is gone afterwards."""
    tensors = pair("layer.q_proj") | pair("layer.o_proj")
    pairs = load_of(**tensors)._pairs()
    for tensor in tensors.values():
        tensor.zero_()
    assert pairs.keys() == {"layer.q_proj", "layer.o_proj"}
    for lora_a, lora_b in pairs.values():
        assert (lora_a.dtype, lora_a.shape, lora_b.shape) == (torch.bfloat16, (2, 3), (4, 2))
        assert lora_a.all()
        assert lora_b.all()


def test_a_tensor_that_already_has_the_served_type_is_copied_too() -> None:
    tensors = {name: tensor.bfloat16() for name, tensor in pair("layer.o_proj").items()}
    load = load_of(**tensors)
    for tensor in tensors.values():
        tensor.zero_()
    assert all(half.all() for half in load._pairs()["layer.o_proj"])


# ---- what is done with vLLM's objects; tests/integration/test_adapters.py does it with vLLM --------------------------


@dataclass
class Mapper:
    """vLLM's, as far as it renames. `orig_to_new_stacked`: fused layers, which the manager has itself."""

    orig_to_new_stacked: dict[str, str]

    def apply_list(self, names: list[str]) -> list[str]:
        assert not self.orig_to_new_stacked
        assert all(name.endswith(".weight") for name in names), "vLLM renames tensors"
        return [name.replace("layer.", "language.layer.") for name in names]


class Wrapped(torch.nn.Module):
    """A layer that takes adapters."""

    def __init__(self, base_layer: torch.nn.Module) -> None:
        super().__init__()
        self.base_layer = base_layer


class Head(torch.nn.Module):
    """An output head, which notes that its copy was packed again."""

    num_packed = 0

    @property
    def quant_method(self) -> Any:
        return self

    def process_weights_after_loading(self, module: Any) -> None:
        assert module is self
        self.num_packed += 1


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Fakes of what is imported of vLLM; what they are told, in order."""
    told: list[Any] = []

    def saying(what: str) -> Any:
        return lambda *args: told.append((what, *args))

    class Mixin:
        def load_lora_model(self, model: torch.nn.Module, *args: Any, **kwargs: Any) -> torch.nn.Module:
            told.append(("adapt", args, kwargs))
            return model

    fakes = {
        "lora.lora_model": {"LoRAModel": lambda number, rank, loras: SimpleNamespace(rank=rank, loras=loras)},
        "lora.lora_weights": {"LoRALayerWeights": lambda *args: args},
        "lora.layers": {"BaseLayerWithLoRA": Wrapped},
        "lora.request": {"LoRARequest": lambda name, number, path: (name, number)},
        "config": {"set_current_vllm_config": contextlib.nullcontext},
        "model_executor.layers.vocab_parallel_embedding": {"ParallelLMHead": Head},
        "model_executor.model_loader.reload": {
            "initialize_layerwise_reload": saying("open"),
            "finalize_layerwise_reload": saying("close"),
        },
        "v1.worker.lora_model_runner_mixin": {"LoRAModelRunnerMixin": Mixin},
    }
    for name, content in fakes.items():
        monkeypatch.setitem(sys.modules, f"vllm.{name}", SimpleNamespace(**content))
    return told


class Manager(Untouched):
    """vLLM's manager, which notes what it is told. Its model renames layers."""

    model = SimpleNamespace(hf_to_vllm_mapper=Mapper({"q_proj": "qkv_proj"}))
    modules = {f"language.{name}": None for name in Untouched.modules}
    packed_modules = {
        f"language.{name}": [f"language.{part}" for part in parts] for name, parts in Untouched.packed_modules.items()
    }

    def __init__(self) -> None:
        self.told: list[Any] = []

    def remove_adapter(self, number: int) -> None:
        self.told.append(("remove", number))

    def add_adapter(self, adapter: Any) -> None:
        self.told.append(adapter)

    def activate_adapter(self, number: int) -> None:
        self.told.append(("activate", number))


def test_an_adapter_replaces_the_last_one_and_every_tensor_is_counted(log: list[Any]) -> None:
    manager, settings = Manager(), SimpleNamespace(lora_dtype=torch.float32, max_lora_rank=8)
    load = AdapterLoad(SimpleNamespace(_adapter_manager=manager, lora_config=settings))
    assert not load.runs_meanwhile
    load.open()
    load.add((pair("layer.q_proj") | pair("layer.o_proj", rank=8)).items())
    assert load.finish() == 4
    removed, adapter, active = manager.told
    assert (removed, active) == (("remove", 1), ("activate", 1))
    assert adapter.rank == 8
    assert adapter.loras.keys() == {"language.layer.q_proj", "language.layer.o_proj"}
    for name, (layer, rank, alpha, lora_a, lora_b) in adapter.loras.items():
        assert layer == name
        assert rank == alpha == len(lora_a) == lora_b.shape[1], "the scaling is in lora_B"
        assert (lora_a.shape, lora_b.shape) == ((rank, 3), (4, rank))
    assert adapter_request("policy-3") == ("policy-3", 1)


def test_a_base_load_sees_the_layers_themselves_and_puts_their_wrappers_back(log: list[Any]) -> None:
    """R08: names and layers are the checkpoint's while it is open; the adapter is gone."""
    block = torch.nn.Module()
    block.proj, block.norm, block.head = Wrapped(torch.nn.Linear(2, 2)), torch.nn.LayerNorm(2), Head()
    model = torch.nn.Sequential(block)
    wrapper, layer = block.proj, block.proj.base_layer
    loras = SimpleNamespace(remove_all_adapters=lambda: log.append(("without adapters", block.proj is wrapper)))
    config = SimpleNamespace(model_config=SimpleNamespace(quantization=None))
    load = BaseWeightLoad(model, config, torch.device("cpu"), CopyMemory(), loras)
    assert not load.runs_meanwhile
    load.open()
    assert block.proj is layer
    assert log == [("without adapters", True), ("open", model)]
    for _ in range(2):
        load.close()
        assert block.proj is wrapper
        assert wrapper.base_layer is layer
    assert log[2:] == [("close", model, config.model_config)], "once"
    assert block.head.num_packed == 1, "a tied head is never loaded, but computes with a packed copy"


def test_a_base_load_in_place_takes_wrappers_off_only_while_vllm_loads(log: list[Any]) -> None:
    """So the canary's requests can wait behind the load: the engine that runs them has whole layers at all times."""

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.proj = Wrapped(torch.nn.Linear(2, 2, bias=False))

        def load_weights(self, tensors: Any) -> set[str]:
            assert self.proj is layer, "names are the checkpoint's"
            if broken:
                raise ValueError("another shape")
            for _, tensor in tensors:
                self.proj.weight.data.copy_(tensor)
            return {"proj.weight"}

    model, broken = Model(), False
    wrapper, layer = model.proj, model.proj.base_layer
    loras = SimpleNamespace(remove_all_adapters=lambda: None)
    config = SimpleNamespace(model_config=SimpleNamespace(quantization=None))
    load = BaseWeightLoad(model, config, torch.device("cuda"), CopyMemory(), loras)
    assert load.runs_meanwhile
    load.open()
    for i in range(3):  # from the second on, recorded copies
        load.add([("proj.weight", torch.full((2, 2), float(i)))])
        assert model.proj is wrapper
        assert (layer.weight == i).all()
    load._check_written()
    broken = True
    with pytest.raises(ValueError, match="another shape"):
        load.add([("proj.weight", torch.zeros(2, 2).T)])
    assert model.proj is wrapper


def test_no_embedding_is_adapted(log: list[Any]) -> None:
    """vLLM's adapted head ends the engine on CPU when it scores prompts."""
    adapt_linear_layers_only()
    mixin = sys.modules["vllm.v1.worker.lora_model_runner_mixin"].LoRAModelRunnerMixin
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Embedding(2, 2))
    for module in (model, model[1]):
        module.embedding_modules = {"embed": "input"}  # type: ignore[assignment]
    assert mixin().load_lora_model(model, 1, device="cpu") is model
    assert (model.embedding_modules, model[1].embedding_modules) == ({}, {})
    assert not hasattr(model[0], "embedding_modules")
    assert log == [("adapt", (1,), {"device": "cpu"})]
