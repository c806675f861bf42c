"""Which samples a rank takes at which micro-step: a pure function of seed, position and rank, so a resume is exact.

An epoch is one shuffled order of all samples. Micro-batch m takes the next W*n of it (W ranks, n samples each), and
rank r the r-th n of those, so a sample's request index r*n + i, and with it its seed, is its place in the order (SPEC:
Seeds, D4). The last micro-batch of an epoch holds what is left, shared out as evenly as it goes, in rank order; a rank
may then get an empty share, and still takes part.

Invariants: over ranks, an epoch's shares are the order, each sample exactly once; the order does not depend on W or n.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, kw_only=True, slots=True)
class Share:
    """One rank's part of one micro-batch."""

    epoch: int
    micro_batch: int  # within the epoch
    indices: tuple[int, ...]  # into the samples
    first_req_idx: int  # place of the first one within the micro-batch, over all ranks
    ends_epoch: bool


class DistributedSampler:
    """`share(position)` for position 0, 1, 2, ...: the micro-batches of epoch 0, then of epoch 1, without end."""

    def __init__(
        self, num_samples: int, *, num_ranks: int, rank: int, samples_per_rank: int, seed: int, shuffle: bool = True
    ) -> None:
        assert num_samples > 0, "load_samples refuses an empty dataset"
        assert 0 <= rank < num_ranks
        assert samples_per_rank > 0
        self.num_samples, self.num_ranks, self.rank = num_samples, num_ranks, rank
        self.seed, self.shuffle = seed, shuffle
        self.global_batch = num_ranks * samples_per_rank
        self._order: tuple[int, NDArray[np.int64]] | None = None  # the last epoch asked for

    @property
    def per_epoch(self) -> int:
        """Micro-batches in an epoch, the last, smaller one included."""
        return -(-self.num_samples // self.global_batch)

    def share(self, position: int) -> Share:
        """This rank's samples at `position`, counted in micro-batches from the beginning of training."""
        epoch, micro_batch = divmod(position, self.per_epoch)
        first = micro_batch * self.global_batch
        size = min(self.global_batch, self.num_samples - first)
        start, stop = (size * rank // self.num_ranks for rank in (self.rank, self.rank + 1))
        order = self.order(epoch)
        return Share(
            epoch=epoch,
            micro_batch=micro_batch,
            indices=tuple(order[first + start : first + stop].tolist()),
            first_req_idx=start,
            ends_epoch=micro_batch == self.per_epoch - 1,
        )

    def order(self, epoch: int) -> NDArray[np.int64]:
        """[num_samples] all indices, in the epoch's order."""
        if self._order is None or self._order[0] != epoch:
            self._order = (epoch, self._make_order(epoch))
        return self._order[1]

    def _make_order(self, epoch: int) -> NDArray[np.int64]:
        if not self.shuffle:
            return np.arange(self.num_samples)
        return np.random.default_rng([self.seed, epoch]).permutation(self.num_samples)
