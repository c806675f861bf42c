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

PANEL = 360.0  # drawing units across; about one pixel each
PER_GROUP = 3
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


def choose_scenes(before: Mapping[str, Scene], after: Mapping[str, Scene] | None) -> Chosen:
    """(heading, scene ids) per group. With one evaluation: the best, the worst and a random few."""
    if after is None:
        score = {key: judge(scene).f1 for key, scene in before.items()}
        best, worst = "Best answers", "Worst answers"
    else:
        score = {key: judge(after[key]).f1 - judge(scene).f1 for key, scene in before.items() if key in after}
        best, worst = "Most improved", "Least improved"
    size = {key: len(before[key].truth) for key in score}
    ranked = sorted(score, key=lambda key: (-score[key], -size[key], key))
    top = ranked[:PER_GROUP]
    bottom = sorted(ranked[PER_GROUP:], key=lambda key: (score[key], -size[key], key))[:PER_GROUP]
    rest = [key for key in ranked if key not in top and key not in bottom]
    drawn = random.Random(0).sample(sorted(rest), min(PER_GROUP, len(rest)))
    return [(name, keys) for name, keys in ((best, top), (worst, bottom), ("At random", drawn)) if keys]


def gallery(chosen: Chosen, panels: Sequence[Panel], load: Callable[[Scene], Picture | None]) -> Html:
    """All groups. `load` finds a scene's picture."""
    legend = el("div", *(el("span", el("i", cls=f"box x-{t}"), name, cls="key") for t, name in LEGEND), cls="legend")
    groups = [
        el(
            "section",
            el("h3", name),
            *(_row(k, f"image-{g}-{i}", panels, load) for i, k in enumerate(keys)),
            cls="group",
        )
        for g, (name, keys) in enumerate(chosen)
    ]
    return join(legend, *groups)


def _row(key: str, ident: str, panels: Sequence[Panel], load: Callable[[Scene], Picture | None]) -> Html:
    shown = [(panel.name, panel.scenes[key]) for panel in panels if key in panel.scenes]
    picture = load(shown[0][1])
    place = el("div", el("b", key), f"{len(shown[0][1].truth)} objects", cls="scene-name")
    cells = []
    for index, (name, scene) in enumerate(shown):
        base = _image(scene, picture, ident) if index == 0 else _again(picture, ident)
        cells.append(_panel(name, scene, base))
    return el("div", place, el("div", *cells, cls="panels"), cls="scene")


def _panel(name: str, scene: Scene, base: Html | None) -> Html:
    verdict = judge(scene)
    found, wrong, false = (verdict.verdicts.count(v) for v in ("correct", "wrong_class", "false_positive"))
    extra = [f"{scene.num_dropped} dropped"] if scene.num_dropped else []
    extra += ["cut off"] if scene.truncated else []
    counts = [f"{found} of {len(scene.truth)} found", f"{wrong} wrong class", f"{false} false", *extra]
    title = f"Scene {scene.scene_id}, {name}: {', '.join(counts)}"
    height = PANEL * scene.height / scene.width
    truth = [_shape(o, height, "truth" if i in verdict.found else "missed") for i, o in enumerate(scene.truth)]
    answers = [
        _shape(o, height, _TONES[verdict.verdicts[i]], f", IoU {verdict.ious[i]:.2f}")
        for i, o in enumerate(scene.predictions)
    ]
    return el(
        "figure",
        el(
            "svg",
            el("title", title),
            base or _absent(scene, height),
            *truth,
            *answers,
            viewBox=f"0 0 {PANEL:.0f} {height:.0f}",
            role="img",
            aria_label=title,
        ),
        el("figcaption", el("b", name), el("span", " · ".join(counts)), el("em", f"F1 {verdict.f1:.2f}")),
        cls="panel",
    )


def _shape(item: DetectionObject, height: float, tone: str, detail: str = "") -> Html:
    """One object: its outline, its description on a tag (predictions above, missed truth below), and a tooltip."""
    xs = [b / 999 * PANEL for b in item.bins[0::2]]
    ys = [b / 999 * height for b in item.bins[1::2]]
    if item.kind == "bbox_2d":
        box = {"x": xs[0], "y": ys[0], "width": max(0.5, xs[1] - xs[0]), "height": max(0.5, ys[1] - ys[0])}
        outlines = [el("rect", cls=c, **box) for c in ("halo", f"o-{tone}")]
    else:
        points = " ".join(f"{x:.1f},{y:.1f}" for x, y in zip(xs, ys, strict=True))
        outlines = [el("polygon", cls=c, points=points) for c in ("halo", f"o-{tone}")]
    tip = el("title", f"{dict(LEGEND)[tone]}: {item.desc}{detail}")
    return el("g", tip, *outlines, None if tone == "truth" else _tag(item.desc, xs, ys, height, tone))


def _tag(desc: str, xs: Sequence[float], ys: Sequence[float], height: float, tone: str) -> Html:
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
