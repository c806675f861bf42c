"""The protocol of the sources from which the trainer gets a step's rows, and the simplest source, `FreshSteps`.

The trainer calls these methods, once per optimizer step, in this order:

    wants_sync -> [fence, around a sync] -> begin -> shortfall -> micro_steps, each learned to its last row -> metrics

A fence is a time in which no rollout is in flight. If `postpones_sync` returns True, the sync's fence comes between two
rows, as soon as `is_quiet` returns True, or after the last row.

The sources are `FreshSteps` with ground truth (`sft`) or with rollouts (`rollout_matching_sft`, `grpo`),
`buffered.BufferedSteps`, which learns a window's rows several times, and for `stage2_ab_training`
`in_step.Stage2InStep` and `ahead.Stage2Ahead`.

Invariants: every rank calls the same methods in the same order, and has equally many micro-steps. Ranks may have
different numbers of rows in a micro-step; `padded` and `in_lockstep` add zero-weight rows (D5). Each sample that was
handed out is either learned or in the list `waiting` (R12). The rollouts of an optimizer step are made together, for
all its micro-batches.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

from learner.data.batches import Batches, MicroBatch, Shortfall, Upcoming, WindowRepeater
from learner.data.prompt import PromptEncoder
from learner.journal.log import PhaseClock
from learner.policy.parallel import Ranks
from learner.records import Channel, EncodedPrompt, PackedRow, Segment
from learner.rollout.backend import MicroStep
from learner.steps.packing import RowMaker
from learner.steps.segments import SegmentSource


class Fence:
    """A time during which no rollout is in flight. The holder calls `synced` if a sync happened."""

    ver: int | None = None
    updates = 0  # number of optimizer updates in the synced weights

    def synced(self, ver: int, *, updates: int = 0) -> None:
        """Note that a sync has completed: every server now serves version `ver`."""
        self.ver, self.updates = ver, updates


class StepSource(Protocol):
    """Hands out one rank's rows, step by step. The subclasses differ in how they make the rows."""

    def wants_sync(self, global_step: int) -> bool:
        """Return True if the servers should have the present weights before this step. The value is equal on all
        ranks."""
        ...

    def postpones_sync(self, global_step: int) -> bool:
        """Return True if this step can be learned while the sync that it wants waits for rollouts in flight. If True,
        no new rollout begins before that sync. Collective."""
        return False

    def is_quiet(self) -> bool:
        """Return True if a postponed sync need not wait any more: no rollout is in flight, on any rank. Collective."""
        return True

    def fence(self) -> AbstractContextManager[Fence]:
        """Enclose a sync or an evaluation: inside, no rank has a rollout in flight. Collective."""
        return nullcontext(Fence())

    def begin(self, global_step: int) -> Channel:
        """Begin a step, and return its channel. Collective."""
        ...

    def shortfall(self) -> Shortfall | None:
        """Return how many samples the current step has, and how many a whole step has. None: the current step is whole.
        To be called before `micro_steps`."""
        return None

    def micro_steps(self) -> Iterator[Generator[PackedRow]]:
        """Yield this rank's rows of the current step, one micro-step after the other. A micro-step's data are read when
        its first row is requested. Closing a micro-step skips the rest of its rows."""
        ...

    def metrics(self) -> Mapping[str, float]:
        """Metrics of the step that was learned, equal on all ranks. Collective."""
        return {}

    def waiting(self) -> list[str]:
        """Ids of the samples that were handed out on this rank and are not learned yet."""
        return []

    def state(self) -> dict[str, object]:
        """The run's position in its data, as JSON for a checkpoint. Call it between two steps. The position is equal on
        all ranks. Collective.

        `batches`: the dataloader's state. `carried`: for each rank the samples to learn in addition to the
        dataloader's. `stage2`: only in `stage2_ab_training`.
        """
        ...

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from an earlier run's `state()`, before the first step. Raises CheckpointError if the state does not
        fit this run."""
        ...

    def stop(self) -> None:
        """Let no further rollout begin, and return at once. To be called before the backend is closed."""
        return

    def close(self) -> None:
        """Free all resources, in a limited time. To be called after `stop`, and after the backend was closed."""
        return


class FreshSteps(StepSource):
    """Steps with one micro-step per micro-batch. A micro-batch's rows are made just before they are learned (`sft`,
    `rollout_matching_sft`, `grpo`).

    A step has `gradient_accumulation_steps` micro-batches; the last step of an epoch may have fewer. `encoder` encodes
    the samples that a resumed run still has to learn. Step `drains_at` has one more micro-step, with all segments that
    still wait for a row (`training.packing_drop_last: false`); None: no step has.
    """

    def __init__(
        self,
        batches: Batches | WindowRepeater,
        source: SegmentSource,
        row_maker: RowMaker,
        *,
        gradient_accumulation_steps: int,
        ranks: Ranks,
        encoder: PromptEncoder,
        clock: PhaseClock,
        drains_at: int | None = None,
    ) -> None:
        self._batches, self._source, self._row_maker = batches, source, row_maker
        self._gradient_accumulation_steps, self._ranks, self._drains_at = gradient_accumulation_steps, ranks, drains_at
        self._encoder, self._clock = encoder, clock
        # Samples that were not learned before the checkpoint, as (epoch, sample id). The first micro-batch after a
        # resume gets these samples.
        self._owed: list[tuple[int, str]] = []
        self._first_owed = 0  # index of this rank's first owed sample among all ranks' owed samples
        self._global_step = 0  # number of the step that began last
        self._num_batches = 0  # number of micro-batches of the step that began last

    def wants_sync(self, global_step: int) -> bool:
        return self._source.needs_rollouts

    def begin(self, global_step: int) -> Channel:
        """Roll out the whole step at once: the weights are the same for all rollouts of a step."""
        self._global_step = global_step
        window = self._batches.upcoming(self._gradient_accumulation_steps)
        self._num_batches = len(window)
        self._begin_window(window)
        return self._source.channel

    def shortfall(self) -> Shortfall | None:
        return self._batches.shortfall(self._gradient_accumulation_steps)

    def micro_steps(self) -> Iterator[Generator[PackedRow]]:
        for micro_step_idx in range(self._num_batches):
            yield self._micro_step(micro_step_idx)
        if self._global_step == self._drains_at:
            yield self._drained()

    def waiting(self) -> list[str]:
        return [*(sample_id for _, sample_id in self._owed), *self._row_maker.carried()]

    def state(self) -> dict[str, object]:
        # Each rank carries other samples, and the checkpoint is written by rank 0 alone.
        carried = self._ranks.all_gather_object(self._due_on_resume())
        return {"batches": self._batches.state(), "carried": carried}

    def restore(self, state: Mapping[str, Any]) -> None:
        """See `StepSource`. Carried samples are divided among the present ranks, whose number may have changed."""
        self._batches.restore(state["batches"])
        carried, ranks = [sample_id for part in state["carried"] for sample_id in part], self._ranks
        owed = own_share(carried, ranks)
        self._owed = list(zip(self._batches.last_epochs(owed), owed, strict=True))
        # The request index counts over all ranks, so that no two owed samples share a seed.
        self._first_owed = sum(len(carried[rank :: ranks.world_size]) for rank in range(ranks.rank))

    # ---- overridable -----------------------------------------------------------------------------------------------

    def _begin_window(self, window: Sequence[Upcoming]) -> None:
        steps = [
            MicroStep(samples=samples, micro_step_idx=micro_step_idx, first_req_idx=first_req_idx)
            for micro_step_idx, (samples, first_req_idx) in enumerate(window)
        ]
        if self._owed:
            steps.append(self._owed_step())
        self._source.begin_window(steps, global_step=self._global_step, clock=self._clock)

    def _rows(self, batch: MicroBatch, micro_step_idx: int) -> list[PackedRow]:
        """Return the rows to learn in this micro-step. Raises DataError for a segment that is longer than a row."""
        step = MicroStep(samples=batch.samples, micro_step_idx=micro_step_idx, first_req_idx=batch.first_req_idx)
        segments = self._segments(step, batch.prompts)
        if self._owed:
            # Owed samples come with the first micro-batch only: `_owed_segments` empties the list.
            segments += self._owed_segments()
        with self._clock.phase("pack"):
            return self._row_maker.rows(segments)

    def _owed_segments(self) -> list[Segment]:
        step, self._owed = self._owed_step(), []
        with self._clock.phase("data"):
            prompts = [self._encoder.encode(sample) for sample in step.samples]
        return self._segments(step, prompts)

    def _owed_step(self) -> MicroStep:
        """Return a micro-step of the owed samples: handed out before the checkpoint, and not learned yet."""
        return MicroStep(
            samples=tuple(self._batches.seen_in(epoch, sample_id) for epoch, sample_id in self._owed),
            # No other micro-step of the step has this index. So an owed request never has the seed of another request
            # (R11).
            micro_step_idx=self._gradient_accumulation_steps,
            first_req_idx=self._first_owed,
        )

    def _segments(self, step: MicroStep, prompts: Sequence[EncodedPrompt]) -> list[Segment]:
        return self._source.segments(step, prompts, global_step=self._global_step, clock=self._clock)

    def _due_on_resume(self) -> list[str]:
        """Return the ids of the samples that a run resumed now would have to learn in addition to the samples of its
        dataloader."""
        return self.waiting()

    def _micro_step(self, micro_step_idx: int) -> Generator[PackedRow]:
        with self._clock.phase("data"):
            batch = next(self._batches)
        yield from self._rows(batch, micro_step_idx)

    def _drained(self) -> Generator[PackedRow]:
        with self._clock.phase("pack"):
            rows = self._row_maker.drain()
        yield from rows


def own_share(sample_ids: Sequence[str], ranks: Ranks) -> list[str]:
    """Return this rank's part of `sample_ids`, which all ranks together have to learn after a resume."""
    return list(sample_ids[ranks.rank :: ranks.world_size])


