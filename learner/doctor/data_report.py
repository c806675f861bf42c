"""Makes the report of `check` on a run's data and length, as values for `--json` and as lines for people.

In: the configuration, and the splits as they were read. Out: what is in each split and what looks wrong, the
photographs that two splits share, and how much of a photograph the model sees. The report also has the run's steps and
epochs, and the time that they take if an earlier run in `output_dir` shows it.
"""

from __future__ import annotations

import shlex
from collections.abc import Collection, Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from statistics import median
from typing import Any

from learner.config.memory import memory_in_words
from learner.config.plan import Plan, steps_of_epoch
from learner.config.schema import RunConfig
from learner.config.sections.augment import stays_upright
from learner.config.sections.model import ModelConfig
from learner.data.splits import Split
from learner.data.survey import (
    Survey,
    lines_of,
    photographs,
    pixel_limits,
    seen_by_model,
    seen_in_words,
    shared_images,
    small_boxes,
    survey,
    warnings_of,
)
from learner.data.units import PixelLimits
from shared.config.model import ConfigErrors
from shared.reading import json_of

_MAX_NAMED = 12
_LITTLE = 0.5  # there is a warning if the model sees less than this fraction of a photograph's pixels

# The first steps take longer, because they compile.
_WARM_UP_STEPS = 3  # number of first steps that the median leaves out
_UNITS = ((86_400.0, "days"), (3600.0, "hours"), (60.0, "minutes"), (0.0, "seconds"))


def look_at_data(config: RunConfig, read: Mapping[str, Split]) -> dict[str, Any]:
    """Return the report's entries `data` (by split), `labels` and `shared_images`; {} for other tasks than detection.
    Raises ConfigErrors if no photograph fits a packed row."""
    if config.task.type != "detection":
        return {}
    about = {split: survey(found) for split, found in read.items() if found.samples}
    _check_rows(config, about)
    learned = about["train"].classes if "train" in about else {}
    limits = pixel_limits(config.model)
    data = {split: of_split(found, split, learned, limits) for split, found in about.items()}
    for split, found in about.items():
        data[split]["warnings"] += _little_seen(config.model, limits, found)
    report: dict[str, Any] = {"data": data}
    if "train" in about:
        report["data"]["train"]["warnings"] += _kept_upright(config, about["train"].classes)
        report["labels"] = _completeness(config)
    shared = shared_images({split: found.samples for split, found in read.items()})
    if shared:
        report["shared_images"] = {f"{a}, {b}": len(images) for (a, b), images in shared.items()}
    return report


def _completeness(config: RunConfig) -> str:
    """Return what an earlier start of the run found out about gaps in the training labels, or how a person can find
    out."""
    for path in sorted(Path(config.training.output_dir, "labels").glob("step_*.json"), reverse=True):
        try:
            return f"{json_of(path.read_text())['text']} ({path})"
        except (OSError, ValueError, KeyError, TypeError):
            continue
    data = shlex.quote(str(config.data.train))
    return (
        "only a model can tell whether they are complete. Three minutes of yours, with any that knows the objects: "
        f"rollout-learner find-missing suggest {data} --model MODEL --out DIR, then find-missing audit DIR"
    )


def of_split(found: Survey, split: str, learned: Collection[str], limits: PixelLimits | None) -> dict[str, list[str]]:
    """Return `about`, what is in a split, and `warnings`. `learned`: the classes of `train`. `limits`: the pixels that
    the model sees; None: not known."""
    lines, warned = lines_of(found), warnings_of(found, split, learned)
    if limits is not None:
        seen = seen_by_model(found.sizes[2], limits)
        lines.append(seen_in_words(seen))
        warned += filter(None, [small_boxes(found, seen)])
    return {"about": lines, "warnings": warned}


def split_in_words(name: str, report: Mapping[str, list[str]]) -> list[str]:
    """Return the lines of one split for people."""
    return [name, *(f"  {line}" for line in report["about"]), *(f"  ! {line}" for line in report["warnings"])]


def _little_seen(model: ModelConfig, limits: PixelLimits | None, found: Survey) -> list[str]:
    """Return a warning if the model sees less than half of the largest photograph."""
    if limits is None or (share := seen_by_model(found.sizes[2], limits).share) >= _LITTLE:
        return []
    whose = "model.max_pixels" if model.max_pixels is not None else "the checkpoint's own limit"
    return [
        f"the model sees {share:.0%} of the largest photograph, because {whose} is {limits.most} pixels: "
        "set a larger model.max_pixels, here and in the server's file"
    ]


def _kept_upright(config: RunConfig, classes: Iterable[str]) -> list[str]:
    """Return a warning if `data.augment` asks for mirrored or turned photographs, but some classes must stay
    upright."""
    augment = config.data.augment
    if augment is None or not (augment.horizontal_flip or augment.quarter_turn):
        return []
    names = [name for name in classes if stays_upright(name)]
    if not names:
        return []
    shown = ", ".join(names[:_MAX_NAMED]) + (f" and {len(names) - _MAX_NAMED} more" if len(names) > _MAX_NAMED else "")
    return [f"photographs with these classes are neither mirrored nor turned, which could make them others: {shown}"]


