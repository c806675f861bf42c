"""The learner's processes: their process group, small collectives with a deadline, one gradient reduction per step.

In: torchrun's environment and a timeout. Out: `Ranks`, which all code that communicates between ranks gets.

Gradients are summed locally over a step's rows. After the last row the sums are reduced over ranks once, in flat
float32 buckets, in the same order on all ranks. Numbers and objects are sent by gloo, even if tensors are sent by NCCL.

Invariants: every rank makes the same calls in the same order. A rank without a gradient for a parameter contributes
zeros. After `broadcast_parameters` and equal updates all ranks hold equal weights, bit for bit.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from shared.errors import CollectiveError, ConfigError, ProjectError
from shared.waits import Retry

T = TypeVar("T")
_CPU = torch.device("cpu")
BUCKET_ELEMENTS = 64 * 2**20  # max elements of a bucket (256 MiB of float32), unless one gradient has more


@dataclass(frozen=True, kw_only=True)
class Ranks:
    """This process's rank among the learner's processes, and their collectives. `timeout_s`: deadline of a collective.
    With `world_size` 1 there is no process group, and collectives return at once."""

    rank: int = 0
    world_size: int = 1
    device: torch.device = _CPU
    timeout_s: float = 600.0

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    def all_reduce_max(self, value: float) -> float:
        """Return the largest of the ranks' values. Raises CollectiveError if a rank does not come in time, as do all
        collectives of this class."""
        if self.world_size == 1:
            return float(value)
        # A Python float has 64 bits, so the tensor is float64.
        tensor = torch.tensor(value, dtype=torch.float64)
        with self._deadline("all_reduce"):
            dist.all_reduce(tensor, op=dist.ReduceOp.MAX)
        return float(tensor)

    def all_gather_object(self, value: T) -> list[T]:
        """Return every rank's value, in rank order."""
        if self.world_size == 1:
            return [value]
        gathered: list[Any] = [None] * self.world_size
        with self._deadline("all_gather_object"):
            dist.all_gather_object(gathered, value)
        return gathered

    def broadcast_object(self, value: T | None) -> T:
        """Return rank 0's value on every rank. The other ranks' values are ignored."""
        if self.world_size == 1:
            assert value is not None
            return value
        box = [value]
        with self._deadline("broadcast_object"):
            # The device is the CPU, so that gloo sends the value: a missing rank is then an exception at the deadline.
            dist.broadcast_object_list(box, src=0, device=_CPU)
        return box[0]  # type: ignore[return-value]

    def all_succeed(self, work: Callable[[], T]) -> list[T]:
        """Return the results of `work()` on all ranks, in rank order. If `work` raises a ProjectError on some ranks,
        every rank raises the error of the first of these ranks. So no rank waits for a rank that has stopped."""
        outcome: T | ProjectError
        try:
            outcome = work()
        except ProjectError as error:
            if self.world_size == 1:
                raise
            outcome = error
        outcomes = self.all_gather_object(outcome)
        for rank, other in enumerate(outcomes):
            # The rank on which the work failed raises its own error object, which has the traceback.
            if isinstance(other, ProjectError):
                raise outcome if rank == self.rank and isinstance(outcome, ProjectError) else other
        return outcomes  # type: ignore[return-value]

    def barrier(self) -> None:
        """Wait until every rank has called this."""
        self.all_reduce_max(0.0)

    def all_reduce_tensor(self, tensor: torch.Tensor) -> None:
        """Replace a tensor by its sum over ranks, in place."""
        if self.world_size > 1:
            with self._deadline("all_reduce"):
                dist.all_reduce(tensor)

    def broadcast_tensor(self, tensor: torch.Tensor) -> None:
        """Overwrite a tensor with rank 0's tensor, in place."""
        if self.world_size > 1:
            with self._deadline("broadcast"):
                dist.broadcast(tensor, src=0)

    def close(self) -> None:
        """Leave the process group, if there is one."""
        if self.world_size > 1 and dist.is_initialized():
            dist.destroy_process_group()

    @contextmanager
    def _deadline(self, name: str) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:  # gloo's deadline has passed, or another rank has ended
            absent = absent_ranks(self.rank, self.world_size)
            who = f"{ranks_named(absent)} did not come to" if absent else "a rank was late at"
            logs = ", ".join(f"learner_rank{rank}.log" for rank in absent) or "each learner_rank*.log"
            raise CollectiveError(
                f"{who} collective {name}",
                found=f"{str(error).splitlines()[0]} (on rank {self.rank} of {self.world_size}, which waited)",
                wanted=f"every rank there within training.collective_timeout_s = {self.timeout_s:g} s",
                remedy=f"{logs} says what it did last: it hangs, or it ended; a slow rank needs a longer timeout",
            ) from error


_ROLL_CALL_S = 2.0  # max wait for reports of healthy ranks, which notice a failed collective at the same time


