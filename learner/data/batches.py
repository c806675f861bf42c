"""This rank's micro-batches, epoch after epoch, with prompts encoded ahead of their use; and windows of them, repeated.

`Batches`: samples, configuration and rank in, an endless iterator of `MicroBatch` out. Its state is a few numbers of
JSON, equal on all ranks; what was prefetched and not yet taken is not part of it, so a resume repeats and skips
nothing.

Which samples a rank takes at which micro-step is the sampler's (`sampler.py`).

Micro-batches are handed out in order, or in the order in which `take` and `skip` are called; each of them once. The
state says which ones are left.

`ShareReader` reads the same shares for another thread, with an encoder of its own.

`WindowRepeater` gives the same micro-batches, an accumulation window of them at a time, `m_steps` times over, each
marked with its `WindowStep`, so that rollouts can be reused without a sample skipped. A window of fewer than
`gradient_accumulation_steps` micro-batches, which an epoch may end with, is given once (R18). Invariants: over ranks,
an epoch hands out each sample `m_steps` times, those of its short last window once, also across a resume in the middle
of a window. State counts whole passes: a pass that was begun and not ended comes again.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import count, groupby, islice
from typing import Any, NamedTuple

from learner.config.plan import Plan, steps_per_epoch
from learner.config.schema import RunConfig
from learner.data.augment import Augmented
from learner.data.encoding import Encoder, EncoderPool, EncodingJob, LocalPool, WorkerPool
from learner.data.sampler import DistributedSampler, Share, sampler_of
from learner.records import EncodedPrompt, Sample
from shared.errors import CheckpointError


class WindowStep(NamedTuple):
    """The accumulation window, and the optimizer step among those that learn it; both counted from 0."""

    window: int
    m_step: int


@dataclass(frozen=True, kw_only=True, slots=True)
class MicroBatch:
    """One rank's samples of one micro-step, and their prompts; empty at most at an epoch's end."""

    samples: tuple[Sample, ...]
    prompts: tuple[EncodedPrompt, ...]
    epoch: int
    micro_batch: int  # counted within the epoch
    first_req_idx: int  # place of the first sample among all ranks' of this micro-step
    ends_epoch: bool
    window_step: WindowStep | None = None  # None: accumulation windows are not repeated in this run

    @property
    def fingerprint(self) -> tuple[int, int, tuple[str, ...]]:
        """Epoch, micro-batch and sample ids: equal where the same micro-batch is handed out again."""
        return self.epoch, self.micro_batch, tuple(sample.sample_id for sample in self.samples)


class Shortfall(NamedTuple):
    """An epoch's last step, if fewer samples were left for it than other steps learn. Counted over all ranks."""

    size: int
    whole: int  # the other steps' number


class Upcoming(NamedTuple):
    """A micro-batch before its prompts are encoded; fields as in `MicroBatch`."""

    samples: tuple[Sample, ...]
    first_req_idx: int


class _SeenShare(NamedTuple):
    share: Share
    given: tuple[Sample, ...]  # the samples as annotated
    samples: tuple[Sample, ...]  # the same, as they are seen


def see(
    samples: Sequence[Sample], indices: Sequence[int], epoch: int, position: int, augmented: Augmented | None
) -> tuple[Sample, ...]:
    """The samples as they are seen: those that are equal stay one object."""
    if augmented is None:
        return tuple(samples[i] for i in indices)
    seen = {i: augmented(i, epoch, position) for i in dict.fromkeys(indices)}
    return tuple(seen[i] for i in indices)


