"""Hands out the weights of a sync, whole or sharded over ranks, and packs them into buckets (R09).

In: a `WeightSource` (the policy, or its adapter). Out: sealed buckets, one at a time, so that the sender decides how
many are in memory in addition to the model.

If the model is sharded, only rank 0 talks to servers, but all ranks together gather tensors and score the canary (fixed
answers). While rank 0 runs its sync, the other ranks wait for messages. With `ShardedRanks`, rank 0 announces each such
call in a message, and all ranks make the call together. Invariants: no rank begins a collective that rank 0 has not
announced, so the other ranks learn of a failure of rank 0 by their next message. A bucket is gathered just before it is
packed; only rank 0 keeps its tensors. Every wait is bounded by `training.collective_timeout_s`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, Protocol, TypeVar

import torch

from learner.policy.parallel import Ranks
from shared.errors import SyncError
from shared.sync.buckets import pack, plan_buckets, seal
from shared.wire import TensorSpec

T = TypeVar("T")
NamedWeights = Iterator[tuple[str, torch.Tensor]]


class WeightSource(Protocol):
    """Merged full weights under checkpoint names. `named_weights` and `weight_specs` list the tensors in the same
    order. Floating-point tensors have type `dtype` (None: their own type)."""

    def named_weights(self, dtype: torch.dtype | None = None) -> NamedWeights: ...

    def weight_specs(self, dtype: torch.dtype | None = None) -> list[TensorSpec]: ...


class AdapterSource(WeightSource, Protocol):
    """A source of an adapter alone: `lora_A` and `lora_B` of each adapted layer. `lora_B` is multiplied with the
    adapter's scaling."""

    @property
    def base(self) -> WeightSource:
        """The weights to which the adapter is applied. They never change."""

    @property
    def rank(self) -> int: ...

    @property
    def obstacle(self) -> str:
        """The reason why no engine can apply the adapter; empty if no reason is known."""


def check_specs(specs: Sequence[TensorSpec]) -> None:
    """Raises SyncError if there is nothing to send, or a name comes twice."""
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
    key: bytes,
    ver: int,
    dtype: torch.dtype | None,
    device: torch.device,
) -> Iterator[torch.Tensor]:
    """Yield each bucket as uint8 `[bytes]` on `device`, sealed with `key`. `plan`: the source's own specs, divided into
    buckets.

    Raises SyncError if the source's weights differ from its specs.
    """
    weights = source.named_weights(dtype)
    for index, specs in enumerate(plan):
        # Tensors are merged as they are taken, so only one bucket's tensors are in memory in addition to the model.
        buffer = pack(specs, dict(islice(weights, len(specs))), device)
        # The seal covers version and index, so an old or misplaced bucket is refused.
        seal(buffer, key=key, ver=ver, index=index)
        yield buffer
    # A tensor that is not in the plan would never be sent.
    left_over = next(weights, None)
    if left_over is not None:
        raise SyncError(
            "the policy has more weights than it announced",
            found=f"tensor {left_over[0]!r} after the last one planned",
            wanted="the tensors of weight_specs(), in its order",
            remedy="this is an error of the policy's named_weights()",
        )


class SyncRanks(Protocol):
    """The collectives that a sync to servers uses: `Ranks`, or `ShardedRanks` for a sharded model."""

    @property
    def is_main(self) -> bool: ...

    def barrier(self) -> None: ...

    def broadcast_object(self, value: Any) -> Any: ...

    def all_gather_object(self, value: T) -> list[T]: ...


@dataclass(frozen=True, slots=True)
class _SharedCall:
    """A message of rank 0: every rank makes the shared call number `index` now, with these arguments."""

    index: int
    arguments: tuple[object, ...]


class ShardedRanks(Ranks):
    """The ranks of a sharded model in a sync. `bucket_bytes` is the sync's bucket size, so that one bucket's tensors
    are gathered at a time. Every rank creates the same sources and shared calls, in the same order."""

    def __init__(self, ranks: Ranks, *, bucket_bytes: int) -> None:
        super().__init__(**vars(ranks))
        self.bucket_bytes = bucket_bytes
        self._calls: list[Callable[..., object]] = []
        self._walk: NamedWeights = iter(())  # iterator over the weights that are being sent

    def broadcast_object(self, value: T | None) -> T:
        """Return rank 0's value, on every rank. While a rank waits for the value, it takes part in rank 0's shared
        calls. Raises CollectiveError."""
        while isinstance(found := super().broadcast_object(value), _SharedCall):
            self._calls[found.index](*found.arguments)
        # The iterator over the weights is dropped. An iterator that was not read to its end would hold tensors until
        # the next sync.
        self._walk = iter(())
        return found

    def shared(self, call: Callable[..., T]) -> Callable[..., T]:
        """Return a function for rank 0. When rank 0 calls it, every rank calls `call` with the same arguments."""
        index = len(self._calls)
        self._calls.append(call)

        def on_all_ranks(*arguments: object) -> T:
            # The announcement keeps collectives in one order: other ranks begin only what rank 0 begins.
            super(ShardedRanks, self).broadcast_object(_SharedCall(index, arguments))
            return call(*arguments)

        return on_all_ranks

    def take(
        self, source: WeightSource, dtype: torch.dtype | None, is_first: bool, count: int
    ) -> list[tuple[str, torch.Tensor]]:
        """Return the next `count` tensors of `source` on rank 0, and nothing on other ranks. `is_first`: begin with the
        first tensor. Collective."""
        if is_first:
            self._walk = source.named_weights(dtype)
        taken = islice(self._walk, count)
        if self.is_main:
            return list(taken)
        for _ in taken:
            pass  # this rank only takes part in gathering the tensor
        return []


class ShardedSource:
    """A sharded model's weights, for rank 0 to iterate over. One bucket's tensors are gathered at a time."""

    def __init__(self, source: WeightSource, ranks: ShardedRanks) -> None:
        self.weight_specs = source.weight_specs
        self._bucket_bytes = ranks.bucket_bytes
        self._take = ranks.shared(lambda *arguments: ranks.take(source, *arguments))
        self._counts: dict[torch.dtype | None, list[int]] = {}  # number of tensors of each bucket, by dtype

    def named_weights(self, dtype: torch.dtype | None = None) -> NamedWeights:
        if dtype not in self._counts:
            # The buckets come from the sync's own plan, so that one collective call gathers exactly one bucket.
            self._counts[dtype] = [len(part) for part in plan_buckets(self.weight_specs(dtype), self._bucket_bytes)]
        for number, count in enumerate(self._counts[dtype]):
            # One call gathers one bucket, so at most one bucket's whole tensors are in memory.
            yield from self._take(dtype, number == 0, count)


class ShardedAdapter(ShardedSource):
    """A sharded model's adapter, and the base weights that it is applied to."""

    def __init__(self, adapter: AdapterSource, ranks: ShardedRanks) -> None:
        super().__init__(adapter, ranks)
        self.base, self.rank, self.obstacle = ShardedSource(adapter.base, ranks), adapter.rank, adapter.obstacle
