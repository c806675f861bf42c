"""A sharded model in a sync: rank 0 talks to the servers alone, and has all ranks with it where the weights are needed.

In: the sources of a sharded model's weights and its canary log-probabilities, which are collective. Out: the same for
rank 0 to use by itself, and a `Fence` in which the other ranks wait for its outcome: meanwhile they do with it whatever
it tells them to, gather the next bucket's tensors or score the canary.

Invariants: no rank begins a collective that rank 0 has not announced, so rank 0's failure, wherever it comes, is the
next thing that the others hear; a bucket is gathered when it is about to be packed, and the one before it is let go of
on the other ranks. Every wait is bounded by `training.collective_timeout_s`. Made by `learner/rollout/connect.py`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch

from learner.policy.canary_scores import CanaryScores
from learner.policy.parallel import Ranks
from learner.sync.canary import Scorer
from learner.sync.source import AdapterSource, WeightSource
from shared.sync.buckets import plan_buckets
from shared.wire import TensorSpec


@dataclass(frozen=True, kw_only=True, slots=True)
class Gather:
    """The next `count` tensors of a source; from its first one, where `begins`."""

    source: int
    dtype: torch.dtype | None
    begins: bool
    count: int


@dataclass(frozen=True, slots=True)
class Score:
    """The canary's log-probabilities, under the weights as they are sent."""

    dtype: torch.dtype | None
    merged: bool


class Team:
    """`bucket_bytes`: as the sync has it, so that what is gathered at once is what is packed at once."""

    def __init__(self, ranks: Ranks, *, scorer: Scorer, bucket_bytes: int) -> None:
        self._ranks, self._scorer, self._bucket_bytes = ranks, scorer, bucket_bytes
        self._sources: list[WeightSource] = []
        self._walk: Iterator[tuple[str, torch.Tensor]] = iter(())  # other ranks: through the source under way

    # ---- for rank 0 ------------------------------------------------------------------------------------------------

    def source(self, source: WeightSource) -> SharedSource:
        """Every rank adds the same sources in the same order."""
        self._sources.append(source)
        return SharedSource(self, len(self._sources) - 1, source, bucket_bytes=self._bucket_bytes)

    def adapter_source(self, source: AdapterSource) -> SharedAdapter:
        return SharedAdapter(self, self.source(source), source)

    def score(self, dtype: torch.dtype | None, *, merged: bool) -> CanaryScores:
        """Natural log-probabilities of the canary's answers under the present weights."""
        self.ask(Score(dtype, merged))
        return self._scorer(dtype, merged=merged)

    def ask(self, what: Gather | Score) -> None:
        """Have the other ranks do this, now."""
        self._ranks.broadcast_object(what)

    # ---- the fence -------------------------------------------------------------------------------------------------

    @property
    def is_main(self) -> bool:
        return self._ranks.is_main

    def barrier(self) -> None:
        self._ranks.barrier()

    def broadcast_object(self, value: Any) -> Any:
        """Rank 0's value, on every rank; whoever waits for it takes part in what rank 0 does before. Raises
        CollectiveError."""
        while isinstance(found := self._ranks.broadcast_object(value), Gather | Score):
            self._take_part(found)
        self._walk = iter(())
        return found

    def _take_part(self, asked: Gather | Score) -> None:
        if isinstance(asked, Score):
            self._scorer(asked.dtype, merged=asked.merged)
            return
        if asked.begins:
            self._walk = self._sources[asked.source].named_weights(asked.dtype)
        for _ in islice(self._walk, asked.count):
            pass  # rank 0 packs it; here it was only given


class SharedSource:
    """One source of a team's, for rank 0 to walk through."""

    def __init__(self, team: Team, index: int, source: WeightSource, *, bucket_bytes: int) -> None:
        self._team, self._index, self._source, self._bucket_bytes = team, index, source, bucket_bytes
        self._counts: dict[torch.dtype | None, list[int]] = {}  # tensors per bucket, the same in every sync

    def named_weights(self, dtype: torch.dtype | None = None) -> Iterator[tuple[str, torch.Tensor]]:
        weights = self._source.named_weights(dtype)
        if dtype not in self._counts:
            self._counts[dtype] = [len(part) for part in plan_buckets(self.weight_specs(dtype), self._bucket_bytes)]
        for number, count in enumerate(self._counts[dtype]):
            self._team.ask(Gather(source=self._index, dtype=dtype, begins=number == 0, count=count))
            yield from list(islice(weights, count))

    def weight_specs(self, dtype: torch.dtype | None = None) -> list[TensorSpec]:
        return self._source.weight_specs(dtype)


class SharedAdapter:
    """An adapter, and the weights below it."""

    def __init__(self, team: Team, own: SharedSource, adapter: AdapterSource) -> None:
        self.base, self.rank, self.obstacle = team.source(adapter.base), adapter.rank, adapter.obstacle
        self.named_weights, self.weight_specs = own.named_weights, own.weight_specs
