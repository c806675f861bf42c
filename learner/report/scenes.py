"""Makes the report's gallery of scenes: images with labels and predictions drawn over them.

In: evaluations of the same scenes. Out: a `Gallery` for `templates/scenes.html`, with a scene's evaluations side by
side. The gallery shows the scenes whose F1 changed most, the scenes with the lowest and the highest F1, a few random
scenes, and some of every frequent class. Each scene is on the page once; filters show a part of the scenes.

Images are read as in training (D13): upright by their EXIF orientation. Images are in the page as data URIs: small
images as PNG, which browsers enlarge without smoothing, others as JPEG of at most MAX_SIDE pixels. Every image is
decoded and encoded again, so no byte of the source file reaches the page. URLs are not fetched.
"""

from __future__ import annotations

import base64
import io
import random
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePath

from PIL import Image

from learner.records import DetectionObject
from learner.report.records import EvalPoint, RunRecord, Scene
from learner.report.results import split_of
from learner.report.scores import Outcome, Progress, classify
from learner.report.sheet import Sheet
from shared.errors import MediaError
from shared.images import ImageRules, Images

# Max scenes of a filter; min scenes of a class's filter. PER_FILTER and PER_CLASS are even, because scenes with two
# panels are shown in pairs.
PER_FILTER, PER_CLASS = 8, 4
MAX_CLASSES, MAX_SCENES = 12, 48  # max classes with a filter; max scenes on the page

# Width of a drawing, height of a tag, width of its letters (all in drawing units); max letters of a tag.
DRAWING, TAG_HEIGHT, TAG_LETTER, MAX_TAG = 300.0, 14.0, 7.0, 18
# Images with a side above MAX_SIDE pixels are reduced. The page asks browsers not to smooth an image that they enlarge,
# if its longer side is at most SMALL_SIDE.
MAX_SIDE, SMALL_SIDE = 720, 256
MAX_PIXELS = 100_000_000  # an image with more pixels is not shown
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
    "label": "label",
    "region": "ignore region",
    "ignored": "prediction in an ignore region, not counted",
}
_OF_SCENES = ("truth", "missed", "hit", "class", "spurious", "region", "ignored")
_OF_REGIONS = ("region", "ignored")  # entries of the legend that are shown only if a scene has ignore regions


@dataclass(frozen=True, kw_only=True, slots=True)
class Picture:
    """An image as a data URI. `small`: True if the sides have at most SMALL_SIDE pixels. Browsers enlarge small
    pictures without smoothing."""

    uri: str
    small: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class Panel:
    """The answer to a scene in one evaluation, as the page shows it. `shapes`: the objects to draw, as (color, tooltip,
    object)."""

    name: str  # name of the evaluation in the panel's title
    scene: Scene
    f1: float  # F1 at IoU 0.5 of this scene alone
    counts: Sequence[str]  # short texts with numbers of right and wrong objects
    shapes: Sequence[tuple[str, str, DetectionObject]]


@dataclass(frozen=True, kw_only=True, slots=True)
class SceneRow:
    """One scene, with a panel per evaluation. `file`: name of its image. `gain`: its F1 in the second evaluation minus
    its F1 in the first; None unless there are two."""

    scene_id: str
    file: str
    picture: Picture | None
    panels: Sequence[Panel]
    gain: float | None


@dataclass(frozen=True, kw_only=True, slots=True)
class Filter:
    """The scenes that the page shows, in this order, when the user chooses this filter. `ident` is used in HTML ids."""

    ident: str
    name: str
    scene_ids: Sequence[str]


@dataclass(frozen=True, kw_only=True, slots=True)
class Gallery:
    """The scenes of the page, and the filters by which the user chooses some of them. `lead`: the text above the
    scenes."""

    lead: str
    filters: Sequence[Filter]
    rows: Sequence[SceneRow]
    legend: Mapping[str, str]


