"""The samples that one rank rolls out ahead of learning: a stream of its own, beside the batches of Channel-A (R25).

The stream of all ranks is epoch after epoch of a shuffled order; rank r of W takes every W-th sample of it, beginning
with the r-th. So each rank can go at its own pace, and an epoch of the stream still holds each sample exactly once over
all ranks. `read(positions)` is a pure function of the position: one that comes back gives the same sample again.

Called in the producer's thread, which shares nothing with the thread that learns: the encoder is the stream's own.
"""

from __future__ import annotations

from collections.abc import Sequence

from learner.data.encoding import EncoderPool
from learner.data.sampler import DistributedSampler
from learner.records import EncodedPrompt, Sample
from shared.seeds import base_seed

AHEAD = -1  # stands for the micro-step in seeds of what belongs to no step


class SampleStream:
    """`pool` encodes prompts, and is closed with the stream."""

    def __init__(
        self,
        samples: Sequence[Sample],
        pool: EncoderPool,
        *,
        seed: int,
        shuffle: bool,
        rank: int,
        num_ranks: int,
    ) -> None:
        self._samples, self._pool, self._rank, self._num_ranks = samples, pool, rank, num_ranks
        order_seed = base_seed(seed, 0, AHEAD)  # another order than Channel-A's
        self._sampler = DistributedSampler(
            len(samples), num_ranks=1, rank=0, samples_per_rank=1, seed=order_seed, shuffle=shuffle
        )

    def sample(self, position: int) -> Sample:
        """The sample at a position of this rank."""
        epoch, place = divmod(position * self._num_ranks + self._rank, len(self._samples))
        return self._samples[int(self._sampler.order(epoch)[place])]

    def read(self, positions: Sequence[int]) -> tuple[list[Sample], list[EncodedPrompt]]:
        """Samples and prompts, one each per position, in order. Raises DataError where a sample can't be encoded."""
        samples = [self.sample(position) for position in positions]
        size = self._pool.job_size
        jobs = [self._pool.submit(samples[i : i + size]) for i in range(0, len(samples), size)]
        return samples, [prompt for job in jobs for prompt in job.result()]

    def close(self) -> None:
        self._pool.close()
