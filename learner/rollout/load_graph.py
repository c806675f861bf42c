"""Loads of the same weights into the same engine, repeated as one CUDA graph (R09).

In: an engine's `WeightLoad`, and what gives it all weights, merged on the way. Out: they are loaded. For a model of 4B
with adapters that is some 1,500 kernels, which the host launches from Python in 0.1 s, and by a graph in a millisecond.

Invariants: only a load that came from memory as a whole (`CopyMemory`) is captured, so no code of vLLM's is in the
graph, and only plain copies and merges on the device, which wait for nothing: weights that were moved to the host are
loaded without a graph. A graph is replayed only while every tensor that it reads or writes is where it was. A replay
accounts for the tensors and the parameters of the capture, so what covers the model is checked as ever.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch

from learner.policy.layer_graphs import Work
from shared.sync.loading import Account, WeightLoad


class LoadGraph:
    """`tensors`: all that the weights are made of, on `device`. `record` turns work into what repeats it
    (`CudaRecorder`); it need not run it."""

    def __init__(self, tensors: Iterable[torch.Tensor], device: torch.device, record: Callable[[Work], Work]) -> None:
        self._tensors, self._device, self._record = list(tensors), device, record
        self._addresses: tuple[int, ...] = ()
        self._came_from_memory = False
        self._captured: tuple[Work, Account] | None = None

    @property
    def is_captured(self) -> bool:
        return self._captured is not None

    def load(self, load: WeightLoad, add_all: Work) -> None:
        """`add_all` gives all weights to `load`, which is open and loads in place. A replay does not call it. Raises
        what it raises."""
        if any(tensor.device != self._device for tensor in self._tensors):
            add_all()
            return
        addresses = (*(tensor.data_ptr() for tensor in self._tensors), *load.addresses)
        if addresses != self._addresses:
            self._addresses, self._came_from_memory, self._captured = addresses, False, None
        if self._captured is not None:
            replay, account = self._captured
            replay()
            load.repeat(account)
        elif self._came_from_memory:
            replay = self._record(add_all)
            replay()
            self._captured = replay, load.account
        else:
            add_all()
            self._came_from_memory = load.came_from_memory