@dataclass(frozen=True, kw_only=True, slots=True)
class Tag:
    """A class name that is written over a drawing. `x`, `y` (left upper corner) and `width` are in drawing units."""

    text: str
    color: str
    x: float
    y: float
    width: float


def gallery(runs: Sequence[Progress]) -> Gallery | None:
    """Return the gallery. A scene has a panel for the main run before training, and one for each run after training.
    None without scenes."""
    before, after = _by_id(runs[0].before), _by_id(runs[0].after)
    return gallery_of(_evaluations(runs), image_roots(runs[0].run), _lead(runs, before, after))


def gallery_of(
    evaluations: Sequence[tuple[str, Mapping[str, Scene]]], roots: Sequence[Path], lead: str
) -> Gallery | None:
    """Return a gallery of the named evaluations (scenes by id). The scenes are chosen by their F1 in the first two
    evaluations. `roots`: folders of the images. `lead`: the text above the scenes. None if there is nothing to show."""
    before, after = evaluations[0][1], evaluations[1][1] if len(evaluations) > 1 else {}
    chosen = choose_scenes(before, after or None) if before else {}
    if not chosen:
        return None
    chosen |= choose_by_class(after or before, [key for _, keys in chosen.values() for key in keys])
    rows = {
        key: _row(key, evaluations, roots) for key in dict.fromkeys(key for _, keys in chosen.values() for key in keys)
    }
    filters = [Filter(ident=ident, name=name, scene_ids=keys) for ident, (name, keys) in chosen.items()]
    has_regions = any(scene.ignored for scene in before.values())
    legend = {c: LEGEND[c] for c in _OF_SCENES if has_regions or c not in _OF_REGIONS}
    return Gallery(lead=lead, filters=filters, rows=list(rows.values()), legend=legend)


def newest(run: RunRecord, step: int, scenes: Sequence[Scene]) -> list[SceneRow]:
    """Return these scenes of the evaluation at `step` as rows, for the live page."""
    known = {scene.scene_id: scene for scene in scenes}
    return [_row(key, [(f"Step {step}", known)], image_roots(run)) for key in known]


def _evaluations(runs: Sequence[Progress]) -> list[tuple[str, Mapping[str, Scene]]]:
    """Return the evaluations to show, as (name, scenes by id): the main run's first one, and each run's last one."""
    main = runs[0]
    first = "Before" if main.after else f"Step {main.before.global_step if main.before else 0}"
    found: list[tuple[str, Mapping[str, Scene]]] = [(first, _by_id(main.before))]
    for run in runs:
        if scenes := _by_id(run.after):
            found.append(("After" if len(runs) == 1 else f"After {run.run.name}", scenes))
    return found


def _lead(runs: Sequence[Progress], before: Mapping[str, Scene], after: Mapping[str, Scene]) -> str:
    main = runs[0]
    first = f"step {main.before.global_step if main.before else 0}"
    when = "before and after training" if after else f"at {first}"
    lead = f"Scenes of the {split_of(main.run)} set as the model answered them, greedily, {when}."
    if after:
        gains = [_gain(before[key], after[key]) for key in before.keys() & after.keys()]
        better, worse = sum(gain > 0 for gain in gains), sum(gain < 0 for gain in gains)
        same, model = len(gains) - better - worse, "" if len(runs) == 1 else f" after {main.run.name}"
        lead += f" Of {len(gains)} scenes{model}, better: {better}, worse: {worse}, the same: {same}."
    return lead


