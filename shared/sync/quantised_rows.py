"""Weights straight into the rows of FP8 layers (R09): a kernel per tensor, without vLLM's reload.

vLLM's reload takes every layer apart and puts it together again, in Python: several times as long as the sync's bytes
need. The rule is simple, though: each row of a weight is quantised by itself, and a fused layer holds the rows of its
parts one after the other. So a tensor of the checkpoint has its own rows in the served model.

Invariant: nothing is written this way before vLLM's own reload has shown, on this very model, that it gives the same
values in the same places, to the bit. The first update goes through the reload. Meanwhile `RowsProof` quantises what
comes into memory of its own and keeps digests, and afterwards compares them with the served rows. Where one differs or
has moved, or a layer is of another kind (padded, split over devices), all updates go through the reload, and a warning
in the log says so.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch

from shared.sync.digest import digest
from shared.sync.fp8 import quantised


@dataclass(frozen=True, kw_only=True, slots=True)
class Rows:
    """Where a tensor of the checkpoint lies in the served model. `values`: `[n, K]`, contiguous; `scale`: `[n, 1]`,
    None for a bias, which is only copied. `served`: the parameter's name."""

    values: torch.Tensor
    scale: torch.Tensor | None
    served: str


def rows_of(model: torch.nn.Module, packed: Mapping[str, Sequence[str]]) -> dict[str, Rows] | None:
    """Return the rows of all FP8 layers, by the tensor's name in the served model's spelling. `packed`: the parts of
    fused layers, by the last part of their names. None if there are no such layers, or one is of another kind."""
    found: dict[str, Rows] = {}
    for name, layer in model.named_modules():
        weight, scale = getattr(layer, "weight", None), getattr(layer, "weight_scale", None)
        if not isinstance(weight, torch.Tensor) or weight.dtype != torch.float8_e4m3fn:
            continue
        head, _, last = name.rpartition(".")
        parts, sizes = packed.get(last, [last]), list(getattr(layer, "logical_widths", []))
        by_rows = weight.detach().t()
        wanted = (sum(sizes), getattr(layer, "input_size_per_partition", -1))
        if tuple(by_rows.shape) != wanted or not by_rows.is_contiguous() or len(parts) != len(sizes):
            return None
        if not isinstance(scale, torch.Tensor) or tuple(scale.shape) != (wanted[0], 1) or not scale.is_contiguous():
            return None
        bias = getattr(layer, "bias", None)
        first = 0
        for part, size in zip(parts, sizes, strict=True):
            rows, part_name = slice(first, first + size), f"{head}.{part}" if head else part
            first += size
            found[f"{part_name}.weight"] = Rows(
                values=by_rows[rows], scale=scale.detach()[rows], served=f"{name}.weight"
            )
            if isinstance(bias, torch.Tensor):
                found[f"{part_name}.bias"] = Rows(values=bias.detach()[rows], scale=None, served=f"{name}.bias")
    return found or None


def quantise_into(values: torch.Tensor, scale: torch.Tensor, weight: torch.Tensor) -> None:
    """Write the rows of a weight `[n, K]` into `values` and `scale`: vLLM's kernel on CUDA, else the rule itself."""
    kernel = getattr(torch.ops._C, "dynamic_per_token_scaled_fp8_quant", None) if weight.is_cuda else None
    if kernel is not None:
        kernel(values, weight.contiguous(), scale, None)
        return
    found, found_scale = quantised(weight)
    values.copy_(found)
    scale.copy_(found_scale)


def load_rows(rows: Rows, weight: torch.Tensor, dtype: torch.dtype) -> None:
    """Write a tensor of the checkpoint into the served model. `dtype`: in which the engine computes; vLLM's loader
    rounds to it first."""
    if rows.scale is None:
        rows.values.copy_(weight)
    else:
        quantise_into(rows.values, rows.scale, weight.to(dtype))


class RowsProof:
    """Beside an update by vLLM's reload: does `load_rows` give the same?"""

    def __init__(self, rows: Mapping[str, Rows], dtype: torch.dtype) -> None:
        self.rows = rows
        self._dtype = dtype
        self._digests: dict[str, torch.Tensor] = {}

    def add(self, name: str, weight: torch.Tensor) -> None:
        """Note what `load_rows` makes of the tensor that is served as `name`."""
        rows = self.rows.get(name)
        if rows is None or rows.values.shape != weight.shape:
            return
        values = torch.empty(rows.values.shape, dtype=rows.values.dtype, device=weight.device)
        scale = None if rows.scale is None else torch.empty_like(rows.scale, device=weight.device)
        load_rows(Rows(values=values, scale=scale, served=""), weight, self._dtype)
        self._digests[name] = _digest([values, scale])

    def lies_in(self, model: torch.nn.Module) -> bool:
        """Return True if the rows are still memory of the model's parameters."""
        served = {one.untyped_storage().data_ptr() for one in model.parameters()}
        parts = (part for rows in self.rows.values() for part in (rows.values, rows.scale) if part is not None)
        return all(part.untyped_storage().data_ptr() in served for part in parts)

    def holds(self) -> bool:
        """True if all rows came, and the served model has them as noted. Waits for the device."""
        if self._digests.keys() != self.rows.keys():
            return False
        served = torch.cat([_digest([self.rows[name].values, self.rows[name].scale]) for name in self._digests])
        return torch.equal(served, torch.cat(list(self._digests.values())))


def _digest(tensors: Iterable[torch.Tensor | None]) -> torch.Tensor:
    return torch.cat([digest(one.contiguous().view(-1).view(torch.uint8)) for one in tensors if one is not None])
