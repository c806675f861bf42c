"""The policy's LoRA adapter by itself, for the adapter sync: its tensors, and the weights that lie below it (R08, R09).

In: a transformers model with peft's layers inside. Out: `(name, tensor)` per adapted layer, `{module}.lora_A.weight`
`[rank, in]` and `{module}.lora_B.weight` `[out, rank]`, modules named as in the checkpoint; or why an engine that only
knows plain LoRA can't apply this adapter. Invariants: `lora_B` is multiplied with the adapter's scaling in float32, so
that no number besides the tensors has to travel; the trained weights are not touched. Called by the sync.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from peft.tuners.lora import LoraLayer
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

from learner.policy.sharding import whole
from learner.policy.weights import CheckpointWeights
from shared.weights import spec_of
from shared.wire import TensorSpec


class BaseWeights:
    """The weights below the adapter, under checkpoint names: what an adapter is served on. They are not trained."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._weights = CheckpointWeights(model, merge=False)

    def named_weights(self, dtype: torch.dtype | None = None) -> Iterator[tuple[str, torch.Tensor]]:
        return self._weights.tensors(dtype)

    def weight_specs(self, dtype: torch.dtype | None = None) -> list[TensorSpec]:
        return self._weights.specs(dtype)


class AdapterWeights:
    """`obstacle`: why this adapter can't be served as one, or empty. `rank`: the largest of its layers."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.base = BaseWeights(model)
        adapted = {name: module for name, module in model.named_modules() if isinstance(module, LoraLayer)}
        layers = {name: layer for name, layer in adapted.items() if not _is_idle(layer)}
        names = _checkpoint_names(model, layers)
        self.obstacle = _obstacle(model, layers) or _unnamed(layers.keys() - names.keys())
        self._layers = {names[name]: layer for name, layer in layers.items() if name in names}
        self.rank = max((r for layer in layers.values() for r in layer.r.values()), default=0)

    @torch.no_grad()
    def named_weights(self, dtype: torch.dtype | None = None) -> Iterator[tuple[str, torch.Tensor]]:
        """In `dtype` (None: as trained), detached. Tensors may share memory with the model."""
        for module, layer in self._layers.items():
            (adapter,) = layer.active_adapters
            lora_a, lora_b = (whole(half[adapter].weight.detach()) for half in (layer.lora_A, layer.lora_B))
            yield f"{module}.lora_A.weight", lora_a.to(dtype or lora_a.dtype)
            yield f"{module}.lora_B.weight", (lora_b.float() * layer.scaling[adapter]).to(dtype or lora_b.dtype)

    def weight_specs(self, dtype: torch.dtype | None = None) -> list[TensorSpec]:
        """Names, dtypes and shapes of `named_weights(dtype)`, in its order."""
        return [
            spec_of(f"{module}.lora_{half}.weight", weight, dtype)
            for module, layer in self._layers.items()
            for half, weight in (("A", _only(layer.lora_A).weight), ("B", _only(layer.lora_B).weight))
        ]


def _only(halves: torch.nn.ModuleDict) -> torch.nn.Linear:
    (half,) = halves.values()
    assert isinstance(half, torch.nn.Linear)
    return half


def _is_idle(layer: LoraLayer) -> bool:
    """Neither trained (`model.freeze`) nor of any effect, so that an engine may do without it."""
    frozen = not any(p.requires_grad for name, p in layer.named_parameters() if "lora_" in name)
    return frozen and not any(whole(half.weight).any() for half in layer.lora_B.values())


def _obstacle(model: PreTrainedModel, layers: dict[str, LoraLayer]) -> str:
    """Why plain LoRA on linear layers does not describe what is trained; empty where it does."""
    if not layers:
        return "no layer of the model is adapted"
    for name, layer in layers.items():
        if any(layer.use_dora.values()):
            return "the adapter is a DoRA, which vLLM does not apply"
        if not isinstance(layer.get_base_layer(), torch.nn.Linear) or any(layer.lora_bias.values()):
            return f"{name} is not adapted as a linear layer, or with a bias of its own"
        if list(layer.lora_A) != layer.active_adapters or len(layer.lora_A) != 1:
            return f"{name} has adapters {list(layer.lora_A)}, and {layer.active_adapters} of them active"
    served = {
        id(p) for layer in layers.values() for halves in (layer.lora_A, layer.lora_B) for p in halves.parameters()
    }
    others = [name for name, p in model.named_parameters() if p.requires_grad and id(p) not in served]
    return f"{others[0]} is trained and is no part of the adapter" if others else ""


def _checkpoint_names(model: PreTrainedModel, layers: dict[str, LoraLayer]) -> dict[str, str]:
    """Module name in the checkpoint by module name in the model; none where the checkpoint fuses or splits it."""
    weights = {
        f"{name}.weight": torch.empty(layer.get_base_layer().weight.shape, device="meta")
        for name, layer in layers.items()
    }
    stored = {id(tensor): name for name, tensor in revert_weight_conversion(model, dict(weights)).items()}
    return {
        name.removesuffix(".weight"): stored[id(tensor)].removesuffix(".weight")
        for name, tensor in weights.items()
        if id(tensor) in stored
    }


def _unnamed(modules: set[str]) -> str:
    return f"the checkpoint stores {min(modules)} fused with others" if modules else ""
