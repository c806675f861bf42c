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
from learner.predict.measure import MeasureSettings, measure
from learner.predict.recommend import Recommendation, recommend
from learner.run.files import require_writable, write_atomically


def predict_gain(
    config_path: str,
    overrides: Sequence[str] = (),
    *,
    asked: MeasureSettings,
    json_path: Path | None = None,
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
    console = Console(highlight=False, soft_wrap=True, markup=False)
    measured, known = measure(config, asked, tell=console.print)
    found = estimates(measured)
    recommendation = recommend(found, known)
    report(console, found, recommendation)
    if json_path is not None:
        content = {
            "features": {name: estimate.value for name, estimate in found.items()},
            "intervals": {name: [estimate.low, estimate.high] for name, estimate in found.items()},
            "labels": known.to_json(),
            "recommendation": recommendation.method,
            "rules": [asdict(rule) for rule in recommendation.rules],
            "asked": asdict(asked),
        }
        write_atomically(json_path, json.dumps(content, indent=2) + "\n")
    return 0


def report(console: Console, found: Mapping[str, FeatureEstimate], recommendation: Recommendation) -> None:
    """Print the features and the rules."""
    shown = Table("feature", "value [95% interval]", "meaning", box=None, padding=(0, 2, 0, 0))
    for name, one in found.items():
        shown.add_row(name, f"{one.value:6.3f} [{one.low:.3f}, {one.high:.3f}]", MEANINGS[name])
    console.print(shown)
    console.print(f"\nRecommended: {recommendation.method}")
    for rule in recommendation.rules:
        console.print(f"  {'yes' if rule.holds else 'no ':3}  {rule.method}: {rule.reason}")
