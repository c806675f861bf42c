"""Kinds of gaps: which labels they take, and how many."""

from __future__ import annotations

import pytest

from bench.experiment.gaps import KINDS, Row, read_kind, with_gaps


def rows(number: int = 300) -> list[Row]:
    """Scenes of eight objects each: two classes, two sizes, one at the left border, one in the right third."""
    objects = [
        {"desc": "ab"[i % 2], "bbox_2d": [12 * i, 10 * i + 5, 12 * i + (6 if i < 4 else 11), 10 * i + 15]}
        for i in range(8)
    ]
    return [{"id": str(i), "objects": objects, "width": 100, "height": 100} for i in range(number)]


def lost(kind: str, share: float = 0.4) -> list[float]:
    """Return the share of scenes in which each of the eight objects has no label."""
    found = with_gaps(rows(), kind, share, seed=6)
    assert found == with_gaps(rows(), kind, share, seed=6)
    assert all(row["objects"] for row in found)
    return [sum(one not in row["objects"] for row in found) / len(found) for one in rows(1)[0]["objects"]]


def test_each_kind_takes_the_labels_that_it_names() -> None:
    assert lost("missing") == pytest.approx([0.4] * 8, abs=0.09)
    assert lost("missing", 0.2) == pytest.approx([0.2] * 8, abs=0.09)
    assert lost("classes") == pytest.approx([0.8, 0.0] * 4, abs=0.09)
    assert lost("small") == pytest.approx([0.8] * 4 + [0.0] * 4, abs=0.09)
    assert lost("stops") == [0.0] * 4 + [1.0] * 4
    assert lost("border") == pytest.approx([0.9] + [0.0] * 7, abs=0.09)
    assert lost("right") == [0.0] * 6 + [1.0] * 2


def test_thinned_photographs_lack_labels_and_others_none() -> None:
    numbers = [len(row["objects"]) for row in with_gaps(rows(), "thinned", 0.4, seed=6)]
    assert numbers.count(8) / len(numbers) == pytest.approx(0.5, abs=0.09)
    assert sum(8 - number for number in numbers) / (8 * len(numbers)) == pytest.approx(0.4, abs=0.06)


def test_a_name_says_the_kind_and_its_share() -> None:
    assert read_kind("missing") == ("missing", 0.4)
    assert read_kind("small20") == ("small", 0.2)
    assert [read_kind(text) for text in ("", "lost", "missing7", "missing200")] == [None] * 4
    assert set(KINDS) == {"missing", "classes", "small", "stops", "border", "thinned", "right"}