def absent_ranks(rank: int, world_size: int) -> list[int]:
    """Return the ranks that are missing after a collective has failed. Every rank that notices the failure calls this
    and reports itself. Missing ranks report nothing, because they hang or have ended. [] if this cannot be found
    out."""
    missing: list[int] = []

    def call_the_roll() -> None:
        store = dist.distributed_c10d._get_default_store()
        store.set(f"roll call/{rank}", "here")
        missing.extend(other for other in range(world_size) if other != rank)
        retry = Retry(_ROLL_CALL_S, 0.05)
        while missing and retry.wait():
            missing[:] = [other for other in missing if not store.check([f"roll call/{other}"])]

    # The reports are read on a separate thread, because a call of the store never returns if the store's process hangs.
    thread = threading.Thread(target=_quietly, args=(call_the_roll,), name="roll call", daemon=True)
    thread.start()
    thread.join(2 * _ROLL_CALL_S)
    return list(missing)


def _quietly(work: Callable[[], None]) -> None:
    with suppress(RuntimeError, ValueError):  # there is no process group yet, or the process of its store has ended
        work()


def ranks_named(ranks: Sequence[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"


def init_ranks(environment: Mapping[str, str], *, timeout_s: float) -> Ranks:
    """Join the process group of torchrun's processes, and return this rank. The group uses gloo, and NCCL for tensors
    on GPUs. Without torchrun there is one rank and no group. With a GPU the process uses one CPU thread, unless
    OMP_NUM_THREADS is set.

    Raises ConfigError if there are more processes than GPUs, CollectiveError if a process does not join in time.
    """
    rank, world_size = int(environment.get("RANK", 0)), int(environment.get("WORLD_SIZE", 1))
    local_rank = int(environment.get("LOCAL_RANK", 0))
    device = torch.device("cpu")
    if torch.cuda.is_available():
        if local_rank >= torch.cuda.device_count():
            raise ConfigError(
                "more learner processes than GPUs",
                found=f"local rank {local_rank}, {torch.cuda.device_count()} visible GPUs",
                wanted="one GPU per process",
                remedy="lower NPROC (torchrun --nproc-per-node), or make more GPUs visible",
            )
        device = torch.device("cuda", local_rank)
        torch.cuda.set_device(device)
        if "OMP_NUM_THREADS" not in environment:
            # torchrun sets one thread too if there are several ranks. The CPU has little to do: two threads do not
            # encode an image faster, and one thread per core would slow down the thread that launches kernels.
            torch.set_num_threads(1)
    ranks = Ranks(rank=rank, world_size=world_size, device=device, timeout_s=timeout_s)
    if world_size > 1:
        with ranks._deadline("init_process_group"):
            # Objects are sent by gloo, which raises an exception if a rank is missing. NCCL's watchdog would end the
            # process.
            dist.init_process_group(
                "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo", timeout=timedelta(seconds=timeout_s)
            )
    return ranks


def broadcast_parameters(module: torch.nn.Module, ranks: Ranks) -> None:
    """Overwrite the module's parameters and buffers on every rank with rank 0's."""
    for tensor in [*module.parameters(), *module.buffers()]:
        ranks.broadcast_tensor(tensor.data)


def reduce_gradients(parameters: Sequence[torch.nn.Parameter], ranks: Ranks, *, weight_sum: float) -> None:
    """Replace this rank's summed gradients, on every rank, by the gradients of the weighted mean loss over all ranks.

    `weight_sum`: sum of the step's loss weights over all ranks. If `weight_sum` is 0, every gradient becomes 0.
    """
    # torch's DistributedDataParallel is not used: it reduces during the last backward pass, and ranks may have
    # different numbers of rows.
    scale = 1.0 / weight_sum if weight_sum > 0 else 0.0
    for bucket in _buckets(parameters):
        for p in bucket:
            # Ranks must reduce the same elements, even if no row of this rank used the parameter.
            if p.grad is None:
                p.grad = torch.zeros_like(p)
        if ranks.world_size == 1:
            torch._foreach_mul_([p.grad for p in bucket if p.grad is not None], scale)
            continue
        # The sum is in float32: in 16 bits its rounding errors would depend on the number of ranks.
        flat = torch.cat([p.grad.flatten().float() for p in bucket if p.grad is not None])
        ranks.all_reduce_tensor(flat)
        flat.mul_(scale)
        for p, part in zip(bucket, flat.split([p.numel() for p in bucket]), strict=True):
            assert p.grad is not None
            p.grad.copy_(part.view_as(p))


def _buckets(parameters: Sequence[torch.nn.Parameter]) -> Iterator[list[torch.nn.Parameter]]:
    bucket: list[torch.nn.Parameter] = []
    for p in parameters:
        if bucket and sum(q.numel() for q in bucket) + p.numel() > BUCKET_ELEMENTS:
            yield bucket
            bucket = []
        bucket.append(p)
    if bucket:
        yield bucket
