"""Damaged files of every kind that we read end in typed errors (`bench.fuzz`): a few cases of each."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from bench.fuzz import damaged, fuzz, kinds


@pytest.mark.parametrize("name", list(kinds()))
def test_damaged_files_end_in_typed_errors(name: str) -> None:
    (ends,) = fuzz([name], cases=40, seed=1).values()
    assert ends.counts.total() == 40
    assert ends.tracebacks == []


@pytest.mark.parametrize("name", list(kinds()))
def test_undamaged_files_are_read(name: str, tmp_path: Path) -> None:
    """Damage to a file that is wrong already would find nothing."""
    kinds()[name].write(tmp_path)
    kinds()[name].read(tmp_path)


def test_cases_depend_on_their_seed_alone() -> None:
    content = b'{"a": [1, 2, 3]}\n'
    assert damaged(content, random.Random("x")) == damaged(content, random.Random("x"))
    assert len({damaged(content, random.Random(i)) for i in range(50)}) > 30
