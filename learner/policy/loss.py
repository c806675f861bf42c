"""Weighted cross-entropy over the supervised tokens of a row.

In: hidden states, and for each supervised token the position that predicts it, its id (target) and its weight. Out: the
*sum* of weighted losses. The trainer divides the gradients once by the sum of the step's weights, so the gradients do
not depend on how samples are packed into rows or distributed over ranks.

The output head runs only at the positions that predict supervised tokens, LOGITS_CHUNK of them at a time. A row's full
logits (T x vocabulary) are never computed. A compiled loss does not even store a chunk's logits in float32.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from learner.extensions import LossFunction, where_raised
from learner.policy.compiled import compiled_function
from shared.errors import LossError

LOGITS_CHUNK = 1024  # max supervised tokens whose logits are computed at once; the backward pass computes them again


@dataclass(frozen=True, kw_only=True)
class RowLoss:
    """The result of one row's forward and backward pass."""

    loss_sum: float  # sum of the tokens' losses in nats, each multiplied by its weight
    weight_sum: float  # sum of the tokens' weights
    num_supervised: int  # number of supervised tokens
    counts: Mapping[str, float] = field(default_factory=dict)  # the sums of `policy_loss`; {} without policy gradient


def weighted_loss(
    hidden: torch.Tensor,  # [T, hidden]
    head: torch.nn.Module,
    predict_at: torch.Tensor,  # [N]
    targets: torch.Tensor,  # [N]
    weights: torch.Tensor,  # [N]
    *,
    compiled: bool = False,
    function: LossFunction | None = None,
) -> torch.Tensor:
    """Return the sum of weighted losses as a float32 scalar. `function`: the user's loss function, which computes the
    loss instead. With N = 0 the result is 0, and all gradients are zeros, not None (D5), also the head's."""
    if len(targets) == 0:
        # One token goes through the head, so that a sharded head is gathered and reduced on every rank.
        return head(hidden[:1]).float().sum() * 0.0
    logprobs = token_logprobs(hidden[predict_at], head, targets, compiled=compiled)
    return -(logprobs * weights).sum() if function is None else _of_function(function, logprobs, weights)


def _of_function(function: LossFunction, logprobs: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Return the loss that the user's function computes. Raises LossError if the function fails, or returns no scalar
    with a gradient."""
    try:
        loss = function(logprobs, weights)
    except Exception as error:
        # A lack of memory is not the function's fault, and the caller names the row that does not fit.
        if is_out_of_memory(error):
            raise
        raise _function_error(where_raised(error)) from error
    if not isinstance(loss, torch.Tensor) or loss.shape != () or not loss.requires_grad:
        shape = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, torch.Tensor) else type(loss).__name__
        raise _function_error(f"{shape}, requires_grad {getattr(loss, 'requires_grad', False)}")
    return loss.float()


def _function_error(found: str) -> LossError:
    return LossError(
        "loss.function failed",
        found=found,
        wanted="the sum over tokens, as a scalar tensor with a gradient",
        remedy="correct the function (docs/extending.md), or unset loss.function",
    )


def token_logprobs(
    hidden: torch.Tensor, head: torch.nn.Module, targets: torch.Tensor, *, compiled: bool = False
) -> torch.Tensor:
    """Return the natural log-probabilities `[N]` of the `targets` `[N]`, which the hidden states `[N, hidden]` predict.
    The log-softmax is computed in float32."""
    return _in_chunks(compiled_function(_chunk_logprobs) if compiled else _chunk_logprobs, hidden, head, targets)


def logprobs_and_entropy(
    hidden: torch.Tensor, head: torch.nn.Module, targets: torch.Tensor, *, compiled: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the result of `token_logprobs` [N], and, without gradient, the entropy of each predicted distribution in
    nats [N]."""
    of_chunk = compiled_function(_chunk_logprobs_and_entropy) if compiled else _chunk_logprobs_and_entropy
    both = _in_chunks(of_chunk, hidden, head, targets)
    return both[0], both[1].detach()


def _in_chunks(
    of_chunk: Callable[[torch.nn.Module, torch.Tensor, torch.Tensor], torch.Tensor],
    hidden: torch.Tensor,
    head: torch.nn.Module,
    targets: torch.Tensor,
) -> torch.Tensor:
    """Apply `of_chunk` to at most LOGITS_CHUNK tokens at a time, and return the results, joined along their last
    dimension. The chunks have about equal lengths: a last chunk of one token would be compiled separately."""
    if len(targets) <= LOGITS_CHUNK:
        return of_chunk(head, hidden, targets)
    count = -(-len(targets) // LOGITS_CHUNK)
    # Chunks are copied, because torch compiles separately for views.
    parts = ((h.clone(), t.clone()) for h, t in zip(hidden.chunk(count), targets.chunk(count), strict=True))
    return torch.cat([checkpoint(of_chunk, head, part, wanted, use_reentrant=False) for part, wanted in parts], dim=-1)


def _chunk_logprobs(head: torch.nn.Module, hidden: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return -F.cross_entropy(head(hidden).float(), targets, reduction="none")


def _chunk_logprobs_and_entropy(head: torch.nn.Module, hidden: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    logits = head(hidden).float()
    with torch.no_grad():
        logprobs = logits.log_softmax(-1)
        entropy = -(logprobs.exp() * logprobs).sum(-1)
    return torch.stack([-F.cross_entropy(logits, targets, reduction="none"), entropy])


def check_finite(loss_sum: float, sample_ids: list[str]) -> None:
    """Raises LossError if `loss_sum`, the loss of the row with these samples, is not finite."""
    if not np.isfinite(loss_sum):
        raise LossError(
            "the loss is not finite",
            found=f"{loss_sum} on the row of samples {sample_ids}",
            wanted="a finite loss",
            remedy="lower training.learning_rate, or train the weights in float32 (model.dtype)",
        )


def is_out_of_memory(error: Exception) -> bool:
    """Return True if the error says that memory was too small. For host memory torch raises a plain RuntimeError, which
    is known by its message."""
    return isinstance(error, torch.OutOfMemoryError) or "DefaultCPUAllocator" in str(error)
