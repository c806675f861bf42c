"""`Batches`: this rank's micro-batches, epoch after epoch, with prompts encoded ahead of their use.

In: samples, configuration and rank. Out: an endless iterator of `MicroBatch`. Its state is a few numbers of JSON, equal
on all ranks; what was prefetched and not yet taken is not part of it, so a resume repeats and skips nothing.
"""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from learner.config.plan import Plan
from learner.config.schema import RunConfig
from learner.data.encoding import EncoderPool, EncodingJob, LocalPool, PromptEncoder, WorkerPool
from learner.data.sampler import DistributedSampler, Share
from learner.records import EncodedPrompt, Sample
from shared.errors import CheckpointError


class WindowStep(NamedTuple):
    """Which accumulation window, and which of the optimizer steps that learn it; both from 0."""

    window: int
    m_step: int


@dataclass(frozen=True, kw_only=True, slots=True)
class MicroBatch:
    """One rank's samples of one micro-step, and their prompts; empty at most at an epoch's end."""

    samples: tuple[Sample, ...]
    prompts: tuple[EncodedPrompt, ...]
    epoch: int
    micro_batch: int  # within the epoch
    first_req_idx: int  # place of the first sample among all ranks' of this micro-step
    ends_epoch: bool
    window_step: WindowStep | None = None  # None: accumulation windows are not repeated in this run

    @property
    def fingerprint(self) -> tuple[int, int, tuple[str, ...]]:
        """Epoch, micro-batch and sample ids: equal where the same micro-batch is handed out again."""
        return self.epoch, self.micro_batch, tuple(sample.sample_id for sample in self.samples)

    def with_samples(self, samples: Sequence[Sample], encoder: PromptEncoder) -> MicroBatch:
        """This batch and more samples behind its own, whose request indices, and so seeds, stay as they are."""
        prompts = tuple(encoder.encode(sample) for sample in samples)
        return replace(self, samples=(*self.samples, *samples), prompts=(*self.prompts, *prompts))


class Upcoming(NamedTuple):
    """What a micro-batch will hold, before its prompts are encoded; fields as in `MicroBatch`."""

    samples: tuple[Sample, ...]
    first_req_idx: int


class Batches(Iterator[MicroBatch]):
    """The training data of one rank. Close it: it may own processes."""

    def __init__(
        self, samples: Sequence[Sample], *, config: RunConfig, plan: Plan, rank: int, encoder: PromptEncoder
    ) -> None:
        self._samples = samples
        self._sampler = DistributedSampler(
            len(samples),
            num_ranks=plan.world_size,
            rank=rank,
            samples_per_rank=plan.per_device_train_batch_size,
            seed=config.training.seed,
            shuffle=config.data.shuffle,
        )
        self._pool: EncoderPool = LocalPool(encoder)
        if config.data.num_workers:
            self._pool = WorkerPool(
                encoder,
                num_workers=config.data.num_workers,
                samples_per_micro_batch=plan.per_device_train_batch_size,
                timeout_s=config.training.collective_timeout_s,
            )
        self._position = 0  # of the next micro-batch that is handed out
        self._ahead: deque[tuple[Share, list[EncodingJob]]] = deque()

    @property
    def per_epoch(self) -> int:
        """Micro-batches per epoch, equal on all ranks."""
        return self._sampler.per_epoch

    def __next__(self) -> MicroBatch:
        """The next micro-batch. Raises DataError where a sample can't be encoded."""
        self._prefetch()
        share, jobs = self._ahead.popleft()
        prompts = [prompt for job in jobs for prompt in job.result()]
        self._position += 1
        return MicroBatch(
            samples=tuple(self._samples[i] for i in share.indices),
            prompts=tuple(prompts),
            epoch=share.epoch,
            micro_batch=share.micro_batch,
            first_req_idx=share.first_req_idx,
            ends_epoch=share.ends_epoch,
        )

    def upcoming(self, number: int) -> list[Upcoming]:
        """The next `number` micro-batches, or those up to an epoch's end. Takes and encodes nothing."""
        found = []
        for position in range(self._position, self._position + number):
            share = self._sampler.share(position)
            samples = tuple(self._samples[i] for i in share.indices)
            found.append(Upcoming(samples=samples, first_req_idx=share.first_req_idx))
            if share.ends_epoch:
                break
        return found

    def state(self) -> dict[str, Any]:
        """Where training stands in the data, as JSON: micro-batches handed out, and of which data."""
        return {"position": self._position, **self._identity()}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on after the micro-batches that `state` counts. Raises CheckpointError where the data is another."""
        for name, value in self._identity().items():
            if state.get(name) != value:
                raise CheckpointError(
                    f"the checkpoint's place in the data does not fit this run: {name} differs",
                    found=f"{name} {state.get(name)!r} in the checkpoint, {value!r} in this run",
                    wanted="the same samples, seed and samples per micro-step",
                    remedy="resume with the data, seed and batch size of the first run, or start a new run",
                )
        self._position = int(state["position"])
        self._ahead.clear()

    def close(self) -> None:
        self._pool.close()

    def _prefetch(self) -> None:
        """Hand jobs to the pool until the next micro-batch is under way, and behind it the look-ahead."""
        behind = sum(_cost(share) for share, _ in list(self._ahead)[1:])
        while not self._ahead or behind < self._pool.lookahead:
            share = self._sampler.share(self._position + len(self._ahead))
            size = self._pool.job_size
            samples = [self._samples[i] for i in share.indices]
            jobs = [self._pool.submit(samples[i : i + size]) for i in range(0, len(samples), size)]
            behind += _cost(share) if self._ahead else 0
            self._ahead.append((share, jobs))

    def _identity(self) -> dict[str, Any]:
        ids = hashlib.sha256("\0".join(sample.sample_id for sample in self._samples).encode())
        return {
            "samples": ids.hexdigest(),
            "samples_per_micro_step": self._sampler.global_batch,
            "seed": self._sampler.seed,
            "shuffle": self._sampler.shuffle,
        }


def _cost(share: Share) -> int:
    """What a share takes of the look-ahead. An empty one takes its part too, so that their number stays bounded."""
    return max(1, len(share.indices))
