"""R25, R31, R32: the pipeline's threads keep the protocol's promises. Order is fixed by events, never by sleeping."""

from __future__ import annotations

import logging
import random
import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import chain

import pytest

from learner.steps.pipeline import CallSamples, PipelineStats, RolloutPipeline
from learner.steps.protocol import Bounds, PipelineStoppedError, StreamState
from shared.errors import DeadlineError, ServerUnreachableError, SyncError
from tests.unit.learner.steps.fakes import DEADLINE_S, FakeServer, Held, ids, pipeline

RUN_AHEAD = Bounds(start_below=2, keep_at_most=4, version_window=1)


def learn_all(made: RolloutPipeline) -> list[str]:
    learned: list[str] = []
    while (row := made.next_pack(DEADLINE_S)) is not None:
        learned.extend(ids(row))
    return learned


def wait_until(condition: Callable[[], bool]) -> None:
    """Spin until `condition()`; for what has no event of its own, such as a producer that pauses."""
    end = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < end, "the condition never came"
        time.sleep(0.001)


# ---- synchronous Channel-B: the step's share ---------------------------------------------------------------------


@pytest.mark.parametrize(("call_size", "row_size"), [(1, 1), (4, 2), (3, 5), (16, 1), (32, 32)])
def test_the_share_is_learned_once_in_order_and_ends(call_size: int, row_size: int) -> None:
    """R31: every rollout of the share once, in stream order, then the end, as often as asked."""
    with pipeline(FakeServer(), call_size=call_size, row_size=row_size, end=16) as made:
        assert learn_all(made) == [f"s{i}" for i in range(16)]
        assert made.next_pack(DEADLINE_S) is None
        assert made.stream_state() == StreamState(next_position=16, unlearned=(), next_call=-(-16 // call_size))


def test_an_empty_share_ends_at_once() -> None:
    """R31: a rank's share can be empty."""
    with pipeline(FakeServer(), end=0) as made:
        assert made.next_pack(DEADLINE_S) is None


def test_rollout_overlaps_learning() -> None:
    """R32: each call but the first runs while the row before it is being learned; neither side could end alone."""
    in_learner = [threading.Event() for _ in range(5)]  # [k]: row k is in the learner's hands
    in_call = [threading.Event() for _ in range(5)]

    def before(item: CallSamples) -> None:
        k = item.call.index
        in_call[k].set()
        assert k == 0 or in_learner[k - 1].wait(DEADLINE_S), f"call {k} ran without row {k - 1} being learned"

    with pipeline(FakeServer(before=before), end=5) as made:
        for k in range(5):
            assert made.next_pack(DEADLINE_S) is not None
            in_learner[k].set()
            assert k == 4 or in_call[k + 1].wait(DEADLINE_S), f"row {k} was learned without call {k + 1} running"


def test_in_step_queue_is_bounded_and_drops_nothing() -> None:
    """R32: with queue size 1, a learner that takes nothing stops the producer: one row waits, one is in hand."""
    server = FakeServer()
    with pipeline(server, end=50) as made:
        wait_until(lambda: made.eligible() == 2)
        wait_until(lambda: made._thread is None)  # the producer has left
        assert len(server.calls) == 2
        assert learn_all(made) == [f"s{i}" for i in range(50)]


# ---- asynchronous actor-learner ----------------------------------------------------------------------------------


def test_prefetching_stops_at_its_target() -> None:
    """R25: an endless stream is run ahead of by `prefetch_target_packs` and no further."""
    server = FakeServer()
    with pipeline(server, RUN_AHEAD) as made:
        wait_until(lambda: made._thread is None)
        assert (made.eligible(), len(server.calls)) == (2, 2)
        made.next_pack(DEADLINE_S)
        wait_until(lambda: made._thread is None)
        assert (made.eligible(), len(server.calls)) == (2, 3)


def test_oldest_dropped_counted_logged_and_made_again(caplog: pytest.LogCaptureFixture) -> None:
    """R25, R12: six rows in a queue of four: the two oldest go, by name, and their samples come again."""
    caplog.set_level(logging.INFO, logger="learner.pipeline")
    with pipeline(FakeServer(), RUN_AHEAD, call_size=6, end=6) as made:
        wait_until(lambda: made.eligible() == 4)
        assert made.stats().counts.packs_dropped_oldest == 2
        assert made.stream_state().unlearned == (0, 1, 2, 3, 4, 5)
        assert learn_all(made) == ["s2", "s3", "s4", "s5", "s0", "s1"]
        assert made.stats().counts.samples_returned == 2
    assert [r.getMessage().rsplit(": ", 1)[-1] for r in caplog.records] == ["s0", "s1"]


def test_stale_packs_dropped_counted_and_made_again() -> None:
    """R25: window 1: a pack survives one sync and not the second; its samples are rolled out by the new weights."""
    server = FakeServer()
    with pipeline(server, RUN_AHEAD, end=2) as made:
        wait_until(lambda: made.eligible() == 2)
        for eligible in (2, 0):
            with made.fence(DEADLINE_S) as fence:
                fence.synced(server.move_weights())
                assert made.stats().samples_in_flight == 0
            assert made.stats().counts.packs_dropped_stale == 2 - eligible
        rows = [made.next_pack(DEADLINE_S), made.next_pack(DEADLINE_S)]
        assert [(ids(row), row.segments[0].ver) for row in rows if row] == [(["s0"], 3), (["s1"], 3)]
        assert made.next_pack(DEADLINE_S) is None


def test_age_is_measured_in_versions() -> None:
    """R25: a pack made one sync ago has age 1 when it is learned."""
    server = FakeServer()
    with pipeline(server, RUN_AHEAD, end=1) as made:
        wait_until(lambda: made.eligible() == 1)
        with made.fence(DEADLINE_S) as fence:
            fence.synced(server.move_weights())
        made.next_pack(DEADLINE_S)
        assert made.stats().counts.age_versions == made.stats().counts.packs_learned > 0


def test_resume_makes_exactly_what_was_not_learned() -> None:
    """R25: whatever was queued or in flight at the checkpoint is rolled out again after it, and nothing else is."""
    with pipeline(FakeServer(), RUN_AHEAD, call_size=3, end=20) as made:
        before = [ids(row) for row in (made.next_pack(DEADLINE_S) for _ in range(5)) if row]
        state = made.stream_state()
    server = FakeServer()
    with pipeline(server, RUN_AHEAD, call_size=3, end=20, resume=state) as made:
        after = learn_all(made)
    assert Counter([*chain(*before), *after]) == Counter(f"s{i}" for i in range(20))
    assert server.calls[0].call.index == state.next_call


# ---- the fence -----------------------------------------------------------------------------------------------------


def test_fence_waits_for_the_call_in_flight_and_lets_none_start() -> None:
    """R24: the fence is entered after the call ended, and no call starts behind it however much room there is."""
    held = Held()
    server = FakeServer(before=held)
    with pipeline(server, RUN_AHEAD) as made:
        held.until_entered()
        made.request_fence()
        threading.Timer(0.01, held.release.set).start()
        with made.fence(DEADLINE_S) as fence:
            assert held.release.is_set()
            wait_until(lambda: made._thread is None)
            assert (len(server.calls), made.eligible()) == (1, 1)
            fence.synced(server.move_weights())
        wait_until(lambda: len(server.calls) == 2)
        assert server.calls[1].call.ver == 2


def test_fence_without_a_sync_keeps_the_version_and_the_packs() -> None:
    """R25: an evaluation behind the fence ages nothing."""
    with pipeline(FakeServer(), RUN_AHEAD, end=2) as made:
        wait_until(lambda: made.eligible() == 2)
        with made.fence(DEADLINE_S):
            pass
        assert (made.stats().ver, made.eligible()) == (1, 2)


def test_fence_passes_its_deadline_by_name() -> None:
    """A wait that passes its deadline says which wait, for what, and which key; so does every later call."""
    held = Held()
    with pipeline(FakeServer(before=held), call_size=3) as made:
        held.until_entered()
        with (
            pytest.raises(DeadlineError, match=r"before a weight sync.*call 0 of 3 samples.*collective_timeout_s"),
            made.fence(0.01),
        ):
            pytest.fail("entered under a call in flight")
        with pytest.raises(DeadlineError, match="before a weight sync"):
            made.eligible()
        held.release.set()


def test_failed_sync_ends_the_pipeline_with_its_cause() -> None:
    """R24: after a sync that broke, what the servers serve is unknown: no call starts, no pack is learned."""
    server = FakeServer()
    with pipeline(server, RUN_AHEAD) as made:
        with pytest.raises(SyncError, match="broke"), made.fence(DEADLINE_S):
            raise SyncError("it broke")
        calls = len(server.calls)
        with pytest.raises(SyncError, match="broke"):
            made.next_pack(DEADLINE_S)
        assert len(server.calls) == calls


def test_version_must_rise() -> None:
    """R25."""
    with pipeline(FakeServer(), RUN_AHEAD) as made:
        with pytest.raises(SyncError, match="without a new version"), made.fence(DEADLINE_S) as fence:
            fence.synced(1)
        with pytest.raises(SyncError):
            made.eligible()


# ---- ends ----------------------------------------------------------------------------------------------------------


def test_producer_error_surfaces_with_its_type_everywhere() -> None:
    """The consumer gets the producer's own exception, at once, though a row is still queued."""

    def before(item: CallSamples) -> None:
        if item.call.index == 1:
            raise ServerUnreachableError("no answer from the server")

    with pipeline(FakeServer(before=before), RUN_AHEAD) as made:
        wait_until(lambda: made._protocol.ended)
        for ask in (lambda: made.next_pack(DEADLINE_S), made.eligible, made.request_fence):
            with pytest.raises(ServerUnreachableError, match="no answer"):
                ask()
        assert made.stream_state().unlearned == (0, 1)
        assert made.stats().calls.number == 2, "the one that failed is counted too"


def test_error_reaches_a_consumer_that_already_waits() -> None:
    """A wait ends with the failure, not with its deadline."""
    held = Held(error=ZeroDivisionError())
    with pipeline(FakeServer(before=held)) as made:
        threading.Timer(0.01, held.release.set).start()
        began_s = time.monotonic()
        with pytest.raises(ZeroDivisionError):
            made.next_pack(2 * DEADLINE_S)
        assert time.monotonic() - began_s < DEADLINE_S


def test_next_pack_passes_its_deadline_by_name() -> None:
    """As the fence; but a row that comes later can still be taken."""
    held = Held()
    with pipeline(FakeServer(before=held)) as made:
        held.until_entered()
        with pytest.raises(DeadlineError, match=r"next packed row.*found call 0 of 1 samples.*at most 0\.01 s"):
            made.next_pack(0.01)
        held.release.set()
        assert made.next_pack(DEADLINE_S) is not None


def test_close_is_bounded_and_keeps_the_first_cause(caplog: pytest.LogCaptureFixture) -> None:
    """A producer that hangs costs `close_deadline_s`; the error that ended the run stays the one that is told."""
    held = Held()
    made = pipeline(FakeServer(before=held), close_deadline_s=0.01)

    def run() -> None:
        with made:
            held.until_entered()
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        run()
    assert "the producer to leave passed its deadline" in caplog.text
    with pytest.raises(DeadlineError, match="the producer to leave"):
        made.close()
    held.release.set()
    wait_until(lambda: made._thread is None)
    made.close()
    assert made.stream_state().unlearned == (0,)


def test_a_stopped_pipeline_says_so_and_logs_late_errors(caplog: pytest.LogCaptureFixture) -> None:
    """After stop(), the error of a call whose backend was closed under it is logged, not raised."""
    held = Held(error=ServerUnreachableError("the client was closed"))
    with pipeline(FakeServer(before=held)) as made:
        held.until_entered()
        made.stop()
        held.release.set()
        made.close()
        with pytest.raises(PipelineStoppedError, match="after it was stopped"):
            made.next_pack(DEADLINE_S)
    assert "the client was closed" in caplog.text


# ---- ranks together ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(4))
def test_ranks_share_a_server_and_learn_each_sample_once(seed: int) -> None:
    """R24, R25: three ranks, short random latencies, a sync after every two packs, packs dropped on the way: the
    weights never move under a call (the server would refuse), all samples are learned once, none stale."""
    chance = random.Random(seed)
    delays = [chance.uniform(0, 0.001) for _ in range(64)]
    server = FakeServer(before=lambda item: time.sleep(delays[item.call.index % 64]))
    world, share, window, syncs = 3, 24, 1, 30
    bounds = Bounds(start_below=3, keep_at_most=3, version_window=window)
    synced: list[int] = []
    arrive = threading.Barrier(world, action=lambda: synced.append(server.move_weights()), timeout=DEADLINE_S)
    leave = threading.Barrier(world, timeout=DEADLINE_S)

    def train(rank: int) -> tuple[list[str], PipelineStats]:
        learned: list[str] = []
        with pipeline(server, bounds, call_size=8, row_size=2, end=share, ver=1) as made:
            while len(synced) < syncs:  # read between `leave` and `arrive`: the same on every rank
                for row in (made.next_pack(DEADLINE_S), made.next_pack(DEADLINE_S)):
                    if row is not None:
                        assert all(s.ver is not None and s.ver >= server.ver - window for s in row.segments)
                        learned.extend(ids(row))
                with made.fence(DEADLINE_S) as fence:
                    arrive.wait()
                    fence.synced(synced[-1])
                    leave.wait()
            assert made.next_pack(DEADLINE_S) is None
            return learned, made.stats()

    with ThreadPoolExecutor(world) as pool:
        results = list(pool.map(train, range(world)))
    assert [Counter(learned) for learned, _ in results] == [Counter(f"s{i}" for i in range(share))] * world
    assert all(stats.counts.packs_dropped_oldest > 0 for _, stats in results)
    assert all(stats.counts.packs_made == share // 2 + stats.counts.samples_returned // 2 for _, stats in results)
