"""Loads checkpoint tensors into the model that a vLLM worker serves, and checks that every parameter was written (R09).

Runs in the process of the model: the server's workers, or a learner with a colocated engine. If the served tensors have
the checkpoint's layout (unquantized dense layers on CUDA), they are overwritten in place. If the layouts differ, vLLM
reloads layer by layer, as on CPU, where the backend repacks linear weights and drops the originals.

Coverage (that all weights were replaced) is checked twice: every tensor of the model's checkpoint has arrived, and
every served parameter was written or shares memory with a written one.

In place, each update copies the same bytes of a bucket to the same bytes of the model. So the first load's copies are
recorded, and later repeated in one launch per bucket (`CopyMemory`). A recording is used only if it is complete: every
tensor of the bucket was copied from the bucket itself, and nothing else was written. If a parameter of the model has
moved, recording starts anew.
"""

from __future__ import annotations

import functools
import json
import logging
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode

from shared.errors import CoverageError

if TYPE_CHECKING:
    from vllm.config import VllmConfig

log = logging.getLogger(__name__)
Named = Sequence[tuple[str, torch.Tensor]]
_NAMES_SHOWN = 5  # max names of tensors in an error

# Operations that pad a parameter. Operations in _CONSTANTS need not be repeated, because the padding stays.
_CONSTANTS = {torch.ops.aten.fill_.Scalar, torch.ops.aten.zero_.default}


@dataclass(frozen=True, kw_only=True)
class TensorCopy:
    """One copy of a part of a bucket's tensor to `target` in the model. `index`: the tensor's index in the bucket.
    `stride` and `offset` of the part are in elements."""

    target: torch.Tensor
    index: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    def source(self, tensors: Named) -> torch.Tensor:
        tensor = tensors[self.index][1]
        if self.shape == tensor.shape and self.stride == tensor.stride() and self.offset == 0:
            return tensor
        return tensor.as_strided(self.shape, self.stride, tensor.storage_offset() + self.offset)


@dataclass(frozen=True, kw_only=True)
class Recording:
    """The copies of one bucket, and the names of the parameters that they write."""

    copies: tuple[TensorCopy, ...]
    written: frozenset[str]


class CopyMemory:
    """The recorded copies of all buckets. Lives as long as the worker. Call `begin` before each update."""

    def __init__(self) -> None:
        self.addresses: tuple[int, ...] = ()  # memory addresses of the model's parameters
        self._recordings: dict[tuple[object, ...], Recording] = {}

    def begin(self, parameters: Iterable[torch.Tensor]) -> None:
        """Drop all recordings if a parameter of the model has another address than before."""
        addresses = tuple(parameter.data_ptr() for parameter in parameters)
        if addresses != self.addresses:
            self.addresses = addresses
            self._recordings.clear()

    def load(self, tensors: Named, loader: Callable[[Named], Iterable[str] | None]) -> frozenset[str]:
        """Load a bucket's tensors, by `loader` or by recorded copies. Returns the names of the written parameters."""
        # Recorded copies have the strides of one layout, so another layout of the tensors needs another recording.
        key = tuple((name, tensor.dtype, tensor.shape, tensor.stride()) for name, tensor in tensors)
        recording = self._recordings.get(key)
        # vLLM's loaders take some 80 microseconds of Python per tensor, longer than sending the tensor over NVLink.
        if recording is not None:
            torch._foreach_copy_(
                [copy.target for copy in recording.copies], [copy.source(tensors) for copy in recording.copies]
            )
            return recording.written
        with _Watcher() as watcher:
            written = frozenset(loader(tensors) or ())
        copies = _copies(watcher, tensors)
        if copies is not None:
            self._recordings[key] = Recording(copies=copies, written=written)
        return written


