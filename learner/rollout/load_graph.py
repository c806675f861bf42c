"""Loads of the same weights into the same engine, repeated as one CUDA graph (R09).

In: an engine's `WeightLoad`, and what gives it all weights, merged on the way. Out: they are loaded. For a model of 4B
with adapters that is some 1,500 kernels, which the host launches from Python in 0.1 s, and by a graph in a millisecond.

Invariants: only a load that came from memory as a whole (`CopyMemory`) is captured, so no code of vLLM's is in the
graph, and only plain copies and merges on the device, which wait for nothing: weights that were moved to the host are
loaded without a graph. A capture that fails at a wait leaves torch's generators unusable. So these weights are first
loaded in a mode in which torch refuses to wait, and then captured. What waits, or has no memory for its graph, is
loaded without one as long as its tensors stay where they are. A graph is replayed only while every tensor that it reads
or writes is where it was. A replay accounts for the tensors and the parameters of the capture, so what covers the model
is checked as ever.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable

import torch

from learner.policy.layer_graphs import Work, recorded
from learner.policy.pass_graph import no_waits
from shared.sync.loading import Account, WeightLoad

log = logging.getLogger("learner.rollout")


class LoadGraph:
    """`tensors`: all that the weights are made of, on `device`. `record` turns work into what repeats it
    (`CudaRecorder`); it need not run it."""

    def __init__(self, tensors: Iterable[torch.Tensor], device: torch.device, record: Callable[[Work], Work]) -> None:
        self._tensors, self._device, self._record = list(tensors), device, record
        self._addresses: tuple[int, ...] = ()
        self._may_capture = False  # the last load came from memory, and nothing is known against a capture
        self._refused = False
        self._captured: tuple[Work, Account] | None = None

    @property
    def is_captured(self) -> bool:
        return self._captured is not None

    def load(self, load: WeightLoad, add_all: Work) -> None:
        """`add_all` gives all weights to `load`, which is open and loads in place. It may be called twice, and a replay
        does not call it. Raises what it raises."""
        if any(tensor.device != self._device for tensor in self._tensors):
            add_all()
            return
        addresses = (*(tensor.data_ptr() for tensor in self._tensors), *load.addresses)
        if addresses != self._addresses:
            self._addresses, self._captured = addresses, None
            self._may_capture = self._refused = False
        if self._captured is not None:
            replay, account = self._captured
            replay()
            load.repeat(account)
        elif self._may_capture and not self._refused:
            self._capture(load, add_all)
        else:
            add_all()
            self._may_capture = load.came_from_memory

    def _capture(self, load: WeightLoad, add_all: Work) -> None:
        """Load, and capture what was loaded."""
        self._refused = True
        try:
            with no_waits(self._device):
                add_all()
        except RuntimeError as error:  # torch's, for what would wait for the device, or another
            log.warning("loads are not captured as a CUDA graph, and take longer: %s", str(error).splitlines()[0])
            add_all()
            return
        # The account is of the load that has just ended. The capture repeats it.
        account = load.account
        replay = recorded(self._record, add_all, "the load of a sync")
        if replay is not None:
            self._captured, self._refused = (replay, account), False
