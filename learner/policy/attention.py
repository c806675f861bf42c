"""Attention within segments: one row has several segments, without padding and without an L x L mask.

In: queries, keys and values of a whole row `[1, H, T, D]`, and where its segments end. Out: `[1, T, H, D]`. Every token
attends to its own segment only: causally in the language model, to all patches of the same image in a vision tower.
`use_segment_attention(model)` makes a transformers model use this attention. The forward pass of a packed row
(`packed.py`) gives the language model a `SegmentLayout`. Vision towers of the Qwen-VL kind compute the ends of their
images themselves (`cu_seqlens`).

Answers to one prompt may share the prompt (R47): a row with shared prompts has each prompt once, as a piece of its own.
Each answer is another piece, which attends to the prompt's tokens and to its own, as `SegmentLayout.key_index` says.
The keys and values of a prompt are repeated for each answer just before the kernel. All other values are computed once
per prompt.

On CUDA in 16 bits, attention is one varlen kernel per layer. Elsewhere neighbouring segments of similar length share a
call of torch's scaled dot product attention (SDPA). For the compiler (`compiled.py`) the varlen kernel is one opaque
operator: no length of a row leads to a new compilation.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch.nn.attention.varlen import varlen_attn
from torch.nn.utils.rnn import pad_sequence
from transformers import AttentionInterface, PreTrainedModel

from shared.errors import ConfigError

# The name must contain "flash". With another name transformers calls a vision tower's attention for one image at a
# time, instead of once with `cu_seqlens`.
SEGMENT_ATTENTION = "segment_flash"

MAX_PADDING = 1.25  # max area (pieces x longest length) of a padded SDPA call, as a multiple of the sum of lengths

# A CPU in bf16 uses plain matrix products (AMX) for at most this many keys, because SDPA is slower there.
MATMUL_LENGTH = 512
# Option for fewer heads of keys and values than of queries. torch 2.12 and later need it; earlier versions lack it.
_GROUPED: dict[str, Any] = {"enable_gqa": True} if "enable_gqa" in inspect.signature(varlen_attn).parameters else {}


@dataclass(frozen=True, eq=False)
class SegmentLayout:
    """Where a row's S pieces begin and end. A piece is a segment, a shared prompt, or an answer to a shared prompt."""

    lengths: tuple[int, ...]  # [S], number of tokens of each piece, which is its number of queries
    max_length: int  # max number of keys of a piece; a piece never has more queries than keys
    max_patches: int  # number of patches of the largest image; 0 without images
    cu_seqlens: torch.Tensor  # [S + 1] int32, 0 and the sums of `lengths` up to each piece; on the row's device
    prefixes: tuple[int, ...]  # [S], number of keys of the shared prompt, which come before the piece's own keys
    cu_keys: torch.Tensor  # [S + 1] int32, 0 and the sums of the pieces' numbers of keys up to each piece
    key_index: torch.Tensor | None  # [K], index in the row of each key's token; None: key i belongs to token i

    @classmethod
    def of(cls, lengths: Sequence[int], device: torch.device, *, max_patches: int = 0) -> SegmentLayout:
        """Return a layout without shared prompts."""
        ends = to_device(_ends(lengths), device)
        return cls(tuple(lengths), max(lengths), max_patches, ends, (0,) * len(lengths), ends, None)

    @classmethod
    def shared(
        cls, lengths: Sequence[int], prefixes: Sequence[range], device: torch.device, *, max_patches: int = 0
    ) -> SegmentLayout:
        """Return a layout with shared prompts. `prefixes`: for each piece, the range of its shared prompt's tokens in
        the row, to which the piece attends too; empty if there is none."""
        starts = _ends(lengths)[:-1].tolist()
        own = [range(start, start + length) for start, length in zip(starts, lengths, strict=True)]
        # Keys of a shared prompt are repeated for each of its answers, because the kernel takes consecutive keys only.
        pieces = [np.arange(one.start, one.stop) for both in zip(prefixes, own, strict=True) for one in both]
        num_keys = [len(before) + length for before, length in zip(prefixes, lengths, strict=True)]
        return cls(
            lengths=tuple(lengths),
            max_length=max(num_keys),
            max_patches=max_patches,
            cu_seqlens=to_device(_ends(lengths), device),
            prefixes=tuple(map(len, prefixes)),
            cu_keys=to_device(_ends(num_keys), device),
            key_index=to_device(torch.from_numpy(np.concatenate(pieces, dtype=np.int64)), device),
        )


