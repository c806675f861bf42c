"""From a micro-batch to the rows that it learns: segments, packed, as many rows as every other rank has.

In: one rank's micro-batch. Out: its rows of this micro-step, in the order in which they are learned. `FreshRows` makes
them; `learner.steps.buffered` gives them again. Called by the trainer, once per micro-step, and once before the first
of them: rollouts of a whole optimizer step are made together, however few samples a micro-batch has.

Invariants: every rank gets equally many rows (D5). A sample whose segment had to wait in the packing buffer is learned
in a later micro-step, or named by `waiting` (R12).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Protocol

from learner.data.batches import MicroBatch, Upcoming
from learner.data.prompt import PromptEncoder
from learner.policy.parallel import Ranks
from learner.records import Channel, PackedRow, Sample
from learner.rollout.backend import MicroStep
from learner.run.log import PhaseClock
from learner.steps.packing import RowMaker
from learner.steps.segments import SegmentSource


class RowSource(Protocol):
    @property
    def channel(self) -> Channel: ...

    @property
    def needs_rollouts(self) -> bool:
        """Whether the coming step makes rollouts, and so wants the present weights on the servers."""
        ...

    def begin_step(self, window: Sequence[Upcoming], *, global_step: int, clock: PhaseClock) -> None:
        """All micro-batches of the optimizer step, before the first `rows`. Collective."""
        ...

    def rows(self, batch: MicroBatch, *, global_step: int, micro_step_idx: int, clock: PhaseClock) -> list[PackedRow]:
        """The rows to learn now. Collective."""
        ...

    def waiting(self) -> list[str]:
        """Samples that were handed out and not learned yet."""
        ...

    def due_on_resume(self) -> list[str]:
        """Samples that a run resumed from here must make segments of, besides those that its data hands out."""
        ...

    def restore(self, sample_ids: Sequence[str]) -> None:
        """Go on where `sample_ids` were due on this rank: they join the next micro-batch."""
        ...

    def metrics(self) -> Mapping[str, float]:
        """Of the last step, equal on all ranks."""
        ...


class FreshRows:
    """Every micro-step's rows made for it. `samples` (all) and `encoder` bring back what a resume owes."""

    def __init__(
        self,
        source: SegmentSource,
        row_maker: RowMaker,
        *,
        ranks: Ranks,
        capacity: int,
        samples: Sequence[Sample],
        encoder: PromptEncoder,
    ) -> None:
        self._source, self._row_maker = source, row_maker
        self._ranks, self._capacity = ranks, capacity
        self._samples_by_id = {sample.sample_id: sample for sample in samples}
        self._encoder = encoder
        self._owed: list[str] = []

    @property
    def channel(self) -> Channel:
        return self._source.channel

    @property
    def needs_rollouts(self) -> bool:
        return self._source.needs_rollouts

    def begin_step(self, window: Sequence[Upcoming], *, global_step: int, clock: PhaseClock) -> None:
        """Roll all of it out at once: the weights are the same for all of it."""
        owed = tuple(self._samples_by_id[i] for i in self._owed)  # joins the first micro-batch, as in `rows`
        steps = [
            MicroStep(
                samples=samples if micro_step_idx else (*samples, *owed),
                micro_step_idx=micro_step_idx,
                first_req_idx=first_req_idx,
            )
            for micro_step_idx, (samples, first_req_idx) in enumerate(window)
        ]
        self._source.begin_window(steps, global_step=global_step, clock=clock)

    def rows(self, batch: MicroBatch, *, global_step: int, micro_step_idx: int, clock: PhaseClock) -> list[PackedRow]:
        """See `RowSource`. Raises DataError for a segment that is longer than a row."""
        if self._owed:
            with clock.phase("data"):
                batch = batch.with_samples([self._samples_by_id[i] for i in self._owed], self._encoder)
            self._owed = []
        segments = self._source.segments(
            batch.samples,
            batch.prompts,
            global_step=global_step,
            micro_step_idx=micro_step_idx,
            first_req_idx=batch.first_req_idx,
            clock=clock,
        )
        with clock.phase("pack"):
            rows = self._row_maker.rows(segments)
            return rows + empty_rows(len(rows), self._ranks, self._capacity)

    def waiting(self) -> list[str]:
        return [*self._owed, *self._row_maker.carried()]

    def due_on_resume(self) -> list[str]:
        return self.waiting()

    def restore(self, sample_ids: Sequence[str]) -> None:
        self._owed = list(sample_ids)

    def metrics(self) -> Mapping[str, float]:
        return {}


def empty_rows(num_rows: int, ranks: Ranks, capacity: int) -> list[PackedRow]:
    """Zero-weight rows: those that this rank's `num_rows` are short of the rank that has most (D5). Collective."""
    wanted = int(ranks.all_reduce_max(num_rows))
    return [PackedRow(segments=(), capacity=capacity)] * (wanted - num_rows)


def in_lockstep(rows: Iterable[PackedRow], ranks: Ranks, capacity: int) -> Iterator[PackedRow]:
    """This rank's rows, and zero-weight ones for as long as another rank has some (D5). Collective: no rank goes
    on before each has its next row, or none is left, so that passes in which ranks wait for each other meet."""
    remaining = iter(rows)
    while True:
        row = next(remaining, None)
        if not ranks.all_reduce_max(row is not None):
            return
        yield PackedRow(segments=(), capacity=capacity) if row is None else row
