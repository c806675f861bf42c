"""Training state off the device while colocated vLLM allocates and computes there (R20).

In: the policy, the optimizer, and which of them to move. Out: a block in which they are in host memory; afterwards they
are back as they were, bit for bit, whatever happened inside: gradients and ties of the model, the optimizer's moments.
Nothing happens where the device is the CPU. Entered by `learner/rollout/colocate_engine.py` around everything that vLLM
does: its start, weight loads, rollouts.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

import torch

from learner.config.rules import ROLLOUT
from learner.config.schema import OffloadConfig
from learner.optim import Optimizer
from learner.policy.load import Policy
from learner.policy.sharding import is_part
from shared.errors import ConfigError

HOST = torch.device("cpu")


class Movable(Protocol):
    def to(self, device: torch.device, /) -> object: ...


class Offload:
    """`parts` live on `device`."""

    def __init__(self, *parts: Movable, device: torch.device) -> None:
        self._parts, self._device = parts if device != HOST else (), device

    @contextmanager
    def away(self) -> Iterator[None]:
        """Inside, the device holds nothing of the parts; they must not be used for anything but reading weights."""
        try:
            for part in self._parts:
                part.to(HOST)
            if self._parts:
                torch.cuda.empty_cache()  # vLLM allocates by itself, not from what torch has kept
            yield
        finally:
            for part in self._parts:
                part.to(self._device)


def make_offload(config: OffloadConfig, policy: Policy, optimizer: Optimizer) -> Offload:
    """What the configuration names. Raises ConfigError where it can't be moved and come back as it was."""
    model = [policy.model] if config.enabled and config.offload_model else []
    moments = [optimizer] if config.enabled and config.offload_optimizer else []
    if model or moments:
        _require_whole(policy)
    return Offload(*model, *moments, device=policy.device)


def _require_whole(policy: Policy) -> None:
    """The optimizer's state is laid out as the parameters are."""
    for name, parameter in policy.model.named_parameters():
        if is_part(parameter):
            raise _unsafe(f"{name} sharded over ranks (a DTensor, as FSDP makes it)", policy)
        if parameter.device != policy.device:
            raise _unsafe(f"{name} on {parameter.device}", policy)


def _unsafe(found: str, policy: Policy) -> ConfigError:
    return ConfigError(
        f"{ROLLOUT}.offload.enabled: the training state can't be moved off the device safely",
        found=found,
        wanted=f"every parameter whole on {policy.device}",
        remedy="set offload.enabled: false, train without sharding, or roll out elsewhere: rollout_backend: hf, or "
        "vllm.mode: server",
    )
