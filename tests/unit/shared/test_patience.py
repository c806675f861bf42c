"""A time limit that does not run while its process stands still."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from shared import patience
from shared.patience import SLICE_S, Patience


def test_a_pause_is_not_counted_and_waiting_is(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(patience, "time", SimpleNamespace(monotonic=lambda: now[0]))
    limit = Patience(1.0)
    now[0] += 3600
    assert not limit.is_over()
    begin = now[0]
    while not limit.is_over():
        now[0] += SLICE_S
    assert 0.5 < now[0] - begin <= 1.0


def test_pauses_without_end_end_it_too(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(patience, "time", SimpleNamespace(monotonic=lambda: now[0]))
    limit, number = Patience(1.0), 0
    while not limit.is_over():
        number, now[0] = number + 1, now[0] + 60
    assert number < 1.0 / SLICE_S
