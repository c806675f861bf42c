"""The policy's weights as a checkpoint on disk names them, merged, for the sync and for export.

In: a transformers model, possibly with LoRA/DoRA layers inside. Out: `(name, tensor)` in the state dict's order, with
exactly the names, shapes and values that `save_pretrained` would write after a merge; tied weights once.

Invariant: the model is only read. An adapted layer is merged in a scratch copy by peft itself (so LoRA, DoRA and
whatever else peft merges are right), in float32, one layer at a time. Of a sharded model every rank gets the same whole
tensors, gathered one at a time: to walk through them is collective.
Which tensors a model has is looked up once: it takes longer than to send them. Called by `load.Policy`.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator

import torch
from peft.tuners.lora import LoraLayer
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion
from transformers.modeling_utils import remove_tied_weights_from_state_dict

from learner.policy.sharding import is_part, whole, whole_copy
from shared.errors import ConfigError
from shared.wire import TensorSpec

_BASE = ".base_layer."


class CheckpointWeights:
    """Of one model, whose structure stays as it is. Without `merge`: the weights below its adapter.

    Raises ConfigError for a sharded model that would have to be gathered all at once.
    """

    def __init__(self, model: PreTrainedModel, *, merge: bool = True) -> None:
        self._model, self._merge = model, merge
        self._own = _own_state(model)
        shapes = self._shapes(None)
        stored = revert_weight_conversion(model, dict(shapes))
        # Else the checkpoint splits or fuses tensors, which takes them all at once.
        self._stored_as_is = stored.keys() == shapes.keys() and all(stored[n] is t for n, t in shapes.items())
        if not self._stored_as_is and any(map(is_part, self._own.values())):
            raise ConfigError(
                "model.sharding: fsdp: this model's weights can't be gathered one by one",
                found=f"checkpoints of {type(model).__name__} store fused or split what the model has otherwise",
                wanted="a model whose tensors are its checkpoint's, for rollouts from synced servers",
                remedy="set model.sharding: none, or trainer_variant: sft without evaluations",
            )

    @torch.no_grad()
    def tensors(self, dtype: torch.dtype | None = None) -> Iterator[tuple[str, torch.Tensor]]:
        """Merged weights under checkpoint names, floating-point ones in `dtype` (None: as trained), detached.

        Tensors may share memory with the model: use or copy each before the next optimizer step.
        """
        weights = (
            (name.replace(_BASE, "."), self._whole(name, tensor, dtype or tensor.dtype))
            for name, tensor in self._own.items()
        )
        if self._stored_as_is:
            yield from weights
        else:
            yield from revert_weight_conversion(self._model, dict(weights)).items()

    def specs(self, dtype: torch.dtype | None = None) -> list[TensorSpec]:
        """Names, dtypes and shapes of `tensors`, in its order, without merging anything."""
        shapes = self._shapes(dtype)
        stored = shapes if self._stored_as_is else revert_weight_conversion(self._model, shapes)
        return [
            TensorSpec(name=name, dtype=str(tensor.dtype).removeprefix("torch."), shape=list(tensor.shape))
            for name, tensor in stored.items()
        ]

    def _whole(self, name: str, tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        if self._merge and _is_adapted(name):
            return _cast(merged_weight(self._model, name), dtype)
        return whole(_cast(tensor, dtype))  # a part is cast before it travels

    def _shapes(self, dtype: torch.dtype | None) -> dict[str, torch.Tensor]:
        return {
            name.replace(_BASE, "."): _cast(
                torch.empty(tensor.shape, dtype=tensor.dtype, device="meta"), dtype or tensor.dtype
            )
            for name, tensor in self._own.items()
        }


def _is_adapted(name: str) -> bool:
    return name.endswith(f"{_BASE}weight")


def merged_weight(model: PreTrainedModel, name: str) -> torch.Tensor:
    """The weight `name` of an adapted layer with its adapter merged in: a new, whole float32 tensor."""
    layer = model.get_submodule(name.removesuffix(f"{_BASE}weight"))
    assert isinstance(layer, LoraLayer)
    scratch = whole_copy(layer)
    base = copy.copy(scratch.get_base_layer())
    weight = torch.nn.Parameter(base.weight.detach().float().clone(), requires_grad=False)
    base._parameters = {**base._parameters, "weight": weight}
    scratch._modules = {**scratch._modules, "base_layer": base}
    scratch.merged_adapters, scratch._caches = [], {}
    scratch.merge()
    return weight.data


def _own_state(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """The state dict's parameters and buffers, without adapters and without the second names of tied weights."""
    ignored = set(model._keys_to_ignore_on_save or ())
    variables = model.state_dict(keep_vars=True)
    # What is tied is found by where tensors lie in memory, and empty parts of a sharded model lie nowhere.
    places = {id(tensor): torch.empty(1) for tensor in variables.values()}
    state = {
        name: places[id(tensor)] if is_part(tensor) else tensor.detach()
        for name, tensor in variables.items()
        if ".lora_" not in name and name.replace(_BASE, ".") not in ignored
    }
    return {name: variables[name] for name in remove_tied_weights_from_state_dict(state, model)}


def _cast(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return tensor.detach().to(dtype) if tensor.is_floating_point() else tensor.detach()
