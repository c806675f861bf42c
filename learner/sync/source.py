"""Where the weights come from, and how they become buckets (R09).

In: a `WeightSource` (the policy). Out: sealed buckets, one at a time, so that the sender decides how many are in memory
beside the model. Called by `fleet.py`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Protocol

import torch

from shared.errors import SyncError
from shared.sync.buckets import pack, seal
from shared.wire import TensorSpec


class WeightSource(Protocol):
    """Merged full weights under checkpoint names; both methods in the same order, floating-point tensors in `dtype`
    (None: as trained)."""

    def named_weights(self, dtype: torch.dtype | None = None) -> Iterator[tuple[str, torch.Tensor]]: ...

    def weight_specs(self, dtype: torch.dtype | None = None) -> list[TensorSpec]: ...


class AdapterSource(WeightSource, Protocol):
    """Only an adapter: of each adapted layer `lora_A` and `lora_B`, which has the scaling in it."""

    @property
    def base(self) -> WeightSource:
        """The weights below it, which never change."""

    @property
    def rank(self) -> int: ...

    @property
    def obstacle(self) -> str:
        """Why no server can apply it; empty where that is not known."""


def check_specs(specs: Sequence[TensorSpec]) -> None:
    """Raises SyncError where there is nothing to send, or a name comes twice."""
    names = [spec.name for spec in specs]
    if not names or len(set(names)) < len(names):
        twice = sorted({name for name in names if names.count(name) > 1})
        raise SyncError(
            "the policy's weights can't be sent",
            found=f"{len(names)} tensors" + (f", twice: {twice[:5]}" if twice else ""),
            wanted="every tensor of the checkpoint once",
            remedy="this is an error of the policy's weight_specs()",
        )


def sealed_buckets(
    source: WeightSource,
    plan: Sequence[Sequence[TensorSpec]],
    *,
    ver: int,
    dtype: torch.dtype | None,
    device: torch.device,
) -> Iterator[torch.Tensor]:
    """Each bucket of `plan` as uint8 `[bytes]` on `device`; the plan must be cut from the source's own specs.

    Raises SyncError where the weights are not those of the plan.
    """
    weights = source.named_weights(dtype)
    for index, specs in enumerate(plan):
        buffer = pack(specs, dict(islice(weights, len(specs))), device)
        seal(buffer, ver=ver, index=index)
        yield buffer
    left_over = next(weights, None)
    if left_over is not None:
        raise SyncError(
            "the policy has more weights than it announced",
            found=f"tensor {left_over[0]!r} after the last one planned",
            wanted="the tensors of weight_specs(), in its order",
            remedy="this is an error of the policy's named_weights()",
        )
