"""Fit F1 points to features: `python -m bench.calibrate --study DIR --out learner/predict/calibration.json`.

In: DIR with the `study.json` of `bench.study` until commit dc904df6, and per regime `features/REGIME.json`: what
`rollout-learner recipe --only-measure --json` measured of the regime's base model on its training data. With several
studies (`--study` again), each adds its regimes: gains are differences within one study.

Out: a linear formula per arm for its gain over early-stopped `sft` (F1@0.5 on test scenes), with its R2 and its error
over regimes that were left out, each in turn (`learner.predict.gain`). An arm that was run on too few regimes, or whose
gain the features do not tell (an R2 below LEAST_R2), gets none, and is named.

The features of a regime, with any run's YAML:

    rollout-learner recipe --only-measure --config RUN.yaml model.path=BASE data.train=TRAIN data.val=VAL \\
        --json DIR/features/REGIME.json
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from learner.predict.gain import FEATURES, Formula, fewest_regimes, fit, write_calibration
from shared.errors import DataError, ProjectError

COMPARED_WITH, BASE, METRIC = "sft", "base", "f1@0.5"
LEAST_R2 = 0.5


def main(
    study: Annotated[list[Path], typer.Option(help="Folder of a study; again for each.")],
    out: Annotated[Path, typer.Option(help="The file to write.")],
    features: Annotated[str, typer.Option(help="Features of the formulas, with commas.")] = ",".join(FEATURES),
) -> None:
    """Fit, print and write."""
    try:
        formulas, left_out = calibrate(read_studies(study), features.split(","))
        write_calibration(formulas, out)
    except ProjectError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
    print("\n".join(f"{arm}: {_told(formula)}" for arm, formula in formulas.items()))
    print("\n".join(f"{arm}: left out, {why}" for arm, why in left_out.items()))


Regime = tuple[Mapping[str, float], Mapping[str, float]]  # features, and gains by arm


def read_studies(folders: Sequence[Path]) -> list[Regime]:
    """Return every regime whose features were measured. Raises DataError."""
    found: list[Regime] = []
    for folder in folders:
        for name, summary in _json(folder / "study.json", "regimes").items():
            path = folder / "features" / f"{name}.json"
            if path.is_file():
                features = {key: float(value) for key, value in _json(path, "features").items()}
                found.append((features, _gains(summary["arms"])))
    if not found:
        raise DataError(
            "no regime to calibrate on",
            found=f"no features/REGIME.json for a regime of {', '.join(str(one / 'study.json') for one in folders)}",
            wanted="the features of each regime",
            remedy="rollout-learner recipe --only-measure --config RUN.yaml --json DIR/features/REGIME.json",
        )
    return found


def _gains(arms: Mapping[str, Any]) -> dict[str, float]:
    """Return the gains over the arm `sft`; arms that were not compared with it have none."""
    compared = {arm: summary["minus"].get(COMPARED_WITH) for arm, summary in arms.items() if arm != BASE}
    return {arm: float(minus[METRIC]["value"]) for arm, minus in compared.items() if minus}


def calibrate(regimes: Sequence[Regime], names: Sequence[str]) -> tuple[dict[str, Formula], dict[str, str]]:
    """Return a formula per arm, and the arms without one, with the reason. Raises DataError if no arm has one."""
    fitted: dict[str, Formula] = {}
    left_out: dict[str, str] = {}
    for arm in sorted({arm for _, gains in regimes for arm in gains}):
        having = [(features, gains[arm]) for features, gains in regimes if arm in gains]
        if len(having) < fewest_regimes(names):
            left_out[arm] = f"only {len(having)} regimes"
            continue
        formula = fit([features for features, _ in having], [gain for _, gain in having], names)
        if formula.r2 < LEAST_R2:
            left_out[arm] = f"the features do not tell its gain: {_told(formula)}"
        else:
            fitted[arm] = formula
    if not fitted:
        raise DataError(
            "no arm has a formula",
            found=f"{left_out}",
            wanted=f"an arm on {fewest_regimes(names)} regimes, for {len(names)} features, with an R2 of {LEAST_R2:g}",
            remedy="measure more regimes, or use other features",
        )
    return fitted, left_out


def _json(path: Path, key: str) -> Mapping[str, Any]:
    try:
        return dict(json.loads(path.read_text())[key])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DataError(
            "a file of the study cannot be used",
            found=f"{path}: {type(error).__name__}: {error}",
            wanted=f"JSON with {key!r}: an object",
            remedy="run that part of the study again",
        ) from error


def _told(formula: Formula) -> str:
    terms = " ".join(f"{weight:+.3f} {name}" for name, weight in formula.coefficients.items())
    fit_of = f"r2 {formula.r2:.2f}, error {100 * formula.rmse:.1f} points, {formula.num_regimes} regimes"
    return f"{formula.intercept:+.3f} {terms} ({fit_of}, each left out in turn)"


if __name__ == "__main__":
    typer.run(main)
