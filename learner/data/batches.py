"""Yields this rank's micro-batches, one epoch after the other. Prompts are encoded ahead of use.

`Batches`. In: samples, configuration and rank. Out: an endless iterator of `MicroBatch`. The iterator's state is a few
numbers, equal on all ranks. Micro-batches that were only prefetched are not counted in the state, so a resume repeats
and skips no sample.

`sampler.py` decides which samples a rank takes at which micro-step.

Each micro-batch is handed out once: in order, or in the order in which `take` and `skip` are called. The state says
which micro-batches are left.

`ShareReader` reads this rank's part of the same micro-batches for another thread, with an encoder of its own.

`WindowRepeater` hands out each accumulation window (the micro-batches of one optimizer step) `m_steps` times, and marks
each micro-batch with its `WindowStep`. So rollouts are reused, and no sample is skipped. The last window of an epoch
may have fewer than `gradient_accumulation_steps` micro-batches. A window with fewer micro-batches is handed out only
once (R18). Invariants: over all ranks, an epoch hands out each sample `m_steps` times, and samples of a short last
window once. The numbers are the same if the run is resumed inside a window. The state counts whole passes over a
window, because a pass is one optimizer step. After a resume an unfinished pass starts again from its first micro-batch,
because no step has learned its samples.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import count, islice
from typing import Any, NamedTuple

from learner.config.plan import Plan, steps_per_epoch
from learner.config.schema import RunConfig
from learner.data.augment import Augmented
from learner.data.encoding import Encoder, EncodingJob, LocalPool, WorkerPool
from learner.data.sampler import DistributedSampler, Share, sampler_of
from learner.records import EncodedPrompt, Sample
from shared.errors import CheckpointError


class WindowStep(NamedTuple):
    """The number of an accumulation window, and the number of the pass over this window. The two numbers count from
    0."""

    window: int
    m_step: int


@dataclass(frozen=True, kw_only=True, slots=True)
class MicroBatch:
    """One rank's samples of one micro-step, and their prompts. A micro-batch can be empty only at the end of an
    epoch."""

    samples: tuple[Sample, ...]
    prompts: tuple[EncodedPrompt, ...]
    epoch: int
    micro_batch: int  # number of the micro-batch in its epoch
    first_req_idx: int  # index of the first sample among all ranks' samples of the micro-step
    ends_epoch: bool
    window_step: WindowStep | None = None  # None: accumulation windows are not repeated in this run

    @property
    def fingerprint(self) -> tuple[int, int, tuple[str, ...]]:
        """Return epoch, micro-batch and sample ids. A micro-batch has the same fingerprint each time it is handed
        out."""
        return self.epoch, self.micro_batch, tuple(sample.sample_id for sample in self.samples)


class Shortfall(NamedTuple):
    """The last step of an epoch, if it learns fewer samples than other steps. `size`: number of samples in that step,
    over all ranks."""

    size: int
    whole: int  # number of samples in every other step, over all ranks


class Upcoming(NamedTuple):
    """A micro-batch before its prompts are encoded. The fields mean the same as in `MicroBatch`."""

    samples: tuple[Sample, ...]
    first_req_idx: int


class _SeenShare(NamedTuple):
    share: Share
    given: tuple[Sample, ...]  # this rank's samples as annotated
    samples: tuple[Sample, ...]  # this rank's samples, altered by `data.augment`


def see(
    samples: Sequence[Sample], indices: Sequence[int], epoch: int, position: int, augmented: Augmented | None
) -> tuple[Sample, ...]:
    """Return the samples, altered by `augmented` if it is given. For equal indices the same object is returned."""
    if augmented is None:
        return tuple(samples[i] for i in indices)
    # A sample that occurs several times is one object, so `submit_all` encodes it once.
    seen = {i: augmented(i, epoch, position) for i in dict.fromkeys(indices)}
    return tuple(seen[i] for i in indices)


class Batches(Iterator[MicroBatch]):
    """The training data of one rank. Call `close` at the end, because worker processes may run."""

    def __init__(
        self,
        samples: Sequence[Sample],
        *,
        config: RunConfig,
        plan: Plan,
        rank: int,
        encoder: Encoder,
        augmented: Augmented | None = None,
    ) -> None:
        """Set up the iterator. `augmented` alters the samples; None: they are used as they are."""
        self._samples, self._augmented = samples, augmented
        self._sampler = sampler_of(len(samples), config=config, plan=plan, rank=rank)
        self._pool = encoder_pool(config, encoder, samples_per_micro_batch=plan.per_device_train_batch_size)
        # Position of the first micro-batch that was not handed out; all earlier micro-batches were handed out.
        self._first = 0
        self._taken: set[int] = set()  # positions after `_first` whose micro-batches were handed out.
        # This rank's parts of micro-batches that are not handed out yet, by position.
        self._seen: dict[int, _SeenShare] = {}
        self._ahead: dict[int, EncodingJob] = {}

    @property
    def per_epoch(self) -> int:
        """Return the number of micro-batches in an epoch, equal on all ranks."""
        return self._sampler.per_epoch

    @property
    def num_taken(self) -> int:
        """Return the number of micro-batches handed out since the beginning of training."""
        return self._first + len(self._taken)

    def size(self, micro_batch: int) -> int:
        """Return the number of samples in a micro-batch, over all ranks."""
        return self._sampler.global_size(micro_batch)

    def shortfall(self, number: int) -> Shortfall | None:
        """Return the shortfall of the step that learns the next `number` micro-batches, or fewer if the epoch ends;
        None if the step is not short."""
        micro_batch = self._first % self.per_epoch
        size = sum(self.size(i) for i in range(micro_batch, min(micro_batch + number, self.per_epoch)))
        return self.shortfall_of(size, number)

    def shortfall_of(self, size: int, number: int) -> Shortfall | None:
        """Return the shortfall of a step of `size` samples in at most `number` micro-batches; None if it is not
        short."""
        whole = min(number * self._sampler.global_batch, self._sampler.num_places)
        return Shortfall(size=size, whole=whole) if size < whole else None

    def __next__(self) -> MicroBatch:
        """Return the next micro-batch. Raises DataError if a sample cannot be encoded."""
        return self.take(next(self._coming()))

    def take(self, position: int, *, then: Iterable[int] | None = None) -> MicroBatch:
        """Return the micro-batch at `position`, which was not handed out before. `then`: positions that are probably
        taken next, and are encoded in advance; None: the positions that follow in order."""
        assert position in self.left(position // self.per_epoch), f"micro-batch {position} was handed out"
        self._prefetch(position, self._coming() if then is None else then)
        share, samples = self._share(position)
        prompts = self._ahead[position]()
        # The micro-batch counts as handed out only now, so an error of the encoder loses no sample.
        self.skip(position)
        return MicroBatch(
            samples=samples,
            prompts=tuple(prompts),
            epoch=share.epoch,
            micro_batch=share.micro_batch,
            first_req_idx=share.first_req_idx,
            ends_epoch=share.ends_epoch,
        )

    def skip(self, position: int) -> None:
        """Count the micro-batch at `position` as handed out, because another reader has read it."""
        self._ahead.pop(position, None)
        self._seen.pop(position, None)
        self._taken.add(position)
        # Positions without a gap are counted by `_first` alone, so the state stays a few numbers.
        while self._first in self._taken:
            self._taken.remove(self._first)
            self._first += 1

    def left(self, epoch: int) -> list[int]:
        """Return the positions of the micro-batches of `epoch` that were not handed out, ascending."""
        first = epoch * self.per_epoch
        return [p for p in range(max(first, self._first), first + self.per_epoch) if p not in self._taken]

    def upcoming(self, number: int) -> list[Upcoming]:
        """Return the next `number` micro-batches, or fewer if the epoch ends. The returned micro-batches are not
        encoded, and do not count as handed out."""
        found = []
        for position in islice(self._coming(), number):
            share, samples = self._share(position)
            found.append(Upcoming(samples=samples, first_req_idx=share.first_req_idx))
            if share.ends_epoch:
                break
        return found

    def state(self) -> dict[str, object]:
        """Return the position in the data, as JSON. `position`: the first micro-batch that was not handed out. `taken`:
        later micro-batches that were handed out. The other entries identify the data, so that a resume with other data
        is noticed."""
        return {"position": self._first, "taken": sorted(self._taken), **self._identity()}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue after the micro-batches that `state` counts as handed out. Raises CheckpointError if `state` belongs
        to other data."""
        for name, value in self._identity().items():
            if state.get(name) != value:
                raise CheckpointError(
                    f"the checkpoint's place in the data does not fit this run: {name} differs",
                    found=f"{name} {state.get(name)!r} in the checkpoint, {value!r} in this run",
                    wanted="the same samples, seed and samples per micro-step (ranks x per_device_train_batch_size)",
                    remedy="resume with the data, seed and batch size of the first run (on another number of ranks, "
                    "change training.per_device_train_batch_size to keep the product), or start a new run",
                )
        self._first, self._taken = int(state["position"]), set(state.get("taken", ()))
        self._ahead.clear()
        self._seen.clear()

    def last_epochs(self, sample_ids: Sequence[str]) -> list[int]:
        """Return the epoch in which each sample was handed out last, on any rank, before the next micro-batch."""
        epoch, micro_batch = divmod(self._first, self.per_epoch)
        order = self._sampler.order(epoch)[: micro_batch * self._sampler.global_batch]
        now = {self._samples[i].sample_id for i in order.tolist()}
        return [epoch if sample_id in now else max(0, epoch - 1) for sample_id in sample_ids]

    def seen_in(self, epoch: int, sample_id: str) -> Sample:
        """Return a sample as it is handed out in `epoch`: altered by `data.augment` if that is set."""
        place = next(i for i, sample in enumerate(self._samples) if sample.sample_id == sample_id)
        if self._augmented is None:
            return self._samples[place]
        return self._augmented(place, epoch, epoch * self.per_epoch)

    def close(self) -> None:
        self._pool.close()

    def _coming(self) -> Iterator[int]:
        return (position for position in count(self._first) if position not in self._taken)

    def _prefetch(self, position: int, then: Iterable[int]) -> None:
        """Submit `position` to the pool, and then the positions of `then` up to the pool's look-ahead."""
        self._submit(position)
        behind = 0
        for other in then:
            if behind >= self._pool.lookahead:
                return
            if other != position:
                # If empty parts counted 0, any number of micro-batches could be read ahead.
                behind += max(1, len(self._submit(other).indices))

    def _submit(self, position: int) -> Share:
        share, samples = self._share(position)
        if position not in self._ahead:
            self._ahead[position] = self._pool.submit_all(samples)
        return share

    def _share(self, position: int) -> tuple[Share, tuple[Sample, ...]]:
        """Return this rank's share of a micro-batch, and its samples, altered by `data.augment`. If a sample's labels
        were completed meanwhile, it is altered again, because the result depends on the labels."""
        seen = self._seen.get(position)
        share = seen.share if seen else self._sampler.share(position)
        given = tuple(self._samples[i] for i in share.indices)
        if seen is None or any(one is not before for one, before in zip(given, seen.given, strict=True)):
            # An augmented picture depends on the labels, so a prompt that was encoded with old labels is thrown away.
            if self._augmented is not None:
                self._ahead.pop(position, None)
            seen = _SeenShare(share, given, see(self._samples, share.indices, share.epoch, position, self._augmented))
            self._seen[position] = seen
        return seen.share, seen.samples

    def _identity(self) -> dict[str, object]:
        # A checkpoint has the digest of the ids, because the ids themselves may take megabytes.
        ids = hashlib.sha256("\0".join(sample.sample_id for sample in self._samples).encode())
        return {
            "samples": ids.hexdigest(),
            "samples_per_micro_step": self._sampler.global_batch,
            "places_per_sample": self._sampler.repeats,
            "seed": self._sampler.seed,
            "shuffle": self._sampler.shuffle,
        }


