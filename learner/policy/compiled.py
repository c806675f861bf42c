"""Compiles the layers of language model and vision tower, and the vocabulary loss (`model.compile`).

In: a transformers model and the value of `model.compile`. Out: the same model with its layers compiled in place, or the
reason why nothing was compiled. The kernels between matrix products (norms, rotary positions, activations, residuals)
spend most of their time on reading and writing memory. The compiler makes one kernel of several.

Invariants: parameters keep their names, memory and gradients, so the sync, checkpoints, offloading and adapters are not
affected. All layers of one kind share one compiled program, which takes rows of any length. Only learning is compiled:
generation and scoring run inside `uncompiled()`. Gradient checkpointing works with compiled layers. The compiler runs
when the first row is learned.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import cache, partial
from typing import Literal

import torch
from torch._dynamo.exc import TorchDynamoException
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from shared.errors import ConfigError

Wanted = Literal["auto", True, False]
AUTO_PARAMETERS = 500_000_000  # `auto` does not compile smaller models: the gain is small, and compiling takes time
BACKEND = "inductor"
ERROR_LENGTH = 300  # max characters shown of a compiler's message, whose end is advice on debugging torch


def compile_layers(model: PreTrainedModel, wanted: Wanted, device: torch.device, *, sharded: bool = False) -> str:
    """Compile the model's layers in place. Returns "", or the reason if nothing was compiled.

    A sharded model is not compiled, because its ranks gather and free weights around every layer.

    Raises ConfigError if `wanted` is True, but the compiler does not work here or the model does not mark its layers.
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
            "the model cannot be compiled",
            found=f"model.compile: true; {obstacle}",
            wanted="layers that transformers can checkpoint, and a working compiler: gcc, on CUDA also triton",
            remedy="install them (on Debian: gcc g++ python3-dev), or set model.compile: auto or false",
        )
    if not obstacle:
        for layer in layers:
            # With `dynamic` one program serves rows of every length.
            layer.compile(dynamic=True, backend=BACKEND)
            layer._compiled_call_impl = partial(_with_gradients, layer, layer._compiled_call_impl)
    return obstacle


def _with_gradients(
    layer: torch.nn.Module, compiled: Callable[..., object], hidden: torch.Tensor, *args: object, **kw: object
) -> object:
    """Call a compiled layer. The layer's input is brought into the form that most layers' inputs have: an input without
    a gradient gets one, and an input that is a view is copied."""
    # Without this, torch would compile all layers twice (20 s for a model of 4B). The added gradient is not used, and
    # costs the backward pass of three projections.
    if torch.is_grad_enabled() and not hidden.requires_grad and any(p.requires_grad for p in layer.parameters()):
        hidden = hidden.detach().requires_grad_()
    elif hidden._is_view():
        hidden = hidden.clone()
    return compiled(hidden, *args, **kw)


def uncompiled() -> AbstractContextManager[object]:
    """Run the layers uncompiled inside the `with` block. Passes that run once or use a key-value cache would take
    longer to compile than they gain."""
    return torch.compiler.set_stance("force_eager")


@contextmanager
def compiling() -> Iterator[None]:
    """Let compiled layers and losses run inside the `with` block. Raises ConfigError if the compiler fails, which it
    does at the first row."""
    try:
        # Without this option torch treats a layer's float (an epsilon, which never changes) as an input. After tracing,
        # torch finds that a kernel needs the number, and traces again. The first trace is not kept in any cache.
        with torch._dynamo.config.patch(specialize_float=True):
            yield
    except TorchDynamoException as error:
        raise ConfigError(
            "a layer of the model, or the loss, cannot be compiled",
            found=_shortened(error),
            wanted="code that torch.compile accepts",
            remedy="set model.compile: false",
        ) from error


@cache
def compiled_function(function: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Return `function`, compiled for tensors of any length. Each function is compiled once per process."""
    return torch.compile(function, dynamic=True, backend=BACKEND)


def _not_worth_it(model: PreTrainedModel, device: torch.device) -> str:
    if device.type != "cuda":
        return "model.compile: auto compiles on CUDA only"
    if sum(p.numel() for p in model.parameters()) < AUTO_PARAMETERS:
        return f"model.compile: auto compiles models of {AUTO_PARAMETERS:,} parameters and more"
    return ""


def _compiler_obstacle(device: torch.device) -> str:
    """Try torch.compile with a tiny function. Returns "" if the compiler works, else the reason why it does not."""
    try:
        torch.compile(_trial, backend=BACKEND)(torch.ones(8, device=device))
    except Exception as error:  # a missing compiler, header or package raises many types
        return f"torch.compile fails: {_shortened(error)}"
    return ""


def _shortened(error: Exception) -> str:
    return " ".join(str(error).split())[:ERROR_LENGTH]


def _trial(x: torch.Tensor) -> torch.Tensor:
    return x * 2 + 1
