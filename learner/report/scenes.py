"""Test scenes: images with ground truth and predictions drawn over them, the same scene side by side per evaluation.

In: evaluations of the same test set. Out: a `Gallery` for `templates/scenes.html`. Shown are the scenes that improved
most, those that improved least, and a few drawn at random with a fixed seed. A scene is shown once.

Images are read as the runs read them (D13): upright by their EXIF orientation. They travel in the page as data URIs:
PNG for small ones, shown with hard pixels, and JPEG of at most MAX_SIDE pixels for others. Every image is decoded and
written anew, so nothing of the source's bytes reaches the page. URLs are not fetched.
"""

from __future__ import annotations

import base64
import io
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePath

from learner.records import DetectionObject
from learner.report.read import EvalPoint, Run, Scene
from learner.report.scores import Outcome, Progress, classify
from shared.errors import MediaError
from shared.images import ImageRules, Images

PER_GROUP = 4  # an even number: scenes with two panels stand in pairs
MAX_SIDE, SMALL_SIDE = 720, 256  # pixels
MAX_PIXELS = 100_000_000
_COLORS: Mapping[Outcome, str] = {
    "correct": "hit",
    "wrong_class": "class",
    "false_positive": "spurious",
    "ignored": "ignored",
}
LEGEND = {
    "truth": "ground truth",
    "missed": "ground truth, missed",
    "hit": "prediction, correct",
    "class": "prediction, wrong class",
    "spurious": "prediction, false positive",
    "region": "ignore region",
    "ignored": "prediction in an ignore region, not counted",
}
_OF_REGIONS = ("region", "ignored")  # explained only where there are some


@dataclass(frozen=True, kw_only=True, slots=True)
class Picture:
    """An image as a data URI. `small`: few pixels, so it is enlarged without smoothing."""

    uri: str
    small: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class Panel:
    """A scene as one evaluation saw it. `shapes` are its objects, as (color, tooltip, object)."""

    name: str
    scene: Scene
    f1: float
    counts: Sequence[str]
    shapes: Sequence[tuple[str, str, DetectionObject]]


@dataclass(frozen=True, kw_only=True, slots=True)
class SceneRow:
    """One scene, a panel per evaluation. `file` is its image's name, `gain` what F1 gained between the first two."""

    scene_id: str
    file: str
    picture: Picture | None
    panels: Sequence[Panel]
    gain: float | None


@dataclass(frozen=True, kw_only=True, slots=True)
class Gallery:
    """`groups` are (heading, scenes)."""

    lead: str
    groups: Sequence[tuple[str, Sequence[SceneRow]]]
    legend: Mapping[str, str]


def gallery(runs: Sequence[Progress]) -> Gallery | None:
    """The chosen scenes of the main run before training, and of every run after it."""
    main = runs[0]
    before, after = _by_id(main.before), _by_id(main.after)
    count = PER_GROUP if len(runs) == 1 else PER_GROUP - 1
    chosen = choose_scenes(before, after or None, count=count) if before else []
    if not chosen:
        return None
    first = f"step {main.before.global_step if main.before else 0}"
    evaluations = [("Before" if after else first.capitalize(), before)]
    for run in runs:
        if scenes := _by_id(run.after):
            evaluations.append(("After" if len(runs) == 1 else f"After {run.run.name}", scenes))
    roots = image_roots(main.run)
    when = "before and after training" if after else f"at {first}"
    groups = [(heading, [_row(key, evaluations, roots) for key in keys]) for heading, keys in chosen]
    lead = f"Scenes of the test set as the model answered them, greedily, {when}."
    if after:
        gains = [_gain(before[key], after[key]) for key in before.keys() & after.keys()]
        better, worse = sum(gain > 0 for gain in gains), sum(gain < 0 for gain in gains)
        same, model = len(gains) - better - worse, "" if len(runs) == 1 else f" after {main.run.name}"
        lead += f" Of {len(gains)}, {better} are better{model}, {worse} are worse and {same} are the same."
    has_regions = any(scene.ignored for scene in before.values())
    legend = {color: name for color, name in LEGEND.items() if has_regions or color not in _OF_REGIONS}
    return Gallery(lead=lead, groups=groups, legend=legend)


