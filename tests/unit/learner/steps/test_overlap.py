"""R25: what running ahead is worth, by exact accounting: the protocol that the code drives, under a virtual clock.

One rank; a call takes `rollout_s` and gives one row, a row takes `learn_s` to learn. Both sides act as the threads do:
the producer starts as soon as it may, the learner takes as soon as it can.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf

from learner.steps.protocol import Bounds, RankProtocol


@dataclass
class Simulation:
    protocol: RankProtocol
    rollout_s: float
    learn_s: float
    now_s: float = 0.0
    learning_s: float = 0.0  # of it, spent learning
    call_ends_s: float = inf

    def advance(self, to_s: float) -> None:
        """Let the producer act until `to_s`."""
        while True:
            if self.protocol.may_start:
                self.protocol.start_call()
                self.call_ends_s = self.now_s + self.rollout_s
            if self.call_ends_s > to_s:
                break
            self._call_ends()
        self.now_s = to_s

    def _call_ends(self) -> None:
        self.now_s, self.call_ends_s = self.call_ends_s, inf
        call = self.protocol.in_flight
        assert call is not None
        self.protocol.finish_call([call.positions])

    def learn(self) -> bool:
        """Take one row, waiting if need be, and learn it. False at the end."""
        self.advance(self.now_s)
        while not self.protocol.queue and not self.protocol.exhausted:
            self._call_ends()
            self.advance(self.now_s)
        if self.protocol.take() is None:
            return False
        self.learning_s += self.learn_s
        self.advance(self.now_s + self.learn_s)
        return True

    def sync(self, seconds: float) -> None:
        self.protocol.request_fence()
        if self.protocol.in_flight is not None:
            self._call_ends()
        self.now_s += seconds
        self.protocol.complete_fence(self.protocol.ver + 1)


def steady_state(bounds: Bounds, *, packs_per_step: int, call_s: float, sync_s: float) -> Simulation:
    """100 steps of `packs_per_step` rows of one second each, a sync before each step."""
    run = Simulation(RankProtocol(bounds, ver=0, call_size=1, end=None), call_s, 1.0)
    for _ in range(100):
        for _ in range(packs_per_step):
            run.learn()
        run.sync(sync_s)
    return run


def test_running_ahead_keeps_the_learner_busy() -> None:
    """R25: where rollouts take as long as learning, the learner is busy ≥ 0.9 of the time, and does ≥ 1.6 times what it
    would with rollout, learning and sync in turn; nothing is dropped, and nothing is older than one sync."""
    bounds = Bounds(start_below=4, keep_at_most=8, version_window=1)
    run = steady_state(bounds, packs_per_step=8, call_s=1.0, sync_s=0.05)
    counts = run.protocol.counts
    assert run.learning_s / run.now_s >= 0.9
    assert 100 * (8 * 1.0 + 8 * 1.0 + 0.05) / run.now_s >= 1.6
    assert counts.samples_returned == 0
    assert 0 < counts.age_versions <= counts.packs_learned


def test_a_window_of_zero_learns_only_what_the_served_weights_made() -> None:
    """R25: correct, and paid for: what was made ahead is rolled out again after each sync."""
    bounds = Bounds(start_below=4, keep_at_most=8, version_window=0)
    run = steady_state(bounds, packs_per_step=8, call_s=0.9, sync_s=0.05)
    assert run.protocol.counts.age_versions == 0
    assert run.protocol.counts.packs_dropped_stale > 0
    assert run.protocol.counts.packs_learned == 800
