"""Detection metrics: counts per sample, ratios of their sums, bootstrap intervals, and COCO's AP as a cross-check.

Counts. In: assignments. Out: a `CountTable` with one row of counts per sample. A bootstrap resamples rows. Every metric
is computed from column sums (a micro average over the whole set), so rows of several ranks or runs can be combined.
Predictions and labels are matched anew, because the matches of training ignore descriptions. Each IoU threshold has two
matchings: among pairs with the same description (`tp`), and among all pairs (`tp_any`).

Ignore regions (`Sample.ignored`). A prediction counts neither as right nor as wrong if it matches no object and lies in
an ignore region of its class: the part of its area in the region is at least the IoU threshold. COCO treats crowd
regions in the same way.

Metrics by name. A true positive needs IoU >= t *and* the same description; `*_any` ignore descriptions. A ratio with
denominator 0 is 0.

    f1@0.5, precision@0.5, recall@0.5     at IoU 0.5
    fm@0.5                                sqrt(precision * recall): for labels that are missing at random
    f1@miou                               mean of F1 at IoU 0.50, 0.55, ..., 0.95
    mean_iou                              over the true positives at 0.5
    f1_any@0.5, precision_any@0.5, recall_any@0.5, f1_any@miou      the same, whatever the description
    parse_rate                            answers that are one closed container, nothing dropped, nothing after it
    usable_rate                           answers whose container was opened
    unclosed_rate                         answers whose container was not closed
    truncation_rate                       answers that reached the token limit
    object_parse_rate                     valid objects over valid and dropped ones
    duplicate_rate                        predictions that repeat an earlier one (same description, IoU >= 0.9)
    objects_per_rollout, truth_per_sample valid predictions, ground-truth objects
    drop/<reason>                         dropped objects per rollout, by reason

`fm@0.5` (Fowlkes & Mallows 1983) is for validation labels with random gaps. If the fraction m of the labels is missing
at random, the measured recall is correct, and the measured precision is 1 - m times the true precision. So `fm@0.5` is
sqrt(1 - m) times its true value for every model, and the ranking of models is correct. F1's ranking is not: the more
labels are missing, the more F1 favors models that detect few objects. If labels are missing by position, size or class,
both metrics favor models that leave out the same objects. Lee & Liu (2003) choose by recall^2 / (fraction of positive
answers), which gives the same ranking.

Intervals are percentile bootstrap intervals over scenes (Efron & Tibshirani 1993, ch. 13): N of the N scenes are drawn
at random with replacement, and the metric is computed on each draw's column sums. To compare two runs, both use the
same draws, so the difficulty of scenes cancels out. The result depends on `seed` only.

COCO's AP comes from pycocotools: `coco/ap`, `coco/ap50`, `coco/ap75`, `coco/ar100`. Categories are descriptions.
Geometry is compared by bounding boxes, in bins (IoU does not change with the scale of an axis). The score of a box
comes from a calibration (`calibrate.py`) that was fitted to the labels of other images; then `coco/calibrated` is 1. If
no calibration can be fitted, the score rises with the probability of the box's tokens (`scores.py`). Without
log-probabilities all scores are 1. COCO matches greedily, with at most 100 predictions per image and category.
"""

from __future__ import annotations

import contextlib
import io
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import get_args

import numpy as np
from numpy.typing import NDArray
from pycocotools.coco import COCO
from pycocotools.cocoeval import COCOeval

from learner.records import Assignment, DetectionObject, DropReason, ParsedRollout
from learner.tasks.detection.bins import bounding_box
from learner.tasks.detection.grammar import NUM_BINS
from learner.tasks.detection.match import Overlaps
from shared.errors import DataError

THRESHOLDS = tuple(t / 100 for t in range(50, 100, 5))  # IoU thresholds of F1@mIoU and AP: 0.50 to 0.95
DUPLICATE_IOU = 0.9
DROP_REASONS: tuple[DropReason, ...] = get_args(DropReason)
COLUMNS = (
    "samples",
    "truth",  # ground-truth objects
    "predictions",  # valid predictions
    *(f"tp@{t:.2f}" for t in THRESHOLDS),
    *(f"tp_any@{t:.2f}" for t in THRESHOLDS),  # true positives if names (descriptions) need not be equal
    *(f"ignored@{t:.2f}" for t in THRESHOLDS),  # predictions in ignore regions that are not true positives
    *(f"ignored_any@{t:.2f}" for t in THRESHOLDS),  # like `ignored`, if names need not be equal
    "iou_sum",  # sum of IoU over the true positives at 0.50
    "duplicates",  # predictions that repeat an earlier one: same description, IoU >= DUPLICATE_IOU
    "parsed",  # answers that are one closed container without a dropped object
    "usable",  # number of answers whose container was opened
    "unclosed",  # number of answers whose container was not closed
    "length_stopped",  # number of answers that reached the token limit
    *(f"drop/{reason}" for reason in DROP_REASONS),
)
_COLUMN = {name: i for i, name in enumerate(COLUMNS)}


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class CountTable:
    """Row i counts sample `sample_ids[i]`; columns are `COLUMNS`."""

    sample_ids: tuple[str, ...]
    values: NDArray[np.float64]  # [samples, len(COLUMNS)]

    def totals(self) -> dict[str, NDArray[np.float64]]:
        """Return the sum of each column by name, as arrays of shape []."""
        return columns_of(self.values.sum(axis=0))


