"""The policy's weights under checkpoint names, merged, for the sync and for export.

In: a transformers model, possibly with LoRA/DoRA layers. Out: `(name, tensor)` in the state dict's order, with exactly
the names, shapes and values that `save_pretrained` would write after a merge. Tied weights come once.

Invariant: the model is only read. peft merges an adapted layer in a scratch copy (so all layers that peft can merge are
merged right, DoRA too), in float32, one layer at a time. For a sharded model every rank gets the same whole tensors,
gathered one at a time, so iterating over them is collective. The list of a model's tensors is made once, because making
it takes longer than sending them.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial

import torch
from peft.tuners.lora import Linear, LoraLayer
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion
from transformers.modeling_utils import remove_tied_weights_from_state_dict

from learner.policy.sharding import is_part, whole, whole_copy
from shared.errors import ConfigError
from shared.sync.buckets import spec_of
from shared.wire import TensorSpec

_BASE = ".base_layer."


class CheckpointWeights:
    """The weights of one model, whose structure must not change. `merge` False: adapters are left out, and adapted
    layers have their base weights. `device`: where adapters are merged, also while the model is in host memory; None:
    on the model's device.

    Raises ConfigError for a sharded model that could only be gathered as a whole.
    """

    def __init__(self, model: PreTrainedModel, *, merge: bool = True, device: torch.device | None = None) -> None:
        self._model, self._merge, self._device = model, merge, device
        self._own = _own_state(model)
        # The layers are looked up once: finding a layer by its name takes as long as launching its merge.
        self._adapted = {
            f"{name}{_BASE}weight": layer
            for name, layer in model.named_modules(remove_duplicate=False)
            if isinstance(layer, LoraLayer)
        }
        shapes = self._shapes(None)
        stored = revert_weight_conversion(model, dict(shapes))
        # If False, the checkpoint splits or fuses tensors, and converting to its names needs all tensors at once.
        self._stored_as_is = stored.keys() == shapes.keys() and all(stored[n] is t for n, t in shapes.items())
        if not self._stored_as_is and any(map(is_part, self._own.values())):
            raise ConfigError(
                "model.sharding: fsdp: this model's weights can't be gathered one by one",
                found=f"checkpoints of {type(model).__name__} store some tensors fused or split",
                wanted="a model whose tensors are stored as they are, because servers are synced from them",
                remedy="set model.sharding: none, or trainer_variant: sft without evaluations",
            )

    @torch.no_grad()
    def named_weights(self, dtype: torch.dtype | None = None) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield merged weights under checkpoint names, detached, floating-point ones in `dtype` (None: as trained).

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

    def weight_specs(self, dtype: torch.dtype | None = None) -> list[TensorSpec]:
        """Return names, dtypes and shapes of `named_weights`, in the same order, without merging."""
        shapes = self._shapes(dtype)
        stored = shapes if self._stored_as_is else revert_weight_conversion(self._model, shapes)
        return [spec_of(name, tensor) for name, tensor in stored.items()]

    def _whole(self, name: str, tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        if self._merge and name in self._adapted:
            return merged_weight(self._adapted[name], dtype, self._device)
        return whole(_cast(tensor, dtype))  # a part is cast before it is gathered, so that fewer bytes are sent

    def _shapes(self, dtype: torch.dtype | None) -> dict[str, torch.Tensor]:
        return {
            name.replace(_BASE, "."): _cast(
                torch.empty(tensor.shape, dtype=tensor.dtype, device="meta"), dtype or tensor.dtype
            )
            for name, tensor in self._own.items()
        }


Checksums = dict[str, torch.Tensor]  # `checksum` of a tensor, by its checkpoint name


def checksum(tensor: torch.Tensor) -> torch.Tensor:
    """Return the sum of the tensor's bytes as 64-bit words, wrapping: int64 `[]` on its device. The host does not wait
    for the device.

    Zeros between tensors add nothing, so a bucket's sum is the sum of its tensors' sums. The sum shows that values
    differ, not that values changed places.
    """
    data = tensor.detach().contiguous().view(-1).view(torch.uint8)
    if data.numel() % 8 or data.storage_offset() % 8:
        # `pad` copies even if it adds nothing, so the words are aligned then.
        data = torch.nn.functional.pad(data, (0, -data.numel() % 8))
    return data.view(torch.int64).sum()


@contextmanager
def as_sent(
    model: PreTrainedModel,
    dtype: torch.dtype | None,
    *,
    merged: bool,
    replaced: Sequence[tuple[str, torch.nn.Module]] | None = None,
    checksums: bool = True,
) -> Iterator[Checksums]:
    """Let forward passes in the block use the values that are sent: each weight rounded to `dtype` (None: as trained)
    and, if `merged`, adapted layers as one weight, as in `CheckpointWeights.named_weights(dtype)`.

    The computation keeps the precision of training. Weights are replaced one module at a time while it runs, so memory
    holds one layer more, never one model more. A sharded model's weights are whole at that time. Yields the checksums
    of the replaced weights, which a forward pass fills in; {} without `checksums`. `replaced`: the modules of
    `replaced_modules` that the pass uses, if they are known.
    """
    used: Checksums = {}
    noted = used if checksums else None
    with ExitStack() as hooks:
        if replaced is None:
            replaced = list(replaced_modules(model, dtype, merged=merged))
        for name, module in replaced:
            if merged and isinstance(module, LoraLayer):
                base, values = module.get_base_layer(), partial(_merged, module, dtype)
                swap = _Swap(base, values, name, noted, adapted=module)
            else:
                swap = _Swap(module, partial(_cast_all, module, dtype), name, noted)
            hooks.callback(module.register_forward_pre_hook(swap.enter).remove)
            hooks.callback(module.register_forward_hook(swap.leave, always_call=True).remove)
        yield used


def unreplaced(model: PreTrainedModel, dtype: torch.dtype | None, *, merged: bool) -> dict[str, torch.Tensor]:
    """Return the weights that are sent as trained, which `as_sent` does not replace, by checkpoint name."""
    replaced = {
        f"{module_name}.{name}".replace(_BASE, ".")
        for module_name, module in replaced_modules(model, dtype, merged=merged)
        for name in (module.get_base_layer() if isinstance(module, LoraLayer) else module)._parameters
    }
    own = ((name.replace(_BASE, "."), tensor) for name, tensor in _own_state(model).items())
    return {name: tensor for name, tensor in own if name not in replaced}


def replaced_modules(
    model: PreTrainedModel, dtype: torch.dtype | None, *, merged: bool
) -> Iterator[tuple[str, torch.nn.Module]]:
    """Yield the modules whose weights may be sent with other values than the trained ones, by name. An adapted layer is
    yielded as a whole, without its parts."""
    adapted = {module for module in model.modules() if merged and isinstance(module, LoraLayer)}
    parts = {part for layer in adapted for part in layer.modules()} - adapted
    for name, module in model.named_modules():
        if module in parts:
            continue
        if module in adapted or _is_rounded(module, dtype):
            yield name, module


class _Swap:
    """Replaces `owner`'s parameters with `values()` while a forward pass runs. The checksums of the values are written
    into `used`; None: they are not computed. `name`: the module's checkpoint name. `adapted`: the adapted layer around
    `owner`, if the values contain its adapter."""

    def __init__(
        self,
        owner: torch.nn.Module,
        values: Callable[[], dict[str, torch.Tensor]],
        name: str,
        used: Checksums | None,
        *,
        adapted: LoraLayer | None = None,
    ) -> None:
        self._owner, self._values, self._adapted = owner, values, adapted
        self._name, self._used = name, used
        self._trained = owner._parameters

    def enter(self, *_: object) -> None:
        self._trained = self._owner._parameters
        replaced: dict[str, torch.nn.Parameter | None] = {}
        for name, value in self._values().items():
            if self._used is not None:
                self._used[f"{self._name}.{name}".replace(_BASE, ".")] = checksum(value)
            trained = self._trained[name]
            assert trained is not None, "only parameters that exist are replaced"
            replaced[name] = _parameter(value.to(trained.dtype))
        self._owner._parameters = {**self._trained, **replaced}
        if self._adapted is not None:
            self._adapted.merged_adapters = list(self._adapted.active_adapters)  # peft then does not add the adapter

    def leave(self, *_: object) -> None:
        self._owner._parameters = self._trained
        if self._adapted is not None:
            self._adapted.merged_adapters = []


def _is_rounded(module: torch.nn.Module, dtype: torch.dtype | None) -> bool:
    own = module._parameters.values()
    return dtype is not None and any(p is not None and p.is_floating_point() and p.dtype != dtype for p in own)


def _cast_all(module: torch.nn.Module, dtype: torch.dtype | None) -> dict[str, torch.Tensor]:
    own = {name: p for name, p in module._parameters.items() if p is not None}
    return {name: _cast(p, dtype or p.dtype) for name, p in own.items()}


def _merged(layer: LoraLayer, dtype: torch.dtype | None) -> dict[str, torch.Tensor]:
    base = layer.get_base_layer()
    return {**_cast_all(base, dtype), "weight": merged_weight(layer, dtype or base.weight.dtype)}


def _parameter(value: torch.Tensor) -> torch.nn.Parameter:
    return torch.nn.Parameter(value, requires_grad=False)


def merged_weight(
    layer: LoraLayer, dtype: torch.dtype = torch.float32, device: torch.device | None = None
) -> torch.Tensor:
    """Return an adapted layer's weight with its adapter merged on `device` (None: the layer's device), in float32 also
    under autocast, and then rounded to `dtype`: a new, whole tensor."""
    # A layer in host memory is merged on the device: two CPU cores merge 4B in 35 s, copying it takes half a second.
    device = device or layer.get_base_layer().weight.device
    with torch.autocast(device.type, enabled=False):
        plain = _merged_plain(layer, dtype, device)
    if plain is not None:
        return plain
    scratch = whole_copy(layer, device)
    base = copy.copy(scratch.get_base_layer())
    # A copy, because peft merges in place, and `float` returns a float32 weight itself.
    weight = torch.nn.Parameter(base.weight.detach().float().clone(), requires_grad=False)
    base._parameters = {**base._parameters, "weight": weight}
    scratch._modules = {**scratch._modules, "base_layer": base}
    # `scratch` shares these two with the layer, and `merge` writes into them.
    scratch.merged_adapters, scratch._caches = [], {}
    with torch.autocast(weight.device.type, enabled=False):
        scratch.merge()
    return weight.data.to(dtype)


def _merged_plain(layer: LoraLayer, dtype: torch.dtype, device: torch.device) -> torch.Tensor | None:
    """Merge a single plain LoRA on a linear layer, with peft's operations in peft's order, so the result is equal bit
    for bit. None for any other layer, which peft merges.

    It takes a product, and one kernel that scales, adds and rounds: the weight is written once in float32, peft writes
    it four times."""
    if not merges_plainly(layer):
        return None
    (name,), scaling = layer.active_adapters, layer.scaling[layer.active_adapters[0]]
    parts = layer.get_base_layer().weight, layer.lora_A[name].weight, layer.lora_B[name].weight
    base, a, b = (part.detach().to(device, non_blocking=True) for part in parts)
    is_exact = _is_power_of_two(scaling)  # only then scaling is exact, so that one rounding after the sum is enough
    delta = b @ a
    if not is_exact:
        delta, scaling = delta.mul_(scaling), 1.0
    return torch.add(base, delta, alpha=scaling, out=torch.empty_like(delta, dtype=dtype))


def merges_plainly(layer: LoraLayer) -> bool:
    """Return True for a single LoRA in float32 on a whole linear layer: merging it does not wait for the device."""
    if type(layer) is not Linear or len(active := layer.active_adapters) != 1:
        return False
    name, base = active[0], layer.get_base_layer().weight
    if name not in layer.lora_A or name in layer.lora_variant or layer.lora_bias[name] or layer.fan_in_fan_out:
        return False
    halves = layer.lora_A[name].weight, layer.lora_B[name].weight
    return not is_part(base) and all(not is_part(half) and half.dtype == torch.float32 for half in halves)


def _is_power_of_two(value: float) -> bool:
    return math.frexp(value)[0] == 0.5


def _own_state(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """Return the state dict's parameters and buffers, without adapters and second names of tied weights."""
    ignored = set(model._keys_to_ignore_on_save or ())
    variables = model.state_dict(keep_vars=True)
    # Ties are found by memory address. Empty parts of a sharded model have no address, so all parts get stand-ins.
    places = {id(tensor): torch.empty(1) for tensor in variables.values()}
    state = {
        name: places[id(tensor)] if is_part(tensor) else tensor.detach()
        for name, tensor in variables.items()
        if ".lora_" not in name and name.replace(_BASE, ".") not in ignored
    }
    return {name: variables[name] for name in remove_tied_weights_from_state_dict(state, model)}


def _cast(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return tensor.detach().to(dtype) if tensor.is_floating_point() else tensor.detach()
