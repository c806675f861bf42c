"""Fit what `predict-gain` predicts: `python -m bench.calibrate --study DIR --out learner/predict/calibration.json`.

In: DIR with a folder per regime, and in each `features.json` (of `rollout-learner predict-gain --json`) and
`results.json` with `"gains"`: by method, F1@0.5 above early-stopped `sft`, from -1 to 1. Out: a linear formula per
method, with its R2 and its error over regimes that were left out, each in turn (`learner.predict.gain`). A regime
without a method counts for the other methods only.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from learner.predict.gain import FEATURES, Formula, fit, write_calibration
from shared.errors import DataError, ProjectError


def main(
    study: Annotated[Path, typer.Option(help="Folder with a folder per regime.")],
    out: Annotated[Path, typer.Option(help="The file to write.")],
    features: Annotated[str, typer.Option(help="Features of the formulas, with commas.")] = ",".join(FEATURES),
) -> None:
    """Fit, print and write."""
    try:
        formulas = calibrate(read_study(study), features.split(","))
        write_calibration(formulas, out)
    except ProjectError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
    print("\n".join(f"{method}: {_told(formula)}" for method, formula in formulas.items()))


Regime = tuple[Mapping[str, float], Mapping[str, float]]  # features, and gains by method


def read_study(folder: Path) -> list[Regime]:
    """Every regime that has both files. Raises DataError."""
    found = []
    for path in sorted(folder.glob("*/features.json")):
        results = path.with_name("results.json")
        if results.is_file():
            found.append((_mapping(path, "features"), _mapping(results, "gains")))
    if not found:
        raise DataError(
            "no regime to calibrate on",
            found=f"no */features.json beside a results.json in {folder}",
            wanted="a folder per regime with both files",
            remedy="run the study first",
        )
    return found


def calibrate(regimes: Sequence[Regime], names: Sequence[str]) -> dict[str, Formula]:
    """A formula per method. Raises DataError if a method has too few regimes."""
    methods = sorted({method for _, gains in regimes for method in gains})
    fitted = {}
    for method in methods:
        having = [(features, gains[method]) for features, gains in regimes if method in gains]
        fitted[method] = fit([features for features, _ in having], [gain for _, gain in having], names)
    return fitted


def _mapping(path: Path, key: str) -> Mapping[str, float]:
    try:
        value: Any = json.loads(path.read_text())[key]
        return {str(name): float(number) for name, number in value.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise DataError(
            "a file of the study cannot be used",
            found=f"{path}: {type(error).__name__}: {error}",
            wanted=f"JSON with {key!r}: numbers by name",
            remedy="run that regime again",
        ) from error


def _told(formula: Formula) -> str:
    terms = " ".join(f"{weight:+.3f} {name}" for name, weight in formula.coefficients.items())
    fit_of = f"r2 {formula.r2:.2f}, error {100 * formula.rmse:.1f} points, {formula.num_regimes} regimes"
    return f"{formula.intercept:+.3f} {terms} ({fit_of}, each left out in turn)"


if __name__ == "__main__":
    typer.run(main)