def columns_of(values: NDArray[np.float64]) -> dict[str, NDArray[np.float64]]:
    """Split `values` [..., len(COLUMNS)] into its columns [...], by name."""
    return {name: values[..., i] for name, i in _COLUMN.items()}


def count_objects(assignments: Sequence[Assignment]) -> CountTable:
    """Return the counts of each assignment, in order."""
    values = np.zeros((len(assignments), len(COLUMNS)))
    for row, assignment in zip(values, assignments, strict=True):
        _count_answer(row, assignment.parsed)
        _count_matches(row, assignment.parsed)
    ids = tuple(a.parsed.rollout.sample.sample_id for a in assignments)
    return CountTable(sample_ids=ids, values=values)


def _count_answer(row: NDArray[np.float64], parsed: ParsedRollout) -> None:
    row[_COLUMN["samples"]] = 1
    row[_COLUMN["truth"]] = len(parsed.rollout.sample.objects)
    row[_COLUMN["predictions"]] = len(parsed.objects)
    row[_COLUMN["parsed"]] = parsed.usable and parsed.closed and not parsed.truncated and not any(parsed.drops.values())
    row[_COLUMN["usable"]] = parsed.usable
    row[_COLUMN["unclosed"]] = parsed.truncated
    row[_COLUMN["length_stopped"]] = parsed.rollout.finish_reason == "length"
    for reason, count in parsed.drops.items():
        row[_COLUMN[f"drop/{reason}"]] = count


def _count_matches(row: NDArray[np.float64], parsed: ParsedRollout) -> None:
    predictions, sample = [p.object for p in parsed.objects], parsed.rollout.sample
    overlaps = Overlaps.of(predictions, sample.objects, sample.ignored)
    for threshold in THRESHOLDS:
        for suffix, named in (("", True), ("_any", False)):
            found = overlaps.match(threshold, named=named)
            row[_COLUMN[f"tp{suffix}@{threshold:.2f}"]] = len(found.pairs)
            row[_COLUMN[f"ignored{suffix}@{threshold:.2f}"]] = np.count_nonzero(found.ignored)
            if named and threshold == THRESHOLDS[0]:
                row[_COLUMN["iou_sum"]] = sum(iou for _, _, iou in found.pairs)
    among = Overlaps.of(predictions, predictions)
    repeats = np.tril((among.iou >= DUPLICATE_IOU) & among.same, k=-1)
    row[_COLUMN["duplicates"]] = np.count_nonzero(repeats.any(axis=1))


Totals = Mapping[str, NDArray[np.float64]]  # column name -> sums, all of one shape [...]
Metric = Callable[[Totals], NDArray[np.float64]]  # returns a metric's values, of the totals' shape [...]


def evaluate_counts(table: CountTable) -> dict[str, float]:
    """Return every metric over the whole table."""
    totals = table.totals()
    return {name: float(metric(totals)) for name, metric in METRICS.items()}


