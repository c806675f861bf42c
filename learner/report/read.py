"""Reads a run directory into records.

In: `metrics.jsonl` (one event per line), `eval/step_*.jsonl` (one scene per line), `config.yaml`. Any of the run's
files may be missing, and the last line of a file may be cut off, because a killed run should have a report too.
`RunRecord.notes` says what is missing or damaged. DataError is raised only if all files of a run are missing. If a
resumed run repeated an optimizer step, the step's last record is used.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import fields
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar

from learner.config.load import RESOLVED_NAME
from learner.journal.run_end import ends_by_time
from learner.records import Activity, DetectionObject, GeometryKind, StepResult, SyncReceipt
from learner.report.records import (
    DataCounts,
    EvalPoint,
    GroupStep,
    RunRecord,
    RunSet,
    Scene,
    ScoredScene,
    SpikePoint,
    SpikeSample,
    Status,
    StepTimeline,
    SyncPoint,
)
from learner.report.sheet import Sheet
from learner.tasks.detection.bins import arity_is_right
from shared.errors import DataError
from shared.reading import json_of, yaml_of

METRICS, GROUPS, EVAL_FILE = "metrics.jsonl", "groups.jsonl", re.compile(r"step_(\d+)\.jsonl")
RECIPE = "recipe.json"
_KINDS: tuple[GeometryKind, ...] = ("bbox_2d", "poly")
R = TypeVar("R", StepResult, SyncReceipt, "SpikePoint")
PACE_STEPS = 20  # number of last steps from which `Status.seconds_per_step` is computed
_LARGEST_BIN = 1 << 20  # max size of a coordinate or of an image's side; larger values count as damaged


def read_runs(path: Path) -> RunSet:
    """Return the run in the folder `path`, or, if `path` is no run, the runs in its subfolders. Raises DataError if
    there is no run."""
    if not path.is_dir():
        raise DataError("there is no run directory", found=str(path), remedy="give the directory that the run wrote")
    if is_run(path):
        return RunSet(title=_title(path), runs=(read_run(path),), recipe={})
    # Links are skipped: `latest` is a link to a run whose own folder is listed.
    children = sorted((p for p in path.iterdir() if p.is_dir() and not p.is_symlink() and is_run(p)), key=_rank)
    if not children:
        raise DataError(
            "the directory is no run",
            found=str(path),
            wanted=f"{METRICS}, {RESOLVED_NAME} or eval/step_*.jsonl in it, or run directories in it",
            remedy="give training.output_dir of a run",
        )
    runs = tuple(read_run(child) for child in children)
    return RunSet(title=_title(path), runs=runs, recipe=_read_mapping(path / RECIPE)[0])


def is_run(path: Path) -> bool:
    """Return True if the folder has a run's `metrics.jsonl`, `config.yaml`, or file of an evaluation."""
    return (path / METRICS).is_file() or (path / RESOLVED_NAME).is_file() or any(_eval_files(path))


def read_run(path: Path) -> RunRecord:
    """Return the record of the run in the folder `path`. Missing files are named in the record's notes."""
    return run_of(path, *_read_jsonl(path / METRICS))