def choose_scenes(before: Mapping[str, Scene], after: Mapping[str, Scene] | None) -> dict[str, tuple[str, list[str]]]:
    """Return the filters, as ident -> (name, ids of scenes in the order to show). `worst` and `best` are chosen by F1
    of the last evaluation, `changed` by the change of F1 (rise or fall). `random` is sampled with a fixed seed."""
    shown = before if after is None else {key: after[key] for key in before if key in after}
    f1 = {key: classify(scene).f1 for key, scene in shown.items()}
    size = {key: len(scene.truth) for key, scene in shown.items()}
    ranked = sorted(f1, key=lambda key: (f1[key], -size[key], key))
    found = {}
    if after is not None:
        gain = {key: _gain(before[key], after[key]) for key in shown}
        moved = sorted((key for key in gain if gain[key]), key=lambda key: (-abs(gain[key]), -size[key], key))
        found["changed"] = ("Most changed", moved[:PER_FILTER])
    found["worst"] = ("Worst", [key for key in ranked if f1[key] < 1][:PER_FILTER])
    best = sorted((key for key in f1 if f1[key] > 0), key=lambda key: (-f1[key], -size[key], key))
    found["best"] = ("Best", best[:PER_FILTER])
    found["random"] = ("At random", random.Random(0).sample(sorted(f1), min(PER_FILTER, len(f1))))
    return {ident: (name, keys) for ident, (name, keys) in found.items() if keys}


def choose_by_class(scenes: Mapping[str, Scene], chosen: Sequence[str]) -> dict[str, tuple[str, list[str]]]:
    """Return a filter for each of the most frequent classes, as `choose_scenes` does. A filter has all `chosen` scenes
    with a label or prediction of the class. If there are fewer than PER_CLASS of them, other scenes with the class are
    added, with the lowest F1 first."""
    classes = {key: {item.desc for item in (*scene.truth, *scene.predictions)} for key, scene in scenes.items()}
    frequent = Counter(item.desc for scene in scenes.values() for item in scene.truth).most_common(MAX_CLASSES)
    if len(frequent) < 2:
        return {}
    f1 = {key: classify(scene).f1 for key, scene in scenes.items()}
    shown, found = set(chosen), {}
    for i, (name, _) in enumerate(sorted(frequent)):
        having = sorted((key for key in classes if name in classes[key]), key=lambda key: (f1[key], key))
        kept = [key for key in having if key in shown]
        room = max(0, min(PER_CLASS - len(kept), MAX_SCENES - len(shown)))
        kept += [key for key in having if key not in shown][:room]
        shown.update(kept)
        found[f"class-{i}"] = (name, sorted(kept, key=lambda key: (f1[key], key)))
    return found


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
        picture=load_picture(images, roots, panels[0].scene.sheet),
        panels=panels,
        gain=panels[1].f1 - panels[0].f1 if len(panels) == 2 else None,
    )


def _file_name(images: Sequence[str]) -> str:
    """Return the file name of a scene's first image, or a fixed text if the image is in the annotations themselves, and
    the number of further images."""
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
    """Return short texts with the numbers of right and wrong objects, and the scene's objects to draw, as (color,
    tooltip, object). `advantages`: one per prediction, shown in its tooltip; empty: none are shown."""
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
    return counts, [(color, tip, scene.drawn(item)) for color, tip, item in shapes]


def shapes_of_labels(scene: Scene) -> list[tuple[str, str, DetectionObject]]:
    """Return a scene's labels and ignore regions to draw, as (color, tooltip, object)."""
    shapes = [_shape("region", region) for region in scene.ignored] + [_shape("label", item) for item in scene.truth]
    return [(color, tip, scene.drawn(item)) for color, tip, item in shapes]


def _shape(color: str, item: DetectionObject, detail: str = "") -> tuple[str, str, DetectionObject]:
    return color, f"{LEGEND[color]}: {item.desc or 'any class'}{detail}", item


