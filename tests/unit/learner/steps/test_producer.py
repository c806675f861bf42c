"""R24, R25: the thread that rolls out ahead: fences, deadlines, and how errors reach whoever asks."""

from __future__ import annotations

import threading
import time
from contextlib import nullcontext

import pytest

from learner.config.sections.stage2_ab import AsyncActorLearnerConfig
from learner.data.batches import MicroBatch
from learner.records import Segment
from learner.steps.producer import CallStages, Producer
from learner.steps.shares import Bounds, Call, PipelineStoppedError, ServedVersion
from shared.errors import DeadlineError, RolloutError, ServerUnreachableError, SyncError
from tests.unit.learner.steps.fakes import DEADLINE_S, FakeServer, Held, producer, read, segment
from tests.waits import wait_until


def until_complete(made: Producer, shares: int) -> None:
    wait_until(lambda: len(made.outlook(step=0).complete) == shares)


def test_what_is_wanted_is_made_once_and_taken_in_order() -> None:
    server = FakeServer()
    made = producer(server, call_size=2)
    until_complete(made, 2)
    packs = made.take(1, step=0)
    assert [[one.sample_id for one in pack] for pack in packs] == [["1.0"], ["1.1"], ["1.2"]]
    assert sorted((call.share, i) for call in server.calls for i in call.places) == [
        (s, i) for s in (0, 1) for i in range(3)
    ]
    made.close()


def test_a_fence_waits_for_the_call_in_flight_and_lets_none_start() -> None:
    """R24: room for another call changes nothing."""
    held = Held()
    server = FakeServer(before=held)
    made = producer(server)
    held.until_entered()
    threading.Timer(0.01, held.release.set).start()
    with made.fence(DEADLINE_S) as fence:
        assert held.release.is_set()
        wait_until(lambda: made._thread is None)
        assert len(server.calls) == 1
        fence.synced(server.move_weights(), updates=1)
    until_complete(made, 2)
    assert [call.by.ver for call in server.calls] == [1, 2]
    made.close()


def test_a_fence_without_a_sync_ages_nothing() -> None:
    made = producer(FakeServer())
    until_complete(made, 2)
    for _ in range(3):
        with made.fence(DEADLINE_S):
            pass
    assert made.outlook(step=0).complete == {0: 0, 1: 0}
    made.close()


@pytest.mark.parametrize(("counts", "age"), [(True, 1), (False, 0)])
def test_only_syncs_that_count_make_packs_older(counts: bool, age: int) -> None:
    server = FakeServer()
    made = producer(server)
    until_complete(made, 2)
    with made.fence(DEADLINE_S, counts=counts) as fence:
        fence.synced(server.move_weights(), updates=1)
    for share in (0, 1):
        made.take(share, step=1)
    made.want([2, 3])
    wait_until(lambda: 2 in made.outlook(step=1).complete)
    assert made.outlook(step=1).complete[2] == age
    made.close()


@pytest.mark.parametrize("what", ["the call ends", "the run stops"])
def test_a_fence_waits_no_longer_than_it_must(what: str) -> None:
    held = Held()
    made = producer(FakeServer(before=held))
    held.until_entered()
    began = time.monotonic()
    threading.Timer(0.05, held.release.set if what == "the call ends" else made.stop).start()
    stopped = nullcontext() if what == "the call ends" else pytest.raises(PipelineStoppedError)
    with stopped, made.fence(DEADLINE_S):
        pass
    assert time.monotonic() - began < DEADLINE_S / 4
    held.release.set()
    made.close()


def test_a_call_that_fails_ends_the_wait_of_a_fence() -> None:
    held = Held(error=RolloutError("a rollout broke"))
    made = producer(FakeServer(before=held))
    held.until_entered()
    began = time.monotonic()
    threading.Timer(0.05, held.release.set).start()
    with pytest.raises(RolloutError, match="broke"), made.fence(DEADLINE_S):
        pytest.fail("entered after the producer had ended")
    assert time.monotonic() - began < DEADLINE_S / 4
    made.close()


def test_a_fence_passes_its_deadline_by_name() -> None:
    """It says which wait, for what, and which key; so does every later call."""
    held = Held()
    made = producer(FakeServer(before=held))
    held.until_entered()
    with (
        pytest.raises(DeadlineError, match=r"before a weight sync.*call of 3 samples.*collective_timeout_s"),
        made.fence(0.01),
    ):
        pytest.fail("entered under a call in flight")
    with pytest.raises(DeadlineError, match="before a weight sync"):
        made.outlook(step=0)
    held.release.set()
    made.close()