def run_of(path: Path, events: Sequence[Mapping[str, object]], damaged: int, *, with_scenes: bool = True) -> RunRecord:
    """Return the record of the run in the folder `path`, whose `metrics.jsonl` has these events and `damaged`
    unreadable lines. `with_scenes` False: scenes and groups are not read."""
    config, config_note = _read_mapping(path / RESOLVED_NAME)
    named: dict[str, list[Mapping[str, object]]] = {}
    for event in events:
        named.setdefault(str(event.get("event")), []).append(event)
    steps = {step.global_step: step for step in map(_step, named.get("step", ()))}
    timelines = {line.global_step: line for line in map(_timeline, named.get("timeline", ()))}
    evals, eval_damage = _evals(path if with_scenes else None, named.get("eval", ()), config)
    test, test_damage = _test(path if with_scenes else None, named.get("test", ()), config)
    groups, group_damage = _groups(path / GROUPS) if with_scenes else ((), "")
    times = [t for t in (_number(e, "time") for e in events) if math.isfinite(t)]
    warnings = [_warning(event) for event in named.get("warning", ())]
    notes = [config_note, *warnings, _damage(METRICS, damaged), *eval_damage, test_damage, group_damage]
    return RunRecord(
        name=_title(path),
        path=path,
        config=config,
        steps=tuple(steps[key] for key in sorted(steps)),
        syncs=tuple(map(_sync, named.get("sync", ()))),
        evals=evals,
        test=test,
        timelines=tuple(timelines[key] for key in sorted(timelines)),
        groups=groups,
        spikes=_spikes(named.get("spike", ())),
        status=_status(events, config),
        data=_data(named["data"][-1]) if "data" in named else None,
        wall_s=max(times) - min(times) if times else math.nan,
        last_event_s=max(times) if times else None,
        notes=tuple(note for note in notes if note),
    )


def _title(path: Path) -> str:
    return path.resolve().name


def _rank(path: Path) -> tuple[bool, bool, str]:
    """Return the key by which the runs of a report are sorted: the folder `stage2` comes first, and `sft` last."""
    # `sft` comes last, because the other runs are compared with it.
    return (path.name == "sft", path.name != "stage2", path.name)


# ---- files ---------------------------------------------------------------------------------------------------------


def _eval_files(path: Path) -> Iterator[tuple[int, Path]]:
    folder = path / "eval"
    for file in sorted(folder.iterdir()) if folder.is_dir() else ():
        if name := EVAL_FILE.fullmatch(file.name):
            yield int(name[1]), file


def _read_jsonl(path: Path) -> tuple[list[Mapping[str, object]], int]:
    """Return the file's lines that are JSON objects, and the number of other lines. ([], 0) without the file."""
    if not path.is_file():
        return [], 0
    lines = [line for line in path.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()]
    found = mappings_in(lines)
    return found, len(lines) - len(found)


def mappings_in(lines: Iterable[str]) -> list[Mapping[str, object]]:
    """Return the JSON objects among the lines. Other lines are left out."""
    found: list[Mapping[str, object]] = []
    for line in lines:
        try:
            value = json_of(line)
        except ValueError:
            continue  # the line is damaged (the caller counts damaged lines)
        if isinstance(value, dict):
            found.append(value)
    return found


def _read_mapping(path: Path) -> tuple[Mapping[str, object], str]:
    """Return the mapping in a YAML or JSON file, and "". If there is none, return {} and a sentence that says why."""
    if not path.is_file():
        return {}, f"There is no {path.name}."
    try:
        value = yaml_of(path.read_text(encoding="utf-8"))
    except ValueError:
        return {}, f"{path.name} can't be read."
    return (value, "") if isinstance(value, dict) else ({}, f"{path.name} holds no mapping.")


def _damage(name: str, lines: int) -> str:
    return f"{name}: {lines} damaged line{'s' if lines > 1 else ''} left out." if lines else ""


# ---- events --------------------------------------------------------------------------------------------------------


def _number(fields: Mapping[str, object], key: str) -> float:
    """Return the number at `key` as a float; NaN if there is none."""
    value = fields.get(key)
    if isinstance(value, bool) or not isinstance(value, int | float):
        return math.nan
    try:
        return float(value)
    except OverflowError:  # an integer too large for a float
        return math.nan


def _count(fields: Mapping[str, object], key: str) -> int:
    value = _number(fields, key)
    return int(value) if math.isfinite(value) else 0


def _numbers(fields: object) -> dict[str, float]:
    if not isinstance(fields, Mapping):
        return {}
    values = {str(key): _number(fields, key) for key in fields}
    return {key: value for key, value in values.items() if math.isfinite(value)}


