"""Computes numbers by name (features) from a measurement. `recommend.py` chooses a training method by the features.

In: `Measured`. Out: each number with its 95% interval over scenes. F1 is computed as in an evaluation: IoU 0.5, the
same description, counts summed over scenes. Intervals are percentile bootstrap intervals: scenes are sampled with
replacement, and all numbers of a split use the same resamples. Numbers about missing labels come from the estimate that
`labels.complete` makes (`learner.tasks.detection.gaps`). Pure, deterministic.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from learner.tasks.detection.metrics import METRICS, columns_of, ratio

Floats = NDArray[np.float64]
Counts = Floats  # [..., len(metrics.COLUMNS)]
NUM_DRAWS = 2000  # number of bootstrap resamples
F1, F1_ANY = "f1@0.5", "f1_any@0.5"  # names of metrics; `any`: descriptions are ignored

# One name for each kind in `exposure.KINDS`, in the same order.
KIND_NAMES = ("exposure_structure", "exposure_names", "exposure_coordinates", "exposure_gap")

MEANINGS: Mapping[str, str] = {
    "f1_greedy": "F1@0.5 of greedy answers on the training sample",
    "recall_greedy": "recall of the same",
    "recall_places": "the same with names ignored: the share of the labelled places that it finds",
    "f1_sampled": "F1 of answers drawn at temperature 1",
    "f1_best": "F1 of the best of K drawn answers of each scene",
    "headroom": "f1_best - f1_greedy",
    "headroom_places": "the same with names ignored: when to stop, what to skip, where it is",
    "reward_std": "standard deviation of F1 within a scene's K answers, mean over scenes",
    "no_signal": "share of scenes whose K answers all have the same F1",
    "name_errors": "F1 lost to wrong names (greedy)",
    "count_ratio": "objects in greedy answers / labels",
    "duplicate_rate": "greedy predictions that repeat an earlier one",
    "parse_rate": "greedy answers that are one closed container, nothing dropped",
    "exposure_gap": "nats per token, after the model's own words minus after the truth's",
    "exposure_structure": "the same for structure",
    "exposure_names": "the same for names",
    "exposure_coordinates": "the same for coordinates (as tokens)",
    "missing_labels": "share of the objects found that have no label, estimated",
    "unlabelled_right": "share of what any answer says without a label that is right, estimated",
    "nats_train": "nats per token of the training labels, teacher-forced",
    "nats_val": "the same on the validation sample",
    "overfit_nats": "nats_val - nats_train",
    "f1_val": "F1@0.5 of greedy answers on the validation sample",
    "overfit_f1": "f1_greedy - f1_val",
}


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class MeasuredSplit:
    """N scenes: the counts of their greedy answers, and the model's loss on their labels (teacher-forced)."""

    greedy: Counts  # [N, columns]
    nats: Floats  # [N, 2] summed loss of the labels' tokens in nats, and number of these tokens


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Measured:
    """The measurement of N training scenes with K sampled answers each, and of validation scenes if there are any."""

    train: MeasuredSplit
    sampled: Counts  # [N, K, columns]
    exposure: Floats  # [N, kinds, 3] `exposure.Compared.sums`; zeros for a scene that is not compared
    validation: MeasuredSplit | None = None
    # [N, 3] number of labels, number of predicted boxes without a label, and how many of these boxes are right by
    # estimate; None: not known
    gaps: Floats | None = None


@dataclass(frozen=True, slots=True)
class FeatureEstimate:
    """A number and its 95% interval over scenes."""

    value: float
    low: float
    high: float


def estimates(measured: Measured) -> dict[str, FeatureEstimate]:
    """Return each feature with its interval, by name, in the order of MEANINGS. Features that were not measured are
    left out."""
    train = _train(measured)
    if measured.validation is not None:
        train |= _validation(measured.validation, train)
    return {name: _estimate(train[name]) for name in MEANINGS if name in train}


