"""The share of values that a step changes: counted by bits, and larger at a higher rate."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from bench import changed
from bench.models import text_model


def test_values_are_compared_by_their_bits() -> None:
    before = {"a": torch.tensor([0.0, 1.0, 2.0, 3.0], dtype=torch.bfloat16), "b": torch.ones(4, dtype=torch.bfloat16)}
    after = {**before, "a": torch.tensor([-0.0, 1.0, 2.0, 3.001], dtype=torch.bfloat16)}
    assert changed.changed_share(before, before) == 0.0
    assert changed.changed_share(before, after) == 1 / 8, "3.001 rounds to 3; -0.0 is not 0.0"


def test_a_delta_costs_places_and_values() -> None:
    assert (changed.least_delta(0.0), changed.least_delta(1.0)) == (0.0, 1.0)
    assert changed.least_delta(0.5) == pytest.approx(1 / 16 + 0.5)
    assert all(changed.least_delta(share) > share for share in (0.001, 0.1, 0.9))


def test_a_higher_rate_changes_more(tmp_path: Path) -> None:
    """A small model makes real steps. bfloat16 weights hardly move at 1e-6: the rounding takes the step away."""
    path = text_model(tmp_path, "tiny")
    found = {
        (way, rate): changed.shares(changed.load(path, changed.WAYS[way]), rate, row_tokens=128, steps=1)[0]
        for way in changed.WAYS
        for rate in (1e-6, 1e-4)
    }
    for way in changed.WAYS:
        assert 0.0 <= found[way, 1e-6] < found[way, 1e-4] < 1.0
    assert found["whole model in bfloat16", 1e-6] < found["whole model in float32", 1e-6]