def _record(kind: type[R], event: Mapping[str, Any], **others: Any) -> R:
    """Return a record of type `kind`. The record's int and float fields are read from the event's fields of the same
    names; `others` are its other fields."""
    read: Mapping[object, Callable[[Mapping[str, object], str], float]] = {"int": _count, "float": _number}
    numbers: dict[str, Any] = {f.name: read[f.type](event, f.name) for f in fields(kind) if f.type in read}
    return kind(**numbers, **others)


def _step(event: Mapping[str, object]) -> StepResult:
    channel = "A" if event.get("channel") == "A" else "B"
    return _record(StepResult, event, channel=channel, metrics=_numbers(event.get("metrics")))


def _warning(event: Mapping[str, object]) -> str:
    what, steps = str(event.get("what", "")), _count(event, "steps")
    held = f", in {steps} steps in a row" if steps else ""
    return f"At step {_count(event, 'global_step')}: {what}{held}; {event.get('remedy', '')}"


def newest_scenes(run: RunRecord, most: int) -> tuple[int, list[Scene]]:
    """Return the step of the newest evaluation, and those of its first `most` scenes that can be drawn. (0, []) without
    an evaluation."""
    step, file = max(_eval_files(run.path), default=(0, None))
    if file is None:
        return 0, []
    with file.open(encoding="utf-8", errors="replace") as lines:
        read = map(read_scene, mappings_in(islice(lines, most)))
        return step, [scene for scene in read if scene is not None and _is_detection(run.config)]


def _is_detection(config: Mapping[str, object]) -> bool:
    """Return True if the run's task is detection. Scenes of other tasks are not drawn."""
    task = config.get("task")
    return not isinstance(task, Mapping) or task.get("type", "detection") == "detection"


def _status(events: Sequence[Mapping[str, object]], config: Mapping[str, object]) -> Status:
    """Return the run's state, from the events since it began or was last resumed."""
    # Earlier versions wrote no event `begin`; without it all events are used.
    begun = max((i for i, event in enumerate(events) if event.get("event") == "begin"), default=0)
    total, first, ended, because, times = 0, 0, "", "", []
    began_s = math.nan
    for event in events[begun:]:
        match event.get("event"):
            case "begin":
                total, first = _count(event, "total_steps"), _count(event, "global_step")
                began_s = _number(event, "time")
            case "end":
                ended, because = str(event.get("how", "")), str(event.get("because", ""))
            case "step":
                # A step after an end means that the run was resumed by a version that wrote no `begin`.
                ended = ""
                times.append(_number(event, "time"))
    training = config.get("training")
    settings = training if isinstance(training, Mapping) else {}
    times = [t for t in times if math.isfinite(t)]
    newest = times[-PACE_STEPS:]
    pace = (newest[-1] - newest[0]) / (len(newest) - 1) if len(newest) > 1 else math.nan
    minutes, seconds = _number(settings, "max_minutes"), max(times, default=began_s) - began_s
    by_time = ends_by_time(done=len(times), total_steps=total - first, seconds=seconds, minutes=minutes)
    return Status(
        total_steps=total or _count(settings, "max_steps"),
        ended=ended,
        because=because,
        seconds_per_step=pace,
        time_up_s=began_s + 60 * minutes if by_time else math.nan,
    )


def _spikes(events: Sequence[Mapping[str, object]]) -> tuple[SpikePoint, ...]:
    """Return the spikes of a run, without damaged ones. If a resumed run repeated a step, the step's last spikes are
    used."""
    found = {(point.global_step, point.metric): point for point in map(_spike, events)}
    return tuple(p for p in found.values() if math.isfinite(p.value) and math.isfinite(p.usual))


def _spike(event: Mapping[str, object]) -> SpikePoint:
    found, samples = event.get("samples"), []
    for line in found if isinstance(found, list) else ():
        if isinstance(line, Mapping):
            scene = read_scene({**line, "predictions": ()})
            row_loss = _number(line, "row_loss")
            samples.append(SpikeSample(sample_id=str(line.get("id", "")), row_loss=row_loss, scene=scene))
    return _record(SpikePoint, event, metric=str(event.get("metric", "")), samples=tuple(samples))


