"""How many calls a step's rollouts are made in: the fastest number, whatever the server and the model are like."""

from __future__ import annotations

from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.ahead import GroundTruth, RepeatedBatch, SleepingServer
from learner.data.batches import Batches
from learner.policy.parallel import Ranks
from learner.records import Segment
from learner.run.log import PhaseClock
from learner.steps.in_step import TRY_AGAIN_AFTER, CallSize, Stage2InStep, sizes
from learner.steps.packing import CompleteRows
from learner.steps.stage2 import Stage2Parts

SHARE = 16


def step_seconds(size: int, *, call_s: float, each_s: float, learn_s: float) -> float:
    """Of calls one after the other, each `call_s` and `each_s` per sample, beside learning of `learn_s` per sample."""
    rolled, learned = 0.0, 0.0
    for start in range(0, SHARE, size):
        number = min(size, SHARE - start)
        rolled += call_s + each_s * number
        learned = max(learned, rolled) + learn_s * number
    return learned


@given(share=st.integers(1, 300), capacity=st.integers(1, 300))
def test_sizes_are_parts_of_the_share_that_the_servers_hold(share: int, capacity: int) -> None:
    found = sizes(share, capacity)
    assert list(found) == sorted(set(found))
    assert found[0] >= 1
    assert found[-1] == min(share, capacity)
    assert all(-(-share // size) <= 4 for size in found if size < capacity)


@given(seconds=st.tuples(*[st.floats(0.0, 1.0)] * 3))
def test_it_settles_on_the_fastest(seconds: tuple[float, float, float]) -> None:
    call_s, each_s, learn_s = seconds
    cost = {size: step_seconds(size, call_s=call_s, each_s=each_s, learn_s=learn_s) for size in sizes(SHARE, SHARE)}
    chosen = CallSize()
    for _ in range(1 + len(cost)):
        size = chosen.choose(tuple(cost))
        chosen.tell(size, cost[size])
    for _ in range(3 * TRY_AGAIN_AFTER):
        size = chosen.choose(tuple(cost))
        chosen.tell(size, cost[size])
    assert cost[chosen.choose(tuple(cost))] == min(cost.values())


def test_a_warm_up_and_a_step_that_was_slow_by_chance_decide_nothing() -> None:
    chosen = CallSize()
    for size, seconds in ((4, 90.0), (4, 1.0), (8, 2.0), (16, 3.0), (4, 7.0)):
        assert chosen.choose((4, 8, 16)) == size
        chosen.tell(size, seconds)
    assert chosen.choose((4, 8, 16)) == 8, "4 has a mean of 4 now"
    chosen.tell(8, 6.0)
    chosen.tell(chosen.choose((4, 8, 16)), 3.0)
    assert chosen.choose((4, 8, 16)) == 16


def test_what_was_slow_is_tried_again() -> None:
    chosen, cost = CallSize(), {4: 1.0, 16: 2.0}
    tried = []
    for step in range(2 * TRY_AGAIN_AFTER):
        size = chosen.choose((4, 16))
        tried.append(size)
        chosen.tell(size, cost[size] if step < TRY_AGAIN_AFTER else 3.0 - cost[size])
    assert tried[3:TRY_AGAIN_AFTER] == [4] * (TRY_AGAIN_AFTER - 3)
    assert tried[TRY_AGAIN_AFTER + 2 :] == [16] * (TRY_AGAIN_AFTER - 2)


def test_a_server_as_slow_for_few_as_for_many_gets_all_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Seconds are those of a clock that only calls move; every sample is learned, however many calls there are."""
    now = 0.0

    class Server(SleepingServer):
        def segments(self, samples: Any, prompts: Any, **place: Any) -> list[Segment]:
            nonlocal now
            now += 1.0
            return super().segments(samples, prompts, **place)

    parts = Stage2Parts(
        b_ratio=1.0,
        packs_per_step=1,
        ranks=Ranks(),
        batches=cast(Batches, RepeatedBatch(SHARE)),
        ground_truth=GroundTruth(),
        rollouts=Server(0.0),
        row_maker=CompleteRows(capacity=16),
        clock=PhaseClock(),
    )
    source = Stage2InStep(parts, capacity=SHARE, deadline_s=30.0)
    with source.fence() as fence:
        fence.synced(0)
    monkeypatch.setattr("learner.steps.in_step.time.perf_counter", lambda: now)
    calls = []
    for step in range(7):
        source.begin(step)
        rows = [row for micro_step in source.micro_steps() for row in micro_step]
        assert sum(len(row.segments) for row in rows) == SHARE
        calls.append(source.metrics()["stage2_ab/calls"])
    assert calls == [4, 4, 2, 1, 1, 1, 1]
