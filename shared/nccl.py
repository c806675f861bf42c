"""A group over NCCL, between GPUs, through vLLM's binding (R09).

The binding, for torch's own group has a watchdog that ends the process when a peer dies. Invariants: broadcasts run on
a stream of the group's own, so that several groups of one process send at once and nothing else of the device waits
for a peer; NCCL is only called on threads that can be abandoned; a group never spans two ranks on one GPU. Made by
`communicator.py`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from shared.communicator import Broadcast, Communicator, in_background, joined
from shared.errors import CommunicatorError
from shared.rendezvous import Place


class NcclCommunicator(Communicator):
    def __init__(self, place: Place, store: dist.Store) -> None:
        super().__init__(place)
        from vllm.distributed.device_communicators.pynccl import PyNcclCommunicator
        from vllm.distributed.utils import StatelessProcessGroup

        _refuse_shared_gpus(place, store)
        # Older versions have a field for the listening socket, which is the store's here.
        fields = {field.name for field in dataclasses.fields(StatelessProcessGroup)}
        extra: dict[str, Any] = {"socket": None} if "socket" in fields else {}
        group = StatelessProcessGroup(rank=place.rank, world_size=place.world_size, store=store, **extra)
        with torch.cuda.device(place.device):
            self._nccl: Any = PyNcclCommunicator(group, device=place.device)
            self._stream = torch.cuda.Stream(place.device)
        if self._nccl.disabled:
            raise CommunicatorError(
                "NCCL is not to be had", wanted="libnccl beside torch", remedy="install the CUDA build of torch"
            )

    def _broadcast_call(self, tensor: torch.Tensor, src: int, timeout_s: float) -> Broadcast:
        joined(self._nccl)
        device, stream = self.device, self._stream
        ready = torch.cuda.Event()
        ready.record(torch.cuda.current_stream(device))

        def call(issued: Callable[[], None]) -> None:
            with torch.cuda.device(device):
                stream.wait_event(ready)
                joined(self._nccl).broadcast(tensor, src, stream=stream)
                done = torch.cuda.Event()
                done.record(stream)
                issued()
                done.synchronize()

        return call

    def _leave(self) -> None:
        nccl, self._nccl = self._nccl, None
        if nccl is not None:
            # Also ends kernels that wait for a peer. Through ctypes: the binding has a method for it in new versions.
            in_background(lambda: nccl.nccl.lib.ncclCommAbort(nccl.comm))


def _refuse_shared_gpus(place: Place, store: dist.Store) -> None:
    """NCCL would say no more than "invalid usage"."""
    store.set(f"gpu/{place.rank}", str(torch.cuda.get_device_properties(place.device).uuid))
    gpus = [store.get(f"gpu/{rank}").decode() for rank in range(place.world_size)]
    for rank, gpu in enumerate(gpus):
        if gpu in gpus[:rank]:
            raise CommunicatorError(
                "learner and rollout server are on one GPU",
                found=f"ranks {gpus.index(gpu)} and {rank} of {place.world_size} on GPU {gpu} (the last rank is the "
                "learner)",
                wanted="a GPU of its own for every worker and for rank 0 of the learner",
                remedy="set CUDA_VISIBLE_DEVICES of both programs to different devices, or use vllm.mode: colocate",
            )
