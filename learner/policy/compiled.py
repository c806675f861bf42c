"""The layers of language model and vision tower, and the vocabulary loss, compiled (`model.compile`).

In: a transformers model and what the configuration wants. Out: the same model, its layers compiled in place, or the
reason why they stay as they are. Kernels between matrix products (norms, rotary positions, activations, residuals)
do little but read and write memory; compiled, several become one.

Invariants: parameters keep their names, their memory and their gradients, so that the sync, checkpoints, offload and
adapters see no difference. Layers of a kind share one compiled program, and so do rows of all lengths. Only learning is
compiled: whoever generates or scores does so inside `uncompiled()`. Gradient checkpointing goes around compiled layers.
Called by `load.py`; torch.compile itself runs when the first row comes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import cache
from typing import Any, Literal

import torch
from torch._dynamo.exc import TorchDynamoException
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from shared.errors import ConfigError

Wanted = Literal["auto", True, False]
AUTO_PARAMETERS = 500_000_000  # below, a row has little to gain, and compiling takes longer than short runs
BACKEND = "inductor"
ERROR_LENGTH = 300  # characters of a compiler's words; advice on how to debug torch comes behind them


def compile_layers(model: PreTrainedModel, wanted: Wanted, device: torch.device, *, sharded: bool = False) -> str:
    """Compile what there is to compile. Returns why nothing is compiled, or nothing where it is. A sharded model stays
    as it is: its ranks gather and free weights around every layer.

    Raises ConfigError where `wanted` is true and this machine or model can't do it.
    """
    if wanted is False:
        return "model.compile: false"
    if sharded:
        return "model.sharding: fsdp"
    if wanted == "auto" and (reason := _not_worth_it(model, device)):
        return reason
    layers = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
    obstacle = _compiler_obstacle(device) if layers else f"{type(model).__name__} does not mark its layers"
    if obstacle and wanted is True:
        raise ConfigError(
            "the model can't be compiled",
            found=f"model.compile: true; {obstacle}",
            wanted="layers that transformers could checkpoint, and a compiler that works: gcc, on CUDA also triton",
            remedy="install them (on Debian: gcc g++ python3-dev), or set model.compile: auto or false",
        )
    if not obstacle:
        for layer in layers:
            layer.compile(dynamic=True, backend=BACKEND)
    return obstacle


def uncompiled() -> AbstractContextManager[Any]:
    """Inside, compiled layers run as they were written: what runs once, or with a cache, is not worth a program."""
    return torch.compiler.set_stance("force_eager")


@contextmanager
def compiling() -> Iterator[None]:
    """Around learning: a layer that can't be compiled, which its first row shows, ends in words. Raises ConfigError."""
    try:
        yield
    except TorchDynamoException as error:
        raise ConfigError(
            "a layer of the model, or the loss, can't be compiled",
            found=_shortened(error),
            wanted="what torch.compile takes",
            remedy="set model.compile: false",
        ) from error


@cache
def compiled_function(function: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """`function`, compiled for arguments of all lengths; the same one for the same function."""
    return torch.compile(function, dynamic=True, backend=BACKEND)


def _not_worth_it(model: PreTrainedModel, device: torch.device) -> str:
    if device.type != "cuda":
        return "model.compile: auto compiles on CUDA only"
    if sum(p.numel() for p in model.parameters()) < AUTO_PARAMETERS:
        return f"model.compile: auto compiles models of {AUTO_PARAMETERS:,} parameters and more"
    return ""


def _compiler_obstacle(device: torch.device) -> str:
    """Why torch.compile does not work here, tried on the smallest program; empty where it does."""
    try:
        torch.compile(_trial, backend=BACKEND)(torch.ones(8, device=device))
    except Exception as error:  # whatever a missing compiler, header or package leads to, on any backend
        return f"torch.compile fails: {_shortened(error)}"
    return ""


def _shortened(error: Exception) -> str:
    return " ".join(str(error).split())[:ERROR_LENGTH]


def _trial(x: torch.Tensor) -> torch.Tensor:
    return x * 2 + 1
