"""Kinds of gaps in labels: which objects of a scene lose their label.

In: rows of a JSONL file (`objects` with `desc` and `bbox_2d` in pixels, `width`, `height`) whose labels are complete.
Out: the same rows with fewer labels. A row that had labels keeps at least one. The same seed removes the same labels.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import numpy as np

Row = dict[str, Any]
SHARE = 0.4  # of the labels, where the name of a kind has no percentage
NEAR_BORDER = 0.0125  # share of a side


@dataclass(frozen=True, slots=True)
class Labels:
    """All labels of a split: what a kind must know to choose among them. Areas in pixels squared."""

    names: tuple[str, ...]  # sorted
    median_area: float

    @classmethod
    def of(cls, rows: Iterable[Row]) -> Labels:
        objects = [one for row in rows for one in row["objects"]]
        return cls(tuple(sorted({one["desc"] for one in objects})), median(_area(one["bbox_2d"]) for one in objects))


def _area(box: Sequence[float]) -> float:
    return (box[2] - box[0]) * (box[3] - box[1])


Chances = Callable[[Row, float, Labels, np.random.Generator], Sequence[float]]  # of each label to go missing


def _missing(row: Row, share: float, labels: Labels, rng: np.random.Generator) -> Sequence[float]:
    return [share] * len(row["objects"])


def _classes(row: Row, share: float, labels: Labels, rng: np.random.Generator) -> Sequence[float]:
    """Half of the classes lack twice the share, the others nothing."""
    lacking = labels.names[: (len(labels.names) + 1) // 2]
    return [2 * share * (one["desc"] in lacking) for one in row["objects"]]


def _small(row: Row, share: float, labels: Labels, rng: np.random.Generator) -> Sequence[float]:
    """The smaller half of the objects lacks twice the share, the larger nothing."""
    return [2 * share * (_area(one["bbox_2d"]) < labels.median_area) for one in row["objects"]]


def _stops(row: Row, share: float, labels: Labels, rng: np.random.Generator) -> Sequence[float]:
    """Labels stop after the first four from the top, whatever the share."""
    rows = sorted((one["bbox_2d"][1], one["bbox_2d"][0]) for one in row["objects"])[:4]
    return [float((one["bbox_2d"][1], one["bbox_2d"][0]) not in rows) for one in row["objects"]]


def _border(row: Row, share: float, labels: Labels, rng: np.random.Generator) -> Sequence[float]:
    """Nine of ten labels at the photograph's border are missing, whatever the share."""
    dx, dy = NEAR_BORDER * row["width"], NEAR_BORDER * row["height"]

    def touches(box: Sequence[float]) -> bool:
        return box[0] < dx or box[1] < dy or box[2] > row["width"] - dx or box[3] > row["height"] - dy

    return [0.9 * touches(one["bbox_2d"]) for one in row["objects"]]


def _thinned(row: Row, share: float, labels: Labels, rng: np.random.Generator) -> Sequence[float]:
    """Half of the photographs lack twice the share, the others nothing."""
    return [2 * share * (rng.random() < 0.5)] * len(row["objects"])


def _right(row: Row, share: float, labels: Labels, rng: np.random.Generator) -> Sequence[float]:
    """The right third of a photograph has no labels, whatever the share."""
    return [float(one["bbox_2d"][0] + one["bbox_2d"][2] > 4 / 3 * row["width"]) for one in row["objects"]]


KINDS: Mapping[str, Chances] = {
    "missing": _missing,
    "classes": _classes,
    "small": _small,
    "stops": _stops,
    "border": _border,
    "thinned": _thinned,
    "right": _right,
}


def read_kind(text: str) -> tuple[str, float] | None:
    """Return the kind and its share of a name such as `missing`, `missing20`, `small60`; None for another name."""
    found = re.fullmatch(rf"({'|'.join(KINDS)})(\d\d)?", text)
    return (found[1], int(found[2]) / 100 if found[2] else SHARE) if found else None


def with_gaps(rows: Sequence[Row], kind: str, share: float, seed: int) -> list[Row]:
    """Return the rows without the labels that this kind of gaps takes."""
    rng, labels = np.random.default_rng(seed), Labels.of(rows)
    found = []
    for row in rows:
        stays = rng.random(len(row["objects"])) >= np.array(KINDS[kind](row, share, labels, rng))
        if len(stays) and not stays.any():
            stays[rng.integers(len(stays))] = True
        found.append({**row, "objects": [one for one, kept in zip(row["objects"], stays, strict=True) if kept]})
    return found
