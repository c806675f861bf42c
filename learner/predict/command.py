"""`rollout-learner recipe --only-measure`: measures, and prints what was found, a method, and its reasons.

The configuration is that of the run that is planned: its model, data and task, its decoding's length and batch size.
The trainer variant, servers and the training section's lengths do not matter. Nothing is written but `--json`.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

import transformers
from rich.console import Console
from rich.table import Table

from learner.config.load import load_config
from learner.extensions import check_extensions
from learner.predict.features import MEANINGS, FeatureEstimate, estimates
from learner.predict.gain import PACKAGED, Formula, read_calibration
from learner.predict.measure import MeasureSettings, measure
from learner.predict.recommend import NOTHING, Recommendation, recommend
from learner.run.files import require_writable, write_atomically


def predict_gain(
    config_path: str,
    overrides: Sequence[str] = (),
    *,
    asked: MeasureSettings,
    json_path: Path | None = None,
    calibration: Path | None = None,
) -> int:
    """Measure, print, and write `json_path`. Returns the exit code.

    Raises ConfigErrors, ConfigError, DataError, RolloutError, OutputError.
    """
    logging.disable(logging.WARNING)  # prints the findings, and not what libraries log
    transformers.utils.logging.disable_progress_bar()
    config = load_config(config_path, overrides=overrides)
    check_extensions(config)
    if json_path is not None:
        require_writable(json_path.parent)
    formulas = read_calibration(calibration or PACKAGED)
    console = Console(highlight=False, soft_wrap=True, markup=False)
    found = estimates(measure(config, asked, tell=console.print))
    recommendation = recommend(found)
    gains = predicted(formulas, found, recommendation)
    report(console, found, recommendation, formulas, gains)
    if json_path is not None:
        write_atomically(json_path, json.dumps(as_json(found, recommendation, gains, asked), indent=2) + "\n")
    return 0


def predicted(
    formulas: Mapping[str, Formula], found: Mapping[str, FeatureEstimate], recommendation: Recommendation
) -> dict[str, float | None]:
    """F1 points by method; None: the model lies outside the regimes of the formula, or a rule says that nothing is
    gained. Raises DataError if a formula needs what was not measured."""
    if recommendation.method == NOTHING:
        return dict.fromkeys(formulas)
    values = {name: estimate.value for name, estimate in found.items()}
    return {
        method: None if formula.outside(values) else 100 * formula.gain(values) for method, formula in formulas.items()
    }


def as_json(
    found: Mapping[str, FeatureEstimate],
    recommendation: Recommendation,
    gains: Mapping[str, float | None],
    asked: MeasureSettings,
) -> dict[str, object]:
    """`features` is what `bench.calibrate` reads."""
    return {
        "features": {name: estimate.value for name, estimate in found.items()},
        "intervals": {name: [estimate.low, estimate.high] for name, estimate in found.items()},
        "recommendation": recommendation.method,
        "rules": [asdict(rule) for rule in recommendation.rules],
        "predicted_gain_points": dict(gains),
        "asked": asdict(asked),
    }


def report(
    console: Console,
    found: Mapping[str, FeatureEstimate],
    recommendation: Recommendation,
    formulas: Mapping[str, Formula],
    gains: Mapping[str, float | None],
) -> None:
    """Print the features, the rules, and the gains that a calibration predicts."""
    shown = Table("feature", "value [95% interval]", "meaning", box=None, padding=(0, 2, 0, 0))
    for name, one in found.items():
        shown.add_row(name, f"{one.value:6.3f} [{one.low:.3f}, {one.high:.3f}]", MEANINGS[name])
    console.print(shown)
    console.print(f"\nRecommended: {recommendation.method}")
    for rule in recommendation.rules:
        console.print(f"  {'yes' if rule.holds else 'no ':3}  {rule.method}: {rule.reason}")
    console.print("")
    values = {name: one.value for name, one in found.items()}
    for method, formula in formulas.items():
        console.print(f"Predicted gain of {method} over early-stopped sft: {_told(formula, gains[method], values)}")


def _told(formula: Formula, gain: float | None, values: Mapping[str, float]) -> str:
    if gain is None:
        if outside := formula.outside(values):
            return f"cannot tell; no model like this one was measured: {', '.join(outside)}"
        return "none, by the rule that recommends"
    return (
        f"{gain:+.1f} F1 points, give or take {100 * formula.rmse:.1f} (r2 {formula.r2:.2f} over "
        f"{formula.num_regimes} regimes, each left out in turn)"
    )
