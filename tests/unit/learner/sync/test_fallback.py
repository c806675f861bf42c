"""When adapter syncs end, and that it is told once (R08, R15). What the two syncs make of it: test_adapter_sync.py,
test_colocate.py."""

from __future__ import annotations

import pytest

from learner.sync.receipts import AdapterFallback, check_plain
from shared.errors import CoverageError, SyncError
from tests.unit.learner.sync.fakes import Adapter, Weights


def test_an_adapter_that_works_stays(caplog: pytest.LogCaptureFixture) -> None:
    adapter = Adapter(Weights())
    fallback = AdapterFallback(adapter, to_full=True)
    with fallback.trying():
        check_plain(adapter)
    assert fallback.adapter is adapter
    assert fallback.tell() == ""
    assert caplog.records == []


def test_one_failure_ends_it_for_good_and_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    """R08, R15: one warning; the reason for the next receipt, and for no other."""
    fallback = AdapterFallback(Adapter(Weights()), to_full=True)
    with fallback.trying():
        raise CoverageError("layer 3 has no place")
    assert fallback.adapter is None
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "layer 3 has no place" in caplog.text
    assert "layer 3 has no place" in fallback.tell()
    assert fallback.tell() == ""


def test_where_nothing_else_will_do_the_error_goes_on(caplog: pytest.LogCaptureFixture) -> None:
    """R08: and the adapter is still what is wanted."""
    adapter = Adapter(Weights())
    fallback = AdapterFallback(adapter, to_full=False)
    error = CoverageError("layer 3 has no place")
    with pytest.raises(CoverageError) as caught, fallback.trying():
        raise error
    assert caught.value is error
    assert (fallback.adapter, fallback.tell(), caplog.records) == (adapter, "", [])


def test_a_programming_error_is_no_reason_to_fall_back() -> None:
    """It would be hidden for the rest of the run."""
    fallback = AdapterFallback(Adapter(Weights()), to_full=True)
    with pytest.raises(AssertionError), fallback.trying():
        raise AssertionError
    assert fallback.adapter is not None


def test_what_no_engine_could_apply_is_named() -> None:
    adapter = Adapter(Weights())
    adapter.obstacle = "the adapter is a DoRA"
    with pytest.raises(SyncError, match="DoRA") as caught:
        check_plain(adapter)
    assert caught.value.remedy == "set sync.mode: full (merged weights)"