class _Watcher(TorchDispatchMode):
    """Records torch operations: `pairs` are (target, source) of each copy; `others` is True if an operation other than
    a copy or a constant fill has written to a tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.pairs: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.others = False

    def __torch_dispatch__(
        self,
        func: OpOverload,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        if func is torch.ops.aten.copy_.default:
            self.pairs.append((args[0], args[1]))
        # A write that is not a plain copy cannot be repeated from the bucket's bytes.
        elif func._schema.is_mutable and func not in _CONSTANTS:
            self.others = True
        return func(*args, **(kwargs or {}))


def _copies(watcher: _Watcher, tensors: Named) -> tuple[TensorCopy, ...] | None:
    """Return the copies of `tensors` that `watcher` recorded; None if a tensor was not copied whole, or if other data
    were written."""
    copies = []
    for target, source in watcher.pairs:
        index = next((i for i, (_, tensor) in enumerate(tensors) if _lies_in(source, tensor)), None)
        if index is None:
            return None
        offset = int(source.storage_offset()) - int(tensors[index][1].storage_offset())
        copies.append(
            TensorCopy(target=target, index=index, shape=tuple(source.shape), stride=source.stride(), offset=offset)
        )
    complete = {copy.index for copy in copies} == set(range(len(tensors)))
    return tuple(copies) if complete and not watcher.others else None


def _lies_in(part: torch.Tensor, whole: torch.Tensor) -> bool:
    if part.dtype != whole.dtype or part.untyped_storage().data_ptr() != whole.untyped_storage().data_ptr():
        return False
    return whole.storage_offset() <= part.storage_offset() < whole.storage_offset() + max(1, whole.numel())


class WeightLoad:
    """One update of the weights. Call `open`, then `add` for each bucket, then `finish`. After an error, call
    `close`."""

    def __init__(self, model: Any, vllm_config: VllmConfig, device: torch.device, memory: CopyMemory) -> None:
        self._model = model
        self._memory = memory
        self._vllm_config = vllm_config
        self.in_place = device.type == "cuda" and _is_plain(model) and vllm_config.model_config.quantization is None
        self._served: dict[int, set[str]] = {}
        self._received: set[str] = set()
        self._written: set[str] = set()
        self._open = False

    @property
    def runs_meanwhile(self) -> bool:
        """True if the model can run during the load, with partly loaded weights."""
        return self.in_place

    def open(self) -> None:
        """Make the model ready to be overwritten."""
        from vllm.model_executor.model_loader.reload import initialize_layerwise_reload

        parameters = list(self._model.named_parameters(remove_duplicate=False))
        # A tied parameter is listed with all its names, because the loader may report any of them as written.
        self._served = _names_by_storage(parameters)
        if self.in_place:
            # Recorded copies write to the addresses of parameters, so they would miss a parameter that has moved.
            self._memory.begin(parameter for _, parameter in parameters)
        else:
            with self._context():
                initialize_layerwise_reload(self._model)
            self._open = True

    def add(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Load these checkpoint tensors. Raises the errors of the model's loader, which may be of any type."""
        with torch.no_grad():
            if self.in_place:
                self._written |= self._memory.load(list(self._counted(tensors)), self._load_weights)
            else:
                self._written |= set(self._load_weights(self._counted(tensors)) or ())

    def _load_weights(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> Iterable[str] | None:
        # vLLM's context is entered only here, because entering it takes longer than repeating a bucket's copies.
        with self._context():
            written: Iterable[str] | None = self._model.load_weights(tensors)
        return written

    def finish(self) -> int:
        """Return the number of tensors that were loaded. Raises CoverageError."""
        # Loading is closed before the checks, because the model must be able to run even if a check fails.
        self.close()
        # vLLM's own report is not enough: a loader that got one of three fused tensors reports the whole parameter as
        # loaded.
        self._check_received()
        self._check_written()
        return len(self._received)

    def close(self) -> None:
        """Finish every layer's reload, so that the model can run. May be called again."""
        if not self._open:
            return
        self._open = False
        from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload

        with self._context(), torch.no_grad():
            finalize_layerwise_reload(self._model, self._vllm_config.model_config)
            for module in self._model.modules():
                # A tied head is never "loaded", so the reload does not update the packed copy that the head uses.
                if isinstance(module, ParallelLMHead):
                    module.quant_method.process_weights_after_loading(module)

    def _context(self) -> AbstractContextManager[object]:
        from vllm.config import set_current_vllm_config

        # vLLM's loaders and layers read their configuration from a global.
        return set_current_vllm_config(self._vllm_config)

    def _counted(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in tensors:
            self._received.add(name)
            yield name, tensor

    def _check_received(self) -> None:
        """Raises CoverageError if a tensor of the checkpoint that the server was started with has not been received."""
        config = self._vllm_config.model_config
        tied = getattr(config.hf_text_config, "tie_word_embeddings", False)
        model_class: Any = type(self._model)
        missing = _missing(config.model, frozenset(self._received), model_class, tied)
        if missing:
            raise uncovered(
                f"{len(missing)} tensors of the checkpoint did not come", missing, "every tensor of the checkpoint"
            )

    def _check_written(self) -> None:
        unwritten = [names for names in self._served.values() if names.isdisjoint(self._written)]
        if unwritten:
            raise uncovered(
                f"{len(unwritten)} served parameters were not written",
                {min(names) for names in unwritten},
                "every parameter written, or tied to one that was",
            )


def uncovered(found: str, names: Set[str], wanted: str) -> CoverageError:
    shown = ", ".join(sorted(names)[:_NAMES_SHOWN]) + (", ..." if len(names) > _NAMES_SHOWN else "")
    return CoverageError(
        "the update does not cover the served model",
        found=f"{found}: {shown}",
        wanted=wanted,
        remedy="let the learner train the model that the server serves, and send all of it",
    )


def _names_by_storage(parameters: Iterable[tuple[str, torch.Tensor]]) -> dict[int, set[str]]:
    """Return all names of each parameter by its id. Call this function before a reload, while tied parameters are one
    object."""
    names: dict[int, set[str]] = {}
    for name, parameter in parameters:
        names.setdefault(id(parameter), set()).add(name)
    return names


def _is_plain(model: torch.nn.Module) -> bool:
    """Return True if the served tensors have the checkpoint's layout, so that they can be overwritten in place."""
    # After loading, fused MoE layers have another order and MLA layers hold derived matrices. Loading them again in
    # place would give wrong weights, without an error.
    kinds = {type(module).__name__ for module in model.modules()}
    return not any("FusedMoE" in kind or "MLA" in kind or "Mamba" in kind for kind in kinds)


@functools.lru_cache(maxsize=4)
def _missing(model_path: str, received: frozenset[str], model_class: type, tied: bool) -> frozenset[str]:
    """Return the names of the checkpoint's tensors that were not received, in the model's own naming."""
    mapper = getattr(model_class, "hf_to_vllm_mapper", None)

    def mapped(names: Iterable[str]) -> set[str]:
        return set(names) if mapper is None else set(mapper.apply_list(list(names)))

    missing = mapped(_checkpoint_names(model_path)) - mapped(received)
    # A tied head is the embedding. Some checkpoints store both, but the learner sends only the embedding.
    return frozenset(name for name in missing if not (tied and name.endswith("lm_head.weight")))


@functools.lru_cache(maxsize=2)
def _checkpoint_names(model_path: str) -> frozenset[str]:
    """Return the tensors' names in a folder's safetensors files; empty if the checkpoint has another format."""
    names: set[str] = set()
    for file in sorted(Path(model_path).glob("*.safetensors")):
        with file.open("rb") as stream:
            (header_bytes,) = struct.unpack("<Q", stream.read(8))
            names |= json.loads(stream.read(header_bytes)).keys() - {"__metadata__"}
    return frozenset(names)
