"""Hypothesis explores the fence + queue + version protocol over several ranks (R24, R25, R27).

Each rank runs a producer and a trainer over its own `RankProtocol`, the machine that the code drives. The servers and
the collectives are modelled here: a sync moves the weights only inside a collective that every rank has entered, ranks
leave it one by one, and a rank that ended breaks the collective for all. The model keeps the truth about every sample
itself (which weights really made it, how often it was learned) and compares.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from learner.steps.protocol import Bounds, Drop, Pack, PipelineStoppedError, RankProtocol

WORLD_SIZES = st.integers(1, 3)


@dataclass
class RankModel:
    """One rank: the protocol under test, and what really happened to its samples."""

    protocol: RankProtocol
    call_ver: int | None = None  # what the servers served when the call in flight began
    made_by: dict[int, int] = field(default_factory=dict)  # pack index -> ver of the weights that really made it
    learned: Counter[int] = field(default_factory=Counter)
    dropped: list[Drop] = field(default_factory=list)
    in_collective: bool = False


class PipelineMachine(RuleBasedStateMachine):
    @initialize(
        world_size=WORLD_SIZES,
        window=st.integers(0, 2),
        keep=st.none() | st.integers(1, 4),
        start_below=st.integers(1, 4),
        call_size=st.integers(1, 4),
        end=st.integers(0, 12),
    )
    def begin(self, world_size: int, window: int, keep: int | None, start_below: int, call_size: int, end: int) -> None:
        start_below = start_below if keep is None else min(start_below, keep)
        bounds = Bounds(start_below=start_below, keep_at_most=keep, version_window=window)
        self.bounds, self.call_size, self.end = bounds, call_size, end
        self.ver = 7  # what the servers serve
        self.moved: int | None = None  # set between the moving of weights and the last rank's leaving the collective
        self.ranks = [
            RankModel(RankProtocol(bounds, ver=self.ver, call_size=call_size, end=end)) for _ in range(world_size)
        ]

    # ---- producers -------------------------------------------------------------------------------------------------

    @rule(rank=st.integers(0, 2))
    def start_call(self, rank: int) -> None:
        model = self._rank(rank)
        if model.protocol.may_start:
            model.call_ver = self.ver
            call = model.protocol.start_call()
            assert 1 <= len(call.positions) <= self.call_size
            assert call.ver == self.ver

    @rule(rank=st.integers(0, 2), cuts=st.lists(st.booleans(), min_size=3, max_size=3))
    def finish_call(self, rank: int, cuts: list[bool]) -> None:
        model = self._rank(rank)
        if model.protocol.in_flight is None:
            return
        positions = model.protocol.in_flight.positions
        groups: list[list[int]] = [[positions[0]]]
        for position, cut in zip(positions[1:], cuts, strict=False):
            if cut:
                groups.append([position])
            else:
                groups[-1].append(position)
        packs, drops = model.protocol.finish_call(groups)
        assert bool(packs) != model.protocol.ended
        assert model.call_ver is not None
        model.made_by.update({pack.index: model.call_ver for pack in packs})
        model.dropped.extend(drops)

    @rule(rank=st.integers(0, 2))
    def call_fails(self, rank: int) -> None:
        model = self._rank(rank)
        if model.protocol.in_flight is not None and not self._spared():
            model.protocol.abandon_call()
            model.protocol.fail(RuntimeError("call"))

    # ---- trainers --------------------------------------------------------------------------------------------------

    @rule(rank=st.integers(0, 2))
    def learn(self, rank: int) -> None:
        model = self._rank(rank)
        if not model.protocol.ended and not model.in_collective:
            self._learn(model, model.protocol.take())

    def _learn(self, model: RankModel, pack: Pack | None) -> None:
        if pack is not None:
            made_by = model.made_by[pack.index]
            assert pack.ver == made_by, "a pack is labelled with other weights than made it"
            assert made_by >= self.ver - self.bounds.version_window, "a stale pack was learned"
            model.learned.update(pack.positions)

    @rule(rank=st.integers(0, 2))
    def request_fence(self, rank: int) -> None:
        if not self._rank(rank).protocol.ended:
            self._rank(rank).protocol.request_fence()

    @rule(rank=st.integers(0, 2))
    def enter_collective(self, rank: int) -> None:
        model = self._rank(rank)
        if self.moved is None and model.protocol.quiet:
            model.in_collective = True

    @precondition(lambda self: self._all_entered())
    @rule()
    def move_weights(self) -> None:
        self._move_weights()

    def _move_weights(self) -> None:
        assert all(model.protocol.in_flight is None for model in self.ranks), "weights moved under a call in flight"
        self.ver += 1
        self.moved = self.ver

    @precondition(lambda self: self._all_entered() and not self._spared())
    @rule()
    def sync_fails(self) -> None:
        for model in self.ranks:
            model.protocol.fail(RuntimeError("sync"))

    @rule(rank=st.integers(0, 2))
    def leave_collective(self, rank: int) -> None:
        model = self._rank(rank)
        if self.moved is not None and model.in_collective and not model.protocol.ended:
            model.dropped.extend(model.protocol.complete_fence(self.moved))
            model.in_collective = False
            if not any(other.in_collective and not other.protocol.ended for other in self.ranks):
                self.moved = None

    @rule(rank=st.integers(0, 2))
    def trainer_stops(self, rank: int) -> None:
        if not self._spared():
            self._rank(rank).protocol.stop()

    @rule(rank=st.integers(0, 2))
    def collective_breaks(self, rank: int) -> None:
        """A rank that waits for one that ended gets an error from the collective, within its deadline."""
        model = self._rank(rank)
        if model.in_collective and any(other.protocol.ended for other in self.ranks):
            model.protocol.fail(RuntimeError("another rank ended"))

    # ---- what always holds -----------------------------------------------------------------------------------------

    @invariant()
    def every_sample_is_in_one_place(self) -> None:
        for model in self.ranks:
            protocol = model.protocol
            flying = protocol.in_flight.positions if protocol.in_flight else ()
            queued = [p for pack in protocol.queue for p in pack.positions]
            places = Counter([*protocol.waiting, *flying, *queued, *model.learned.elements()])
            assert places == Counter(range(protocol.next_position)), "a sample was lost or doubled"
            assert list(protocol.stream_state().unlearned) == sorted(
                set(range(protocol.next_position)) - set(model.learned)
            )

    @invariant()
    def counts_tell_the_truth(self) -> None:
        for model in self.ranks:
            counts, reasons = model.protocol.counts, Counter(drop.reason for drop in model.dropped)
            assert (counts.packs_dropped_oldest, counts.packs_dropped_stale) == (reasons["oldest"], reasons["stale"])
            assert counts.samples_returned == sum(len(drop.pack.positions) for drop in model.dropped)
            assert counts.samples_learned == model.learned.total()
            assert counts.packs_made == counts.packs_learned + len(model.dropped) + len(model.protocol.queue)

    @invariant()
    def memory_is_bounded(self) -> None:
        bounds = self.bounds
        limit = bounds.start_below - 1 + self.call_size if bounds.keep_at_most is None else bounds.keep_at_most
        assert all(len(model.protocol.queue) <= limit for model in self.ranks)

    @invariant()
    def no_call_runs_on_other_weights(self) -> None:
        for model in self.ranks:
            if model.protocol.in_flight is not None:
                assert model.call_ver == self.ver == model.protocol.in_flight.ver

    @invariant()
    def an_end_is_seen_by_every_waiter(self) -> None:
        for model in self.ranks:
            if model.protocol.ended:
                assert not model.protocol.may_start
                assert not model.protocol.quiet
                for ask in (model.protocol.take, model.protocol.request_fence, model.protocol.check):
                    with pytest.raises((RuntimeError, PipelineStoppedError)) as raised:
                        ask()
                    assert model.protocol.cause in (None, raised.value)

    def teardown(self) -> None:
        """No deadlock: from wherever the run stands, fair scheduling without new faults learns all, or ends all."""
        if not hasattr(self, "ranks"):
            return
        for _ in range(200):
            for index, model in enumerate(self.ranks):
                self.start_call(index)
                self.finish_call(index, [True, False, True])
                self.learn(index)
                if model.protocol.phase == "fenced":
                    self.enter_collective(index)
                elif not model.protocol.ended and any(other.protocol.phase != "open" for other in self.ranks):
                    model.protocol.request_fence()  # every rank reaches the collective that one has begun
                self.collective_breaks(index)
            if self._all_entered():
                self._move_weights()
            for index in range(len(self.ranks)):
                self.leave_collective(index)
        if any(model.protocol.ended for model in self.ranks):
            assert all(model.protocol.ended for model in self.ranks), "a rank waits for one that ended"
            assert all(model.protocol.in_flight is None for model in self.ranks)
        else:
            assert all(model.protocol.exhausted for model in self.ranks), "the run stands still"
            assert all(model.learned == Counter(range(self.end)) for model in self.ranks), "not exactly once"

    # ---- helpers ---------------------------------------------------------------------------------------------------

    def _rank(self, rank: int) -> RankModel:
        return self.ranks[rank % len(self.ranks)]

    def _all_entered(self) -> bool:
        return self.moved is None and all(m.in_collective and not m.protocol.ended for m in self.ranks)

    def _spared(self) -> bool:
        """Half of the runs (those with an even stream) see no fault, so that exploration goes deep there too."""
        return self.end % 2 == 0


TestPipelineMachine = PipelineMachine.TestCase
TestPipelineMachine.settings = settings(max_examples=300, stateful_step_count=50, deadline=None)
