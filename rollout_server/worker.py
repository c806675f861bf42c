"""What runs inside vLLM's workers: join the group, receive buckets, check, load, account for every parameter (R09).

vLLM mixes `SyncWorker` into its worker class (`worker_extension_cls`); `engine.py` calls its methods by name on all
workers. Invariants: no method blocks longer than the slice it is given, so that the engine never hangs on a lost peer;
no method raises, since an exception in a worker can take the engine down: each answers JSON, `{"error": ...}` or what
was asked; the model's layers are whole again after every update, failed ones included, though its weights may be wrong.

One weight update as a worker sees it: receive a bucket, check its seal, load it, and the next (R09).

The next buckets are on their way while one is checked and loaded. Invariants: nothing is loaded whose seal was wrong;
`advance` ends within about its slice plus one load; `close` may be called at any time, and leaves the model whole.
Called by `worker.py`, on vLLM's own thread, for the model is only touched there.
"""

from __future__ import annotations

import functools
import json
import time
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any, Protocol

import torch

from rollout_server.processes import end_with_server, sleep_when_idle
from shared.errors import CommunicatorError, DeadlineError, DigestError, ProjectError, SyncError
from shared.sync.adapter_loading import AdapterLoad, BaseWeightLoad, adapt_linear_layers_only
from shared.sync.buckets import SEAL_BYTES, is_sealed, unpack
from shared.sync.calls import Operation
from shared.sync.digest import digest
from shared.sync.group import Communicator, start_join
from shared.sync.loading import CopyMemory, WeightLoad
from shared.wire import BUCKETS, Bucket, ErrorBody, UpdateWeightsCall

AHEAD = 2  # buckets under way while another is loaded


class Load(Protocol):
    """Where the tensors go: `open`, `add` per bucket, then `finish`; `close` whatever happened."""

    @property
    def runs_meanwhile(self) -> bool:
        """Whether the model can run while it is loaded; with what weights, nobody knows."""

    def open(self) -> None: ...

    def add(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None: ...

    def finish(self) -> dict[str, Any]: ...

    def close(self) -> None: ...


class Receiving:
    """Receives as soon as it is made; the model is first touched by `advance`."""

    def __init__(self, update: UpdateWeightsCall, communicator: Communicator, load: Load) -> None:
        self._update = update
        self._communicator = communicator
        self._load = load
        self._deadline = time.monotonic() + update.timeout_s
        self._num_asked = self._num_loaded = 0
        self._opened = False
        self._result: dict[str, Any] | None = None
        self._incoming: deque[tuple[torch.Tensor, Operation[None]]] = deque()
        self._receive()

    def advance(self, slice_s: float) -> dict[str, Any]:
        """`{"done": False}`, or the counts once all is loaded and every parameter accounted for.

        Raises DigestError, CoverageError, CommunicatorError or DeadlineError; the update has failed then.
        """
        until = time.monotonic() + slice_s
        if not self._opened:
            self._load.open()  # takes its time, while the first bytes are on their way
            self._opened = True
        while self._incoming:
            buffer, operation = self._incoming[0]
            if not operation.done(max(0.0, until - time.monotonic())):
                return {"done": False}
            self._incoming.popleft()
            self._receive()
            self._check_seal(buffer)
            self._load.add(unpack(buffer, self._update.buckets[self._num_loaded].tensors))
            self._num_loaded += 1
        if self._result is None:
            self._result = {"done": True} | self._load.finish()
        return self._result

    def close(self) -> None:
        """Give up what has not been done. May be called again."""
        if self._incoming:
            self._communicator.abort()
            self._incoming.clear()
        self._load.close()

    def _receive(self) -> None:
        """Ask for more buckets, up to AHEAD of the one that is loaded."""
        buckets, src = self._update.buckets, self._communicator.world_size - 1
        while self._num_asked < min(len(buckets), self._num_loaded + 1 + AHEAD):
            left_s = self._deadline - time.monotonic()
            if left_s <= 0:
                raise DeadlineError(
                    "the update did not end in time",
                    found=f"{self._num_loaded} of {len(buckets)} buckets after {self._update.timeout_s:g} s",
                    wanted="all of them",
                    remedy="raise the learner's sync timeout",
                )
            size = buckets[self._num_asked].num_bytes + SEAL_BYTES
            buffer = torch.empty(size, dtype=torch.uint8, device=self._communicator.device)
            self._incoming.append((buffer, self._communicator.start_broadcast(buffer, src, left_s)))
            self._num_asked += 1

    def _check_seal(self, buffer: torch.Tensor) -> None:
        index, ver = self._num_loaded, self._update.ver
        if not is_sealed(buffer, ver=ver, index=index):
            raise DigestError(
                f"bucket {index} of {len(self._update.buckets)} arrived with other bytes",
                found=f"{buffer.numel()} bytes whose digest is not that of their seal",
                wanted=f"the bytes that the learner sealed as bucket {index} of version {ver}",
                remedy="sync again; if it happens again, look at the network and at the memory of both machines",
            )


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
