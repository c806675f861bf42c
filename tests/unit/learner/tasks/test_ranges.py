"""Ranges as one array, against the obvious loop."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from learner.tasks.tokens import ranges


@given(st.lists(st.tuples(st.integers(-5, 50), st.integers(0, 6)), max_size=12))
def test_every_number_of_every_range(asked: list[tuple[int, int]]) -> None:
    first, lengths = [f for f, _ in asked], [n for _, n in asked]
    found = ranges(np.array(first, dtype=np.int64), np.array(lengths, dtype=np.int64))
    assert found.dtype == np.int64
    assert found.tolist() == [number for f, n in asked for number in range(f, f + n)]