def _train(measured: Measured) -> dict[str, Floats]:
    """Return the features of the training scenes, by name. Each feature has [1 + NUM_DRAWS] values: of all scenes, then
    of each resample."""
    sampled, greedy = measured.sampled, measured.train.greedy
    sums = _sums_of(len(greedy))
    of_greedy = columns_of(sums(greedy))
    scene_f1 = _scene_f1(sampled, "tp", "ignored")  # [N, K]
    best = _best(sampled, scene_f1)
    best_places = _best(sampled, _scene_f1(sampled, "tp_any", "ignored_any"))
    spread = np.stack([scene_f1.std(axis=1), np.ptp(scene_f1, axis=1) == 0, np.ones(len(greedy))], axis=1)
    spread_sums, nats = sums(spread), sums(measured.train.nats)
    found = {
        "f1_greedy": METRICS[F1](of_greedy),
        "recall_greedy": METRICS["recall@0.5"](of_greedy),
        "recall_places": METRICS["recall_any@0.5"](of_greedy),
        "f1_sampled": METRICS[F1](columns_of(sums(sampled.sum(axis=1)))),
        "f1_best": METRICS[F1](columns_of(sums(best))),
        "headroom_places": METRICS[F1_ANY](columns_of(sums(best_places))) - METRICS[F1_ANY](of_greedy),
        "reward_std": spread_sums[:, 0] / spread_sums[:, 2],
        "no_signal": spread_sums[:, 1] / spread_sums[:, 2],
        "name_errors": METRICS[F1_ANY](of_greedy) - METRICS[F1](of_greedy),
        "count_ratio": ratio(of_greedy["predictions"], of_greedy["truth"]),
        "duplicate_rate": METRICS["duplicate_rate"](of_greedy),
        "parse_rate": METRICS["parse_rate"](of_greedy),
        "nats_train": ratio(nats[:, 0], nats[:, 1]),
    }
    found["headroom"] = found["f1_best"] - found["f1_greedy"]
    if measured.gaps is not None:
        labels, free, right = sums(measured.gaps).T
        found |= {"missing_labels": ratio(right, labels + right), "unlabelled_right": ratio(right, free)}
    exposure = sums(measured.exposure)  # [1 + resamples, kinds of tokens, 3]
    return found | {
        name: ratio(exposure[:, i, 0] - exposure[:, i, 1], exposure[:, i, 2]) for i, name in enumerate(KIND_NAMES)
    }


def _validation(split: MeasuredSplit, train: Mapping[str, Floats]) -> dict[str, Floats]:
    """Return the features of the validation scenes, by name, as `_train` does. The validation scenes are resampled
    independently of the training scenes. `train`: the features of the training scenes."""
    sums = _sums_of(len(split.greedy), seed=1)
    nats = sums(split.nats)
    found = {"f1_val": METRICS[F1](columns_of(sums(split.greedy))), "nats_val": ratio(nats[:, 0], nats[:, 1])}
    return found | {
        "overfit_nats": found["nats_val"] - train["nats_train"],
        "overfit_f1": train["f1_greedy"] - found["f1_val"],
    }


def _sums_of(num_scenes: int, seed: int = 0) -> Callable[[Floats], Floats]:
    """Return a function that sums values of scenes [N, ...] to [1 + draws, ...]: over all scenes, then over each
    resample."""
    share = np.full(num_scenes, 1 / num_scenes)
    drawn = np.random.default_rng(seed).multinomial(num_scenes, share, size=NUM_DRAWS)
    weights = np.concatenate([np.ones((1, num_scenes)), drawn])
    return lambda values: np.tensordot(weights, values, axes=1)


def _scene_f1(counts: Counts, hits: str, ignored: str) -> Floats:
    """Return the F1 at IoU 0.5 of each single answer; 1 if there are neither labels nor predictions. `hits` and
    `ignored`: names of the columns of right and of ignored predictions."""
    columns = columns_of(counts)
    total = columns["predictions"] - columns[f"{ignored}@0.50"] + columns["truth"]
    return np.where(total > 0, ratio(2 * columns[f"{hits}@0.50"], total), 1.0)


def _best(sampled: Counts, scene_f1: Floats) -> Counts:
    """Return the counts [N, columns] of each scene's answer with the highest F1; the first one if several have it."""
    return sampled[np.arange(len(sampled)), scene_f1.argmax(axis=1)]


def _estimate(values: Floats) -> FeatureEstimate:
    low, high = np.quantile(values[1:], [0.025, 0.975])
    return FeatureEstimate(float(values[0]), float(low), float(high))
