"""Moves training state off the device while colocated vLLM computes there (R20).

In: the policy, the optimizer, and which of the two to move. Out: the block `Offload.away`, in which the moved tensors
are in host memory. After the block all tensors (weights, gradients, moments) are on the device again, equal bit for
bit, and tied weights are tied as before. On the CPU nothing is moved. `learner/rollout/colocated_engine.py` uses the
block for all work of vLLM: its start, weight loads, rollouts.

The host memory is page-locked and kept for the next move.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

import torch

from learner.config.modes import ROLLOUT
from learner.config.sections.rollout_matching import OffloadConfig
from learner.policy.load import Policy
from learner.policy.optim import Optimizer
from learner.policy.sharding import is_part
from shared.errors import ConfigError

HOST = torch.device("cpu")
_BLOCK_BYTES = 256 * 2**20  # a power of two, because torch rounds page-locked memory up to the next power of two
_ALIGNMENT = 64


class HostMemory:
    """Host memory for tensors, allocated in large blocks that are reused. If `place` is called after `begin` with the
    same tensors in the same order, it returns the same memory again."""

    def __init__(self, *, page_locked: bool) -> None:
        self._page_locked = page_locked
        self._blocks: list[torch.Tensor] = []  # tensors of uint8, one per block
        self._used: list[int] = []  # number of bytes in use of each block

    def begin(self) -> None:
        """Let `place` give out all memory again. The blocks stay allocated."""
        self._used = [0] * len(self._blocks)

    def place(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return an uninitialised tensor in host memory, with the type and shape of `tensor`. The new tensor has the
        same order of dimensions in memory, without gaps. Raises ConfigError if the host has too little memory."""
        fitting = (i for i, block in enumerate(self._blocks) if self._used[i] + tensor.nbytes <= block.nbytes)
        index = next(fitting, len(self._blocks))
        if index == len(self._blocks):
            self._blocks.append(self._allocate(max(_BLOCK_BYTES, tensor.nbytes)))
            self._used.append(0)
        begin = self._used[index]
        content = self._blocks[index][begin : begin + tensor.nbytes]
        self._used[index] += -(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT
        # The strides of an empty tensor have no gaps, even if `tensor` has gaps.
        strides = torch.empty_like(tensor, device="meta").stride()
        return content.view(tensor.dtype).as_strided(tensor.shape, strides)

    def _allocate(self, num_bytes: int) -> torch.Tensor:
        try:
            return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=self._page_locked)
        except RuntimeError as error:
            held = sum(block.nbytes for block in self._blocks)
            raise ConfigError(
                f"{ROLLOUT}.offload: the host has too little memory for the state that is moved off the device",
                found=f"{held / 2**30:.1f} GiB, and {num_bytes / 2**30:.2f} more refused: {str(error).splitlines()[0]}",
                wanted="page-locked host memory as large as the moved state, on each rank",
                remedy="move less (offload_model, offload_optimizer), or raise the job's memory limit",
            ) from error


class Offload:
    """Moves tensors from `device` to host memory and back. `tensors()` lists the tensors. `tensors()` is called before
    each move, because there are not always gradients."""

    def __init__(self, tensors: Callable[[], Iterable[torch.Tensor]], device: torch.device) -> None:
        self._tensors, self._device = tensors, device
        # The memory is kept from move to move: allocating new page-locked memory takes ten times as long as the copy.
        self._memory = HostMemory(page_locked=device.type == "cuda")

    @property
    def moves(self) -> bool:
        """True if `away` would now move at least one tensor."""
        return any(True for _ in self._tensors())

    @contextmanager
    def away(self) -> Iterator[None]:
        """Keep the tensors in host memory inside the `with` block, where they may be read, but not changed. Raises
        ConfigError before the first tensor is moved if the host has too little memory."""
        tensors = list(self._tensors())
        self._memory.begin()
        # All memory is taken before the first copy, so if memory is short, no tensor has been moved.
        places = [self._memory.place(tensor) for tensor in tensors]
        for tensor, place in zip(tensors, places, strict=True):
            place.copy_(tensor.data, non_blocking=True)
        # A copy must have ended before the host reads it.
        self._wait()
        for tensor, place in zip(tensors, places, strict=True):
            tensor.data = place
        try:
            if tensors and self._device.type == "cuda":
                # The cache is emptied, because vLLM allocates its memory directly, not from torch's cache.
                torch.cuda.empty_cache()
            yield
        finally:
            for tensor in tensors:
                # Without `copy`, `to` would return the host memory itself if the device is the CPU, and the next move
                # would overwrite it.
                tensor.data = tensor.data.to(self._device, non_blocking=True, copy=True)
            self._wait()

    def _wait(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)


def make_offload(config: OffloadConfig, policy: Policy, optimizer: Optimizer | None) -> Offload:
    """Return the `Offload` that `config` describes. Raises ConfigError if a parameter is sharded, or is not on the
    policy's device: such a state cannot be moved safely."""
    moves = config.enabled and policy.device != HOST
    moves_model, moves_optimizer = moves and config.offload_model, moves and config.offload_optimizer

    def tensors() -> Iterator[torch.Tensor]:
        if moves_model:
            yield from policy.model.parameters()
            yield from (p.grad for p in policy.model.parameters() if p.grad is not None)
            yield from policy.model.buffers()
        if moves_optimizer and optimizer is not None:
            yield from optimizer.state().values()

    if config.enabled and (config.offload_model or config.offload_optimizer):
        _require_whole(policy)
    return Offload(tensors, policy.device)


def _require_whole(policy: Policy) -> None:
    """Raises ConfigError if a parameter is sharded, or is not on the policy's device."""
    for name, parameter in policy.model.named_parameters():
        if is_part(parameter):
            raise _unsafe(f"{name} sharded over ranks (an FSDP DTensor)", policy)
        if parameter.device != policy.device:
            raise _unsafe(f"{name} on {parameter.device}", policy)


def _unsafe(found: str, policy: Policy) -> ConfigError:
    return ConfigError(
        f"{ROLLOUT}.offload.enabled: the training state cannot be moved off the device safely",
        found=found,
        wanted=f"every parameter whole on {policy.device}",
        remedy="set offload.enabled: false, train without sharding, or roll out elsewhere: rollout_backend: hf, or "
        "vllm.mode: server",
    )
