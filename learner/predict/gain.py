"""F1 points that a method gains, as a linear formula over the features: fitted, kept as a file, and applied.

    gain = intercept + sum of coefficient x feature

`fit` takes least squares over regimes (a model, data and labels where the gain was measured), and judges itself by
leaving each regime out in turn: `r2` compares its errors with those of the other regimes' mean. 1: exact; 0: no better
than the mean; negative: worse. A formula with as many coefficients as regimes would fit anything, so only a few
features are taken. A formula knows the ranges of its regimes; of a model outside them (one that finds nothing, or knows
its training scenes by heart) it cannot tell the gain. Pure, but for the file.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from learner.run.files import write_atomically
from shared.errors import DataError
from shared.reading import json_in

PACKAGED = Path(__file__).with_name("calibration.json")
RANGED = ("f1_greedy", "parse_rate", "overfit_f1")  # a formula holds in their ranges, besides those of its own features
MARGIN = 0.25  # share of a range's width that a model may lie outside it
FEATURES = ("missing_labels", "headroom_places", "exposure_gap")  # that a formula has, if nothing else is asked for


@dataclass(frozen=True, kw_only=True, slots=True)
class Formula:
    """`rmse` (F1) and `r2` are of regimes that were left out. `ranges`: the least and the largest value of features in
    the regimes."""

    intercept: float
    coefficients: Mapping[str, float]
    ranges: Mapping[str, Sequence[float]] = field(default_factory=dict)
    r2: float
    rmse: float
    num_regimes: int

    def gain(self, features: Mapping[str, float]) -> float:
        """Return the gain in F1, from -1 to 1. Raises DataError if a feature was not measured."""
        lacking = sorted(self.coefficients.keys() - features.keys())
        if lacking:
            raise DataError(
                "the calibration needs features that were not measured",
                found=f"no {', '.join(lacking)}",
                wanted="the features of its regimes",
                remedy="name a validation file (data.val), or calibrate without these features",
            )
        return self.intercept + sum(weight * features[name] for name, weight in self.coefficients.items())

    def outside(self, features: Mapping[str, float]) -> list[str]:
        """Return the features that lie outside the regimes that were measured, in words. Empty: the formula holds."""
        found = []
        for name, (low, high) in self.ranges.items():
            margin = MARGIN * (high - low)
            if name in features and not low - margin <= features[name] <= high + margin:
                found.append(f"{name} {features[name]:.3f} (measured: {low:.3f} to {high:.3f})")
        return found


def fewest_regimes(names: Sequence[str]) -> int:
    """Return the fewest regimes for a fit. If one of them is left out, there are still more regimes than
    coefficients."""
    return len(names) + 3


def fit(regimes: Sequence[Mapping[str, float]], gains: Sequence[float], names: Sequence[str] = FEATURES) -> Formula:
    """Fit the formula of one method over regimes with measured gains. Raises DataError with too few regimes."""
    if len(regimes) < fewest_regimes(names):
        raise DataError(
            "too few regimes for a formula",
            found=f"{len(regimes)} regimes, {len(names)} features",
            wanted=f"{fewest_regimes(names)} regimes or more",
            remedy="measure more regimes, or use fewer features",
        )
    inputs = np.array([[1.0, *(_feature(regime, name) for name in names)] for regime in regimes])  # [R, 1 + F]
    measured = np.array(gains, dtype=np.float64)
    left_out = [_without(inputs, measured, i) for i in range(len(measured))]
    errors, from_mean = (np.array(one) for one in zip(*left_out, strict=True))
    around = float((from_mean**2).sum())
    intercept, *weights = _least_squares(inputs, measured).tolist()
    return Formula(
        intercept=intercept,
        coefficients=dict(zip(names, weights, strict=True)),
        ranges=_ranges(regimes, (*names, *RANGED)),
        r2=1.0 - float((errors**2).sum()) / around if around else math.nan,
        rmse=float(np.sqrt((errors**2).mean())),
        num_regimes=len(regimes),
    )


def _ranges(regimes: Sequence[Mapping[str, float]], names: Sequence[str]) -> dict[str, list[float]]:
    known = {name: [regime[name] for regime in regimes if name in regime] for name in names}
    return {name: [min(values), max(values)] for name, values in known.items() if len(values) == len(regimes)}


def write_calibration(formulas: Mapping[str, Formula], path: Path) -> None:
    """Write formulas by method. Raises OutputError."""
    write_atomically(path, json.dumps({method: asdict(one) for method, one in formulas.items()}, indent=2) + "\n")


def read_calibration(path: Path) -> dict[str, Formula]:
    """Raises DataError."""
    try:
        return {str(method): Formula(**one) for method, one in json_in(path).items()}
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise DataError(
            "the calibration cannot be read",
            found=f"{path}: {type(error).__name__}: {error}",
            wanted="a file that bench.calibrate wrote",
            remedy="correct the path, or leave --calibration out",
        ) from error


def _without(inputs: NDArray[np.float64], measured: NDArray[np.float64], left_out: int) -> tuple[float, float]:
    """The errors for one regime, of the formula and of the mean, both made from the others."""
    others = np.arange(len(measured)) != left_out
    predicted = inputs[left_out] @ _least_squares(inputs[others], measured[others])
    return float(measured[left_out] - predicted), float(measured[left_out] - measured[others].mean())


def _least_squares(inputs: NDArray[np.float64], measured: NDArray[np.float64]) -> NDArray[np.float64]:
    return np.linalg.lstsq(inputs, measured, rcond=None)[0].astype(np.float64)


def _feature(regime: Mapping[str, float], name: str) -> float:
    value = regime.get(name)
    if not isinstance(value, int | float) or not math.isfinite(value):
        raise DataError(
            "a regime lacks a feature",
            found=f"{name}: {value!r}",
            wanted="a finite number in every regime",
            remedy="measure all regimes alike (with data.val), or leave the feature out",
        )
    return float(value)
