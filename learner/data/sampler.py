"""Decides which samples a rank takes at which micro-step.

In: a position, which is the number of a micro-batch since training began. Out: this rank's share (the part that this
rank learns) of the micro-batch at this position. The share depends only on seed, position and rank, so a resume is
exact. An epoch is one shuffled order of all samples. Micro-batch m takes the next W*n samples of the order (W ranks, n
samples each), and rank r takes the r-th group of n of these samples. So sample i of rank r has the index ("place") r*n
+ i among the W*n samples. The seed of the sample's rollout request is computed from its place (SPEC: Seeds, D4). The
last micro-batch of an epoch holds the remaining samples, divided over the ranks as evenly as possible. A rank may get
an empty share, and still takes part in the step. Invariants: in an epoch, the shares of all ranks together have each
sample exactly once. The order of the samples does not depend on W or n. With `repeats` K (`grpo`) each sample has K
neighbouring places in the order, all of them in one micro-batch of one rank.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from learner.config.plan import Plan
from learner.config.schema import RunConfig


@dataclass(frozen=True, kw_only=True, slots=True)
class Share:
    """One rank's part of one micro-batch."""

    epoch: int
    micro_batch: int  # number of the micro-batch in its epoch
    indices: tuple[int, ...]  # indices of the samples in the dataset
    first_req_idx: int  # index of this rank's first sample in the micro-batch of all ranks
    ends_epoch: bool


class DistributedSampler:
    """Returns this rank's part of a micro-batch, by `share(position)`. Position 0 is the first micro-batch of epoch 0;
    epoch 1 follows epoch 0, and so on without end."""

    def __init__(
        self,
        num_samples: int,
        *,
        num_ranks: int,
        rank: int,
        samples_per_rank: int,
        seed: int,
        shuffle: bool = True,
        repeats: int = 1,
    ) -> None:
        assert num_samples > 0, "load_samples refuses an empty dataset"
        assert 0 <= rank < num_ranks
        assert samples_per_rank > 0
        assert samples_per_rank % repeats == 0, "refused by learner/config/sections/grpo.py"
        self.num_places, self.num_ranks, self.rank, self.repeats = num_samples * repeats, num_ranks, rank, repeats
        self.seed, self.shuffle = seed, shuffle
        self.global_batch = num_ranks * samples_per_rank
        # (epoch, order of this epoch) of the last call of `order`
        self._order: tuple[int, NDArray[np.int64]] | None = None

    @property
    def per_epoch(self) -> int:
        """Return the number of micro-batches in an epoch; the smaller last micro-batch is counted too."""
        return -(-self.num_places // self.global_batch)

    def global_size(self, position: int) -> int:
        """Return the number of places (samples, counting repeats) in the micro-batch at `position`, over all ranks."""
        return min(self.global_batch, self.num_places - position % self.per_epoch * self.global_batch)

    def places(self, position: int) -> range:
        """Return the range of this rank's places among all ranks' samples of the micro-batch at `position`."""
        # All places of a sample (a group of rollouts) stay on one rank.
        size = self.global_size(position) // self.repeats
        first, last = (size * rank // self.num_ranks for rank in (self.rank, self.rank + 1))
        return range(first * self.repeats, last * self.repeats)

    def share(self, position: int) -> Share:
        """Return this rank's samples at `position`, which counts micro-batches from the beginning of training."""
        epoch, micro_batch = divmod(position, self.per_epoch)
        first, places = micro_batch * self.global_batch, self.places(position)
        order = self.order(epoch)
        return Share(
            epoch=epoch,
            micro_batch=micro_batch,
            indices=tuple(order[first + places.start : first + places.stop].tolist()),
            first_req_idx=places.start,
            ends_epoch=micro_batch == self.per_epoch - 1,
        )

    def order(self, epoch: int) -> NDArray[np.int64]:
        """Return all indices [num_places], in the epoch's order."""
        if self._order is None or self._order[0] != epoch:
            self._order = (epoch, self._make_order(epoch))
        return self._order[1]

    def _make_order(self, epoch: int) -> NDArray[np.int64]:
        order = np.arange(self.num_places // self.repeats)
        if self.shuffle:
            # The generator depends on seed and epoch only, so every rank computes the same order, also after a resume.
            order = np.random.default_rng([self.seed, epoch]).permutation(order)
        return np.repeat(order, self.repeats)


def sampler_of(num_samples: int, *, config: RunConfig, plan: Plan, rank: int) -> DistributedSampler:
    """Return the sampler of the run's training data on this rank."""
    return DistributedSampler(
        num_samples,
        num_ranks=plan.world_size,
        rank=rank,
        samples_per_rank=plan.per_device_train_batch_size,
        seed=config.training.seed,
        shuffle=config.data.shuffle,
        repeats=config.grpo.num_generations if config.custom.trainer_variant == "grpo" else 1,
    )