def _ends(lengths: Sequence[int]) -> torch.Tensor:
    return torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)


def to_device(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return `tensor`, which is in host memory, as a tensor on `device`. The host does not wait for a CUDA device."""
    # torch keeps the pinned memory until the copy has ended.
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)


def use_segment_attention(model: PreTrainedModel) -> None:
    """Make every attention layer of `model` use `segment_attention`."""
    AttentionInterface.register(SEGMENT_ATTENTION, segment_attention)
    # The setter of `_attn_implementation` also sets the text and vision configurations.
    model.config._attn_implementation = SEGMENT_ATTENTION


def segment_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,  # [1, H_kv, T, D]
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    scaling: float | None = None,
    dropout: float = 0.0,
    segments: SegmentLayout | None = None,
    cu_seq_lens_q: torch.Tensor | None = None,
    max_length_q: int | None = None,
    is_causal: bool | None = None,
    **kwargs: object,
) -> tuple[torch.Tensor, None]:
    """Return the attention's output `[1, T, H, D]`, and None for its weights. transformers calls this function for
    models with the attention SEGMENT_ATTENTION.

    Raises ConfigError for a model whose attention has sinks, a soft cap, or a window shorter than the longest segment.
    """
    assert attention_mask is None, "packed rows have no masks"
    assert dropout == 0.0, "packed rows have no attention dropout"
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    where: SegmentLayout | torch.Tensor
    if cu_seq_lens_q is not None:  # a vision tower
        where = cu_seqlens = cu_keys = cu_seq_lens_q
        # `max_patches` is an upper bound, because windows within an image have fewer patches. `max_patches` is known on
        # the host, so the host need not wait for the device.
        max_length = segments.max_patches if segments is not None else max_length_q or int(cu_seqlens.diff().max())
    else:
        assert segments is not None, "this model is called through learner.policy.packed only"
        where, cu_seqlens, max_length = segments, segments.cu_seqlens, segments.max_length
        cu_keys = segments.cu_keys
    _refuse_variants(kwargs, max_length)
    # Layers that normalise queries and keys make them float32, which the varlen kernel does not take.
    if torch.is_autocast_enabled(query.device.type):
        dtype = torch.get_autocast_dtype(query.device.type)
        query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))  # [T, H, D]
    if isinstance(where, SegmentLayout) and where.key_index is not None:
        k, v = (Repeated.apply(x, where.key_index) for x in (k, v))
    if _varlen_can(query):
        return _varlen(q, k, v, cu_seqlens, cu_keys, max_length, scale, causal), None
    return _batched(q, k, v, where, scale, causal), None


class Repeated(torch.autograd.Function):
    """Returns the rows `x[index]` of a tensor `x` [T, H, D], where a row may be taken several times. The gradients of a
    repeated row are added in float32."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(index)
        ctx.num_rows = x.shape[0]
        return x.index_select(0, index)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        (index,) = ctx.saved_tensors
        # The sum is in float32, because in 16 bits each addition would be rounded.
        total = grad.new_zeros(ctx.num_rows, *grad.shape[1:], dtype=torch.float32)
        return total.index_add(0, index, grad.float()).to(grad.dtype), None


def _refuse_variants(kwargs: dict[str, object], max_length: int) -> None:
    window = kwargs.get("sliding_window")
    if (isinstance(window, int) and window < max_length) or kwargs.get("softcap") or kwargs.get("s_aux") is not None:
        raise ConfigError(
            "this model's attention is not supported in packed rows",
            found=f"sliding_window={window}, softcap={kwargs.get('softcap')}, sinks={kwargs.get('s_aux') is not None}",
            wanted=f"full attention over segments of {max_length} tokens",
            remedy="lower global_max_length below the window, or choose a model with full attention",
        )


def _varlen_can(query: torch.Tensor) -> bool:
    head_dim = query.shape[-1]
    # The kernel is flash attention's, which takes no other types and head sizes.
    return query.is_cuda and query.dtype in (torch.bfloat16, torch.float16) and head_dim % 8 == 0 and head_dim <= 256


def _varlen(
    q: torch.Tensor,  # [T, H, D]
    k: torch.Tensor,  # [K, H_kv, D]
    v: torch.Tensor,
    cu_seqlens: torch.Tensor,
    cu_keys: torch.Tensor,
    max_length: int,
    scale: float,
    causal: bool,
) -> torch.Tensor:
    """Return the output `[1, T, H, D]` of one kernel for all pieces. Each token of an answer attends to the whole
    prompt."""
    options: dict[str, Any] = {"scale": scale, "window_size": (-1, 0 if causal else -1)}
    if q.shape[1] != k.shape[1]:
        options |= _GROUPED
    # The kernel aligns a piece's last query with its last key, so an answer's queries see the whole prompt before them.
    out = varlen_attn(q, k, v, cu_seqlens, cu_keys, max_length, max_length, **options)
    assert isinstance(out, torch.Tensor)
    return out[None]


# `_batched` is not compiled: its calls depend on the row's lengths, so it would be compiled anew for each row.
@torch.compiler.disable
def _batched(
    q: torch.Tensor,  # [T, H, D]
    k: torch.Tensor,  # [K, H_kv, D]
    v: torch.Tensor,
    where: SegmentLayout | torch.Tensor,  # a tensor: cu_seqlens [S + 1]
    scale: float,
    causal: bool,
) -> torch.Tensor:
    """Return the output `[1, T, H, D]`, computed by one SDPA call per group of neighbouring pieces. Causal pieces are
    padded at the end, where no query attends to the padding. Without causality only pieces of equal length form a
    group, so there is no padding."""
    if isinstance(where, SegmentLayout):
        lengths, prefixes = where.lengths, where.prefixes
    else:
        lengths = tuple(where.diff().tolist())
        prefixes = (0,) * len(lengths)
    assert sum(lengths) == len(q), "segments do not add up to the row"
    queries = q.split(list(lengths))  # S tensors, each [L_s, H, D]
    num_keys = [prefix + length for prefix, length in zip(prefixes, lengths, strict=True)]
    pieces = [queries, k.split(num_keys), v.split(num_keys)]
    outputs: list[torch.Tensor] = []
    for start, end in share_calls(lengths, MAX_PADDING if causal else 1.0, prefixes):
        qs, ks, vs = (pad_sequence(list(x[start:end]), batch_first=True).transpose(1, 2) for x in pieces)
        out = _attend(qs, ks, vs, scale, causal).transpose(1, 2)  # [S', L_max, H, D]
        outputs += [out[i, :length] for i, length in enumerate(lengths[start:end])]
    return torch.cat(outputs)[None]


def share_calls(
    lengths: Sequence[int], max_padding: float, prefixes: Sequence[int] | None = None
) -> list[tuple[int, int]]:
    """Return the groups of neighbouring pieces that share an SDPA call, as `(start, end)` with `end` excluded. All
    pieces of a group have prefixes of the same length. The longest piece's length times the number of pieces is at most
    `max_padding` times the sum of the lengths."""
    before = prefixes if prefixes is not None else (0,) * len(lengths)
    groups: list[tuple[int, int]] = []
    start = longest = total = 0
    for i, length in enumerate(lengths):
        too_long = max(longest, length) * (i + 1 - start) > max_padding * (total + length)
        if i > start and (too_long or before[i] != before[start]):
            groups.append((start, i))
            start, longest, total = i, 0, 0
        longest, total = max(longest, length), total + length
    groups.append((start, len(lengths)))
    return groups


def _attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, causal: bool) -> torch.Tensor:
    """Return the attention's output for a batch of padded pieces `[S, H, L, D]`. Keys and values may have fewer heads
    than the queries. Keys and values may also have more tokens: the tokens of a shared prompt, which come first."""
    grouped = q.shape[1] != k.shape[1]
    num_before = k.shape[2] - q.shape[2]
    later: torch.Tensor | None = None
    if causal and num_before:
        later = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool, device=q.device).triu(num_before + 1)
    if q.is_cuda or q.dtype == torch.float32 or k.shape[2] > MATMUL_LENGTH:
        mask = ~later if later is not None else None
        is_causal = causal and later is None
        return F.scaled_dot_product_attention(q, k, v, mask, scale=scale, is_causal=is_causal, enable_gqa=grouped)
    if grouped:
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    # Autocast is off, because it would turn the softmax into float32. A bf16 softmax computes in float32 inside its
    # kernel.
    with torch.autocast(q.device.type, enabled=False):
        scores = (q * scale) @ k.transpose(2, 3)  # [S, H, L, L]
        if causal:
            if later is None:
                later = torch.ones(q.shape[2], q.shape[2], dtype=torch.bool).triu(1)
            scores = scores.masked_fill_(later, float("-inf"))
        return scores.softmax(-1) @ v