def _sync(event: Mapping[str, object]) -> SyncPoint:
    mode = "adapter" if event.get("mode") == "adapter" else "full"
    receipt = _record(SyncReceipt, event, mode=mode, fallback=str(event.get("fallback", "")))
    return SyncPoint(receipt=receipt, metrics=_numbers(event))


def _data(event: Mapping[str, object]) -> DataCounts:
    bad = event.get("bad_records")
    counts = {
        str(split): {str(kind): {a: int(n) for a, n in _numbers(actions).items()} for kind, actions in kinds.items()}
        for split, kinds in (bad.items() if isinstance(bad, Mapping) else ())
        if isinstance(kinds, Mapping)
    }
    return DataCounts(num_train=_count(event, "train"), num_evaluation=_count(event, "evaluation"), bad_records=counts)


def _timeline(event: Mapping[str, object]) -> StepTimeline:
    """Return a step's timeline. Spans that are not [lane, name, begin, end] are left out."""
    origin, activities = _number(event, "origin"), []
    spans = event.get("spans")
    for span in spans if isinstance(spans, list) else ():
        match span:
            case [str(lane), str(name), int() | float() as begin, int() | float() as end]:
                activities.append(Activity(lane, name, origin + begin, origin + end))
    end_s = origin + _number(event, "seconds")
    step = _count(event, "global_step")
    return StepTimeline(global_step=step, begin_s=origin, end_s=end_s, activities=tuple(activities))


def _evals(
    path: Path | None, events: Sequence[Mapping[str, object]], config: Mapping[str, object]
) -> tuple[tuple[EvalPoint, ...], list[str]]:
    """Return the evaluations in order of steps, and sentences about damaged files. `path` None: scenes are not read."""
    metrics = {_count(event, "global_step"): _numbers(event.get("metrics")) for event in events}
    scenes: dict[int, tuple[Scene, ...]] = {}
    notes: list[str] = []
    for step, file in _eval_files(path) if path else ():
        scenes[step], damage = _scenes(file, config)
        notes.append(damage)
    points = tuple(
        EvalPoint(global_step=step, metrics=metrics.get(step, {}), scenes=scenes.get(step, ()))
        for step in sorted(metrics.keys() | scenes.keys())
    )
    return points, notes


def _test(
    path: Path | None, events: Sequence[Mapping[str, object]], config: Mapping[str, object]
) -> tuple[EvalPoint | None, str]:
    """Return the evaluation on `data.test` (None: there is none), and a sentence about damage, or "". `path` None:
    scenes are not read."""
    if not events:
        return None, ""
    scenes, damage = _scenes(path / "eval" / "test.jsonl", config) if path else ((), "")
    metrics = _numbers(events[-1].get("metrics"))
    return EvalPoint(global_step=_count(events[-1], "global_step"), metrics=metrics, scenes=scenes), damage


def _scenes(file: Path, config: Mapping[str, object]) -> tuple[tuple[Scene, ...], str]:
    """Return the scenes in an evaluation's file, and a sentence about damaged lines, or "". For other tasks than
    detection there are no scenes."""
    is_detection = _is_detection(config)
    lines, damaged = _read_jsonl(file)
    read = [read_scene(line) for line in lines if is_detection]
    scenes = tuple(scene for scene in read if scene is not None)
    return scenes, _damage(f"eval/{file.name}", damaged + read.count(None))


def _groups(path: Path) -> tuple[tuple[GroupStep, ...], str]:
    """Return the rewards and groups in order of steps, and a sentence about damaged lines, or "". If a resumed run
    repeated a step, the step's last line is used."""
    lines, damaged = _read_jsonl(path)
    found = {step.global_step: step for step in map(_group_step, lines) if step is not None}
    unread = sum(_group_step(line) is None for line in lines)
    return tuple(found[key] for key in sorted(found)), _damage(path.name, damaged + unread)


