"""Loads a LoRA adapter from memory into the model that a vLLM worker serves, and checks every tensor (R08, R09).

`AdapterLoad` takes the adapter's tensors and replaces the served adapter with them. `BaseWeightLoad` is a full update
of a model that takes adapters: it loads the layers below vLLM's LoRA wrappers and removes the served adapter.
`AdapterLoad` and `BaseWeightLoad` are used like `loading.WeightLoad`, and only while nothing is generated. Invariants:
nothing is replaced before every tensor has found its layer; the learner has multiplied `lora_B` with the adapter's
scaling, so no scaling is applied here.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch

from shared.errors import SyncError
from shared.sync.loading import CopyMemory, WeightLoad, uncovered

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.lora.layers import BaseLayerWithLoRA
    from vllm.lora.request import LoRARequest
    from vllm.lora.worker_manager import WorkerLoRAManager
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

_ADAPTER_ID = 1  # vLLM's number for the only served adapter
_HALVES = (".lora_A.weight", ".lora_B.weight")


def adapt_linear_layers_only() -> None:
    """Keep this process's engine from adapting embeddings and the output head. Call this function before the model is
    loaded."""
    from vllm.v1.worker.lora_model_runner_mixin import LoRAModelRunnerMixin

    load = LoRAModelRunnerMixin.load_lora_model

    @functools.wraps(load)
    def load_without(
        runner: GPUModelRunner, model: torch.nn.Module, *args: object, **kwargs: object
    ) -> torch.nn.Module:
        for module in model.modules():
            # vLLM's adapted head expects one row per request. `/score/` has one row per prompt token, and two such
            # requests in a batch crash the engine on CPU.
            if getattr(module, "embedding_modules", None):
                module.embedding_modules = {}  # type: ignore[assignment]
        return load(runner, model, *args, **kwargs)

    LoRAModelRunnerMixin.load_lora_model = load_without


def adapter_request(name: str) -> LoRARequest:
    """Return a LoRA request. Passed to vLLM with a prompt, it applies the adapter that was loaded last. Each adapter
    needs a new name, because vLLM caches prefixes by the adapter's name."""
    from vllm.lora.request import LoRARequest

    return LoRARequest(name, _ADAPTER_ID, "in the worker's memory")