class Batches(Iterator[MicroBatch]):
    """The training data of one rank. Close it: it may own processes."""

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
        """Set up the stream. `augmented`: how samples are seen, if not as they are."""
        self._samples, self._augmented = samples, augmented
        self._sampler = sampler_of(len(samples), config=config, plan=plan, rank=rank)
        self._pool = encoder_pool(config, encoder, samples_per_micro_batch=plan.per_device_train_batch_size)
        self._first = 0  # all micro-batches before this one were handed out
        self._taken: set[int] = set()  # the positions behind it that were handed out too
        self._seen: dict[int, _SeenShare] = {}  # shares that were not handed out yet, by position
        self._ahead: dict[int, list[EncodingJob]] = {}

    @property
    def per_epoch(self) -> int:
        """Micro-batches per epoch, equal on all ranks."""
        return self._sampler.per_epoch

    @property
    def num_taken(self) -> int:
        """Micro-batches handed out since the beginning of training."""
        return self._first + len(self._taken)

    def size(self, micro_batch: int) -> int:
        """Samples of all ranks in a micro-batch."""
        return self._sampler.global_size(micro_batch)

    def shortfall(self, number: int) -> Shortfall | None:
        """Return the shortfall of the step that learns the next `number` micro-batches, or those up to an epoch's
        end."""
        micro_batch = self._first % self.per_epoch
        size = sum(self.size(i) for i in range(micro_batch, min(micro_batch + number, self.per_epoch)))
        return self.shortfall_of(size, number)

    def shortfall_of(self, size: int, number: int) -> Shortfall | None:
        """Return the shortfall of a step that learns `size` samples in at most `number` micro-batches."""
        whole = min(number * self._sampler.global_batch, self._sampler.num_places)
        return Shortfall(size=size, whole=whole) if size < whole else None

    def __next__(self) -> MicroBatch:
        """Return the next micro-batch. Raises DataError where a sample can't be encoded."""
        return self.take(next(self._coming()))

    def take(self, position: int, *, then: Iterable[int] | None = None) -> MicroBatch:
        """Return the micro-batch at `position`, which was not handed out before. `then`: what will probably be asked
        for next, to be encoded meanwhile; None: what follows in order."""
        assert position in self.left(position // self.per_epoch), f"micro-batch {position} was handed out"
        self._prefetch(position, self._coming() if then is None else then)
        share, samples = self._share(position)
        prompts = [prompt for job in self._ahead[position] for prompt in job.result()]
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
        """The micro-batch at `position` counts as handed out: it was read in another way."""
        self._ahead.pop(position, None)
        self._seen.pop(position, None)
        self._taken.add(position)
        while self._first in self._taken:
            self._taken.remove(self._first)
            self._first += 1

    def left(self, epoch: int) -> list[int]:
        """Return the micro-batches of `epoch` that were not handed out, in order."""
        first = epoch * self.per_epoch
        return [p for p in range(max(first, self._first), first + self.per_epoch) if p not in self._taken]

    def upcoming(self, number: int) -> list[Upcoming]:
        """Return the next `number` micro-batches, or those up to an epoch's end. Takes and encodes nothing."""
        found = []
        for position in islice(self._coming(), number):
            share, samples = self._share(position)
            found.append(Upcoming(samples=samples, first_req_idx=share.first_req_idx))
            if share.ends_epoch:
                break
        return found

    def state(self) -> dict[str, object]:
        """Return where training stands in the data, as JSON: the first micro-batch that was not handed out, those
        behind it that were, and of which data."""
        return {"position": self._first, "taken": sorted(self._taken), **self._identity()}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on after the micro-batches that `state` counts. Raises CheckpointError where the data is another."""
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
        """Return the epoch in which each of these samples was handed out last, to any rank, before the next
        micro-batch."""
        epoch, micro_batch = divmod(self._first, self.per_epoch)
        order = self._sampler.order(epoch)[: micro_batch * self._sampler.global_batch]
        now = {self._samples[i].sample_id for i in order.tolist()}
        return [epoch if sample_id in now else max(0, epoch - 1) for sample_id in sample_ids]

    def seen_in(self, epoch: int, sample_id: str) -> Sample:
        """Return a sample as it is handed out in `epoch`."""
        place = next(i for i, sample in enumerate(self._samples) if sample.sample_id == sample_id)
        if self._augmented is None:
            return self._samples[place]
        return self._augmented(place, epoch, epoch * self.per_epoch)

    def close(self) -> None:
        self._pool.close()

    def _coming(self) -> Iterator[int]:
        return (position for position in count(self._first) if position not in self._taken)

    def _prefetch(self, position: int, then: Iterable[int]) -> None:
        """Hand jobs to the pool until `position` is under way, and behind it the look-ahead."""
        self._submit(position)
        behind = 0
        for other in then:
            if behind >= self._pool.lookahead:
                return
            if other != position:
                behind += _cost(self._submit(other))

    def _submit(self, position: int) -> Share:
        share, samples = self._share(position)
        if position not in self._ahead:
            self._ahead[position] = submit_all(self._pool, samples)
        return share

    def _share(self, position: int) -> tuple[Share, tuple[Sample, ...]]:
        """The share and its samples as they are seen. Labels may be completed while prompts are encoded. Then an
        augmented picture, which its labels have a part in, is made anew."""
        seen = self._seen.get(position)
        share = seen.share if seen else self._sampler.share(position)
        given = tuple(self._samples[i] for i in share.indices)
        if seen is None or any(one is not before for one, before in zip(given, seen.given, strict=True)):
            if self._augmented is not None:
                self._ahead.pop(position, None)
            seen = _SeenShare(share, given, see(self._samples, share.indices, share.epoch, position, self._augmented))
            self._seen[position] = seen
        return seen.share, seen.samples

    def _identity(self) -> dict[str, object]:
        ids = hashlib.sha256("\0".join(sample.sample_id for sample in self._samples).encode())
        return {
            "samples": ids.hexdigest(),
            "samples_per_micro_step": self._sampler.global_batch,
            "places_per_sample": self._sampler.repeats,
            "seed": self._sampler.seed,
            "shuffle": self._sampler.shuffle,
        }


class ShareReader:
    """The micro-batches of `Batches` on this rank, part by part, for another thread. `pool` is closed with the reader.
    `augmented` is as in `Batches`."""

    def __init__(
        self,
        samples: Sequence[Sample],
        sampler: DistributedSampler,
        pool: EncoderPool,
        *,
        augmented: Augmented | None = None,
    ) -> None:
        self._samples, self._sampler, self._pool, self._augmented = samples, sampler, pool, augmented

    def size(self, position: int) -> int:
        """This rank's samples in the micro-batch at `position`."""
        return len(self._sampler.places(position))

    def read(self, position: int, part: range) -> MicroBatch:
        """Samples `part` of the micro-batch. Raises DataError where a sample can't be encoded."""
        share = self._sampler.share(position)
        indices = share.indices[part.start : part.stop]
        samples = see(self._samples, indices, share.epoch, position, self._augmented)
        prompts = [prompt for job in submit_all(self._pool, samples) for prompt in job.result()]
        return MicroBatch(
            samples=samples,
            prompts=tuple(prompts),
            epoch=share.epoch,
            micro_batch=share.micro_batch,
            first_req_idx=share.first_req_idx + part.start,
            ends_epoch=share.ends_epoch,
        )

    def close(self) -> None:
        self._pool.close()


def submit_all(pool: EncoderPool, samples: Sequence[Sample]) -> list[EncodingJob]:
    """Submit jobs of the pool's size, in order. A sample that comes several times in a row (`grpo`) is encoded once."""
    runs = [(first, 1 + sum(1 for _ in again)) for _, again in groupby(samples, key=id) for first in [next(again)]]
    jobs = (runs[i : i + pool.job_size] for i in range(0, len(runs), pool.job_size))
    return [_Repeated(pool.submit([one for one, _ in job]), [times for _, times in job]) for job in jobs]


@dataclass(frozen=True)
class _Repeated:
    """A job each of whose prompts is wanted several times."""

    job: EncodingJob
    times: Sequence[int]

    def result(self) -> list[EncodedPrompt]:
        return [prompt for prompt, times in zip(self.job.result(), self.times, strict=True) for _ in range(times)]


def encoder_pool(config: RunConfig, encoder: Encoder, *, samples_per_micro_batch: int) -> EncoderPool:
    """Return the pool that encodes prompts: `data.num_workers` processes, or this one."""
    if not config.data.num_workers:
        return LocalPool(encoder)
    return WorkerPool(
        encoder,
        num_workers=config.data.num_workers,
        samples_per_micro_batch=samples_per_micro_batch,
        timeout_s=config.training.collective_timeout_s,
    )


def _cost(share: Share) -> int:
    """Return what a share takes of the look-ahead. An empty one takes its part too, so that their number stays
    bounded."""
    return max(1, len(share.indices))


def fewest_micro_batches(steps: int, per_epoch: int, *, gradient_accumulation_steps: int, m_steps: int) -> int:
    """Return what `steps` optimizer steps learn at least of the data, in micro-batches, each counted once."""
    whole = steps_per_epoch(per_epoch, gradient_accumulation_steps=gradient_accumulation_steps, m_steps=m_steps)
    epochs, rest = divmod(steps, whole)
    return epochs * per_epoch + min(rest // m_steps * gradient_accumulation_steps, per_epoch)


class WindowRepeater(Iterator[MicroBatch]):
    """Stands before a rank's `Batches`, with the same state and iterator, and keeps one window of it in memory."""

    def __init__(self, batches: Batches, *, gradient_accumulation_steps: int, m_steps: int) -> None:
        assert gradient_accumulation_steps > 0
        assert m_steps > 0
        self._batches = batches
        self._window_size, self._m_steps = gradient_accumulation_steps, m_steps
        self._next = WindowStep(0, 0)
        self._begin_window()

    def shortfall(self, number: int) -> Shortfall | None:
        """See `Batches`, at the beginning of a pass."""
        if self._kept:
            return self._batches.shortfall_of(sum(self._batches.size(b.micro_batch) for b in self._kept), number)
        return self._batches.shortfall(number)

    @property
    def next_step(self) -> WindowStep:
        """Return where the next micro-batch belongs."""
        return self._next

    def __next__(self) -> MicroBatch:
        """Return the next micro-batch, new or again. Raises DataError where a sample can't be encoded."""
        if self._taken == len(self._kept):  # true only in a window's first pass
            self._kept.append(next(self._batches))
        batch = replace(self._kept[self._taken], window_step=self._next)
        self._taken += 1
        if self._taken == self._window_size or batch.ends_epoch:
            self._end_pass(is_whole=self._taken == self._window_size)
        return batch

    def upcoming(self, number: int) -> list[Upcoming]:
        """See `Batches`, at the beginning of a pass: the window's micro-batches."""
        assert self._taken == 0, "in the middle of a pass"
        if self._kept:
            return [Upcoming(samples=batch.samples, first_req_idx=batch.first_req_idx) for batch in self._kept]
        return self._batches.upcoming(number)

    def last_epochs(self, sample_ids: Sequence[str]) -> list[int]:
        """See `Batches`, for what was handed out before the window."""
        return self._batches.last_epochs(sample_ids)

    def seen_in(self, epoch: int, sample_id: str) -> Sample:
        """See `Batches`."""
        return self._batches.seen_in(epoch, sample_id)

    def state(self) -> dict[str, object]:
        """Return the data's own state at the window's beginning, and how many passes over the window are done; as
        JSON."""
        return {**self._start, **self._next._asdict()}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on with the passes that the window has left, at least one of them, whatever `m_steps` was.

        Raises CheckpointError where the data is another.
        """
        self._batches.restore(state)
        m_step = min(int(state.get("m_step", 0)), self._m_steps - 1)
        self._next = WindowStep(int(state.get("window", 0)), m_step)
        self._begin_window()

    def _begin_window(self) -> None:
        self._start = self._batches.state()
        self._kept: list[MicroBatch] = []
        self._taken = 0  # counts those of the present pass

    def _end_pass(self, *, is_whole: bool) -> None:
        window, m_step = self._next
        self._taken = 0
        if is_whole and m_step + 1 < self._m_steps:
            self._next = WindowStep(window, m_step + 1)
        else:
            self._next = WindowStep(window + 1, 0)
            self._begin_window()