def test_a_failed_sync_ends_the_producer_with_its_cause() -> None:
    """R24: what the servers serve is unknown then: no call starts, no pack is learned."""
    server = FakeServer()
    made = producer(server)
    with pytest.raises(SyncError, match="broke"), made.fence(DEADLINE_S):
        raise SyncError("it broke")
    calls = len(server.calls)
    with pytest.raises(SyncError, match="broke"):
        made.take(0, step=0)
    made.want([2])
    assert len(server.calls) == calls
    made.close()


def test_the_producer_s_error_surfaces_with_its_type() -> None:
    """It surfaces at once, though packs are still queued. The call that failed is counted too."""

    def before(call: Call) -> None:
        if call.share == 1:
            raise ServerUnreachableError("no answer from the server")

    made = producer(FakeServer(before=before))
    wait_until(lambda: made.stats().calls.number == 2)
    for ask in (lambda: made.outlook(step=0).complete, lambda: made.take(0, step=0)):
        with pytest.raises(ServerUnreachableError, match="no answer"):
            ask()
    assert made.describe().startswith("no call in flight"), "a sync need not wait for the one that failed"
    made.close()


def test_close_is_bounded() -> None:
    """A call that hangs costs `close_s`, and the error names what was waited for."""
    held = Held()
    made = producer(FakeServer(before=held), close_s=0.01)
    held.until_entered()
    with pytest.raises(DeadlineError, match=r"thread to end.*call of 3 samples"):
        made.close()
    held.release.set()
    wait_until(lambda: made._thread is None)
    made.close()


def test_close_lets_no_further_call_start() -> None:
    held = Held()
    server = FakeServer(before=held)
    made = producer(server)
    held.until_entered()
    threading.Timer(0.05, held.release.set).start()
    made.close()
    assert len(server.calls) == 1, "another share was wanted"
    with pytest.raises(PipelineStoppedError):
        made.outlook(step=0)


def test_after_stop_late_errors_are_only_logged(caplog: pytest.LogCaptureFixture) -> None:
    """The backend was closed under a call in flight."""
    held = Held(error=ServerUnreachableError("the client was closed"))
    made = producer(FakeServer(before=held))
    held.until_entered()
    made.stop()
    held.release.set()
    made.close()
    with pytest.raises(PipelineStoppedError):
        made.outlook(step=0)
    assert "the client was closed" in caplog.text


CALL = Call(share=4, places=range(2), by=ServedVersion(ver=3, updates=0))


@pytest.mark.parametrize(
    ("answers", "words"),
    [
        ([segment("4.0", 3)], "not those of its samples"),
        ([segment("4.1", 3), segment("4.0", 3)], "not those of its samples"),
        ([segment("4.0", 3), segment("4.1", 2)], "other weights"),
        ([segment("4.0", None), segment("4.1", None)], "other weights"),
    ],
)
def test_segments_that_do_not_answer_the_call(answers: list[Segment], words: str) -> None:
    """No sample is skipped or swapped, and all are of the version that the call was permitted under."""

    def roll_out(call: Call, part: MicroBatch) -> list[Segment]:
        return answers

    with pytest.raises(RolloutError, match=words):
        CallStages(read=read, roll_out=roll_out).run(CALL)


def test_bounds_of_the_configuration() -> None:
    """R25, R27: the defaults, a step that takes more than the prefetch target, and a prefetch target beyond the queue,
    which would produce only to drop."""
    bounds = Bounds.run_ahead(AsyncActorLearnerConfig(), packs_per_step=1)
    assert (bounds.start_below, bounds.keep_at_most, bounds.version_window) == (4, 8, 1)
    assert Bounds.run_ahead(AsyncActorLearnerConfig(), packs_per_step=6).start_below == 6
    with pytest.raises(AssertionError, match=r"refused by learner/config"):
        Bounds.run_ahead(AsyncActorLearnerConfig(queue_limit=3), packs_per_step=1)


def test_a_wait_for_a_share_ends_with_a_call_or_by_its_deadline() -> None:
    """D16: a Channel-B step that waits looks again when a call has ended; the error says what is in flight."""
    held = Held()
    made = producer(FakeServer(held), call_size=2)
    held.until_entered()
    with pytest.raises(DeadlineError, match=r"Channel-B step.*share 0 in flight"):
        made.await_call(0.05)
    held.release.set()
    while not made.outlook(step=0).complete:
        made.await_call(DEADLINE_S)
    until_complete(made, 2)
    made.await_call(0.0)  # nothing lacks
    made.close()