def place_tags(shapes: Sequence[tuple[str, str, DetectionObject]], height: float) -> list[Tag]:
    """Return the tags (class names) to write over a drawing of DRAWING x `height` units. No tag covers another: each is
    put at the first free position around its object, beginning with wrong predictions and missed objects. Without a
    free position an object has no tag, only a tooltip."""
    # `order` leaves out labels that were found, because their predictions have a tag already.
    order = ("class", "spurious", "missed", "label", "hit", "kept", "ignored")
    tags: list[Tag] = []
    for color, _, item in sorted((s for s in shapes if s[0] in order), key=lambda shape: order.index(shape[0])):
        text = item.desc if len(item.desc) <= MAX_TAG else f"{item.desc[: MAX_TAG - 1]}…"
        width = TAG_LETTER * len(text) + 7
        for x, y in _places(item, height, width, below_first=color == "missed"):
            if not any(abs(x - t.x) < (width if x < t.x else t.width) and abs(y - t.y) < TAG_HEIGHT for t in tags):
                tags.append(Tag(text=text, color=color, x=x, y=y, width=width))
                break
    return tags


def _places(item: DetectionObject, height: float, width: float, *, below_first: bool) -> Iterator[tuple[float, float]]:
    """Yield positions for an object's tag, as the tag's left upper corner: above and below the object, inside its upper
    and lower edge, next to the object. `below_first`: the position below comes before the position above."""
    xs, ys = item.bins[::2], item.bins[1::2]
    left, right = min(xs) * DRAWING / 999, max(xs) * DRAWING / 999
    top, bottom = min(ys) * height / 999, max(ys) * height / 999
    rows = (bottom, top - TAG_HEIGHT) if below_first else (top - TAG_HEIGHT, bottom)
    wanted = [(x, y) for y in rows for x in (left, right - width)]
    wanted += [(left, top), (left, bottom - TAG_HEIGHT), (right, top), (left - width, top)]
    wanted += [(right, bottom - TAG_HEIGHT), (left - width, bottom - TAG_HEIGHT)]
    for x, y in wanted:
        yield max(0.0, min(x, DRAWING - width)), max(0.0, min(y, height - TAG_HEIGHT))


def image_roots(run: RunRecord) -> list[Path]:
    """Return the folders in which an image with a relative path may be: `data.image_root`, the folders of the
    annotations, the working directory, the run's folder."""
    configured = run.setting("data", "image_root")
    annotations = [run.setting("data", split) for split in ("test", "val", "train")]
    roots = [Path(configured)] if isinstance(configured, str) else []
    return [*roots, *(Path(a).parent for a in annotations if isinstance(a, str)), Path(), run.path]


def load_picture(images: Sequence[str], roots: Sequence[Path], sheet: Sheet | None = None) -> Picture | None:
    """Return a picture of a scene's first image, or, with a `sheet`, of all its images. None if no image can be read. A
    relative path is tried in each of the folders `roots`, in order."""
    if sheet is None:
        picture = _opened(images[0], roots) if images else None
        return None if picture is None else _embedded(picture)
    opened = [_opened(image, roots) for image in images]
    if not any(opened):
        return None
    whole = Image.new("RGB", sheet.size, "white")
    for picture, place in zip(opened, sheet.places, strict=False):
        if picture is not None:
            whole.paste(picture.resize((place[2] - place[0], place[3] - place[1])), place[:2])
    return _embedded(whole)


def _opened(image: str, roots: Sequence[Path]) -> Image.Image | None:
    images = Images(ImageRules(max_pixels=MAX_PIXELS))
    for root in roots:
        try:
            return images.load(images.resolve(image, root))
        except MediaError:
            # The image may be in the next folder. If the image is in no folder, the page says so.
            continue
    return None


def _embedded(picture: Image.Image) -> Picture:
    small = max(picture.size) <= SMALL_SIDE
    # The picture is encoded anew, so no byte of its file reaches the page.
    buffer = io.BytesIO()
    if small:
        picture.save(buffer, "PNG", optimize=True)
    else:
        picture.thumbnail((MAX_SIDE, MAX_SIDE))
        picture.save(buffer, "JPEG", quality=85)
    kind = "png" if small else "jpeg"
    return Picture(uri=f"data:image/{kind};base64,{base64.b64encode(buffer.getvalue()).decode()}", small=small)