def choose_scenes(
    before: Mapping[str, Scene], after: Mapping[str, Scene] | None, *, count: int = PER_GROUP
) -> list[tuple[str, list[str]]]:
    """(heading, at most `count` scene ids) per group: those that improved most, those that improved least, and a random
    few. A scene that did not improve is never among the first. With one evaluation: the best and the worst instead."""
    if after is None:
        score = {key: classify(scene).f1 for key, scene in before.items()}
        best, worst = "Best answers", "Worst answers"
    else:
        score = {key: _gain(scene, after[key]) for key, scene in before.items() if key in after}
        best, worst = "Most improved", "Least improved"
    size = {key: len(before[key].truth) for key in score}
    ranked = sorted(score, key=lambda key: (-score[key], -size[key], key))
    top = [key for key in ranked[:count] if after is None or score[key] > 0]
    bottom = sorted(ranked[len(top) :], key=lambda key: (score[key], -size[key], key))[:count]
    rest = [key for key in ranked if key not in top and key not in bottom]
    drawn = random.Random(0).sample(sorted(rest), min(count, len(rest)))
    return [(name, keys) for name, keys in ((best, top), (worst, bottom), ("At random", drawn)) if keys]


def _gain(before: Scene, after: Scene) -> float:
    return classify(after).f1 - classify(before).f1


def _by_id(point: EvalPoint | None) -> dict[str, Scene]:
    return {scene.scene_id: scene for scene in point.scenes} if point else {}


def _row(scene_id: str, evaluations: Sequence[tuple[str, Mapping[str, Scene]]], roots: Sequence[Path]) -> SceneRow:
    panels = [_panel(name, scenes[scene_id]) for name, scenes in evaluations if scene_id in scenes]
    images = panels[0].scene.images
    return SceneRow(
        scene_id=scene_id,
        file=_file_name(images),
        picture=load_picture(images[0], roots) if images else None,
        panels=panels,
        gain=panels[1].f1 - panels[0].f1 if len(panels) == 2 else None,
    )


def _file_name(images: Sequence[str]) -> str:
    """The file name of the first image. An image inside the annotations has none."""
    if not images:
        return "no image named"
    first = images[0]
    name = "image in the annotations" if first.startswith("data:") or len(first) > 1024 else PurePath(first).name
    return name if len(images) == 1 else f"{name} and {len(images) - 1} more"


def _panel(name: str, scene: Scene) -> Panel:
    counts, shapes = shapes_of_scene(scene)
    return Panel(name=name, scene=scene, f1=classify(scene).f1, counts=counts, shapes=shapes)


def shapes_of_scene(
    scene: Scene, advantages: Sequence[float] = ()
) -> tuple[list[str], list[tuple[str, str, DetectionObject]]]:
    """What was found, in words, and the scene's objects as (color, tooltip, object). `advantages` are those of the
    predictions, for the tooltips."""
    result = classify(scene)
    found, wrong, false = (result.outcomes.count(o) for o in ("correct", "wrong_class", "false_positive"))
    ignored = result.outcomes.count("ignored")
    others = ((wrong, "wrong class"), (false, "false positive"), (ignored, "ignored"), (scene.num_dropped, "dropped"))
    counts = [f"{found} of {len(scene.truth)} found", *(f"{count} {what}" for count, what in others if count)]
    counts += ["cut off"] if scene.truncated else []
    shapes = [_shape("region", region) for region in scene.ignored]
    shapes += [_shape("truth" if i in result.found else "missed", o) for i, o in enumerate(scene.truth)]
    earned = [f", advantage {value:+.3f}" for value in advantages] or [""] * len(scene.predictions)
    for item, outcome, iou, tip in zip(scene.predictions, result.outcomes, result.ious, earned, strict=True):
        shapes.append(_shape(_COLORS[outcome], item, f", IoU {iou:.2f}{tip}"))
    return counts, shapes


def _shape(color: str, item: DetectionObject, detail: str = "") -> tuple[str, str, DetectionObject]:
    return color, f"{LEGEND[color]}: {item.desc or 'any class'}{detail}", item


def image_roots(run: Run) -> list[Path]:
    """Where a relative image path may start: the configured root, the annotations' folder, here, the run's folder."""
    configured = run.setting("data", "image_root")
    annotations = [run.setting("data", split) for split in ("test", "val", "train")]
    roots = [Path(configured)] if isinstance(configured, str) else []
    return [*roots, *(Path(a).parent for a in annotations if isinstance(a, str)), Path(), run.path]


def load_picture(image: str, roots: Sequence[Path]) -> Picture | None:
    """An image string as a picture, or None if it is not available. A relative path is looked for under each root in
    turn."""
    images = Images(ImageRules(max_pixels=MAX_PIXELS))
    for root in roots:
        try:
            picture = images.load(images.resolve(image, root))
        except MediaError:
            continue  # if it is nowhere, the page shows the scene without it and says so
        small = max(picture.size) <= SMALL_SIDE
        buffer = io.BytesIO()
        if small:
            picture.save(buffer, "PNG", optimize=True)
        else:
            picture.thumbnail((MAX_SIDE, MAX_SIDE))
            picture.save(buffer, "JPEG", quality=85)
        kind = "png" if small else "jpeg"
        return Picture(uri=f"data:image/{kind};base64,{base64.b64encode(buffer.getvalue()).decode()}", small=small)
    return None
