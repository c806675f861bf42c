"""What runs inside vLLM's workers: join the group, receive buckets, check, load, account for every parameter (R09).

vLLM mixes `SyncWorker` into its worker class (`worker_extension_cls`); `engine.py` calls its methods by name on all
workers. Invariants: no method blocks longer than the slice it is given, so that the engine never hangs on a lost peer;
no method raises, since an exception in a worker can take the engine down: each answers JSON, `{"error": ...}` or what
was asked; the model's layers are whole again after every update, failed ones included, though its weights may be wrong.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from typing import Any

import torch

from rollout_server.idle import sleep_when_idle
from rollout_server.lifeline import end_with_server
from rollout_server.receiving import Load, Receiving
from shared.adapter_loading import AdapterLoad, BaseWeightLoad, adapt_linear_layers_only
from shared.communicator import Communicator, start_join
from shared.digest import digest
from shared.errors import CommunicatorError, ProjectError, SyncError
from shared.loading import WeightLoad
from shared.operation import Operation
from shared.repeating import CopyMemory
from shared.wire import BUCKETS, Bucket, ErrorBody, UpdateWeightsCall

# At import, for the engine takes seconds to start, and the server may die meanwhile.
end_with_server()
sleep_when_idle()
adapt_linear_layers_only()


class SyncWorker:
    """Mixed into a vLLM worker, whose `device`, `model_runner`, `vllm_config` and `rank` it uses."""

    device: torch.device
    model_runner: Any
    vllm_config: Any
    rank: int

    def sync_join(
        self, group: str, backend: str, host: str, port: int, first_rank: int, world_size: int, timeout_s: float
    ) -> str:
        """Begin to join the learner's `group` (its incarnation), in place of any other one. `host` is this server's
        own, from its configuration; its workers have ranks from `first_rank` on, of `world_size`."""
        return _answer(lambda: self._join(group, backend, host, port, first_rank, world_size, timeout_s))

    def sync_poll_join(self, slice_s: float) -> str:
        """`{"done": bool}`."""
        return _answer(lambda: {"done": self._joining().done(slice_s)})

    def sync_start(self, update: str, buckets: str) -> str:
        """Begin to receive this `UpdateWeightsCall`; its buckets come apart, for they are the same every time.

        `{"runs_meanwhile": bool}`: whether the model can run while it is loaded.
        """
        return _answer(
            lambda: self._start(
                UpdateWeightsCall.model_validate_json(update).model_copy(update={"buckets": _read(buckets)})
            )
        )

    def sync_poll(self, slice_s: float) -> str:
        """Go on with the update. `{"done": bool, "num_tensors": ..., ...}`; the result stays until the next start."""
        return _answer(lambda: self._poll(slice_s))

    def sync_leave(self, because: str) -> str:
        """Give up what is under way and leave the group."""
        return _answer(lambda: self._leave(because))

    def _join(
        self, group: str, backend: str, host: str, port: int, first_rank: int, world_size: int, timeout_s: float
    ) -> dict[str, Any]:
        self._leave("another learner opened the group")
        parallel = self.vllm_config.parallel_config
        # Replicas of dense models have data_parallel_rank 0, each for itself; the index still tells them apart.
        replica = getattr(parallel, "data_parallel_index", parallel.data_parallel_rank)
        rank = first_rank + replica * parallel.world_size + self.rank % parallel.world_size
        place = (backend, host, port, rank, world_size, timeout_s)
        operation = start_join(*place, self.device, group=group)  # type: ignore[arg-type]
        self._sync_joining: Operation[Communicator] | None = operation
        # Makes keys and kernel while others are on their way; of as many bytes as a bucket may well have.
        digest(torch.zeros(1 << 20, dtype=torch.uint8, device=self.device))
        return {}

    def _joining(self) -> Operation[Communicator]:
        operation: Operation[Communicator] | None = getattr(self, "_sync_joining", None)
        if operation is None:
            raise CommunicatorError("this worker is in no group", wanted="/init_communicator/ before an update")
        return operation

    def _start(self, update: UpdateWeightsCall) -> dict[str, Any]:
        self._end_receiving()
        load = self._load(update.mode)
        self._sync_receiving: Receiving | None = Receiving(update, self._joining().result(), load)
        return {"runs_meanwhile": load.runs_meanwhile}

    def _load(self, mode: str) -> Load:
        model, loras = self.model_runner.model, getattr(self.model_runner, "lora_manager", None)
        if mode == "adapter":
            return AdapterLoad(loras)
        self._sync_memory: CopyMemory = getattr(self, "_sync_memory", None) or CopyMemory()
        if loras is not None:
            return BaseWeightLoad(model, self.vllm_config, self.device, self._sync_memory, loras)
        return WeightLoad(model, self.vllm_config, self.device, self._sync_memory)

    def _poll(self, slice_s: float) -> dict[str, Any]:
        receiving: Receiving | None = getattr(self, "_sync_receiving", None)
        if receiving is None:
            raise SyncError("no update is under way")
        return receiving.advance(slice_s)

    def _end_receiving(self) -> None:
        receiving: Receiving | None = getattr(self, "_sync_receiving", None)
        self._sync_receiving = None
        if receiving is not None:
            receiving.close()

    def _leave(self, because: str) -> dict[str, Any]:
        self._end_receiving()
        operation: Operation[Communicator] | None = getattr(self, "_sync_joining", None)
        self._sync_joining = None
        if operation is not None:
            operation.cancel(CommunicatorError(because))
            try:
                operation.result().abort()
            except ProjectError:
                return {"left": "a group that was not whole"}
        return {"left": because}


@functools.lru_cache(maxsize=2)
def _read(buckets: str) -> list[Bucket]:
    return BUCKETS.validate_json(buckets)


def _answer(call: Callable[[], dict[str, Any]]) -> str:
    try:
        return json.dumps(call())
    except ProjectError as error:
        failure = error
    except Exception as error:
        # vLLM's loaders raise what they like; the caller has to know that the weights are wrong.
        failure = SyncError("loading weights failed", found=f"{type(error).__name__}: {str(error)[:500]}")
    return json.dumps({"error": ErrorBody.of(failure).model_dump()})