def padded(rows: Iterable[PackedRow], ranks: Ranks, capacity: int, clock: PhaseClock) -> Iterator[PackedRow]:
    """Yield this rank's rows, then zero-weight rows, until this rank has as many rows as the rank with the most rows
    (D5). Collective."""
    num_rows = 0
    for row in rows:
        yield row
        num_rows += 1
    with clock.phase("learn"):  # other ranks are learning while this rank waits
        wanted = int(ranks.all_reduce_max(num_rows))
    # Without these rows, other ranks would wait in a collective for passes that this rank does not make.
    yield from [PackedRow(segments=(), capacity=capacity)] * (wanted - num_rows)


def in_lockstep(rows: Iterable[PackedRow], ranks: Ranks, capacity: int, clock: PhaseClock) -> Iterator[PackedRow]:
    """Yield this rank's rows, then zero-weight rows while another rank still has rows (D5). Collective: ranks wait for
    each other before every row, so all ranks make the same number of passes."""
    # A pass of a sharded model is a collective, so ranks must not make different numbers of passes.
    remaining = iter(rows)
    while True:
        row = next(remaining, None)
        with clock.phase("learn"):
            any_left = ranks.all_reduce_max(row is not None)
        if not any_left:
            return
        yield PackedRow(segments=(), capacity=capacity) if row is None else row
