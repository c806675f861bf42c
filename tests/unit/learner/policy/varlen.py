"""torch's varlen attention on the CPU, slow and obvious, so that compiled layers take the path they take on CUDA.

Registers kernels for the two operators behind `torch.nn.attention.varlen`; importing it is enough.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch


def _weights(q: torch.Tensor, k: torch.Tensor, scale: float, causal: bool) -> torch.Tensor:
    """Return attention weights `[H, L, K]` of one segment, float32. Its last query meets its last key."""
    before = k.shape[1] - q.shape[1]
    hidden = torch.ones(q.shape[1], k.shape[1], dtype=torch.bool).triu(before + 1) & causal
    return (q @ k.transpose(1, 2) * scale).masked_fill(hidden, float("-inf")).softmax(-1)


def _segments(cu_seq_q: torch.Tensor, cu_seq_k: torch.Tensor) -> list[tuple[slice, slice]]:
    """Return the queries and the keys of each segment."""
    queries, keys = ([slice(*pair) for pair in pairwise(ends.tolist())] for ends in (cu_seq_q, cu_seq_k))
    return list(zip(queries, keys, strict=True))


def _heads(x: torch.Tensor, num_heads: int) -> torch.Tensor:
    """Return `[L, H_kv, D]` as float32 `[H, L, D]`."""
    return x.float().transpose(0, 1).repeat_interleave(num_heads // x.shape[1], dim=0)


@torch.library.register_kernel("torch_attn::_varlen_attn", "cpu")
def _forward(
    query: torch.Tensor,  # [T, H, D]
    key: torch.Tensor,  # [T, H_kv, D]
    value: torch.Tensor,
    cu_seq_q: torch.Tensor,
    cu_seq_k: torch.Tensor,
    max_q: int,
    max_k: int,
    is_causal: bool = False,
    scale: float | None = None,
    *options: Any,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    assert scale is not None
    num_heads = query.shape[1]
    out = torch.empty_like(query)
    for here, keys in _segments(cu_seq_q, cu_seq_k):
        q, k, v = _heads(query[here], num_heads), _heads(key[keys], num_heads), _heads(value[keys], num_heads)
        out[here] = (_weights(q, k, scale, is_causal) @ v).transpose(0, 1).to(out.dtype)
    return out, torch.zeros(num_heads, len(query)), torch.zeros(2, dtype=torch.uint64)


@torch.library.register_kernel("torch_attn::_varlen_attn_backward", "cpu")
def _backward(
    grad_out: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    cu_seq_q: torch.Tensor,
    cu_seq_k: torch.Tensor,
    max_q: int,
    max_k: int,
    is_causal: bool,
    rng_state: torch.Tensor,
    scale: float | None = None,
    window_size: list[int] | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    assert scale is not None
    num_heads = query.shape[1]
    grads = tuple(torch.empty_like(x) for x in (query, key, value))
    for here, keys in _segments(cu_seq_q, cu_seq_k):
        q, g = _heads(query[here], num_heads), _heads(grad_out[here], num_heads)
        k, v = _heads(key[keys], num_heads), _heads(value[keys], num_heads)
        p = _weights(q, k, scale, is_causal)
        dp = g @ v.transpose(1, 2)
        ds = p * (dp - (dp * p).sum(-1, keepdim=True)) * scale
        wholes = (ds @ k, ds.transpose(1, 2) @ q, p.transpose(1, 2) @ g)
        for grad, at, whole in zip(grads, (here, keys, keys), wholes, strict=True):
            per_head = whole.unflatten(0, (grad.shape[1], -1)).sum(1)
            grad[at] = per_head.transpose(0, 1).to(grad.dtype)
    return grads