class ShareReader:
    """Reads this rank's samples for the thread that makes rollouts, a part of a micro-batch at a time. `Batches` has
    the same micro-batches. `close` closes `pool`. `augmented` alters the samples, as in `Batches`."""

    def __init__(
        self,
        samples: Sequence[Sample],
        sampler: DistributedSampler,
        pool: LocalPool,
        *,
        augmented: Augmented | None = None,
    ) -> None:
        self._samples, self._sampler, self._pool, self._augmented = samples, sampler, pool, augmented

    def size(self, position: int) -> int:
        """Return the number of this rank's samples in the micro-batch at `position`."""
        return len(self._sampler.places(position))

    def read(self, position: int, part: range) -> MicroBatch:
        """Return the samples `part` of the micro-batch at `position`. Raises DataError if a sample cannot be
        encoded."""
        share = self._sampler.share(position)
        indices = share.indices[part.start : part.stop]
        samples = see(self._samples, indices, share.epoch, position, self._augmented)
        return MicroBatch(
            samples=samples,
            prompts=tuple(self._pool.submit_all(samples)()),
            epoch=share.epoch,
            micro_batch=share.micro_batch,
            first_req_idx=share.first_req_idx + part.start,
            ends_epoch=share.ends_epoch,
        )

    def close(self) -> None:
        self._pool.close()


