"""Detection metrics by name: each a function of column sums, so that the bootstrap computes it for all resamples at
once.

A true positive needs IoU >= t *and* the same description; `*_any` ignore descriptions. All are micro averages over
the whole set; a ratio with nothing below it is 0. In: a `CountTable`. Out: name -> value.

    f1@0.5, precision@0.5, recall@0.5     at IoU 0.5
    f1@miou                               mean of F1 at IoU 0.50, 0.55, ..., 0.95
    mean_iou                              over the true positives at 0.5
    f1_any@0.5, precision_any@0.5, recall_any@0.5, f1_any@miou      the same, whatever the description
    parse_rate                            answers that are one closed container, nothing dropped, nothing after it
    usable_rate                           answers whose container was opened
    unclosed_rate                         answers whose container was not closed
    truncation_rate                       answers that met the token limit
    object_parse_rate                     valid objects over valid and dropped ones
    duplicate_rate                        predictions that repeat an earlier one (same description, IoU >= 0.9)
    objects_per_rollout, truth_per_sample valid predictions, ground-truth objects
    drop/<reason>                         dropped objects per rollout, by reason
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
from numpy.typing import NDArray

from learner.tasks.detection.counts import DROP_REASONS, THRESHOLDS, CountTable

Totals = Mapping[str, NDArray[np.float64]]  # column name -> sums, all of one shape [...]
Metric = Callable[[Totals], NDArray[np.float64]]  # -> [...]


def evaluate_counts(table: CountTable) -> dict[str, float]:
    """Every metric over the whole table."""
    totals = table.totals()
    return {name: float(metric(totals)) for name, metric in METRICS.items()}


def _ratio(above: NDArray[np.float64], below: NDArray[np.float64]) -> NDArray[np.float64]:
    return np.divide(above, below, out=np.zeros_like(above), where=below > 0)


def _f1_at(hits: str, threshold: float) -> Metric:
    return lambda t: _ratio(2 * t[f"{hits}@{threshold:.2f}"], t["predictions"] + t["truth"])


def _f1_over_thresholds(hits: str) -> Metric:
    parts = [_f1_at(hits, threshold) for threshold in THRESHOLDS]
    return lambda t: np.mean([part(t) for part in parts], axis=0)


def _share(above: str, below: str) -> Metric:
    return lambda t: _ratio(t[above], t[below])


def _object_parse_rate(t: Totals) -> NDArray[np.float64]:
    return _ratio(t["predictions"], t["predictions"] + sum(t[f"drop/{reason}"] for reason in DROP_REASONS))


METRICS: Mapping[str, Metric] = {
    "f1@0.5": _f1_at("tp", 0.5),
    "f1@miou": _f1_over_thresholds("tp"),
    "precision@0.5": _share("tp@0.50", "predictions"),
    "recall@0.5": _share("tp@0.50", "truth"),
    "mean_iou": _share("iou_sum", "tp@0.50"),
    "f1_any@0.5": _f1_at("tp_any", 0.5),
    "f1_any@miou": _f1_over_thresholds("tp_any"),
    "precision_any@0.5": _share("tp_any@0.50", "predictions"),
    "recall_any@0.5": _share("tp_any@0.50", "truth"),
    "parse_rate": _share("parsed", "samples"),
    "usable_rate": _share("usable", "samples"),
    "unclosed_rate": _share("unclosed", "samples"),
    "truncation_rate": _share("length_stopped", "samples"),
    "object_parse_rate": _object_parse_rate,
    "duplicate_rate": _share("duplicates", "predictions"),
    "objects_per_rollout": _share("predictions", "samples"),
    "truth_per_sample": _share("truth", "samples"),
    **{f"drop/{reason}": _share(f"drop/{reason}", "samples") for reason in DROP_REASONS},
}
