"""Runs inside vLLM's workers: joins the group, receives buckets, checks and loads them (R09).

vLLM mixes `SyncWorker` into its worker class (`worker_extension_cls`), and `engine.py` calls its methods by name on all
workers. `Receiving` is one weight update as a worker sees it: receive a bucket (a buffer with several tensors), check
its seal (a keyed digest at its end), load it. The next buckets are received while one is checked and loaded.

Invariants:
- no method blocks longer than its `slice_s` plus one load, so a lost peer never hangs the engine;
- no method raises, because an exception in a worker can end the engine; each method returns a `WorkerReply` as JSON;
- a bucket with a wrong seal is not loaded;
- after every update, even a failed one, the model can run, though its weights may be wrong.
"""

from __future__ import annotations

import functools
import hashlib
import time
from collections import deque
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Concatenate, ParamSpec, TypeAlias

import torch

from rollout_server.engine import WorkerReply
from rollout_server.processes import end_with_server, sleep_when_idle
from shared.errors import CommunicatorError, DeadlineError, DigestError, ProjectError, SyncError
from shared.sync.adapter_loading import AdapterLoad, BaseWeightLoad, adapt_linear_layers_only
from shared.sync.buckets import SEAL_BYTES, is_sealed, seal_key, unpack
from shared.sync.calls import Operation
from shared.sync.digest import digest
from shared.sync.group import Communicator, start_join
from shared.sync.loading import CopyMemory, WeightLoad
from shared.sync.meeting import num_strangers
from shared.waits import Deadline
from shared.wire import BUCKETS, Bucket, ErrorBody, InitCommunicatorCall, UpdateWeightsCall

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

P = ParamSpec("P")
_Memory: TypeAlias = "torch.Tensor | Iterable[_Memory]"
BUCKETS_AHEAD = 2  # max buckets that are received while another bucket is loaded

# The functions below are called at import, because the server may die during the seconds in which the engine starts.
end_with_server()
sleep_when_idle()
adapt_linear_layers_only()


def _answering(
    method: Callable[Concatenate[SyncWorker, P], WorkerReply],
) -> Callable[Concatenate[SyncWorker, P], str]:
    """Return the method in a form that never raises: it returns its reply, or its error, as JSON."""

    @functools.wraps(method)
    def answer(self: SyncWorker, *args: P.args, **kwargs: P.kwargs) -> str:
        try:
            reply = method(self, *args, **kwargs)
        except ProjectError as error:
            reply = WorkerReply(error=ErrorBody.of(error))
        except Exception as error:  # loaders of vLLM raise any type, and the caller must learn that weights are wrong
            found = f"{type(error).__name__}: {str(error)[:500]}"
            reply = WorkerReply(error=ErrorBody.of(SyncError("loading weights failed", found=found)))
        return reply.model_dump_json()

    return answer


class SyncWorker:
    """Mixed into a vLLM worker, whose `device`, `model_runner`, `vllm_config` and `rank` it uses."""

    device: torch.device
    model_runner: GPUModelRunner
    vllm_config: VllmConfig
    rank: int

    _sync_joining: Operation[Communicator] | None = None
    _sync_receiving: Receiving | None = None
    _sync_memory: CopyMemory | None = None

    @_answering
    def sync_join(self, init_call: str, host: str) -> WorkerReply:
        """Leave any group, and begin to join the group of this `InitCommunicatorCall`. `host`: the address at which the
        group connects, from the server's configuration."""
        self._leave("another learner opened the group")
        call = InitCommunicatorCall.model_validate_json(init_call)
        parallel = self.vllm_config.parallel_config
        # Replicas of dense models all have data_parallel_rank 0; the index still tells them apart.
        replica = getattr(parallel, "data_parallel_index", parallel.data_parallel_rank)
        rank = call.first_rank + replica * parallel.world_size + self.rank % parallel.world_size
        place = (call.backend, host, call.group_port, rank, call.world_size, call.timeout_s)
        self._sync_joining = start_join(
            *place, self.device, secret=bytes.fromhex(call.secret), allow_shared_gpu=call.allow_shared_gpu
        )
        # The first digest of a group computes the keys and compiles the kernel for the seals of buckets, while other
        # members join.
        digest(torch.zeros(1 << 20, dtype=torch.uint8, device=self.device), seal_key(bytes.fromhex(call.secret)))
        return WorkerReply()

    @_answering
    def sync_poll_join(self, slice_s: float) -> WorkerReply:
        return WorkerReply(done=self._joined().done(slice_s), num_strangers=num_strangers())

    @_answering
    def sync_start(self, update: str, buckets: str) -> WorkerReply:
        """Begin to receive this `UpdateWeightsCall`. `buckets` is separate because it is the same in every update."""
        self._end_receiving()
        call = UpdateWeightsCall.model_validate_json(update).model_copy(update={"buckets": _read(buckets)})
        load = self._load(call.mode)
        self._sync_receiving = Receiving(call, self._joined().result(), load)
        return WorkerReply(done=False, runs_meanwhile=load.runs_meanwhile)

    @_answering
    def sync_poll(self, slice_s: float) -> WorkerReply:
        """Continue the update. Once the update has ended, return its last reply again."""
        if self._sync_receiving is None:
            raise SyncError("no update is under way")
        return self._sync_receiving.advance(slice_s)

    @_answering
    def sync_clear_cache(self) -> WorkerReply:
        """Fill the KV cache with zeros (on CPU only if it holds NaN). Call this method while nothing is generated."""
        _clear(self.model_runner.kv_caches)
        return WorkerReply()

    @_answering
    def sync_ping(self) -> WorkerReply:
        """Return an empty reply, which shows that the worker runs."""
        return WorkerReply()

    @_answering
    def sync_leave(self, because: str) -> WorkerReply:
        """Stop the running update or join, and leave the group."""
        self._leave(because)
        return WorkerReply()

    def _joined(self) -> Operation[Communicator]:
        if self._sync_joining is None:
            raise CommunicatorError("this worker is in no group", wanted="/init_communicator/ before an update")
        return self._sync_joining

    def _load(self, mode: str) -> AdapterLoad | WeightLoad:
        model, loras = self.model_runner.model, getattr(self.model_runner, "lora_manager", None)
        if mode == "adapter":
            return AdapterLoad(loras)
        self._sync_memory = self._sync_memory or CopyMemory()
        if loras is not None:
            return BaseWeightLoad(model, self.vllm_config, self.device, self._sync_memory, loras)
        return WeightLoad(model, self.vllm_config, self.device, self._sync_memory)

    def _end_receiving(self) -> None:
        receiving, self._sync_receiving = self._sync_receiving, None
        if receiving is not None:
            receiving.close()

    def _leave(self, because: str) -> None:
        self._end_receiving()
        operation, self._sync_joining = self._sync_joining, None
        if operation is not None:
            # The join is cancelled, not waited for, because the other ranks may be gone.
            operation.cancel(CommunicatorError(because))
            try:
                operation.result().abort()
            # The join was not complete, so there is no group to leave.
            except ProjectError:
                return


