"""Test scenes with ground truth and predictions drawn over the image, the same scene side by side for every evaluation.

In: evaluations of the same test set. Out: rows of panels. Shown are the scenes that improved most, those that improved
least, and a few drawn at random with a fixed seed; a scene is shown once.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from learner.records import DetectionObject
from learner.report.markup import Html, el, join
from learner.report.pictures import Picture
from learner.report.scenes import Scene, Verdict, judge

PANEL = 300.0  # drawing units across; about one pixel each
PER_GROUP = 4  # an even number: scenes with two panels stand in pairs
_TONES: Mapping[Verdict, str] = {"correct": "hit", "wrong_class": "class", "false_positive": "spurious"}
LEGEND = (
    ("truth", "ground truth"),
    ("missed", "ground truth, missed"),
    ("hit", "prediction, correct"),
    ("class", "prediction, wrong class"),
    ("spurious", "prediction, false positive"),
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Panel:
    """One column of the gallery: an evaluation and what to call it."""

    name: str
    scenes: Mapping[str, Scene]


Chosen = list[tuple[str, list[str]]]


def choose_scenes(before: Mapping[str, Scene], after: Mapping[str, Scene] | None, *, count: int = PER_GROUP) -> Chosen:
    """(heading, `count` scene ids) per group. With one evaluation: the best, the worst and a random few."""
    if after is None:
        score = {key: judge(scene).f1 for key, scene in before.items()}
        best, worst = "Best answers", "Worst answers"
    else:
        score = {key: judge(after[key]).f1 - judge(scene).f1 for key, scene in before.items() if key in after}
        best, worst = "Most improved", "Least improved"
    size = {key: len(before[key].truth) for key in score}
    ranked = sorted(score, key=lambda key: (-score[key], -size[key], key))
    top = ranked[:count]
    bottom = sorted(ranked[count:], key=lambda key: (score[key], -size[key], key))[:count]
    rest = [key for key in ranked if key not in top and key not in bottom]
    drawn = random.Random(0).sample(sorted(rest), min(count, len(rest)))
    return [(name, keys) for name, keys in ((best, top), (worst, bottom), ("At random", drawn)) if keys]


def gallery(chosen: Chosen, panels: Sequence[Panel], load: Callable[[Scene], Picture | None]) -> Html:
    """All groups. `load` finds a scene's picture."""
    legend = el("div", *(el("span", el("i", cls=f"box x-{t}"), name, cls="key") for t, name in LEGEND), cls="legend")
    shape = "scenes" if len(panels) > 2 else "scenes pairs"
    groups = []
    for group, (heading, keys) in enumerate(chosen):
        rows = [_row(key, f"image-{group}-{index}", panels, load) for index, key in enumerate(keys)]
        groups.append(el("section", el("h3", heading), el("div", *rows, cls=shape)))
    return join(legend, *groups)


def _row(key: str, ident: str, panels: Sequence[Panel], load: Callable[[Scene], Picture | None]) -> Html:
    shown = [(panel.name, panel.scenes[key]) for panel in panels if key in panel.scenes]
    picture = load(shown[0][1])
    place = el("div", el("b", key), _plural(len(shown[0][1].truth), "object"), cls="scene-name")
    cells = []
    for index, (name, scene) in enumerate(shown):
        base = _image(scene, picture, ident) if index == 0 else _again(picture, ident)
        cells.append(_panel(name, scene, base))
    return el("div", place, el("div", *cells, cls="panels"), cls="scene")


def _panel(name: str, scene: Scene, base: Html | None) -> Html:
    verdict = judge(scene)
    found, wrong, false = (verdict.verdicts.count(v) for v in ("correct", "wrong_class", "false_positive"))
    others = ((wrong, "wrong class"), (false, "false positive"), (scene.num_dropped, "dropped"))
    counts = [f"{found} of {len(scene.truth)} found", *(f"{count} {what}" for count, what in others if count)]
    counts += ["cut off"] if scene.truncated else []
    title = f"Scene {scene.scene_id}, {name}: {', '.join(counts)}"
    height = PANEL * scene.height / scene.width
    drawn = [_shape(o, height, "truth" if i in verdict.found else "missed") for i, o in enumerate(scene.truth)]
    for i, item in enumerate(scene.predictions):
        drawn.append(_shape(item, height, _TONES[verdict.verdicts[i]], f", IoU {verdict.ious[i]:.2f}"))
    return el(
        "figure",
        el(
            "svg",
            el("title", title),
            base or _absent(scene, height),
            *(outline for outline, _ in drawn),
            *(tag for _, tag in drawn),  # above all outlines, so that they can be read
            viewBox=f"0 0 {PANEL:.0f} {height:.0f}",
            role="img",
            aria_label=title,
        ),
        el("figcaption", el("b", name), el("span", f"F1 {verdict.f1:.2f}"), el("small", " · ".join(counts))),
        cls="panel",
    )


def _shape(item: DetectionObject, height: float, tone: str, detail: str = "") -> tuple[Html, Html | None]:
    """One object: its outline with a tooltip, and its description on a tag. Truth that was found needs no tag."""
    xs = [b / 999 * PANEL for b in item.bins[0::2]]
    ys = [b / 999 * height for b in item.bins[1::2]]
    if item.kind == "bbox_2d":
        box = {"x": xs[0], "y": ys[0], "width": max(0.5, xs[1] - xs[0]), "height": max(0.5, ys[1] - ys[0])}
        lines = [el("rect", cls=c, **box) for c in ("halo", f"o-{tone}")]
    else:
        points = " ".join(f"{x:.1f},{y:.1f}" for x, y in zip(xs, ys, strict=True))
        lines = [el("polygon", cls=c, points=points) for c in ("halo", f"o-{tone}")]
    outline = el("g", el("title", f"{dict(LEGEND)[tone]}: {item.desc}{detail}"), *lines)
    return outline, None if tone == "truth" else _tag(item.desc, xs, ys, height, tone)


def _tag(desc: str, xs: Sequence[float], ys: Sequence[float], height: float, tone: str) -> Html:
    """Predictions carry it above, missed truth below."""
    text = desc if len(desc) <= 18 else f"{desc[:17]}…"
    width, tall = 7.0 * len(text) + 7, 14.0
    x = min(max(0.0, min(xs)), PANEL - width)
    y = max(ys) if tone == "missed" else min(ys) - tall
    y = min(max(0.0, y), height - tall)
    return el(
        "g",
        el("rect", cls=f"t-{tone}", x=x, y=y, width=width, height=tall),
        el("text", text, cls="tag", x=x + width / 2, y=y + 10.6),
    )


def _plural(count: int, noun: str) -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def _image(scene: Scene, picture: Picture | None, ident: str) -> Html | None:
    if picture is None:
        return None
    return el(
        "image",
        id=ident,
        href=picture.uri,
        width=PANEL,
        height=PANEL * scene.height / scene.width,
        preserveAspectRatio="none",
        cls="small" if picture.small else None,
    )


def _again(picture: Picture | None, ident: str) -> Html | None:
    """The same image once more, without a second copy of its bytes."""
    return el("use", href=f"#{ident}") if picture else None


def _absent(scene: Scene, height: float) -> Html:
    name = scene.images[0] if scene.images else "no image named"
    short = name if len(name) <= 44 else f"…{name[-43:]}"
    return join(
        el("rect", cls="absent", width=PANEL, height=height),
        el("text", "image not available", cls="tick mid", x=PANEL / 2, y=height / 2 - 4),
        el("text", short, cls="tick mid", x=PANEL / 2, y=height / 2 + 12),
    )