class AdapterLoad:
    """One adapter update. `loras` is the model runner's LoRA manager."""

    def __init__(self, loras: WorkerLoRAManager) -> None:
        self._manager = loras._adapter_manager
        self._dtype, self._max_rank = loras.lora_config.lora_dtype, loras.lora_config.max_lora_rank
        self._tensors: dict[str, torch.Tensor] = {}

    @property
    def runs_meanwhile(self) -> bool:
        return False

    def open(self) -> None:
        """Do nothing: the model is changed only in `finish`, once all tensors have arrived."""

    def add(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        # Tensors are copied, because vLLM keeps them, and the bucket's memory is freed.
        self._tensors |= {name: tensor.to(self._dtype, copy=True) for name, tensor in tensors}

    def finish(self) -> int:
        """Replace the served adapter by the received tensors, and return their number. Raises CoverageError, and
        SyncError if the rank is too large."""
        pairs = self._pairs()
        # Everything is checked before the served adapter is touched, so a refused update does not damage it.
        rank = max(lora_a.shape[0] for lora_a, _ in pairs.values())
        if rank > self._max_rank:
            raise SyncError(
                "the adapter is larger than the engine takes",
                found=f"rank {rank}",
                wanted=f"at most {self._max_rank}",
                remedy="raise the server's max_lora_rank",
            )
        from vllm.lora.lora_model import LoRAModel
        from vllm.lora.lora_weights import LoRALayerWeights

        layers = {
            name: LoRALayerWeights(name, lora_a.shape[0], lora_a.shape[0], lora_a, lora_b)
            for name, (lora_a, lora_b) in pairs.items()
        }
        # vLLM ignores an adapter whose number it knows, so the last adapter is removed first.
        self._manager.remove_adapter(_ADAPTER_ID)
        self._manager.add_adapter(LoRAModel(_ADAPTER_ID, rank, layers))
        self._manager.activate_adapter(_ADAPTER_ID)
        return len(self._tensors)

    def close(self) -> None:
        """Do nothing: `finish` changes each layer completely or not at all."""

    def _pairs(self) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
        """Return (lora_A, lora_B) by served layer. Raises CoverageError if one of the two is missing, or if the engine
        cannot adapt the layer."""
        modules = sorted({name.removesuffix(half) for name in self._tensors for half in _HALVES if name.endswith(half)})
        paired = {module + half for module in modules for half in _HALVES}
        if alone := paired ^ self._tensors.keys():
            raise uncovered(f"{len(alone)} tensors without the other half", alone, "lora_A and lora_B of every layer")
        served = dict(zip(modules, self._served_names(modules), strict=True))
        adaptable = self._adaptable_layers()
        if unknown := {module for module in modules if served[module] not in adaptable}:
            raise uncovered(
                f"{len(unknown)} adapted layers that the engine can't adapt",
                unknown,
                "adapters on the language model's linear layers only (model.lora.target_modules)",
            )
        return {served[m]: (self._tensors[m + _HALVES[0]], self._tensors[m + _HALVES[1]]) for m in modules}

    def _served_names(self, modules: list[str]) -> list[str]:
        mapper = getattr(self._manager.model, "hf_to_vllm_mapper", None)
        if mapper is None:
            return modules
        # Names of q, k and v are kept apart, because vLLM fuses their adapters itself.
        renaming = dataclasses.replace(mapper, orig_to_new_stacked={})
        return [
            name.removesuffix(".weight") for name in renaming.apply_list([f"{module}.weight" for module in modules])
        ]

    def _adaptable_layers(self) -> set[str]:
        """Return the names of the layers that can be adapted; a fused layer is listed by its parts."""
        packed = self._manager.packed_modules
        return {part for name in self._manager.modules for part in packed.get(name, [name])}


class BaseWeightLoad(WeightLoad):
    """A load into the base model. The LoRA wrappers are removed while layer names are read, and while vLLM loads or
    reloads layers, because a wrapper changes the names of the layers inside it."""

    def __init__(
        self,
        model: torch.nn.Module,
        vllm_config: VllmConfig,
        device: torch.device,
        memory: CopyMemory,
        loras: WorkerLoRAManager,
    ) -> None:
        super().__init__(model, vllm_config, device, memory)
        self._loras = loras
        self._wrapped: list[tuple[torch.nn.Module, str, BaseLayerWithLoRA]] = []  # (parent, name, wrapper)

    def open(self) -> None:
        self._loras.remove_all_adapters()
        self._wrapped = _wrapped(self._model)
        self._take_off()
        # The wrappers are removed first, because `open` reads the parameters' names.
        super().open()
        # In an update in place, the model may run while buckets arrive, so it needs its wrappers.
        if self.in_place:
            self._put_back()

    def _load_weights(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> Iterable[str] | None:
        if not self.in_place:
            return super()._load_weights(tensors)
        # The wrappers are removed only during the loader's call: between two buckets the engine may run the model.
        self._take_off()
        try:
            return super()._load_weights(tensors)
        finally:
            self._put_back()

    def close(self) -> None:
        """Finish every layer's reload, and put the LoRA wrappers back. May be called again."""
        super().close()
        self._put_back()

    def _take_off(self) -> None:
        for parent, name, wrapper in self._wrapped:
            setattr(parent, name, wrapper.base_layer)

    def _put_back(self) -> None:
        for parent, name, wrapper in self._wrapped:
            setattr(parent, name, wrapper)


def _wrapped(model: torch.nn.Module) -> list[tuple[torch.nn.Module, str, BaseLayerWithLoRA]]:
    """Return each LoRA wrapper with its parent module, and its name in the parent."""
    from vllm.lora.layers import BaseLayerWithLoRA

    children = ((parent, name, child) for parent in model.modules() for name, child in parent.named_children())
    return [(parent, name, child) for parent, name, child in children if isinstance(child, BaseLayerWithLoRA)]
