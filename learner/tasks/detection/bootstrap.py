"""Bootstrap intervals over scenes: how far a metric, or the difference of two runs, is from chance.

Percentile intervals (Efron & Tibshirani 1993, ch. 13): scenes are drawn with replacement, as many as there are, and
the metric is computed on each draw's column sums. The paired form draws the same scenes for both runs, so what makes
a scene hard cancels out. Deterministic in `seed`. Used by the evaluation's report.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from learner.tasks.detection.counts import CountTable, columns_of
from learner.tasks.detection.evaluate import METRICS
from shared.errors import DataError

_ROWS_AT_ONCE = 256  # draws whose weights are in memory together


@dataclass(frozen=True, kw_only=True, slots=True)
class Interval:
    """`estimate` is that of all scenes, each once."""

    estimate: float
    low: float
    high: float
    confidence: float


def bootstrap_interval(
    table: CountTable, metric: str, *, n: int = 2000, seed: int = 0, confidence: float = 0.95
) -> Interval:
    """The interval of `metric` (a key of `METRICS`) over `n` draws of scenes. Raises DataError without scenes."""
    _require_scenes(table)
    values = METRICS[metric](columns_of(_draw_sums([table], n, seed)[0]))
    return _interval(float(METRICS[metric](table.totals())), values, confidence)


def bootstrap_difference(
    before: CountTable, after: CountTable, metric: str, *, n: int = 2000, seed: int = 0, confidence: float = 0.95
) -> Interval:
    """The interval of `metric` of `after` minus that of `before`, both on the same draws of scenes.

    Raises DataError where the two are not of the same scenes in the same order.
    """
    _require_scenes(before)
    if before.sample_ids != after.sample_ids:
        raise DataError(
            "two evaluations can't be compared scene by scene",
            found=f"{len(before.sample_ids)} and {len(after.sample_ids)} scenes, with different ids or orders",
            wanted="the same scenes in the same order",
            remedy="evaluate both on the same split",
        )
    of = METRICS[metric]
    sums_before, sums_after = _draw_sums([before, after], n, seed)
    values = of(columns_of(sums_after)) - of(columns_of(sums_before))
    return _interval(float(of(after.totals()) - of(before.totals())), values, confidence)


def _draw_sums(tables: list[CountTable], n: int, seed: int) -> list[NDArray[np.float64]]:
    """Per table, the column sums of `n` draws: [n, columns]. All tables see the same draws."""
    num_scenes = len(tables[0].sample_ids)
    rng = np.random.default_rng(seed)
    sums: list[list[NDArray[np.float64]]] = [[] for _ in tables]
    for begin in range(0, n, _ROWS_AT_ONCE):
        size = min(_ROWS_AT_ONCE, n - begin)
        weights = rng.multinomial(num_scenes, np.full(num_scenes, 1 / num_scenes), size=size)
        for parts, table in zip(sums, tables, strict=True):
            parts.append(weights @ table.values)
    return [np.concatenate(parts) for parts in sums]


def _interval(estimate: float, values: NDArray[np.float64], confidence: float) -> Interval:
    low, high = np.quantile(values, [(1 - confidence) / 2, (1 + confidence) / 2])
    return Interval(estimate=estimate, low=float(low), high=float(high), confidence=confidence)


def _require_scenes(table: CountTable) -> None:
    if not table.sample_ids:
        raise DataError(
            "a bootstrap needs scenes", found="none", wanted="at least one", remedy="evaluate on a split with samples"
        )
