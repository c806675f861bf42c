"""The length of a run: steps and epochs, and the time they take where an earlier run in `output_dir` shows it.

In: the configuration, its plan, and the number of training samples. Out: values for `--json`, and lines for people.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from statistics import median
from typing import Any

from learner.config.plan import Plan, steps_of_epoch
from learner.config.schema import RunConfig
from shared.reading import json_of

_WARM_UP_STEPS = 3  # they compile
_UNITS = ((86_400.0, "days"), (3600.0, "hours"), (60.0, "minutes"))


def length_report(config: RunConfig, plan: Plan, num_samples: int) -> dict[str, Any]:
    """`steps`, `epochs`, and `step_s` of an earlier run, if any."""
    per_epoch = steps_of_epoch(config, plan, num_samples)
    training = config.training
    steps = training.max_steps or (training.num_train_epochs or 0) * per_epoch
    report: dict[str, Any] = {"steps": steps, "epochs": round(steps / per_epoch, 2)}
    seconds = _earlier_steps(Path(training.output_dir))
    if seconds:
        report["step_s"] = round(median(seconds), 3)
    return {"length": report}


def _earlier_steps(run_dir: Path) -> list[float]:
    """Return the seconds of each step of the run that is in the folder, but the first ones."""
    try:
        with (run_dir / "metrics.jsonl").open("rb") as lines:
            events = [_event(line) for line in lines if b'"event": "step"' in line]
    except OSError:  # no run is there, and a folder that cannot be read is another check's to report
        return []
    seconds = [event.get("step_s") for event in events][_WARM_UP_STEPS:]
    return [s for s in seconds if isinstance(s, float) and 0 < s < float("inf")]


def _event(line: bytes) -> Mapping[str, Any]:
    try:
        event = json_of(line)
    except ValueError:  # the last line of a run that was killed
        return {}
    return event if isinstance(event, dict) else {}


def length_in_words(report: Mapping[str, Any]) -> list[str]:
    """Return two lines of the report of `check`: the length, and the time; none if the data was not read."""
    length = report.get("length")
    if length is None:
        return []
    steps, epochs = length["steps"], f"{length['epochs']:g}"
    whole = float(length["epochs"]).is_integer()
    line = (
        f"length: {steps} step{'s' if steps > 1 else ''} of {report['effective_batch_size']} samples: "
        f"{'' if whole else 'about '}{epochs} epoch{'s' if epochs != '1' else ''} of {report['samples']['train']}"
    )
    return [line, _time_in_words(length)]


def _time_in_words(length: Mapping[str, Any]) -> str:
    if "step_s" not in length:
        return "time: not known before the first steps; the run prints the seconds of each"
    step_s = length["step_s"]
    return (
        f"time: about {_duration(step_s * length['steps'])}, if a step takes {step_s:g} s as in the run in output_dir"
    )


def _duration(seconds: float) -> str:
    for size, unit in _UNITS:
        if seconds >= size:
            return f"{seconds / size:.1f} {unit}"
    return f"{seconds:.0f} seconds"