def _group_step(line: Mapping[str, Any]) -> GroupStep | None:
    """Return the rewards and the answers in a line of `groups.jsonl`; None if the line is damaged or has no rewards."""
    try:
        rewards = tuple(float(reward) for group in line["rewards"] for reward in group)
        group = line.get("group", {})
        answers = [_scored_scene(group, one) for one in group.get("answers", ())]
        step = int(line["global_step"])
    # `int` raises OverflowError for Infinity, which Python's JSON may have.
    except (AttributeError, KeyError, OverflowError, TypeError, ValueError):
        return None
    if not rewards or not all(map(math.isfinite, rewards)):
        return None
    return GroupStep(global_step=step, rewards=rewards, answers=tuple(one for one in answers if one is not None))


def _scored_scene(group: Mapping[str, Any], answer: Mapping[str, Any]) -> ScoredScene | None:
    """Return an answer of a group, with the fields of `group` that all its answers share; None if it cannot be
    drawn."""
    scene = read_scene({**group, **answer})
    if scene is None:
        return None
    by_object = tuple(float(value) for value in answer.get("by_object", ()))
    return ScoredScene(
        scene=scene,
        reward=float(answer["reward"]),
        advantage=float(answer["advantage"]),
        by_object=by_object if len(by_object) == len(scene.predictions) else (),
    )


def read_scene(line: Mapping[str, Any]) -> Scene | None:
    """Return the scene in a parsed line of an evaluation's file; None if a field is missing or damaged."""
    try:
        truth, ignored, predictions = (
            tuple(map(read_object, objects))
            for objects in (line["truth"], line.get("ignored", ()), line["predictions"])
        )
        sheet = read_sheet(line, (*truth, *ignored, *predictions))
        width, height = sheet.size if sheet else (int(line["width"]), int(line["height"]))
        scene = Scene(
            scene_id=str(line["id"]),
            images=tuple(map(str, line["images"])),
            width=min(width, _LARGEST_BIN),
            height=min(height, _LARGEST_BIN),
            truth=truth,
            ignored=ignored,
            predictions=predictions,
            num_dropped=sum(int(count) for count in line.get("drops", {}).values()),
            truncated=bool(line.get("truncated")),
            sheet=sheet,
        )
    except (AttributeError, KeyError, OverflowError, TypeError, ValueError):
        return None
    return scene if scene.width > 0 and scene.height > 0 else None


def read_object(fields: Mapping[str, Any]) -> DetectionObject:
    """Return the object that is stored with these fields. Raises KeyError, TypeError or ValueError if they are
    damaged."""
    kind = _KINDS[0] if _KINDS[0] in fields else _KINDS[1]
    bins = tuple(int(b) for b in fields[kind])
    if not arity_is_right(kind, bins):
        raise ValueError(f"{kind} of {len(bins)} numbers")
    if max(map(abs, bins)) > _LARGEST_BIN:
        raise ValueError(f"{kind} far outside the image")
    image = int(fields["image"]) if "image" in fields else None
    return DetectionObject(desc=str(fields["desc"]), kind=kind, bins=bins, image=image)


def read_sheet(fields: Mapping[str, Any], objects: Iterable[DetectionObject]) -> Sheet | None:
    """Return the sheet on which a scene's images are drawn; None if the scene has one image.

    Raises TypeError or ValueError if the images' sizes are damaged, or if an object is in none of the images.
    """
    sizes = [(int(width), int(height)) for width, height in fields.get("sizes", ())]
    if not all(0 < side <= _LARGEST_BIN for size in sizes for side in size):
        raise ValueError("an image without an area, or a very large one")
    known = range(1, len(sizes) + 1) if sizes else (None,)
    if not all(obj.image in known for obj in objects):
        raise ValueError("an object in no image")
    return Sheet.of(sizes) if sizes else None
