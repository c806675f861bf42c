"""What an adapter must be before it replaces the served one (R08, R09); without vLLM, whose layers only have names."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from shared.errors import CoverageError, ProjectError, SyncError
from shared.sync.adapter_loading import AdapterLoad


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
