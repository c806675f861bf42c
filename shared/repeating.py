"""What a model's loader copies where, remembered, so that the next update needs no loader (R09).

vLLM's loaders take some 80 microseconds of Python per tensor, longer than the tensor's own way over NVLink. Which bytes
of a bucket go to which bytes of the model is the same in every update: a loader is watched the first time, and its
copies are repeated in one launch per bucket after that. Invariants: only what was seen whole is repeated: every tensor
of the bucket was copied, out of the bucket itself, and nothing else was written; a model whose parameters have moved is
loaded by its loader again. Used by `loading.py`, for models that are loaded in place.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

Named = Sequence[tuple[str, torch.Tensor]]


@dataclass(frozen=True, kw_only=True)
class Copy:
    """Part of one of a bucket's tensors, and where it goes. Strides and offset in elements."""

    target: torch.Tensor
    index: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    def source(self, tensors: Named) -> torch.Tensor:
        tensor = tensors[self.index][1]
        if self.shape == tensor.shape and self.offset == 0:
            return tensor
        return tensor.as_strided(self.shape, self.stride, tensor.storage_offset() + self.offset)


@dataclass(frozen=True, kw_only=True)
class Recording:
    """The copies of one bucket, and the parameters that they wrote."""

    copies: tuple[Copy, ...]
    written: frozenset[str]


class CopyMemory:
    """Lives as long as the worker; `begin` before each update."""

    def __init__(self) -> None:
        self._addresses: tuple[int, ...] = ()
        self._recordings: dict[tuple[object, ...], Recording] = {}

    def begin(self, parameters: Iterable[torch.Tensor]) -> None:
        """Forget all where a parameter of the model has moved."""
        addresses = tuple(parameter.data_ptr() for parameter in parameters)
        if addresses != self._addresses:
            self._addresses = addresses
            self._recordings.clear()

    def load(self, tensors: Named, loader: Callable[[Named], Iterable[str] | None]) -> frozenset[str]:
        """Load a bucket's tensors, by their loader or from memory; the names of the parameters that were written."""
        key = tuple((name, tensor.dtype, tensor.shape) for name, tensor in tensors)
        recording = self._recordings.get(key)
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


# What pads a parameter: it is still there the next time.
_CONSTANTS = {torch.ops.aten.fill_.Scalar, torch.ops.aten.zero_.default}


class _Watcher(TorchDispatchMode):
    """Sees every operation below it: `pairs` are (target, source) of copies; `others`: something else was written."""

    def __init__(self) -> None:
        super().__init__()
        self.pairs: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.others = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.copy_.default:
            self.pairs.append((args[0], args[1]))
        elif func._schema.is_mutable and func not in _CONSTANTS:
            self.others = True
        return func(*args, **(kwargs or {}))


def _copies(watcher: _Watcher, tensors: Named) -> tuple[Copy, ...] | None:
    """None where the copies do not account for all of `tensors`."""
    copies = []
    for target, source in watcher.pairs:
        index = next((i for i, (_, tensor) in enumerate(tensors) if _lies_in(source, tensor)), None)
        if index is None:
            return None
        offset = int(source.storage_offset()) - int(tensors[index][1].storage_offset())
        copies.append(
            Copy(target=target, index=index, shape=tuple(source.shape), stride=source.stride(), offset=offset)
        )
    complete = {copy.index for copy in copies} == set(range(len(tensors)))
    return tuple(copies) if complete and not watcher.others else None


def _lies_in(part: torch.Tensor, whole: torch.Tensor) -> bool:
    if part.dtype != whole.dtype or part.untyped_storage().data_ptr() != whole.untyped_storage().data_ptr():
        return False
    return whole.storage_offset() <= part.storage_offset() < whole.storage_offset() + max(1, whole.numel())