def _check_rows(config: RunConfig, about: Mapping[str, Survey]) -> None:
    """Raises ConfigErrors if not even the smallest photograph of `train` fits a row."""
    limits = pixel_limits(config.model)
    if limits is None or "train" not in about:
        return
    fewest = seen_by_model(about["train"].sizes[0], limits).num_tokens
    if fewest >= config.global_max_length:
        found = f"{config.global_max_length}, and at least {fewest} tokens of the smallest photograph"
        remedy = "raise it, or lower model.max_pixels"
        raise ConfigErrors.one("global_max_length", found, "room for a sample", remedy)


def length_report(config: RunConfig, plan: Plan, num_samples: int) -> dict[str, Any]:
    """Return `length`: `steps` and `epochs` of the run, and `step_s`, the median seconds of a step, if an earlier run
    is in the folder."""
    per_epoch = steps_of_epoch(config, plan, num_samples)
    training = config.training
    steps = training.max_steps or (training.num_train_epochs or 0) * per_epoch
    report: dict[str, Any] = {"steps": steps, "epochs": round(steps / per_epoch, 2)}
    if seconds := _earlier_steps(Path(training.output_dir)):
        report["step_s"] = round(median(seconds), 3)
    return {"length": report}


def _earlier_steps(run_dir: Path) -> list[float]:
    """Return the seconds of each step of the run in the folder, without its first `_WARM_UP_STEPS` steps."""
    seconds = []
    try:
        with (run_dir / "metrics.jsonl").open("rb") as lines:
            for line in lines:
                with suppress(ValueError, AttributeError):  # a killed run may end with half a line
                    if b'"event": "step"' in line:
                        seconds.append(json_of(line).get("step_s"))
    except OSError:  # there is no run, or another check reports that the folder cannot be read
        return []
    return [s for s in seconds[_WARM_UP_STEPS:] if isinstance(s, float) and 0 < s < float("inf")]


def length_in_words(report: Mapping[str, Any]) -> list[str]:
    """Return two lines, the length and the time; [] if the data was not read."""
    length = report.get("length")
    if length is None:
        return []
    steps, epochs = length["steps"], f"{length['epochs']:g}"
    whole = float(length["epochs"]).is_integer()
    line = (
        f"length: {steps} step{'s' if steps > 1 else ''} of {report['effective_batch_size']} samples: "
        f"{'' if whole else 'about '}{epochs} epoch{'s' if epochs != '1' else ''} of {report['samples']['train']}"
    )
    if (step_s := length.get("step_s")) is None:
        return [line, "time: not known before the first steps; the run prints the seconds of each"]
    took = f"if a step takes {step_s:g} s as in the run in output_dir"
    return [line, f"time: about {_duration(step_s * steps)}, {took}"]


def _duration(seconds: float) -> str:
    size, unit = next((size, unit) for size, unit in _UNITS if seconds >= size)
    return f"{seconds / size:.1f} {unit}" if size else f"{seconds:.0f} {unit}"


def data_in_words(report: Mapping[str, Any]) -> list[str]:
    """Return lines for people about the data, its probable mistakes, and the run's length and memory."""
    lines: list[str] = []
    for split, number in report.get("samples", {}).items():
        found = report.get("data", {}).get(split, {"about": [f"{number} samples"], "warnings": []})
        lines += split_in_words(f"{split}:", found)
    lines += [f"! {photographs(number)} in both of {pair}" for pair, number in report.get("shared_images", {}).items()]
    return [*lines, *length_in_words(report), memory_in_words(report, report["packing_length"])]


def in_words(report: Mapping[str, Any]) -> list[str]:
    """Return the report of `check` for people."""
    lines = [*data_in_words(report), *(f"! {advice}" for advice in report.get("advice", ()))]
    if pictures := report.get("pictures"):
        lines.append(f"drawn: {photographs(len(pictures))} with their labels, in {Path(pictures[0]).parent}")
    lines += [f"labels: {report['labels']}"] if "labels" in report else []
    lines.append(_method(report))
    lines += [_labels(report)] if "labels_complete" in report else []
    if sizes := report.get("server_world_sizes"):
        workers = f"{sum(sizes)} worker{'s' if sum(sizes) > 1 else ''}"
        lines.append(
            f"servers: {len(sizes)} ready with {workers}; requests under way from each rank: {report['chunk']}"
        )
    return lines


def _method(report: Mapping[str, Any]) -> str:
    ranks = report["world_size"]
    rollouts = report["rollouts_per_step"]
    made = f"{rollouts} rollouts a step" if rollouts else "no rollouts"
    return f"method: {report['trainer_variant']}, {made}, {ranks} learner rank{'s' if ranks > 1 else ''}"


def _labels(report: Mapping[str, Any]) -> str:
    asked, number = report["labels_complete"], report.get("samples", {}).get("train")
    whole = "each training sample" if number is None else f"each of {number} training samples"
    again = "" if asked["refresh"] == "once" else f", and again every {asked['refresh']} steps"
    return f"labels.complete: {asked['rollouts']} answers to {whole} before the first step{again}"
