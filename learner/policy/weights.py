"""The policy's weights under checkpoint names, with adapters merged, for the sync and for export.

In: a transformers model, possibly with LoRA/DoRA layers. Out: `(name, tensor)` in the state dict's order, with exactly
the names, shapes and values that `save_pretrained` would write after a merge. Tied weights are listed once.

Invariant: the model is only read. peft merges a copy of each adapted layer in float32, one layer at a time. So every
layer that peft can merge is merged correctly, DoRA too. For a sharded model every rank gets the same whole tensors,
gathered one at a time, so iterating over them is collective.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
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
    """The weights of one model. No module or parameter may be added to the model later. `merge` False: the model's
    weights without its adapters. `device`: the device on which adapters are merged, also while the model is in host
    memory; None: the device of each layer.

    Raises ConfigError for a sharded model whose tensors cannot be gathered one at a time.
    """

    def __init__(self, model: PreTrainedModel, *, merge: bool = True, device: torch.device | None = None) -> None:
        self._model, self._merge, self._device = model, merge, device
        # The tensors are listed once, because listing them takes longer than sending them.
        self._own = _own_state(model)
        # The layers are listed once, because finding a layer by its name takes as long as launching its merge.
        self._adapted = {
            f"{name}{_BASE}weight": layer
            for name, layer in model.named_modules(remove_duplicate=False)
            if isinstance(layer, LoraLayer)
        }
        self._merges: dict[str, Callable[[torch.dtype, torch.device | None], torch.Tensor]] = {}
        shapes = self._shapes(None)
        stored = revert_weight_conversion(model, dict(shapes))
        # `_stored_as_is` is False if the checkpoint splits or fuses some of the model's tensors. If the tensors are not
        # stored as they are, all of them are needed at once to make the checkpoint's tensors.
        self._stored_as_is = stored.keys() == shapes.keys() and all(stored[n] is t for n, t in shapes.items())
        if not self._stored_as_is and any(map(is_part, self._own.values())):
            raise ConfigError(
                "model.sharding: fsdp: this model's weights can't be gathered one by one",
                found=f"checkpoints of {type(model).__name__} store some tensors fused or split",
                wanted="a model whose tensors are stored as they are, because servers are synced from them",
                remedy="set model.sharding: none, or trainer_variant: sft without evaluations",
            )

    def named_weights(self, dtype: torch.dtype | None = None) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield (checkpoint name, tensor) of all weights, with adapters merged if `merge`, detached. Floating-point
        tensors are in `dtype` (None: in the type of training).

        Tensors may share memory with the model: use or copy each before the next optimizer step.
        """
        weights = (
            (name.replace(_BASE, "."), self._whole(name, tensor, dtype or tensor.dtype))
            for name, tensor in self._own.items()
        )
        if self._stored_as_is:
            yield from weights
        else:
            with torch.no_grad():
                converted = revert_weight_conversion(self._model, dict(weights))
            yield from converted.items()

    def weight_specs(self, dtype: torch.dtype | None = None) -> list[TensorSpec]:
        """Return names, dtypes and shapes of `named_weights`, in the same order, without merging."""
        shapes = self._shapes(dtype)
        stored = shapes if self._stored_as_is else revert_weight_conversion(self._model, shapes)
        return [spec_of(name, tensor) for name, tensor in stored.items()]

    def _whole(self, name: str, tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        if self._merge and name in self._adapted:
            if name not in self._merges:
                self._merges[name] = _merge_of(self._adapted[name])
            return self._merges[name](dtype, self._device)
        # Each rank casts its part before the gather, so that fewer bytes are gathered.
        return whole(_cast(tensor, dtype))

    def _shapes(self, dtype: torch.dtype | None) -> dict[str, torch.Tensor]:
        return {
            name.replace(_BASE, "."): _cast(
                torch.empty(tensor.shape, dtype=tensor.dtype, device="meta"), dtype or tensor.dtype
            )
            for name, tensor in self._own.items()
        }


Checksums = dict[str, torch.Tensor]  # checkpoint name of a tensor -> its `checksum`


def checksum(tensor: torch.Tensor) -> torch.Tensor:
    """Return the sum of the tensor's bytes, read as 64-bit integers: an int64 scalar on the tensor's device, modulo
    2**64. The host does not wait for the device.

    Zeros between the tensors of a bucket add nothing, so the bucket's sum is the sum of its tensors' sums. If values
    have changed, the sum almost surely differs. If values were only swapped, the sum stays the same.
    """
    data = tensor.detach().contiguous().view(-1).view(torch.uint8)
    if data.numel() % 8 or data.storage_offset() % 8:
        # `pad` copies the bytes, even if it adds none. The copy begins at a multiple of 8 bytes.
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
    """Let forward passes in the `with` block use the weights as they are sent: rounded to `dtype` (None: not rounded),
    and with adapters merged into them if `merged`, as in `CheckpointWeights.named_weights(dtype)`.

    The passes compute in the precision of training. A module's weights are replaced only while the module computes, so
    the memory for one more layer is needed, not for one more model. A sharded model's weights are whole at that time.
    Yields the checksums of the replaced weights, which a forward pass fills in; {} without `checksums`. `replaced`: the
    result of `replaced_modules`, if the caller has it.
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
            # `always_call` runs the hook after an error too. Without `always_call` the module would keep the replaced
            # weights after an error.
            hooks.callback(module.register_forward_hook(swap.leave, always_call=True).remove)
        yield used


def unreplaced(model: PreTrainedModel, dtype: torch.dtype | None, *, merged: bool) -> dict[str, torch.Tensor]:
    """Return the weights that are sent unchanged (that `as_sent` does not replace), by checkpoint name."""
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
    """Yield (name, module) of the modules whose weights are sent with other values than they have: rounded, or merged
    with an adapter. An adapted layer is yielded itself, but not the modules in it."""
    adapted = {module for module in model.modules() if merged and isinstance(module, LoraLayer)}
    parts = {part for layer in adapted for part in layer.modules()} - adapted
    for name, module in model.named_modules():
        if module in parts:
            continue
        if module in adapted or _is_rounded(module, dtype):
            yield name, module


class _Swap:
    """Replaces the parameters of the module `owner` by `values()` while the module computes: `enter` and `leave` are
    its hooks. The values' checksums are written into `used`; None: they are not computed. `name`: the module's name in
    the model. `adapted`: the LoRA layer around `owner`, if its adapter is merged into the values."""

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
            # The value was rounded to the sent type, and gets the type of training again, in which passes compute.
            replaced[name] = torch.nn.Parameter(value.to(trained.dtype), requires_grad=False)
        self._owner._parameters = {**self._trained, **replaced}
        if self._adapted is not None:
            # peft then counts the adapters as merged, and does not add them again.
            self._adapted.merged_adapters = list(self._adapted.active_adapters)

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


def merged_weight(
    layer: LoraLayer, dtype: torch.dtype = torch.float32, device: torch.device | None = None
) -> torch.Tensor:
    """Return the layer's weight with its adapter merged in, as a new tensor that is not sharded. The merge is computed
    in float32 on `device` (None: the layer's device), even under autocast, and then rounded to `dtype`."""
    # A layer in host memory is copied to the device and merged there. For a model of 4B, copying takes half a second;
    # two CPU cores would merge for 35 s.
    device = device or layer.get_base_layer().weight.device
    return _merge_of(layer)(dtype, device)


def _merge_of(layer: LoraLayer) -> Callable[[torch.dtype, torch.device | None], torch.Tensor]:
    """Return the function by which `merged_weight` merges this layer. The function may be called repeatedly."""
    return _PlainMerge(layer) if merges_plainly(layer) else partial(_merged_by_peft, layer)


@torch.no_grad()
def _merged_by_peft(layer: LoraLayer, dtype: torch.dtype, device: torch.device | None) -> torch.Tensor:
    scratch = whole_copy(layer, device or layer.get_base_layer().weight.device)
    base = copy.copy(scratch.get_base_layer())
    # The weight is copied, because peft merges in place, and `float` does not copy a float32 weight.
    weight = torch.nn.Parameter(base.weight.detach().float().clone(), requires_grad=False)
    base._parameters = {**base._parameters, "weight": weight}
    scratch._modules = {**scratch._modules, "base_layer": base}
    # `scratch` gets a list and a dict of its own, because `merge` writes into them, and must not change the list and
    # dict of the layer.
    scratch.merged_adapters, scratch._caches = [], {}
    with torch.autocast(weight.device.type, enabled=False):
        scratch.merge()
    return weight.data.to(dtype)


class _PlainMerge:
    """The merge of a linear layer with one plain LoRA. The merge has peft's operations in peft's order, so the result
    is equal to peft's bit for bit.

    The merge here is faster than peft's: after a matrix product, one kernel scales, adds and rounds."""

    def __init__(self, layer: LoraLayer) -> None:
        # The parameters are looked up once: finding them takes longer than launching the two kernels.
        (name,) = layer.active_adapters
        self._base = layer.get_base_layer().weight
        self._a, self._b = layer.lora_A[name].weight, layer.lora_B[name].weight
        self._scaling = layer.scaling[name]
        # True for a power of two: scaling does not round then, so it may be part of the sum.
        self._is_exact = math.frexp(self._scaling)[0] == 0.5

    def __call__(self, dtype: torch.dtype, device: torch.device | None) -> torch.Tensor:
        base, a, b = self._base.detach(), self._a.detach(), self._b.detach()
        if device is not None and device != base.device:
            base, a, b = (part.to(device, non_blocking=True) for part in (base, a, b))
        kind = base.device.type
        # Autocast would merge in bfloat16, where peft merges in float32.
        with torch.autocast(kind, enabled=False) if torch.is_autocast_enabled(kind) else nullcontext():
            delta = b @ a
            alpha = self._scaling if self._is_exact else 1.0
            if not self._is_exact:
                delta.mul_(self._scaling)
            # One float32 tensor of the weight's size is written here. peft's merge writes four.
            return torch.add(base, delta, alpha=alpha, out=torch.empty_like(delta, dtype=dtype))


def merges_plainly(layer: LoraLayer) -> bool:
    """Return True if the layer is an unsharded linear layer with one plain LoRA in float32. `merged_weight` then does
    not wait for the device."""
    if type(layer) is not Linear or len(active := layer.active_adapters) != 1:
        return False
    name, base = active[0], layer.get_base_layer().weight
    if name not in layer.lora_A or name in layer.lora_variant or layer.lora_bias[name] or layer.fan_in_fan_out:
        return False
    halves = layer.lora_A[name].weight, layer.lora_B[name].weight
    return not is_part(base) and all(not is_part(half) and half.dtype == torch.float32 for half in halves)


def _own_state(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """Return the parameters and buffers of the model's state dict, without adapters. Tied weights are listed once."""
    ignored = set(model._keys_to_ignore_on_save or ())
    variables = model.state_dict(keep_vars=True)
    # transformers finds tied weights by their memory addresses. A rank's part of a sharded tensor may be empty and have
    # no address, so each part is replaced by a small tensor here.
    places = {id(tensor): torch.empty(1) for tensor in variables.values()}
    state = {
        name: places[id(tensor)] if is_part(tensor) else tensor.detach()
        for name, tensor in variables.items()
        if ".lora_" not in name and name.replace(_BASE, ".") not in ignored
    }
    return {name: variables[name] for name in remove_tied_weights_from_state_dict(state, model)}


def _cast(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return tensor.detach().to(dtype) if tensor.is_floating_point() else tensor.detach()
