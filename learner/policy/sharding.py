"""FSDP2: each rank holds its part of every parameter, gradient and moment, for models that do not fit one device.

In: a model in host memory, and the ranks. Out: a `ShardedForward`, which runs every forward pass. Functions gather a
whole tensor from the ranks' parts, and cut a rank's part from a whole tensor. No other module handles a DTensor (FSDP's
type of a sharded tensor). A layer of the decoder or of the vision tower is whole on a device only while it computes.
The other parts of the model (embeddings, head, the first and last layers of the vision tower) are whole during a pass.

Invariants: the whole model is never on one device. All ranks make the same passes and the same calls of `whole` in the
same order, because each is a collective. Every pass uses every layer: a row without an image gets a blank one
(`packed.py`), and a row without supervised tokens sends a token through the head (`loss.py`). If a pass left out a
layer, ranks with different rows would gather and reduce different tensors. Every backward pass sums gradients over
ranks, in float32, without averaging.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TypeVar

import torch
from torch import distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from learner.policy.parallel import Ranks, absent_ranks, ranks_named
from shared.errors import CollectiveError, ConfigError

M = TypeVar("M", bound=torch.nn.Module)


class ShardedForward(torch.nn.Module):
    """The outermost module of a sharded model. A whole pass, with its loss, is one call of this module."""

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        self.model = model

    def forward(self, work: Callable[[], torch.Tensor]) -> torch.Tensor:
        return work()

    def run(self, work: Callable[[], torch.Tensor]) -> torch.Tensor:
        """Return the result of `work`, which computes one forward pass with the model. Collective: every rank must call
        this. Raises CollectiveError if a rank is missing."""
        assert isinstance(self, FSDPModule)
        with collective_errors():
            # FSDP gathers weights before a module's call, and frees them after it. A call of the model would not
            # include the head, which the learner applies in the loss.
            result: torch.Tensor = self(work)
            if not torch.is_grad_enabled():
                # `reshard` frees the gathered weights. In a pass with gradients, the backward pass frees the weights.
                self.reshard()
        return result


def shard(model: PreTrainedModel, ranks: Ranks) -> ShardedForward:
    """Replace the parameters of `model` by this rank's parts of rank 0's parameters, on the rank's device. Return the
    module that runs the forward passes. Collective.

    Raises ConfigError if transformers does not mark the model's layers.
    """
    layers = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
    if not layers:
        raise ConfigError(
            "model.sharding: fsdp: this model cannot be sharded layer by layer",
            found=f"a {type(model).__name__} without a GradientCheckpointingLayer of transformers",
            wanted="a model whose layers transformers marks as such",
            remedy="set model.sharding: none, or choose another model",
        )
    mesh = init_device_mesh(ranks.device.type, (ranks.world_size,))
    forward = ShardedForward(model)
    # Modules are sharded one after the other, so that the whole model is never on a device.
    for module in [*layers, forward]:
        for tensor in [*module.parameters(), *module.buffers()]:
            if not isinstance(tensor, DTensor):
                tensor.data = tensor.data.to(ranks.device)
                ranks.broadcast_tensor(tensor.data)
        # Gradients are summed in every backward pass. Summing only in a step's last one is not faster, because
        # transfers run during computation, and it needs memory for a whole gradient.
        sharded = fully_shard(module, mesh=mesh, mp_policy=MixedPrecisionPolicy(reduce_dtype=torch.float32))
        # FSDP averages gradients over ranks by default. The learner needs the sum of the gradients.
        sharded.set_gradient_divide_factor(1.0)
        # gloo cannot scale while it reduces, so plain sums are used.
        sharded.set_force_sum_reduction_for_comms(True)
    return forward


def is_part(tensor: torch.Tensor) -> bool:
    """Return True if a tensor is this rank's part of a sharded tensor."""
    return isinstance(tensor, DTensor)


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """Gather a whole tensor from all ranks' parts, and return it, detached, on every rank. `tensor`: this rank's part.
    A tensor that is not sharded is returned unchanged. Collective. Raises CollectiveError."""
    if not isinstance(tensor, DTensor):
        return tensor
    with torch.no_grad(), collective_errors():
        return tensor.full_tensor()


def whole_on_host(tensors: Mapping[str, torch.Tensor], *, keep: bool) -> dict[str, torch.Tensor]:
    """Return the whole tensors in host memory, by name. A rank without `keep` takes part and returns {}. Tensors are
    gathered one at a time. Collective.

    If several names share a tensor, they share it in the result too.
    """
    gathered: dict[int, torch.Tensor] = {}
    for tensor in tensors.values():
        if id(tensor) not in gathered:
            found = whole(tensor).detach()
            gathered[id(tensor)] = found.to("cpu", copy=True) if keep else torch.empty(0)
    return {name: gathered[id(tensor)] for name, tensor in tensors.items()} if keep else {}


@torch.no_grad()
def whole_copy(module: M, device: torch.device) -> M:
    """Return a copy of `module` and its submodules whose parameters are whole and on `device`. The copy shares those
    parameters that are whole and on `device` already. Collective."""
    duplicate = copy.copy(module)
    duplicate._parameters = {
        name: p if p is None else torch.nn.Parameter(whole(p.detach()).to(device), requires_grad=False)
        for name, p in module._parameters.items()
    }
    duplicate._modules = {name: m if m is None else whole_copy(m, device) for name, m in module._modules.items()}
    return duplicate


def part_of(tensor: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Return this rank's part of a whole `tensor`, sharded as `like` is and on the same device. If `like` is not
    sharded, return `tensor` itself."""
    if not isinstance(like, DTensor):
        return tensor
    mesh = like.device_mesh
    # If there are fewer rows than ranks, the last ranks get no rows.
    chunks = tensor.chunk(mesh.size())
    own = chunks[mesh.get_local_rank()] if mesh.get_local_rank() < len(chunks) else tensor[:0]
    # The part is copied, because a view would keep the whole tensor in memory.
    return DTensor.from_local(
        own.to(like.device, copy=True), mesh, like.placements, shape=tensor.shape, stride=tensor.stride()
    )


@contextmanager
def collective_errors() -> Iterator[None]:
    """Raise CollectiveError instead of torch's error if a collective in the `with` block fails because a rank is
    missing."""
    try:
        yield
    except RuntimeError as error:
        if not isinstance(error, dist.DistError) and "gloo" not in str(error).lower():
            raise
        absent = absent_ranks(dist.get_rank(), dist.get_world_size())
        who = f"{ranks_named(absent)} did not come: " if absent else ""
        raise CollectiveError(
            f"{who}a collective of the sharded model did not complete",
            found=str(error).splitlines()[0],
            wanted="every rank there within training.collective_timeout_s",
            remedy="the log of the rank that stopped first says why; a slow rank needs a longer timeout",
        ) from error