def _clear(kept: _Memory) -> None:
    if isinstance(kept, torch.Tensor):
        # On CPU the cache is zeroed only if it holds NaN: untouched parts take no memory until they are written.
        if kept.is_cuda or not torch.isfinite(kept.sum(dtype=torch.float32)):
            kept.zero_()
    else:
        for one in kept:
            _clear(one)


@functools.lru_cache(maxsize=2)
def _read(buckets: str) -> list[Bucket]:
    return BUCKETS.validate_json(buckets)


class Receiving:
    """One update as a worker receives it. The constructor starts receiving. Only `advance`, on vLLM's own thread,
    changes the model."""

    def __init__(
        self,
        update: UpdateWeightsCall,
        communicator: Communicator,
        load: AdapterLoad | WeightLoad,
    ) -> None:
        self._update = update
        self._communicator = communicator
        self._load = load
        self._deadline = Deadline(update.timeout_s)
        self._num_asked = self._num_loaded = 0
        self._opened = False
        self._seals = hashlib.blake2b(digest_size=16)
        self._reply: WorkerReply | None = None  # the update's last reply; None until all weights are loaded
        self._incoming: deque[tuple[torch.Tensor, Operation[None]]] = deque()
        self._receive()

    def advance(self, slice_s: float) -> WorkerReply:
        """Continue for about `slice_s` plus one load. The reply is `done` once every parameter is loaded.

        Raises DigestError, CoverageError, CommunicatorError or DeadlineError if the update has failed.
        """
        until = time.monotonic() + slice_s
        if not self._opened:
            # The first buckets arrive while the load is opened, which takes time.
            self._load.open()
            self._opened = True
        while self._incoming:
            buffer, operation = self._incoming[0]
            if not operation.done(max(0.0, until - time.monotonic())):
                return WorkerReply(done=False)
            self._incoming.popleft()
            # The next receive is started first, so that the next bucket arrives while the present bucket is checked and
            # loaded.
            self._receive()
            self._check_seal(buffer)
            self._seals.update(bytes(buffer[-SEAL_BYTES:].tolist()))
            self._load.add(unpack(buffer, self._update.buckets[self._num_loaded].tensors))
            self._num_loaded += 1
        if self._reply is None:
            num_tensors, weights = self._load.finish(), self._seals.hexdigest()
            meanwhile = self._load.runs_meanwhile
            self._reply = WorkerReply(num_tensors=num_tensors, weights=weights, runs_meanwhile=meanwhile)
        return self._reply

    def close(self) -> None:
        """Stop receiving the update. May be called at any time, and again."""
        if self._incoming:
            self._communicator.abort()
            self._incoming.clear()
        self._load.close()

    def _receive(self) -> None:
        """Start receiving buckets, up to BUCKETS_AHEAD beyond the bucket that is being loaded."""
        buckets, src = self._update.buckets, self._communicator.world_size - 1
        while self._num_asked < min(len(buckets), self._num_loaded + 1 + BUCKETS_AHEAD):
            left_s = self._deadline.left_s()
            if not left_s:
                raise DeadlineError(
                    "the update did not end in time",
                    found=f"{self._num_loaded} of {len(buckets)} buckets after {self._update.timeout_s:g} s",
                    wanted="all buckets",
                    remedy="raise the learner's sync timeout",
                )
            size = buckets[self._num_asked].num_bytes + SEAL_BYTES
            buffer = torch.empty(size, dtype=torch.uint8, device=self._communicator.device)
            self._incoming.append((buffer, self._communicator.start_broadcast(buffer, src, left_s)))
            self._num_asked += 1

    def _check_seal(self, buffer: torch.Tensor) -> None:
        index, ver = self._num_loaded, self._update.ver
        if not is_sealed(buffer, key=self._communicator.seal_key, ver=ver, index=index):
            raise DigestError(
                f"bucket {index} of {len(self._update.buckets)} arrived with other bytes",
                found=f"{buffer.numel()} bytes whose digest does not match their seal",
                wanted=f"the bytes that the learner sealed as bucket {index} of version {ver}",
                remedy="sync again; if it happens again, check the network and the memory of both machines",
            )
