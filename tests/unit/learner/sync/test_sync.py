"""Tests of what a sync is, wherever it goes: versions, the weights below an adapter first, fallback, receipt (R08, R10,
R15).

Real deliveries: test_server_delivery.py, test_adapter_sync.py, test_colocated.py.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TypeVar

import pytest

from learner.records import ServerChange
from learner.sync.source import AdapterSource, WeightSource
from learner.sync.sync import Delivered, Mode, Recovery, Sync
from shared.canary import CanaryGap
from shared.errors import CommunicatorError, CoverageError, ProjectError, SyncError
from tests.unit.learner.sync.fakes import Adapter, Merged, Weights

T = TypeVar("T")
NO_PLACE = CoverageError("layer 3 has no place")


class Recorder:
    """A `Delivery` that says what it was asked for; whatever stands in `fails` fails."""

    def __init__(self, seen_ver: int = 0) -> None:
        self.log: list[str] = []
        self.fails: dict[str, BaseException] = {}
        self.recoveries: list[Recovery] = []  # answers; `stop` when there are none left
        self._seen_ver = seen_ver

    def together(self, work: Callable[[], T]) -> T:
        return work()

    def agree(self) -> Sequence[ServerChange]:
        return ()

    def is_current(self) -> bool:
        return True

    def recover(self, error: ProjectError, num_repeated: int) -> Recovery:
        self.log.append(f"recover {num_repeated}")
        return self.recoveries.pop(0) if self.recoveries else "stop"

    def connect(self) -> int:
        self._note("connect")
        return self._seen_ver

    def check_adapter(self, adapter: AdapterSource) -> None:
        if "check" in self.fails:
            raise self.fails["check"]

    @contextmanager
    def delivering(self, modes: object) -> Iterator[None]:
        yield

    def deliver_base(self, source: WeightSource, ver: int) -> int:
        self._note("base")
        return ver

    def deliver(self, source: WeightSource, mode: Mode, ver: int) -> Delivered:
        self._note(mode)
        return Delivered(mode=mode, num_bytes=1, num_tensors=1, gap=CanaryGap(mean=0.01, max=0.02), merge_gap=0.0)

    def accept(self, ver: int) -> None:
        self._note(f"accept {ver}")

    def leave(self, *, abort: bool) -> None:
        self._note("abort" if abort else "leave")

    def _note(self, what: str) -> None:
        self.log.append(what)
        if what in self.fails:
            raise self.fails[what]

    def told(self) -> list[str]:
        """Return what was told since the last time that it was asked."""
        told, self.log = [entry for entry in self.log if not entry.startswith("recover")], []
        return told


def warnings_in(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


def sync_of(delivery: Recorder, adapter: Adapter | None, *, fallback_to_full: bool = True) -> Sync:
    weights = Merged(adapter) if adapter else Weights()
    return Sync(delivery, weights, adapter=adapter, fallback_to_full=fallback_to_full)


def test_versions_go_on_above_all_that_were_seen_and_only_after_success() -> None:
    """R10."""
    delivery = Recorder(seen_ver=6)
    sync = sync_of(delivery, None)
    assert sync.sync().ver == 7
    assert delivery.told() == ["connect", "full", "accept 7"]
    delivery.fails = {"full": NO_PLACE}
    with pytest.raises(CoverageError):
        sync.sync()
    assert (sync.ver, delivery.told()) == (7, ["full", "abort"])
    delivery.fails = {}
    assert sync.sync().ver == 8
    assert delivery.told() == ["connect", "full", "accept 8"]


def test_the_weights_below_come_first_and_again_after_every_connection() -> None:
    """R08: nothing else is known of what a generator holds."""
    delivery = Recorder()
    sync = sync_of(delivery, Adapter(Weights()), fallback_to_full=False)
    receipts = [sync.sync(), sync.sync()]
    assert delivery.told() == ["connect", "base", "adapter", "accept 1", "adapter", "accept 2"]
    assert [(receipt.mode, receipt.fallback) for receipt in receipts] == [("adapter", "")] * 2
    delivery.fails = {"adapter": NO_PLACE}
    with pytest.raises(CoverageError):
        sync.sync()
    delivery.fails = {}
    sync.sync()
    assert delivery.told() == ["adapter", "abort", "connect", "base", "adapter", "accept 3"]
    sync.close()
    sync.sync()
    assert delivery.told() == ["leave", "connect", "base", "adapter", "accept 4"]


@pytest.mark.parametrize("where", ["check", "base", "adapter"])
def test_one_failure_ends_adapters_for_good_and_is_told_once(where: str, caplog: pytest.LogCaptureFixture) -> None:
    """R08, R15: one warning; the same call ends with a full sync, whose receipt says why, and no other receipt does."""
    delivery = Recorder()
    sync = sync_of(delivery, Adapter(Weights()))
    delivery.fails = {where: NO_PLACE}
    first = sync.sync()
    assert delivery.told()[-4:] == ["abort", "connect", "full", "accept 1"]
    delivery.fails = {}
    second = sync.sync()
    assert delivery.told() == ["full", "accept 2"]
    assert len(warnings_in(caplog)) == 1
    for said in (caplog.text, first.fallback):
        assert "layer 3 has no place" in said
    assert (first.mode, second.mode, second.fallback) == ("full", "full", "")


def test_without_a_fallback_the_error_is_raised_and_adapters_stay(caplog: pytest.LogCaptureFixture) -> None:
    """R08."""
    delivery = Recorder()
    sync = sync_of(delivery, Adapter(Weights()), fallback_to_full=False)
    delivery.fails = {"adapter": NO_PLACE}
    with pytest.raises(CoverageError) as caught:
        sync.sync()
    assert caught.value is NO_PLACE
    delivery.fails = {}
    assert sync.sync().mode == "adapter"
    assert warnings_in(caplog) == []


def test_a_programming_error_is_no_reason_to_fall_back() -> None:
    """It would be hidden for the rest of the run."""
    delivery = Recorder()
    sync = sync_of(delivery, Adapter(Weights()))
    delivery.fails = {"adapter": AssertionError()}
    with pytest.raises(AssertionError):
        sync.sync()
    delivery.fails = {}
    assert sync.sync().mode == "adapter"


def test_what_no_engine_could_apply_is_named_before_anything_is_sent() -> None:
    delivery, adapter = Recorder(), Adapter(Weights())
    adapter.obstacle = "the adapter is a DoRA"
    with pytest.raises(SyncError, match="DoRA") as caught:
        sync_of(delivery, adapter, fallback_to_full=False).connect()
    assert "sync.mode: full" in caught.value.remedy
    assert delivery.told() == ["connect", "abort"]


def test_weights_that_can_t_be_sent_are_found_at_once() -> None:
    weights = Weights()
    weights.tensors.clear()
    with pytest.raises(SyncError, match="can't be sent"):
        Sync(Recorder(), weights)


@pytest.mark.parametrize("fallback_to_full", [True, False])
def test_a_receipt_says_why_each_try_before_failed(fallback_to_full: bool) -> None:
    """R15. A broken connection says nothing of adapters, so they stay."""

    class Broken(Recorder):
        def deliver(self, source: WeightSource, mode: Mode, ver: int) -> Delivered:
            if self.recoveries:
                raise CommunicatorError(f"try {3 - len(self.recoveries)} broke")
            return super().deliver(source, mode, ver)

    delivery = Broken()
    delivery.recoveries = ["changed", "repeat"]
    sync = sync_of(delivery, Adapter(Weights()), fallback_to_full=fallback_to_full)
    receipt = sync.sync()
    assert [text.split(";")[0] for text in receipt.repeated] == ["try 1 broke", "try 2 broke"]
    assert (receipt.mode, receipt.fallback, sync.sync().repeated) == ("adapter", "", ())


@pytest.mark.parametrize("recoveries", [["changed", "repeat", "repeat"], ["repeat", "changed", "repeat"]])
def test_only_tries_that_nobody_is_to_blame_for_are_counted(recoveries: list[Recovery]) -> None:
    delivery = Recorder()
    delivery.fails, delivery.recoveries = {"full": CommunicatorError("broke")}, list(recoveries)
    with pytest.raises(CommunicatorError):
        sync_of(delivery, None).sync()
    told = [int(entry.split()[1]) for entry in delivery.log if entry.startswith("recover")]
    assert told == [sum(one == "repeat" for one in recoveries[:n]) for n in range(4)]