def ratio(above: NDArray[np.float64], below: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return `above / below`, and 0 where `below` is 0."""
    return np.divide(above, below, out=np.zeros_like(above, dtype=np.float64), where=below > 0)


def _judged(t: Totals, hits: str, threshold: float) -> NDArray[np.float64]:
    """Return the number of predictions that count. `hits` is `tp` or `tp_any`."""
    return t["predictions"] - t[f"{hits.replace('tp', 'ignored')}@{threshold:.2f}"]


def _f1_at(hits: str, threshold: float) -> Metric:
    return lambda t: ratio(2 * t[f"{hits}@{threshold:.2f}"], _judged(t, hits, threshold) + t["truth"])


def _precision_at(hits: str, threshold: float) -> Metric:
    return lambda t: ratio(t[f"{hits}@{threshold:.2f}"], _judged(t, hits, threshold))


def _fm_at(hits: str, threshold: float) -> Metric:
    precision, recall = _precision_at(hits, threshold), _share(f"{hits}@{threshold:.2f}", "truth")
    return lambda t: np.sqrt(precision(t) * recall(t))


def _f1_over_thresholds(hits: str) -> Metric:
    parts = [_f1_at(hits, threshold) for threshold in THRESHOLDS]
    return lambda t: np.mean([part(t) for part in parts], axis=0)


def _share(above: str, below: str) -> Metric:
    return lambda t: ratio(t[above], t[below])


METRICS: Mapping[str, Metric] = {
    "f1@0.5": _f1_at("tp", 0.5),
    # If labels are missing at random, this metric ranks models correctly, while F1 favors models that find little.
    "fm@0.5": _fm_at("tp", 0.5),
    "f1@miou": _f1_over_thresholds("tp"),
    "precision@0.5": _precision_at("tp", 0.5),
    "recall@0.5": _share("tp@0.50", "truth"),
    "mean_iou": _share("iou_sum", "tp@0.50"),
    "f1_any@0.5": _f1_at("tp_any", 0.5),
    "f1_any@miou": _f1_over_thresholds("tp_any"),
    "precision_any@0.5": _precision_at("tp_any", 0.5),
    "recall_any@0.5": _share("tp_any@0.50", "truth"),
    "parse_rate": _share("parsed", "samples"),
    "usable_rate": _share("usable", "samples"),
    "unclosed_rate": _share("unclosed", "samples"),
    "truncation_rate": _share("length_stopped", "samples"),
    "object_parse_rate": lambda t: ratio(
        t["predictions"], t["predictions"] + sum(t[f"drop/{reason}"] for reason in DROP_REASONS)
    ),
    "duplicate_rate": _share("duplicates", "predictions"),
    "objects_per_rollout": _share("predictions", "samples"),
    "truth_per_sample": _share("truth", "samples"),
    **{f"drop/{reason}": _share(f"drop/{reason}", "samples") for reason in DROP_REASONS},
}


_ROWS_AT_ONCE = 256  # max resamples whose weights are in memory at a time


@dataclass(frozen=True, kw_only=True, slots=True)
class Interval:
    """A bootstrap interval. `estimate`: the metric over all scenes."""

    estimate: float
    low: float
    high: float
    confidence: float


def bootstrap_interval(
    table: CountTable, metric: str, *, n: int = 2000, seed: int = 0, confidence: float = 0.95
) -> Interval:
    """Return the interval of `metric` (a key of `METRICS`) over `n` draws of scenes. Raises DataError without
    scenes."""
    _require_scenes(table)
    values = METRICS[metric](columns_of(_draw_sums([table], n, seed)[0]))
    return interval_of(float(METRICS[metric](table.totals())), values, confidence)


def bootstrap_difference(
    before: CountTable, after: CountTable, metric: str, *, n: int = 2000, seed: int = 0, confidence: float = 0.95
) -> Interval:
    """Return the interval of the difference `after` - `before` in `metric`, on the same draws of scenes.

    Raises DataError if the two do not have the same scenes in the same order.
    """
    _require_scenes(before)
    if before.sample_ids != after.sample_ids:
        raise DataError(
            "two evaluations cannot be compared scene by scene",
            found=f"{len(before.sample_ids)} and {len(after.sample_ids)} scenes, with different ids or orders",
            wanted="the same scenes in the same order",
            remedy="evaluate both on the same split",
        )
    of = METRICS[metric]
    sums_before, sums_after = _draw_sums([before, after], n, seed)
    values = of(columns_of(sums_after)) - of(columns_of(sums_before))
    return interval_of(float(of(after.totals()) - of(before.totals())), values, confidence)


def _draw_sums(tables: list[CountTable], n: int, seed: int) -> list[NDArray[np.float64]]:
    """Draw scenes with replacement `n` times. Return for each table the sums of its columns over each draw: [n,
    columns]. The draws are the same for all tables."""
    sums: list[list[NDArray[np.float64]]] = [[] for _ in tables]
    for weights in draws(len(tables[0].sample_ids), n, seed):
        # All tables get the same draws, so that the difficulty of scenes cancels out in their difference.
        for parts, table in zip(sums, tables, strict=True):
            parts.append(weights @ table.values)
    return [np.concatenate(parts) for parts in sums]


def draws(num_scenes: int, n: int, seed: int) -> Iterator[NDArray[np.int64]]:
    """Draw scenes with replacement `n` times. Yield how often each draw has each scene, a few draws at a time: [draws,
    num_scenes]."""
    rng = np.random.default_rng(seed)
    for begin in range(0, n, _ROWS_AT_ONCE):
        size = min(_ROWS_AT_ONCE, n - begin)
        yield rng.multinomial(num_scenes, np.full(num_scenes, 1 / num_scenes), size=size)


def interval_of(estimate: float, values: NDArray[np.float64], confidence: float) -> Interval:
    low, high = np.quantile(values, [(1 - confidence) / 2, (1 + confidence) / 2])
    return Interval(estimate=estimate, low=float(low), high=float(high), confidence=confidence)


def _require_scenes(table: CountTable) -> None:
    if not table.sample_ids:
        raise DataError(
            "a bootstrap needs scenes", found="none", wanted="at least one", remedy="evaluate on a split with samples"
        )


_STATS = {"coco/ap": 0, "coco/ap50": 1, "coco/ap75": 2, "coco/ar100": 8}  # indices in COCOeval.stats


def coco_ap(assignments: Sequence[Assignment], scores: Sequence[Sequence[float]] | None = None) -> dict[str, float]:
    """Return AP and AR as COCO defines them; all 0.0 without ground truth or without predictions. `scores` has a score
    for each prediction of each assignment; None: all scores are 1."""
    return coco_stats(coco_matches(assignments, scores))


def coco_stats(evaluation: COCOeval | None) -> dict[str, float]:
    """Return AP and AR of COCO's matches."""
    if evaluation is None:
        return dict.fromkeys(_STATS, 0.0)
    with contextlib.redirect_stdout(io.StringIO()):  # pycocotools would print its progress
        evaluation.accumulate()
        evaluation.summarize()
    # pycocotools returns -1 for a mean over nothing.
    return {name: max(0.0, float(evaluation.stats[i])) for name, i in _STATS.items()}


def samples_of_images(assignments: Sequence[Assignment]) -> list[int]:
    """Return for each image of `coco_matches` the index of its assignment. A sample may have several images."""
    return [i for i, a in enumerate(assignments) for _ in range(max(1, len(a.parsed.rollout.sample.sizes)))]


def coco_matches(assignments: Sequence[Assignment], scores: Sequence[Sequence[float]] | None = None) -> COCOeval | None:
    """Return COCO's matches of each image and class; None without ground truth or without predictions. Image i of
    `samples_of_images` has the id i + 1."""
    owners = samples_of_images(assignments)
    first = np.searchsorted(owners, range(len(assignments))) + 1
    samples = [a.parsed.rollout.sample for a in assignments]
    truth = _by_image(first, [sample.objects for sample in samples])
    predicted = _by_image(first, [[p.object for p in a.parsed.objects] for a in assignments])
    if not truth or not predicted:
        return None
    categories = {desc: i for i, desc in enumerate(sorted({obj.desc for _, obj in truth + predicted}), 1)}
    regions = [
        (image, obj._replace(desc=desc))
        for image, obj in _by_image(first, [sample.ignored for sample in samples])
        # A crowd region of COCO has exactly one class. So an ignore region without a name becomes one crowd region for
        # each class.
        for desc in ([obj.desc] if obj.desc else categories)
        if desc in categories
    ]
    boxes = [_box(image, obj, categories) for image, obj in truth]
    boxes += [{**_box(image, obj, categories), "iscrowd": 1} for image, obj in regions]
    dataset: dict[str, object] = {
        # IoU does not change with the scale of an axis, so bins serve as pixels.
        "images": [{"id": i, "width": NUM_BINS, "height": NUM_BINS} for i, _ in enumerate(owners, 1)],
        "categories": [{"id": i, "name": desc} for desc, i in categories.items()],
        # For pycocotools a match with id 0 means no match, so ids start at 1.
        "annotations": [{"id": n, **box} for n, box in enumerate(boxes, 1)],
    }
    given = [1.0] * len(predicted) if scores is None else [score for own in scores for score in own]
    results = [
        {"score": score, **_box(image, obj, categories)} for score, (image, obj) in zip(given, predicted, strict=True)
    ]
    with contextlib.redirect_stdout(io.StringIO()):  # pycocotools would print its progress
        reference = COCO()
        reference.dataset = dataset
        reference.createIndex()
        evaluation = COCOeval(reference, reference.loadRes(results), iouType="bbox")
        # By default COCO also matches small, medium and large objects separately, which takes three quarters of its
        # time.
        evaluation.params.areaRng, evaluation.params.areaRngLbl = evaluation.params.areaRng[:1], ["all"]
        evaluation.evaluate()
    return evaluation


def _by_image(
    first: NDArray[np.int64], objects: Sequence[Sequence[DetectionObject]]
) -> list[tuple[int, DetectionObject]]:
    """Return each object with the id of its image. `first` has the id of each sample's first image."""
    return [(int(start) + (obj.image or 1) - 1, obj) for start, own in zip(first, objects, strict=True) for obj in own]


def _box(image: int, obj: DetectionObject, categories: dict[str, int]) -> dict[str, object]:
    x1, y1, x2, y2 = bounding_box(obj)
    width, height = x2 - x1, y2 - y1
    return {
        "image_id": image,
        "category_id": categories[obj.desc],
        "bbox": [x1, y1, width, height],
        "area": width * height,
        "iscrowd": 0,
    }