def encoder_pool(config: RunConfig, encoder: Encoder, *, samples_per_micro_batch: int) -> LocalPool:
    """Return the pool that encodes prompts: in `data.num_workers` processes, or in this process if that is 0."""
    if not config.data.num_workers:
        return LocalPool(encoder)
    return WorkerPool(
        encoder,
        num_workers=config.data.num_workers,
        samples_per_micro_batch=samples_per_micro_batch,
        timeout_s=config.training.collective_timeout_s,
    )


def fewest_micro_batches(steps: int, per_epoch: int, *, gradient_accumulation_steps: int, m_steps: int) -> int:
    """Return the fewest micro-batches that `steps` optimizer steps can learn. Repeated micro-batches count once."""
    whole = steps_per_epoch(per_epoch, gradient_accumulation_steps=gradient_accumulation_steps, m_steps=m_steps)
    epochs, rest = divmod(steps, whole)
    return epochs * per_epoch + min(rest // m_steps * gradient_accumulation_steps, per_epoch)


class WindowRepeater(Iterator[MicroBatch]):
    """Repeats the micro-batches of `Batches` window by window. One window is kept in memory."""

    def __init__(self, batches: Batches, *, gradient_accumulation_steps: int, m_steps: int) -> None:
        assert gradient_accumulation_steps > 0
        assert m_steps > 0
        self._batches = batches
        self._window_size, self._m_steps = gradient_accumulation_steps, m_steps
        self._next = WindowStep(0, 0)
        self._begin_window()

    def shortfall(self, number: int) -> Shortfall | None:
        """Return the size of the coming step if it learns fewer samples than other steps, else None. Call it at the
        beginning of a pass."""
        if self._kept:
            return self._batches.shortfall_of(sum(self._batches.size(b.micro_batch) for b in self._kept), number)
        return self._batches.shortfall(number)

    @property
    def next_step(self) -> WindowStep:
        """Return the window and the pass of the next micro-batch."""
        return self._next

    def __next__(self) -> MicroBatch:
        """Return the next micro-batch, new or repeated. Raises DataError if a sample cannot be encoded."""
        if self._taken == len(self._kept):  # true only in a window's first pass
            self._kept.append(next(self._batches))
        batch = replace(self._kept[self._taken], window_step=self._next)
        self._taken += 1
        if self._taken == self._window_size or batch.ends_epoch:
            self._end_pass(is_whole=self._taken == self._window_size)
        return batch

    def upcoming(self, number: int) -> list[Upcoming]:
        """Return the micro-batches of the coming pass, not encoded. Call it at the beginning of a pass."""
        assert self._taken == 0, "in the middle of a pass"
        if self._kept:
            return [Upcoming(samples=batch.samples, first_req_idx=batch.first_req_idx) for batch in self._kept]
        return self._batches.upcoming(number)

    def last_epochs(self, sample_ids: Sequence[str]) -> list[int]:
        """Return the epoch in which each sample was handed out last (see `Batches.last_epochs`)."""
        return self._batches.last_epochs(sample_ids)

    def seen_in(self, epoch: int, sample_id: str) -> Sample:
        """Return the sample as altered for that epoch (see `Batches.seen_in`)."""
        return self._batches.seen_in(epoch, sample_id)

    def state(self) -> dict[str, object]:
        """Return the state of `Batches` at the beginning of the window, and the numbers of the window and of the next
        pass, for JSON."""
        return {**self._start, **self._next._asdict()}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue with the passes over the window that are left. At least one pass is made, even if `m_steps` is
        smaller now.

        Raises CheckpointError if `state` is of other data.
        """
        self._batches.restore(state)
        # A checkpoint may come from a run with more passes.
        m_step = min(int(state.get("m_step", 0)), self._m_steps - 1)
        self._next = WindowStep(int(state.get("window", 0)), m_step)
        self._begin_window()

    def _begin_window(self) -> None:
        self._start = self._batches.state()
        self._kept: list[MicroBatch] = []
        self._taken = 0  # number of micro-batches handed out in this pass

    def _end_pass(self, *, is_whole: bool) -> None:
        window, m_step = self._next
        self._taken = 0
        if is_whole and m_step + 1 < self._m_steps:
            self._next = WindowStep(window, m_step + 1)
        else:
            self._next = WindowStep(window + 1, 0)
            self._begin_window()
