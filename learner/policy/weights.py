"""The policy's weights as a checkpoint on disk names them, merged, for the sync and for export.

In: a transformers model, possibly with LoRA/DoRA layers inside. Out: `(name, tensor)` in the state dict's order, with
exactly the names, shapes and values that `save_pretrained` would write after a merge; tied weights once.

Invariant: the trained weights are not touched. An adapted layer is merged into a scratch copy of its weight by
peft itself (so LoRA, DoRA and whatever else peft merges are right), in float32, one layer at a time.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from peft.tuners.lora import LoraLayer
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion
from transformers.modeling_utils import remove_tied_weights_from_state_dict

from shared.wire import TensorSpec

_BASE = ".base_layer."


@torch.no_grad()
def checkpoint_weights(
    model: PreTrainedModel, dtype: torch.dtype | None = None, *, merge: bool = True
) -> Iterator[tuple[str, torch.Tensor]]:
    """Merged weights under checkpoint names, floating-point ones in `dtype` (None: as trained), detached. Without
    `merge`: the weights below the adapter.

    Tensors may share memory with the model: use or copy each before the next optimizer step.
    """
    weights = (
        (
            name.replace(_BASE, "."),
            _cast(merged_weight(model, name, tensor) if merge else tensor, dtype or tensor.dtype),
        )
        for name, tensor in _own_state(model).items()
    )
    if _is_stored_as_is(model):
        yield from weights
    else:  # the checkpoint splits or fuses tensors, which takes them all at once
        yield from revert_weight_conversion(model, dict(weights)).items()


def weight_specs(model: PreTrainedModel, dtype: torch.dtype | None = None) -> list[TensorSpec]:
    """Names, dtypes and shapes of `checkpoint_weights`, in its order, without merging anything."""
    shapes = {name: _cast(tensor, dtype or tensor.dtype) for name, tensor in _shapes(model).items()}
    stored = shapes if _is_stored_as_is(model) else revert_weight_conversion(model, shapes)
    return [
        TensorSpec(name=name, dtype=str(tensor.dtype).removeprefix("torch."), shape=list(tensor.shape))
        for name, tensor in stored.items()
    ]


def merged_weight(model: PreTrainedModel, name: str, tensor: torch.Tensor) -> torch.Tensor:
    """`tensor` itself, or for the weight of an adapted layer a new float32 tensor with its adapter merged in."""
    module_name, is_adapted, parameter = name.rpartition(_BASE)
    if not is_adapted or parameter != "weight":
        return tensor
    layer = model.get_submodule(module_name)
    assert isinstance(layer, LoraLayer)
    weight = layer.get_base_layer().weight
    trained = weight.data
    try:
        weight.data = trained.float().clone()
        layer.merge()
        merged = weight.data.clone()
        layer.unmerge()  # on the scratch copy: clears what peft remembers about the merge
    finally:
        weight.data = trained
    return merged


def _own_state(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """The state dict without adapters and without the second names of tied weights."""
    ignored = set(model._keys_to_ignore_on_save or ())
    state = {
        name: tensor
        for name, tensor in model.state_dict().items()
        if ".lora_" not in name and name.replace(_BASE, ".") not in ignored
    }
    return remove_tied_weights_from_state_dict(state, model)


def _shapes(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    return {name.replace(_BASE, "."): tensor.to("meta") for name, tensor in _own_state(model).items()}


def _is_stored_as_is(model: PreTrainedModel) -> bool:
    """Whether the checkpoint has the model's own names, so that weights can be streamed one by one."""
    shapes = _shapes(model)
    stored = revert_weight_conversion(model, dict(shapes))
    return stored.keys() == shapes.keys() and all(stored[name] is tensor for name, tensor in shapes.items())


def _cast(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return tensor.detach().to(dtype) if tensor.is_floating_point() else tensor.detach()
